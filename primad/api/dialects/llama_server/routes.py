"""The routes of llama-server's own dialect. Its OpenAI paths are ``api/dialects/openai``'s."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.backend import Preparation, ServedModel
from primad.api.answering.choices import together
from primad.api.answering.job import Job
from primad.api.answering.models import OfferedModel
from primad.api.answering.timings import CompletionClock
from primad.api.dialects.llama_server import prepared
from primad.api.dialects.llama_server.models import ModelPaths, ModelSuccess
from primad.api.dialects.llama_server.prepared import DetokenizedText, TemplatedPrompt, TokenList
from primad.api.dialects.llama_server.responses import (
    CompletionEnd,
    CompletionPart,
    RawCompletion,
    Slot,
    picked,
    props,
    router_props,
)
from primad.api.dialects.llama_server.schema import (
    DetokenizeRequest,
    InfillRequest,
    RawCompletionRequest,
    TemplateRequest,
    TokenizeRequest,
)
from primad.api.dialects.openai.offered_models import load_progress
from primad.api.dialects.openai.routes import EVENTS
from primad.api.http.dialect import Dialect, Route
from primad.api.http.endpoint import Endpoint, ModelEndpoint, json_response
from primad.api.http.errors import error_body
from primad.api.http.framing import EVENT_STREAM
from primad.api.http.long_response import LongResponse, in_pieces
from primad.api.http.named_model import NamedModel
from primad.api.http.wanted import Choosing, WantedModel, comment

_EVENTS: Final = replace(EVENTS, end=b"")


def _news(wants: WantedModel, model: OfferedModel) -> bytes:
    if not wants.reports_progress:
        return comment(wants, model)
    part = CompletionPart(content="", tokens=[], tokens_predicted=0, tokens_evaluated=0)
    return _EVENTS.message(msgspec.structs.replace(part, load_progress=load_progress(model)))


_CHOOSES: Final = Choosing(framing=lambda _: _EVENTS, news=_news)


class _Routes:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._props: tuple[ServedModel | None, bytes] = (None, b"")
        """The model that was served last and its ``/props``, to make them only once."""

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text."""
        return await self._whole(request, prepared.tokenize)

    async def detokenize(self, request: Request) -> Response:
        """Return token ids as text, control tokens by their names."""
        return await self._whole(request, prepared.detokenize)

    async def apply_template(self, request: Request) -> Response:
        """Return the prompt that the chat template makes of the messages."""
        return await self._whole(request, prepared.apply_template)

    async def _whole(self, request: Request, preparation: Preparation[prepared.WholeBody]) -> Response:
        whole = await self._endpoint.serving(request).prepare(preparation)
        return in_pieces(whole.body)

    async def props(self, request: Request) -> Response:
        """Return the context and the chat template of a loaded model; of the server if no model is loaded."""
        looking = self._endpoint.looking(request)
        if looking is None:
            return json_response(router_props())
        if looking.model is not self._props[0]:
            self._props = looking.model, msgspec.json.encode(props(looking.served))
        return Response(self._props[1], media_type="application/json")

    async def slots(self, request: Request) -> Response:
        """Return running requests; an empty list if no model is loaded."""
        looking = self._endpoint.looking(request)
        if looking is None:
            return json_response([])
        served, busy = looking.served, self._endpoint.answers_open
        return json_response(
            [Slot(id=i, n_ctx=served.context_tokens, is_processing=i < busy) for i in range(served.sequences)]
        )

    async def complete(self, request: Request) -> Response:
        """Complete a prompt."""
        return await self._respond(request, prepared.completion)

    async def infill(self, request: Request) -> Response:
        """Fill the gap between two texts."""
        return await self._respond(request, prepared.infill)

    async def _respond(self, request: Request, preparation: Preparation[prepared.PreparedRaw]) -> Response:
        serving = self._endpoint.serving(request)
        asked = await serving.prepare(preparation)
        job, begun_s = asked.job, time.perf_counter()
        responses = [
            RawCompletion(
                model=asked.model,
                prompt=asked.prompts[choice.index // job.n],
                settings=msgspec.structs.replace(asked.settings, seed=choice.sampling.seed),
                served=serving.served,
                choice=choice,
                clock=CompletionClock(prompt_tokens=len(choice.prompt), begun_s=begun_s),
                with_probs=job.logprobs is not None,
                times_parts=asked.times_parts,
            )
            for choice in job.choices
        ]
        if asked.stream:
            return self._endpoint.stream(self._stream(serving, job, responses, asked.fields), _EVENTS)
        completed = await serving.whole(job, [response.clock for response in responses])
        now_s, results, long = time.perf_counter(), list[Any](), LongResponse()
        for response, each in zip(responses, completed, strict=True):
            chances = await long.list_of(msgspec.json.encode(chance) for chance in response.chances(each.tokens))
            results.append(picked(response.whole(each, chances, now_s), asked.fields))
        return long.response(results[0] if len(results) == 1 else results)

    async def _stream(
        self, serving: ModelEndpoint, job: Job, responses: list[RawCompletion], fields: Sequence[str]
    ) -> AsyncGenerator[Any, None]:
        begins = [partial(serving.write, job, choice) for choice in job.choices]
        async with aclosing(together(begins, serving.served.sequences)) as written:
            async for place, part in written:
                response = responses[place]
                event = response.part(part, time.perf_counter())
                if part.text or part.tokens:
                    yield event
                if part.finish is not None:
                    yield picked(response.end(part.finish, part.stopped_by, time.perf_counter()), fields)


def _routes(endpoint: Endpoint) -> Sequence[Route]:
    here = _Routes(endpoint)
    models = () if endpoint.models is None else ModelPaths(endpoint, endpoint.models).routes()
    return (
        *models,
        *(
            Route(path=path, handler=handler, asks=asks, responses=responses, chooses=Choosing())
            for path, handler, asks, responses in (
                ("/tokenize", here.tokenize, "TokenizeRequest", "TokenList"),
                ("/detokenize", here.detokenize, "DetokenizeRequest", "DetokenizedText"),
                ("/apply-template", here.apply_template, "TemplateRequest", "TemplatedPrompt"),
            )
        ),
        Route(path="/props", handler=here.props, methods=("GET",)),
        Route(path="/slots", handler=here.slots, methods=("GET",)),
        Route(
            path="/completion",
            handler=here.complete,
            asks="RawCompletionRequest",
            responses="CompletionEnd",
            picks=True,
            streamed=("CompletionPart", "CompletionEnd"),
            stream_type=EVENT_STREAM,
            chooses=_CHOOSES,
        ),
        Route(
            path="/infill",
            handler=here.infill,
            asks="InfillRequest",
            responses="CompletionEnd",
            picks=True,
            streamed=("CompletionPart", "CompletionEnd"),
            stream_type=EVENT_STREAM,
            chooses=_CHOOSES,
        ),
    )


DIALECT: Final = Dialect(
    routes=_routes,
    prefixes=(),
    error_body=error_body,
    error_name="ErrorBody",
    requests=(TokenizeRequest, DetokenizeRequest, TemplateRequest, RawCompletionRequest, InfillRequest),
    responses=(TokenList, DetokenizedText, TemplatedPrompt, CompletionEnd, CompletionPart, ModelSuccess, NamedModel),
)
