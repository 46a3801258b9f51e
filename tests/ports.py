"""Ports that nobody listens on yet, for programs that are given one."""

from __future__ import annotations

import socket
import sys
from typing import Final

from primad.settings.config import LOOPBACK

_held: Final[list[socket.socket]] = []


def free_port() -> int:
    """Return a free port of this device. On Linux a socket that does not listen keeps it until the tests end: the system
    gives it to no other program, and the one that names it can listen there all the same."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((LOOPBACK, 0))
    port = int(held.getsockname()[1])
    if sys.platform == "linux":
        _held.append(held)
    else:
        held.close()
    return port
