"""The cost of a step of several rows in a ring, in steps of one row: first as planned, gradually as measured.

A profile has times of some numbers of rows and interpolates linearly between them. Kernels have their own batch sizes,
and three rows may take little longer than two: the measured time of a step tells how many drafts in it pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_LATEST: Final = 0.1
"""Weight of the latest step."""
_LATE: Final = 1.5
"""A step that takes more than this many times its estimate was also delayed by something else."""


class RowCosts:
    """Costs of steps of 1, 2, ... rows; ``planned`` has them as multiples of the time of a single row."""

    def __init__(self, planned: Sequence[float]) -> None:
        self._of = list(planned)

    def __getitem__(self, rows: slice) -> Sequence[float]:
        """Costs of ``rows``, as in a sequence that begins with the cost of one row."""
        return self._of[rows]

    def __len__(self) -> int:
        return len(self._of)

    def add(self, rows: int, cost: float) -> None:
        """Note that a step of ``rows`` rows took ``cost`` times as long as one row alone."""
        believed = self._of[rows - 1]
        cost = min(max(1.0, cost), _LATE * believed)
        self._of[rows - 1] += (cost - believed) * _LATEST
