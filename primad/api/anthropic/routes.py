"""The routes of Anthropic's dialect (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from primad.api.anthropic.answers import (
    AnthropicError,
    AnthropicMessage,
    MessageAnswer,
    TokenCount,
    anthropic_error,
    error_event,
)
from primad.api.anthropic.job import NAMES, chat_request
from primad.api.anthropic.schema import CountRequest, MessagesRequest
from primad.api.backend import ServedModel
from primad.api.chat import tokenize_prompt
from primad.api.dialect import EVENT_STREAM, Dialect, Framing, NamedEvent, Route, named_event
from primad.api.endpoint import Endpoint, json_response
from primad.api.openai.job import Job, chat_job, check_model
from primad.api.openai.sampling import SEEDS
from primad.api.openai.schema import parse, said_as
from primad.api.openai.tool_use import chat_text
from primad.errors import PrimadError


def _error(exc: PrimadError) -> bytes:
    return named_event(error_event(exc))


_EVENTS: Final = Framing(
    media_type=EVENT_STREAM,
    message=named_event,
    error=_error,
    end=b"",
    waiting=named_event(NamedEvent("ping", {"type": "ping"})),
)


class _Routes:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def hello(self, request: Request) -> Response:
        """Whether somebody is here; some clients ask before anything else."""
        return json_response({"message": "hello"})

    async def count(self, request: Request) -> Response:
        """How many tokens a conversation has, also one that is too long."""
        served = self._endpoint.serving()
        asked = chat_request(parse(CountRequest, await self._endpoint.read(request)), served)
        check_model(asked.model, [served])
        text = chat_text(asked, served, now=datetime.now().astimezone())
        return json_response(TokenCount(input_tokens=len(tokenize_prompt(served.vocabulary, text))))

    async def messages(self, request: Request) -> Response:
        """Continue a conversation."""
        served = self._endpoint.serving()
        ask = parse(MessagesRequest, await self._endpoint.read(request))
        job = _job(ask, served)
        answer = MessageAnswer(
            id=f"msg_{secrets.token_hex(12)}",
            model=served.id,
            prompt_tokens=job.prompt_tokens,
            shows_thoughts=ask.thinking is not None and ask.thinking.type != "disabled",
        )
        if ask.stream:
            return self._endpoint.stream(self._stream(served, job, answer), _EVENTS)
        answered = await self._endpoint.whole(request, served, job)
        return json_response(answer.whole(answered[0]))

    async def _stream(self, served: ServedModel, job: Job, answer: MessageAnswer) -> AsyncGenerator[NamedEvent, None]:
        begun = False
        async with aclosing(self._endpoint.write(served, job, job.choices[0])) as written:
            async for part in written:
                if not begun:
                    begun = True
                    yield answer.opening()
                for event in answer.events(part):
                    yield event


def _job(ask: MessagesRequest, served: ServedModel) -> Job:
    request = chat_request(ask, served)
    with said_as(NAMES):
        return chat_job(request, served, seed=secrets.randbelow(SEEDS), now=datetime.now().astimezone())


def _routes(endpoint: Endpoint) -> Sequence[Route]:
    here = _Routes(endpoint)
    return (
        Route(path="/api/hello", handler=here.hello, methods=("GET", "HEAD")),
        Route(
            path="/v1/messages",
            handler=here.messages,
            asks="MessagesRequest",
            answers="AnthropicMessage",
            stream_type=EVENT_STREAM,
        ),
        Route(path="/v1/messages/count_tokens", handler=here.count, asks="CountRequest", answers="TokenCount"),
    )


DIALECT: Final = Dialect(
    routes=_routes,
    prefixes=("/v1/messages", "/api/hello"),
    error_body=anthropic_error,
    error_name="AnthropicError",
    requests=(CountRequest, MessagesRequest),
    answers=(AnthropicMessage, TokenCount, AnthropicError),
)
