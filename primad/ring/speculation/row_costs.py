"""What a step of several rows takes in a ring, in steps of one row: as it was planned, and more and more as it was measured.

A profile has times of some numbers of rows, and takes those between to lie on a line. Kernels go by their own numbers, and
three rows may take little longer than two: what a step really takes says how many drafts of it pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_LATEST: Final = 0.1
"""The share of the latest step in what is believed."""
_LATE: Final = 1.5
"""A step that takes more than so many times what is believed was held up by something else as well."""


class RowCosts:
    """Of steps of 1, 2, ... rows, which were ``planned`` to take these times as long as one of a single row."""

    def __init__(self, planned: Sequence[float]) -> None:
        self._of = list(planned)

    def __getitem__(self, rows: slice) -> Sequence[float]:
        """Those of ``rows``, as of a sequence that begins with that of one row."""
        return self._of[rows]

    def __len__(self) -> int:
        return len(self._of)

    def add(self, rows: int, cost: float) -> None:
        """A step of so many rows took ``cost`` times as long as one row by itself does."""
        believed = self._of[rows - 1]
        cost = min(max(1.0, cost), _LATE * believed)
        self._of[rows - 1] += (cost - believed) * _LATEST
