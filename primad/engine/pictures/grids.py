"""RoPE positions of a picture's rows in models whose positions have four parts: time, row, column, and one more.

The fourth is 0 for tokens, but not without effect: it rotates the dimensions that the other parts leave.
"""

from __future__ import annotations

from typing import Literal

RowLayout = Literal["", "line", "grid", "framed"]
"""Layouts of rows: none, for a model with one-part positions; a line, each row at its own time; a grid, all at one
time; or a grid with one more row before it, after it and after each of its lines (HunyuanVL)."""
RowTurn = tuple[int, int, int, int]


def turn_of_row(number: int, rows: int, layout: RowLayout, columns: int, *, begin: int, picture: int = 0) -> RowTurn:
    """Return the position of row ``number`` of ``rows``, which begin at time ``begin``; a grid has ``columns`` columns.

    ``picture`` is the index of the picture in its prompt.
    """
    if layout == "grid":
        row, column = divmod(number, columns)
        return begin, begin + row, begin + column, 0
    time = begin + number
    if layout == "line" or number in (0, rows - 1):
        return time, time, time, time
    row, column = divmod(number - 1, columns)
    return time, column, row, picture
