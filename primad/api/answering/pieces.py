"""The tokens of a model as text, in one table: what the daemon needs of a vocabulary, without llama.cpp. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Final

import msgspec
import numpy as np

CONTROL: Final = 1
"""The token adds nothing to a text."""
END: Final = 2
"""The token ends responses."""


class PieceTable(msgspec.Struct, frozen=True, kw_only=True):
    """All tokens concatenated: ``names`` holds their bytes, ``lengths`` (uint32) the number of bytes of each, ``kinds``
    one byte each, with the flags ``CONTROL`` and ``END``."""

    names: bytes
    lengths: bytes
    kinds: bytes
    bos: str
    eos: str
    chat_template: str | None

    @classmethod
    def of(cls, tokens: Iterable[tuple[bytes, int]], *, bos: str, eos: str, chat_template: str | None) -> PieceTable:
        """Return the table of ``tokens``, in order."""
        names, kinds = zip(*tokens, strict=True)
        return cls(
            names=b"".join(names),
            lengths=np.array([len(name) for name in names], "<u4").tobytes(),
            kinds=bytes(kinds),
            bos=bos,
            eos=eos,
            chat_template=chat_template,
        )


class ModelPieces:
    """``TokenPieces`` read from a table."""

    def __init__(self, table: PieceTable) -> None:
        self._names, self._kinds = table.names, table.kinds
        self._offsets = [0, *accumulate(np.frombuffer(table.lengths, "<u4").tolist())]
        self.bos, self.eos, self.chat_template = table.bos, table.eos, table.chat_template
        self.size = len(table.kinds)
        self.ends = tuple(np.flatnonzero(np.frombuffer(table.kinds, np.uint8) & END).tolist())

    def piece(self, token: int) -> bytes:
        """Return the bytes that ``token`` adds to a text; none for control tokens."""
        return b"" if self._kinds[token] & CONTROL else self._bytes(token)

    def piece_or_marker(self, token: int) -> bytes:
        """Like ``piece``, but return the name of a control token, unless it ends responses."""
        return b"" if self._kinds[token] == CONTROL | END else self._bytes(token)

    def name(self, token: int) -> str:
        """Return a printable name of any token, including control tokens."""
        return self._bytes(token).decode("utf-8", errors="replace")

    def _bytes(self, token: int) -> bytes:
        return self._names[self._offsets[token] : self._offsets[token + 1]]
