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
from primad.api.dialects.ollama.job import plain
from primad.api.dialects.ollama.keep_alive import ollama_wanted
from primad.api.dialects.ollama.models import entry, listed, loaded_entry, shown_model
from primad.api.dialects.ollama.pulling import PullLine, PullPaths
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
from primad.api.http.connection import while_connected
from primad.api.http.dialect import Dialect, Route
from primad.api.http.endpoint import Endpoint, ModelEndpoint, json_response
from primad.api.http.framing import Framing
from primad.api.http.long_response import LongResponse
from primad.api.http.named_model import named_model
from primad.api.http.offered import find_offered, is_offered
from primad.api.http.wanted import Choosing, WantedModel
from primad.errors import PrimadError


def _line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def _error(exc: PrimadError) -> bytes:
    return _line(ollama_error(exc))


_LINES: Final = Framing(media_type="application/x-ndjson", message=_line, error=_error, end=b"", waiting=b"")
"""JSON lines. Clients accept nothing else, so a keep-alive is a line without content."""


def _bare(model: str, *, is_chat: bool) -> LinesResponse:
    """Return lines without content."""
    clock = CompletionClock(prompt_tokens=0, begun_s=time.perf_counter())
    return LinesResponse(model=model, is_chat=is_chat, shows_thoughts=False, created=time.time(), clock=clock)


class _Routes:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def version(self, request: Request) -> Response:
        """Return the Ollama version of these paths."""
        return json_response({"version": API_VERSION})

    async def tags(self, request: Request) -> Response:
        """Return the available models."""
        beside = self._endpoint.embeddings
        if (models := self._endpoint.models) is not None:
            await models.look()
            entries = [entry(each) for each in models.offered()]
            is_beside = beside is not None and not is_offered(beside.name, models.offered())
            return json_response(listed([*entries, embedding.listed(beside)] if beside and is_beside else entries))
        served = self._endpoint.model()
        is_other = beside is not None and (served is None or beside.name not in served.all_names)
        return json_response(tags(served, [embedding.listed(beside)] if beside is not None and is_other else []))

    async def running(self, request: Request) -> Response:
        """Return the loaded models."""
        if (models := self._endpoint.models) is not None:
            loaded = models.loaded()
            offered = [each for each in models.offered() if each.id in loaded]
            return json_response(listed([loaded_entry(each, loaded[each.id].model()) for each in offered]))
        return json_response(running(self._endpoint.model()))

    async def show(self, request: Request) -> Response:
        """Return facts about a model, without loading it."""
        if (models := self._endpoint.models) is not None:
            asked = await named_model(request, self._endpoint.timings.body_timeout_s)
            await models.look()
            found = find_offered(plain(asked.called), models.offered())
            backend = models.loaded().get(found.id)
            return json_response(shown_model(found, None if backend is None else backend.model()))
        serving = self._endpoint.serving(request)
        await serving.prepare(prepared.show)
        return json_response(shown(serving.served))

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._respond(request, prepared.chat)

    async def generate(self, request: Request) -> Response:
        """Respond to a prompt."""
        return await self._respond(request, prepared.generate)

    def choosing(self, *, is_chat: bool) -> Choosing:
        """Return how these requests choose a model; while they wait they get only lines without content."""

        def nothing(wants: WantedModel) -> LinesResponse:
            return _bare(wants.model, is_chat=is_chat)

        async def unload(request: Request, wants: WantedModel) -> Response | None:
            if not wants.is_empty or wants.keep_alive_s != 0 or wants.name is None or self._endpoint.models is None:
                return None
            await while_connected(request.receive, self._endpoint.models.unload(wants.name))
            return json_response(nothing(wants).loaded("unload"))

        return Choosing(
            read=lambda fields: ollama_wanted(fields, fields.messages if is_chat else fields.prompt),
            framing=lambda wants: replace(_LINES, waiting=_line(nothing(wants).nothing())),
            news=lambda wants, _: _line(nothing(wants).nothing()),
            instead=unload,
        )

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
        self, serving: ModelEndpoint, job: Job, response: LinesResponse
    ) -> AsyncGenerator[msgspec.Struct, None]:
        async with aclosing(serving.write(job, job.choices[0])) as written:
            async for part in written:
                line = response.part(part, time.perf_counter())
                if line is not None:
                    yield line


def _routes(endpoint: Endpoint) -> Sequence[Route]:
    here = _Routes(endpoint)
    pulls = () if endpoint.models is None else PullPaths(endpoint, endpoint.models, _LINES).routes()
    return (
        *pulls,
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
                chooses=here.choosing(is_chat=path == "/api/chat"),
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
    responses=(OllamaLine, OllamaError, PullLine, *embedding.RESPONSES),
)
