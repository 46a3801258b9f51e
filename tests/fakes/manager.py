"""The service manager's end of the socket on which daemons report that they are ready, alive and stopping."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 180


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A socket in a short path, since Unix socket paths have at most 108 characters."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(Path(folder, "notify")))
        ear.settimeout(PATIENCE_S)
        yield ear


def hear(ear: socket.socket, start: str) -> str:
    """The first message that begins with ``start``; earlier ones are dropped."""
    while not (printed := ear.recv(1000).decode()).startswith(start):
        pass
    return printed
