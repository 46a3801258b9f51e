"""Encode messages as msgpack, for processes and devices alike."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from primad.errors import ProtocolError, printable

_Message = TypeVar("_Message")
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """``message`` as msgpack bytes."""
    return _encoder.encode(message)


def decoded(decoder: msgspec.msgpack.Decoder[_Message], data: bytes | memoryview, what: str) -> _Message:
    """Decode ``data``; ``what`` names the expected message in errors. Raises ``ProtocolError``."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"not {what}: {printable(exc)}") from exc
