"""A device with --api passes requests to its head: the head's responses, keys and limits, and a clear end without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
import zmq.asyncio
from starlette.types import ASGIApp

from primad.api.app import create_app
from primad.api.http.access import OF_THIS_MACHINE, Admission, Door, caller
from primad.api.http.guard import RELAYED
from primad.api.http.keys import ApiKey, digest_of
from primad.network.gate import Gate
from primad.network.relay_messages import WINDOW_BYTES, cost_of
from primad.relay import link as link_module
from primad.relay import server as server_module
from primad.relay.place import HeadPlace
from primad.relay.relay import Relay
from primad.relay.server import RelayServer
from primad.trust.identity import Identity, new_identity
from tests.fakes.backend import Call, FakeBackend, Item, replies
from tests.fakes.http import PATIENCE_S, BareClient

HOST = "127.0.0.1"
HEAD, DEVICE, STRANGER = (new_identity() for _ in range(3))
KEY = "a-key-of-some-length"
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
STREAMS = [
    (CHAT, HELLO | {"stream": True}, b'data: {"error":'),
    ("/v1/responses", {"input": "Hi", "stream": True}, b'data: {"error":'),
    ("/v1/messages", HELLO | {"model": "toy", "max_tokens": 99, "stream": True}, b"event: error"),
    ("/api/chat", HELLO | {"model": "toy"}, b'{"error":'),
    ("/completion", {"prompt": "Hi", "stream": True}, b'"error"'),
]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """A stopping head waits for no response."""
    monkeypatch.setattr(server_module, "GRACE_S", 0)


class LabHead:
    """A head's relay server on loopback that can be stopped."""

    def __init__(self, app: ASGIApp, session: int = 1) -> None:
        self._context = zmq.asyncio.Context()
        self.server = RelayServer(
            self._context, HOST, HEAD, app, allows={DEVICE.public}.__contains__, gone_after_s=PATIENCE_S
        )
        self.place = HeadPlace(
            name="tower",
            key=HEAD.public,
            address=HOST,
            port=self.server.port,
            session=session,
            gone_after_s=PATIENCE_S,
        )
        self._started = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with Gate(self._context, {DEVICE.public}.__contains__):
            self._started.set()
            await self.server.run()

    async def started(self) -> LabHead:
        await self._started.wait()
        return self

    async def die(self) -> None:
        """Break its connections at once, without a goodbye."""
        self._context.destroy(linger=0)
        self._task.cancel()
        with suppress(asyncio.CancelledError, zmq.ZMQError):
            await self._task

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)


@asynccontextmanager
async def relaying(app: ASGIApp | None, identity: Identity = DEVICE) -> AsyncIterator[tuple[Relay, LabHead | None]]:
    """A device that relays to a head with ``app``, or to none."""
    relay = Relay(identity, "sofa")
    head = None if app is None else await LabHead(app).started()
    relay.follow(None if head is None else head.place)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield relay, head
    finally:
        await relay.close()
        if head is not None:
            await head.stop()


def client_of(app: ASGIApp, address: str = HOST) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(address, 1234))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080")


def through_relay(app: ASGIApp | None, method: str, path: str, address: str = HOST, **request: Any) -> httpx.Response:
    """One request of a client at ``address`` through a device that relays to ``app``."""

    async def once() -> httpx.Response:
        async with relaying(app) as (relay, _), client_of(relay.guarded(("sofa.local",)), address) as client:
            return await client.request(method, path, **request)

    return asyncio.run(once())


def plain(text: str = "Hello there") -> ASGIApp:
    return create_app(FakeBackend(replies(text)))


