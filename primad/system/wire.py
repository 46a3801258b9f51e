"""Messages as bytes: between processes and between devices they are the same msgpack."""

from __future__ import annotations

import msgspec

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """``message`` as msgpack bytes."""
    return _encoder.encode(message)
