"""A lock that callers hold in turn: a caller with many tasks delays another caller by one task only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from primad.system.shares import Turns


class TurnLock:
    """Held by one task at a time."""

    def __init__(self) -> None:
        self._waiting = Turns[asyncio.Future[None]]()
        self.is_held = False

    @asynccontextmanager
    async def held(self, caller: str) -> AsyncIterator[None]:
        """Hold it for ``caller``."""
        if self.is_held:
            mine = asyncio.get_running_loop().create_future()
            self._waiting.add(caller, mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():  # the lock was handed to this task in the meantime
                    self._pass_on()
                raise
        self.is_held = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            if not (following := self._waiting.next()).done():
                following.set_result(None)
                return
        self.is_held = False
