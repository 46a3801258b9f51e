"""What a ring process does once it is open: the worker's role, the head's, and that of a group's other ranks.

The process's loop drives a role: ``command`` and ``arrived`` when something came, ``turn`` for one piece of work,
``watched`` and ``wait_s`` for what to wait for. No role ever blocks: the loop waits for the next device to take a step,
and meanwhile hears the daemon.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, cast

import zmq

from primad.engine.protocol import EngineOptions, Hidden, HiddenWindow
from primad.engine.streaming.streams import Streamable, Streams
from primad.errors import NextDeviceError, PrimadError, RingError
from primad.ring.draft_place import DraftPlace
from primad.ring.head import HeadEvent, Notify, Send
from primad.ring.links import HIGH_WATER_STEPS, Links
from primad.ring.loading import limits_of, limits_of_open, open_follower, open_head, open_kv_writer, open_worker
from primad.ring.messages import (
    Cancel,
    Choices,
    Connect,
    DraftPlaceChanged,
    DraftsHeard,
    Drain,
    Generate,
    JoinGroup,
    Loading,
    Open,
    Opened,
    ProcessMemoryLow,
    Reopen,
    Report,
    RingCommand,
    Sampled,
    Skip,
    Step,
)
from primad.ring.meter import Meter
from primad.ring.speculation.lookup import PromptLookup
from primad.ring.worker import Worker, WritesKv
from primad.settings.timings import RingTimings
from primad.system.children.channel import RingChannel

if TYPE_CHECKING:
    from primad.ring.group.place import GroupPlace

TAIL: Final = -1
"""The visit of a step to the head that ends it, for any number of windows."""
Watched = list[tuple[zmq.Socket[bytes] | int, int]]
RoleCommand = (
    Reopen | Connect | JoinGroup | Generate | Choices | Cancel | Drain | Report | DraftPlaceChanged | DraftsHeard
)


class Role(Protocol):
    """One device's role in the ring."""

    def opened(self) -> Opened:
        """The address at which the previous device reaches this one."""

    def command(self, command: RoleCommand) -> None:
        """Execute a command of the daemon. Raises ``RingError`` if it is not for this role."""

    def arrived(self, sockets: Collection[object], received_s: float) -> None:
        """Note that some of the ``watched`` sockets are ready, since ``received_s``."""

    def turn(self) -> bool:
        """Do one piece of work; return whether there was any. Raises ``PrimadError`` when the ring breaks."""

    def watched(self) -> Watched:
        """What the next ``turn`` may wait for, besides time."""

    def wait_s(self) -> float:
        """Seconds until the next ``turn`` has something to do or to report even if nothing comes."""

    def close(self) -> None:
        """Close the links; the windows end with the process."""


