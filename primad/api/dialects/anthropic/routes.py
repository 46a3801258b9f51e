"""The routes of Anthropic's dialect (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.job import Job
from primad.api.dialects.anthropic import prepared
from primad.api.dialects.anthropic.job import OF_CLIENTS
from primad.api.dialects.anthropic.prepared import TokenCount
from primad.api.dialects.anthropic.responses import (
    AnthropicError,
    AnthropicMessage,
    MessageResponse,
    anthropic_error,
    error_event,
)
from primad.api.dialects.anthropic.schema import CountRequest, MessagesRequest
from primad.api.http.dialect import Dialect, Route
from primad.api.http.endpoint import Endpoint, ModelEndpoint, json_response
from primad.api.http.framing import EVENT_STREAM, Framing, NamedEvent, named_event
from primad.api.http.wanted import Choosing, Fields, WantedModel, wanted
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


def _wanted(fields: Fields) -> WantedModel:
    """Return what a request wants. Model names built into clients mean the model used last, unless a model has that
    name."""
    found = wanted(fields)
    return replace(
        found, is_any=found.model.startswith(OF_CLIENTS), is_readable=found.is_readable and bool(found.model)
    )


class _Routes:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def hello(self, request: Request) -> Response:
        """Return liveness; some clients ask this first."""
        return json_response({"message": "hello"})

    async def count(self, request: Request) -> Response:
        """Return the number of tokens of a conversation, even if it is too long."""
        return json_response(await self._endpoint.serving(request).prepare(prepared.count))

    async def messages(self, request: Request) -> Response:
        """Continue a conversation."""
        serving = self._endpoint.serving(request)
        asked = await serving.prepare(prepared.messages)
        response = MessageResponse(
            id=f"msg_{secrets.token_hex(12)}",
            model=asked.model,
            prompt_tokens=asked.job.prompt_tokens,
            shows_thoughts=asked.shows_thoughts,
        )
        if asked.stream:
            return self._endpoint.stream(self._stream(serving, asked.job, response), _EVENTS)
        completed = await serving.whole(asked.job)
        return json_response(response.whole(completed[0]))

    async def _stream(
        self, serving: ModelEndpoint, job: Job, response: MessageResponse
    ) -> AsyncGenerator[NamedEvent, None]:
        begun = False
        async with aclosing(serving.write(job, job.choices[0])) as written:
            async for part in written:
                if not begun:
                    begun = True
                    yield response.opening()
                for event in response.events(part):
                    yield event


def _routes(endpoint: Endpoint) -> Sequence[Route]:
    here = _Routes(endpoint)
    return (
        Route(path="/api/hello", handler=here.hello, methods=("GET", "HEAD")),
        Route(
            path="/v1/messages",
            handler=here.messages,
            asks="MessagesRequest",
            responses="AnthropicMessage",
            stream_type=EVENT_STREAM,
            chooses=Choosing(read=_wanted, framing=lambda _: _EVENTS),
        ),
        Route(
            path="/v1/messages/count_tokens",
            handler=here.count,
            asks="CountRequest",
            responses="TokenCount",
            chooses=Choosing(read=_wanted),
        ),
    )


DIALECT: Final = Dialect(
    routes=_routes,
    prefixes=("/v1/messages", "/api/hello"),
    error_body=anthropic_error,
    error_name="AnthropicError",
    requests=(CountRequest, MessagesRequest),
    responses=(AnthropicMessage, TokenCount, AnthropicError),
)
