"""Clients that connect and send no request are disconnected, and delay no others."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from primad.api.http import patience as http_patience
from primad.api.http.listener import MAX_REFUSED
from primad.api.http.patience import MAX_READS, Patience
from primad.api.http.starts import MAX_STARTS
from tests.fakes.backend import Call, FakeBackend, Item, replies
from tests.fakes.http import PATIENCE_S
from tests.fakes.watchdog import watched_loop
from tests.shell.gated import raw, until_closed
from tests.shell.patient import patient

REQUEST = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("printed", "answer"),
    [(b"", b""), (REQUEST[:-2], b""), (b"\xff" + bytes(9), b"HTTP/1.1 400 ")],
    ids=["nothing", "half", "ZMTP"],
)
async def test_a_connection_without_a_request_is_closed(printed: bytes, answer: bytes):
    async with patient(FakeBackend(replies("Hi")), timeout_s=0.1) as port:
        reader, writer = await raw(port)
        writer.write(printed)
        assert (await until_closed(reader))[: len(answer) or None] == answer
        writer.close()


async def test_a_client_that_trickles_its_second_request_is_disconnected():
    async with patient(FakeBackend(replies("Hi")), timeout_s=1.0) as port:
        reader, writer = await raw(port)
        writer.write(REQUEST)
        assert (await reader.readline()).startswith(b"HTTP/1.1")
        end = asyncio.ensure_future(until_closed(reader))
        for byte in REQUEST * 100:
            writer.write(bytes([byte]))
            await asyncio.wait([end], timeout=0.05)
            if end.done():
                break
        assert end.done()
        writer.close()


async def test_a_response_may_take_longer_than_the_request_timeout():
    gate = asyncio.Event()
    async with patient(FakeBackend(replies("slow", gate)), timeout_s=1.0) as port, httpx.AsyncClient() as client:
        asked = asyncio.create_task(client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT))
        await asyncio.wait([asked], timeout=2.0)
        assert not asked.done()
        gate.set()
        assert (await asked).json()["choices"][0]["message"]["content"] == "slow"


async def test_silent_connections_make_room_for_active_ones():
    async with patient(FakeBackend(replies("Hi")), max_silent=5) as port, httpx.AsyncClient() as client:
        silent = [await raw(port) for _ in range(20)]
        answer = await client.get(f"http://127.0.0.1:{port}/health")
        assert answer.status_code == 200
        for reader, _ in silent[:16]:
            assert await until_closed(reader) == b""
        for _, writer in silent:
            writer.close()


async def test_a_client_that_waits_for_its_turn_is_not_silent():
    class Waiting:
        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            self.loop, self.is_closed = loop, False

        def give_up(self) -> None:
            self.is_closed = True

    patience = Patience(60, 60, max_silent=1)
    many: list[Any] = [Waiting(asyncio.get_running_loop()) for _ in range(4)]
    for each in many:
        patience.is_silent(each)
    patience.starts._waiting.add(many[0])
    patience._make_room()
    for each in many:
        patience.has_asked(each)
    assert patience._making_room is None
    assert [each.is_closed for each in many] == [False, True, True, True]


async def test_a_connection_over_the_limit_is_refused_but_its_health_check_succeeds():
    made = 0

    class Counting(Patience):
        def protocol(self, *arguments: Any, **options: Any) -> http_patience.PatientProtocol:
            nonlocal made
            made += 1
            return super().protocol(*arguments, **options)

    async def answer(port: int, sent: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as client:  # it is accepted once it has sent a request
            client.sendall(sent)
            client.setblocking(False)
            return await asyncio.get_running_loop().sock_recv(client, 1 << 10)

    async with patient(FakeBackend(replies("Hi")), timeout_s=PATIENCE_S, kind=Counting, maximum=8) as port:
        gate = [await raw(port) for _ in range(4)]
        for _, writer in gate:
            writer.write(REQUEST)
        assert all([b" 200 " in await reader.readline() for reader, _ in gate])
        assert (await answer(port, REQUEST)).startswith(b"HTTP/1.1 200 ")
        for _ in range(2 * MAX_REFUSED):
            assert (await answer(port, REQUEST.replace(b"health", b"props"))).startswith(b"HTTP/1.1 503 ")
        for _, writer in gate:
            writer.close()
    assert made == 4


async def large(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with more than the system buffers for a client that does not read."""
    await Response(bytes(32 << 20))(scope, receive, send)


