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
    """Turns messages into the bytes of a stream: each message by ``message``, an error that ends the stream by
    ``error``; ``end`` follows a complete response, and ``waiting`` is the keep-alive (empty for none)."""

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
