"""Floods of connections against a server in a process of its own: it keeps serving, and its memory stays small."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import psutil
import pytest
import zmq
import zmq.asyncio

from primad.network.gate import Gate
from primad.network.messages import MAX_MESSAGE_BYTES
from primad.network.sockets import endpoint, listen, open_socket, raise_descriptor_limit
from primad.trust.identity import Identity
from tests.figures import note
from tests.shell.gated import FRIEND, HOST, PATIENCE_S, SERVER, STRANGER, ZMTP_CURVE, raw, until_closed

FLOOD_S = 200
"""The time limit of a flood: a thousand handshakes take minutes on a busy machine."""


def serve(ready: Connection, server: Identity, trusted: set[str]) -> None:
    """Echo the messages of trusted devices until the process is killed."""

    async def echo() -> None:
        raise_descriptor_limit()
        context = zmq.asyncio.Context()
        router, port = listen(context, zmq.ROUTER, HOST, None, identity=server)
        async with Gate(context, trusted.__contains__):
            ready.send(port)
            while True:
                await router.send_multipart(await router.recv_multipart())

    asyncio.run(echo())


@contextmanager
def server_process() -> Iterator[tuple[int, psutil.Process]]:
    """The port and the process of a server that trusts the friend."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, SERVER, {FRIEND.public}))
    process.start()
    try:
        assert ours.poll(PATIENCE_S), "the server did not start"
        yield ours.recv(), psutil.Process(process.pid)
    finally:
        process.kill()
        process.join(PATIENCE_S)
        ours.close()
        theirs.close()


@contextmanager
def client_of(port: int, identity: Identity = FRIEND, kind: int = zmq.DEALER) -> Iterator[zmq.asyncio.Socket]:
    """A client of the server at ``port``, closed after the block."""
    context = zmq.asyncio.Context()
    client = open_socket(context, kind, identity=identity, server=SERVER.public)
    client.connect(endpoint(HOST, port))
    try:
        yield client
    finally:
        client.close()
        context.destroy(linger=0)


async def reply_time(client: zmq.asyncio.Socket) -> float:
    """Ask for an echo; returns the seconds until it arrives."""
    sent_at = asyncio.get_running_loop().time()
    await client.send(b"hello")
    assert await client.recv() == b"hello"
    return asyncio.get_running_loop().time() - sent_at


async def under_attack(port: int, attack: Callable[[], Awaitable[None]]) -> list[float]:
    """Seconds of each reply to the friend during ``attack``, and then of one over a new connection.

    The attack has its own thread, so that a thousand attackers do not slow the friend's event loop.
    """

    async def bounded() -> None:
        async with asyncio.timeout(FLOOD_S):
            await attack()

    async with asyncio.timeout(FLOOD_S):
        with client_of(port) as friend:
            attacking = asyncio.ensure_future(asyncio.to_thread(asyncio.run, bounded()))
            reply_times = [await reply_time(friend)]
            while not attacking.done():
                reply_times.append(await reply_time(friend))
                await asyncio.wait([attacking], timeout=0.01)
            await attacking
        with client_of(port) as later:
            reply_times.append(await reply_time(later))
        return reply_times


async def thousand_silent(port: int) -> None:
    """A thousand silent connections, until the server drops them."""
    found = await asyncio.gather(*(raw(port) for _ in range(1000)))
    for reader, writer in found:
        await until_closed(reader)
        writer.close()


async def thousand_greetings(port: int) -> None:
    """A thousand connections that greet and announce a large frame, but send a megabyte in total."""
    found = await asyncio.gather(*(raw(port) for _ in range(1000)))
    for _, writer in found:
        writer.write(ZMTP_CURVE + b"\x06" + MAX_MESSAGE_BYTES.to_bytes(8, "big") + bytes(1000))
    for reader, writer in found:
        await until_closed(reader)
        writer.close()


async def thousand_strangers(port: int) -> None:
    """A thousand complete handshakes with an untrusted key."""
    with client_of(port, STRANGER, zmq.ROUTER) as stranger:  # a DEALER would connect only once
        watch = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        for _ in range(999):
            stranger.connect(endpoint(HOST, port))
        for _ in range(1000):
            await watch.recv_multipart()
        stranger.disable_monitor()


async def hundred_dribblers(port: int) -> None:
    """A hundred connections that send the greeting byte by byte and do not finish in time."""

    async def dribble() -> None:
        reader, writer = await raw(port)
        end = asyncio.ensure_future(until_closed(reader))
        for byte in ZMTP_CURVE * 10:
            writer.write(bytes([byte]))
            await asyncio.wait([end], timeout=0.1)
            if end.done():
                break
        await end
        writer.close()

    await asyncio.gather(*(dribble() for _ in range(100)))


FLOODS = [thousand_silent, thousand_greetings, thousand_strangers, hundred_dribblers]
MAX_GROWTH_BYTES = 128 << 20


@pytest.mark.slow
@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_costs_little_and_its_connections_are_dropped(flood: Callable[[int], Awaitable[None]]):
    raise_descriptor_limit()
    with server_process() as (port, process):
        before = process.memory_info().rss
        reply_times = await under_attack(port, lambda: flood(port))
        growth = process.memory_info().rss - before
        note("answer in a flood", max(reply_times), f"{len(reply_times)} answers; {growth / 2**20:.1f} MiB more")
        assert len(reply_times) >= 2
        assert growth < MAX_GROWTH_BYTES
        while sys.platform == "linux" and process.num_fds() >= 100:  # noqa: ASYNC110  (the last ones are still closing)
            await asyncio.sleep(0.05)
