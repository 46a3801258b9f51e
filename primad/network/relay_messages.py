"""Messages by which a device relays HTTP requests to its head (``primad join --api``).

Both sides identify a request by the number that the relaying device gave it. Order is kept on a connection. At most
``WINDOW_BYTES`` of a body are in flight: the receiver confirms the bytes that it passed on (``BodyTaken``).

Messages get lost with a connection. So while requests are open, the device lists them every second (``RelayAlive``),
and the head replies with those that it knows. Each side ends requests that the other does not know, and all of them
after a silence.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from primad.errors import ProtocolError, printable
from primad.network.contacts import is_address
from primad.system.wire import decoded

MAX_HEAD_BYTES: Final = 64 << 10
"""The path, query and headers of a request or response together."""
MAX_HEADERS: Final = 512
MAX_OPEN: Final = 4096
"""Limit of a device's concurrent requests."""
PIECE_BYTES: Final = 16 << 10
"""A longer part of a body is sent in pieces."""
WINDOW_BYTES: Final = 64 << 10
EMPTY_BYTES: Final = 64
"""The cost of a part of a body in addition to its bytes."""
MAX_RELAY_BYTES: Final = 256 << 10
"""Limit of a message."""
_METHOD: Final = re.compile(r"[A-Z]{1,20}")
_PATH: Final = re.compile(rb"/[!-~]*")

Number = Annotated[int, Meta(ge=1, le=1 << 62)]
Headers = Annotated[list[tuple[bytes, bytes]], Meta(max_length=MAX_HEADERS)]
PartBytes = Annotated[bytes, Meta(max_length=PIECE_BYTES)]


class RelayRequest(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """A request begins: ``path`` as in its first line, without the ``query``. ``client`` is the client's address, empty
    if the client runs on the relaying device."""

    number: Number
    method: str
    path: bytes
    query: bytes
    headers: Headers
    client: str
    version: str = "1.1"


class RequestPart(msgspec.Struct, frozen=True, kw_only=True, tag="request-part"):
    """The next bytes of the request's body; ``more``: others follow."""

    number: Number
    data: PartBytes
    more: bool


class RequestLeft(msgspec.Struct, frozen=True, kw_only=True, tag="request-left"):
    """The request's client is gone."""

    number: Number


class ResponseStart(msgspec.Struct, frozen=True, kw_only=True, tag="response"):
    """The response begins. For a stream, ``broken`` is the error that ends it if this head goes away."""

    number: Number
    status: Annotated[int, Meta(ge=100, le=599)]
    headers: Headers
    broken: Annotated[bytes, Meta(max_length=PIECE_BYTES)] = b""


class ResponsePart(msgspec.Struct, frozen=True, kw_only=True, tag="response-part"):
    """The next bytes of the response's body; without ``more`` the response is complete."""

    number: Number
    data: PartBytes
    more: bool


class BodyTaken(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """The receiver passed on parts of the body that cost ``size`` bytes (``cost_of``)."""

    number: Number
    size: Annotated[int, Meta(ge=1, le=WINDOW_BYTES)]


class RelayAlive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """A sign of life, with the requests that are open at the sender. The reply repeats ``newest``, the number of the
    latest request."""

    newest: Annotated[int, Meta(ge=0, le=1 << 62)]
    open: Annotated[list[Number], Meta(max_length=MAX_OPEN)]


RelayedMessage = RelayRequest | RequestPart | RequestLeft | BodyTaken | RelayAlive
RelayReply = ResponseStart | ResponsePart | BodyTaken | RelayAlive

_request_decoder: Final = msgspec.msgpack.Decoder(RelayedMessage)
_reply_decoder: Final = msgspec.msgpack.Decoder(RelayReply)


def cost_of(data: bytes) -> int:
    """Return how much of the window a part of a body with these bytes takes."""
    return len(data) + EMPTY_BYTES


def decode_relayed(data: bytes | memoryview) -> RelayedMessage:
    """Decode a message of a relaying device. Raises ``ProtocolError``."""
    message: RelayedMessage = decoded(_request_decoder, data, "a message of a device that relays requests")
    if isinstance(message, RelayRequest):
        _check_request(message)
    return message


def decode_relay_reply(data: bytes | memoryview) -> RelayReply:
    """Decode a message of the head. Raises ``ProtocolError``."""
    message: RelayReply = decoded(_reply_decoder, data, "a message of a head about relayed requests")
    return message


def _check_request(request: RelayRequest) -> None:
    if not _METHOD.fullmatch(request.method) or request.version not in ("1.0", "1.1"):
        raise ProtocolError(f"a relayed request of the method {printable(request.method, 40)!r}")
    if not _PATH.fullmatch(request.path):
        raise ProtocolError(f"a relayed request for {printable(request.path, 80)}")
    if request.client and not is_address(request.client):
        raise ProtocolError(f"a relayed request of {printable(request.client, 50)!r}, which is not an address")
    size = len(request.path) + len(request.query) + sum(len(name) + len(value) for name, value in request.headers)
    if size > MAX_HEAD_BYTES:
        raise ProtocolError(f"a relayed request whose headers have {size} bytes")
