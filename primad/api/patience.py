"""uvicorn's HTTP with an end to patience: it keeps a connection that asks nothing, or a byte at a time, for ever.

Whoever can reach the port could so take all descriptors of the head. Here a connection has some seconds to ask something
whole, from its beginning and again after each answer; and so many connections may be in that time, of which the one that was
silent longest makes room. A client that asks at once notices nothing, however many others are silent. How long a body may
take is the business of ``api/connection.py``.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_SILENT: Final = 512


class Silent:
    """The connections of a server that have not asked yet, ``most`` of them, each for ``timeout_s``."""

    def __init__(self, timeout_s: float, most: int = MOST_SILENT) -> None:
        self._timeout_s, self._most = timeout_s, most
        self._timers: dict[PatientProtocol, asyncio.TimerHandle] = {}  # the one that waits longest first

    def protocol(self, *arguments: Any, **options: Any) -> PatientProtocol:
        """A new connection of the server; give this to uvicorn as ``http``."""
        return PatientProtocol(self, *arguments, **options)

    def add(self, connection: PatientProtocol) -> None:
        """It may ask from now on."""
        self.remove(connection)
        while len(self._timers) >= self._most:
            next(iter(self._timers)).give_up()
        self._timers[connection] = connection.loop.call_later(self._timeout_s, connection.give_up)

    def remove(self, connection: PatientProtocol) -> None:
        """It has asked, or is gone."""
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()


class PatientProtocol(H11Protocol):
    """One connection."""

    def __init__(self, silent: Silent, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._silent = silent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here."""
        super().connection_made(transport)
        self._silent.add(self)

    def data_received(self, data: bytes) -> None:
        """The client said something, perhaps a whole request."""
        super().data_received(data)
        if self._is_answering():
            self._silent.remove(self)

    def on_response_complete(self) -> None:
        """The answer was sent; the next request may have come with the last."""
        super().on_response_complete()
        if not self._is_answering() and not self.transport.is_closing():
            self._silent.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._silent.remove(self)
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def give_up(self) -> None:
        """It did not ask in time, or others are to have its place."""
        self._silent.remove(self)
        self.transport.abort()
