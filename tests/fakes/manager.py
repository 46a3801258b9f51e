"""A service manager's ear: the socket at which daemons say that they are ready, live and end."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 180


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A socket in a short path, since addresses of this kind have at most 108 characters."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(Path(folder, "notify")))
        ear.settimeout(PATIENCE_S)
        yield ear


def hear(ear: socket.socket, start: str) -> str:
    """The first message that begins so; those before it are forgotten."""
    while not (printed := ear.recv(1000).decode()).startswith(start):
        pass
    return printed
