"""How long a rank waits for another one's part before that is late: a device that is frozen, or whose link to this one alone
is cut, says nothing, and its connection stays.

All ranks compute between the same two sums, each its share. So nothing of a part may come for some times as long as this
rank computed itself since the last one and parts took of late, and for ``MIN_S`` in any case, however quick they are. In the
first steps of a process, in which it may read its weights, nothing is known.

Polling for a short wait saves waking. Whoever polls in vain may take the core from the rank that it waits for.
"""

from __future__ import annotations

from typing import Final

MIN_S: Final = 4.0
"""As silence on the control link (``gone_after``), so that whoever is frozen is found by both at about the same time."""
FACTOR: Final = 8.0
FADE: Final = 0.9
"""What is left of the longest wait at the next one."""
KNOWN_STEPS: Final = 2
"""The warm-up pass and the first chunk or token."""
SPIN_S: Final = 0.0003
"""Who polls for longer takes time from those that it waits for, where they share cores: with 2 ms a sum of two ranks on two
busy cores took 1.2 times as long, of four 1.5 times."""


class PeerPatience:
    """At most ``timeout_s`` for all of a part. Time is passed in, in seconds on any scale."""

    def __init__(self, timeout_s: float, min_s: float = MIN_S) -> None:
        self._timeout_s, self._min_s = timeout_s, min_s
        self._steps = 0
        self._longest_s = 0.0
        self._ended = 0.0
        self.spin_s = SPIN_S
        """How long to poll before sleeping: not at all behind a wait for which that was in vain."""

    def begin(self, now: float) -> None:
        """Another step is led or followed."""
        self._steps += 1
        self._ended = now

    def until(self, began: float, moved: float) -> float:
        """When a wait that ``began`` is too long, in which something came or went last when it ``moved``."""
        at_most = began + self._timeout_s
        if self._steps <= KNOWN_STEPS:
            return at_most
        expected_s = max(0.0, began - self._ended) + self._longest_s
        return min(at_most, moved + max(self._min_s, FACTOR * expected_s))

    def ended(self, began: float, now: float) -> None:
        """All parts of a wait that ``began`` are here."""
        self._longest_s = max(now - began, FADE * self._longest_s)
        self._ended = now
        self.spin_s = SPIN_S if now - began < 2 * SPIN_S else 0.0
