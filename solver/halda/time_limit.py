"""Time that a search may take: of the processor, so that what else a machine does makes no plan worse."""

from __future__ import annotations

import time


class TimeLimit:
    """Seconds of the processor from now on, whatever they are spent on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end_s = time.process_time() + seconds

    @property
    def left_s(self) -> float:
        """What is left; less than 0 where it was not kept to."""
        return self._end_s - time.process_time()

    def part(self, share: float, seconds: float = float("inf")) -> TimeLimit:
        """A ``share`` of what is left, and at most so many ``seconds``."""
        return TimeLimit(min(seconds, share * self.left_s))
