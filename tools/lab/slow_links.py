"""Delay the bytes of connections, precise to a tenth of a millisecond: for processes that wait in them some 60 times a
token.

    slow_links.py '[["127.0.0.1", 4000, 0.0003], ...]'

Listens on loopback for each of these and prints the ports. Connections are passed to the address, and bytes are passed
on in order after the delay, each way. ``delayed.py`` needs no process, but has asyncio's clock of a millisecond. Run
with ``python -I -S``: standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from collections import deque

_BYTES = 1 << 17


class Way:
    """One direction of a connection: the bytes under way, oldest first."""

    def __init__(self, sink: socket.socket, delay_s: float) -> None:
        self.sink, self.delay_s = sink, delay_s
        self.held: deque[tuple[float, bytes]] = deque()

    def release(self, now: float) -> None:
        """Pass on what is due; an empty item is the end of the connection."""
        while self.held and self.held[0][0] <= now:
            _, data = self.held.popleft()
            with contextlib.suppress(OSError):
                if data:
                    self.sink.sendall(data)
                else:
                    self.sink.shutdown(socket.SHUT_RDWR)


def _connected(accepted: socket.socket, target: tuple[str, int], delay_s: float) -> dict[socket.socket, Way]:
    there = socket.create_connection(target)
    for end in (accepted, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return {accepted: Way(there, delay_s), there: Way(accepted, delay_s)}


def run(links: list[tuple[str, int, float]]) -> None:
    """Pass on until killed."""
    listening = {socket.create_server(("127.0.0.1", 0)): link for link in links}
    print(json.dumps([each.getsockname()[1] for each in listening]), flush=True)
    ways: dict[socket.socket, Way] = {}
    while True:
        due = min((way.held[0][0] for way in ways.values() if way.held), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for source in select.select([*listening, *ways], [], [], timeout)[0]:
            if source in listening:
                host, port, delay_s = listening[source]
                ways |= _connected(source.accept()[0], (host, port), delay_s)
                continue
            data = b""
            with contextlib.suppress(OSError):
                data = source.recv(_BYTES)
            ways[source].held.append((time.monotonic() + ways[source].delay_s, data))
            if not data:
                ways[source].release(float("inf"))
                del ways[source]
        for way in ways.values():
            way.release(time.monotonic())


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)  # a late relay is a slower network than requested
    run(json.loads(sys.argv[1]))
