"""A value that many clients request concurrently and that takes long to make."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """A value made by ``make`` at most every ``pause_s``, once for all concurrent callers, and always after they
    called."""

    def __init__(self, make: Callable[[], Awaitable[T]], pause_s: float) -> None:
        self._make, self._pause_s = make, pause_s
        self._next: asyncio.Task[T] | None = None
        self._due_s = 0.0

    async def get(self) -> T:
        """Return the next value. Raises like ``make``."""
        if self._next is None:
            self._next = asyncio.create_task(self._make_next())
        return await asyncio.shield(self._next)

    async def _make_next(self) -> T:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._due_s - loop.time()))
        self._next, self._due_s = None, loop.time() + self._pause_s
        return await self._make()
