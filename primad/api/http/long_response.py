"""Responses that are too long to be built or copied in one piece: the event loop must serve other clients meanwhile.

Embeddings of 2,048 texts are 160 MB of JSON, and so are the log-probabilities of a long response. Their lists are built
some items at a time. The response contains a mark for each list, which is replaced piece by piece as the response is
sent.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from primad.api.http.turns import in_turns

PIECE_BYTES: Final = 64 << 10
MEDIA_TYPE: Final = "application/json"


class LongResponse:
    """The long lists of one response."""

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)  # so that no client's text is mistaken for a mark
        self._lists: list[list[bytes]] = []

    async def list_of(self, items: Iterable[bytes]) -> Any:
        """Return the placeholder for the list of ``items``, which are JSON; an empty list if there are none."""
        pieces = await in_turns(_pieces(items))
        if not pieces:
            return []
        self._lists.append(pieces)
        return f"{self._secret}{len(self._lists) - 1}"

    def response(self, body: object) -> Response:
        """Return ``body`` as JSON with its lists."""
        marked = re.split(rb'"%b(\d+)"' % self._secret.encode(), msgspec.json.encode(body))
        pieces = [marked[0]]
        for number, behind in zip(marked[1::2], marked[2::2], strict=True):
            pieces += [b"[", *self._lists[int(number)], b"]", behind]
        return _InPieces(pieces)


def in_pieces(body: bytes) -> Response:
    """Return a response with the JSON ``body``, sent in pieces: writing 32 MB in one piece took 50 ms."""
    return _InPieces([memoryview(body)[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)])


def _pieces(items: Iterable[bytes]) -> Iterator[bytes]:
    """Yield ``items`` separated by commas, in pieces of about ``PIECE_BYTES``."""
    piece = bytearray()
    comma = b""
    for item in items:
        piece += comma + item
        comma = b","
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


class _InPieces(Response):
    media_type = MEDIA_TYPE

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        super().__init__()
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
