"""The ring as events in time: what is computed, read and sent when. ``simulate.py`` makes its input and reads its output.

A ``Visit`` is what a device computes between receiving a hidden state and sending one: a window, or windows that follow each
other on it, the tail and the next token's first window among them. Every device serves stops in the order of their
arrival. In a ring nothing overtakes: steps enter in the order of their sequences and keep it, so each device serves all
sequences at its first stop, then all at its second, and so on. That makes the order of use known from the start, and
loaders read ahead in it without a draft. (A device must therefore always send to the same next one.)
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Final, Literal

Kind = Literal["compute", "stall", "load", "hop"]
_NOTHING_S: Final = 1e-9
"""What computing is slowed by less is not followed further."""
_MIN_SHARE: Final = 1e-9
"""Less of what may be read ahead is no room: sums of parts are not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What ``device`` does from ``start_s`` to ``end_s``, and with which layers (none for a hop)."""

    device: str
    kind: Kind
    start_s: float
    end_s: float
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers that are computed without a break in ``seconds``; one of which a part streams is alone. ``ends`` the step.

    ``read_ahead_bytes`` of it are read ahead; ``picked_bytes`` are read of a layer that streams by expert, not before
    the step has come to it.
    """

    layers: tuple[int, ...]
    seconds: float
    read_ahead_bytes: float
    ends: bool
    picked_bytes: float


@dataclass(frozen=True, slots=True)
class Visit:
    """What node ``station`` computes at once. A step enters the ring at piece ``entry`` of the first stop."""

    station: int
    pieces: tuple[Segment, ...]
    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixture:
    """What a node has: its machine's number, the bytes that it may hold ahead, its disk and its outgoing link.

    Each second of reading makes what the machine computes meanwhile ``slowed_share`` of a second longer.
    """

    device: str
    host: int
    read_ahead_bytes: float
    disk_bytes_per_s: float
    slowed_share: float
    in_air: bool
    transfer_s: float
    delay_s: float
    """From the end of the transfer to the arrival."""


@dataclass(slots=True)
class Tally:
    """Sums of one station since the beginning, in seconds, layers and bytes."""

    compute_s: float = 0.0
    stall_s: float = 0.0
    disk_s: float = 0.0
    link_s: float = 0.0
    hop_s: float = 0.0
    layers: int = 0
    disk_bytes: float = 0.0


@dataclass(slots=True)
class _Host:
    """One machine: processes and disk of its devices wait for each other, first come, first served."""

    computing: bool = False
    reading: bool = False
    read_s: float = 0.0
    """What its disk has read until now, or until the present reading began."""
    reading_since: float = 0.0
    to_compute: deque[_Ground] = field(default_factory=deque)
    to_read: deque[Callable[[], None]] = field(default_factory=deque)

    def has_read_s(self, now: float) -> float:
        """Seconds that its disk has read until ``now``."""
        return self.read_s + (now - self.reading_since if self.reading else 0.0)


@dataclass(slots=True)
class _Ground:
    """One device at work. ``visit`` is (sequence, stop) that it computes; ``at`` the piece of that stop."""

    fixture: Fixture
    host: _Host
    reads: Iterator[tuple[int, float]]
    """Layers with their bytes in the order of use."""
    free_bytes: float
    tally: Tally = field(default_factory=Tally)
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    visit: tuple[int, int] | None = None
    at: int = 0
    compute_since: float | None = None
    read_before_s: float = 0.0
    """What the disk of its machine had read when it was last looked at how far reading slows what is computed."""
    stall_since: float | None = None
    picked_since: float | None = None
    """When the reading of what the router picked began, as long as it lasts."""
    wanted: tuple[int, float] | None = None
    """The layer that is read next or now, and what is missing of it."""
    read: deque[int] = field(default_factory=deque)
    """Layers in memory, in the order of use."""
    reading_bytes: float = 0.0
    read_since: float | None = None
    link_free_s: float = 0.0
    arrival_s: float = 0.0
    """Of the last message that was sent."""
    coming: deque[tuple[int, int]] = field(default_factory=deque)
    """Visits on the link to this node."""


