"""uvicorn's HTTP with timeouts: by itself it keeps a connection that sends nothing, or a byte at a time, for ever.

So any client could use up all descriptors of the head. Here a connection has some seconds to send a complete request,
from its start and again after each response; and the number of connections in that state is bounded, where the one that
was silent longest is closed first. A client that sends at once notices nothing, however many others are silent. The
time for a body is bounded in ``api/http/connection.py``.

A response that is not read stays in memory. A client that reads nothing for a while is disconnected, and if too much is
unread in total, the slowest one. All connections together are bounded too, and machines share them.

Requests that a client sends before the first is answered are read one by one, and few of their bytes are kept.

Requests are read in small pieces. h11 takes some 10 us for each chunk of a body, and one may have six bytes: the 256
KiB that asyncio reads at once blocked the loop for half a second. Even 8 KiB of such chunks take a turn of 14 ms, and a
health check waits for six. So clients that send many parts are read less at a time; all such clients share, and take
turns (``starts.py``).
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
"""Then connections are closed that were not read in that time: a thousand may be here before the first is read."""
MAX_CONNECTIONS: Final = 2048
"""Half of them for one machine; several times the number that may be silent."""
MAX_UNREAD_BYTES: Final = 256 << 20
MAX_READ_BYTES: Final = 8 << 10
"""For one connection in one turn of the loop."""
FIRST_READ_BYTES: Final = 1 << 10
MIN_READ_BYTES: Final = 64
FEW_PARTS: Final = 8
MAX_PARTS: Final = 64
"""For all connections that send many parts, in one turn of the loop."""
MAX_READS: Final = 32
"""In one turn of the loop; whoever is read after them waits for its turn to be read again."""
BUSY: Final = (
    b'{"error": {"message": "too many connections; close some or try again later", "code": "too_many_connections"}}'
)
REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"retry-after: 5\r\nconnection: close\r\n\r\n%b" % (len(BUSY), BUSY)
)


class Patience:
    """The connections of a server: ``maximum`` of them, of which ``max_silent`` have not sent a request, each for
    ``request_timeout_s``, and ``max_unread_bytes`` of responses wait, each for ``send_timeout_s`` without being
    read. ``checks`` answer plain health checks."""

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
        self._silent: dict[PatientProtocol, asyncio.TimerHandle] = {}  # the one that waits longest first
        self._unread: dict[PatientProtocol, asyncio.TimerHandle] = {}
        self._in_parts: set[PatientProtocol] = set()
        self._making_room: asyncio.TimerHandle | None = None
        self.starts = Starts()
        self._reads = 0
        self._server: ServerState | None = None

    def protocol(self, *arguments: Any, **options: Any) -> PatientProtocol:
        """A new connection of the server; give this to uvicorn as ``http``."""
        made = PatientProtocol(self, *arguments, **options)
        self._server = made.server_state
        return made

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every response."""
        return [] if self._server is None else self._server.default_headers

    def is_silent(self, connection: PatientProtocol) -> None:
        """It may send a request from now on."""
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
        """It has sent a request, or is gone."""
        _stop(self._silent, connection)

    def read_next(self, connection: PatientProtocol, read_bytes: int, parts: int) -> int:
        """How much of it to read next, given the ``parts`` in the last read."""
        if parts <= FEW_PARTS:
            self._in_parts.discard(connection)
            return min(MAX_READ_BYTES, max(2 * read_bytes, FIRST_READ_BYTES))
        self._in_parts.add(connection)
        return max(MIN_READ_BYTES, read_bytes * MAX_PARTS // (parts * len(self._in_parts)))

    def is_crowded(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether many were read before in this turn of the loop; to be asked with each read."""
        if not self._reads:
            loop.call_soon(self._begin_turn)
        self._reads += 1
        return self._reads > MAX_READS

    def _begin_turn(self) -> None:
        self._reads = 0

    def is_unread(self, connection: PatientProtocol) -> None:
        """It has more of a response to read than the system buffers."""
        self._look_again(connection)
        while len(self._unread) > 1 and sum(each.unread_bytes for each in self._unread) > self._max_unread_bytes:
            next(iter(self._unread)).give_up()

    def is_read(self, connection: PatientProtocol) -> None:
        """It has read it, or is gone."""
        _stop(self._unread, connection)

    def is_gone(self, connection: PatientProtocol) -> None:
        """It sends nothing any more."""
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
    """Reads nothing more of a client that waits for its turn, or sent ahead more than is read at once."""

    def __init__(self, transport: asyncio.Transport, is_held: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._is_held = is_held

    def resume_reading(self) -> None:
        """As far as it is wanted."""
        if not self._is_held():
            super().resume_reading()

    def let_go(self) -> None:
        """Of the connection, which is gone."""
        self._is_held = bool


class PatientProtocol(H11Protocol, asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, patience: Patience, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = self._strict = StrictConnection()
        self._patience = patience
        self._read = memoryview(bytearray(MAX_READ_BYTES))
        self._read_bytes = FIRST_READ_BYTES
        """The size of its next read."""
        self._machine = ""
        self._has_place = False

    @property
    def unread_bytes(self) -> int:
        """Written bytes that the system has not taken."""
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
        """The buffer for the next data of the client."""
        return self._read[: self._read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """The client sent this many bytes."""
        before = self._strict.events
        self.data_received(bytes(self._read[:nbytes]))
        parts = self._strict.events - before
        self._read_bytes = self._patience.read_next(self, nbytes, parts)
        if self._patience.is_crowded(self.loop) or parts > FEW_PARTS:
            self._wait_for_turn()

    def handle_events(self) -> None:
        """The client sent data, perhaps a whole request, which begins in its turn."""
        if self._is_responding():
            super().handle_events()
            return
        self._wait_for_turn()

    def _wait_for_turn(self, *, has_replied: bool = False) -> None:
        check = self._check()
        is_check = bool(check) and len(check) == len(self._strict.trailing_data[0])  # of those sent ahead one waits
        self._patience.starts.ready(
            self, self._machine, is_new=not has_replied and self.cycle is None, is_check=is_check
        )
        if self in self._patience.starts:
            self.flow.pause_reading()

    def _is_held(self) -> bool:
        return self in self._patience.starts or self._strict.ahead_bytes > MAX_READ_BYTES

    def begin(self) -> None:
        """It is this connection's turn."""
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
        """The plain health check that is next; empty if something else is."""
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
        """The response was written; the next request may have come with the last."""
        super().on_response_complete()
        self.flow.resume_reading()  # the rest of a request that was sent ahead
        if not self._is_responding() and not self.flow.write_paused and self not in self._patience.starts:
            self._patience.is_silent(self)

    def pause_writing(self) -> None:
        """More is written than the client reads."""
        super().pause_writing()
        self._patience.is_unread(self)

    def resume_writing(self) -> None:
        """It has read most of that."""
        super().resume_writing()
        self._patience.is_read(self)
        if not self._is_responding():
            self._patience.is_silent(self)

    def send_400_response(self, msg: str) -> None:
        """The data is not HTTP: send the error, unless a response is in progress."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(f"{msg} {self._strict.wrong[:200]}".encode("ascii", "replace").decode())
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        if self._has_place:
            self._patience.places.give_back(self._machine)
            self._has_place = False
        super().connection_lost(exc)
        self._patience.is_read(self)
        self._patience.has_asked(self)
        self._patience.is_gone(self)
        # A thousand at once that leave themselves to the collector make it stand for 200 ms.
        self.cycle = None  # type: ignore[assignment]
        self.flow.let_go()  # type: ignore[attr-defined]
        self._unset_keepalive_if_required()
        self.transport.close()
        vars(self.transport).pop("_read_ready_cb", None)  # asyncio's method of the transport, which has it

    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def give_up(self) -> None:
        """It did not send or read in time, or another needs its place."""
        self._patience.has_asked(self)
        self._patience.is_read(self)
        self.transport.abort()
