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


def bind(socket: zmq.asyncio.Socket, host: str, port: int | None, preferred: int | None = None) -> int:
    """Listen on ``host``: on ``port``, or on ``preferred`` when it is free, or on any; the port.

    Raises ``ClusterError`` when ``port`` is taken.
    """
    if port is None and preferred is not None:
        try:
            return bind(socket, host, preferred)
        except ClusterError:
            return bind(socket, host, 0)
    try:
        socket.bind(endpoint(host, port or "*"))
    except zmq.ZMQError as exc:
        raise ClusterError(f"--port {port}: cannot listen on {host}: {exc.strerror}; choose another --port") from exc
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def endpoint(host: str, port: int | str) -> str:
    """The ZeroMQ endpoint of a TCP port."""
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"
