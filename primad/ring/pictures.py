"""A picture's rows in a prompt: each has an id below 0, which says of what file it is, in place of a token.

So whatever is decided by tokens is decided for pictures as well: prompts that begin with the same picture share its cells,
KV blocks are known by it, and a ring that is formed anew computes it again. The rows themselves come beside the prompt, and
no other device has them.
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
    """What stands from position ``first`` of a prompt on: rows of float32, little-endian, of a ``layout`` in ``columns``."""

    first: int
    rows: int
    content: bytes
    layout: RowLayout = ""
    columns: int = 0

    @property
    def positions(self) -> int:
        """By how much those behind it are turned further."""
        return max(self.columns, self.rows // self.columns) if self.layout == "grid" else self.rows


def picture_ids(digest: str, run: int, rows: int, *, looks_ahead: bool) -> list[int]:
    """Ids, all below 0, of the ``rows`` of run ``run`` of the picture that is known by ``digest``.

    They have 29 bits of a hash each: two pictures of 16 rows have the same ones by chance once in 2^464.
    """
    seed = f"{digest} {run}".encode()
    words = hashlib.shake_128(seed).digest(4 * rows)
    hashes = [int.from_bytes(words[at : at + 4], "little") >> 3 for at in range(0, len(words), 4)]
    flags = _LOOKS_AHEAD if looks_ahead else 0
    return [~((each << _FLAGS) | flags | (0 if i else _BEGINS)) for i, each in enumerate(hashes)]


def placed(picture: EncodedPicture, first: int) -> tuple[list[int], list[PictureRows]]:
    """What stands for ``picture`` in a prompt from position ``first`` on, and its rows."""
    prompt, pictures = list[int](), list[PictureRows]()
    for number, run in enumerate(picture.runs):
        if isinstance(run, TokenRun):
            prompt += run.tokens
            continue
        pictures.append(PictureRows(first + len(prompt), run.rows, run.content, run.layout, run.columns))
        prompt += picture_ids(picture.digest + picture.encoder, number, run.rows, looks_ahead=run.looks_ahead)
    return prompt, pictures


def looks_ahead(token: int) -> bool:
    """Whether it is a picture's row that sees those behind it: its run belongs in one step."""
    return token < 0 and bool(~token & _LOOKS_AHEAD)


def run_end(prompt: Sequence[int], first: int) -> int:
    """The end of the run of a picture's rows in which ``first`` is."""
    return next((at for at in range(first + 1, len(prompt)) if prompt[at] >= 0 or ~prompt[at] & _BEGINS), len(prompt))


def text_end(prompt: Sequence[int], first: int, last: int) -> int:
    """Where the tokens from ``first`` on end, ``last`` at the latest."""
    return next((at for at in range(first, last) if prompt[at] < 0), last)


def longest_run(prompt: Sequence[int]) -> int:
    """Rows of the longest run that belongs in one step; 0 where there is none."""
    firsts = (at for at, token in enumerate(prompt) if looks_ahead(token) and ~token & _BEGINS)
    return max((run_end(prompt, at) - at for at in firsts), default=0)


def content_of(pictures: Sequence[PictureRows], first: int, last: int) -> bytes:
    """The rows from position ``first`` to ``last``, which are all of one picture."""
    found = next(each for each in pictures if each.first <= first and last <= each.first + each.rows)
    size = len(found.content) // found.rows
    return found.content[size * (first - found.first) : size * (last - found.first)]


def rope_of(pictures: Sequence[PictureRows], positions: Sequence[int]) -> list[int]:
    """The four numbers by which each row is turned that stands at ``positions`` of a prompt with ``pictures``: its time,
    row, column and one more; none where they all are what they are of tokens alone.

    What is behind a picture comes as far behind it as its longer side is long, which are fewer than its rows; in the cache
    each row has a cell of its own all the same.
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
