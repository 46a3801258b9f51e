"""Attacks of strangers on an open port, which may reply with a greeting and a refusal, but never a message.

Everything has a deadline, and the attacks return the bytes that the attacker received.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from primad.network.sockets import endpoint, open_socket
from primad.trust.identity import Identity, new_identity
from tests.e2e.cluster import PATIENCE_S
from tests.figures import note
from tests.shell.gated import HOST, ZMTP_CURVE, ZMTP_NULL, raw, until_closed, until_first_ends
from tests.shell.test_wire_attacks import GARBAGE

MAX_REPLY_BYTES = 320
"""A greeting (64), a WELCOME (170) and an ERROR (9), or an HTTP error with its headers."""
QUESTION = b"give me your layers"
_COMMAND = 0x04
_LONG = 0x02
_NOTHING_SECRET = {b"WELCOME", b"ERROR"}

RAW = GARBAGE | {
    "noise": os.urandom(100_000),
    "a frame of 4 GiB in a pairing": b"\x10\x00" + b"\x00" * 5000,
    "a greeting and noise": ZMTP_CURVE + os.urandom(4096),
    "a short command of 255 bytes": ZMTP_CURVE + b"\x04\xff" + os.urandom(255),
    "READY at once": ZMTP_CURVE + b"\x04\x06\x05READY",
    "a heartbeat at once": ZMTP_CURVE + b"\x04\x07\x04PING\x00\x10",
    "HTTP with a body without end": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{",
    "a header without end": b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000,
}


@dataclass(frozen=True)
class Door:
    """A port of a daemon. ``key`` is its owner's public key, which mDNS announces."""

    owner: str
    port: int
    kind: str
    key: str


def judge(door: Door, received: bytes) -> None:
    """Check that only a greeting and a refusal were received."""
    assert len(received) <= MAX_REPLY_BYTES, (door, received)
    if door.kind == "pairing":
        assert received == b"", (door, received)
    elif door.kind == "http":
        assert not received or received.startswith(b"HTTP/1.1 4"), (door, received)
    elif received:
        assert received[:1] == b"\xff", (door, received)
        if len(received) > 64:
            assert received[12:32] == b"CURVE".ljust(20, b"\x00"), (door, received)
            assert set(commands(received[64:])) <= _NOTHING_SECRET, (door, received)


def commands(data: bytes) -> Iterator[bytes]:
    """Yield the names of the commands in ``data``; ``message`` for the frame of a message."""
    while data:
        size, start = (int.from_bytes(data[1:9], "big"), 9) if data[0] & _LONG else (int(data[1]), 2)
        body = data[start : start + size]
        yield body[1 : 1 + body[0]] if data[0] & _COMMAND else b"message"
        data = data[start + size :]


