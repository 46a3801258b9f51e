"""Which chunk to ask of whom next, when several devices hold the layers that are missing. Decides only.

    lacking ── take(source) ──► asked ── arrived ──► gone for good
       ▲                          │
       └───────── drop(source) ───┘

A source that has nothing left to be asked helps out with what others were asked and have not sent yet (the endgame): one
piece at a time, the one that was asked longest ago, and no piece of more than ``MOST_ASKED`` sources. So a slow source holds
nobody up, and what is sent twice is a few chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

MOST_ASKED: Final = 3
TREE: Final = -1
"""The number of the piece that is a layer's tree."""


class ChunkId(NamedTuple):
    """Chunk ``number`` of the layer ``digest``, or its ``TREE``."""

    digest: str
    number: int


class ChunkQueue:
    """Pieces that are lacking, and who was asked for which. ``under_way`` pieces are asked of a source at a time."""

    def __init__(self, sources: Iterable[str], under_way: int) -> None:
        assert under_way > 0
        self._under_way = under_way
        self._holds: dict[str, frozenset[str] | None] = dict.fromkeys(sources)
        self._lacking: dict[str, dict[int, None]] = {}
        self._asked: dict[ChunkId, list[str]] = {}
        self._given: dict[str, dict[ChunkId, None]] = {source: {} for source in self._holds}

    def add(self, digest: str, numbers: Iterable[int]) -> None:
        """These pieces of layer ``digest`` are lacking; none of them was added before."""
        fresh = dict.fromkeys(numbers)
        if fresh:
            self._lacking.setdefault(digest, {}).update(fresh)

    def holds(self, source: str, digests: Iterable[str]) -> None:
        """``source`` was reached and has these layers. Until then it may have any, and is asked for none."""
        assert source in self._holds
        self._holds[source] = frozenset(digests)

    def take(self, source: str) -> ChunkId | None:
        """The next piece to ask of ``source``, which counts as asked from now on; None when there is none for it now."""
        holds, given = self._holds.get(source), self._given.get(source, {})
        if holds is None or len(given) >= self._under_way:
            return None
        piece = self._fresh(holds)
        if piece is None and not given:
            piece = self._overdue(holds)
        if piece is not None:
            given[piece] = None
            self._asked.setdefault(piece, []).append(source)
        return piece

    def _fresh(self, holds: frozenset[str]) -> ChunkId | None:
        for digest, numbers in self._lacking.items():
            if digest in holds:
                number = next(iter(numbers))
                del numbers[number]
                if not numbers:
                    del self._lacking[digest]
                return ChunkId(digest, number)
        return None

    def _overdue(self, holds: frozenset[str]) -> ChunkId | None:
        trees = [piece for piece in self._asked if piece.number == TREE]
        for piece in trees or self._asked:  # a tree that is awaited brings new chunks: it is not the end yet
            if piece.digest in holds and len(self._asked[piece]) < MOST_ASKED:
                return piece
        return None

    def answered(self, source: str, piece: ChunkId) -> bool:
        """``source`` sent ``piece``, right or wrong, and may be asked for another; False when it was not asked for it.

        The piece is awaited until it ``arrived`` or the source is dropped.
        """
        given = self._given.get(source, {})
        if piece not in given:
            return False
        del given[piece]
        return True

    def arrived(self, piece: ChunkId) -> bool:
        """The right bytes of ``piece`` are here; False when they had arrived before or it is not wanted."""
        return self._asked.pop(piece, None) is not None

    def drop(self, source: str) -> None:
        """Ask ``source`` for nothing more; what only it was asked for is lacking again, and goes first."""
        self._holds.pop(source, None)
        self._given.pop(source, None)
        for piece in [piece for piece, asked in self._asked.items() if source in asked]:
            self._unask(source, piece)

    def refused(self, source: str, digest: str) -> None:
        """``source`` does not have layer ``digest`` after all; its other answers about it may still come."""
        held = self._holds.get(source)
        if held is None:
            return
        self._holds[source] = held - {digest}
        for piece in [piece for piece, asked in self._asked.items() if piece.digest == digest and source in asked]:
            self._unask(source, piece)

    def _unask(self, source: str, piece: ChunkId) -> None:
        asked = self._asked.get(piece)
        if asked is None or source not in asked:
            return
        asked.remove(source)
        if not asked:
            del self._asked[piece]
            self._lacking = {piece.digest: {piece.number: None} | self._lacking.pop(piece.digest, {})} | self._lacking

    @property
    def done(self) -> bool:
        """Whether nothing is lacking and nothing is awaited."""
        return not self._lacking and not self._asked

    def under_way(self, source: str) -> int:
        """How many pieces ``source`` was asked for and has not answered."""
        return len(self._given.get(source, {}))

    def replaceable(self, source: str) -> bool:
        """Whether other reached sources hold every layer that ``source`` was asked for."""
        others = [holds for name, holds in self._holds.items() if name != source and holds is not None]
        return all(any(piece.digest in holds for holds in others) for piece in self._given.get(source, {}))

    def unavailable(self) -> list[str]:
        """The layers of which something is lacking that no source can give, those not yet reached included."""
        holders = list(self._holds.values())
        if None in holders:
            return []
        return [digest for digest in self._lacking if not any(digest in held for held in holders if held is not None)]
