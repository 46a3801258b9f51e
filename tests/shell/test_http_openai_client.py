"""The official client over a real port, as people use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from primad.api.answering.backend import Health
from primad.errors import RequestError, RingError
from tests.fakes.backend import FakeBackend, replies
from tests.fakes.http import served
from tests.lazily import Lazily

openai = Lazily("openai")

HELLO = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def client_of(backend: FakeBackend) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served(backend) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_models():
    async with client_of(FakeBackend(replies())) as client:
        assert [model.id async for model in client.models.list()] == ["toy"]
        assert (await client.models.retrieve("toy")).owned_by == "primad"


async def test_chat():
    async with client_of(FakeBackend(replies("Hello world"))) as client:
        answer = await client.chat.completions.create(
            model="toy", messages=HELLO, n=2, temperature=0, max_completion_tokens=5
        )
        assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
        assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
        assert answer.usage.completion_tokens == 10


async def test_chat_that_streams():
    async with client_of(FakeBackend(replies("Grüße 😀STOPmore"))) as client:
        stream = await client.chat.completions.create(
            model="toy", messages=HELLO, stream=True, stream_options={"include_usage": True}, stop=["STOP"]
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Grüße 😀"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == 16


async def test_text_arrives_while_the_ring_still_computes():
    more = asyncio.Event()
    async with client_of(FakeBackend(replies("first", more, " second"))) as client:
        stream = await client.chat.completions.create(model="toy", messages=HELLO, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text == "first":
                more.set()
        assert text == "first second"


async def test_completion():
    async with client_of(FakeBackend(lambda call: f"{call.sampling.seed}!".encode())) as client:
        answer = await client.completions.create(
            model="toy", prompt=["a", "b"], logprobs=2, stop="!", max_tokens=9, seed=3
        )
        assert [choice.text for choice in answer.choices] == ["3", "3"]
        assert answer.choices[0].logprobs.tokens == ["3"]
        assert answer.choices[0].logprobs.top_logprobs == [{"3": -0.5, "4": -1.0}]
        stream = await client.completions.create(model="toy", prompt="a", seed=4, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "4!"


async def test_seed_and_logprobs():
    async with client_of(FakeBackend(lambda call: str(call.sampling.seed).encode())) as client:
        fields = {"model": "toy", "messages": HELLO, "logprobs": True, "top_logprobs": 3}
        first = await client.chat.completions.create(**fields, seed=11)
        again = await client.chat.completions.create(**fields, seed=11)
        other = await client.chat.completions.create(**fields, seed=12)
        contents = [answer.choices[0].message.content for answer in (first, again, other)]
        assert contents == ["11", "11", "12"]
        entry = first.choices[0].logprobs.content[0]
        assert (entry.token, entry.bytes, len(entry.top_logprobs)) == ("1", [49], 3)


async def test_the_stream_helper_puts_a_message_together():
    async with client_of(FakeBackend(replies("Hello"))) as client:
        async with client.chat.completions.stream(model="toy", messages=HELLO, logprobs=True) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "Hello"
        assert len(final.choices[0].logprobs.content) == 5


@pytest.mark.parametrize(
    ("changes", "raised", "code"),
    [
        ({"temperature": -1}, "BadRequestError", "invalid_value"),
        ({"messages": []}, "BadRequestError", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "BadRequestError", "context_length_exceeded"),
        ({"model": "gpt-4"}, "NotFoundError", "model_not_found"),
    ],
)
async def test_refusals_are_the_clients_exceptions(changes, raised, code):
    async with client_of(FakeBackend(replies("x"))) as client:
        with pytest.raises(getattr(openai, raised)) as caught:
            await client.chat.completions.create(**{"model": "toy", "messages": HELLO} | changes)
        assert caught.value.code == code
        too_long = code == "context_length_exceeded"
        assert caught.value.type == ("exceed_context_size_error" if too_long else "invalid_request_error")


async def test_a_body_that_is_too_large_is_refused():
    async with client_of(FakeBackend(replies("x"))) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="toy", prompt="x" * (9 << 20))
        assert caught.value.status_code == 413


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_day(stream):
    loading = FakeBackend(replies())
    loading.state = Health(serving=False, taken=False, detail="loading")
    for backend in (FakeBackend(replies(RingError("gone"))), loading):
        async with client_of(backend) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="toy", messages=HELLO, stream=stream)
            assert caught.value.status_code == 503


async def test_a_full_queue():
    async with client_of(FakeBackend(replies(RequestError("full", status=429)))) as client:
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="toy", messages=HELLO)


async def test_a_ring_that_breaks_in_a_stream():
    async with client_of(FakeBackend(replies("some", RingError("worker b went away")))) as client:
        stream = await client.chat.completions.create(model="toy", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="worker b went away"):
            _ = [chunk async for chunk in stream]
