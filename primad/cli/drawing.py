"""Draws a response as it arrives, at most 15 times a second: drawing takes CPU time from the ring."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from primad.cli.conversation import Piece

BETWEEN_S: Final = 1 / 15


class Drawing:
    """Passes pieces to ``draw``; adjacent ones of a kind are merged."""

    def __init__(self, draw: Callable[[Piece], None], between_s: float = BETWEEN_S) -> None:
        self._draw, self._between_s = draw, between_s
        self._waiting: list[Piece] = []
        self._next: asyncio.TimerHandle | None = None

    def add(self, pieces: list[Piece]) -> None:
        """Draw ``pieces`` now, or together with the next ones."""
        self._waiting += pieces
        if self._waiting and self._next is None:
            self._tick()

    def _tick(self) -> None:
        self._next = None
        if self._waiting:
            self._show()
            self._next = asyncio.get_running_loop().call_later(self._between_s, self._tick)

    def finish(self) -> None:
        """Draw the rest."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._show()

    def _show(self) -> None:
        waiting, self._waiting = self._waiting, []
        while waiting:
            kind = waiting[0].is_thought
            count = next((i for i, piece in enumerate(waiting) if piece.is_thought != kind), len(waiting))
            self._draw(Piece("".join(piece.text for piece in waiting[:count]), is_thought=kind))
            del waiting[:count]
