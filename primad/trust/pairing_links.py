"""Pairing over TCP. The port is open to strangers, so everything about it is bounded, and it is open only while a code is.

Plain asyncio and not ZeroMQ, which accepts as many connections as there are descriptors and keeps them for ever: here there
are ``MAX_PEERS`` at a time, ``MAX_PEERS_OF_ADDRESS`` from one address, and each ends after ``RUN_S``. A frame is its length
in two bytes, then the message. ``pairing.py`` makes all decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable
from typing import Final, cast

from primad.errors import ClusterError, PrimadError, ProtocolError, printable
from primad.system.complaints import Complaints
from primad.trust.pairing import LIFETIME_S, MAX_BYTES, RUN_S, CodeOutcome, Inviter, Joiner, Later, Who, refuse_storage
from primad.trust.trust import PAIRED, TrustedDevice, trusted_now
from primad.trust.words import Code

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 16
MAX_PEERS_OF_ADDRESS: Final = 4
TIMEOUT_S: Final = 10.0
"""What a joiner waits for all of a pairing, its turn included."""
_MESSAGES: Final = 4
_FLUSH_S: Final = 1.0
_BACKLOG: Final = 64
_HEADER: Final = 2


class PairingServer:
    """Shows ``code`` to nobody and lets in who knows it, on a free port of ``host``.

    ``on_paired`` is told of each device before the device is; an error of it is told to the device as well.
    Raises ``ClusterError`` when it cannot listen.
    """

    def __init__(
        self,
        host: str,
        code: Code,
        who: Who,
        on_paired: Callable[[TrustedDevice], None],
        *,
        lifetime_s: float = LIFETIME_S,
    ) -> None:
        self._lifetime_s = lifetime_s
        self._code, self._who, self._on_paired = code, who, on_paired
        self._listener = _listen(host)
        self.port: int = self._listener.getsockname()[1]
        self._peers: set[_Peer] = set()
        self._addresses: Counter[str] = Counter()
        self._complaints = Complaints(logger)

    async def run(self) -> CodeOutcome:
        """Serve until the code is used, burnt or expired; returns which. The port is closed afterwards."""
        loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._inviter = Inviter(self._code, self._who, loop.time(), lifetime_s=self._lifetime_s)
        with contextlib.closing(self._listener):
            server = await loop.create_server(lambda: _Peer(self), sock=self._listener, backlog=_BACKLOG)
            try:
                while (outcome := self._inviter.outcome(loop.time())) is None:
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(self._inviter.wake_at()):
                            await self._changed.wait()
                return outcome
            finally:
                server.close()
                await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        """Close all connections, once what was written to them has left."""
        for peer in self._peers:
            peer.transport.close()
        try:
            async with asyncio.timeout(_FLUSH_S):
                while self._peers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            logger.debug("%d pairing connections take nothing any more", len(self._peers))
        finally:
            for peer in self._peers:
                peer.transport.abort()

    def close(self) -> None:
        """Give the port back if ``run`` was never called."""
        self._listener.close()

    def admit(self, peer: _Peer, address: str) -> bool:
        """Whether there is room for a connection from ``address``."""
        if len(self._peers) >= MAX_PEERS or self._addresses[address] >= MAX_PEERS_OF_ADDRESS:
            return False
        self._peers.add(peer)
        self._addresses[address] += 1
        return True

    def leave(self, peer: _Peer, address: str) -> None:
        """A connection ended."""
        if peer in self._peers:
            self._peers.remove(peer)
            self._addresses -= Counter((address,))
            self._inviter.forget(peer)
            self._changed.set()

    def refused(self, address: str, why: ProtocolError) -> None:
        """``address`` sent what is no message."""
        self._complaints.add(f"refused a pairing message from {address}", why)

    def receive(self, peer: _Peer, data: bytes, address: str) -> bytes:
        """The reply to a message. Raises ``ProtocolError``."""
        reply, who = self._inviter.receive(peer, data, asyncio.get_running_loop().time())
        if who is not None:
            try:
                self._on_paired(trusted_now(who.device, who.key, PAIRED))
                logger.info("paired with %s at %s", who.device, address)
            except PrimadError as exc:
                logger.error("paired with %s, but its key cannot be kept: %s", who.device, exc)
                reply = refuse_storage()
        self._changed.set()
        return reply


class _Peer(asyncio.Protocol):
    """One connection of a stranger: a few short frames in a short time."""

    transport: asyncio.Transport

    def __init__(self, server: PairingServer) -> None:
        self._server = server
        self._data = bytearray()
        self._messages = 0
        self._address = ""
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._address = printable((transport.get_extra_info("peername") or ("nobody",))[0], 64)
        if not self._server.admit(self, self._address):
            self.transport.abort()
            return
        self._end = asyncio.get_running_loop().call_later(RUN_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while not self.transport.is_closing() and len(self._data) >= _HEADER:
            size = int.from_bytes(self._data[:_HEADER], "big")
            self._messages += len(self._data) >= _HEADER + size
            if not 0 < size <= MAX_BYTES or self._messages > _MESSAGES:
                self.transport.abort()
            elif len(self._data) < _HEADER + size:
                return
            else:
                frame = bytes(self._data[_HEADER : _HEADER + size])
                del self._data[: _HEADER + size]
                self._frame(frame)

    def _frame(self, frame: bytes) -> None:
        try:
            self.transport.write(_framed(self._server.receive(self, frame, self._address)))
        except ProtocolError as exc:
            self._server.refused(self._address, exc)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        self._server.leave(self, self._address)


async def pair_with(host: str, port: int, code: Code, who: Who, timeout_s: float = TIMEOUT_S) -> TrustedDevice:
    """Prove to the device at ``host:port`` that we know ``code``, and let it prove the same; returns that device.

    Raises ``ClusterError`` for a wrong, burnt or expired code, for nobody there, another version or another cluster.
    """
    place = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            found = await _run(host, port, Joiner(code, who))
            while isinstance(found, Later):
                await asyncio.sleep(found.wait_s)
                found = await _run(host, port, Joiner(code, who))
    except TimeoutError as exc:
        raise ClusterError(f"pairing with {place}: no answer within {timeout_s:g} s; is it still waiting?") from exc
    except (OSError, EOFError) as exc:
        hint = "is the code still shown there?"
        raise ClusterError(f"pairing with {place}: nobody waits for a device there ({_strerror(exc)}); {hint}") from exc
    except PrimadError as exc:
        raise ClusterError(f"pairing with {place}: {exc}") from exc
    return trusted_now(found.device, found.key, PAIRED)


async def _run(host: str, port: int, joiner: Joiner) -> Who | Later:
    reader, writer = await asyncio.open_connection(host, port, limit=_HEADER + MAX_BYTES)
    try:
        message: bytes | Who | Later = joiner.start()
        while isinstance(message, bytes):
            writer.write(_framed(message))
            await writer.drain()
            size = int.from_bytes(await reader.readexactly(_HEADER), "big")
            if size > MAX_BYTES:
                raise ProtocolError("what answers there does not speak of pairing")
            message = joiner.receive(await reader.readexactly(size))
        return message
    finally:
        writer.transport.abort()


def _framed(message: bytes) -> bytes:
    assert len(message) <= MAX_BYTES
    return len(message).to_bytes(_HEADER, "big") + message


def _strerror(exc: OSError | EOFError) -> str:
    return (exc.strerror or "no such address") if isinstance(exc, OSError) else "the connection was closed"


def _listen(host: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, dualstack_ipv6=both)
    except OSError as exc:
        raise ClusterError(
            f"--host {host}: cannot listen on {host}: {exc.strerror or exc}; choose another --host"
        ) from exc