class WorkerRole:
    """Computes what arrives. All messages that have come are read before a step is computed, so that skipped steps are
    known.

    A next device that takes no step is reported as ``Overdue`` and waited for: the windows loaded here are worth more
    than the ring, and the daemon can reopen this process for another ring.
    """

    def __init__(self, opening: Open, channel: RingChannel[RingCommand], timings: RingTimings) -> None:
        self._channel = channel
        self._width, self._options = opening.width, opening.options
        self._timings = timings
        self._links = Links(opening.host, limits_of_open(opening), timings=_within(timings, opening.step_timeout_s))
        self._group = _group_place(opening)
        self._windows, self._streams = open_worker(
            opening, lambda done: channel.notify(Loading(done)), channel.notify, self._group
        )
        self._kv_writer = open_kv_writer(opening, self._windows.values())
        self._begin()

    def _begin(self) -> None:
        self._worker = Worker(self._windows, self._kv_writer)
        self._meter = Meter()
        self._is_connected = False
        self._received_s: float | None = None
        self._arrived: deque[tuple[Step, Hidden]] = deque()

    def opened(self) -> Opened:
        return _opened(self._links, self._kv_writer, self._group)

    def command(self, command: RoleCommand) -> None:
        match command:
            case Connect(address, key, sender):
                self._links.connect(address, key, sender)
                if self._group is not None:  # the others connect to the first rank
                    self._group.join(JoinGroup([]))
                self._is_connected = True
            case Reopen():
                self._reopen(command)
            case Report():
                self._channel.notify(self._meter.status(self._links.refused, self._streams))
            case JoinGroup():
                raise RingError("a worker that follows no first rank cannot join a group")
            case Generate() | Choices() | Cancel() | Drain() | DraftPlaceChanged() | DraftsHeard():
                raise RingError(f"a worker was given {type(command).__name__}, which is the head's")

    def _reopen(self, reopen: Reopen) -> None:
        windows = _renumbered(reopen, self._windows)
        limits = limits_of(reopen.ring, reopen.epoch, windows, self._width, self._options)
        self._links.close()
        self._links = Links(reopen.host, limits, timings=_within(self._timings, reopen.step_timeout_s))
        self._streams.end()
        self._streams = self._streams.reopened(reopen.windows, reopen.assignments, reopen.read_ahead_bytes)
        for window in self._windows.values():
            _forget(window, self._options)
        self._windows = windows
        self._streams.begin(cast("dict[int, Streamable]", windows))
        self._begin()
        self._channel.notify(self.opened())

    def arrived(self, sockets: Collection[object], received_s: float) -> None:
        if self._links.pull in sockets:
            self._received_s = received_s
        if self._links.zap in sockets:
            self._links.admit()

    def turn(self) -> bool:
        _notify_memory_low(self._streams, self._channel)
        if not self._is_connected:
            return False
        if not self._links.flush():
            overdue = self._links.overdue()
            if overdue is not None:
                self._channel.notify(overdue)
            return False
        self._receive()
        if not self._arrived:
            return False
        step, hidden = self._arrived.popleft()
        start = time.perf_counter()
        received = self._received_s if self._received_s is not None else start
        self._received_s = None
        following, out = self._worker.receive(step, hidden)
        end = time.perf_counter()
        self._links.send(following, out)
        sent = time.perf_counter()
        self._meter.computed(step.window, step.rows, end - start, self._streams)
        if step.rows == 1:
            self._meter.hop_s.append(start - received + sent - end)
        return True

    def _receive(self) -> None:
        """Take what has arrived, a limited number at a time: a device that never stops sending must not keep this one
        from computing."""
        for _ in range(HIGH_WATER_STEPS - len(self._arrived)):
            if (message := self._links.receive()) is None:
                return
            if isinstance(message, Skip):
                self._worker.skip(message)
                self._links.overtake(message)
            else:
                self._arrived.append(message)

    def watched(self) -> Watched:
        return [*self._links.watched(receiving=self._is_connected and not self._links.is_waiting)]

    def wait_s(self) -> float:
        return self._links.wait_s()

    def close(self) -> None:
        self._streams.end()
        self._links.close()
        if self._group is not None:
            self._group.close()
        if self._kv_writer is not None:
            self._kv_writer.close()


