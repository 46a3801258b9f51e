"""The HTTP API of the head: one application that speaks several dialects.

``create_app`` makes the ASGI application; the daemon runs it under uvicorn in its own loop. Its only state is counters
(``api/http/metrics.py``): a dialect turns a request into a ``Job`` (core), the backend generates its choices, and the
dialect shapes the result. Every refusal has the dialect's shape. An unexpected exception, which is our own error,
becomes a 500, and the server (uvicorn) logs its traceback.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from primad import __version__
from primad.api.answering.backend import Backend, Embeddings, ModelNames
from primad.api.answering.models import Models
from primad.api.dialects.openai.shapes import HealthBody
from primad.api.dialects.table import DIALECTS, dialect_of, refuse
from primad.api.http.access import Admission, may_manage
from primad.api.http.choosing import ModelChoice
from primad.api.http.connection import MAX_BODIES_BYTES, BodyGuard
from primad.api.http.dialect import COMPONENT, Route, schemas
from primad.api.http.endpoint import Endpoint, json_response
from primad.api.http.framing import EVENT_STREAM
from primad.api.http.guard import HostGuard, KeyGuard, claimed_key
from primad.api.http.health import PATHS, HealthChecks
from primad.api.http.metrics import MEDIA_TYPE, Counted, Metrics
from primad.api.http.paths import TidyPaths
from primad.api.http.shared import Shared
from primad.api.http.status import StatusBody, model_status, status_body
from primad.api.page import files
from primad.api.page.admin_api import AdminApi
from primad.api.page.owner import Owner
from primad.api.page.routes import Page
from primad.errors import PrimadError, RequestError
from primad.settings.old_names import with_old_keys
from primad.settings.timings import ApiTimings

SCRAPE_PAUSE_S: Final = 0.1
"""Writing the metrics takes milliseconds; all clients that ask within this time share the next text."""
_HOW_TO_MANAGE: Final = ": from the page ('primad page'), or with an API key that has the right 'manages'"


def create_app(
    backend: Backend,
    *,
    admission: Admission = Admission(),
    timings: ApiTimings = ApiTimings(),
    names: ModelNames = ModelNames(),
    embeddings: Embeddings | None = None,
    admin_api: AdminApi | None = None,
    models: Models | None = None,
) -> Api:
    """Return the API over ``backend``, whose model also has the names ``names``, for clients of ``admission``.

    ``embeddings`` is a second model, if there is one. With ``models``, requests choose among those, and ``backend``
    reports the server's health and prepares what needs no model. The owner may change things at ``admin_api`` through
    the page. ``state.close()`` ends all open streams when the server ends; ``state.checks`` answer plain health checks
    without the application.
    """
    owner = Owner(admission.owner_key)
    switching = models if models is not None and models.switches else None
    metrics = Metrics(several=switching is not None)
    endpoint = Endpoint(backend, metrics, timings, names, embeddings, switching, partial(_check_owner, owner))
    server = _Server(endpoint, metrics)
    page = Page(server.look, admin_api, owner, timings, switching)
    dialects = [route for one in DIALECTS for route in one.routes(endpoint)]
    if switching is not None:
        dialects = [ModelChoice(switching, endpoint).of(route) for route in dialects]
    routes = [*server.routes(), *page.routes(), *dialects]
    metrics.know(route.path for route in routes)
    app = Api(routes)
    app.add_middleware(BodyGuard, max_bytes=MAX_BODIES_BYTES)  # the middleware added last sees a request first
    app.add_middleware(KeyGuard, door=admission.door, refuse=refuse)
    if origins := admission.origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",))
    app.add_middleware(HostGuard, hosts=admission.hosts, refuse=refuse)
    app.add_middleware(Counted, metrics=metrics)
    app.add_middleware(TidyPaths)
    _handle_errors(app)

    def close() -> None:
        endpoint.ended.set()
        page.close()

    app.state.close = close
    app.state.checks = HealthChecks(server.look_at_health, admission.hosts, metrics.count)
    return app


class _Server:
    """The routes that belong to no dialect."""

    def __init__(self, endpoint: Endpoint, metrics: Metrics) -> None:
        self._endpoint, self._backend, self._metrics = endpoint, endpoint.backend, metrics
        self._text = Shared(self._render, SCRAPE_PAUSE_S)

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(path="/", handler=self.about, methods=("GET", "HEAD")),
            *(Route(path=path, handler=self.health, methods=("GET",), responses="HealthBody") for path in PATHS),
            Route(path="/status", handler=self.status, methods=("GET",), responses="StatusBody"),
            Route(path="/metrics", handler=self.metrics, methods=("GET",)),
        )

    async def about(self, request: Request) -> Response:
        """Return the page to browsers, a short description to other clients."""
        if files.wants_page(request):
            return files.response(request, files.INDEX)
        return json_response({"name": "primad", "version": __version__, "api": "OpenAI-compatible, under /v1"})

    async def health(self, request: Request) -> Response:
        """200 when requests can be served, 503 with Retry-After while the model is loading or nothing can serve it."""
        body, status = self.look_at_health()
        return json_response(body, status=status)

    def look_at_health(self) -> tuple[HealthBody, int]:
        """Return the current response to a health check, and its status."""
        health, served = self._backend.health(), self._endpoint.shown().model()
        body = HealthBody(
            status="ok" if health.serving else "loading",
            detail=health.detail,
            model=served.id if served else None,
        )
        return body, 200 if health.serving else 503

    async def status(self, request: Request) -> Response:
        """Return windows, state and memory of every device."""
        return json_response(
            with_old_keys(msgspec.to_builtins(await self.look(request.query_params.get("model") or "")))
        )

    async def metrics(self, request: Request) -> Response:
        """Return requests, tokens, times, and the state of every device, for Prometheus."""
        return Response(await self._text.get(), media_type=MEDIA_TYPE)

    async def _render(self) -> bytes:
        return self._metrics.render(await self.look())

    async def look(self, model: str = "") -> StatusBody:
        """Return the current status, with the ring of ``model`` if one is named."""
        shown, beside, models = self._endpoint.shown(model), self._endpoint.embeddings, self._endpoint.models
        ring = await shown.status()
        embedding = None if beside is None else beside.status()
        offered = () if models is None else models.offered()
        return status_body(
            self._backend.health(),
            shown.model(),
            ring,
            embedding,
            self._metrics.tokens(),
            list(map(model_status, offered)),
        )


class Api(Starlette):
    """``routes``, documented by their response types."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._documented = [route for route in routes if route.responses is not None]
        document = Route(path="/openapi.json", handler=self._document, methods=("GET",))
        super().__init__(routes=[_served(route) for route in (*routes, document)])
        self.router.redirect_slashes = False
        self._written: dict[str, Any] | None = None

    async def _document(self, request: Request) -> Response:
        return json_response(await asyncio.to_thread(self.openapi))

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, written by FastAPI; that takes some hundred milliseconds, mostly for loading it."""
        if self._written is not None:
            return self._written
        from fastapi import FastAPI

        writer = FastAPI(title="primad", version=__version__)
        for route in self._documented:
            methods, asks, responses = list(route.methods), _asks(route), _responses(route)
            writer.add_api_route(route.path, route.handler, methods=methods, openapi_extra=asks, responses=responses)
        document = writer.openapi()
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas(DIALECTS))
        self._written = document
        return document


def _served(route: Route) -> StarletteRoute:
    served = StarletteRoute(route.path, route.handler, methods=list(route.methods))
    if route.path.startswith("/ui/"):  # the page needs no HEAD, and event streams have none
        served.methods = set(route.methods)
    return served


def _check_owner(owner: Owner, request: Request) -> None:
    if not may_manage():
        owner.check(claimed_key(request.headers), _HOW_TO_MANAGE)


def _handle_errors(app: Starlette) -> None:
    """Turn every exception into the error object of the path's dialect."""

    async def on_primad_error(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, PrimadError)
        return refuse(request.url.path, exc)

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
        return refuse(request.url.path, RequestError(message, status=exc.status_code), dict(exc.headers or {}))

    async def on_left(request: Request, exc: Exception) -> Response:
        return Response(status_code=499)

    async def on_our_mistake(request: Request, exc: Exception) -> Response:
        return refuse(request.url.path, PrimadError("an internal error; the server's log has its traceback"))

    handlers: dict[type[Exception], Callable[[Request, Exception], Any]] = {
        PrimadError: on_primad_error,
        HTTPException: on_http_exception,
        ClientDisconnect: on_left,
        Exception: on_our_mistake,
    }
    for exception, handler in handlers.items():
        app.add_exception_handler(exception, handler)


