"""The link to one device that may have layers: reach it at any of its addresses, notice when it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from primad.errors import ClusterError, ProtocolError, printable
from primad.network.contacts import Contact
from primad.network.layer_messages import (
    MAX_REPLY_BYTES,
    AskPresent,
    Present,
    TransferMessage,
    TransferRequest,
    decode_transfer,
)
from primad.network.sockets import bound_socket, endpoint, monitored, open_socket
from primad.settings.timings import LayerTimings
from primad.system.wire import encode
from primad.trust.identity import Identity

RECEIVE_LIMIT: Final = 8
MAX_ADDRESSES: Final = 16
"""Maximum number of a source's addresses; all are tried concurrently."""
_LOST: Final[dict[int, str]] = {
    zmq.EVENT_CONNECT_RETRIED: "nothing responds there",
    zmq.EVENT_DISCONNECTED: "closed the connection",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "closed the connection before it proved its key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "is no primad that could prove its key",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "does not trust this device",
}


class SourceError(ClusterError):
    """One source cannot be used (any more); the others still can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """How this device fetches: its sockets and key, how long it waits, ``bytes_per_s`` at most (None: no cap)."""

    context: zmq.asyncio.Context
    identity: Identity
    timings: LayerTimings = LayerTimings()
    bytes_per_s: float | None = None


class SourceLink:
    """A connection to ``source`` at ``place``, one of its endpoints. Raises ``SourceError`` if that is not an endpoint."""

    def __init__(self, transfers: Transfers, source: Contact, place: str) -> None:
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._socket = open_socket(transfers.context, zmq.DEALER, identity=transfers.identity, server=source.key)
        bound_socket(self._socket, MAX_REPLY_BYTES, RECEIVE_LIMIT)
        self._monitor: zmq.asyncio.Socket = monitored(self._socket, sum(_LOST))
        self._watching = asyncio.create_task(self._watch())
        try:
            self._socket.connect(place)
        except zmq.ZMQError as exc:
            self.close()
            raise SourceError(f"{printable(place, 60)!r} is no endpoint: {exc.strerror}") from exc

    async def _watch(self) -> None:
        frames = await self._monitor.recv_multipart()
        event = parse_monitor_message(frames)["event"]
        if not self._lost.done():
            self._lost.set_result(_LOST[event])

    async def ask(self, request: TransferRequest) -> None:
        """Send a request; the caller counts replies, which bounds the requests that wait to be sent."""
        await self._socket.send(encode(request))

    async def answer(self, timeout_s: float) -> tuple[TransferMessage, memoryview | None]:
        """The next message, and its second frame. Raises ``SourceError`` when the source is gone or silent for
        ``timeout_s``, ``ProtocolError`` for an invalid message."""
        receiving = asyncio.ensure_future(self._socket.recv_multipart(copy=False))
        try:
            either: set[asyncio.Future[Any]] = {receiving, self._lost}
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                raise SourceError(self._lost.result() if self._lost.done() else f"sent nothing for {timeout_s:g} s")
            frames = receiving.result()
        finally:
            receiving.cancel()
        if len(frames) > 2:
            raise ProtocolError(f"{len(frames)} frames that are no reply")
        return decode_transfer(frames[0].buffer), frames[1].buffer if len(frames) == 2 else None

    def close(self) -> None:
        """Close the connection; outstanding requests get no reply. Closing again does nothing."""
        if self._socket.closed:
            return
        self._watching.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


@asynccontextmanager
async def reach(
    transfers: Transfers, source: Contact, digests: Sequence[str] = ()
) -> AsyncIterator[tuple[SourceLink, list[str]]]:
    """A link to ``source`` at the address that answers first, and which of ``digests`` it holds.

    Raises ``SourceError`` with the reasons when none answers in time.
    """
    tries = [
        asyncio.create_task(_greet(transfers, source, endpoint(address, source.port), digests))
        for address in source.addresses[:MAX_ADDRESSES]
    ]
    try:
        reasons = []
        for attempt in asyncio.as_completed(tries):
            try:
                link, held = await attempt
            except (SourceError, ProtocolError) as exc:
                reasons.append(str(exc))
                continue
            await _give_up(tries, keep=link)
            yield link, held
            return
        raise SourceError("; ".join(dict.fromkeys(reasons)) or "no address is known")
    finally:
        await _give_up(tries)


async def _greet(
    transfers: Transfers, source: Contact, place: str, digests: Sequence[str]
) -> tuple[SourceLink, list[str]]:
    link = SourceLink(transfers, source, place)
    try:
        await link.ask(AskPresent(digests=list(digests)))
        try:
            message, _ = await link.answer(transfers.timings.reach_timeout_s)
        except SourceError as exc:
            raise SourceError(f"{place} {exc}") from exc
        if not isinstance(message, Present) or len(message.held) != len(digests):
            raise ProtocolError(f"{place} did not say which layers it holds")
    except BaseException:
        link.close()
        raise
    return link, [digest for digest, held in zip(digests, message.held, strict=True) if held]


async def _give_up(tries: Sequence[asyncio.Task[tuple[SourceLink, list[str]]]], keep: SourceLink | None = None) -> None:
    """End the attempts and close their links, all but ``keep``."""
    for task in tries:
        task.cancel()
    await asyncio.wait(tries)
    for task in tries:
        if not task.cancelled() and task.exception() is None and task.result()[0] is not keep:
            task.result()[0].close()
