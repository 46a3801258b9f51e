"""The control link between head and worker: garbage is refused with a log line, and both ends keep working."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from types import SimpleNamespace

import pytest
import zmq
import zmq.asyncio

from primad.errors import ClusterError
from primad.network import control
from primad.network.control import HeadEnd, WorkerEnd
from primad.network.messages import MAX_MESSAGE_BYTES, USUAL_BYTES, Ping, Pong, Refused, Release
from primad.network.sockets import endpoint, listen, monitored, open_socket
from primad.system.wire import encode
from primad.trust.identity import new_identity
from tests.fakes.control import HEAD, HOST, gated, head_end
from tests.figures import note
from tests.ports import free_port

WORKER, SECOND = new_identity(), new_identity()
HELLO = Ping(status=True)


def printed(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log lines of the control link; leftovers of other tests may log lines of their own at any time."""
    return [record.getMessage() for record in caplog.records if record.name == "primad.network.control"]


@asynccontextmanager
async def worker_end(port: int | None = None) -> AsyncIterator[tuple[zmq.asyncio.Context, WorkerEnd]]:
    """A worker's end on a free port, with a limit on the test's time."""
    async with gated() as context:
        end = WorkerEnd(context, HOST, port, 0, identity=WORKER)
        try:
            yield context, end
        finally:
            end.close()


@asynccontextmanager
async def silent_worker() -> AsyncIterator[tuple[zmq.asyncio.Socket, HeadEnd]]:
    """A plain socket in place of a worker, and a head's end connected to it."""
    async with gated() as context:
        router, port = listen(context, zmq.ROUTER, HOST, None, identity=WORKER)
        yield router, HeadEnd(context, HOST, port, identity=HEAD, key=WORKER.public)


def stranger_to(context: zmq.asyncio.Context, worker: WorkerEnd) -> zmq.asyncio.Socket:
    """A trusted device that sends whatever it likes."""
    stranger = open_socket(context, zmq.DEALER, identity=SECOND, server=WORKER.public)
    stranger.connect(endpoint(HOST, worker.port))
    return stranger


async def test_messages_pass_both_ways():
    async with worker_end() as (context, worker):
        head = head_end(context, worker, WORKER.public)
        await head.send(HELLO)
        peer, key, message = await worker.receive()
        assert (key, message) == (HEAD.public, HELLO)
        await worker.send(peer, Refused("busy"))
        assert await head.receive() == Refused("busy")
        assert head.address == f"127.0.0.1:{worker.port}"
        head.close()


async def test_two_heads_are_distinguished():
    async with worker_end() as (context, worker):
        heads = [head_end(context, worker, WORKER.public, identity) for identity in (HEAD, SECOND)]
        peers = []
        for number, head in enumerate(heads):
            await head.send(Release(epoch=number))
            peer, key, message = await worker.receive()
            assert message == Release(epoch=number)
            assert key == (HEAD, SECOND)[number].public
            peers.append(peer)
        assert peers[0] != peers[1]
        for number in (1, 0):
            await worker.send(peers[number], Refused(str(number)))
        for number, head in enumerate(heads):
            assert await head.receive() == Refused(str(number))
            head.close()


GARBAGE = {
    "nothing": [b""],
    "random bytes": [bytes(range(256))],
    "a cut message": [encode(HELLO)[:-1]],
    "a longer message": [encode(HELLO) + b"\x00"],
    "two frames": [encode(HELLO), b""],
    "the other side's": [encode(Pong())],
    "nested without end": [b"\x91" * 100_000],
    "a length without content": [b"\x82\xa4type\xa4load\xa7windows\xdd\xff\xff\xff\xff"],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_for_the_worker_is_refused_with_a_line_and_the_next_head_is_received(
    caplog, frames: Sequence[bytes]
):
    with caplog.at_level(logging.WARNING, "primad.network.control"):
        async with worker_end() as (context, worker):
            stranger = stranger_to(context, worker)
            await stranger.send_multipart(frames)
            await stranger.send(encode(HELLO))
            assert (await worker.receive())[2] == HELLO
            stranger.close()
    (line,) = printed(caplog)
    assert line.startswith("refused a message on the control link (1 so far): ")
    assert line.isprintable()


async def test_a_flood_of_garbage_is_one_line_a_second(caplog):
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "primad.network.control"):
        async with worker_end() as (context, worker):
            stranger = stranger_to(context, worker)
            for _ in range(300):
                await stranger.send(b"garbage")
            await stranger.send(encode(HELLO))
            assert (await worker.receive())[2] == HELLO
    assert 1 <= len(printed(caplog)) <= 1 + time.monotonic() - start


