"""By what a picture's rows are turned where a model's positions have four parts: time, row, column, and one more."""

from __future__ import annotations

RowTurn = tuple[int, int, int, int]


def turn_of_row(number: int, rows: int, columns: int, *, framed: bool, begin: int, picture: int = 0) -> RowTurn:
    """That of row ``number`` of the ``rows`` of a grid whose time begins at ``begin``.

    A picture has one time. One that is ``framed`` (HunyuanVL: a row before it and one behind it, and one behind each line)
    has as many times as rows, and the last number says the how manieth ``picture`` of its prompt it is.
    """
    if not framed:
        row, column = divmod(number, columns)
        return begin, begin + row, begin + column, 0
    time = begin + number
    if number in (0, rows - 1):
        return time, time, time, time
    row, column = divmod(number - 1, columns)
    return time, column, row, picture
