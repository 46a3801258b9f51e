"""llama-server's paths that load and unload models, as its router has them (its README, "Using multiple models")."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.models import Models, OfferedModel
from primad.api.dialects.openai.routes import EVENTS
from primad.api.http.connection import while_connected
from primad.api.http.dialect import Route
from primad.api.http.ending import until
from primad.api.http.endpoint import Endpoint, json_response
from primad.api.http.named_model import named_model
from primad.errors import RequestError

MAX_LISTENERS: Final = 64
STAGE: Final = "text_model"
_EVENTS: Final = replace(EVENTS, end=b"", waiting=b": still here\n\n")


class ModelSuccess(msgspec.Struct, frozen=True, kw_only=True):
    """The action was done, or has begun."""

    success: Literal[True] = True


class ModelEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The ``status`` of a ``model`` changed, or its loading progressed."""

    model: str
    event: Literal["model_status"] = "model_status"
    data: dict[str, Any]


class ModelPaths:
    """The routes that load and unload models; every client may use them."""

    def __init__(self, endpoint: Endpoint, models: Models) -> None:
        self._endpoint, self._models = endpoint, models
        self._listeners = 0

    def routes(self) -> tuple[Route, ...]:
        """Return all routes."""
        return (
            Route(path="/models/load", handler=self.load, asks="NamedModel", responses="ModelSuccess"),
            Route(path="/models/unload", handler=self.unload, asks="NamedModel", responses="ModelSuccess"),
            Route(path="/models/sse", handler=self.events, methods=("GET",)),
        )

    async def load(self, request: Request) -> Response:
        """Begin to load a model."""
        await self._models.load(await self._named(request))
        return json_response(ModelSuccess())

    async def unload(self, request: Request) -> Response:
        """Unload a model when its requests have ended."""
        await while_connected(request.receive, self._models.unload(await self._named(request)))
        return json_response(ModelSuccess())

    async def events(self, request: Request) -> Response:
        """Stream changes of models' states as they come."""
        if self._listeners >= MAX_LISTENERS:
            raise RequestError(f"{MAX_LISTENERS} clients listen already", status=429, code="too_many_listeners")
        return self._endpoint.stream(self._changes(), _EVENTS)

    async def _changes(self) -> AsyncGenerator[ModelEvent, None]:
        self._listeners += 1
        try:
            async with aclosing(until(self._endpoint.ended, self._models.changes())) as changes:
                async for model in changes:
                    yield ModelEvent(model=model.id, data=changed(model))
        finally:
            self._listeners -= 1

    async def _named(self, request: Request) -> str:
        return (await named_model(request, self._endpoint.timings.body_timeout_s)).called


def changed(model: OfferedModel) -> dict[str, Any]:
    """Return the state of ``model`` as llama-server's router reports it, plus fields that only primad has."""
    data: dict[str, Any] = {"status": model.state}
    if model.progress is not None:
        data["progress"] = {"stages": [STAGE], "current": STAGE, "value": model.progress}
    more = {"detail": model.detail or None, "expected_s": model.expected_s}
    return data | {name: value for name, value in more.items() if value is not None}
