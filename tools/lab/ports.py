"""Ports of this machine for the servers of benchmarks."""

from __future__ import annotations

import socket


def free_port(wanted: int = 0) -> int:
    """A port of 127.0.0.1 that nobody listens on now: the one that is ``wanted`` if it is free."""
    try:
        free = socket.create_server(("127.0.0.1", wanted))
    except OSError:
        free = socket.create_server(("127.0.0.1", 0))
    with free:
        return int(free.getsockname()[1])
