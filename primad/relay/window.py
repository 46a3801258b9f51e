"""Request and response bodies in flight between two devices: in pieces, and no more than the receiver has memory
for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import zmq.asyncio

from primad.network.relay_messages import PIECE_BYTES, WINDOW_BYTES, cost_of


class SendWindow:
    """The sender's room for the parts of one body; it waits until the receiver has taken enough of them."""

    def __init__(self) -> None:
        self._left_bytes = WINDOW_BYTES
        self._changed = asyncio.Event()
        self._is_open = True

    async def take(self, data: bytes) -> bool:
        """Wait for room for ``data``, and take it; False if the receiver is gone."""
        cost = cost_of(data)
        while self._is_open and self._left_bytes < cost:
            self._changed.clear()
            await self._changed.wait()
        self._left_bytes -= cost
        return self._is_open

    def give_back(self, size: int) -> None:
        """Return the room of parts that the receiver took, ``size`` bytes in all."""
        self._left_bytes = min(WINDOW_BYTES, self._left_bytes + size)
        self._changed.set()

    def close(self) -> None:
        """Note that the receiver is gone."""
        self._is_open = False
        self._changed.set()


def send_now(socket: zmq.asyncio.Socket, frames: Sequence[bytes]) -> None:
    """Send ``frames`` on a socket without a high-water mark, without waiting; what cannot be sent is lost, as with a
    broken connection."""
    if not socket.closed:
        asyncio.ensure_future(socket.send_multipart(frames, zmq.NOBLOCK)).add_done_callback(_sent)


def _sent(sending: asyncio.Future[Any]) -> None:
    if not sending.cancelled():
        sending.exception()


def pieces(data: bytes, *, more: bool) -> Iterator[tuple[bytes, bool]]:
    """Split ``data`` into parts that fit a message, each with whether others follow; one part if it is empty."""
    for begin in range(0, max(1, len(data)), PIECE_BYTES):
        yield data[begin : begin + PIECE_BYTES], more or begin + PIECE_BYTES < len(data)
