"""The ring as events in time: computing, reading and sending. ``simulator.py`` makes its input and reads its output.

A ``Visit`` is a device's work between receiving a hidden state and sending one: a window, or consecutive windows on it,
including the tail and the next token's first window. Every device serves stops in order of arrival. In a ring nothing
overtakes: steps enter in the order of their sequences and keep it, so each device serves all sequences at its first
stop, then all at its second, and so on. The order of use is therefore known from the start, and loaders read ahead in
it without speculation. (A device must therefore always send to the same next one.)

Computing and read-ahead are two processes per device, written as generators that yield what they wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Final

_NOTHING_S: Final = 1e-9
"""Smaller slowdowns of computing are ignored."""
_MIN_SHARE: Final = 1e-9
"""A smaller share of the read-ahead limit does not count as room, since sums of parts are inexact."""

Resume = Callable[[], None]
Process = Generator[Callable[[Resume], None], None, None]
"""Yields the function that will receive its resumption."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers computed without a break in ``seconds``; a partly streamed layer is alone. ``ends`` the step.

    ``read_ahead_bytes`` of it are read ahead; for a layer that streams by expert, ``picked_bytes`` are read once the
    step has reached it.
    """

    layers: tuple[int, ...]
    seconds: float
    read_ahead_bytes: float
    ends: bool
    picked_bytes: float


@dataclass(frozen=True, slots=True)
class Visit:
    """One visit at node ``node``. A step enters the ring at piece ``entry`` of the first stop."""

    node: int
    pieces: tuple[Segment, ...]
    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixture:
    """A node's resources: its machine's number, its read-ahead limit, its disk and its outgoing link.

    Each second of reading delays concurrent computing on the machine by ``slowed_share`` of a second.
    """

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
    """Sums for one node since the beginning, in seconds, layers and bytes.

    ``link_s`` is the time that its outgoing link is occupied, ``hop_s`` the total travel time of its messages.
    """

    compute_s: float = 0.0
    stall_s: float = 0.0
    disk_s: float = 0.0
    link_s: float = 0.0
    hop_s: float = 0.0
    layers: float = 0
    disk_bytes: float = 0.0


class _Turns:
    """The processor or the disk of a machine: first come, first served."""

    def __init__(self, ring: SimulatedRing) -> None:
        self._ring = ring
        self._taken = False
        self._waiting: deque[Resume] = deque()
        self._busy_s, self._since = 0.0, 0.0

    def take(self, resume: Resume) -> None:
        """Call ``resume`` when it is its turn."""
        if self._taken:
            self._waiting.append(resume)
        else:
            self._taken, self._since = True, self._ring.now
            resume()

    def leave(self) -> None:
        """End this turn and start the next one's."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._busy_s, self._taken = self.busy_s, False

    @property
    def busy_s(self) -> float:
        """Seconds in use so far."""
        return self._busy_s + (self._ring.now - self._since if self._taken else 0.0)


class _Bell:
    """A signal with at most one waiting process; ringing with none waiting has no effect."""

    def __init__(self) -> None:
        self._resume: Resume | None = None

    def wait(self, resume: Resume) -> None:
        """Call ``resume`` when it rings."""
        self._resume = resume

    def ring(self) -> None:
        """Wake the waiting process."""
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()


@dataclass(slots=True)
class _Ground:
    """One device at work: arrived (sequence, stop) pairs and layers in memory, both in order."""

    fixture: Fixture
    processor: _Turns
    disk: _Turns
    reads: Iterator[tuple[int, float]]
    """Layers with their bytes in the order of use."""
    free_bytes: float
    tally: Tally = field(default_factory=Tally)
    arrived: deque[tuple[int, int]] = field(default_factory=deque)
    read: deque[int] = field(default_factory=deque)
    arrival: _Bell = field(default_factory=_Bell)
    layer: _Bell = field(default_factory=_Bell)
    room: _Bell = field(default_factory=_Bell)
    link_free_s: float = 0.0


