"""Pairing over TCP. The port is open to strangers, so everything about it is bounded, and it is open only while a code
is shown.

It uses plain asyncio and not ZeroMQ, which accepts as many connections as there are descriptors and keeps them for
ever. Here there are at most ``MAX_PEERS`` connections, ``MAX_PEERS_OF_ADDRESS`` from one address, and each ends after
``RUN_S``. A frame is its length in two bytes, then the message. ``pairing.py`` makes all decisions.

SPAKE2 here is Python, and its computing time depends on the code. So a reply leaves ``REPLY_S`` after the message,
which hides that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Final

from primad.errors import ClusterError, PrimadError, ProtocolError, printable
from primad.system.complaints import Complaints
from primad.trust.pairing import (
    BETWEEN_TRIES_S,
    LIFETIME_S,
    MAX_BYTES,
    RUN_S,
    CodeOutcome,
    Inviter,
    Joiner,
    Later,
    Who,
    refuse_storage,
)
from primad.trust.trust import PAIRED, TrustedDevice, trusted_now
from primad.trust.words import Code

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 16
MAX_PEERS_OF_ADDRESS: Final = 4
CONNECT_S: Final = 2.0
TIMEOUT_S: Final = 10.0
"""A joiner's timeout for all of a pairing, including waiting for its turn."""
REPLY_S: Final = 0.25
"""Several times a slow board's computing time for a message."""
_MESSAGES: Final = 4
_FLUSH_S: Final = 1.0
_BACKLOG: Final = 64
_HEADER: Final = 2
_LIMIT: Final = _HEADER + MAX_BYTES


class NobodyThereError(ClusterError):
    """There is no listener at the address of the code."""


class _UnreachedError(Exception):
    """As ``NobodyThereError``, with the reason only."""


