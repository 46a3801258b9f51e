"""The routes of OpenAI's dialect (https://platform.openai.com/docs/api-reference)."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.backend import Backend, ServedModel
from primad.api.answering.capabilities import capabilities
from primad.api.answering.choices import together
from primad.api.answering.generation import NO_DRAFTS_COUNTED, DraftCounts, Written, cached_tokens
from primad.api.answering.job import Choice, Job, check_model
from primad.api.answering.models import OfferedModel
from primad.api.answering.timings import CompletionClock, CompletionTimings
from primad.api.dialects.anthropic.models import ANTHROPIC, model_entry, model_list
from primad.api.dialects.openai import embeddings, schema, shapes
from primad.api.dialects.openai import prepared as preparations
from primad.api.dialects.openai.offered_models import load_progress, modalities, offered_entry
from primad.api.dialects.openai.responses import ApiResponse, ChatResponse, CompletionResponse
from primad.api.dialects.openai.shapes import (
    CompletionTokensDetails,
    Model,
    ModelList,
    PromptTokensDetails,
    ReadPrompt,
    Usage,
)
from primad.api.http.dialect import Dialect, Route
from primad.api.http.endpoint import Endpoint, ModelEndpoint, json_response
from primad.api.http.errors import error_body
from primad.api.http.framing import EVENT_STREAM, Framing
from primad.api.http.long_response import LongResponse
from primad.api.http.offered import find_offered, is_offered
from primad.api.http.wanted import Choosing, WantedModel, comment
from primad.errors import PrimadError


def _event(message: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


def _error_event(exc: PrimadError) -> bytes:
    return _event(error_body(exc))


EVENTS: Final = Framing(
    media_type=EVENT_STREAM,
    message=_event,
    error=_error_event,
    end=b"data: [DONE]\n\n",
    waiting=b": waiting for the next token\n\n",
)
"""Server-sent events without names; ``[DONE]`` ends a complete response."""


def _choosing(kind: type[shapes.ChatChunk | shapes.Completion], prefix: str) -> Choosing:
    """Return how requests choose a model. While it loads, clients that read progress get events of this ``kind``,
    others comments."""

    def news(wants: WantedModel, model: OfferedModel) -> bytes:
        if not wants.reports_progress:
            return comment(wants, model)
        number, progress = f"{prefix}-{secrets.token_hex(12)}", load_progress(model)
        return _event(kind(id=number, created=int(time.time()), model=wants.model, choices=[], load_progress=progress))

    return Choosing(framing=lambda _: EVENTS, news=news)


class _Routes:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def models(self, request: Request) -> Response:
        """Return the served model by its names, empty until it is known; or all offered models."""
        if (models := self._endpoint.models) is not None:
            await models.look()
            loaded = models.loaded()
            listed = [_offered(each, loaded) for each in models.offered()]
            names: Sequence[str] = [name for each in models.offered() for name in each.names]
        else:
            served = self._endpoint.model()
            names = served.all_names if served else ()
            listed = [_model(served, name) for name in names if served]
        beside = self._endpoint.embeddings
        if beside is not None and beside.name not in names:
            listed.append(embeddings.listed(beside))
        return json_response(model_list(listed) if ANTHROPIC in request.headers else ModelList(data=listed))

    async def model(self, request: Request) -> Response:
        """Return a model by one of its names."""
        if self._endpoint.models is not None:
            await self._endpoint.models.look()
        model = self._model(request.path_params["model_id"])
        return json_response(model_entry(model) if ANTHROPIC in request.headers else model)

    def _model(self, name: str) -> Model:
        served, beside = self._endpoint.model(), self._endpoint.embeddings
        if (models := self._endpoint.models) is not None:
            if beside is not None and name == beside.name and not is_offered(name, models.offered()):
                return embeddings.listed(beside)
            return _offered(find_offered(name, models.offered()), models.loaded())
        if beside is not None and name == beside.name and (served is None or name not in served.all_names):
            return embeddings.listed(beside)
        check_model(name, [served] if served else [])
        assert served is not None
        return _model(served, served.id if served.names.any_model else name)

    async def count(self, request: Request) -> Response:
        """Return the number of tokens of a conversation, even if it is too long."""
        return json_response(await self._endpoint.serving(request).prepare(preparations.count))

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        serving = self._endpoint.serving(request)
        return await self._respond(serving, await serving.prepare(preparations.chat), ChatResponse)

    async def complete(self, request: Request) -> Response:
        """Complete a prompt."""
        serving = self._endpoint.serving(request)
        return await self._respond(serving, await serving.prepare(preparations.completion), CompletionResponse)

    async def _respond(
        self, serving: ModelEndpoint, prepared: preparations.PreparedCompletion, kind: type[ApiResponse]
    ) -> Response:
        job = prepared.job
        response = kind(
            id=f"{kind.PREFIX}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=prepared.model,
            vocabulary=serving.served.vocabulary,
            with_logprobs=job.logprobs is not None,
            include_usage=prepared.include_usage,
        )
        if prepared.stream:
            chunks = self._stream(serving, job, response, times_parts=prepared.times_parts)
            return self._endpoint.stream(chunks, EVENTS)
        clock = CompletionClock(prompt_tokens=job.prompt_tokens, begun_s=time.perf_counter())
        completed = await serving.whole(job, [clock])
        timings = clock.timings(time.perf_counter())
        ended = [(each.choice, each.cached) for each in completed]
        draft_counts = sum((each.draft_counts for each in completed), NO_DRAFTS_COUNTED)
        usage = _usage(job, sum(each.sampled for each in completed), ended, draft_counts)
        long = LongResponse()
        lists = [
            {name: await long.list_of(items) for name, items in response.entries(each).items()} for each in completed
        ]
        return long.response(_timed(response.whole(completed, lists, usage), timings))

    async def _stream(
        self, serving: ModelEndpoint, job: Job, response: ApiResponse, *, times_parts: bool
    ) -> AsyncGenerator[msgspec.Struct, None]:
        begin_s, ended = time.perf_counter(), list[tuple[Choice, int]]()
        whole = CompletionClock(prompt_tokens=job.prompt_tokens, begun_s=begin_s)
        clocks: dict[int, CompletionClock] = {}
        draft_counts = NO_DRAFTS_COUNTED
        begun: set[int] = set()

        def begins(place: int) -> AsyncGenerator[Written, None]:
            choice = job.choices[place]
            clocks[place] = CompletionClock(prompt_tokens=len(choice.prompt), begun_s=time.perf_counter())
            return serving.write(job, choice)

        all_begin = [partial(begins, place) for place in range(len(job.choices))]
        async with aclosing(together(all_begin, serving.served.sequences)) as written:
            async for place, part in written:
                choice, clock = job.choices[place], clocks[place]
                now_s = time.perf_counter()
                for each in (clock, whole):
                    each.count(part.sampled, part.cached, now_s)
                timings = clock.timings(now_s) if times_parts else UNSET
                opening = None if place in begun else response.opening(choice)
                if opening is not None:
                    yield opening
                begun.add(place)
                if part.read_tokens is not None:
                    took_ms = round(1e3 * (now_s - begin_s))
                    read = ReadPrompt(
                        total=len(choice.prompt), cache=part.cached, processed=part.read_tokens, time_ms=took_ms
                    )
                    yield response.progress(choice, read)
                if part.is_not_empty or (part.tokens and response.with_logprobs):
                    yield _timed(response.piece(choice, part), timings)
                if part.finish is not None:
                    ended.append((choice, part.cached))
                    draft_counts += part.draft_counts
                    yield _timed(response.closing(choice, part.finish), clock.timings(now_s))
        if response.include_usage:
            counts = response.counts(_usage(job, whole.predicted, ended, draft_counts))
            yield _timed(counts, whole.timings(time.perf_counter()))


def _routes(endpoint: Endpoint) -> Sequence[Route]:
    here = _Routes(endpoint)
    return (
        *embeddings.routes(endpoint),
        *(
            Route(path=path, handler=here.models, methods=("GET",), responses="ModelList")
            for path in ("/v1/models", "/models")
        ),
        Route(
            path="/v1/chat/completions/input_tokens",
            handler=here.count,
            asks="ChatRequest",
            responses="InputTokens",
            chooses=Choosing(),
        ),
        Route(path="/v1/models/{model_id:path}", handler=here.model, methods=("GET",), responses="Model"),
        *(
            Route(
                path=path,
                handler=here.chat,
                asks="ChatRequest",
                responses="ChatCompletion",
                streamed=("ChatChunk",),
                stream_type=EVENT_STREAM,
                chooses=_choosing(shapes.ChatChunk, ChatResponse.PREFIX),
            )
            for path in ("/v1/chat/completions", "/chat/completions")
        ),
        *(
            Route(
                path=path,
                handler=here.complete,
                asks="CompletionRequest",
                responses="Completion",
                streamed=("Completion",),
                stream_type=EVENT_STREAM,
                chooses=_choosing(shapes.Completion, CompletionResponse.PREFIX),
            )
            for path in ("/v1/completions", "/completions")
        ),
    )


T = TypeVar("T", bound=shapes.ChatCompletion | shapes.ChatChunk | shapes.Completion)


def _timed(chunk: T, timings: CompletionTimings | UnsetType) -> T:
    return chunk if timings is UNSET else msgspec.structs.replace(chunk, timings=timings)


def _usage(job: Job, sampled: int, ended: Sequence[tuple[Choice, int]], draft_counts: DraftCounts) -> Usage:
    details = CompletionTokensDetails(
        accepted_prediction_tokens=draft_counts.right, rejected_prediction_tokens=draft_counts.wrong
    )
    return Usage(
        prompt_tokens=job.prompt_tokens,
        completion_tokens=sampled,
        total_tokens=job.prompt_tokens + sampled,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens(ended)),
        completion_tokens_details=UNSET if draft_counts == NO_DRAFTS_COUNTED else details,
    )


def _offered(model: OfferedModel, loaded: Mapping[str, Backend]) -> Model:
    backend = loaded.get(model.id)
    return offered_entry(model, None if backend is None else backend.model())


def _model(served: ServedModel, name: str) -> Model:
    context, takes_more = served.context_tokens, served.sees or served.hears
    return Model(
        id=name,
        created=served.created,
        owned_by="primad",
        max_model_len=context,
        meta=shapes.ModelMeta(n_ctx=context, n_ctx_train=served.facts.trained_context_tokens or context),
        architecture=modalities(sees=served.sees, hears=served.hears) if takes_more else UNSET,
        capabilities=[*capabilities(served), "multimodal"] if takes_more else UNSET,
    )


DIALECT: Final = Dialect(
    routes=_routes,
    prefixes=("/",),
    error_body=error_body,
    error_name="ErrorBody",
    requests=(schema.ChatRequest, schema.CompletionRequest, *embeddings.REQUESTS),
    responses=(*shapes.RESPONSES, *embeddings.RESPONSES),
)