class SimulatedRing:
    """Steps of ``sequences`` on their way over ``stops``, again and again if ``cyclic``, else once.

    ``jitter`` is the share of every hop's delay that is random: exponentially distributed, the mean kept. Links keep the
    order. ``filled``: all that may be read ahead is in memory at the start. ``through(sequence)`` is called whenever a step
    is through.
    """

    def __init__(
        self,
        stops: Sequence[Visit],
        fixtures: Sequence[Fixture],
        *,
        sequences: int,
        cyclic: bool,
        filled: bool,
        jitter: float,
        seed: int,
        through: Callable[[int], None],
    ) -> None:
        assert 0 <= jitter <= 1
        assert sequences >= 1
        self.now = 0.0
        self.trace: list[Interval] | None = None
        self._stops: Final = stops
        self._cyclic: Final = cyclic
        self._jitter: Final = jitter
        self._random: Final = random.Random(seed)
        self._through: Final = through
        self._events: list[tuple[float, int, Callable[[_Ground], None], _Ground]] = []
        self._count = 0
        self._air_free_s = 0.0
        hosts = {fixture.host: _Host() for fixture in fixtures}
        self._stations = [
            _Ground(
                fixture=fixture,
                host=hosts[fixture.host],
                reads=_order_of_use([stop for stop in stops if stop.station == i], sequences, cyclic=cyclic),
                free_bytes=fixture.read_ahead_bytes,
            )
            for i, fixture in enumerate(fixtures)
        ]
        if filled:
            for station in self._stations:
                self._fill(station)
        self._stations[stops[0].station].queue.extend((sequence, 0) for sequence in range(sequences))
        self._entering = sequences

    @property
    def tallies(self) -> list[Tally]:
        """What every node has done until now."""
        return [replace(station.tally) for station in self._stations]

    def run(self, more: Callable[[], bool]) -> None:
        """Let events happen as long as there are any and ``more()`` says so."""
        for station in self._stations:
            self._read(station)
        self._begin(self._stations[self._stops[0].station])
        while self._events and more():
            self.now, _, happen, station = heappop(self._events)
            happen(station)

    def unfinished(self) -> list[Interval]:
        """What goes on right now, as if it ended now."""
        found = []
        for station in self._stations:
            if station.read_since is not None and station.wanted is not None:
                found.append(self._interval(station, "load", station.read_since, self.now, (station.wanted[0],)))
            if station.picked_since is not None:
                layers = self._piece(station).layers
                found.append(self._interval(station, "load", station.picked_since, self.now, layers))
            if station.compute_since is not None:
                layers = self._piece(station).layers
                found.append(self._interval(station, "compute", station.compute_since, self.now, layers))
            if station.stall_since is not None:
                layers = self._piece(station).layers
                found.append(self._interval(station, "stall", station.stall_since, self.now, layers))
        return found

    def _fill(self, station: _Ground) -> None:
        """As much as may be read ahead is there from the start."""
        while self._take_room(station):
            self._have(station)

    def _at(self, time_s: float, happen: Callable[[_Ground], None], station: _Ground) -> None:
        self._count += 1
        heappush(self._events, (time_s, self._count, happen, station))

    def _piece(self, station: _Ground) -> Segment:
        assert station.visit is not None
        return self._stops[station.visit[1]].pieces[station.at]

    # ---- compute ---------------------------------------------------------------------------------------------------

    def _begin(self, station: _Ground) -> None:
        """Turn to the next visit that has arrived, if any."""
        station.visit, station.at = None, 0
        if station.queue:
            station.visit = station.queue.popleft()
            if self._entering and station.visit[1] == 0:
                # The steps that enter are the first that are served at the first stop.
                self._entering -= 1
                station.at = self._stops[0].entry
            self._go_on(station)

    def _go_on(self, station: _Ground) -> None:
        """Compute the next piece, or wait for its layer."""
        if self._piece(station).picked_bytes:
            station.stall_since = self.now
            self._occupy_disk(station, lambda: self._read_picked(station))
        elif self._piece(station).read_ahead_bytes and not station.read:
            station.stall_since = self.now
        else:
            self._compute_in_turn(station)

    def _compute_in_turn(self, station: _Ground) -> None:
        if station.host.computing:
            station.host.to_compute.append(station)
        else:
            self._compute(station)

    def _compute(self, station: _Ground) -> None:
        station.host.computing = True
        station.compute_since = self.now
        station.read_before_s = station.host.has_read_s(self.now)
        self._at(self.now + self._piece(station).seconds, self._computed, station)

    def _computed(self, station: _Ground) -> None:
        piece, tally, since = self._piece(station), station.tally, station.compute_since
        assert since is not None
        assert station.visit is not None
        read_s = station.host.has_read_s(self.now)
        slowed_s = (read_s - station.read_before_s) * station.fixture.slowed_share
        if slowed_s > _NOTHING_S:
            station.read_before_s = read_s
            self._at(self.now + slowed_s, self._computed, station)
            return
        tally.compute_s += self.now - since
        tally.layers += len(piece.layers)
        self._note(station, "compute", since, self.now, piece.layers)
        station.compute_since = None
        station.host.computing = False
        if station.host.to_compute:
            self._compute(station.host.to_compute.popleft())
        if piece.read_ahead_bytes:
            assert station.read.popleft() == piece.layers[0], "layers are read in the order of use"
            station.free_bytes += piece.read_ahead_bytes
            self._read(station)
        sequence, stop = station.visit
        station.at += 1
        if piece.ends:
            self._through(sequence)
        if station.at < len(self._stops[stop].pieces):
            self._go_on(station)
        else:
            self._send(station, sequence, stop + 1)
            self._begin(station)

    # ---- disk ------------------------------------------------------------------------------------------------------

    def _read(self, station: _Ground) -> None:
        """Have what is next in the order of use read, as far as there is room."""
        if station.reading_bytes or not self._take_room(station):
            return
        self._occupy_disk(station, lambda: self._start_read(station))

    def _occupy_disk(self, station: _Ground, read: Callable[[], None]) -> None:
        """Begin to ``read`` as soon as the disk has served who came before."""
        if station.host.reading:
            station.host.to_read.append(read)
        else:
            station.host.reading, station.host.reading_since = True, self.now
            read()

    def _leave_disk(self, station: _Ground) -> None:
        host = station.host
        if host.to_read:
            host.to_read.popleft()()
        else:
            host.read_s = host.has_read_s(self.now)
            host.reading = False

    def _read_picked(self, station: _Ground) -> None:
        station.picked_since = self.now
        seconds = self._piece(station).picked_bytes / station.fixture.disk_bytes_per_s
        self._at(self.now + seconds, self._was_picked_read, station)

    def _was_picked_read(self, station: _Ground) -> None:
        piece, since, tally = self._piece(station), station.picked_since, station.tally
        assert since is not None
        tally.disk_s += self.now - since
        tally.disk_bytes += piece.picked_bytes
        self._note(station, "load", since, self.now, piece.layers)
        station.picked_since = None
        self._leave_disk(station)
        self._end_stall(station)
        self._compute_in_turn(station)

    def _end_stall(self, station: _Ground) -> None:
        assert station.stall_since is not None
        station.tally.stall_s += self.now - station.stall_since
        self._note(station, "stall", station.stall_since, self.now, self._piece(station).layers)
        station.stall_since = None

    def _take_room(self, station: _Ground) -> bool:
        """Make what is next in the order of use what is read, as far as it finds room."""
        if station.wanted is None:
            station.wanted = next(station.reads, None)
        if station.wanted is None:
            return False
        missing = station.wanted[1]
        size = min(missing, station.free_bytes)
        if size < min(missing, _MIN_SHARE * station.fixture.read_ahead_bytes):
            return False
        station.free_bytes -= size
        station.reading_bytes = size
        return True

    def _start_read(self, station: _Ground) -> None:
        station.read_since = self.now
        self._at(self.now + station.reading_bytes / station.fixture.disk_bytes_per_s, self._was_read, station)

    def _have(self, station: _Ground) -> None:
        """What was read is in memory."""
        assert station.wanted is not None
        layer, missing = station.wanted
        station.tally.disk_bytes += station.reading_bytes
        missing -= station.reading_bytes
        station.reading_bytes = 0.0
        station.wanted = (layer, missing)
        if missing <= 0:
            station.read.append(layer)
            station.wanted = None

    def _was_read(self, station: _Ground) -> None:
        since, tally, wanted = station.read_since, station.tally, station.wanted
        assert since is not None
        assert wanted is not None
        tally.disk_s += self.now - since
        self._note(station, "load", since, self.now, (wanted[0],))
        station.read_since = None
        self._have(station)
        self._leave_disk(station)
        self._read(station)
        if station.stall_since is not None and self._piece(station).read_ahead_bytes and station.read:
            self._end_stall(station)
            self._go_on(station)

    # ---- links -----------------------------------------------------------------------------------------------------

    def _send(self, station: _Ground, sequence: int, stop: int) -> None:
        """Send the hidden state on; on a device that is the whole ring, the next step waits its turn."""
        if stop == len(self._stops):
            if not self._cyclic:
                return
            stop = 0
        target = self._stations[self._stops[stop].station]
        if target is station:
            station.queue.append((sequence, stop))
            return
        fixture, tally = station.fixture, station.tally
        free_s = self._air_free_s if fixture.in_air else station.link_free_s
        sent = max(self.now, free_s) + fixture.transfer_s
        delay = fixture.delay_s
        if self._jitter:
            delay *= 1 - self._jitter + self._jitter * self._random.expovariate(1)
        if fixture.in_air:
            self._air_free_s = sent
        station.link_free_s = sent
        station.arrival_s = max(sent + delay, station.arrival_s)
        tally.link_s += fixture.transfer_s
        tally.hop_s += station.arrival_s - self.now
        self._note(station, "hop", self.now, station.arrival_s, ())
        target.coming.append((sequence, stop))
        self._at(station.arrival_s, self._arrive, target)

    def _arrive(self, station: _Ground) -> None:
        station.queue.append(station.coming.popleft())
        if station.visit is None:
            self._begin(station)

    def _note(self, station: _Ground, kind: Kind, since: float, until: float, layers: tuple[int, ...]) -> None:
        if self.trace is not None and until > since:
            self.trace.append(self._interval(station, kind, since, until, layers))

    def _interval(self, station: _Ground, kind: Kind, since: float, until: float, layers: tuple[int, ...]) -> Interval:
        return Interval(device=station.fixture.device, kind=kind, start_s=since, end_s=until, layers=layers)


def _order_of_use(stops: Sequence[Visit], sequences: int, *, cyclic: bool) -> Iterator[tuple[int, float]]:
    """The layers of one station that stream, with their bytes in the order of use: all sequences at a stop, then all at
    the next."""

    def streamed(pieces: Sequence[Segment]) -> list[tuple[int, float]]:
        return [(piece.layers[0], piece.read_ahead_bytes) for piece in pieces if piece.read_ahead_bytes]

    for stop in stops:
        for _ in range(sequences):
            yield from streamed(stop.pieces[stop.entry :])
    again = [layer for stop in stops for _ in range(sequences) for layer in streamed(stop.pieces)]
    while cyclic and again:
        yield from again
