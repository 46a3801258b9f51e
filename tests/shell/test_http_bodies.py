"""Callers share the memory for request bodies, from the first byte until the response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from primad.api import app as http_app
from primad.api.app import create_app
from primad.settings.timings import ApiTimings
from tests.fakes.backend import FakeBackend, replies
from tests.fakes.http import PATIENCE_S, BareClient

CHAT = "/v1/chat/completions"
MAX_BYTES = 8000


class SlowClient(BareClient):
    """A client at ``address`` that sends its body in the pieces put into ``printed``; None ends the body."""

    def __init__(self, address: str) -> None:
        super().__init__(CHAT)
        self.scope["client"] = (address, 1)
        self.printed: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.is_whole = False

    async def receive(self):
        if self.is_whole:
            return await super().receive()
        piece = await self.printed.get()
        self.is_whole, self._requests = piece is None, []
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    async def status(self) -> int:
        """The status of its response."""
        return (await self.got.get())["status"]


@asynccontextmanager
async def clients_of(monkeypatch, *script, **timings: float) -> AsyncIterator[Callable[..., SlowClient]]:
    monkeypatch.setattr(http_app, "MAX_BODIES_BYTES", MAX_BYTES)
    app = create_app(FakeBackend(replies(*script)), timings=ApiTimings(**timings))
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:

        def client(address: str, *printed: bytes | None) -> SlowClient:
            made = SlowClient(address)
            for piece in printed:
                made.printed.put_nowait(piece)
            made.task = group.create_task(app(made.scope, made.receive, made.send))
            return made

        yield client


def chat(size: int) -> bytes:
    """A request of ``size`` bytes."""
    empty = json.dumps({"messages": [{"role": "user", "content": ""}]}).encode()
    return empty.replace(b'""', b'"%s"' % (b"a" * (size - len(empty))))


async def turns_of_the_loop() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_client_with_endless_bodies_is_refused_and_others_are_not(monkeypatch):
    async with clients_of(monkeypatch, "Hi") as client:
        greedy = [client("10.0.0.1", b"a" * 1000) for _ in range(4)]
        await turns_of_the_loop()
        refused = client("10.0.0.1", b"a" * 1000)
        await refused.task
        start = refused.got.get_nowait()
        assert (start["status"], dict(start["headers"])[b"retry-after"]) == (429, b"5")
        body = json.loads(refused.got.get_nowait()["body"])
        assert (body["error"]["code"], body["error"]["type"]) == ("too_many_bytes", "rate_limit_error")
        assert await client("10.0.0.2", chat(1500), None).status() == 200
        assert [each.got.empty() for each in greedy] == [True] * 4
        for each in greedy:
            each.printed.put_nowait(None)
            assert await each.status() == 400


async def test_a_body_that_grows_beyond_the_share_ends_and_gives_all_back(monkeypatch):
    async with clients_of(monkeypatch) as client:
        for _ in range(3):
            grows = client("10.0.0.1", *[b"a" * 1000] * 5)
            assert await grows.status() == 429
            await grows.task


async def test_a_body_counts_until_its_response_ends(monkeypatch):
    gate = asyncio.Event()
    async with clients_of(monkeypatch, gate, "Hi") as client:
        first = client("10.0.0.1", chat(3900), None)
        await turns_of_the_loop()
        assert first.got.empty()
        assert await client("10.0.0.1", chat(500), None).status() == 429
        gate.set()
        assert await first.status() == 200
        await first.task
        assert await client("10.0.0.1", chat(3900), None).status() == 200


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_client_that_leaves_or_is_too_slow_frees_its_share(monkeypatch, leaves):
    async with clients_of(monkeypatch, "Hi", body_timeout_s=PATIENCE_S if leaves else 0.01) as client:
        slow = client("10.0.0.1", b"a" * 4000)
        if leaves:
            await turns_of_the_loop()
            slow.task.cancel()
            await asyncio.wait([slow.task])
        else:
            assert await slow.status() == 408
            await slow.task
        assert await client("10.0.0.1", chat(3900), None).status() == 200