class SimulatedRing:
    """Steps of ``sequences`` in flight over ``stops``, repeatedly if ``cyclic``, else once.

    ``filled``: all read-ahead is in memory at the start. ``through(sequence)`` is called whenever a step completes.
    """

    def __init__(
        self,
        stops: Sequence[Visit],
        fixtures: Sequence[Fixture],
        *,
        sequences: int,
        cyclic: bool,
        filled: bool,
        through: Callable[[int], None],
    ) -> None:
        assert sequences >= 1
        self.now = 0.0
        self._stops: Final = stops
        self._cyclic: Final = cyclic
        self._filled: Final = filled
        self._through: Final = through
        self._events: list[tuple[float, int, Resume]] = []
        self._count = 0
        self._air_free_s = 0.0
        hosts = {fixture.host: (_Turns(self), _Turns(self)) for fixture in fixtures}
        self._nodes = [
            _Ground(
                fixture,
                *hosts[fixture.host],
                reads=_order_of_use([stop for stop in stops if stop.node == i], sequences, cyclic=cyclic),
                free_bytes=fixture.read_ahead_bytes,
            )
            for i, fixture in enumerate(fixtures)
        ]
        self._entering = sequences
        self._nodes[stops[0].node].arrived.extend((sequence, 0) for sequence in range(sequences))

    @property
    def tallies(self) -> list[Tally]:
        """The sums of every node so far."""
        return [replace(node.tally) for node in self._nodes]

    def run(self, more: Callable[[], bool]) -> None:
        """Process events as long as there are any and ``more()`` is true."""
        for node in self._nodes:
            self._resume(self._read(node, self._filled))
        for node in self._nodes:
            self._resume(self._compute(node))
        while self._events and more():
            self.now, _, happen = heappop(self._events)
            happen()

    def _resume(self, process: Process) -> None:
        wait = next(process, None)
        if wait is not None:
            wait(lambda: self._resume(process))

    def _at(self, time_s: float, happen: Resume) -> None:
        self._count += 1
        heappush(self._events, (time_s, self._count, happen))

    def _for(self, seconds: float) -> Callable[[Resume], None]:
        return lambda resume: self._at(self.now + seconds, resume)

    def _compute(self, node: _Ground) -> Process:
        """Serve arrivals, piece by piece."""
        tally = node.tally
        while True:
            while not node.arrived:
                yield node.arrival.wait
            sequence, stop = node.arrived.popleft()
            entry = 0
            if self._entering and stop == 0:  # entering steps are the first to be served at the first stop
                self._entering -= 1
                entry = self._stops[0].entry
            for piece in self._stops[stop].pieces[entry:]:
                since = self.now
                if piece.picked_bytes:
                    yield from self._occupy_disk(node, piece.picked_bytes)
                while piece.read_ahead_bytes and not node.read:
                    yield node.layer.wait
                tally.stall_s += self.now - since
                yield node.processor.take
                since, read_s = self.now, node.disk.busy_s
                slowed_s = piece.seconds
                while slowed_s > _NOTHING_S:
                    yield self._for(slowed_s)
                    before_s, read_s = read_s, node.disk.busy_s
                    slowed_s = (read_s - before_s) * node.fixture.slowed_share
                tally.compute_s += self.now - since
                tally.layers += len(piece.layers)
                node.processor.leave()
                if piece.read_ahead_bytes:
                    assert node.read.popleft() == piece.layers[0], "layers are read in the order of use"
                    node.free_bytes += piece.read_ahead_bytes
                    node.room.ring()
                if piece.ends:
                    self._through(sequence)
            self._send(node, sequence, stop + 1)

    def _read(self, node: _Ground, is_there: bool) -> Process:
        """Read in the order of use whatever fits; data present from the start takes no time."""
        for layer, missing in node.reads:
            while missing > 0:
                size = min(missing, node.free_bytes)
                if size < min(missing, _MIN_SHARE * node.fixture.read_ahead_bytes):
                    is_there = False
                    yield node.room.wait
                    continue
                node.free_bytes -= size
                missing -= size
                if is_there:
                    node.tally.disk_bytes += size
                else:
                    yield from self._occupy_disk(node, size)
            node.read.append(layer)
            node.layer.ring()

    def _occupy_disk(self, node: _Ground, size: float) -> Process:
        yield node.disk.take
        seconds = size / node.fixture.disk_bytes_per_s
        yield self._for(seconds)
        node.tally.disk_s += seconds
        node.tally.disk_bytes += size
        node.disk.leave()

    def _send(self, node: _Ground, sequence: int, stop: int) -> None:
        """Send the hidden state on; on a single-device ring the next step waits its turn."""
        if stop == len(self._stops) and not self._cyclic:
            return
        stop %= len(self._stops)
        target = self._nodes[self._stops[stop].node]
        if target is node:
            node.arrived.append((sequence, stop))
            return
        fixture, tally = node.fixture, node.tally
        sent_s = max(self.now, self._air_free_s if fixture.in_air else node.link_free_s) + fixture.transfer_s
        if fixture.in_air:
            self._air_free_s = sent_s
        node.link_free_s = sent_s
        tally.link_s += fixture.transfer_s
        tally.hop_s += sent_s + fixture.delay_s - self.now

        def arrive() -> None:
            target.arrived.append((sequence, stop))
            target.arrival.ring()

        self._at(sent_s + fixture.delay_s, arrive)


def _order_of_use(stops: Sequence[Visit], sequences: int, *, cyclic: bool) -> Iterator[tuple[int, float]]:
    """One node's streamed layers and bytes in the order of use: all sequences at a stop, then all at the next."""

    def streamed(pieces: Sequence[Segment]) -> list[tuple[int, float]]:
        return [(piece.layers[0], piece.read_ahead_bytes) for piece in pieces if piece.read_ahead_bytes]

    for stop in stops:
        for _ in range(sequences):
            yield from streamed(stop.pieces[stop.entry :])
    again = [layer for stop in stops for _ in range(sequences) for layer in streamed(stop.pieces)]
    while cyclic and again:
        yield from again
