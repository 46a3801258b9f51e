"""A stand-in for any model: what it refuses, every model refuses. Pure.

So a request can be refused before its model is loaded. The stand-in's vocabulary has every token and its context has
room for every prompt; a refusal that another model may not share is marked ``of_model``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from primad.api.answering.backend import FillInTokens, ModelNames, ServedModel

_FILL_IN: Final = FillInTokens(before=0, after=0, middle=0)


@dataclass(frozen=True, slots=True)
class AnyVocabulary:
    """A ``Vocabulary`` in which every text is one token and no token has a text."""

    size: int = 2**31
    chat_template: str | None = None
    bos: str = ""
    eos: str = ""
    fill_in: FillInTokens | None = _FILL_IN
    longest_chars: int | None = None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return one token, whatever ``text`` is."""
        del text, add_special, parse_special
        return [0]

    def piece(self, token: int) -> bytes:
        """Return no bytes."""
        del token
        return b""

    def piece_or_marker(self, token: int) -> bytes:
        """Return no bytes."""
        del token
        return b""

    def name(self, token: int) -> str:
        """Return an empty name."""
        del token
        return ""


ANY_MODEL: Final = ServedModel(
    id="",
    created=0,
    context_tokens=2**31 - 1,
    names=ModelNames(any_model=True),
    vocabulary=AnyVocabulary(),
    sees=True,
    hears=True,
    fetches=True,
)
"""The model itself; any name means it."""
