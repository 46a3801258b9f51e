"""Time limit of a search, in processor time, so that other load on the machine makes no plan worse."""

from __future__ import annotations

import time


class TimeLimit:
    """A budget of processor seconds that starts now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end_s = time.process_time() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; negative once the limit is exceeded."""
        return self._end_s - time.process_time()

    def part(self, share: float, seconds: float = float("inf")) -> TimeLimit:
        """Return a limit of a ``share`` of the seconds left, at most ``seconds``."""
        return TimeLimit(min(seconds, share * self.left_s))