async def reading(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads a body, then waits briefly for its client to leave."""
    while (await receive()).get("more_body"):
        pass
    leaving = asyncio.ensure_future(receive())
    for _ in range(3):
        await asyncio.sleep(0)
    await Response(b"x")(scope, receive, send)
    leaving.cancel()


async def unread(port: int, headers: bytes = b"") -> socket.socket:
    """A client that sent a request, got the first byte of the response, and reads no more."""
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(client, REQUEST[:-2] + headers + b"\r\n")
    await asyncio.get_running_loop().sock_recv(client, 1)
    return client


async def is_cut_off(client: socket.socket) -> bool:
    """Whether its connection closes before the response is complete; it continues reading."""
    got = 0
    with client, suppress(ConnectionError):
        while data := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            got += len(data)
    return got < 32 << 20


async def test_the_smallest_chunks_do_not_stop_the_loop():
    body = b"".join(b"1\r\n%c\r\n" % char for char in json.dumps(CHAT | {"user": "x" * 50_000}).encode())
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    async with patient(FakeBackend(replies("Hi"))) as port:
        reader, writer = await raw(port)
        with watched_loop() as late:
            writer.write(head + body + b"0\r\n\r\n")
            assert (await until_closed(reader)).startswith(b"HTTP/1.1 200 ")
        assert not late
        writer.close()


@pytest.mark.parametrize("body", [b'{"content": "x"}', b"x" * 9000], ids=["small", "large"])
async def test_pipelined_requests_are_buffered_sparingly_and_all_get_responses(body):
    """The bytes that are kept are scanned with each request."""
    buffered_bytes: list[int] = []

    class Reported(http_patience.PatientProtocol):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            buffered_bytes.append(len(self._strict.trailing_data[0]))

    asked = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    count = (1 << 16) // len(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_patience, "PatientProtocol", Reported)
        async with patient(FakeBackend(replies()), app=reading) as port:
            reader, writer = await raw(port)
            writer.write(asked * count + REQUEST[:-2] + b"Connection: close\r\n\r\n")
            assert (await until_closed(reader)).count(b"HTTP/1.1 200 ") == count + 1
            writer.close()
    assert max(buffered_bytes) <= 2 * http_patience.MAX_READ_BYTES


@pytest.mark.parametrize("headers", [b"", b"Connection: close\r\n", b"\r\n" + REQUEST[:-2]])
async def test_a_client_that_does_not_read_its_response_is_disconnected(headers):
    closed = asyncio.Event()

    class Reported(http_patience.PatientProtocol):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            closed.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_patience, "PatientProtocol", Reported)
        async with patient(FakeBackend(replies()), app=large, timeout_s=0.1, send_timeout_s=0.1) as port:
            client = await unread(port, headers)
            await closed.wait()
            assert await is_cut_off(client)


async def test_a_client_that_reads_a_large_response_is_not_silent():
    unread_bytes: list[int] = []

    class Reported(Patience):
        def is_silent(self, connection: http_patience.PatientProtocol) -> None:
            super().is_silent(connection)
            unread_bytes.append(connection.unread_bytes)

    async with patient(FakeBackend(replies()), app=large, kind=Reported) as port:
        assert not await is_cut_off(await unread(port, b"Connection: close\r\n"))
    assert max(unread_bytes) < 64 << 10


async def test_the_longest_readers_are_disconnected_if_too_much_is_unread():
    async with patient(FakeBackend(replies()), app=large, max_unread_bytes=64 << 20) as port:
        clients = [await unread(port, b"Connection: close\r\n") for _ in range(4)]
        assert [await is_cut_off(client) for client in reversed(clients)] == [False, False, True, True]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one address of its own")
async def test_one_machine_that_opens_all_connections_locks_no_other_out(monkeypatch):
    monkeypatch.setattr(http_patience, "machine_of", lambda address: address)
    async with patient(FakeBackend(replies("Hi")), maximum=8) as port:
        greedy = [await raw(port) for _ in range(7)]
        for reader, _ in greedy[4:]:
            assert (await until_closed(reader)).startswith(b"HTTP/1.1 503 ")
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        writer.write(REQUEST)
        assert b" 200 " in await reader.readline()
        for _, each in [*greedy, (reader, writer)]:
            each.transport.abort()
        while True:  # places are freed with the connections
            reader, writer = await raw(port)
            writer.write(REQUEST)
            line = await reader.readline()
            writer.transport.abort()
            if b" 200 " in line:
                break


async def test_a_client_that_sends_many_parts_is_read_in_small_pieces_and_others_in_large_ones():
    """A health check waits for a few turns of the loop, and each part of a body takes time in one."""
    maximum = dict.fromkeys(("parts", "plain"), 0)

    reads = Counter[http_patience.PatientProtocol]()

    class Watching(Patience):
        def read_next(self, connection: http_patience.PatientProtocol, read_bytes: int, parts: int) -> int:
            if parts <= http_patience.FEW_PARTS:
                maximum["plain"] = max(maximum["plain"], read_bytes)
            else:
                reads[connection] += 1
                if reads[connection] > 2:  # by then it is known which is which
                    maximum["parts"] = max(maximum["parts"], parts)
            return super().read_next(connection, read_bytes, parts)

    async def send(port: int, head: bytes, body: bytes) -> bytes:
        reader, writer = await raw(port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + head + body)
        printed = await until_closed(reader)
        writer.close()
        return printed

    body = json.dumps(CHAT).encode() + b" " * 20_000
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    async with patient(FakeBackend(replies("Hi")), kind=Watching) as port:
        coded, plain = b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Length: %d\r\n\r\n" % len(body)
        responses = await asyncio.gather(send(port, coded, small), send(port, coded, small), send(port, plain, body))
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in responses)
    assert maximum["parts"] <= http_patience.MAX_PARTS + 2
    assert maximum["plain"] == http_patience.MAX_READ_BYTES


async def post_to_end(port: int, headers: bytes, body: bytes) -> bytes:
    """Send a request with ``body``, and read until the connection closes."""
    reader, writer = await raw(port)
    writer.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + headers + b"\r\n")
    writer.write(body)
    printed = await until_closed(reader)
    writer.close()
    return printed


async def reads_at_a_turn(clients: int, headers: bytes, body: bytes, *, parts: int = 0) -> list[int]:
    """For each turn of the loop: how many pieces of at least ``parts`` parts it reads, if ``clients`` all send
    ``body``.
    """
    at_a_turn: list[int] = [0]

    class Watching(Patience):
        def read_next(self, connection: http_patience.PatientProtocol, read_bytes: int, count: int) -> int:
            at_a_turn[-1] += count >= parts
            return super().read_next(connection, read_bytes, count)

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            at_a_turn.append(0)

    async with patient(FakeBackend(replies("Hi")), kind=Watching, app=reading) as port:
        counting = asyncio.create_task(count_turns())
        responses = await asyncio.gather(*(post_to_end(port, headers, body) for _ in range(clients)))
        counting.cancel()
    assert all(response.startswith(b"HTTP/1.1 200 ") for response in responses)
    return sorted(at_a_turn)


async def test_few_clients_that_send_many_parts_are_read_per_turn_of_the_loop():
    body = b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n"
    at_a_turn = await reads_at_a_turn(40, b"Transfer-Encoding: chunked\r\n", body, parts=http_patience.FEW_PARTS + 1)
    assert sum(at_a_turn) > 500
    assert at_a_turn[-20] <= 2 * MAX_STARTS, "but for the first piece of each, which nobody knows before"


async def test_few_of_many_clients_that_send_a_body_are_read_per_turn_of_the_loop():
    at_a_turn = await reads_at_a_turn(4 * MAX_READS, b"Content-Length: 60000\r\n", bytes(60_000))
    assert at_a_turn[-4] <= MAX_READS + 2 * MAX_STARTS, "but for the first piece of each"


class Seen(Patience):
    """Tracks which of its connections and transports are not freed, and whether one has ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made = weakref.WeakSet[Any]()
        self.gone = asyncio.Event()
        seen.append(self)

    def protocol(self, *arguments: Any, **options: Any) -> Any:
        made = super().protocol(*arguments, **options)
        self.made.add(made)
        return made

    def is_silent(self, connection: Any) -> None:
        super().is_silent(connection)
        self.made.add(connection.transport)

    def is_gone(self, connection: Any) -> None:
        super().is_gone(connection)
        self.gone.set()


seen: list[Seen] = []


def asked(**fields: Any) -> bytes:
    body = json.dumps(CHAT | fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def turns_of_the_loop() -> None:
    """Exclude existing objects from the collector: scanning all objects of the suite takes a second each time."""
    gc.collect()
    gc.freeze()
    gc.disable()


@pytest.mark.parametrize(
    "sent",
    [
        REQUEST,
        REQUEST[:-2],
        b"wrong\r\n\r\n",
        asked(),
        asked(stream=True),
        asked(messages=[]),
        asked(n="x"),
        asked()[:-9],
    ],
    ids=["health", "a part", "wrong", "answered", "streamed", "refused", "no number", "unfinished"],
)
async def test_a_closed_connection_leaves_nothing_to_the_garbage_collector(sent):
    """The collector blocked the loop for 200 ms over a thousand of them, and some thousands kept 100 MB."""
    async with patient(FakeBackend(replies("Hi")), kind=Seen) as port:
        turns_of_the_loop()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            if sent not in (REQUEST[:-2], asked()[:-9]):
                await reader.read(1)
            writer.close()
            await writer.wait_closed()
            await seen[-1].gone.wait()
            for _ in range(1000):
                await asyncio.sleep(0)
            assert not seen[-1].made
            assert not [each for each in gc.get_objects() if isinstance(each, (RequestResponseCycle, ExceptionGroup))]
        finally:
            gc.enable()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_early_leaves_nothing_to_the_garbage_collector(stream):
    started, waits = asyncio.Event(), replies("Hi", asyncio.Event())

    def begin(call: Call) -> Iterable[Item]:
        started.set()
        return waits(call)

    async with patient(FakeBackend(begin), kind=Seen) as port:
        turns_of_the_loop()
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked(stream=stream))
            await started.wait()
            writer.transport.abort()
            await seen[-1].gone.wait()
            for _ in range(1000):
                await asyncio.sleep(0)
            assert not seen[-1].made
            assert not [each for each in gc.get_objects() if isinstance(each, ClientDisconnect)]
        finally:
            gc.enable()
