"""uvicorn's HTTP protocol with timeouts. uvicorn itself keeps a connection that sends nothing, or one byte at a time,
for ever.

Any client could then use up all file descriptors of the head. Here a connection has some seconds to send a complete
request, from its start and again after each response. The number of connections in that state is bounded, and the one
that was silent longest is closed first. A client that sends immediately notices nothing, however many others are
silent. ``api/http/connection.py`` bounds the time for a body.

A response that is not read stays in memory. A client that reads nothing for a while is disconnected; if too much is
unread in total, the slowest client is. All connections together are bounded too, and machines share them.

Requests that a client sends before its first one is answered are read one by one, and few of their bytes are kept.

Requests are read in small pieces. h11 takes some 10 us for each chunk of a body, and a chunk may have six bytes: the
256 KiB that asyncio reads at a time blocked the loop for half a second. Even 8 KiB of such chunks take a turn of 14 ms,
and a health check waits for six turns. So less is read at a time from clients that send many parts. All such clients
share a limit and take turns (``starts.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from primad.api.http.access import machine_of
from primad.api.http.health import HealthChecks
from primad.api.http.starts import Starts
from primad.api.http.strict import StrictConnection
from primad.system.shares import Shares

MAX_SILENT: Final = 512
MAKE_ROOM_S: Final = 1.0
"""After this time, connections beyond the limit that sent nothing are closed: a thousand may connect before the first
is read."""
MAX_CONNECTIONS: Final = 2048
"""One machine may have half of them; several times the number that may be silent."""
MAX_UNREAD_BYTES: Final = 256 << 20
MAX_READ_BYTES: Final = 8 << 10
"""Limit for one connection in one turn of the loop."""
FIRST_READ_BYTES: Final = 1 << 10
MIN_READ_BYTES: Final = 64
FEW_PARTS: Final = 8
MAX_PARTS: Final = 64
"""Limit for all connections that send many parts, in one turn of the loop."""
MAX_READS: Final = 32
"""Limit in one turn of the loop; connections read after that wait for their turn to be read again."""
BUSY: Final = (
    b'{"error": {"message": "too many connections; close some or try again later", "code": "too_many_connections"}}'
)
REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"retry-after: 5\r\nconnection: close\r\n\r\n%b" % (len(BUSY), BUSY)
)


class Patience:
    """The connections of a server, at most ``maximum``.

    At most ``max_silent`` of them have not sent a request, each for at most ``request_timeout_s``. At most
    ``max_unread_bytes`` of responses wait to be read, each for at most ``send_timeout_s`` without progress. ``checks``
    answer plain health checks.
    """

    def __init__(
        self,
        request_timeout_s: float,
        send_timeout_s: float,
        *,
        max_silent: int = MAX_SILENT,
        maximum: int = MAX_CONNECTIONS,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        checks: HealthChecks | None = None,
    ) -> None:
        self._request_timeout_s, self._send_timeout_s = request_timeout_s, send_timeout_s
        self._max_silent, self._max_unread_bytes = max_silent, max_unread_bytes
        self.places, self.checks = Shares(maximum), checks
        self._silent: dict[PatientProtocol, asyncio.TimerHandle] = {}  # the longest silent first
        self._unread: dict[PatientProtocol, asyncio.TimerHandle] = {}
        self._in_parts: set[PatientProtocol] = set()
        self._making_room: asyncio.TimerHandle | None = None
        self.starts = Starts()
        self._reads = 0
        self._server: ServerState | None = None

    def protocol(self, *arguments: Any, **options: Any) -> PatientProtocol:
        """Create a new connection of the server; give this method to uvicorn as ``http``."""
        made = PatientProtocol(self, *arguments, **options)
        self._server = made.server_state
        return made

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every response."""
        return [] if self._server is None else self._server.default_headers

    def is_silent(self, connection: PatientProtocol) -> None:
        """Note that ``connection`` may send a request from now on."""
        self.has_asked(connection)
        self._silent[connection] = connection.loop.call_later(self._request_timeout_s, connection.give_up)
        if len(self._silent) > self._max_silent and self._making_room is None:
            self._making_room = connection.loop.call_later(MAKE_ROOM_S, self._make_room)

    def _make_room(self) -> None:
        self._making_room = None
        silent = [each for each in self._silent if each not in self.starts]
        for connection in silent[: len(self._silent) - self._max_silent]:
            connection.give_up()

    def has_asked(self, connection: PatientProtocol) -> None:
        """Note that ``connection`` has sent a request, or is gone."""
        _stop(self._silent, connection)

    def read_next(self, connection: PatientProtocol, read_bytes: int, parts: int) -> int:
        """Return how many bytes of ``connection`` to read next, given the number of ``parts`` in its last read."""
        if parts <= FEW_PARTS:
            self._in_parts.discard(connection)
            return min(MAX_READ_BYTES, max(2 * read_bytes, FIRST_READ_BYTES))
        self._in_parts.add(connection)
        return max(MIN_READ_BYTES, read_bytes * MAX_PARTS // (parts * len(self._in_parts)))

    def is_crowded(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this turn of the loop has already had more than ``MAX_READS`` reads; call it once for each read."""
        if not self._reads:
            loop.call_soon(self._begin_turn)
        self._reads += 1
        return self._reads > MAX_READS

    def _begin_turn(self) -> None:
        self._reads = 0

    def is_unread(self, connection: PatientProtocol) -> None:
        """Note that ``connection`` has more of a response to read than the system buffers."""
        self._look_again(connection)
        while len(self._unread) > 1 and sum(each.unread_bytes for each in self._unread) > self._max_unread_bytes:
            next(iter(self._unread)).give_up()

    def is_read(self, connection: PatientProtocol) -> None:
        """Note that ``connection`` has read its response, or is gone."""
        _stop(self._unread, connection)

    def is_gone(self, connection: PatientProtocol) -> None:
        """Note that ``connection`` sends nothing any more."""
        self._in_parts.discard(connection)
        self.starts.forget(connection)

    def _look_again(self, connection: PatientProtocol, before_bytes: int | None = None) -> None:
        unread_bytes = connection.unread_bytes
        if before_bytes is not None and unread_bytes >= before_bytes:
            connection.give_up()
            return
        timer = connection.loop.call_later(self._send_timeout_s, self._look_again, connection, unread_bytes)
        self._unread[connection] = timer


def _stop(timers: dict[PatientProtocol, asyncio.TimerHandle], connection: PatientProtocol) -> None:
    timer = timers.pop(connection, None)
    if timer is not None:
        timer.cancel()


class _Flow(FlowControl):
    """Pauses reading from a client that waits for its turn, or that sent ahead more than one read takes."""

    def __init__(self, transport: asyncio.Transport, is_held: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._is_held = is_held

    def resume_reading(self) -> None:
        """Resume unless the connection is held."""
        if not self._is_held():
            super().resume_reading()

    def let_go(self) -> None:
        """Release the connection, which is gone."""
        self._is_held = bool


class PatientProtocol(H11Protocol, asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, patience: Patience, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = self._strict = StrictConnection()
        self._patience = patience
        self._read = memoryview(bytearray(MAX_READ_BYTES))
        self._read_bytes = FIRST_READ_BYTES
        """The size of the next read."""
        self._machine = ""
        self._has_place = False

    @property
    def unread_bytes(self) -> int:
        """Bytes written that the operating system has not taken."""
        return int(self.transport.get_write_buffer_size())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self._is_held)
        self._machine = machine_of(self.client[0] if self.client else "")
        self._patience.is_silent(self)
        if self._patience.places.has_room(self._machine):
            self._patience.places.take(self._machine)
            self._has_place = True
        else:
            transport.write(REFUSAL)
            transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the client's next data."""
        return self._read[: self._read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle ``nbytes`` sent by the client."""
        before = self._strict.events
        self.data_received(bytes(self._read[:nbytes]))
        parts = self._strict.events - before
        self._read_bytes = self._patience.read_next(self, nbytes, parts)
        if self._patience.is_crowded(self.loop) or parts > FEW_PARTS:
            self._wait_for_turn()

    def handle_events(self) -> None:
        """Handle data from the client, perhaps a whole request, which begins in its turn."""
        if self._is_responding():
            super().handle_events()
            return
        self._wait_for_turn()

    def _wait_for_turn(self, *, has_replied: bool = False) -> None:
        check = self._check()
        is_check = bool(check) and len(check) == len(self._strict.trailing_data[0])  # several make a request
        self._patience.starts.ready(
            self, self._machine, is_new=not has_replied and self.cycle is None, is_check=is_check
        )
        if self in self._patience.starts:
            self.flow.pause_reading()

    def _is_held(self) -> bool:
        return self in self._patience.starts or self._strict.ahead_bytes > MAX_READ_BYTES

    def begin(self) -> None:
        """Begin the request: it is this connection's turn."""
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if check := self._check():
            self._reply(check)
            return
        super().handle_events()
        if self._is_responding():
            self._patience.has_asked(self)

    def _check(self) -> bytes:
        """Return the plain health check that is next; empty if something else is next."""
        checks = self._patience.checks
        if checks is None or self._strict.their_state is not h11.IDLE or self.flow.write_paused:
            return b""
        return checks.first_in(self._strict.trailing_data[0])

    def _reply(self, check: bytes) -> None:
        assert self._patience.checks is not None
        text, closes = self._patience.checks.reply(check, self._patience.headers)
        self._strict.skip(len(check))
        self.transport.write(text)
        self.server_state.total_requests += 1
        if closes:
            self.transport.close()
        elif self._strict.trailing_data[0]:
            self._wait_for_turn(has_replied=True)
        else:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            self._patience.is_silent(self)

    def on_response_complete(self) -> None:
        """Prepare for the next request, which may have come with the last one."""
        super().on_response_complete()
        self.flow.resume_reading()  # the rest of a request that was sent ahead
        if not self._is_responding() and not self.flow.write_paused and self not in self._patience.starts:
            self._patience.is_silent(self)

    def pause_writing(self) -> None:
        """Note that more is written than the client reads."""
        super().pause_writing()
        self._patience.is_unread(self)

    def resume_writing(self) -> None:
        """Note that the client has read most of it."""
        super().resume_writing()
        self._patience.is_read(self)
        if not self._is_responding():
            self._patience.is_silent(self)

    def send_400_response(self, msg: str) -> None:
        """Send the error for data that is not HTTP, unless a response is in progress."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(f"{msg} {self._strict.wrong[:200]}".encode("ascii", "replace").decode())
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up: the client is gone."""
        if self._has_place:
            self._patience.places.give_back(self._machine)
            self._has_place = False
        super().connection_lost(exc)
        self._patience.is_read(self)
        self._patience.has_asked(self)
        self._patience.is_gone(self)
        # Freed at once: a thousand connections left to the garbage collector stop the loop for 200 ms.
        self.cycle = None  # type: ignore[assignment]
        self.flow.let_go()  # type: ignore[attr-defined]
        self._unset_keepalive_if_required()
        self.transport.close()
        vars(self.transport).pop("_read_ready_cb", None)  # asyncio keeps this bound method: a reference cycle

    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def give_up(self) -> None:
        """Close the connection: it did not send or read in time, or another one needs its place."""
        self._patience.has_asked(self)
        self._patience.is_read(self)
        self.transport.abort()
