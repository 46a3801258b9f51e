"""Messages about layers: which device has which layers, the digests of a layer's chunks, and the chunks themselves.

KV blocks are requested in the same way and wait in the same queue.

Each message is one msgpack frame, either a request or a reply; the bytes of a chunk are a second frame.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from primad.errors import ProtocolError, printable
from primad.gguf.layers import CHUNK_BYTES as CHUNK_BYTES
from primad.kv.cells import LAYER_NUMBERS, is_key
from primad.system.wire import decoded

MAX_ASKED: Final = 4096
MAX_CELLS_ASKED: Final = 64
"""Limit of KV blocks per request."""
CELLS_BYTES: Final = 1 << 20
"""KV cache per request: small, since a device may send it precisely because it is short of memory."""
MAX_REQUEST_BYTES: Final = 1 << 20
"""A request is at most ``MAX_ASKED`` digests."""
MAX_REPLY_BYTES: Final = 16 << 20
"""A reply is at most a chunk, or the tree of the largest layer."""


class AskPresent(msgspec.Struct, frozen=True, kw_only=True, tag="ask-holds"):
    """Ask which of these layers the device has."""

    digests: Annotated[list[str], Meta(max_length=MAX_ASKED)]


class Present(msgspec.Struct, frozen=True, kw_only=True, tag="holds"):
    """Whether each requested layer is here, in the order of the request."""

    held: Annotated[list[bool], Meta(max_length=MAX_ASKED)]


class FetchDigests(msgspec.Struct, frozen=True, kw_only=True, tag="fetch-digests"):
    """Request the tree of layer ``digest``."""

    digest: str


class Digests(msgspec.Struct, frozen=True, kw_only=True, tag="digests"):
    """The tree of layer ``digest``: the concatenated digests of its chunks (``gguf/layers.py``)."""

    digest: str
    tree: bytes


class FetchChunk(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Request ``size`` bytes of the weights of layer ``digest`` from ``offset``."""

    digest: str
    offset: Annotated[int, Meta(ge=0)]
    size: Annotated[int, Meta(ge=1, le=CHUNK_BYTES)]


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag="chunk"):
    """The reply; the bytes are the next frame."""

    digest: str
    offset: int


class NoChunk(msgspec.Struct, frozen=True, kw_only=True, tag="no-chunk"):
    """The device cannot provide the chunk; ``reason`` is one line. Without ``offset`` it cannot provide the layer's
    tree."""

    digest: str
    offset: int | None
    reason: str


class FetchCells(msgspec.Struct, frozen=True, kw_only=True, tag="fetch-cells"):
    """Request layers ``first <= layer < last`` of KV blocks, from byte ``offset`` of the first one."""

    keys: Annotated[list[str], Meta(min_length=1, max_length=MAX_CELLS_ASKED)]
    first: Annotated[int, Meta(ge=0, lt=LAYER_NUMBERS)]
    last: Annotated[int, Meta(ge=1, le=LAYER_NUMBERS)]
    offset: Annotated[int, Meta(ge=0)] = 0


class Cells(msgspec.Struct, frozen=True, kw_only=True, tag="cells"):
    """The reply: the sizes in bytes of the parts of the leading requested blocks, 0 for a missing block.

    The concatenated parts (``kv.store.part``) are the next frame, up to ``CELLS_BYTES``: the last part may be cut
    there.
    """

    sizes: Annotated[list[int], Meta(min_length=1, max_length=MAX_CELLS_ASKED)]


TransferRequest = AskPresent | FetchDigests | FetchChunk | FetchCells
TransferReply = Present | Digests | Chunk | NoChunk | Cells
TransferMessage = TransferRequest | TransferReply

_decoder: Final = msgspec.msgpack.Decoder(TransferMessage)


def decode_transfer(data: bytes | memoryview) -> TransferMessage:
    """Decode a message about layers, its texts made printable. Raises ``ProtocolError``."""
    message: TransferMessage = decoded(_decoder, data, "a message about layers")
    if isinstance(message, FetchCells) and not (message.first < message.last and all(map(is_key, message.keys))):
        raise ProtocolError("a request for invalid KV blocks")
    if isinstance(message, NoChunk):
        return NoChunk(digest=message.digest, offset=message.offset, reason=printable(message.reason))
    return message