@pytest.mark.parametrize("frames", [[b""], [b"garbage"], [encode(Pong()), b""], [encode(HELLO)]])
async def test_garbage_from_a_worker_is_refused_with_a_line_and_its_next_message_is_received(caplog, frames):
    with caplog.at_level(logging.WARNING, "primad.network.control"):
        async with silent_worker() as (router, head):
            await head.send(HELLO)
            peer, _ = await router.recv_multipart()
            await router.send_multipart([peer, *frames])
            await router.send_multipart([peer, encode(Pong())])
            assert await head.receive() == Pong()
    (line,) = printed(caplog)
    assert line.startswith("refused a message of the device at 127.0.0.1:")


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 5000])
async def test_raw_bytes_on_the_control_port_disturb_nobody(garbage):
    async with worker_end() as (context, worker):
        _, writer = await asyncio.open_connection("127.0.0.1", worker.port)
        writer.write(garbage)
        await writer.drain()
        head = head_end(context, worker, WORKER.public)
        await head.send(HELLO)
        assert (await worker.receive())[2] == HELLO
        head.close()
        writer.close()


async def test_an_oversized_message_never_arrives_and_others_do():
    async with worker_end() as (context, worker):
        stranger = stranger_to(context, worker)
        await stranger.send(bytes(MAX_MESSAGE_BYTES + 1))
        head = head_end(context, worker, WORKER.public)
        await head.send(HELLO)
        assert (await worker.receive())[2] == HELLO
        head.close()
        stranger.close()


async def test_a_reply_to_a_vanished_head_is_dropped_silently():
    async with worker_end() as (_, worker):
        await worker.send(b"nobody", Pong())


async def test_a_silent_worker_is_given_up():
    async with silent_worker() as (_, head):
        with pytest.raises(ClusterError, match=r"no response from 127\.0\.0\.1:\d+ within 0\.05 s"):
            await head.receive(0.05)


async def test_a_worker_that_starts_later_receives_earlier_messages():
    port = free_port()
    async with gated() as context:
        head = HeadEnd(context, HOST, port, identity=HEAD, key=WORKER.public)
        await head.send(Ping(status=False))
        worker = WorkerEnd(context, HOST, port, 0, identity=WORKER)
        assert (await worker.receive())[2] == Ping(status=False)


async def test_a_device_with_another_key_receives_nothing():
    async with worker_end() as (context, worker):
        wrong = head_end(context, worker, SECOND.public)
        await wrong.send(Release(epoch=1))
        right = head_end(context, worker, WORKER.public)
        await right.send(Release(epoch=2))
        assert (await worker.receive())[2] == Release(epoch=2)
        with pytest.raises(ClusterError, match="no response"):
            await wrong.receive(0.2)


async def test_a_refusal_from_before_anyone_waited_for_it_is_noticed():
    """libzmq reports it once, and a busy head may begin to wait after that."""
    refused = asyncio.Queue[str]()
    async with gated(refused.put_nowait) as context:
        worker = WorkerEnd(context, HOST, None, 0, identity=WORKER)
        first = head_end(context, worker, WORKER.public)
        await refused.get()
        second = head_end(context, worker, WORKER.public)
        await second.wait_refused()
        await first.wait_refused()


async def test_sending_over_a_closed_link_is_one_clear_error():
    async with worker_end() as (context, worker):
        head = head_end(context, worker, WORKER.public)
        head.close()
        with pytest.raises(ClusterError, match=rf"the link to 127\.0\.0\.1:{worker.port} is closed"):
            await head.send(Ping(status=False))


@pytest.mark.parametrize("host", ["tcp://x", "a b", "x\n"])
async def test_an_invalid_address_is_one_clear_error(host):
    async with gated() as context:
        with pytest.raises(ClusterError, match="is not an address to connect to: Invalid argument"):
            HeadEnd(context, host, 1, identity=HEAD, key=WORKER.public)


# ---- processes that end ---------------------------------------------------------------------------------------------

LISTENER = """
import asyncio, sys
import zmq.asyncio
from primad.network.control import WorkerEnd
from primad.network.gate import Gate
from primad.trust.identity import Identity
from primad.network.messages import Pong

async def main():
    context = zmq.asyncio.Context()
    async with Gate(context, lambda _: True):
        end = WorkerEnd(context, "127.0.0.1", None, 0, identity=Identity(*sys.argv[1:]))
        print(end.port, flush=True)
        while True:
            peer, _, _ = await end.receive()
            await end.send(peer, Pong())

asyncio.run(main())
"""


@asynccontextmanager
async def listener() -> AsyncIterator[tuple[subprocess.Popen[str], HeadEnd]]:
    """A worker's end in its own process that answers everything, and a head's end that already got a reply."""
    keys = new_identity()
    command = [sys.executable, "-c", LISTENER, keys.public, keys.secret]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:  # noqa: ASYNC220  (starting is quick)
        try:
            assert child.stdout is not None
            port = int(await asyncio.to_thread(child.stdout.readline))
            async with gated() as context:
                head = HeadEnd(context, HOST, port, identity=HEAD, key=keys.public)
                await head.send(Ping(status=False))
                assert await head.receive() == Pong()
                yield child, head
        finally:
            child.kill()


