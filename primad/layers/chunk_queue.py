"""Which chunk to request from which source next, when several devices hold the missing layers. Decides only.

    lacking ── take(source) ──► asked ── arrived ──► done
       ▲                          │
       └── drop(source), refused ─┘

A chunk is requested from one source at a time. A source that stalls is dropped, and its requests go to the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

TREE: Final = -1
"""The number of the piece that is a layer's tree."""


class ChunkId(NamedTuple):
    """Chunk ``number`` of the layer ``digest``, or its ``TREE``."""

    digest: str
    number: int


class ChunkQueue:
    """Missing pieces, and the source each was requested from. A source has up to ``under_way`` requests at a time."""

    def __init__(self, sources: Iterable[str], under_way: int) -> None:
        assert under_way > 0
        self._under_way = under_way
        self._holds: dict[str, frozenset[str] | None] = dict.fromkeys(sources)
        self._lacking: dict[str, dict[int, None]] = {}
        self._asked: dict[str, set[ChunkId]] = {source: set() for source in self._holds}

    def add(self, digest: str, numbers: Iterable[int]) -> None:
        """Add missing pieces of layer ``digest``; none of them may have been added before."""
        fresh = dict.fromkeys(numbers)
        if fresh:
            self._lacking.setdefault(digest, {}).update(fresh)

    def holds(self, source: str, digests: Iterable[str]) -> None:
        """``source`` was reached and holds the layers ``digests``."""
        if source in self._holds:
            self._holds[source] = frozenset(digests)

    def take(self, source: str) -> ChunkId | None:
        """The next piece to request from ``source``; None while it has enough requests or holds no missing piece."""
        holds = self._holds.get(source)
        if holds is None or len(self._asked[source]) >= self._under_way:
            return None
        for digest, numbers in self._lacking.items():
            if digest in holds:
                piece = ChunkId(digest, next(iter(numbers)))
                del numbers[piece.number]
                if not numbers:
                    del self._lacking[digest]
                self._asked[source].add(piece)
                return piece
        return None

    def is_asked(self, source: str, piece: ChunkId) -> bool:
        """Whether a request for ``piece`` to ``source`` is outstanding."""
        return piece in self._asked.get(source, ())

    def arrived(self, source: str, piece: ChunkId) -> None:
        """``source`` sent the right bytes of ``piece``, which it was asked for."""
        self._asked[source].remove(piece)

    def refused(self, source: str, piece: ChunkId) -> None:
        """``source`` does not have the layer of ``piece`` after all; its other replies about the layer may still arrive."""
        held = self._holds[source]
        assert held is not None
        self._holds[source] = held - {piece.digest}
        self._asked[source].remove(piece)
        self._return(piece)

    def drop(self, source: str) -> None:
        """Request nothing more from ``source``; its outstanding chunks are missing again."""
        self._holds.pop(source, None)
        for piece in self._asked.pop(source, ()):
            self._return(piece)

    def _return(self, piece: ChunkId) -> None:
        """Put ``piece`` back at the front of the queue."""
        self._lacking = {piece.digest: {piece.number: None} | self._lacking.pop(piece.digest, {})} | self._lacking

    def under_way(self, source: str) -> int:
        """Number of outstanding requests to ``source``."""
        return len(self._asked.get(source, ()))

    def unavailable(self) -> list[str]:
        """The layers with missing parts that no source holds, counting sources that were not reached yet."""
        holders = list(self._holds.values())
        if None in holders:
            return []
        return [digest for digest in self._lacking if not any(digest in held for held in holders if held is not None)]
