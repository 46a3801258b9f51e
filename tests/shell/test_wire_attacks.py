"""Attacks on the wire: garbage, recorded handshakes, changed bytes. None of it reaches the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from primad.network.messages import MAX_MESSAGE_BYTES
from tests.shell.gated import (
    HOST,
    NOTHING_S,
    SECOND,
    SERVER,
    ZMTP_CURVE,
    ZMTP_NULL,
    GatedServer,
    gated_server,
    raw,
    until_closed,
    until_first_ends,
)

GARBAGE = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random bytes": bytes(range(256)) * 100,
    "zeros": bytes(100_000),
    "an older ZMTP": b"\x01\x00",
    "a greeting without encryption": ZMTP_NULL + b"\x04\x05\x05READY",
    "a message before the handshake": ZMTP_CURVE + b"\x00\x05hello",
    "a frame of 8 EiB": ZMTP_CURVE + b"\x06\x7f" + b"\xff" * 7 + bytes(1000),
    "a frame over the limit": ZMTP_CURVE + b"\x06" + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "big") + bytes(1000),
    "a hello that is none": ZMTP_CURVE + b"\x04\xc8\x05HELLO" + bytes(194),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_reaches_nobody_and_disturbs_nobody(data: bytes):
    async with gated_server() as here:
        _, writer = await raw(here.port)
        writer.write(data)
        with suppress(OSError):  # the server may have closed it already
            writer.write_eof()
        await here.serves_its_friend()
        await here.expect_silence()
        writer.close()


async def test_a_message_over_the_limit_of_a_trusted_device_ends_its_connection_only():
    async with gated_server(SECOND) as here:
        client = here.client(SECOND)
        await client.send(bytes(MAX_MESSAGE_BYTES + 1))
        await here.expect_silence()
        client.close()
        await here.serves_its_friend()


class Relay:
    """Relays bytes between a client and the server, records the client's, and changes one byte on request."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.recorded = bytearray()
        self.flip_up: int | None = None
        """The index of the byte to change in what the next connection's client sends, or None."""
        self.flip_down: int | None = None
        self.flip_next_up = False
        self.flip_next_down = False
        self.closed = asyncio.Event()
        """Set when a connection has ended."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await raw(self._port)
            there = self._pass(reader, server_writer, up=True)
            await until_first_ends(there, self._pass(server_reader, writer, up=False), server_writer)
        finally:
            writer.transport.abort()
            self.closed.set()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        passed = 0
        with suppress(ConnectionError):
            while data := bytearray(await reader.read(65536)):
                at = self._flips(passed, len(data), up=up)
                if at is not None:
                    data[at] ^= 0x01
                passed += len(data)
                if up:
                    self.recorded += data
                writer.write(data)

    def _flips(self, passed: int, size: int, *, up: bool) -> int | None:
        """The index to change in the next ``size`` bytes, or None; each ``flip_next`` applies once."""
        if self.flip_next_up if up else self.flip_next_down:
            if up:
                self.flip_next_up = False
            else:
                self.flip_next_down = False
            return size - 1
        wanted = self.flip_up if up else self.flip_down
        if wanted is None or not passed <= wanted < passed + size:
            return None
        if up:
            self.flip_up = None
        else:
            self.flip_down = None
        return wanted - passed


@asynccontextmanager
async def relay_to(here: GatedServer) -> AsyncIterator[tuple[Relay, int]]:
    """A relay to the house, with its port."""
    relay = Relay(here.port)
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(relay.serve(reader, writer)))

    server = await asyncio.start_server(connected, HOST, 0)
    try:
        yield relay, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def test_a_recorded_conversation_is_worth_nothing():
    async with gated_server() as here:
        async with relay_to(here) as (relay, port):
            client = here.client(port=port)
            await client.send(b"the words of a friend")
            assert await here.receive() == [b"the words of a friend"]
            client.close()
            recorded = bytes(relay.recorded)
        assert b"the words of a friend" not in recorded
        assert SERVER.public.encode() not in recorded
        reader, writer = await raw(here.port)
        writer.write(recorded)
        await until_closed(reader)  # as soon as the server sees an old cookie
        writer.close()
        await here.expect_silence()
        await here.serves_its_friend()


async def test_messages_altered_on_the_way_to_the_server_are_dropped():
    async with gated_server() as here:
        async with relay_to(here) as (relay, port):
            client = here.client(port=port)
            await client.send(b"one")
            assert await here.receive() == [b"one"]
            relay.flip_next_up = True
            await client.send(b"two")
            await relay.closed.wait()
            client.close()
            await here.expect_silence()
        await here.serves_its_friend()


async def test_messages_altered_on_the_way_from_the_server_are_dropped():
    async with gated_server() as here:
        async with relay_to(here) as (relay, port):
            client = here.client(port=port)
            await client.send(b"one")
            peer, _ = await here.server.recv_multipart()
            relay.flip_next_down = True
            await here.server.send_multipart([peer, b"two"])
            await relay.closed.wait()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(NOTHING_S):
                    raise AssertionError(await client.recv())
            client.close()
        await here.serves_its_friend()


@pytest.mark.parametrize("place", [0, 14, 64 + 2 + 90, 64 + 2 + 190, 64 + 202 + 60, 64 + 202 + 250])
async def test_a_handshake_altered_on_the_way_to_the_server_fails(place: int):
    async with gated_server() as here:
        async with relay_to(here) as (relay, port):
            relay.flip_up = place
            client = here.client(port=port)
            await client.send(b"hello")
            await relay.closed.wait()
            client.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(NOTHING_S):
                assert await here.receive() == [b"hello"]  # from its next connection, which nobody changed
        await here.serves_its_friend()


@pytest.mark.parametrize("place", [14, 64 + 60, 64 + 170 + 20])
async def test_a_handshake_altered_on_the_way_from_the_server_fails(place: int):
    async with gated_server() as here:
        async with relay_to(here) as (relay, port):
            relay.flip_down = place
            client = here.client(port=port)
            await client.send(b"hello")
            await relay.closed.wait()
            client.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(NOTHING_S):
                assert await here.receive() == [b"hello"]
        await here.serves_its_friend()
