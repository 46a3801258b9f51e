"""Which generations' next tokens one step computes together.

A step of several rows costs less than the same number of steps of one row, since each step reads the weights from
memory or disk. But a ring of several devices is busy only with several steps in it, and rows are bit-identical to rows
computed alone only within limits of llama.cpp's kernels (``Batching.rows`` and ``cells``).

llama.cpp computes rows of several sequences in one pass only if the sequences' numbers are consecutive. Where a step
costs as much as all its rows, as with layers that are read from disk, padding rows fill the gaps between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sequence whose next row could be computed, with ``cells`` of context, for the user ``owner``."""

    sequence: int
    owner: str
    cells: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """At most ``rows`` rows a step, and ``steps`` such steps in flight, or more where that is necessary.

    With ``cells`` tokens of context or more a row is computed alone (None: never). ``pads``: gaps are filled.
    ``replays`` is how many tokens that an earlier epoch sampled are computed in one step.
    """

    rows: int = 1
    steps: int = 1
    cells: int | None = None
    pads: bool = False
    replays: int = 1

    def __post_init__(self) -> None:
        assert self.rows >= 1
        assert self.steps >= 1
        assert self.replays >= 1
        assert self.cells is None or not self.pads, "a row that fills a gap has cells as well"

    def max_steps(self, decoding: int) -> int:
        """How many steps may be in the ring while ``decoding`` generations wait for tokens."""
        return max(self.steps, math.ceil(decoding / self.rows))

    def replayed(self, cells: int, known: int) -> int:
        """The end of the next step of a sequence of ``cells`` cells whose tokens up to ``known`` are known."""
        return min(cells + self.in_one_step(cells, self.replays), known)

    def in_one_step(self, cells: int, rows: int) -> int:
        """How many of ``rows`` rows of one sequence, with ``cells`` of context, one step may have."""
        return rows if self.cells is None else max(1, min(rows, self.cells - cells))

    def together(self, ready: Sequence[Candidate], decoding: int) -> range:
        """The sequences of the next step: the first of those that are ``ready``, and others that may be computed with
        it.

        Several owners get equal shares of the rows. ``ready`` are in the order in which they waited.
        """
        first, size = ready[0], math.ceil(decoding / self.max_steps(decoding))
        alone = range(first.sequence, first.sequence + 1)
        if size <= 1 or self._is_alone(first):
            return alone
        owners = {each.owner for each in ready}
        left = dict.fromkeys(owners, math.ceil(size / len(owners)))
        numbers: set[int] = set()
        for each in ready:
            span = max(*numbers, each.sequence) - min(*numbers, each.sequence) + 1 if numbers else 1
            fits = len(numbers) < size and (span <= self.rows or not self.pads)
            if fits and left[each.owner] and not self._is_alone(each):
                left[each.owner] -= 1
                numbers.add(each.sequence)
        if self.pads:
            return range(min(numbers), max(numbers) + 1)
        low = high = first.sequence
        while low - 1 in numbers:
            low -= 1
        while high + 1 in numbers:
            high += 1
        return range(low, high + 1)

    def _is_alone(self, candidate: Candidate) -> bool:
        return self.cells is not None and candidate.cells >= self.cells
