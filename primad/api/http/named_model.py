"""Requests about a model that is only named: to load or delete it, say."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request

from primad.api.http.connection import decoded, read_json
from primad.errors import RequestError
from primad.library.names import MAX_CHARS

MAX_BYTES: Final = 64 << 10
"""A body is read in the loop."""
_Name = Annotated[str, Meta(max_length=MAX_CHARS)]


class NamedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model by its name; ``stream`` is for requests that report their progress. ``name`` is Ollama's older word."""

    model: _Name | None = None
    name: _Name | None = None
    stream: bool | None = None

    @property
    def called(self) -> str:
        """Its name."""
        return self.model or self.name or ""


async def named_model(request: Request, timeout_s: float) -> NamedModel:
    """The body of ``request``. Raises ``RequestError`` where it names none."""
    asked = decoded(await read_json(request, timeout_s, max_bytes=MAX_BYTES), NamedModel)
    if not asked.called:
        raise RequestError("'model' is required", param="model")
    return asked
