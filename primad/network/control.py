"""The control link: the worker listens, the head connects. It carries only the messages of ``messages.py``.

An unreadable message is refused with a log line; the link and the process survive. There is at most one such line per
second, so that no sender can fill a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from primad.errors import ClusterError, ProtocolError
from primad.network.gate import sender_address, sender_key
from primad.network.messages import (
    ECHO_BYTES,
    MAX_STATES_BYTES,
    USUAL_BYTES,
    Echoed,
    HeadMessage,
    WorkerMessage,
    decode_from_head,
    decode_from_worker,
)
from primad.network.scopes import Scopes
from primad.network.sockets import endpoint, listen, monitored, open_socket, refusals, unwatch
from primad.settings.timings import NetworkTimings
from primad.system.complaints import Complaints
from primad.system.wire import encode
from primad.trust.identity import Identity

logger = logging.getLogger(__name__)

MAX_UNREAD: Final = 32
"""Limit of a worker's messages that wait in the head's memory; later ones wait in the network."""
_REFUSED_AFTER: Final = 2
"""Connections refused in a row until a process counts as ended: the first attempt may meet one that just restarted."""


@functools.cache
def _echoed(size: int) -> bytes:
    assert size in ECHO_BYTES
    return encode(Echoed(bytes(size)))


class WorkerEnd:
    """A worker's end: receives messages of heads, and of other devices that measure their link to it. All have passed
    the gate.

    Each connection is identified by the ``peer`` bytes of its messages, each device by its public key. ``scopes`` is
    notified of the address of each. Large messages are read only from heads, whose key ``leads``.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        port: int | None,
        preferred: int,
        *,
        identity: Identity,
        leads: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._leads = leads
        self._socket, self.port = listen(context, zmq.ROUTER, host, port, preferred, identity=identity)
        self._complaints = Complaints(logger)
        self.scopes = Scopes()
        self.heard_at = ""
        """The address of the sender of the last message."""

    async def receive(self) -> tuple[bytes, str, HeadMessage]:
        """Return the next message of any device: connection, public key, message."""
        while True:
            await asyncio.sleep(0)  # receiving a ready message does not yield: a sender of many would block all
            peer, *frames = await self._socket.recv_multipart(copy=False)
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"message of {len(frames)} frames; a control message has 1")
                key, size = sender_key(frames[0]), len(frames[0])
                if size > USUAL_BYTES and not self._leads(key):
                    raise ProtocolError(f"message of {size} bytes from a device that is not a head here")
                self.heard_at = sender_address(frames[0])
                self.scopes.saw(self.heard_at)
                return peer.bytes, key, decode_from_head(frames[0].bytes)
            except ProtocolError as exc:
                self._complaints.add("refused a message on the control link", exc)

    async def send(self, peer: bytes, message: WorkerMessage) -> None:
        """Reply on the connection ``peer``; does nothing if it is gone or accepts nothing."""
        with contextlib.suppress(zmq.Again):
            await self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)

    async def echo(self, peer: bytes, size: int) -> None:
        """Reply to an ``Echo`` for ``size`` bytes; waiting replies of one size share their memory."""
        with contextlib.suppress(zmq.Again):
            await self._socket.send_multipart([peer, _echoed(size)], zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


class HeadEnd:
    """The head's link to the worker at ``host:port`` that owns the public key ``key``; no other can reply on it.

    Raises ``ClusterError`` for an invalid address.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        port: int,
        *,
        identity: Identity,
        key: str,
        timeout_s: float = NetworkTimings().answer_timeout_s,
    ) -> None:
        self.host, self.port, self.key = host, port, key
        self._timeout_s = timeout_s
        self._refused = ""
        """Why its last message was refused."""
        try:
            self._socket = open_socket(context, zmq.DEALER, identity=identity, server=key)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_STATES_BYTES)
            self._socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
            self._refusals: zmq.asyncio.Socket | None = refusals(self._socket)
        except zmq.ZMQError as exc:  # e.g. if no more sockets are available
            raise ClusterError(f"cannot connect to {self.address}: {exc.strerror}") from exc
        self._monitor: zmq.asyncio.Socket | None = None
        self._complaints = Complaints(logger)
        try:
            self._socket.connect(endpoint(host, port))
        except zmq.ZMQError as exc:
            self.close()
            raise ClusterError(f"{host} is not an address to connect to: {exc.strerror}") from exc

    @property
    def address(self) -> str:
        """``host:port`` for people."""
        return f"{self.host}:{self.port}"

    async def send(self, message: HeadMessage) -> None:
        """Send the worker a message. Raises ``ClusterError`` if nothing is sent in time, or it is closed."""
        if self._socket.closed:
            raise ClusterError(f"the link to {self.address} is closed")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send(encode(message))
        except TimeoutError as exc:
            raise ClusterError(f"the device at {self.address} accepts no messages") from exc

    async def receive(self, timeout_s: float | None = NetworkTimings().answer_timeout_s) -> WorkerMessage:
        """Return the worker's next message. Raises ``ClusterError`` if there is none within ``timeout_s`` (None:
        unlimited)."""
        while True:
            await asyncio.sleep(0)  # as above
            try:
                async with asyncio.timeout(timeout_s):
                    frames = await self._socket.recv_multipart()
            except TimeoutError as exc:
                assert timeout_s is not None
                raise self.unanswered(timeout_s) from exc
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"message of {len(frames)} frames; a control message has 1")
                return decode_from_worker(frames[0])
            except ProtocolError as exc:
                self._refused = str(exc)
                self._complaints.add(f"refused a message of the device at {self.address}", exc)

    def unanswered(self, timeout_s: float) -> ClusterError:
        """Return the error for a device that sent nothing readable for ``timeout_s``."""
        if self._refused:
            return ClusterError(f"the reply of {self.address} was refused: {self._refused}")
        return ClusterError(f"no response from {self.address} within {timeout_s:g} s")

    async def reconnections(self) -> AsyncIterator[None]:
        """Yield whenever the established connection was made again, until the other side's process has ended: its
        system refuses connections to its port.

        A link that only went silent does not show here; the heartbeat detects that.
        """
        assert self._monitor is None, "one waits at a time"
        self._end_refusals()
        watched = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED
        monitor = self._monitor = monitored(self._socket, watched)
        refused = 0
        while refused < _REFUSED_AFTER:
            message = recv_monitor_message(monitor)
            event = (await message)["event"]
            refused = refused + 1 if event == zmq.EVENT_CLOSED else 0
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                yield

    async def wait_refused(self) -> None:
        """Wait until the other side refuses this device, or learn that it did."""
        if self._refusals is None:
            self._refusals = refusals(self._socket)
        try:
            await recv_monitor_message(self._refusals)
        finally:
            self._end_refusals()

    def close(self) -> None:
        """Close the link."""
        self._end_refusals()
        if self._monitor is not None:
            unwatch(self._socket, self._monitor)
            self._monitor = None
        self._socket.close()

    def _end_refusals(self) -> None:
        """Make room for another monitor."""
        if self._refusals is not None:
            unwatch(self._socket, self._refusals)
            self._refusals = None
