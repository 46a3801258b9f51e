"""The control link between head and worker: garbage is refused with a line, and both ends live on."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from primad.cluster.control import HeadEnd, WorkerEnd
from primad.cluster.messages import (
    MAX_MESSAGE_BYTES,
    Hello,
    Linked,
    Ping,
    Pong,
    Refused,
    Release,
)
from primad.cluster.sockets import endpoint
from primad.errors import ClusterError
from primad.ring.messages import encode

PATIENCE_S = 20
HELLO = Hello(protocol=1, version="0", device="desk", session=5)


@asynccontextmanager
async def worker_end(port: int | None = None) -> AsyncIterator[tuple[zmq.asyncio.Context, WorkerEnd]]:
    """A worker's end on a free port, and a limit on the test's time."""
    context = zmq.asyncio.Context()
    end = WorkerEnd(context, "127.0.0.1", port, 0)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield context, end
    finally:
        end.close()
        context.destroy(linger=0)


@asynccontextmanager
async def silent_worker() -> AsyncIterator[tuple[zmq.asyncio.Socket, HeadEnd]]:
    """A socket in place of a worker, and a head's end to it."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    head = HeadEnd(context, "127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield router, head
    finally:
        context.destroy(linger=0)


def test_messages_pass_both_ways():
    async def once() -> None:
        async with worker_end() as (context, worker):
            head = HeadEnd(context, "127.0.0.1", worker.port)
            await head.send(HELLO)
            peer, message = await worker.receive()
            assert message == HELLO
            await worker.send(peer, Refused("busy"))
            assert await head.receive() == Refused("busy")
            assert head.address == f"127.0.0.1:{worker.port}"
            head.close()

    asyncio.run(once())


def test_two_heads_are_told_apart():
    async def once() -> None:
        async with worker_end() as (context, worker):
            heads = [HeadEnd(context, "127.0.0.1", worker.port) for _ in range(2)]
            peers = []
            for number, head in enumerate(heads):
                await head.send(Release(epoch=number))
                peer, message = await worker.receive()
                assert message == Release(epoch=number)
                peers.append(peer)
            assert peers[0] != peers[1]
            for number in (1, 0):
                await worker.send(peers[number], Linked(number))
            for number, head in enumerate(heads):
                assert await head.receive() == Linked(number)
                head.close()

    asyncio.run(once())


GARBAGE = {
    "nothing": [b""],
    "random bytes": [bytes(range(256))],
    "a cut message": [encode(HELLO)[:-1]],
    "a longer message": [encode(HELLO) + b"\x00"],
    "two frames": [encode(HELLO), b""],
    "the other side's": [encode(Pong())],
    "nested without end": [b"\x91" * 100_000],
    "a length without content": [b"\x82\xa4type\xa4load\xa7windows\xdd\xff\xff\xff\xff"],
    "a device without a name": [encode(Hello(protocol=1, version="0", device="\x1b[2J", session=5))],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_for_the_worker_is_refused_with_a_line_and_it_hears_the_next_head(caplog, frames: Sequence[bytes]):
    async def once() -> None:
        async with worker_end() as (context, worker):
            stranger = context.socket(zmq.DEALER)
            stranger.connect(endpoint("127.0.0.1", worker.port))
            await stranger.send_multipart(frames)
            await stranger.send(encode(HELLO))
            assert (await worker.receive())[1] == HELLO
            stranger.close()

    with caplog.at_level(logging.WARNING, "primad.cluster.control"):
        asyncio.run(once())
    (record,) = caplog.records
    assert record.getMessage().startswith("refused a message on the control link: ")
    assert record.getMessage().isprintable()


@pytest.mark.parametrize("frames", [[b""], [b"garbage"], [encode(Pong()), b""], [encode(HELLO)]])
def test_garbage_of_a_worker_is_refused_with_a_line_and_its_next_message_is_heard(caplog, frames):
    async def once() -> None:
        async with silent_worker() as (router, head):
            await head.send(HELLO)
            peer, _ = await router.recv_multipart()
            await router.send_multipart([peer, *frames])
            await router.send_multipart([peer, encode(Pong())])
            assert await head.receive() == Pong()

    with caplog.at_level(logging.WARNING, "primad.cluster.control"):
        asyncio.run(once())
    (record,) = caplog.records
    assert record.getMessage().startswith("refused a message of the device at 127.0.0.1:")


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 5000])
def test_raw_bytes_on_the_control_port_disturb_nobody(garbage):
    async def once() -> None:
        async with worker_end() as (context, worker):
            _, writer = await asyncio.open_connection("127.0.0.1", worker.port)
            writer.write(garbage)
            await writer.drain()
            head = HeadEnd(context, "127.0.0.1", worker.port)
            await head.send(HELLO)
            assert (await worker.receive())[1] == HELLO
            head.close()
            writer.close()

    asyncio.run(once())


def test_an_oversized_message_never_arrives_and_others_do():
    async def once() -> None:
        async with worker_end() as (context, worker):
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(endpoint("127.0.0.1", worker.port))
            await stranger.send(bytes(MAX_MESSAGE_BYTES + 1))
            head = HeadEnd(context, "127.0.0.1", worker.port)
            await head.send(HELLO)
            assert (await worker.receive())[1] == HELLO
            head.close()
            stranger.close()

    asyncio.run(once())


def test_an_answer_to_a_head_that_is_gone_is_lost_in_silence():
    async def once() -> None:
        async with worker_end() as (_, worker):
            await worker.send(b"nobody", Pong())

    asyncio.run(once())


def test_a_worker_that_says_nothing_is_given_up():
    async def once() -> None:
        async with silent_worker() as (_, head):
            with pytest.raises(ClusterError, match=r"the device at 127\.0\.0\.1:\d+ has not answered for 0\.05 s"):
                await head.receive(0.05)

    asyncio.run(once())


def test_a_worker_that_comes_later_hears_what_was_said_before():
    async def once() -> None:
        context = zmq.asyncio.Context()
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            port = reserved.getsockname()[1]
            head = HeadEnd(context, "127.0.0.1", port)
            await head.send(Ping(status=False))
        try:
            async with asyncio.timeout(PATIENCE_S), worker_end(port) as (_, worker):
                assert (await worker.receive())[1] == Ping(status=False)
        finally:
            context.destroy(linger=0)

    asyncio.run(once())


def test_a_port_that_is_taken_is_named():
    async def once() -> None:
        async with worker_end() as (context, worker):
            with pytest.raises(ClusterError, match=rf"^--port {worker.port}: cannot listen on 127\.0\.0\.1: .* choose"):
                WorkerEnd(context, "127.0.0.1", worker.port, 0)

    asyncio.run(once())


def test_a_default_port_that_is_taken_becomes_another():
    async def once() -> None:
        async with worker_end() as (context, worker):
            other = WorkerEnd(context, "127.0.0.1", None, worker.port)
            assert other.port != worker.port
            other.close()

    asyncio.run(once())


def test_endpoints_of_both_families():
    assert endpoint("127.0.0.1", 5) == "tcp://127.0.0.1:5"
    assert endpoint("::1", 5) == "tcp://[::1]:5"
    assert endpoint("[::1]", "*") == "tcp://[::1]:*"
