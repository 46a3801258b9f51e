"""Fetches one status per second for all open pages, and none while no page is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

import msgspec

from primad.api.http.errors import error_body
from primad.api.http.framing import EVENT_STREAM, Framing
from primad.api.http.status import StatusBody
from primad.errors import PrimadError, RequestError

MAX_LISTENERS: Final = 64


def _error(exc: PrimadError) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(error_body(exc)) + b"\n\n"


SNAPSHOTS: Final = Framing(
    media_type=EVENT_STREAM,
    message=lambda snapshot: b"event: status\ndata: " + snapshot.json + b"\n\n",
    error=_error,
    end=b"",
    waiting=b": still here\n\n",
)


class Snapshot(msgspec.Struct, frozen=True):
    """A status as JSON, the same bytes for all listeners."""

    json: bytes


class Watch:
    """Calls ``look`` every ``every_s`` seconds while there are listeners, and distributes the result."""

    def __init__(self, look: Callable[[], Awaitable[StatusBody]], every_s: float) -> None:
        self._look, self._every_s = look, every_s
        self._listeners = 0
        self._producer: asyncio.Task[None] | None = None
        self._next: asyncio.Future[Snapshot] | None = None
        self._is_closed = False

    async def snapshots(self) -> AsyncGenerator[Snapshot, None]:
        """Yield the snapshots from now on; slow listeners get the latest. Raises ``RequestError`` if there are too
        many."""
        if self._listeners >= MAX_LISTENERS:
            raise RequestError(f"{MAX_LISTENERS} pages are open already; close one", status=429, code="too_many_pages")
        self._listeners += 1
        if self._producer is None or self._producer.done():
            self._next = asyncio.get_running_loop().create_future()
            self._producer = asyncio.create_task(self._produce())
        try:
            while True:
                assert self._next is not None
                upcoming, producer = self._next, self._producer
                either: list[asyncio.Future[Any]] = [upcoming, producer]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if self._is_closed:
                    return
                if not upcoming.done():
                    producer.result()  # raises if it failed, for every listener
                yield upcoming.result()
        finally:
            self._listeners -= 1
            if not self._listeners and self._producer is not None:
                self._producer.cancel()
                self._producer = None

    def close(self) -> None:
        """End every stream: the server ends."""
        self._is_closed = True
        if self._producer is not None:
            self._producer.cancel()

    async def _produce(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            snapshot = Snapshot(msgspec.json.encode(await self._look()))
            assert self._next is not None
            self._next.set_result(snapshot)
            self._next = loop.create_future()
            await asyncio.sleep(self._every_s)
