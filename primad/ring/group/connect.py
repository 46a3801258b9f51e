"""Connects all ranks of a group with each other: a rank connects to those below it and accepts connections from those
above.

Both ends identify themselves and prove that they have the group's key before any step is sent. Any other connection is
dropped after ``STRANGER_S`` at the latest, and no device is blamed for it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final

from primad.errors import RankError, RingError
from primad.ring.group.exchange import RankExchange
from primad.ring.group.frames import (
    FRAME_ROOM,
    HEADER,
    HELLO_BYTES,
    PROOF,
    TAG_BYTES,
    Direction,
    RankHello,
    hello_of,
)
from primad.ring.group.peer import RankPeer

logger = logging.getLogger(__name__)

STRANGER_S: Final = 1.0
_PROOF_BYTES: Final = HEADER.size + TAG_BYTES
_BACKLOG: Final = 16

_KEEPALIVE: Final = {
    **{"TCP_KEEPIDLE": 1, "TCP_KEEPALIVE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3},
    "TCP_USER_TIMEOUT": 4000,
}
"""Seconds, but milliseconds for the last: a peer that is silent for 4 s is gone, as on the control link."""

PortAddress = tuple[str, int]


class _StrangerError(Exception):
    """The other end does not belong to this group."""


class GroupListener:
    """Accepts connections of other ranks on a port of ``host``. Raises ``RingError`` if it cannot listen there."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            both = host == "::" and socket.has_dualstack_ipv6()  # all addresses include those of IPv4
            self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as exc:
            raise RingError(f"cannot listen for a group on {host}: {exc.strerror or exc}; check --host") from exc
        self.address: PortAddress = self._socket.getsockname()[:2]

    def accept(self, until: float) -> socket.socket:
        """Accept the next connection. Raises ``TimeoutError``."""
        self._socket.settimeout(max(until - time.monotonic(), 0.001))
        return self._socket.accept()[0]

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close()


def connect_group(
    rank: int,
    names: Sequence[str],
    listener: GroupListener,
    addresses: Mapping[int, PortAddress],
    key: bytes,
    *,
    connect_timeout_s: float,
    timeout_s: float,
    halves: bool = False,
) -> RankExchange:
    """Connect ``rank`` of a group of devices ``names``; the ranks below it are at ``addresses``. Return the exchange.

    The ``key`` belongs to this group alone. Raises ``RankError`` for a device that is not there within
    ``connect_timeout_s``.
    """
    until, found = time.monotonic() + connect_timeout_s, dict[int, RankPeer]()
    try:
        for other in range(rank):
            found[other] = _connected(rank, other, names, addresses[other], key, until)
        while len(found) < len(names) - 1:
            awaited = [other for other in range(rank + 1, len(names)) if other not in found]
            peer = _accepted(rank, awaited, names, listener, key, until)
            if peer is not None:
                found[peer.rank] = peer
    except BaseException:
        for peer in found.values():
            peer.connection.close()
        raise
    return RankExchange(rank, list(found.values()), timeout_s=timeout_s, halves=halves)


def _connected(rank: int, other: int, names: Sequence[str], address: PortAddress, key: bytes, until: float) -> RankPeer:
    own = RankHello.of(rank, len(names))
    try:
        connection = socket.create_connection(address, max(until - time.monotonic(), 0.001))
    except OSError as exc:
        raise RankError(
            f"{names[other]} of this group cannot be reached at {address[0]}: {exc.strerror or exc}", names[other]
        ) from exc
    try:
        connection.sendall(own.packed())
        return _paired(connection, own, [other], names, key, until)
    except (OSError, _StrangerError) as exc:
        connection.close()
        raise RankError(
            f"{names[other]} of this group at {address[0]} is not who it should be, or too late: {exc}", names[other]
        ) from exc


def _accepted(
    rank: int, awaited: Sequence[int], names: Sequence[str], listener: GroupListener, key: bytes, until: float
) -> RankPeer | None:
    try:
        connection = listener.accept(until)
    except TimeoutError as exc:
        missing = " and ".join(names[other] for other in awaited)
        raise RankError(f"{missing} of this group did not connect in time", names[awaited[0]]) from exc
    own = RankHello.of(rank, len(names))
    try:
        return _paired(connection, own, awaited, names, key, min(until, time.monotonic() + STRANGER_S), replies=True)
    except (OSError, _StrangerError) as exc:
        logger.debug("a connection to this group was dropped: %s", exc)
        connection.close()
        return None


def _paired(
    connection: socket.socket,
    own: RankHello,
    awaited: Sequence[int],
    names: Sequence[str],
    key: bytes,
    until: float,
    *,
    replies: bool = False,
) -> RankPeer:
    """Return the peer at the other end, once it has proved its key. Raises ``OSError``, ``_StrangerError``."""
    with contextlib.suppress(OSError):  # connections that are not TCP
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_cuts(connection)
    hello = hello_of(_received(connection, HELLO_BYTES, until))
    if hello is None or hello.rank not in awaited or hello.ranks != len(names):
        raise _StrangerError("it belongs to another group")
    sends, takes = Direction(key, own, hello), Direction(key, hello, own)
    own_proof = sends.seal(PROOF, b"", memoryview(bytearray(FRAME_ROOM)))
    connection.sendall((own.packed() if replies else b"") + own_proof)
    proof = _received(connection, _PROOF_BYTES, until)
    header = HEADER.pack(PROOF, 0)
    sealed, nothing = memoryview(proof)[HEADER.size :], memoryview(bytearray())
    if proof[: HEADER.size] != header or not takes.open(header, sealed, nothing):
        raise _StrangerError("it has another key")
    return RankPeer(hello.rank, names[hello.rank], connection, sends, takes)


def _notice_cuts(connection: socket.socket) -> None:
    """Have the system end ``connection`` when the other end stops replying, with and without data in flight."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)  # which of them exist depends on the system
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _received(connection: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        more = connection.recv(size - len(data))
        if not more:
            raise _StrangerError("it closed the connection")
        data += more
    return data