class HeadRole:
    """Drives the step log and the tail; the whole model when there is no ring."""

    def __init__(self, opening: Open, channel: RingChannel[RingCommand], timings: RingTimings) -> None:
        self._channel = channel
        self._meter = Meter()
        self._drafted = 0
        self._links: Links | None = None
        if opening.route > 1:
            within = _within(timings, opening.step_timeout_s)
            self._links = Links(opening.host, limits_of_open(opening), timings=within)
        assert opening.head is not None
        self._group = _group_place(opening)
        self._drafts = DraftPlace(opening.head, channel)
        try:
            self._head, self._streams = open_head(
                opening,
                lambda done: channel.notify(Loading(done)),
                channel.notify,
                self._drafts.drafters or PromptLookup,
                self._group,
            )
        except PrimadError:
            self._drafts.close()
            raise
        self._head.warm_up()
        self._is_connected = self._links is None and self._group is None

    def opened(self) -> Opened:
        return _opened(self._links, self._head.kv_writer, self._group)

    def command(self, command: RoleCommand) -> None:
        match command:
            case Connect(address, key, sender):
                if self._links is None:
                    raise RingError("a device that computes the whole model was given a next device")
                self._links.connect(address, key, sender)
                self._is_connected = True
            case JoinGroup():
                if self._group is None:
                    raise RingError("a device that is in no group cannot join one")
                self._group.join(command)
                self._is_connected = self._links is None  # otherwise steps have nowhere to go yet
            case Generate():
                self._head.submit(command)
            case Choices():
                for generate in command.generates():
                    self._head.submit(generate)
            case Cancel():
                self._head.cancel(command)
            case Drain():
                self._head.drain()
            case DraftPlaceChanged(place):
                self._drafts.move(place)
            case DraftsHeard(drafted):
                self._drafts.heard(drafted)
            case Report():
                refused = self._links.refused if self._links is not None else 0
                self._channel.notify(self._meter.status(refused, self._streams, self._head.drafts))
            case Reopen():
                raise RingError("the head's ring process was given Reopen, which is a worker's")

    def arrived(self, sockets: Collection[object], received_s: float) -> None:
        if self._links is not None and self._links.zap in sockets:
            self._links.admit()
        self._drafts.arrived(sockets)

    def turn(self) -> bool:
        _notify_memory_low(self._streams, self._channel)
        self._receive()
        if not self._may_compute():
            events = self._head.news()
            self._channel.notify(*events)
            return bool(events)
        start = time.perf_counter()
        outcome = self._head.turn()
        visit, rows = TAIL, 0
        match outcome:
            case None:
                return False
            case Send(step, hidden):
                assert self._links is not None
                self._links.send(step, hidden)
                visit, rows = step.window, step.rows
            case Skip():
                assert self._links is not None
                self._links.overtake(outcome)
                return True
            case Notify(events, rows):
                self._channel.notify(*events)
                self._count(events, start)
                if not rows:  # events such as a late step: whoever looks for one asks what was computed
                    return True
        self._meter.computed(visit, rows, time.perf_counter() - start, self._streams)
        return True

    def _count(self, events: Sequence[HeadEvent], now: float) -> None:
        """Count the tokens among ``events``. If drafts were computed since the last one, they are no measure of a ring
        pass."""
        drafted = self._head.drafted
        for event in events:
            if isinstance(event, Sampled):
                alone = self._head.runs_one and not self._head.has_drafts_in_flight and drafted == self._drafted
                self._meter.drew(event.request, now, alone=alone)
                self._drafted = drafted

    def _receive(self) -> None:
        """Take what has arrived, as a worker does."""
        for _ in range(HIGH_WATER_STEPS):
            if self._links is None or (message := self._links.receive()) is None:
                return
            if isinstance(message, Skip):  # it was everywhere
                continue
            self._head.receive(*message)

    def _may_compute(self) -> bool:
        if not self._is_connected or self._links is None or self._links.flush():
            return self._is_connected
        overdue = self._links.overdue()
        if overdue is not None:
            raise NextDeviceError(f"the next device accepted no step for {overdue.waited_s:.3g} s; it is gone or hangs")
        return False

    def watched(self) -> Watched:
        watched: Watched = []
        if self._links is not None:
            watched += self._links.watched(receiving=self._is_connected)
        if (connection := self._drafts.connection) is not None:
            watched.append((connection, zmq.POLLIN))
        return watched

    def wait_s(self) -> float:
        if self._links is None:
            return self._head.wait_s(may_compute=self._is_connected)
        may_compute = self._is_connected and not self._links.is_waiting
        return min(self._head.wait_s(may_compute=may_compute), self._links.wait_s())

    def close(self) -> None:
        self._streams.end()
        if self._links is not None:
            self._links.close()
        if self._group is not None:
            self._group.close()
        if self._head.kv_writer is not None:
            self._head.kv_writer.close()
        self._drafts.close()


