"""By what a picture's rows are turned where a model's positions have four parts: time, row, column, and one more.

That is 0 for tokens, and not without effect: what is left over of the others' pairs is turned by it.
"""

from __future__ import annotations

from typing import Literal

RowLayout = Literal["", "line", "grid", "framed"]
"""What rows are: nothing but rows, of a model whose positions have one part; a line, each at its own time; a grid, all at
one time; or a grid with a row before it, one behind it, and one behind each of its lines (HunyuanVL)."""
RowTurn = tuple[int, int, int, int]


def turn_of_row(number: int, rows: int, layout: RowLayout, columns: int, *, begin: int, picture: int = 0) -> RowTurn:
    """That of row ``number`` of ``rows``, which begin at time ``begin``; a grid's lines have so many ``columns``.

    It is of the how manieth ``picture`` of its prompt.
    """
    if layout == "grid":
        row, column = divmod(number, columns)
        return begin, begin + row, begin + column, 0
    time = begin + number
    if layout == "line" or number in (0, rows - 1):
        return time, time, time, time
    row, column = divmod(number - 1, columns)
    return time, column, row, picture
