"""What devices say to each other about layers: who has which, the digests of a layer's chunks, the chunks themselves.

One msgpack frame a message; the bytes of a chunk are a second frame. Every message is an answer or asks for one.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final

import msgspec

from primad.errors import ProtocolError, printable
from primad.gguf.layers import CHUNK_BYTES as CHUNK_BYTES
from primad.settings.config import NAME
from primad.trust.identity import is_key

MAX_ENDPOINTS: Final = 16
MAX_ASKED: Final = 4096
MAX_REQUEST_BYTES: Final = 1 << 20
"""A request is at most ``MAX_ASKED`` digests."""
MAX_REPLY_BYTES: Final = 16 << 20
"""A reply is at most a chunk, or the tree of the largest layer."""
_ENDPOINT: Final = re.compile(
    r"tcp://(?:\[([0-9a-fA-F:.]{2,45}(?:%[\w.-]{1,32})?)\]|([0-9.]{7,15})):(\d{1,5})", re.ASCII
)


class Source(msgspec.Struct, frozen=True):
    """A device that serves layers: its name, its public key (Z85) and where it listens, as in ``tcp://10.0.0.2:7771``."""

    device: str
    key: str
    endpoints: list[str]


class AskPresent(msgspec.Struct, frozen=True, kw_only=True, tag="ask-holds"):
    """Which of these layers do you hold?"""

    digests: list[str]


class Present(msgspec.Struct, frozen=True, kw_only=True, tag="holds"):
    """Whether each layer that was asked for is here, in the order of the question."""

    held: list[bool]


class FetchDigests(msgspec.Struct, frozen=True, kw_only=True, tag="fetch-digests"):
    """Ask for the tree of layer ``digest``."""

    digest: str


class Digests(msgspec.Struct, frozen=True, kw_only=True, tag="digests"):
    """The tree of layer ``digest``: the digests of its chunks, one behind the other (``gguf/layers.py``)."""

    digest: str
    tree: bytes


class FetchChunk(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Ask for ``size`` bytes of the weights of layer ``digest`` from ``offset``."""

    digest: str
    offset: int
    size: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag="chunk"):
    """The answer; the bytes are the frame behind it."""

    digest: str
    offset: int


class NoChunk(msgspec.Struct, frozen=True, kw_only=True, tag="no-chunk"):
    """The asked device cannot give it; ``reason`` is one line. Without ``offset`` it is the tree that it cannot give."""

    digest: str
    offset: int | None
    reason: str


TransferRequest = AskPresent | FetchDigests | FetchChunk
TransferReply = Present | Digests | Chunk | NoChunk
TransferMessage = TransferRequest | TransferReply

_decoder: Final = msgspec.msgpack.Decoder(TransferMessage)


def decode_transfer(data: bytes | memoryview) -> TransferMessage:
    """A message about layers, its texts fit to be shown. Raises ``ProtocolError``."""
    try:
        message: TransferMessage = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"not a message about layers: {printable(exc)}") from exc
    match message:
        case NoChunk(reason=reason):
            return NoChunk(digest=message.digest, offset=message.offset, reason=printable(reason))
        case AskPresent(digests=listed) | Present(held=listed) if len(listed) > MAX_ASKED:
            raise ProtocolError(f"{len(listed)} layers in one message; at most {MAX_ASKED} are allowed")
    return message


def check_source(source: Source) -> None:
    """Judge a source that came from a peer. Raises ``ProtocolError`` naming what is wrong."""
    if not NAME.fullmatch(source.device):
        raise ProtocolError(f"source of layers {printable(source.device, 70)!r}, which is no device name")
    if not is_key(source.key):
        raise ProtocolError(f"source of layers {source.device} has no key of 40 characters")
    if not 1 <= len(source.endpoints) <= MAX_ENDPOINTS:
        raise ProtocolError(
            f"source of layers {source.device} has {len(source.endpoints)} endpoints; 1 to {MAX_ENDPOINTS} are allowed"
        )
    for endpoint in source.endpoints:
        if not is_endpoint(endpoint):
            raise ProtocolError(
                f"source of layers {source.device} at {printable(endpoint, 60)!r}, which is no tcp://address:port"
            )


def is_endpoint(endpoint: str) -> bool:
    """Whether ``endpoint`` is ``tcp://`` with an address (no name, no wildcard) and a port."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match[3]) < 65_536:
        return False
    try:
        return not ip_address((match[1] or match[2]).partition("%")[0]).is_unspecified
    except ValueError:
        return False
