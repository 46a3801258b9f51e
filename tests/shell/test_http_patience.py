"""Who connects to the endpoint and asks nothing is sent away, and keeps nobody from being answered."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from primad.api.app import create_app
from primad.api.patience import MOST_SILENT, Silent
from primad.settings.timings import ApiTimings
from tests.fakes.backend import FakeBackend, says
from tests.fakes.http import PATIENCE_S
from tests.shell.gated import raw, until_closed

REQUEST = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def patient(
    backend: FakeBackend, *, timeout_s: float = ApiTimings().request_timeout_s, most: int = MOST_SILENT
) -> AsyncIterator[int]:
    """The app as ``primad serve`` runs it; its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(backend), log_config=None, lifespan="off", ws="none", http=Silent(timeout_s, most).protocol
    )
    server = uvicorn.Server(config)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True


@pytest.mark.parametrize("said", [b"", REQUEST[:-2], b"\xff" + bytes(9)], ids=["nothing", "half", "ZMTP"])
def test_who_asks_nothing_is_sent_away(said: bytes):
    async def scenario() -> None:
        async with patient(FakeBackend(says("Hi")), timeout_s=0.1) as port:
            reader, writer = await raw(port)
            writer.write(said)
            assert await until_closed(reader) == b""
            writer.close()

    asyncio.run(scenario())


def test_who_sends_a_byte_now_and_then_after_its_first_answer_is_sent_away():
    async def scenario() -> None:
        async with patient(FakeBackend(says("Hi")), timeout_s=1.0) as port:
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

    asyncio.run(scenario())


def test_an_answer_may_take_longer_than_a_request():
    async def scenario() -> None:
        held = asyncio.Event()
        async with patient(FakeBackend(says("slow", held)), timeout_s=1.0) as port, httpx.AsyncClient() as client:
            asked = asyncio.create_task(client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT))
            await asyncio.wait([asked], timeout=2.0)
            assert not asked.done()
            held.set()
            assert (await asked).json()["choices"][0]["message"]["content"] == "slow"

    asyncio.run(scenario())


def test_the_silent_make_room_for_who_asks():
    async def scenario() -> None:
        async with patient(FakeBackend(says("Hi")), most=5) as port, httpx.AsyncClient() as client:
            silent = [await raw(port) for _ in range(20)]
            answer = await client.get(f"http://127.0.0.1:{port}/health")
            assert answer.status_code == 200
            for reader, _ in silent[:16]:
                assert await until_closed(reader) == b""
            for _, writer in silent:
                writer.close()

    asyncio.run(scenario())
