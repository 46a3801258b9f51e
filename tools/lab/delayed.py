"""Add latency to connections between two processes of this machine: bytes are passed on in order after a delay.

For rings with the hops of a home network, on machines without namespaces. ``relay.py`` does this for a whole lab. A hop
takes up to a millisecond more than requested: asyncio's clock is no finer.
"""

from __future__ import annotations

import asyncio
from typing import Final

_MAX_BYTES: Final = 1 << 16


class DelayedLink:
    """Listens on loopback; connections are passed to ``address``, ``delay_s`` further away each way."""

    def __init__(self, address: str, delay_s: float) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._delay_s = delay_s
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> str:
        """Return the address to use instead of the other one."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await asyncio.sleep(0)  # the sockets close in the next turn of the loop

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        for source, sink in ((reader, back), (there, writer)):
            held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            for pump in (self._take(source, held), self._give(held, sink)):
                task = asyncio.create_task(pump)
                self._pumps.add(task)
                task.add_done_callback(self._pumps.discard)

    async def _take(self, source: asyncio.StreamReader, held: asyncio.Queue[tuple[float, bytes]]) -> None:
        data = b"."
        while data:
            try:
                data = await source.read(_MAX_BYTES)
            except ConnectionError:
                data = b""
            held.put_nowait((asyncio.get_running_loop().time() + self._delay_s, data))

    async def _give(self, held: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        data = b"."
        try:
            while data:
                due_s, data = await held.get()
                await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
                sink.write(data)
        finally:
            sink.transport.abort()
