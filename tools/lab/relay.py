"""Add latency to links where the kernel has no netem: hold Ethernet frames from one interface, then pass them on.

    relay.py '[{"outer": "x0", "inner": "y0", "delay_s": 0.002, "multicast": true}, ...]'

Each lab has one process, in the namespace of its bridge. Every link is a pair of interfaces; frames that arrive at one
leave by the other ``delay_s`` later, in order, broadcast and multicast included. Without ``multicast`` the frames that
mDNS needs are dropped both ways: IPv4 multicast, and mDNS's IPv6 group; other IPv6 groups carry neighbour discovery.

Frames travel with their virtio header (``PACKET_VNET_HDR``): the kernel passes up to 64 KiB of a TCP stream as one
frame, not yet segmented or checksummed; otherwise Python could not keep up with a home network. Measured on two cores:
4.9 Gbit/s for one TCP stream over a link of 4 ms, and 2.3 Gbit/s over two; meanwhile round trips of other links take
at most 3 ms more than requested, otherwise 0.5 ms.

A link holds at most ``MAX_BYTES`` each way and drops the excess, as a router does. It waits with ``select``, whose
timeout is in microseconds; that of ``poll`` is in milliseconds. Run with ``python -I -S``: standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import sys
import time
from collections import deque

MAX_BYTES = 16 << 20
_BATCH = 64
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_SNDBUFFORCE = 32
_SO_RCVBUFFORCE = 33
_ETH_P_ALL = 3
_HEADER_BYTES = 10
_LARGEST_FRAME = _HEADER_BYTES + 14 + 65_536
_IPV4_MULTICAST = bytes.fromhex("01005e")
_IPV6_MDNS = bytes.fromhex("3333000000fb")
_DROPPED = (errno.ENOBUFS, errno.EAGAIN, errno.ENETDOWN, errno.ENXIO, errno.EINVAL, errno.EMSGSIZE)
"""The interface is full or closed, or cannot carry the frame: networks lose such frames."""


class Way:
    """One direction of a link: the frames under way, oldest first."""

    def __init__(self, sink: socket.socket, delay_s: float, multicast: bool) -> None:
        self.sink = sink
        self.delay_s = delay_s
        self.multicast = multicast
        self.held: deque[tuple[float, bytes]] = deque()
        self.held_bytes = 0

    def accept(self, frame: bytes, now: float) -> None:
        """Queue a frame that has just arrived."""
        group = frame[_HEADER_BYTES : _HEADER_BYTES + 6]
        if not self.multicast and (group[:3] == _IPV4_MULTICAST or group == _IPV6_MDNS):
            return
        if self.held_bytes + len(frame) > MAX_BYTES:
            return
        self.held.append((now + self.delay_s, frame))
        self.held_bytes += len(frame)

    def release(self, now: float) -> None:
        """Send the frames that are due."""
        while self.held and self.held[0][0] <= now:
            _, frame = self.held.popleft()
            self.held_bytes -= len(frame)
            try:
                self.sink.send(frame)
            except OSError as exc:
                if exc.errno not in _DROPPED:
                    raise


def port(name: str) -> socket.socket:
    """Return a socket for whole frames that arrive at interface ``name``."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, MAX_BYTES)
    opened.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, MAX_BYTES)
    opened.bind((name, _ETH_P_ALL))
    opened.setblocking(False)
    return opened


def receive(source: socket.socket, way: Way) -> None:
    """Queue the frames that wait at ``source``."""
    for _ in range(_BATCH):
        try:
            frame = source.recv(_LARGEST_FRAME)
        except OSError as exc:
            if exc.errno not in _DROPPED:
                raise
            return
        way.accept(frame, time.monotonic())


def run(links: list[dict[str, object]]) -> None:
    """Relay until killed."""
    ways: dict[socket.socket, Way] = {}
    for link in links:
        outer, inner = port(str(link["outer"])), port(str(link["inner"]))
        delay_s, multicast = float(str(link["delay_s"])), bool(link["multicast"])
        ways[outer] = Way(inner, delay_s, multicast)
        ways[inner] = Way(outer, delay_s, multicast)
    print("ready", flush=True)
    sources, all_ways = list(ways), list(ways.values())
    while True:
        due = min((way.held[0][0] for way in all_ways if way.held), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for source in select.select(sources, [], [], timeout)[0]:
            receive(source, ways[source])
        now = time.monotonic()
        for way in all_ways:
            way.release(now)


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)  # a late relay is an unintentionally slow network
    run(json.loads(sys.argv[1]))
