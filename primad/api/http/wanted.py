"""Reads what a request says about its model, before that model's text process reads the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.models import OfferedModel
from primad.api.http.framing import Framing
from primad.api.http.offered import state_line
from primad.library.names import MAX_CHARS

_MAX_SMALL_BYTES: Final = 64


class Fields(msgspec.Struct, frozen=True):
    """Fields of a body as JSON, empty if missing. All other fields are skipped."""

    model: Raw = Raw()
    stream: Raw = Raw()
    return_progress: Raw = Raw()
    keep_alive: Raw = Raw()
    prompt: Raw = Raw()
    messages: Raw = Raw()
    input: Raw = Raw()


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedModel:
    """The model that a request names, None for the last one used; ``model`` is the name as the client wrote it.

    ``is_any``: the model used last will do as well. Unless ``is_readable``, the dialect reports what is wrong.
    ``is_empty``: the request only loads the model.
    """

    name: str | None = None
    model: str = ""
    streams: bool = False
    reports_progress: bool = False
    keep_alive_s: float | None = None
    is_any: bool = False
    is_empty: bool = False
    is_readable: bool = True


def wanted(fields: Fields) -> WantedModel:
    """Read ``fields`` as most dialects do. Raises ``msgspec.ValidationError`` for another type."""
    name = msgspec.json.decode(bytes(fields.model) or b"null", type=str | None)
    return WantedModel(
        name=name or None,
        model=name or "",
        streams=bytes(fields.stream) == b"true",
        reports_progress=bytes(fields.return_progress) == b"true",
        is_readable=name is None or len(name) <= MAX_CHARS,
    )


def small(field: Raw) -> Any:
    """Return the value of ``field``, None if it is missing; its JSON text if that is long or a number out of range."""
    data = bytes(field)
    try:
        return msgspec.json.decode(data or b"null") if len(data) <= _MAX_SMALL_BYTES else data
    except msgspec.DecodeError:
        return data


def comment(_: WantedModel, model: OfferedModel) -> bytes:
    """Return a comment for a stream of server-sent events, which clients skip."""
    return f": {state_line(model)}\n\n".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """How requests of a route choose their model: ``read`` returns what a request wants.

    Streams use ``framing``, None without streams; while they wait they send ``news`` of their model. ``instead`` may
    answer a request that needs no loaded model. With ``embeds`` the request chooses among embedding models.
    """

    read: Callable[[Fields], WantedModel] = wanted
    framing: Callable[[WantedModel], Framing] | None = None
    news: Callable[[WantedModel, OfferedModel], bytes] = comment
    instead: Callable[[Request, WantedModel], Awaitable[Response | None]] | None = None
    embeds: bool = False


def read_wanted(body: bytes, choosing: Choosing, of_query: str | None) -> WantedModel:
    """Return what ``body`` wants; a request that names no model there may name one in its query (``of_query``)."""
    try:
        found = choosing.read(msgspec.json.decode(body, type=Fields))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return WantedModel(is_readable=False)
    return replace(found, name=of_query) if of_query and found.name is None else found