class PairingServer:
    """Admits a device that knows ``code``, on port ``preferred`` of ``host`` if that is free, or on any.

    ``on_paired`` is called with each device before the device is notified; its error is sent to the device as well.
    Raises ``ClusterError`` if it cannot listen.
    """

    def __init__(
        self,
        host: str,
        code: Code,
        who: Who,
        on_paired: Callable[[TrustedDevice], None],
        *,
        preferred: int = 0,
        lifetime_s: float = LIFETIME_S,
    ) -> None:
        self._lifetime_s = lifetime_s
        self._code, self._who, self._on_paired = code, who, on_paired
        self._listener = _listen(host, preferred)
        self.port: int = self._listener.getsockname()[1]
        self._peers: dict[asyncio.Task[None], str] = {}
        """Connected addresses, by the task that serves them."""
        self._is_over = False
        self._complaints = Complaints(logger)

    async def run(self) -> CodeOutcome:
        """Serve until the code is used, burnt or expired; return which. The port is closed afterwards."""
        loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._inviter = Inviter(self._code, self._who, loop.time(), lifetime_s=self._lifetime_s)
        with contextlib.closing(self._listener):
            server = await asyncio.start_server(
                self._accept, sock=self._listener, backlog=_BACKLOG, limit=_LIMIT, start_serving=False
            )
            try:
                await server.start_serving()  # in this block, as it may be cancelled after it began
                while (outcome := self._inviter.outcome(loop.time())) is None:
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(self._inviter.wake_at()):
                            await self._changed.wait()
                server.close()
                if self._peers:
                    await asyncio.wait(self._peers, timeout=REPLY_S)  # a delayed reply is sent
                return outcome
            finally:
                self._is_over = True
                server.close()
                for peer in list(self._peers):
                    peer.cancel()
                if self._peers:
                    await asyncio.wait(self._peers)

    def close(self) -> None:
        """Close the port if ``run`` was never called."""
        self._listener.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection if there is room for one from its address."""
        address = printable((writer.get_extra_info("peername") or ("nobody",))[0], 64)
        peers = list(self._peers.values())
        if self._is_over or len(peers) >= MAX_PEERS or peers.count(address) >= MAX_PEERS_OF_ADDRESS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer, address))
        self._peers[task] = address
        task.add_done_callback(functools.partial(self._left, writer))

    def _left(self, writer: asyncio.StreamWriter, peer: asyncio.Task[None]) -> None:
        writer.transport.abort()  # here, since a task that is cancelled before it starts closes nothing
        del self._peers[peer]
        self._inviter.forget(peer)
        self._changed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        """Serve a few short frames in a short time."""
        try:
            async with asyncio.timeout(RUN_S):
                for _ in range(_MESSAGES):
                    data = await _read_frame(reader)
                    async with _lasting(REPLY_S):
                        reply = self._reply(data, address)
                    writer.write(_framed(reply))
                    self._changed.set()
        except ProtocolError as exc:
            self._complaints.add(f"refused a pairing message from {address}", exc)
        except (TimeoutError, OSError, EOFError) as exc:
            logger.debug("pairing with %s ended: %s", address, exc)
        finally:
            writer.close()
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(_FLUSH_S):
                    await writer.wait_closed()  # written data is sent first

    def _reply(self, data: bytes, address: str) -> bytes:
        """Return the reply to a message. Raises ``ProtocolError``."""
        reply, who = self._inviter.receive(asyncio.current_task(), data, asyncio.get_running_loop().time())
        if who is not None:
            try:
                self._on_paired(trusted_now(who.device, who.key, PAIRED))
                logger.info("paired with %s at %s", who.device, address)
            except PrimadError as exc:
                logger.error("paired with %s, but its key cannot be kept: %s", who.device, exc)
                reply = refuse_storage()
        return reply


async def pair_with(
    host: str, port: int, code: Code, who: Who, before_proof: Callable[[], None], timeout_s: float = TIMEOUT_S
) -> TrustedDevice:
    """Prove to the device at ``host:port`` that we know ``code``, and have it prove the same; return that device.

    At most one proof is sent, and ``before_proof`` is called before it; its exception prevents it. Raises
    ``ClusterError`` for a wrong, burnt or expired code, another version or another cluster; ``NobodyThereError``.
    """
    place = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            found: Who | Later = Later()
            pause_s = REPLY_S
            while isinstance(found, Later):
                async with _lasting(pause_s):
                    joiner = Joiner(code, who)
                found = await _run(host, port, joiner, before_proof)
                pause_s = BETWEEN_TRIES_S
    except TimeoutError as exc:
        raise ClusterError(f"pairing with {place}: no response within {timeout_s:g} s; is it still waiting?") from exc
    except _UnreachedError as exc:
        raise NobodyThereError(_nobody(place, str(exc))) from exc
    except (OSError, EOFError) as exc:
        raise ClusterError(_nobody(place, "the connection was closed")) from exc
    except PrimadError as exc:
        raise ClusterError(f"pairing with {place}: {exc}") from exc
    return trusted_now(found.device, found.key, PAIRED)


def _nobody(place: str, why: str) -> str:
    return f"pairing with {place}: no pairing there ({why}); is the code still shown there?"


async def _run(host: str, port: int, joiner: Joiner, before_proof: Callable[[], None]) -> Who | Later:
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, limit=_LIMIT), CONNECT_S)
    except TimeoutError as exc:
        raise _UnreachedError("no response") from exc
    except OSError as exc:
        raise _UnreachedError(exc.strerror or "no such address") from exc
    try:
        message: bytes | Who | Later = joiner.start()
        while isinstance(message, bytes):
            writer.write(_framed(message))
            await writer.drain()
            data = await _read_frame(reader)
            async with _lasting(REPLY_S):
                message = joiner.receive(data)
                if isinstance(message, bytes):  # a proof: a joiner's only message after its first one
                    await asyncio.to_thread(before_proof)
        return message
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def _lasting(seconds: float) -> AsyncIterator[None]:
    """Make the block take ``seconds`` for observers."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + seconds
    yield
    await asyncio.sleep(ends_at - loop.time())


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(_HEADER), "big")
    if not 0 < size <= MAX_BYTES:
        raise ProtocolError("not a pairing message")
    return await reader.readexactly(size)


def _framed(message: bytes) -> bytes:
    assert len(message) <= MAX_BYTES
    return len(message).to_bytes(_HEADER, "big") + message


def _listen(host: str, preferred: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
        if preferred:
            with contextlib.suppress(OSError):
                return socket.create_server((address[0], preferred), family=family, dualstack_ipv6=both)
        return socket.create_server(address[:2], family=family, dualstack_ipv6=both)
    except OSError as exc:
        raise ClusterError(
            f"--host {host}: cannot listen on {host}: {exc.strerror or exc}; choose another --host"
        ) from exc
