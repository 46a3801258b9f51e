"""The OpenAI-compatible HTTP API of the head (https://platform.openai.com/docs/api-reference).

``create_app`` makes the ASGI application; the daemon runs it under uvicorn in its own loop. The application keeps no
state of its own but what it counts (``metrics.py``): a request becomes a ``Job`` (core), the backend writes its choices
one after another, and an ``ApiAnswer`` (core) shapes what was written. Every refusal is OpenAI's error object; an
unexpected exception, which is our mistake, is answered with 500 and logged with its traceback by the server (uvicorn).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from datetime import datetime
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from primad import __version__
from primad.api.backend import Backend, ServedModel
from primad.api.connection import EventStream, read_json, while_connected
from primad.api.generation import Written, write
from primad.api.guard import HostGuard
from primad.api.metrics import MEDIA_TYPE, Counted, Metrics
from primad.api.openai import schema, shapes
from primad.api.openai.answers import Answered, ApiAnswer, ChatAnswer, CompletionAnswer
from primad.api.openai.errors import RETRY_AFTER_S, error_response
from primad.api.openai.job import SEEDS, Choice, Job, chat_job, check_model, completion_job
from primad.api.openai.shapes import HealthBody, Model, ModelList, Usage
from primad.api.status import StatusBody, status_body
from primad.errors import PrimadError, RequestError, RingError
from primad.settings.timings import ApiTimings

COMPONENT: Final = "#/components/schemas/{}"


def create_app(backend: Backend, *, hosts: Collection[str] = (), timings: ApiTimings = ApiTimings()) -> FastAPI:
    """The API over ``backend``. ``hosts`` are names, besides localhost and IP addresses, by which clients may reach it."""
    app = _App(title="primad", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    metrics = Metrics()
    app.add_middleware(HostGuard, hosts=hosts)
    app.add_middleware(Counted, metrics=metrics)
    api = _Api(backend, metrics, timings)
    app.add_api_route("/", api.about, methods=["GET"])
    app.add_api_route("/health", api.health, methods=["GET"], responses=_answers("HealthBody"))
    app.add_api_route("/status", api.status, methods=["GET"], responses=_answers("StatusBody"))
    app.add_api_route("/metrics", api.metrics, methods=["GET"])
    app.add_api_route("/v1/models", api.models, methods=["GET"], responses=_answers("ModelList"))
    app.add_api_route("/v1/models/{model_id:path}", api.model, methods=["GET"], responses=_answers("Model"))
    app.add_api_route(
        "/v1/chat/completions",
        api.chat,
        methods=["POST"],
        openapi_extra=_asks("ChatRequest"),
        responses=_answers("ChatCompletion", "ChatChunk"),
    )
    app.add_api_route(
        "/v1/completions",
        api.complete,
        methods=["POST"],
        openapi_extra=_asks("CompletionRequest"),
        responses=_answers("Completion", "Completion"),
    )
    _handle_errors(app)
    return app


class _Api:
    """The routes."""

    def __init__(self, backend: Backend, metrics: Metrics, timings: ApiTimings) -> None:
        self._backend, self._metrics, self._timings = backend, metrics, timings

    async def about(self) -> Response:
        """What this is."""
        return _json({"name": "primad", "version": __version__, "api": "OpenAI-compatible, under /v1"})

    async def health(self) -> Response:
        """200 when requests can be served, 503 with Retry-After while the model is loading or nothing can serve it."""
        health, served = self._backend.health(), self._backend.model()
        body = HealthBody(
            status="ok" if health.serving else "loading",
            detail=health.detail,
            model=served.id if served else None,
        )
        return _json(body, status=200 if health.serving else 503)

    async def status(self) -> Response:
        """Who computes which layers, and what every device did and holds."""
        return _json(await self._status())

    async def metrics(self) -> Response:
        """Requests, tokens, times, and what every device did and holds, for Prometheus."""
        status = await self._status()
        return Response(self._metrics.render(status), media_type=MEDIA_TYPE)

    async def _status(self) -> StatusBody:
        ring = await self._backend.status()
        return status_body(self._backend.health(), self._backend.model(), ring)

    async def models(self) -> Response:
        """The served model, as a list of one; empty until it is known."""
        served = self._backend.model()
        return _json(ModelList(data=[_model(served)] if served else []))

    async def model(self, model_id: str) -> Response:
        """The served model by its id."""
        served = self._backend.model()
        check_model(model_id, [served] if served else [])
        assert served is not None
        return _json(_model(served))

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        served = self._serving()
        ask = schema.parse(schema.ChatRequest, await read_json(request, self._timings.body_timeout_s))
        job = chat_job(ask, served, seed=secrets.randbelow(SEEDS), now=datetime.now().astimezone())
        return await self._respond(request, ask, served, job, ChatAnswer)

    async def complete(self, request: Request) -> Response:
        """Continue a text."""
        served = self._serving()
        ask = schema.parse(schema.CompletionRequest, await read_json(request, self._timings.body_timeout_s))
        job = completion_job(ask, served, seed=secrets.randbelow(SEEDS))
        return await self._respond(request, ask, served, job, CompletionAnswer)

    def _serving(self) -> ServedModel:
        health, served = self._backend.health(), self._backend.model()
        if not health.serving or served is None:
            raise RingError(f"not serving yet: {health.detail}")
        return served

    async def _respond(
        self, request: Request, ask: schema.SamplingRequest, served: ServedModel, job: Job, kind: type[ApiAnswer]
    ) -> Response:
        answer = kind(
            id=f"{kind.PREFIX}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=served.id,
            vocabulary=served.vocabulary,
            with_logprobs=job.logprobs is not None,
            include_usage=ask.include_usage,
        )
        if ask.stream:
            return EventStream(self._stream(served, job, answer), self._timings)
        return _json(await while_connected(request.receive, self._whole(served, job, answer)))

    async def _whole(self, served: ServedModel, job: Job, answer: ApiAnswer) -> msgspec.Struct:
        answered, sampled = [], 0
        for choice in job.choices:
            async with aclosing(self._write(served, job, choice)) as written:
                parts = [part async for part in written]
            finish = parts[-1].finish
            assert finish is not None, "the last part of a choice ends it"
            text = "".join(part.text for part in parts)
            tokens = tuple(token for part in parts for token in part.tokens)
            answered.append(Answered(choice=choice, text=text, tokens=tokens, finish=finish))
            sampled += sum(part.sampled for part in parts)
        return answer.whole(answered, _usage(job, sampled))

    async def _stream(self, served: ServedModel, job: Job, answer: ApiAnswer) -> AsyncGenerator[msgspec.Struct, None]:
        sampled = 0
        for choice in job.choices:
            begun = False
            async with aclosing(self._write(served, job, choice)) as written:
                async for part in written:
                    sampled += part.sampled
                    opening = None if begun else answer.opening(choice)
                    if opening is not None:
                        yield opening
                    begun = True
                    if part.text or part.tokens:
                        yield answer.piece(choice, part)
                    if part.finish is not None:
                        yield answer.closing(choice, part.finish)
        if answer.include_usage:
            yield answer.counts(_usage(job, sampled))

    def _write(self, served: ServedModel, job: Job, choice: Choice) -> AsyncGenerator[Written, None]:
        return self._metrics.metered(write(self._backend, served.vocabulary, job, choice), len(choice.prompt))


class _App(FastAPI):
    """FastAPI, with the schemas of bodies that it does not parse itself in the OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            document = super().openapi()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas |= schema.components(COMPONENT.format("{model}")) | shapes.components(COMPONENT.format("{name}"))
        return super().openapi()


