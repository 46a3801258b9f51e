"""Cuts a long text so that the tokens of its pieces, concatenated, are the tokens of the text. Pure.

The cost of llama.cpp's search for markers (special tokens written as text) grows with the square of their number: 8,000
short messages took 6 s. Text between markers is tokenised separately, so a text may be cut before a marker, unless
another marker spans the cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

PIECE_CHARS: Final = 1 << 16


def pieces(text: str, markers: Sequence[str], piece_chars: int) -> Iterator[str]:
    """Yield ``text`` in pieces. All but the first begin with one of ``markers``; all but the last have at least
    ``piece_chars`` characters. Only markers that occur early in the text are used."""
    begin = 0
    near = text[:piece_chars]
    found = [marker for marker in markers if not marker[0].isspace() and marker in near]
    while found and len(text) - begin > 2 * piece_chars:
        cut = _next_cut(text, begin + piece_chars, found, markers)
        if cut is None:
            break
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


def _next_cut(text: str, at: int, found: Sequence[str], markers: Sequence[str]) -> int | None:
    while True:
        cut = min((place for marker in found if (place := text.find(marker, at)) >= 0), default=None)
        if cut is None or not _is_crossed(text, cut, markers):
            return cut
        at = cut + 1


def _is_crossed(text: str, cut: int, markers: Sequence[str]) -> bool:
    """Whether a marker begins before ``cut`` and ends after it."""
    longest = max(map(len, markers))
    around = text[max(0, cut - longest) : cut + longest]
    middle = min(cut, longest)
    return any(
        around.find(marker, max(0, middle - len(marker) + 1), middle + len(marker) - 1) >= 0 for marker in markers
    )
