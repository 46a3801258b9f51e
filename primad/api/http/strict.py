"""HTTP/1 as strict as its specification: refuses requests that a proxy may read differently.

Request smuggling needs two readers that disagree about where a request ends. h11 accepts some forms that RFC 9112 only
tolerates: a length with chunks, lines that end with a bare LF, folded lines, the same length twice.
"""

from __future__ import annotations

import re
from typing import Final

import h11
from h11._receivebuffer import ReceiveBuffer

MAX_HEAD_BYTES: Final = 16 << 10
MAX_PARTS: Final = 1 << 16
"""Limit for a body, plus one for each ``MIN_PART_BYTES``: a part takes 10 us, and a client may leave a million unread.
"""
MIN_PART_BYTES: Final = 16
MAX_TRAILERS: Final = 32
"""Limit of header lines after a body (trailers), which nothing here reads; h11 takes 5 us for each."""
_HEAD_END: Final = b"\r\n\r\n"
_ODD_LINES: Final = re.compile(rb"(?<!\r)\n|\r[^\n]|\n[ \t]|\x00")
_LENGTH: Final = re.compile(rb"(?im)^content-length:(.*)$")
_CODING: Final = re.compile(rb"(?im)^transfer-encoding:")
_VERSION: Final = re.compile(rb"[^\r]* HTTP/1\.([01])\r")


class _Received(ReceiveBuffer):
    """Bytes received and not yet read."""

    is_body = False

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """As in h11: return the next header lines. Raises ``LocalProtocolError`` if too many follow a body."""
        lines = super().maybe_extract_lines()
        if self.is_body and lines is not None and len(lines) > MAX_TRAILERS:
            raise h11.LocalProtocolError(f"at most {MAX_TRAILERS} header lines may follow a body")
        return lines


class StrictConnection(h11.Connection):
    """The server's side of a connection; ``wrong`` describes what was not HTTP."""

    wrong = ""
    events = 0
    """The number of request parts read so far."""
    _is_chunked = False
    _parts_left: float = MAX_PARTS

    def __init__(self, max_head_bytes: int = MAX_HEAD_BYTES) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._receive_buffer: _Received = _Received()

    @property
    def ahead_bytes(self) -> int:
        """The bytes received of requests after the one that is being answered."""
        return len(self.trailing_data[0]) if self.their_state is h11.DONE else 0

    def skip(self, size: int) -> None:
        """Drop the first ``size`` bytes received: a request that was answered without this connection."""
        assert self.their_state is h11.IDLE
        self._receive_buffer.maybe_extract_at_most(size)

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """As in h11, which takes 10 us to put a chunk of a stream between its length and its end; this is faster."""
        if type(event) is h11.Data and self._is_chunked and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        sent = super().send(event)
        if type(event) is h11.Response:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in (sent or b"").lower()
        return sent

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As h11's. Raises ``RemoteProtocolError``."""
        self.events += 1
        try:
            if self.their_state is h11.IDLE and (wrong := wrong_in(self.trailing_data[0])):
                raise h11.RemoteProtocolError(wrong)
            self._receive_buffer.is_body = self.their_state is h11.SEND_BODY
            event = super().next_event()
            self._count(event)
            return event
        except h11.RemoteProtocolError as exc:
            self.wrong = str(exc)
            raise

    def _count(self, event: object) -> None:
        """Raise ``RemoteProtocolError`` if the body has too many parts for its size."""
        if type(event) is h11.Data:
            self._parts_left += len(event.data) / MIN_PART_BYTES - 1
            if self._parts_left < 0:
                raise h11.RemoteProtocolError("the body comes in too many small parts; send larger ones")
        elif type(event) is h11.Request:
            self._parts_left = MAX_PARTS


def wrong_in(received: bytes) -> str:
    """Return the error in the head of a request of which the bytes ``received`` have come; empty if h11 checks the
    rest."""
    head, is_whole, _ = received.partition(_HEAD_END)
    if len(head) > MAX_HEAD_BYTES:
        return f"a request's first line and headers have at most {MAX_HEAD_BYTES} bytes"
    if _ODD_LINES.search(head):
        return "lines end with CR LF, and header lines are not folded"
    if not is_whole:
        return ""
    version = _VERSION.match(head + b"\r")
    if version is None:
        return "this server speaks HTTP/1.1"
    lengths, is_coded = _LENGTH.findall(head), _CODING.search(head) is not None
    if is_coded and (lengths or version[1] == b"0"):
        return "Transfer-Encoding excludes Content-Length and HTTP/1.0"
    if len(lengths) > 1 or not all(length.strip(b" \t\r").isdigit() for length in lengths):
        return "Content-Length must be one number"
    return ""
