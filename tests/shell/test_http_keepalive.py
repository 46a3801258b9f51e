"""A stream that waits for its next token sends a comment now and then, and ends as it would without."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from starlette.types import Message

from primad.api.dialects.openai.routes import EVENTS
from primad.api.http.connection import MessageStream
from primad.errors import RingError
from primad.settings.timings import ApiTimings
from tests.fakes.http import PATIENCE_S

OFTEN = ApiTimings(keepalive_s=0.01)


class Word(msgspec.Struct):
    text: str


class Client:
    """Collects what is sent; never disconnects."""

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.waits = asyncio.Event()
        self.more = asyncio.Event()

    async def receive(self) -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("never")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.body.append(message["body"])
            if message["body"].startswith(b":"):
                self.waits.set()


async def test_a_waiting_stream_sends_comments_and_then_continues() -> None:
    client = Client()

    async def words():
        yield Word("one")
        await client.waits.wait()
        yield Word("two")

    async with asyncio.timeout(PATIENCE_S):
        await MessageStream(words(), EVENTS, OFTEN)({"type": "http"}, client.receive, client.send)
    body = client.body
    comments = [part for part in body if part.startswith(b":")]
    assert comments
    assert all(part.endswith(b"\n\n") for part in comments)
    assert [part for part in body if part.startswith(b"data")] == [
        b'data: {"text":"one"}\n\n',
        b'data: {"text":"two"}\n\n',
        b"data: [DONE]\n\n",
    ]


async def test_a_stream_that_waits_for_its_first_message_begins_and_may_still_end_with_an_error() -> None:
    client = Client()

    async def late():
        await client.waits.wait()
        raise RingError("the ring broke")
        yield Word("never")

    async with asyncio.timeout(PATIENCE_S):
        await MessageStream(late(), EVENTS, OFTEN)({"type": "http"}, client.receive, client.send)
    body = client.body
    assert body[0].startswith(b": ")
    assert [b"the ring broke" in part for part in body if part.startswith(b"data")] == [True]


async def test_headers_are_sent_before_the_first_event() -> None:
    client, started = Client(), asyncio.Event()

    async def send(message: Message) -> None:
        await client.send(message)
        if message["type"] == "http.response.start":
            started.set()

    async def words():
        await started.wait()
        yield Word("one")

    async with asyncio.timeout(PATIENCE_S):
        await MessageStream(words(), EVENTS, ApiTimings(admitted_s=0.01))({"type": "http"}, client.receive, send)
    assert client.body == [b'data: {"text":"one"}\n\n', b"data: [DONE]\n\n", b""]


async def test_a_stream_that_is_refused_at_once_has_not_started() -> None:
    client = Client()

    async def refused():
        raise RingError("nobody serves")
        yield Word("never")

    with pytest.raises(RingError):
        async with asyncio.timeout(PATIENCE_S):
            await MessageStream(refused(), EVENTS)({"type": "http"}, client.receive, client.send)
    assert client.body == []
