"""How long ring passes take, and which one takes much longer than it should.

Every hop keeps the order of the steps, so only the step in flight that left first can be late; the others wait after
it. Its clock starts when it left, or when the step before it came back. Ring passes of one row (decode) and of several
(prefill) are measured separately: the former are expected to take as long as the longest recent one, the latter that
plus a time for each row. The recent maximum fades, so that one bad ring pass does not excuse later ones for ever.

Before any ring pass was measured nothing is known of the ring, which may load from a slow disk while it computes, so
the first one is given longer; the first of several rows gets as long as its rows would take one by one.
"""

from __future__ import annotations

import math
from typing import Final

from primad.ring.messages import Overdue

TIMEOUT_FACTOR: Final = 8.0
"""A ring pass may take this many times its expected time."""
MIN_WAIT_S: Final = 1.0
"""No ring pass is late before this, however fast ring passes are."""
FIRST_WAIT_S: Final = 5.0
"""The first ring pass, and the first of several rows, is not late before this."""
FADE: Final = 0.9
"""Share of a maximum that is left at the next ring pass."""


class Lateness:
    """The steps in flight, in the order in which they left. Time is passed in, in seconds on any scale."""

    def __init__(self) -> None:
        self._out: dict[int, tuple[int, float]] = {}
        self._returned_s = -math.inf
        self._returned = 0
        self._notices = 0
        self._one_row_s: float | None = None
        self._per_row_s: float | None = None

    def left(self, step: int, rows: int, now: float) -> None:
        """Note that ``step`` left for the next device."""
        self._out[step] = (rows, now)

    def back(self, step: int, now: float) -> None:
        """Note that ``step`` came back, and learn from its time."""
        rows, left_s = self._out.pop(step)
        self._learn(rows, now - max(left_s, self._returned_s))
        self._returned_s = now
        self._returned += 1
        self._notices = 0

    def expected_s(self, rows: int) -> float | None:
        """Recent time of a ring pass of ``rows`` rows; None before such a ring pass was measured."""
        if rows <= 1:
            return self._one_row_s
        if self._per_row_s is None:
            return None
        return (self._one_row_s or 0.0) + rows * self._per_row_s

    def due_s(self) -> float:
        """The time at which ``overdue`` has something to report next; infinity when no step is in flight."""
        if not self._out:
            return math.inf
        rows, left_s = next(iter(self._out.values()))
        return max(left_s, self._returned_s) + math.ldexp(self._patience_s(rows), self._notices)

    def _patience_s(self, rows: int) -> float:
        expected_s = self.expected_s(rows)
        if expected_s is not None:
            return max(MIN_WAIT_S, TIMEOUT_FACTOR * expected_s)
        return max(FIRST_WAIT_S, rows * (self._one_row_s or 0.0))

    def overdue(self, now: float) -> Overdue | None:
        """Report the late step, at first and at each doubling of the wait; None otherwise."""
        if not self._out or now < self.due_s():
            return None
        while self.due_s() <= now:
            self._notices += 1
        step, (rows, left_s) = next(iter(self._out.items()))
        return Overdue(
            step=step,
            waited_s=now - max(left_s, self._returned_s),
            ring_passes=self._returned,
            is_first=self.expected_s(rows) is None,
        )

    def _learn(self, rows: int, took_s: float) -> None:
        if rows <= 1:
            self._one_row_s = max(took_s, FADE * (self._one_row_s or 0.0))
        else:
            per_row_s = max(0.0, took_s - (self._one_row_s or 0.0)) / rows
            self._per_row_s = max(per_row_s, FADE * (self._per_row_s or 0.0))
