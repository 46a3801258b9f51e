"""A client that leaves frees its sequence at once, whatever it was waiting for."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from primad.api.app import create_app
from primad.settings.timings import ApiTimings
from tests.fakes.backend import FakeBackend, replies
from tests.fakes.http import PATIENCE_S, BareClient, served

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", ["", "some text"])
async def test_leaving_while_the_ring_computes(stream, before):
    reached = asyncio.Event()

    def script(call):
        yield from before.encode()
        reached.set()
        yield asyncio.Event()  # never set: the ring would compute for ever

    backend = FakeBackend(script)
    client = BareClient(CHAT, messages=HELLO, stream=stream)
    app = create_app(backend)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        group.create_task(app(client.scope, client.receive, client.send))
        await reached.wait()
        assert not backend.calls[0].closed.is_set()
        client.left.set()
        await backend.calls[0].closed.wait()
    assert backend.calls[0].sampled == len(before)


async def test_leaving_while_the_first_of_several_choices_is_written():
    backend = FakeBackend(replies("a", asyncio.Event()))
    client = BareClient(CHAT, messages=HELLO, stream=True, n=3)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        group.create_task(create_app(backend)(client.scope, client.receive, client.send))
        while (await client.got.get()).get("body", b"").find(b'"a"') < 0:
            pass
        client.left.set()
    assert len(backend.calls) == 1
    assert backend.calls[0].closed.is_set()


async def test_a_client_that_reads_nothing_counts_as_gone():
    backend = FakeBackend(replies("a" * 1000))
    client = BareClient(CHAT, messages=HELLO, stream=True)
    client.blocked.set()
    async with asyncio.timeout(PATIENCE_S):
        await create_app(backend, timings=ApiTimings(send_timeout_s=0.01))(client.scope, client.receive, client.send)
    assert backend.calls[0].closed.is_set()


async def test_a_client_that_leaves_in_its_body():
    backend = FakeBackend(replies("a"))
    client = BareClient(CHAT, messages=HELLO)
    await client.receive()
    client.left.set()
    async with asyncio.timeout(PATIENCE_S):
        await create_app(backend)(client.scope, client.receive, client.send)
    assert backend.calls == []


async def test_a_client_that_never_ends_its_body():
    client = BareClient(CHAT, messages=HELLO)
    await client.receive()
    async with asyncio.timeout(PATIENCE_S):
        await create_app(FakeBackend(replies()), timings=ApiTimings(body_timeout_s=0.01))(
            client.scope, client.receive, client.send
        )
    assert client.got.get_nowait()["status"] == 408


@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_socket_frees_the_sequence(stream):
    reached = asyncio.Event()

    def script(call):
        yield from b"some text"
        if len(backend.calls) == 1:
            reached.set()
            yield asyncio.Event()

    backend = FakeBackend(script)
    async with served(backend) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": HELLO, "stream": stream}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if stream:
            await reader.readuntil(b'"content":"s"')
        await reached.wait()
        writer.close()
        await backend.calls[0].closed.wait()
        async with httpx.AsyncClient(base_url=url) as client:
            answer = await client.post(CHAT, json={"messages": HELLO})
        assert answer.json()["choices"][0]["message"]["content"] == "some text"
