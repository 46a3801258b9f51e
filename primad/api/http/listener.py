"""Refuses surplus connections as they are accepted.

Clients that reconnect as often as they are refused keep the event loop busy, and a connection that first becomes a
transport and a protocol takes five times as long. A plain health check is answered even then.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any, Final

from primad.api.http.access import machine_of
from primad.api.http.health import MAX_BYTES
from primad.api.http.patience import REFUSAL, Patience

MAX_REFUSED: Final = 256
"""Limit in one turn of the event loop; each refusal takes some 30 us."""


class Listener(socket.socket):
    """Takes over the socket ``listening`` and accepts only connections that ``patience`` has room for."""

    def __init__(self, listening: socket.socket, patience: Patience) -> None:
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self._patience = patience

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection. Raises ``BlockingIOError`` if there is none, or after ``MAX_REFUSED`` refusals."""
        for _ in range(MAX_REFUSED):
            connection, address = super().accept()
            if self._patience.places.has_room(machine_of(address[0])):
                return connection, address
            with connection, suppress(OSError):  # the client may be gone
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
