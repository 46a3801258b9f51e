"""Connections for which there is no room are refused where they are accepted.

A crowd that comes again as often as it is refused keeps the loop busy with connections; one that becomes a transport
and a protocol first takes five times as long. A plain health check is answered even so.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any, Final

from primad.api.http.access import machine_of
from primad.api.http.health import MAX_BYTES
from primad.api.http.patience import REFUSAL, Patience

MAX_REFUSED: Final = 256
"""In one turn of the loop; each takes some 30 us."""


class Listener(socket.socket):
    """``listening``, taken over, with the connections that ``patience`` has room for."""

    def __init__(self, listening: socket.socket, patience: Patience) -> None:
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self._patience = patience

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises ``BlockingIOError`` if there is none, and where many were refused."""
        for _ in range(MAX_REFUSED):
            connection, address = super().accept()
            if self._patience.places.has_room(machine_of(address[0])):
                return connection, address
            with connection, suppress(OSError):  # it is gone
                self._refuse(connection)
        raise BlockingIOError

    def _refuse(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        received = b""
        with suppress(BlockingIOError):
            received = connection.recv(MAX_BYTES)
        checks = self._patience.checks
        check = b"" if checks is None else checks.first_in(received)
        connection.send(REFUSAL if checks is None or not check else checks.reply(check, self._patience.headers)[0])
