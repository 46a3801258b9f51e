"""A plain health check is answered before it becomes a request, with the same response."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest
from starlette.types import Receive, Scope, Send

from primad.api.answering.backend import Health
from primad.api.app import create_app
from primad.api.http import patience as http_patience
from primad.api.http.access import Admission
from primad.api.http.shared import Shared
from tests.fakes.backend import FakeBackend, replies
from tests.shell.gated import raw, until_closed
from tests.shell.patient import patient

PLAIN = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
LAST = b"Connection: close\r\n\r\n"


class Watched:
    """The app, with a count of the requests that reach it."""

    def __init__(self, backend: FakeBackend) -> None:
        self.app, self.requests = create_app(backend, admission=Admission(hosts=("desk.lan",))), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests += 1
        await self.app(scope, receive, send)


async def responses(
    sent: bytes, backend: FakeBackend | None = None
) -> tuple[list[tuple[bytes, dict[bytes, bytes], bytes]], int]:
    """The status line, headers and body of each response to ``sent``, and the number of requests to the app."""

    watched = Watched(backend or FakeBackend(replies()))
    async with patient(FakeBackend(replies()), app=watched, checks=watched.app.state.checks) as port:
        reader, writer = await raw(port)
        writer.write(sent)
        printed = await until_closed(reader)
        writer.close()
    found = []
    while printed:
        head, _, printed = printed.partition(b"\r\n\r\n")
        line, *lines = head.split(b"\r\n")
        headers = {name.lower(): value for name, _, value in (each.partition(b": ") for each in lines)}
        size = int(headers.get(b"content-length", len(printed)))
        headers.pop(b"date", None)
        found.append((line, headers, printed[:size]))
        printed = printed[size:]
    return found, watched.requests


@pytest.mark.parametrize("path", [b"/health", b"/v1/health"])
@pytest.mark.parametrize("serving", [True, False])
async def test_the_health_check_equals_the_response_of_the_application(path, serving):
    backend = FakeBackend(replies())
    backend.state = Health(serving=serving, taken=serving, detail="as it is")
    sent = PLAIN.replace(b"/health", path)
    (plain,), by_none = await responses(sent + LAST, backend)
    (may_return,), by_app = await responses(sent + b"Origin: http://localhost\r\n" + LAST, backend)
    assert plain == may_return
    assert (by_none, by_app) == (0, 1)


@pytest.mark.parametrize(
    "sent",
    [
        PLAIN.replace(b"GET", b"HEAD"),
        PLAIN.replace(b"/health", b"/health/"),
        PLAIN.replace(b"/health", b"/health?x=1"),
        PLAIN.replace(b"localhost", b"elsewhere.example"),
        PLAIN + b"Expect: 100-continue\r\n",
        PLAIN + b"Upgrade: h2c\r\n",
        PLAIN + b"Content-Length: 0\r\n",
        PLAIN + b"X: " + b"x" * 2000 + b"\r\n",
    ],
    ids=["HEAD", "slash", "query", "foreign host", "expect", "upgrade", "body", "long"],
)
async def test_whatever_is_not_plain_is_a_request_like_any_other(sent):
    assert (await responses(sent + LAST))[1] == 1


@pytest.mark.parametrize("wrong", [b"Host: localhost\r\n", b"X: y\n", b" folded\r\n", b"X\x00: y\r\n"])
async def test_a_health_check_that_is_not_http_is_refused(wrong):
    ((line, _, _),), requests = await responses(PLAIN + wrong + LAST)
    assert (line, requests) == (b"HTTP/1.1 400 Bad Request", 0)


async def test_pipelined_health_checks_and_requests_get_responses_in_order():
    page = b"GET /nothing HTTP/1.1\r\nHost: desk.lan\r\n\r\n"
    check = PLAIN.replace(b"localhost", b"desk.lan") + b"\r\n"
    found, requests = await responses((check * 9 + page) * 9 + PLAIN + LAST)
    lines = [line for line, _, _ in found]
    assert lines == [*([b"HTTP/1.1 200 OK"] * 9 + [b"HTTP/1.1 404 Not Found"]) * 9, b"HTTP/1.1 200 OK"]
    assert requests == 9


async def test_they_are_counted():
    metrics = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + LAST
    text = (await responses((PLAIN + b"\r\n") * 3 + metrics))[0][-1][2]
    assert b'primad_http_requests_total{code="200",path="/health"} 3.0' in text


async def test_a_client_that_repeats_requests_and_reads_nothing_fills_no_memory():
    """Responses wait in the system's buffers, then requests do."""
    unread = [0]

    class Reported(http_patience.PatientProtocol):
        def begin(self) -> None:
            super().begin()
            unread.append(self.unread_bytes)

    loop = asyncio.get_running_loop()
    with pytest.MonkeyPatch.context() as patch, socket.socket() as client:
        patch.setattr(http_patience, "PatientProtocol", Reported)
        async with patient(FakeBackend(replies()), send_timeout_s=0.1) as port:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 10)
            await loop.sock_connect(client, ("127.0.0.1", port))
            with suppress(ConnectionError):  # it is disconnected
                while True:
                    await loop.sock_sendall(client, (PLAIN + b"\r\n") * 1000)
    assert (1 << 14) < max(unread) < 1 << 18


async def test_concurrent_callers_share_one_result_that_is_computed_after_their_calls():
    made, going, may_return = 0, asyncio.Event(), asyncio.Event()

    async def make() -> int:
        nonlocal made
        made += 1
        number = made
        going.set()
        await may_return.wait()
        return number

    shared = Shared(make, 0.01)
    first = asyncio.create_task(shared.get())
    await going.wait()
    later = [asyncio.create_task(shared.get()) for _ in range(99)]
    await asyncio.sleep(0)
    later[0].cancel()
    may_return.set()
    assert [[await first], await asyncio.gather(*later[1:])] == [[1], [2] * 98]
