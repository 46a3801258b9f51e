"""ZeroMQ sockets between devices: encrypted, authenticated both ways, with common limits.

Each is one end of a CurveZMQ connection. A client names the public key of one device and can connect to no other. A
server learns from the gate of its context (``gate.py``) which clients to admit. A server whose context has no gate
admits no client: without an enforced domain libzmq would admit everybody.

Routing ids are assigned by the ROUTER, new for each connection, so handover is not needed and stays off: a peer that
asks for the id of another connected peer is ignored.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Final

import zmq
import zmq.asyncio

from primad.errors import ClusterError
from primad.network.messages import MAX_MESSAGE_BYTES
from primad.trust.identity import Identity

HIGH_WATER: Final = 256
HANDSHAKE_S: Final = 3.0
"""A connection that has not proven its key by then is closed."""
BACKLOG: Final = 512
"""The backlog of connections; the system may limit it further."""
RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 1000
ZAP_DOMAIN: Final = b"primad"
MAX_DESCRIPTORS: Final = 65_536
"""Limit of descriptors: enough for three seconds of a flood of silent connections."""
_MONITORS: Final = count()
_KEEPALIVE_S: Final = ((zmq.TCP_KEEPALIVE_IDLE, 30), (zmq.TCP_KEEPALIVE_INTVL, 10), (zmq.TCP_KEEPALIVE_CNT, 3))


def open_socket(
    context: zmq.asyncio.Context, kind: int, *, identity: Identity, server: str | None
) -> zmq.asyncio.Socket:
    """Return a socket of ``kind``: a client of the device whose public key is ``server``, or with None a server.

    It does not linger, accepts IPv6, bounds its queues, refuses oversized messages, and drops connections that are half
    open or do not finish their handshake.
    """
    socket = context.socket(kind)
    bound_socket(socket, MAX_MESSAGE_BYTES)
    socket.curve_publickey = identity.public.encode()
    socket.curve_secretkey = identity.secret.encode()
    if server is None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    else:
        socket.curve_serverkey = server.encode()
    return socket


def bound_socket(socket: zmq.asyncio.Socket, max_bytes: int, high_water: int = HIGH_WATER) -> None:
    """Set our common limits on ``socket``, with messages of ``max_bytes`` and queues of ``high_water`` messages."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.setsockopt(zmq.RCVHWM, high_water)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE_S:
        socket.setsockopt(option, seconds)


def listen(
    context: zmq.asyncio.Context,
    kind: int,
    host: str,
    port: int | None,
    preferred: int | None = None,
    *,
    identity: Identity,
    max_bytes: int = MAX_MESSAGE_BYTES,
    high_water: int = HIGH_WATER,
    unsent: int | None = None,
) -> tuple[zmq.asyncio.Socket, int]:
    """Return a server that listens on ``host``, and its port: ``port``, or ``preferred`` if that is free, or any.

    Its messages have at most ``max_bytes`` and its queues ``high_water`` messages; if given, ``unsent`` limits those
    that wait to be sent (0: any number). Raises ``ClusterError`` if ``port`` is taken.
    """
    socket = open_socket(context, kind, identity=identity, server=None)
    bound_socket(socket, max_bytes, high_water)
    if unsent is not None:
        socket.setsockopt(zmq.SNDHWM, unsent)
    try:
        if port is not None or preferred is None:
            return socket, bind(socket, host, port)
        try:
            return socket, bind(socket, host, preferred)
        except ClusterError:
            return socket, bind(socket, host, None)
    except ClusterError:
        socket.close()
        raise


def bind(socket: zmq.asyncio.Socket, host: str, port: int | None) -> int:
    """Listen on ``port`` of ``host``, on any port with None, and return the port. Raises ``ClusterError``."""
    try:
        socket.bind(endpoint(host, port or "*"))
    except zmq.ZMQError as exc:
        flag = "--port" if port else "--host"
        raise ClusterError(
            f"{flag} {port or host}: cannot listen on {host}: {exc.strerror}; choose another {flag}"
        ) from exc
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def monitored(socket: zmq.asyncio.Socket, events: int) -> zmq.asyncio.Socket:
    """Return a socket that receives ``events`` of ``socket``, which has no other monitor.

    Each monitor has its own address: libzmq releases the address of an earlier one some time after it was closed.
    """
    return socket.get_monitor_socket(events, f"inproc://monitor-{next(_MONITORS)}")


def refusals(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    """Return a monitor that receives a message if the server of ``socket`` refuses its key.

    It must be there before ``socket`` connects: libzmq reports a refusal once, and does not retry.
    """
    return monitored(socket, zmq.EVENT_HANDSHAKE_FAILED_AUTH)


def unwatch(socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
    """Close the ``monitor`` of ``socket``, which may then have another."""
    if not socket.closed:
        socket.disable_monitor()
    monitor.close(linger=0)


def endpoint(host: str, port: int | str) -> str:
    """The ZeroMQ endpoint of a TCP port."""
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"


def port_of(endpoint: str) -> int:
    """The TCP port of a ZeroMQ endpoint; 0 for none."""
    return int(endpoint.rsplit(":", 1)[1]) if endpoint else 0


def raise_descriptor_limit() -> int | None:
    """Let this process open as many files as its user may, at most ``MAX_DESCRIPTORS``; return the limit.

    Each connection takes a descriptor, also a stranger's until its handshake times out. None if the system has no such
    limit (Windows).
    """
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):  # macOS: the kernel's own limit may be below the hard limit
        return soft
    return wanted
