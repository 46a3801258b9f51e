"""A dialect as the application sees it: its routes, the shape of its errors, and the framing of its streams.

A dialect translates a client's request into a ``Job``, and results into its own response shapes; ``Endpoint`` provides
everything else. The application lists the dialects and knows nothing more about them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from primad.api.http.wanted import Choosing
from primad.errors import PrimadError

if TYPE_CHECKING:
    from primad.api.http.endpoint import Endpoint

COMPONENT: Final = "#/components/schemas/{}"
"""The place of a named schema in the OpenAPI document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path of a dialect. ``asks``, ``responses`` and ``streamed`` name schemas for the OpenAPI document.

    ``stream_type`` is the media type of its streams, None without streams. Routes with named events leave ``streamed``
    empty. With ``picks``, a request may select fields of the response, and the response to several prompts is a list.
    With ``chooses``, a request gets the model that it names; None if the path is not about a model.
    """

    path: str
    handler: Callable[[Request], Awaitable[Response]]
    methods: tuple[str, ...] = ("POST",)
    asks: str | None = None
    responses: str | None = None
    streamed: tuple[str, ...] = ()
    stream_type: str | None = None
    picks: bool = False
    chooses: Choosing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API. ``error_body`` shapes errors under ``prefixes``, as the schema ``error_name``; ``requests`` and
    ``responses`` are the types of its routes."""

    routes: Callable[[Endpoint], Sequence[Route]]
    prefixes: tuple[str, ...]
    error_body: Callable[[PrimadError], msgspec.Struct]
    error_name: str
    requests: tuple[type[BaseModel], ...] = ()
    responses: tuple[type[msgspec.Struct], ...] = ()


def schemas(dialects: Sequence[Dialect]) -> dict[str, Any]:
    """Return the JSON schemas of everything that the routes of ``dialects`` name, by name."""
    found: dict[str, Any] = {}
    for request in (request for dialect in dialects for request in dialect.requests):
        schema = request.model_json_schema(ref_template=COMPONENT.format("{model}"))
        found |= schema.pop("$defs", {}) | {request.__name__: schema}
    responses = dict.fromkeys(response for dialect in dialects for response in dialect.responses)
    _, components = msgspec.json.schema_components(list(responses), ref_template=COMPONENT.format("{name}"))
    return found | components