def recording(seen: list[dict[str, Any]]) -> ASGIApp:
    """An application that records requests and returns their bodies."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        seen.append(dict(scope))
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-of", b"the head")]})
        await send({"type": "http.response.body", "body": body})

    return app


def test_method_path_query_headers_and_a_body_of_many_windows_pass_and_so_does_the_response():
    seen: list[dict[str, Any]] = []
    body = bytes(range(256)) * (5 * WINDOW_BYTES // 256)
    response = through_relay(recording(seen), "PUT", "/any/pa%20th?a=b&c=%20", content=body, headers={"x-mine": "1"})
    assert (response.status_code, response.headers["x-of"], response.content) == (201, "the head", body)
    (scope,) = seen
    assert (scope["method"], scope["path"], scope["query_string"]) == ("PUT", "/any/pa th", b"a=b&c=%20")
    assert (b"x-mine", b"1") in scope["headers"]
    assert scope[RELAYED]


@pytest.mark.parametrize(("path", "body", "_"), STREAMS)
def test_a_stream_through_a_relay_is_the_heads_to_the_byte(path, body, _):
    head, sent = plain(), list[bytes]()

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            sent.append(message.get("body", b""))
            await send(message)

        await head(scope, receive, note)

    response = through_relay(noting, "POST", path, json=body)
    assert response.status_code == 200
    assert response.content == b"".join(sent)
    assert len(sent) > len("Hello there")


def test_an_event_arrives_before_the_next_one_is_made():
    async def scenario() -> None:
        may_continue = asyncio.Event()
        async with relaying(create_app(FakeBackend(replies("a", may_continue, "b")))) as (relay, _):
            client = BareClient(CHAT, **HELLO, stream=True)
            task = asyncio.create_task(relay(client.scope, client.receive, client.send))
            await _until(client, b'"a"')
            may_continue.set()
            await _until(client, b'"b"')
            await _until(client, b"[DONE]")
            await task

    asyncio.run(scenario())


async def _until(client: BareClient, part: bytes) -> bytes:
    while part not in (body := (await client.got.get()).get("body", b"")):
        pass
    return body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_sequence_at_the_head(stream):
    async def scenario() -> None:
        computes = asyncio.Event()

        def script(call: Call) -> Iterator[Item]:
            computes.set()
            yield asyncio.Event()  # never set: the ring would compute for ever

        backend = FakeBackend(script)
        async with relaying(create_app(backend)) as (relay, _):
            client = BareClient(CHAT, **HELLO, stream=stream)
            task = asyncio.create_task(relay(client.scope, client.receive, client.send))
            await computes.wait()
            client.left.set()
            await backend.calls[0].closed.wait()
            await task

    asyncio.run(scenario())


def test_the_head_waits_for_a_client_that_reads_slowly():
    async def scenario() -> None:
        sent, text, is_full = 0, b"x" * 1000, asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal sent
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not client.left.is_set():
                sent += cost_of(text)
                if sent > WINDOW_BYTES:
                    is_full.set()
                await send({"type": "http.response.body", "body": text, "more_body": True})

        client = BareClient(CHAT)
        async with relaying(app) as (relay, _):
            client.blocked.set()
            task = asyncio.create_task(relay(client.scope, client.receive, client.send))
            await is_full.wait()
            for _ in range(100):
                await asyncio.sleep(0)
            assert sent <= WINDOW_BYTES + cost_of(text)
            client.left.set()
            await task

    asyncio.run(scenario())


def test_keys_are_the_heads_to_judge():
    keyed = Admission(door=Door(lambda: [ApiKey(name="laptop", digest=digest_of(KEY))]))
    app = create_app(FakeBackend(replies("Hello")), admission=keyed)
    for given, status in (
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Bearer {KEY}"}, 200),
    ):
        assert through_relay(app, "GET", "/v1/models", headers=given).status_code == status
    assert through_relay(app, "GET", "/health").status_code == 200


def test_a_head_for_programs_of_its_own_machine_is_not_opened_by_a_relay():
    app = create_app(FakeBackend(replies("Hello")), admission=Admission(door=OF_THIS_MACHINE))
    for path in ("/v1/models", "/status", "/ui/who"):
        response = through_relay(app, "GET", path)
        assert response.status_code == 403
        assert "--api-key" in response.json()["error"]["message"]


def test_the_owners_rights_need_the_owners_key_through_a_relay_too():
    app = create_app(FakeBackend(replies("Hello")), admission=Admission(owner_key=KEY))
    owners = [
        through_relay(app, "GET", "/ui/who", headers=given).json()["is_owner"]
        for given in ({}, {"authorization": f"Bearer {KEY}"})
    ]
    assert owners == [False, True]


@pytest.mark.parametrize(
    ("address", "of"), [("192.168.1.9", "192.168.1.9"), ("::ffff:192.168.1.9", "192.168.1.9"), (HOST, "")]
)
def test_limits_count_the_clients_address_which_no_header_changes(address, of):
    callers: list[str] = []

    class Noting(FakeBackend):
        async def status(self) -> dict[str, Any]:
            callers.append(caller())
            return {}

    app = create_app(Noting(replies("Hello")))
    forged = {"x-forwarded-for": "10.0.0.1", "forwarded": "for=10.0.0.2"}
    assert through_relay(app, "GET", "/status", address, headers=forged).status_code == 200
    assert callers == [of]  # the lab's device and head are one machine


def test_a_relay_refuses_a_foreign_host_name_and_accepts_its_devices_own():
    for host, status in (("evil.example", 403), ("sofa.local:8080", 200), ("192.168.1.7", 200)):
        assert through_relay(plain(), "GET", "/v1/models", headers={"host": host}).status_code == status


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat", "/health"])
def test_without_a_head_the_status_is_503_with_retry_after_in_the_dialects_form(path):
    response = through_relay(
        None, "GET" if path == "/health" else "POST", path, **({} if path == "/health" else {"json": HELLO})
    )
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    error = response.json()["error"]
    assert "sofa has no head now" in (error if isinstance(error, str) else error["message"])


def test_a_head_that_accepts_no_relayed_requests_is_named():
    async def scenario() -> str:
        async with relaying(None) as (relay, _), client_of(relay) as client:
            relay.follow(HeadPlace(name="tower", key=HEAD.public, address=HOST, port=0, session=1, gone_after_s=1))
            return (await client.get("/v1/models")).json()["error"]["message"]

    assert "the head tower accepts no relayed requests" in asyncio.run(scenario())


@pytest.mark.parametrize(("path", "body", "last"), STREAMS)
@pytest.mark.parametrize("how", ["dies", "is let go"])
def test_a_stream_that_loses_its_head_ends_with_the_dialects_error(path, body, last, how):
    async def ends(relay: Relay, head: LabHead) -> None:
        if how == "dies":
            await head.die()
        else:
            relay.follow(None)

    got = asyncio.run(_cut(path, body, ends))
    assert last in got[-1]["body"]
    assert b"the head went away" in got[-1]["body"]
    assert not got[-1]["more_body"]


async def _cut(path: str, body: dict[str, Any], ends: Callable[[Relay, LabHead], Awaitable[None]]) -> list[Any]:
    """What a client receives if ``ends`` interrupts its response."""
    async with relaying(create_app(FakeBackend(replies("a", asyncio.Event())))) as (relay, head):
        assert head is not None
        client = BareClient(path, **body)
        task = asyncio.create_task(relay(client.scope, client.receive, client.send))
        got = [await client.got.get()]
        while not got[-1].get("body"):
            got.append(await client.got.get())
        await ends(relay, head)
        await task
        return [*got, *(client.got.get_nowait() for _ in range(client.got.qsize()))]


def test_a_request_that_loses_its_head_before_the_response_is_503_and_the_next_goes_to_the_next_head():
    async def scenario() -> None:
        computes = asyncio.Event()

        def script(call: Call) -> Iterator[Item]:
            computes.set()
            yield asyncio.Event()

        async with relaying(create_app(FakeBackend(script))) as (relay, head), client_of(relay) as client:
            assert head is not None
            task = asyncio.create_task(client.post(CHAT, json=HELLO))
            await computes.wait()
            await head.die()
            assert (await task).status_code == 503
            again = await LabHead(plain("back again"), session=2).started()
            relay.follow(again.place)
            assert (await client.post(CHAT, json=HELLO)).json()["choices"][0]["message"]["content"] == "back again"
            await again.stop()

    asyncio.run(scenario())


def test_a_silent_head_and_a_silent_device_time_out(monkeypatch):
    monkeypatch.setattr(link_module, "ALIVE_S", 0.01)
    monkeypatch.setattr(server_module, "LOOK_S", 0.01)

    async def scenario() -> None:
        backend = FakeBackend(replies("a", asyncio.Event()))
        head = await LabHead(create_app(backend)).started()
        relay = Relay(DEVICE, "sofa")
        relay.follow(head.place)
        async with asyncio.timeout(PATIENCE_S):
            client = BareClient(CHAT, **HELLO, stream=True)
            task = asyncio.create_task(relay(client.scope, client.receive, client.send))
            await _until(client, b'"a"')
            link = relay._to_head()
            link.place = replace(link.place, gone_after_s=0.2)  # before, neither is silent, however slow this machine
            head.server._gone_after_s = 0.2
            monkeypatch.setattr(link_module.HeadLink, "_send", lambda *_: None)  # none of its messages arrive any more
            await backend.calls[0].closed.wait()
            await task
        await relay.close()
        await head.stop()

    asyncio.run(scenario())


def test_requests_that_one_side_does_not_know_end_on_the_other(monkeypatch):
    monkeypatch.setattr(link_module, "ALIVE_S", 0.01)

    async def scenario() -> None:
        backend = FakeBackend(replies("a", asyncio.Event()))
        async with relaying(create_app(backend)) as (relay, head):
            assert head is not None
            client = BareClient(CHAT, **HELLO, stream=True)
            task = asyncio.create_task(relay(client.scope, client.receive, client.send))
            await _until(client, b'"a"')
            (device,) = head.server._devices.values()
            device.open.clear()  # as if its messages had been lost
            await task
            assert b"the head went away" in await _until(client, b"error")

    asyncio.run(scenario())


def test_a_stranger_gets_nothing():
    async def scenario() -> None:
        async with relaying(plain(), STRANGER) as (relay, _), client_of(relay) as client:
            response = await client.get("/v1/models")
            assert response.status_code == 503
            assert "does not let this device in" in response.text

    asyncio.run(scenario())