def _handle_errors(app: FastAPI) -> None:
    """Turn every exception into OpenAI's error object."""

    async def on_primad_error(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, PrimadError)
        return error_response(exc)

    async def on_http_exception(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        where = f"{request.method} {request.url.path}"
        match exc.status_code:
            case 404:
                message = f"unknown path: {where}; the API is under /v1"
            case 405:
                message = f"the method is not allowed: {where}"
            case _:
                message = str(exc.detail)
        return error_response(RequestError(message, status=exc.status_code), dict(exc.headers or {}))

    async def on_invalid(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        return error_response(RequestError("; ".join(str(error["msg"]) for error in exc.errors())))

    async def on_left(request: Request, exc: Exception) -> Response:
        return Response(status_code=499)

    async def on_our_mistake(request: Request, exc: Exception) -> Response:
        return error_response(PrimadError("an internal error; the server's log has its traceback"))

    handlers: dict[type[Exception], Callable[[Request, Exception], Any]] = {
        PrimadError: on_primad_error,
        HTTPException: on_http_exception,
        RequestValidationError: on_invalid,
        ClientDisconnect: on_left,
        Exception: on_our_mistake,
    }
    for exception, handler in handlers.items():
        app.add_exception_handler(exception, handler)


def _usage(job: Job, sampled: int) -> Usage:
    return Usage(prompt_tokens=job.prompt_tokens, completion_tokens=sampled, total_tokens=job.prompt_tokens + sampled)


def _model(served: ServedModel) -> Model:
    return Model(id=served.id, created=served.created, owned_by="primad")


def _json(body: object, status: int = 200) -> Response:
    retry = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
    return Response(msgspec.json.encode(body), status_code=status, headers=retry, media_type="application/json")


def _asks(name: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": COMPONENT.format(name)}}}
    return {"requestBody": {"required": True, "content": content}}


def _answers(name: str, streamed: str | None = None) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": COMPONENT.format(name)}}}
    if streamed is not None:
        content["text/event-stream"] = {"itemSchema": {"$ref": COMPONENT.format(streamed)}}
    refused = {"application/json": {"schema": {"$ref": COMPONENT.format("ErrorBody")}}}
    return {200: {"description": "OK", "content": content}, "default": {"description": "Error", "content": refused}}
