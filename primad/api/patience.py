"""uvicorn's HTTP with an end to patience: it keeps a connection that asks nothing, or a byte at a time, for ever.

Whoever can reach the port could so take all descriptors of the head. Here a connection has ``REQUEST_S`` to ask something
whole, from its beginning and again after each answer; and ``MOST_SILENT`` connections may be in that time, of which the one
that was silent longest makes room. A client that asks at once notices nothing, however many others are silent. How long a
body may take is the business of ``api/connection.py``.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S: Final = 10.0
MOST_SILENT: Final = 512


class PatientProtocol(H11Protocol):
    """One connection; give the class to uvicorn as ``http``. The limits are those of the process."""

    _silent: ClassVar[dict[PatientProtocol, asyncio.TimerHandle]] = {}
    """Those that have not asked yet, the one that waits longest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here."""
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """The client said something, perhaps a whole request."""
        super().data_received(data)
        if self._is_answering():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """The answer was sent; the next request may have come with the last."""
        super().on_response_complete()
        if not self._is_answering() and not self.transport.is_closing():
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_request(self) -> None:
        self._stop_waiting()
        while len(self._silent) >= MOST_SILENT:
            next(iter(self._silent))._give_up()
        self._silent[self] = self.loop.call_later(REQUEST_S, self._give_up)

    def _stop_waiting(self) -> None:
        timer = self._silent.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self) -> None:
        self._stop_waiting()
        self.transport.abort()