class FollowerRole:
    """A rank of a group other than the first: computes what the first one does (``group/follower.py``)."""

    def __init__(self, opening: Open, channel: RingChannel[RingCommand]) -> None:
        from primad.ring.group.follower import GroupFollower

        self._channel, self._meter = channel, Meter()
        place = _group_place(opening)
        assert place is not None
        self._place = place
        windows, self._streams = open_follower(
            opening, lambda done: channel.notify(Loading(done)), channel.notify, place
        )
        self._kv_writer = open_kv_writer(opening, windows.values())
        self._follower = GroupFollower(windows, place, limits_of_open(opening), self._kv_writer)

    def opened(self) -> Opened:
        return _opened(None, self._kv_writer, self._place)

    def command(self, command: RoleCommand) -> None:
        match command:
            case JoinGroup():
                self._place.join(command)
            case Report():
                self._channel.notify(self._meter.status(0, self._streams))
            case _:
                raise RingError(f"a device of a group was given {type(command).__name__}, which is not for it")

    def arrived(self, sockets: Collection[object], received_s: float) -> None:
        """Do nothing: ``turn`` takes the steps."""

    def turn(self) -> bool:
        _notify_memory_low(self._streams, self._channel)
        if not self._place.is_joined:
            return False
        start = time.perf_counter()
        step = self._follower.turn()
        if step is None:
            return False
        self._meter.computed(step.window, step.rows, time.perf_counter() - start, self._streams)
        return True

    def watched(self) -> Watched:
        return [(self._place.fileno(), zmq.POLLIN)] if self._place.is_joined else []

    def wait_s(self) -> float:
        return math.inf

    def close(self) -> None:
        self._streams.end()
        self._place.close()
        if self._kv_writer is not None:
            self._kv_writer.close()


def _group_place(opening: Open) -> GroupPlace | None:
    if opening.group is None:
        return None
    from primad.ring.group.place import GroupPlace  # only a group needs its ciphers

    return GroupPlace(opening.group, opening.host, timeout_s=opening.step_timeout_s)


def _notify_memory_low(streams: Streams, channel: RingChannel[RingCommand]) -> None:
    """Report to the daemon when nothing is left to give back and memory is still short."""
    needed_bytes = streams.streamer.take_replan() if streams.streamer is not None else None
    if needed_bytes is not None:
        channel.notify(ProcessMemoryLow(needed_bytes))


def _opened(links: Links | None, kv_writer: WritesKv | None, group: GroupPlace | None) -> Opened:
    endpoint, key = (links.endpoint, links.key) if links is not None else ("", "")
    return Opened(
        endpoint,
        key,
        kv_writer is not None,
        kv_writer.shapes if kv_writer is not None else [],
        group.endpoint if group is not None else "",
    )


def _within(timings: RingTimings, step_timeout_s: float) -> RingTimings:
    """Limit how long the next device may take nothing, to ``timings`` and to the time that a whole step may take."""
    return replace(timings, send_timeout_s=min(timings.send_timeout_s, step_timeout_s))


def _renumbered(reopen: Reopen, windows: dict[int, HiddenWindow]) -> dict[int, HiddenWindow]:
    """``windows`` by their new route index. Raises ``RingError`` when ``reopen`` makes no sense."""
    following = reopen.windows
    if len(following) != len(windows):
        raise RingError(f"{len(windows)} windows cannot be reopened as {len(following)}")
    if following != sorted(set(following)) or not 0 < following[0] <= following[-1] < reopen.route - 1:
        raise RingError(f"windows cannot be reopened as windows {following} of a route of {reopen.route}")
    return dict(zip(following, windows.values(), strict=True))


def _forget(window: HiddenWindow, options: EngineOptions) -> None:
    for sequence in range(options.sequences):
        window.kv_remove(sequence, 0, -1)
    window.state_forget()


def open_role(opening: Open, channel: RingChannel[RingCommand], timings: RingTimings) -> Role:
    """Load the windows of ``opening`` and listen. Raises ``PrimadError`` when that fails."""
    if opening.head is not None:
        return HeadRole(opening, channel, timings)
    if opening.group is not None and opening.group.rank:
        return FollowerRole(opening, channel)
    if opening.route < 2:
        raise RingError(f"a worker cannot be part of a route of {opening.route} windows")
    return WorkerRole(opening, channel, timings)
