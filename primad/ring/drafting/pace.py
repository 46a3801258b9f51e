"""How sure of a guess one must be before a ring computes it ahead, and whether that pays at all for one answer.

As in PipeInfer (Butler et al., 2024) the confidence that is needed rises by a recovery factor where guesses fail, and falls
by a decay factor where the ring was idle although there was a guess. Both adapt: they become bolder while drafts win time.
What they win is measured: the time from token to token with drafts on their way and without. Where it is no shorter with
them there are none for a while, each time for twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BEGINS_AFTER: Final = 4
"""Tokens without drafts, to compare with."""
JUDGED_AFTER: Final = 16
"""Tokens with drafts."""
PAUSES: Final = (32, 1024)
"""Tokens without drafts after they did not pay, for the first time and at most."""
_FADES: Final = 0.95
_CUTOFF: Final = (0.1, 0.4, 0.95)
"""At least, at first, at most."""
_RECOVERY: Final = (0.005, 0.03, 0.1)
_DECAY: Final = (0.8, 0.93, 0.99)
_ADAPTS: Final = 0.98


@dataclass(slots=True)
class _Gaps:
    """The mean time from token to token, of late."""

    sum_s: float = 0.0
    weight: float = 0.0
    count: int = 0

    def add(self, gap_s: float, counts: int) -> None:
        self.sum_s = self.sum_s * _FADES + gap_s
        self.weight = self.weight * _FADES + 1
        self.count += counts

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.weight


class Pace:
    """Of one answer; the confidence that is needed stays as it is unless it ``adapts``. Time is passed in, in seconds on
    any scale.
    """

    def __init__(self, *, adapts: bool = True) -> None:
        self._adapts = adapts
        self._cutoff, self._recovery, self._decay = _CUTOFF[1], _RECOVERY[1], _DECAY[1]
        self._with, self._without = _Gaps(), _Gaps()
        self._last_s: float | None = None
        self._off, self._pause = BEGINS_AFTER, PAUSES[0]
        self._was_refused = False

    @property
    def is_off(self) -> bool:
        """Whether nothing is drafted for now."""
        return self._off > 0

    def wants(self, sure: float) -> bool:
        """Whether a guess is worth an idle place of the ring that holds, with all before it, in the share ``sure``."""
        if self._off:
            return False
        if sure >= self._cutoff:
            return True
        self._was_refused = True
        return False

    def took(self, now: float, *, drafted: bool, missed: bool, worked: bool = False) -> None:
        """A token came: ``drafted`` with drafts on their way, ``missed``: it was another one than the first of them.

        That a drafter ``worked`` without any of it on its way is judged sooner.
        """
        if self._last_s is not None:
            gaps = self._with if drafted or worked else self._without
            gaps.add(now - self._last_s, 1 if drafted or not worked else 2)
        self._last_s = now
        if not self._adapts:
            pass
        elif missed:
            self._cutoff = min(_CUTOFF[2], self._cutoff + self._recovery)
        elif self._was_refused:
            self._cutoff = max(_CUTOFF[0], self._cutoff * self._decay)
        self._was_refused = False
        if self._off:
            self._off -= 1
        elif (drafted or worked) and self._with.count >= JUDGED_AFTER and self._without.count >= BEGINS_AFTER - 1:
            self._judge()

    def _judge(self) -> None:
        if self._with.mean_s < self._without.mean_s:
            self._recovery = max(_RECOVERY[0], self._recovery * _ADAPTS)
            self._decay = max(_DECAY[0], self._decay * _ADAPTS)
            return
        self._recovery = min(_RECOVERY[2], self._recovery / _ADAPTS)
        self._decay = min(_DECAY[2], self._decay / _ADAPTS)
        self._off, self._pause = self._pause, min(2 * self._pause, PAUSES[1])
        self._with = _Gaps()
