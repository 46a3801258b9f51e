"""A gated server and its clients, shared by tests of attacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import zmq
import zmq.asyncio

from primad.network.gate import Gate
from primad.network.sockets import endpoint, listen, open_socket
from primad.trust.identity import Identity, new_identity

HOST = "127.0.0.1"
PATIENCE_S = 180
NOTHING_S = 0.4
"""How long to wait for proof that nothing arrives; a trusted client gets through in a tenth of it."""
SERVER, FRIEND, SECOND, STRANGER = (new_identity() for _ in range(4))
ZMTP_CURVE = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
"""A client's first bytes; none of them is secret."""
ZMTP_NULL = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)


class GatedServer:
    """A gated server with its clients; ``allows`` decides on their keys."""

    def __init__(self, allows: Callable[[str], bool]) -> None:
        self.context = zmq.asyncio.Context()
        self._clients: list[zmq.asyncio.Socket] = []
        self.gate = Gate(self.context, allows)
        self.server, self.port = listen(self.context, zmq.ROUTER, HOST, None, identity=SERVER)

    def client(
        self, identity: Identity = FRIEND, server: str = SERVER.public, port: int | None = None
    ) -> zmq.asyncio.Socket:
        client = open_socket(self.context, zmq.DEALER, identity=identity, server=server)
        self._clients.append(client)
        client.connect(endpoint(HOST, port or self.port))
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()
        self.context.destroy(linger=0)

    async def receive(self) -> list[bytes]:
        """The next message to the server, without the peer."""
        return (await self.server.recv_multipart())[1:]

    async def expect_silence(self) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(NOTHING_S):
                raise AssertionError(await self.receive())

    async def serves_its_friend(self) -> None:
        """A new connection of the friend is served, and its message is the next that arrives."""
        friend = self.client()
        await friend.send(b"hello")
        peer, message = await self.server.recv_multipart()
        assert message == b"hello"
        await self.server.send_multipart([peer, b"welcome"])
        assert await friend.recv() == b"welcome"
        friend.close()


@asynccontextmanager
async def gated_server(*trusted: Identity, allows: Callable[[str], bool] | None = None) -> AsyncIterator[GatedServer]:
    """A house that trusts the friend and ``trusted``, with a limit on the test's time."""
    keys = {each.public for each in (FRIEND, *trusted)}
    here = GatedServer(allows or keys.__contains__)
    try:
        async with asyncio.timeout(PATIENCE_S), here.gate:
            yield here
    finally:
        here.close()


async def raw(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(HOST, port)


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """Everything that the other side sends until it closes the connection."""
    printed = b""
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            printed += data
    return printed


async def until_first_ends(
    up: Coroutine[Any, Any, None], down: Coroutine[Any, Any, None], *writers: asyncio.StreamWriter
) -> None:
    """Run ``up`` and ``down`` until one ends; then cancel the other and abort the connections of ``writers``."""
    both = [asyncio.create_task(up), asyncio.create_task(down)]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in both:
            task.cancel()
        for writer in writers:
            writer.transport.abort()
