"""The routes of Ollama's dialect (https://github.com/ollama/ollama, its API documentation)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.backend import Preparation
from primad.api.answering.job import Job
from primad.api.answering.timings import CompletionClock
from primad.api.dialects.ollama import embedding, prepared
from primad.api.dialects.ollama.responses import (
    API_VERSION,
    LinesResponse,
    OllamaError,
    OllamaLine,
    ollama_error,
    running,
    shown,
    tags,
)
from primad.api.dialects.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from primad.api.http.dialect import Dialect, Route
from primad.api.http.endpoint import Endpoint, Serving, json_response
from primad.api.http.framing import Framing
from primad.api.http.long_response import LongResponse
from primad.errors import PrimadError


def _line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def _error(exc: PrimadError) -> bytes:
    return _line(ollama_error(exc))


_LINES: Final = Framing(media_type="application/x-ndjson", message=_line, error=_error, end=b"", waiting=b"")
"""JSON lines. Clients accept nothing else, so a keep-alive is a line without content."""


class _Routes:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def version(self, request: Request) -> Response:
        """The Ollama version of these paths."""
        return json_response({"version": API_VERSION})

    async def tags(self, request: Request) -> Response:
        """The served models."""
        served, beside = self._endpoint.model(), self._endpoint.embeddings
        is_other = beside is not None and (served is None or beside.name not in served.all_names)
        return json_response(tags(served, [embedding.listed(beside)] if beside is not None and is_other else []))

    async def running(self, request: Request) -> Response:
        """The loaded models."""
        return json_response(running(self._endpoint.model()))

    async def show(self, request: Request) -> Response:
        """Facts about a model."""
        serving = self._endpoint.serving(request)
        await serving.prepare(prepared.show)
        return json_response(shown(serving.served))

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._respond(request, prepared.chat)

    async def generate(self, request: Request) -> Response:
        """Answer a prompt."""
        return await self._respond(request, prepared.generate)

    async def _respond(self, request: Request, preparation: Preparation[prepared.PreparedLines]) -> Response:
        serving = self._endpoint.serving(request)
        asked = await serving.prepare(preparation)
        job = asked.job
        response = LinesResponse(
            model=asked.model,
            is_chat=asked.is_chat,
            shows_thoughts=asked.shows_thoughts,
            created=time.time(),
            vocabulary=serving.served.vocabulary if asked.with_logprobs else None,
            clock=CompletionClock(prompt_tokens=0 if job is None else job.prompt_tokens, begun_s=time.perf_counter()),
        )
        if job is None:
            return json_response(response.loaded())
        if asked.stream:
            framing = replace(_LINES, waiting=_line(response.nothing()))
            return self._endpoint.stream(self._stream(serving, job, response), framing)
        completed = await serving.whole(job, [response.clock])
        long = LongResponse()
        entries = await long.list_of(response.entries(completed[0]))
        return long.response(response.whole(completed[0], entries, time.perf_counter()))

    async def _stream(
        self, serving: Serving, job: Job, response: LinesResponse
    ) -> AsyncGenerator[msgspec.Struct, None]:
        async with aclosing(serving.write(job, job.choices[0])) as written:
            async for part in written:
                line = response.part(part, time.perf_counter())
                if line is not None:
                    yield line


def _routes(endpoint: Endpoint) -> Sequence[Route]:
    here = _Routes(endpoint)
    return (
        *embedding.routes(endpoint),
        Route(path="/api/version", handler=here.version, methods=("GET", "HEAD")),
        Route(path="/api/tags", handler=here.tags, methods=("GET", "HEAD")),
        Route(path="/api/ps", handler=here.running, methods=("GET", "HEAD")),
        Route(path="/api/show", handler=here.show),
        *(
            Route(
                path=path,
                handler=handler,
                asks=asks,
                responses="OllamaLine",
                streamed=("OllamaLine",),
                stream_type=_LINES.media_type,
            )
            for path, handler, asks in (
                ("/api/chat", here.chat, "OllamaChatRequest"),
                ("/api/generate", here.generate, "OllamaGenerateRequest"),
            )
        ),
    )


DIALECT: Final = Dialect(
    routes=_routes,
    prefixes=("/api/",),
    error_body=ollama_error,
    error_name="OllamaError",
    requests=(OllamaChatRequest, OllamaGenerateRequest, *embedding.REQUESTS),
    responses=(OllamaLine, OllamaError, *embedding.RESPONSES),
)
