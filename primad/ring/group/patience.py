"""How long a rank waits for another rank's part before it is late: a device that is frozen, or whose link to this one
alone is cut, sends nothing, and its connection stays.

All ranks compute their share between the same two sums. So a part may stay silent for several times as long as this
rank computed since the last sum plus the recent waits for parts, and for at least ``MIN_S``, however short these are.
In the first steps of a process, in which it may read its weights, nothing is known.

Polling during a short wait saves a wake-up. A rank that polls in vain may take the core from the rank that it waits
for.
"""

from __future__ import annotations

from typing import Final

MIN_S: Final = 4.0
"""As silence on the control link (``gone_after``), so that both notice a frozen device at about the same time."""
FACTOR: Final = 8.0
FADE: Final = 0.9
"""Share of the longest wait that is left at the next one."""
KNOWN_STEPS: Final = 2
"""The warm-up pass and the first chunk or token."""
SPIN_S: Final = 0.0003
"""Longer polling takes time from the awaited ranks, where they share cores: with 2 ms a sum of two ranks on two busy
cores took 1.2 times as long, of four 1.5 times."""


class PeerPatience:
    """Allows at most ``timeout_s`` for a whole part. Time is passed in, in seconds on any scale."""

    def __init__(self, timeout_s: float, min_s: float = MIN_S) -> None:
        self._timeout_s, self._min_s = timeout_s, min_s
        self._steps = 0
        self._longest_s = 0.0
        self._ended = 0.0
        self.spin_s = SPIN_S
        """How long to poll before sleeping: not at all after a wait in which polling was in vain."""

    def begin(self, now: float) -> None:
        """Begin another step, led or followed."""
        self._steps += 1
        self._ended = now

    def until(self, began: float, moved: float) -> float:
        """The time at which a wait that ``began`` is too long, if data last ``moved`` at that time."""
        at_most = began + self._timeout_s
        if self._steps <= KNOWN_STEPS:
            return at_most
        expected_s = max(0.0, began - self._ended) + self._longest_s
        return min(at_most, moved + max(self._min_s, FACTOR * expected_s))

    def ended(self, began: float, now: float) -> None:
        """Note that all parts of a wait that ``began`` have come."""
        self._longest_s = max(now - began, FADE * self._longest_s)
        self._ended = now
        self.spin_s = SPIN_S if now - began < 2 * SPIN_S else 0.0