async def until_ended(head: HeadEnd) -> None:
    async for _ in head.reconnections():
        raise AssertionError("the connection stood all the time")


async def test_a_process_that_is_killed_is_noticed():
    async with listener() as (child, head):
        ended = asyncio.create_task(until_ended(head))
        done, _ = await asyncio.wait([ended], timeout=0.3)
        assert not done, "it is alive"
        child.kill()
        await asyncio.to_thread(child.wait)
        killed = time.monotonic()
        await ended
        note("noticed", time.monotonic() - killed)
        head.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows stops no process")
async def test_a_process_that_is_stopped_has_not_ended():
    async with listener() as (child, head):
        ended = asyncio.create_task(until_ended(head))
        os.kill(child.pid, signal.SIGSTOP)
        done, _ = await asyncio.wait([ended], timeout=1.5)
        assert not done
        os.kill(child.pid, signal.SIGCONT)
        await head.send(Ping(status=False))
        assert await head.receive() == Pong()
        assert not ended.done()
        ended.cancel()
        await asyncio.wait([ended])
        head.close()


async def test_a_port_that_is_taken_is_named():
    async with worker_end() as (context, worker):
        with pytest.raises(ClusterError, match=rf"^--port {worker.port}: cannot listen on 127\.0\.0\.1: .* choose"):
            WorkerEnd(context, HOST, worker.port, 0, identity=SECOND)


async def test_a_default_port_that_is_taken_becomes_another():
    async with worker_end() as (context, worker):
        other = WorkerEnd(context, HOST, None, worker.port, identity=SECOND)
        assert other.port != worker.port
        other.close()


async def test_a_socket_may_have_a_monitor_right_after_another():
    """Otherwise nothing watches a link while the monitor of its greeting is still closing."""
    async with gated() as context:
        watched = context.socket(zmq.DEALER)
        for _ in range(300):
            monitor = monitored(watched, zmq.EVENT_CONNECTED)
            watched.disable_monitor()
            monitor.close(linger=0)
        watched.close()


def test_endpoints_of_both_families():
    assert endpoint("127.0.0.1", 5) == "tcp://127.0.0.1:5"
    assert endpoint("::1", 5) == "tcp://[::1]:5"
    assert endpoint("[::1]", "*") == "tcp://[::1]:*"


@pytest.mark.parametrize("frames", [[b"x", b"y"], [encode(Pong())]], ids=["garbage", "messages"])
@pytest.mark.parametrize("by_worker", [False, True])
async def test_a_flood_of_messages_blocks_nobody_else(monkeypatch, by_worker, frames):
    """Waiting messages are received without a pause, so a flood could block the daemon."""
    calls = count()

    async def always(**_: object) -> list[object]:
        assert next(calls) < 1000, "nobody else had a turn"
        return [zmq.Frame(b"peer"), *map(zmq.Frame, frames)] if by_worker else list(frames)

    monkeypatch.setattr(control, "sender_key", lambda _: "key")
    monkeypatch.setattr(control, "sender_address", lambda _: HOST)
    monkeypatch.setattr(control, "decode_from_head", lambda _: HELLO)

    async def read(end: WorkerEnd | HeadEnd) -> None:
        while True:
            await end.receive()

    async with worker_end() as (context, worker):
        head = HeadEnd(context, HOST, worker.port, identity=new_identity(), key=new_identity().public)
        end = worker if by_worker else head
        socket, end._socket = end._socket, SimpleNamespace(recv_multipart=always)  # type: ignore[assignment]
        reading = asyncio.create_task(read(end))
        for _ in range(9):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        end._socket = socket
        head.close()
        assert reading.cancelled(), reading.exception()


async def test_a_large_message_from_a_device_that_is_no_head_is_not_decoded(monkeypatch):
    """Decoding takes the event loop up to 40 ns a byte, before the message can be refused."""
    read: list[int] = []
    decode = control.decode_from_head

    def noted(data: bytes) -> object:
        read.append(len(data))
        return decode(data)

    monkeypatch.setattr(control, "decode_from_head", noted)
    async with gated() as context:
        end = WorkerEnd(context, HOST, None, 0, identity=WORKER, leads=HEAD.public.__eq__)
        for identity, large in ((SECOND, False), (HEAD, True)):
            client = open_socket(context, zmq.DEALER, identity=identity, server=WORKER.public)
            client.connect(endpoint(HOST, end.port))
            await client.send(bytes(USUAL_BYTES + 1))
            await client.send(encode(HELLO))
            _, key, message = await end.receive()
            assert (key, message) == (identity.public, HELLO)
            assert (max(read) > USUAL_BYTES) == large
            client.close()
        end.close()
