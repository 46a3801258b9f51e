"""A wire between a head and a worker whose connections can be reset, with the data in flight."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Literal, Self

HOST = "127.0.0.1"
RESETS = struct.pack("ii", 1, 0)
"""A linger time of zero: closing such a socket sends RST and drops unsent data."""

Direction = Literal["there", "back"]


class Relay:
    """Relays connections from ``port``; in the direction ``swallow`` data is accepted but never delivered."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._news = asyncio.Condition()
        self._swallowed: Direction | None = None
        self._swallowed_bytes = 0
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()

    def swallow(self, direction: Direction) -> None:
        """From now until ``reset``, deliver nothing in this direction."""
        self._swallowed, self._swallowed_bytes = direction, 0

    async def swallows(self, count: int) -> None:
        """Wait until ``count`` bytes were accepted and not delivered."""
        async with self._news:
            await self._news.wait_for(lambda: self._swallowed_bytes >= count)

    def reset(self) -> None:
        """Reset every connection; new ones are relayed."""
        self._swallowed = None
        writers, self._writers = self._writers, []
        for writer in writers:
            end: socket.socket = writer.get_extra_info("socket")
            if end.fileno() >= 0:  # its client has not closed it
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
                writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, self._target)
            if writer not in self._writers:  # it was reset meanwhile
                far_writer.transport.abort()
                return
            self._writers.append(far_writer)
            await asyncio.gather(self._pass(reader, far_writer, "there"), self._pass(far_reader, writer, "back"))
        finally:
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        try:
            while data := await reader.read(1 << 16):
                if self._swallowed == direction:
                    self._swallowed_bytes += len(data)
                    async with self._news:
                        self._news.notify_all()
                else:
                    writer.write(data)
        except ConnectionError:
            return  # it was reset
        finally:
            writer.close()
