"""ZeroMQ sockets of the control and transfer links, with the limits that every one of them has."""

from __future__ import annotations

from typing import Final

import zmq
import zmq.asyncio

from primad.cluster.messages import MAX_MESSAGE_BYTES
from primad.errors import ClusterError

HIGH_WATER: Final = 256


def open_socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    """A socket of ``kind`` that lingers for nothing, takes IPv6, bounds its queues and refuses oversized messages."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return socket


def listen(
    context: zmq.asyncio.Context, kind: int, host: str, port: int | None, preferred: int | None = None
) -> tuple[zmq.asyncio.Socket, int]:
    """A socket that listens on ``host``: on ``port``, or on ``preferred`` when it is free, or on any; and its port.

    Raises ``ClusterError`` when ``port`` is taken.
    """
    socket = open_socket(context, kind)
    try:
        if port is not None or preferred is None:
            return socket, _bind(socket, host, port)
        try:
            return socket, _bind(socket, host, preferred)
        except ClusterError:
            return socket, _bind(socket, host, None)
    except ClusterError:
        socket.close()
        raise


def _bind(socket: zmq.asyncio.Socket, host: str, port: int | None) -> int:
    try:
        socket.bind(endpoint(host, port or "*"))
    except zmq.ZMQError as exc:
        flag = "--port" if port else "--host"
        raise ClusterError(
            f"{flag} {port or host}: cannot listen on {host}: {exc.strerror}; choose another {flag}"
        ) from exc
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def endpoint(host: str, port: int | str) -> str:
    """The ZeroMQ endpoint of a TCP port."""
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"
