"""Requests that only name a model, for example to load or delete it."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request

from primad.api.http.connection import decoded, read_json
from primad.errors import RequestError
from primad.library.names import MAX_CHARS

MAX_BYTES: Final = 64 << 10
"""Bodies are read in the event loop, so they must be small."""
_Name = Annotated[str, Meta(max_length=MAX_CHARS)]


class NamedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model's name, and ``stream`` for requests that report their progress. ``name`` is Ollama's older field."""

    model: _Name | None = None
    name: _Name | None = None
    stream: bool | None = None

    @property
    def called(self) -> str:
        """The given name; empty if there is none."""
        return self.model or self.name or ""


async def named_model(request: Request, timeout_s: float) -> NamedModel:
    """Return the body of ``request``. Raises ``RequestError`` if it names no model."""
    asked = decoded(await read_json(request, timeout_s, max_bytes=MAX_BYTES), NamedModel)
    if not asked.called:
        raise RequestError("'model' is required", param="model")
    return asked