def _asks(route: Route) -> dict[str, Any]:
    """Return the parameters and body of a path for the OpenAPI document."""
    names = re.findall(r"{(\w+)", route.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    documented: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if route.asks is not None:
        content = {"application/json": {"schema": {"$ref": COMPONENT.format(route.asks)}}}
        documented["requestBody"] = {"required": True, "content": content}
    return documented


def _responses(route: Route) -> dict[int | str, dict[str, Any]] | None:
    if route.responses is None:
        return None
    whole = {"$ref": COMPONENT.format(route.responses)}
    some: dict[str, Any] = {"type": "object"}
    schema = {"anyOf": [whole, some, {"type": "array", "items": some}]} if route.picks else whole
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if route.stream_type is not None:
        content[route.stream_type] = {"itemSchema": _item(route)} if route.streamed else {}
    error = dialect_of(route.path).error_name
    refused = {"application/json": {"schema": {"$ref": COMPONENT.format(error)}}}
    return {200: {"description": "OK", "content": content}, "default": {"description": "Error", "content": refused}}


def _item(route: Route) -> dict[str, Any]:
    """Return one message of a stream: the data of a server-sent event, the last of which may be an end mark."""
    message = {"anyOf": [{"$ref": COMPONENT.format(name)} for name in route.streamed]}
    if route.stream_type != EVENT_STREAM:
        return message
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": message}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}}
