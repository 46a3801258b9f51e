"""No request blocks the event loop: others are served while it is read, refused or answered, in every dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from primad.api.app import create_app
from primad.head.model.text_service import TextService
from primad.ring.messages import Generate, GenerationEvent
from tests.fakes.backend import Call, FakeBackend, replies
from tests.fakes.embeddings import FakeEmbeddings
from tests.fakes.vocabulary import write_vocabulary
from tests.fakes.watchdog import watched_loop

PATIENCE_S = 300
MANY = 20_000
LONG = 2_000_000
CHUNK = 1 << 16
HELLO = [{"role": "user", "content": "Hi"}]
TURNS = [{"role": ("user", "assistant")[number % 2], "content": "Hi"} for number in range(MANY)]
FIELDS = {f"field {number}": {"type": "string", "description": "x" * 20} for number in range(4000)}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS)}
TOOLS = [{"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object"}}} for n in range(3000)]
BIAS = {str(number): 1 for number in range(MANY)}
TEXT_BIAS = {f"word {number}": 1 for number in range(3 * MANY)}
CALLS = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(2 * MANY)]
RESULTS = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"result {n}"} for n in range(2 * MANY)]
OUTPUTS = [{"type": "function_call_output", "call_id": f"c{n}", "output": f"{n}"} for n in range(2 * MANY)]
NESTED = b'{"messages": ' + b"[" * MANY

Body = dict[str, Any] | bytes
HOSTILE: list[tuple[str, Body]] = [
    ("/v1/chat/completions", {"messages": TURNS}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": " " * LONG}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}]}),
    ("/v1/chat/completions", {"messages": HELLO, "logit_bias": BIAS}),
    ("/v1/chat/completions", {"messages": HELLO, "logit_bias": TEXT_BIAS}),
    ("/v1/chat/completions", {"messages": HELLO, "logit_bias": {"x" * LONG: 1}}),
    ("/v1/chat/completions", {"messages": [*HELLO, {"role": "assistant", "tool_calls": CALLS}, *RESULTS]}),
    ("/v1/chat/completions", {"messages": [*HELLO, *RESULTS]}),
    ("/v1/chat/completions", {"messages": HELLO, "json_schema": SCHEMA}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS}),
    ("/v1/chat/completions", {"messages": HELLO, "grammar": 'root ::= "x"\n' * MANY}),
    ("/v1/chat/completions", {"messages": HELLO, "stop": ["x"] * MANY}),
    ("/v1/chat/completions", {"messages": HELLO} | {f"unknown {number}": number for number in range(MANY)}),
    ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": dict.fromkeys(map(str, range(MANY)), 1)}),
    ("/v1/chat/completions", NESTED),
    ("/v1/completions", {"prompt": "x" * LONG}),
    ("/v1/completions", {"prompt": ["x" * 4000] * 128, "max_tokens": 1, "echo": True}),
    ("/v1/completions", {"prompt": [[1] * 5000] * 128, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "x", "suffix": "y" * LONG}),
    ("/completion", {"prompt": ["x", 1] * MANY}),
    ("/infill", {"input_prefix": "x" * LONG, "input_suffix": "y" * LONG}),
    ("/infill", {"input_prefix": "x", "input_suffix": "", "input_extra": [{"text": "x" * 5000}] * 256}),
    ("/tokenize", {"content": "x" * LONG, "with_pieces": True}),
    ("/detokenize", {"tokens": [65] * (LONG // 4)}),
    ("/apply-template", {"messages": TURNS}),
    ("/v1/messages", {"model": "claude-x", "max_tokens": 5, "messages": TURNS}),
    ("/v1/messages", {"model": "claude-x", "max_tokens": 5, "messages": HELLO, "system": "x" * LONG}),
    ("/v1/messages/count_tokens", {"model": "claude-x", "messages": TURNS}),
    ("/v1/responses", {"input": [{"role": "user", "content": "Hi"}] * MANY}),
    ("/v1/responses", {"input": OUTPUTS}),
    ("/v1/responses", {"input": "Hi", "metadata": {str(number): "x" * 100 for number in range(MANY)}}),
    ("/v1/responses", {"input": "Hi", "instructions": "x" * 9000, "stream": True}),
    ("/api/chat", {"model": "toy", "messages": TURNS}),
    ("/api/generate", {"model": "toy", "prompt": "x" * LONG}),
    ("/api/chat", {"model": "toy", "messages": HELLO, "format": SCHEMA}),
    ("/v1/embeddings", {"input": ["x" * 900] * 2048}),
    ("/v1/embeddings", {"input": [[1] * 200] * 2048, "encoding_format": "base64"}),
    ("/v1/rerank", {"query": "x" * LONG, "documents": ["y" * 500] * 2047}),
    ("/api/embed", {"model": "small", "input": ["x"] * 2048}),
]
"""Requests with many or long parts, wherever a dialect has any."""


class GradualBackend(FakeBackend):
    """Yields one token per turn of the loop, as a ring does, and accepts any length of prompt."""

    async def generate(self, requests: Generate, **how: Any) -> AsyncGenerator[GenerationEvent, None]:
        short = msgspec.structs.replace(requests, prompt=requests.prompt[-9:])
        async with aclosing(super().generate(short, **how)) as events:
            async for event in events:
                await asyncio.sleep(0)
                yield event


class Sender:
    """The application with a real text process, called as uvicorn calls it."""

    def __init__(self, service: TextService, backend: FakeBackend) -> None:
        backend.prepare = service.prepare  # type: ignore[method-assign]
        self._app = create_app(backend, embeddings=FakeEmbeddings())
        self.refusals: list[bytes] = []

    async def __call__(self, path: str, body: bytes) -> tuple[int, int]:
        """The status and the size of the response."""
        chunks = [body[at : at + CHUNK] for at in range(0, len(body), CHUNK)] or [b""]
        waiting = asyncio.Event()
        status, size = 0, 0

        async def receive() -> dict[str, Any]:
            if not chunks:
                await waiting.wait()
            await asyncio.sleep(0)
            return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

        async def send(message: Any) -> None:
            nonlocal status, size
            status = message.get("status", status)
            size += len(message.get("body", b""))
            if status >= 400:
                self.refusals.append(message.get("body", b""))
            await asyncio.sleep(0)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": headers, "client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http"}
        await self._app(scope, receive, send)
        return status, size


async def hostile(tmp_path: Any, backend: FakeBackend, requests: list[tuple[str, Body]]) -> list[tuple[int, int]]:
    """The responses to ``requests``, sent one after the other while the loop is watched."""
    path = write_vocabulary(tmp_path / "toy.gguf")
    service = TextService(str(path), backend.vocabulary.chat_template)
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert backend.served is not None
            backend.served = replace(backend.served, vocabulary=await service.pieces())
            send = Sender(service, backend)
            await send("/v1/chat/completions", json.dumps({"messages": HELLO}).encode())
            bodies = [(to, body if isinstance(body, bytes) else json.dumps(body).encode()) for to, body in requests]
            responses, stood = list[tuple[int, int]](), list[str]()
            with watched_loop() as late:
                for to, body in bodies:
                    responses.append(await send(to, body))
                    stood += [f"{to} {body[:60]!r}: {each}" for each in late[len(stood) :]]
            assert not stood, "\n".join(stood)
            slow = [refusal for refusal in send.refusals if b"took more than" in refusal]
            assert not slow, "work that grows faster than the request"
            return responses
    finally:
        await service.close()


async def test_no_request_stops_the_loop(tmp_path):
    responses = await hostile(tmp_path, GradualBackend(replies("Hi"), context_tokens=1 << 14), HOSTILE)
    wrong = [(to, status) for (to, _), (status, _) in zip(HOSTILE, responses, strict=True) if status not in (200, 400)]
    assert not wrong


async def test_no_response_blocks_the_event_loop(tmp_path):
    def at_length(call: Call) -> list[int]:
        return [65] * min(call.max_tokens, 1500)

    requests: list[tuple[str, Body]] = [
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": -1, "logprobs": 20}),
        ("/v1/completions", {"prompt": "Hi", "n": 16, "max_tokens": 99, "logprobs": 5, "stream": True}),
        ("/api/chat", {"model": "toy", "messages": HELLO, "logprobs": True, "top_logprobs": 20, "stream": False}),
        ("/v1/responses", {"input": "Hi"}),
        ("/completion", {"prompt": "Hi", "n_probs": 100, "stream": True, "stop": ["A" * 255 + "b"]}),
        ("/completion", {"prompt": "Hi", "n_probs": 100, "response_fields": ["completion_probabilities"]}),
    ]
    responses = await hostile(tmp_path, GradualBackend(at_length, context_tokens=1 << 14), requests)
    assert [status for status, _ in responses] == [200] * len(requests)
    assert responses[0][1] > 1_000_000