async def send_raw(door: Door, data: bytes) -> bytes:
    """Send ``data`` and wait until the other side closes the connection."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await raw(door.port)
        opened = time.monotonic()
        writer.write(data)
        received = await until_closed(reader)
        note("cut off", time.monotonic() - opened)
        writer.transport.abort()
        return received


async def dribble(door: Door) -> bytes:
    """Send a greeting or a request one byte at a time, more slowly than any timeout allows."""
    words = b"GET / HTTP/1.1\r\nX: " + b"x" * 999 if door.kind == "http" else ZMTP_CURVE * 10
    if door.kind == "pairing":
        words = b"\x0f\xff" + bytes(999)
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await raw(door.port)
        opened = time.monotonic()
        received = asyncio.ensure_future(until_closed(reader))
        for byte in words:
            writer.write(bytes([byte]))
            await asyncio.wait([received], timeout=0.2)
            if received.done():
                break
        await received
        note("cut off", time.monotonic() - opened)
        writer.transport.abort()
        return received.result()


async def burst(door: Door, count: int) -> list[bytes]:
    """Open ``count`` connections at once, silent or with a greeting; hold them until the other side closes them."""
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        # If the accept queue is full the kernel retries after 1, 3, 7 s, or sends a SYN cookie. Then it may lose the
        # end of the handshake, which only a client that sends notices; so silent ones send a byte at the end.
        async with asyncio.timeout(PATIENCE_S):
            for at in range(0, count, 100):
                many = [raw(door.port) for _ in range(min(100, count - at))]
                answers = await asyncio.gather(*many, return_exceptions=True)
                opened += [each for each in answers if isinstance(each, tuple)]
        assert len(opened) > 0.9 * count, f"{door}: only {len(opened)} of {count} came as far as the door"
        for _, writer in opened[::2]:
            writer.write((ZMTP_CURVE, ZMTP_NULL)[len(opened) % 2])
        received = [asyncio.ensure_future(until_closed(reader)) for reader, _ in opened]
        left = await all_but(count // 20, received)
        assert len(left) <= count // 20, f"{door}: {len(left)} connections were not cut off"
        for (_, writer), each in zip(opened, received, strict=True):
            if each in left:
                writer.write(b"\0")
        async with asyncio.timeout(PATIENCE_S):
            return list(await asyncio.gather(*received))
    finally:
        for _, writer in opened:
            writer.transport.abort()


async def all_but(few: int, tasks: Collection[asyncio.Future[bytes]]) -> set[asyncio.Future[bytes]]:
    """Wait until at most ``few`` tasks are left, or for ``PATIENCE_S``; return the rest."""
    left = set(tasks)
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while len(left) > few:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
    return left


@dataclass
class Talk:
    """The bytes of one connection: from its opener (``up``) and from the other side (``down``)."""

    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)


@dataclass
class Tap:
    """A proxy between a client and a door: it forwards and records bytes, and corrupts ``flips`` of them."""

    port: int
    talks: list[Talk] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    flips: int = 0
    """Number of further chunks in which one bit is flipped."""

    async def carry(self, here: asyncio.StreamReader, there: asyncio.StreamWriter, kept: bytearray) -> None:
        """Forward and record the bytes of ``here`` until it ends."""
        with suppress(ConnectionError):
            while data := bytearray(await here.read(1 << 16)):
                if self.flips:
                    self.flips -= 1
                    data[-1] ^= 0x10
                kept += data
                there.write(data)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        """Forward one connection to ``port``."""
        far_reader, far_writer = await raw(port)
        talk = Talk()
        self.talks.append(talk)
        there, back = self.carry(reader, far_writer, talk.up), self.carry(far_reader, writer, talk.down)
        try:
            await until_first_ends(there, back, writer, far_writer)
        finally:
            self.ended.set()


@asynccontextmanager
async def tap(port: int) -> AsyncIterator[Tap]:
    """Run a tap in front of ``port``."""
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(found.serve(reader, writer, port))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # even if it ended before it forwarded anything

    server = await asyncio.start_server(connected, HOST, 0)
    found = Tap(server.sockets[0].getsockname()[1])
    try:
        yield found
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks))


CLIENTS = ("none", "plain", "own key", "guessed server key", "server's public key as its own")


def _client(context: zmq.asyncio.Context, door: Door, device: str) -> zmq.asyncio.Socket:
    """Return a stranger's ZeroMQ client."""
    mine = new_identity()
    match device:
        case "none" | "plain":
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            if device == "plain":
                socket.plain_username, socket.plain_password = b"primad", b"primad"
            return socket
        case "own key":
            return open_socket(context, zmq.DEALER, identity=mine, server=door.key)
        case "guessed server key":
            return open_socket(context, zmq.DEALER, identity=mine, server=new_identity().public)
        case _:  # it knows the public key of a trusted device, not the secret key
            thief = Identity(public=door.key, secret=mine.secret)
            return open_socket(context, zmq.DEALER, identity=thief, server=door.key)


async def request_as(door: Door, device: str) -> list[bytes]:
    """Send a request over ZeroMQ as ``device`` of ``CLIENTS``; no reply must come. Return each connection's bytes."""
    context = zmq.asyncio.Context()
    try:
        async with tap(door.port) as between:
            socket = _client(context, door, device)
            socket.connect(endpoint(HOST, between.port))
            answer = asyncio.ensure_future(socket.recv_multipart())
            await socket.send(QUESTION)
            async with asyncio.timeout(PATIENCE_S):
                await between.ended.wait()
            assert not answer.done(), (door, device)
            answer.cancel()
            await asyncio.wait([answer])
            socket.close()
            return [bytes(talk.down) for talk in between.talks]
    finally:
        context.destroy(linger=0)
