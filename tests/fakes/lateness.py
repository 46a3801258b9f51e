"""How long the machine keeps this process waiting: what a test that takes the time may allow for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_LOOK_S = 0.02


class Lateness:
    """``most_s`` is how much later than it was due this event loop was woken at most."""

    most_s = 0.0

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            self.most_s = max(self.most_s, loop.time() - due_s)


@asynccontextmanager
async def watched() -> AsyncIterator[Lateness]:
    """How late this loop is, until the block ends."""
    lateness = Lateness()
    watching = asyncio.create_task(lateness._watch())
    try:
        yield lateness
    finally:
        watching.cancel()
        await asyncio.wait([watching])
