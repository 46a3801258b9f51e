"""Access to the servers of a ZeroMQ context: checked once per connection, before any byte of a message is read.

libzmq proves that a client holds the secret of its public key and then asks us (ZAP, RFC 27). The decision is attached
to every message of the connection, so that a receiver knows its sender. An admitted connection stays open when its key
is revoked, so receivers must check again, with ``sender_key``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import zmq
import zmq.asyncio
import zmq.auth

from primad.errors import PrimadError, ProtocolError, printable
from primad.network.sockets import ZAP_DOMAIN
from primad.system.complaints import Complaints
from primad.trust.identity import fingerprint

logger = logging.getLogger(__name__)

Allows = Callable[[str], bool]
"""Whether a device is admitted, given its public key in Z85."""

_ADDRESS_FRAME: Final = 3
_ZAP: Final = "inproc://zeromq.zap.01"


class Gate:
    """Admits clients to the servers of ``context`` if ``allows`` accepts their key; use it as an asynchronous context
    manager.

    One gate per context. Before the gate opens and after it closes, no client is admitted.
    """

    def __init__(self, context: zmq.asyncio.Context, allows: Allows) -> None:
        self._allows = allows
        self._authenticator = zmq.auth.Authenticator(context, log=logger)
        self._authenticator.configure_curve_callback(ZAP_DOMAIN.decode(), self)
        self._task: asyncio.Task[None] | None = None
        self._address = ""
        self._complaints = Complaints(logger)

    async def __aenter__(self) -> Self:
        self._authenticator.start()
        self._task = asyncio.create_task(self._answer(), name="gate")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        try:
            await asyncio.wait([self._task])
        finally:
            if (socket := self._authenticator.zap_socket) is not None and not socket.closed:
                socket.unbind(_ZAP)  # a closed socket keeps it for a moment, and another gate may open at once
            self._authenticator.stop()
        if not self._task.cancelled():
            self._task.result()  # the task never ends by itself; if it did, that is our own error

    async def _answer(self) -> None:
        """Reply to libzmq's questions one by one. We await this task ourselves, which pyzmq's own loop does not allow."""
        socket = self._authenticator.zap_socket
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        while True:
            await poller.poll()
            with contextlib.suppress(zmq.Again):
                question = socket.recv_multipart(zmq.DONTWAIT)
                self._address = printable(question[_ADDRESS_FRAME].decode("ascii", "replace"), 64)
                await self._authenticator.handle_zap_message(question)

    def callback(self, domain: str, key: bytes) -> bool:
        """Answer the authenticator's question whether ``key`` (Z85) is admitted; no if in doubt."""
        del domain
        text, why = key.decode("ascii"), "it is not trusted here"
        try:
            if self._allows(text):
                return True
        except PrimadError as exc:
            why = str(exc)
        self._complaints.add(f"refused the device {fingerprint(text)} at {self._address}", why)
        return False


def sender_key(frame: zmq.Frame) -> str:
    """The proven public key (Z85) of the sender of ``frame``, from ``recv_multipart(copy=False)`` on a *server* socket.

    A client's socket pins its peer's key, so there is no need. Raises ``ProtocolError`` for a frame that came through
    no gate.
    """
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError as exc:
        raise ProtocolError("message of a sender that has proven no key") from exc


def sender_address(frame: zmq.Frame) -> str:
    """Return the address, with its scope if it has one, from which ``frame`` came; empty if the system does not report
    it."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""
