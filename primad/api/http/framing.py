"""How messages become the bytes of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from primad.errors import PrimadError

EVENT_STREAM: Final = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """How messages become the bytes of a stream: each by ``message``, an error that ends it by ``error``, ``end`` after
    a complete response, and ``waiting`` as a keep-alive ("" for none)."""

    media_type: str
    message: Callable[[Any], bytes]
    error: Callable[[PrimadError], bytes]
    end: bytes
    waiting: bytes


class NamedEvent(msgspec.Struct, frozen=True):
    """A server-sent event with a name and data."""

    name: str
    data: dict[str, Any]


def named_event(event: NamedEvent) -> bytes:
    """The bytes of ``event``."""
    return f"event: {event.name}\ndata: ".encode() + msgspec.json.encode(event.data) + b"\n\n"
