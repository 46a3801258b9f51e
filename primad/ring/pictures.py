"""A picture's rows in a prompt: each has an id below 0, derived from the picture's file, in place of a token.

So everything that depends on tokens works for pictures as well: prompts that begin with the same picture share its
cells, KV blocks are identified by it, and a ring that is formed again computes it again. The rows themselves come
separately from the prompt, and no other device has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from primad.engine.pictures.grids import RowLayout, RowTurn, turn_of_row
from primad.engine.pictures.messages import EncodedPicture, TokenRun

_FLAGS: Final = 2
_BEGINS: Final = 1
_LOOKS_AHEAD: Final = 2


class PictureRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a picture from position ``first`` of a prompt on: float32, little-endian, of a ``layout`` in
    ``columns``."""

    first: int
    rows: int
    content: bytes
    layout: RowLayout = ""
    columns: int = 0

    @property
    def positions(self) -> int:
        """The number of RoPE positions that the rows take."""
        return max(self.columns, self.rows // self.columns) if self.layout == "grid" else self.rows


def picture_ids(digest: str, run: int, rows: int, *, looks_ahead: bool) -> list[int]:
    """Ids, all below 0, of the ``rows`` rows of run ``run`` of the picture with digest ``digest``.

    Each id has 29 bits of a hash: two pictures of 16 rows have the same ids by chance once in 2^464.
    """
    seed = f"{digest} {run}".encode()
    words = hashlib.shake_128(seed).digest(4 * rows)
    hashes = [int.from_bytes(words[at : at + 4], "little") >> 3 for at in range(0, len(words), 4)]
    flags = _LOOKS_AHEAD if looks_ahead else 0
    return [~((each << _FLAGS) | flags | (0 if i else _BEGINS)) for i, each in enumerate(hashes)]


def placed(picture: EncodedPicture, first: int) -> tuple[list[int], list[PictureRows]]:
    """The tokens and ids for ``picture`` in a prompt from position ``first`` on, and its rows."""
    prompt, pictures = list[int](), list[PictureRows]()
    for number, run in enumerate(picture.runs):
        if isinstance(run, TokenRun):
            prompt += run.tokens
            continue
        pictures.append(PictureRows(first + len(prompt), run.rows, run.content, run.layout, run.columns))
        prompt += picture_ids(picture.digest + picture.encoder, number, run.rows, looks_ahead=run.looks_ahead)
    return prompt, pictures


def looks_ahead(token: int) -> bool:
    """Whether ``token`` is a picture's row that attends to those after it: its run belongs in one step."""
    return token < 0 and bool(~token & _LOOKS_AHEAD)


def run_end(prompt: Sequence[int], first: int) -> int:
    """The end of the run of a picture's rows that contains ``first``."""
    return next((at for at in range(first + 1, len(prompt)) if prompt[at] >= 0 or ~prompt[at] & _BEGINS), len(prompt))


def text_end(prompt: Sequence[int], first: int, last: int) -> int:
    """The end of the text tokens from ``first`` on, at most ``last``."""
    return next((at for at in range(first, last) if prompt[at] < 0), last)


def longest_run(prompt: Sequence[int]) -> int:
    """Number of rows of the longest run that belongs in one step; 0 if there is none."""
    firsts = (at for at, token in enumerate(prompt) if looks_ahead(token) and ~token & _BEGINS)
    return max((run_end(prompt, at) - at for at in firsts), default=0)


def content_of(pictures: Sequence[PictureRows], first: int, last: int) -> bytes:
    """The rows from position ``first`` to ``last``, which are all of one picture."""
    found = next(each for each in pictures if each.first <= first and last <= each.first + each.rows)
    size = len(found.content) // found.rows
    return found.content[size * (first - found.first) : size * (last - found.first)]


def rope_of(pictures: Sequence[PictureRows], positions: Sequence[int]) -> list[int]:
    """The four RoPE numbers of each row at ``positions`` of a prompt with ``pictures``: time, row, column and one more;
    empty if they are all the same as for tokens alone.

    Tokens after a picture come as far after it as its longer side is long, which is less than its number of rows; in
    the KV cache each row still has its own cell.
    """
    if not any(each.layout for each in pictures):
        return []
    found = [_turned(pictures, at) for at in positions]
    is_plain = all(turn == (at, at, at, 0) for turn, at in zip(found, positions, strict=True))
    return [] if is_plain else [part for turn in found for part in turn]


def _turned(pictures: Sequence[PictureRows], at: int) -> RowTurn:
    time = at
    for number, each in enumerate(pictures):
        inside = at - each.first
        if each.layout and 0 <= inside < each.rows:
            return turn_of_row(inside, each.rows, each.layout, each.columns, begin=time - inside, picture=number)
        if each.first + each.rows <= at:
            time -= each.rows - each.positions
    return time, time, time, 0
