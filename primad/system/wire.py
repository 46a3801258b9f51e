"""Messages as bytes: between processes and between devices they are the same msgpack."""

from __future__ import annotations

import msgspec

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Any message of this file as msgpack bytes."""
    return _encoder.encode(message)
