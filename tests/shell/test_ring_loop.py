"""The loop of a ring process with fake windows: it hears its daemon whatever the ring does, and reopens in place."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
import pytest
import zmq

from halda.assignment import in_memory
from primad.engine.protocol import EngineOptions, Rows, WindowSource
from primad.engine.streaming.streams import StreamedWindow, Streams
from primad.errors import NextDeviceError, RingError
from primad.ring import roles as parts
from primad.ring.head import Head
from primad.ring.links import Links
from primad.ring.loading import limits_of_open
from primad.ring.messages import (
    PROTOCOL,
    Connect,
    Drain,
    Drained,
    Finished,
    Generate,
    HeadPart,
    Open,
    Opened,
    Overdue,
    PromptProgress,
    Reopen,
    Report,
    RingCommand,
    RingEvent,
    Sampled,
    Serving,
    Skip,
    Status,
    Step,
    StepLimits,
    command_decoder,
    event_decoder,
)
from primad.ring.process import _serve
from primad.ring.scheduler.scheduler import Scheduler
from primad.ring.scheduler.state import SchedulerState
from primad.ring.worker import Worker
from primad.settings.timings import RingTimings
from primad.system.children.channel import LENGTH, RingChannel, frame, frame_bytes
from tests.fakes.engine import WIDTH, FakeHiddenWindow, FakeModel
from tests.fakes.ring import GREEDY, chunks_of, generate

TIMEOUT_S = 180
IMPATIENT = RingTimings(send_timeout_s=0.05)
PATIENT = RingTimings(send_timeout_s=1000.0)
ROUTE = 4
"""Head, worker 1, worker 2, head: a layer each."""
OPTIONS = EngineOptions(context=128, sequences=1, rows=8, threads=1, batch_threads=1, kv_type="f16", lock=False)
NOBODY = zmq.curve_keypair()[0].decode()
NOWHERE = "tcp://127.0.0.1:1"
SAMPLED = msgspec.structs.replace(GREEDY, temperature=1.0, seed=5)


def no_streams(*indices: int) -> Streams:
    """Streams without weights for windows ``indices``."""
    windows = [StreamedWindow(index=index, assignment=in_memory(0, 1), units=None) for index in indices]
    return Streams(windows, read_ahead_bytes=0, lock=False, usage=None)


def an_open(**changes) -> Open:
    opening = Open(
        ring=1,
        epoch=1,
        windows=[],
        route=ROUTE,
        width=WIDTH,
        host="127.0.0.1",
        head=None,
        step_timeout_s=TIMEOUT_S,
        options=OPTIONS,
        read_ahead_bytes=0,
        usage=None,
    )
    return msgspec.structs.replace(opening, **changes)


def a_reopen(*, windows=(1, 2), **changes) -> Reopen:
    reopen = Reopen(
        ring=1,
        epoch=2,
        windows=list(windows),
        route=ROUTE,
        host="127.0.0.1",
        step_timeout_s=TIMEOUT_S,
        assignments=[in_memory(0, 1)] * len(windows),
        read_ahead_bytes=0,
    )
    return msgspec.structs.replace(reopen, **changes)


def a_step(window: int, rows: int = 2, *, epoch: int = 1, start: int = 0) -> Step:
    return Step(
        protocol=PROTOCOL,
        ring=1,
        epoch=epoch,
        step=start,
        window=window,
        dtype="f32",
        shape=(rows, WIDTH),
        positions=list(range(start, start + rows)),
        sequences=[[0]] * rows,
        outputs=[False] * rows,
        ops=[],
    )


class Process:
    """The loop of a ring process in a thread, with the daemon's end of its connection."""

    def __init__(self, timings: RingTimings) -> None:
        self._timings = timings
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(TIMEOUT_S)
        self._events = self._ours.makefile("rb")
        self.failure: RingError | None = None
        self.late: list[Overdue] = []
        self._thread = threading.Thread(target=self._run, args=(RingChannel(theirs, command_decoder), theirs))
        self._thread.start()

    def _run(self, channel: RingChannel[RingCommand], theirs: socket.socket) -> None:
        with theirs:
            try:
                _serve(channel, self._timings)
            except RingError as exc:
                self.failure = exc

    def send(self, *commands: RingCommand) -> None:
        """Send commands, all at once."""
        self._ours.sendall(b"".join(map(frame, commands)))

    def event(self) -> RingEvent:
        """Its next event."""
        length = self._events.read(LENGTH.size)
        assert length, f"the loop ended: {self.failure}"
        return event_decoder.decode(self._events.read(frame_bytes(length)))

    def expect(self, kind: type) -> RingEvent:
        """Its next event, which must be of ``kind``."""
        event = self.event()
        assert isinstance(event, kind), event
        return event

    def status(self) -> Status:
        """Ask for its status; reports of a late neighbour meanwhile go to ``late``."""
        self.send(Report())
        while isinstance(event := self.event(), Overdue):
            self.late.append(event)
        assert isinstance(event, Status), event
        return event

    def failed(self) -> str:
        """Wait for the error that ends the loop."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the loop continues"
        assert self.failure is not None
        return str(self.failure)

    def close(self) -> None:
        """Close the connection, and wait until the loop has ended."""
        self._ours.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the loop continues without its daemon"
        self._events.close()
        self._ours.close()


@contextmanager
def started(command: Open, timings: RingTimings = RingTimings()) -> Iterator[tuple[Process, Opened]]:
    """An opened process."""
    process = Process(timings)
    try:
        process.send(command)
        yield process, process.expect(Opened)
    finally:
        if process._ours.fileno() >= 0:
            process.close()


@contextmanager
def neighbour(*windows: int, epoch: int = 1) -> Iterator[Links]:
    """The links of a neighbouring device that holds ``windows``."""
    limits = StepLimits(ring=1, epoch=epoch, windows=frozenset(windows), width=WIDTH, rows=8, context=128, sequences=1)
    links = Links("127.0.0.1", limits)
    try:
        yield links
    finally:
        links.close()


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(ROUTE, options=OPTIONS)


@pytest.fixture
def windows(monkeypatch, model) -> dict[int, FakeHiddenWindow]:
    """The windows that a worker loads: those of both workers."""
    made = {index: model.middle(index, index + 1) for index in (1, 2)}
    monkeypatch.setattr(parts, "open_worker", lambda opening, loaded, on_gpu, group: (dict(made), no_streams(1, 2)))
    return made


def hidden(model: FakeModel, tokens: list[int]) -> np.ndarray:
    """The hidden states that arrive at window 1 for ``tokens`` at the start of a text."""
    count = len(tokens)
    rows = Rows(
        content=np.array(tokens, np.int32), positions=range(count), sequences=[[0]] * count, outputs=[False] * count
    )
    return model.first(1).forward(rows)


def opening_of_two(**changes) -> Open:
    """Opens windows 1 and 2, with any files."""
    return an_open(
        windows=[
            WindowSource(window=index, metadata="", layers=(), assignment=in_memory(0, 1), extra_buffers=False)
            for index in (1, 2)
        ],
        **changes,
    )


def exchange(sender: Links, receiver: Links, *, until: Callable[[], bool]) -> None:
    """Serve both links until ``until`` holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not until():
        assert time.monotonic() < deadline, "nothing moves"
        watched = [*sender.watched(receiving=False), *receiver.watched(receiving=True)]
        ready = [found for found, _ in zmq.zmq_poll(watched, 1000)]
        for links in (sender, receiver):
            if links.zap in ready:
                links.admit()
            links.flush()


def through(before: Links, after: Links, step: Step, content: np.ndarray) -> tuple[Step, np.ndarray]:
    """Send a step from ``before``; returns what arrives at ``after``."""
    arrived: list[tuple[Step, np.ndarray]] = []

    def here() -> bool:
        message = after.receive()
        if message is not None:
            arrived.append(message)
        return bool(arrived)

    before.send(step, content)
    exchange(before, after, until=here)
    return arrived[0]


def test_a_worker_computes_and_sends_on(model, windows):
    with neighbour() as before, neighbour(3) as after, started(opening_of_two()) as (process, opened):
        process.send(Connect(after.endpoint, after.key, before.key))
        before.connect(opened.endpoint, opened.key, NOBODY)
        after.connect(NOWHERE, NOBODY, opened.key)
        step, content = through(before, after, a_step(1), hidden(model, [4, 5]))
        assert (step, content.shape) == (msgspec.structs.replace(a_step(1), window=3), (2, WIDTH))
        process.send(Report())
        status = process.expect(Status)
        assert (status.steps, status.rows, status.refused) == (1, 2, 0)


@contextmanager
def blocked(model: FakeModel, timings: RingTimings = RingTimings()) -> Iterator[tuple[Process, Links, Opened]]:
    """A worker that has computed a step for a next device that is gone, and the links of the previous device."""
    with neighbour() as before, started(opening_of_two(), timings) as (process, opened):
        process.send(Connect(NOWHERE, NOBODY, before.key))
        before.connect(opened.endpoint, opened.key, NOBODY)
        before.send(a_step(1), hidden(model, [4, 5]))
        exchange(before, before, until=lambda: not before.is_waiting)
        while process.status().steps == 0:
            continue
        yield process, before, opened


def test_a_worker_with_a_vanished_next_device_obeys_its_daemon_and_ends_with_it(model, windows):
    with blocked(model, PATIENT) as (process, _, _):
        for _ in range(3):
            process.send(Report(), Report())
            assert process.expect(Status).steps == 1
            process.expect(Status)
        process.close()


def test_a_worker_reports_a_next_device_that_accepts_nothing_and_can_be_reopened(model, windows):
    with blocked(model, IMPATIENT) as (process, _, _):
        assert process.expect(Overdue).waited_s >= 0.05
        assert process.expect(Overdue).waited_s >= 0.1
        process.send(a_reopen())
        while not isinstance(process.event(), Opened):
            continue


def test_a_head_breaks_if_its_next_device_accepts_nothing(head_windows):
    with started(a_head(), IMPATIENT) as (head, opened):
        head.send(Connect(NOWHERE, NOBODY, opened.key))
        found = re.search(r"the next device accepted no step for (\S+) s", head.failed())
        assert found is not None
        assert float(found[1]) >= 0.05
        assert isinstance(head.failure, NextDeviceError)


def test_a_waiting_worker_sends_to_its_new_next_device(model, windows):
    with blocked(model) as (process, before, opened), neighbour(3) as after:
        after.connect(NOWHERE, NOBODY, opened.key)
        process.send(Connect(after.endpoint, after.key, before.key))
        step, _ = through(before, after, a_step(1, start=2), follow_on(model))
        assert step.step == 0, "the step that waited comes first"


def follow_on(model: FakeModel) -> np.ndarray:
    return hidden(model, [4, 5, 6, 7])[2:].copy()


def test_a_worker_is_reopened_in_another_place_of_another_epoch_without_its_past(model, windows):
    with neighbour() as before, neighbour(1, epoch=9) as after, started(opening_of_two()) as (process, first):
        process.send(Connect(after.endpoint, after.key, before.key))
        before.connect(first.endpoint, first.key, NOBODY)
        before.send(a_step(1), hidden(model, [4, 5]))
        exchange(before, before, until=lambda: not before.is_waiting)
        while windows[2].held(0) == 0:
            process.send(Report())
            process.expect(Status)
        process.send(a_reopen(epoch=9, windows=[7, 8], route=12))
        opened = process.expect(Opened)
        assert opened.key != first.key
        assert [windows[index].held(0) for index in (1, 2)] == [0, 0]
        assert model.open_windows >= 2
        after.close()
        with neighbour(9, epoch=9) as later:
            process.send(Connect(later.endpoint, later.key, before.key))
            later.connect(NOWHERE, NOBODY, opened.key)
            before.connect(opened.endpoint, opened.key, NOBODY)
            step, _ = through(before, later, a_step(7, epoch=9), hidden(model, [8, 9]))
            assert (step.window, step.epoch) == (9, 9)
            process.send(Report())
            status = process.expect(Status)
            assert (status.steps, status.refused) == (1, 0), "the meter starts again"
            before.send(a_step(1, start=1), hidden(model, [4, 5]))
            exchange(before, later, until=lambda: not before.is_waiting)
            assert (
                "sent something that is not a step of this ring: step of ring 1 epoch 1; serving 1 9"
                in process.failed()
            )


def test_a_reopening_ends_the_wait_for_a_next_device_and_drops_the_step(model, windows):
    with blocked(model) as (process, before, _), neighbour(3, epoch=2) as after:
        process.send(a_reopen())
        opened = process.expect(Opened)
        process.send(Connect(after.endpoint, after.key, before.key))
        before.connect(opened.endpoint, opened.key, NOBODY)
        after.connect(NOWHERE, NOBODY, opened.key)
        step, _ = through(before, after, a_step(1, epoch=2), hidden(model, [1, 2]))
        assert step.epoch == 2
        assert after.refused == 0


@pytest.mark.parametrize(
    ("indices", "why"),
    [
        ([], "2 windows cannot be reopened as 0"),
        ([1], "2 windows cannot be reopened as 1"),
        ([1, 2, 3], "2 windows cannot be reopened as 3"),
        ([0, 1], "windows cannot be reopened as windows [0, 1] of a route of 4"),
        ([2, 3], "windows cannot be reopened as windows [2, 3] of a route of 4"),
        ([1, 1], "windows cannot be reopened as windows [1, 1] of a route of 4"),
        ([2, 1], "windows cannot be reopened as windows [2, 1] of a route of 4"),
    ],
)
def test_a_reopening_that_makes_no_sense_breaks_it_with_a_reason(windows, indices, why):
    with started(opening_of_two()) as (process, _):
        process.send(a_reopen(windows=indices))
        assert why in process.failed()


@pytest.mark.parametrize("command", [generate(1, [1]), Drain()])
def test_a_worker_breaks_on_a_command_for_the_head(windows, command):
    with started(opening_of_two()) as (process, _):
        process.send(command)
        assert process.failed() == f"a worker was given {type(command).__name__}, which is the head's"


def test_a_second_open_breaks_it(windows):
    with started(opening_of_two()) as (process, _):
        process.send(opening_of_two())
        assert process.failed().startswith("a ring process is opened once")


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("gives_cells", [True, False])
def test_a_worker_reports_whether_it_saves_kv_blocks_also_after_reopening(
    model, windows, tmp_path, folder, gives_cells
):
    model.gives_cells = gives_cells
    with started(opening_of_two(cells=str(tmp_path) if folder else None)) as (process, opened):
        assert opened.keeps == (folder and gives_cells)
        process.send(a_reopen())
        assert process.expect(Opened).keeps == opened.keeps


# ---- the head, and whole rings --------------------------------------------------------------------------------------


@pytest.fixture
def head_windows(monkeypatch, model) -> None:
    """Give heads, of the route or of the whole model, fresh windows of ``model``."""

    def open_head(
        opening: Open, loaded: Callable[[int], None], on_gpu: object, drafter: object, exchange: None
    ) -> tuple[Head, Streams]:
        assert exchange is None, "it is in no group"
        is_single = opening.route == 1
        head = Head(
            windows={} if is_single else {0: model.first(1)},
            tail=model.whole() if is_single else model.tail(ROUTE - 1),
            route=opening.route,
            limits=msgspec.structs.replace(limits_of_open(opening), windows=frozenset({opening.route - 1})),
            scheduler=Scheduler(SchedulerState(context=128, chunking=chunks_of(8), depth=2)),
            step_timeout_s=opening.step_timeout_s,
            clock=time.monotonic,
        )
        return head, no_streams()

    monkeypatch.setattr(parts, "open_head", open_head)
    monkeypatch.setattr(parts, "limits_of_open", head_limits)


def head_limits(opening: Open) -> StepLimits:
    limits = limits_of_open(opening)
    if opening.head is None:
        return limits
    return msgspec.structs.replace(limits, windows=frozenset({opening.route - 1}))


def a_head(**changes) -> Open:
    return an_open(
        head=HeadPart(model="fake", vocabulary=9, ends=(), depth=2, at_once=1, chunk_rows=8, min_rows=1), **changes
    )


def link(ring: list[tuple[Process, Opened]]) -> None:
    """Connect every process to its neighbours, the head last."""
    for index in (*range(1, len(ring)), 0):
        following = ring[(index + 1) % len(ring)][1]
        ring[index][0].send(Connect(following.endpoint, following.key, ring[index - 1][1].key))


def answer(head: Process, request: Generate) -> tuple[list[int], Finished]:
    head.send(request)
    tokens = []
    while isinstance(event := head.event(), Sampled):
        tokens.append(event.token)
    assert isinstance(event, Finished), event
    return tokens, event


def test_the_next_epoch_resumes_with_the_same_workers_and_another_head(model, windows, head_windows):
    with ExitStack() as stack:
        worker, opened = stack.enter_context(started(opening_of_two()))
        first, first_opened = stack.enter_context(started(a_head()))
        link([(first, first_opened), (worker, opened)])
        first.expect(Serving)
        whole, _ = answer(first, generate(1, [1, 2, 3], tokens=9, sampling=SAMPLED))
        assert whole == model.answer([1, 2, 3], 9, SAMPLED)

        first.send(generate(2, [1, 2, 3], tokens=9, sampling=SAMPLED))
        assert first.expect(PromptProgress).reused == 2
        reported = [first.expect(Sampled).token]
        first.send(Drain())
        while isinstance(event := first.event(), Sampled):
            reported.append(event.token)
        if isinstance(event, Finished):
            event = first.event()
        assert event == Drained()
        first.close()

        worker.send(a_reopen())
        second, second_opened = stack.enter_context(started(a_head(epoch=2)))
        link([(second, second_opened), (worker, worker.expect(Opened))])
        second.expect(Serving)
        rest, finished = answer(second, generate(2, [1, 2, 3], sampled=reported, tokens=9, sampling=SAMPLED))
        assert reported + rest == whole
        assert finished.completion_tokens == 9


def test_every_device_reports_its_cost_per_token_and_the_head_the_time_of_one(windows, head_windows):
    with ExitStack() as stack:
        worker, opened = stack.enter_context(started(opening_of_two()))
        head, head_opened = stack.enter_context(started(a_head()))
        link([(head, head_opened), (worker, opened)])
        head.expect(Serving)
        assert head.status().decode.token_s is None, "there was no request"
        answer(head, generate(1, [1, 2, 3], tokens=9))
        ours, theirs = head.status(), worker.status()
        assert ours.decode.tokens == theirs.decode.tokens == 8, "all but the first, which ends the prompt"
        assert ours.decode.token_s > 0
        assert theirs.decode.token_s is None
        for each in (ours, theirs):
            assert 0 < each.decode.compute_s <= each.compute_s
            assert (each.decode.stall_s, each.decode.read_bytes) == (0, 0)
        assert ours.rows == 2 * (1 + 3 + 8), "the head has two windows"


def test_a_single_device_drains_and_has_no_ring(model, head_windows):
    with started(a_head(route=1)) as (head, opened):
        assert opened == Opened("", "")
        head.expect(Serving)
        assert answer(head, generate(1, [1, 2]))[0] == model.answer([1, 2], 8, GREEDY)
        head.send(Drain())
        assert head.event() == Drained()
        head.send(generate(2, [1]))
        assert head.failed() == "request 2 was given to a ring that drains; give it to the next one"


def test_a_single_device_breaks_on_a_next_device(head_windows):
    with started(a_head(route=1)) as (head, _):
        head.send(Connect(NOWHERE, NOBODY, NOBODY))
        assert head.failed() == "a device that computes the whole model was given a next device"


def test_a_head_is_not_reopened(head_windows):
    with started(a_head()) as (head, _):
        head.send(a_reopen())
        assert head.failed() == "the head's ring process was given Reopen, which is a worker's"


def test_a_head_that_is_not_linked_yet_drains(head_windows):
    with started(a_head()) as (head, _):
        head.send(Drain())
        assert head.event() == Drained()


def test_a_head_with_a_vanished_next_device_obeys_its_daemon(head_windows):
    with started(a_head(step_timeout_s=1000.0), PATIENT) as (head, opened):
        head.send(Connect(NOWHERE, NOBODY, opened.key), generate(1, [1]), Report())
        head.expect(Status)
        head.close()


@pytest.mark.parametrize("opening", [opening_of_two(), a_head(step_timeout_s=1000.0)], ids=["worker", "head"])
def test_a_previous_device_that_sends_endlessly_blocks_nothing(windows, head_windows, monkeypatch, opening):
    """A loop that drained all incoming steps before computing or reading commands would never get there."""
    skip = Skip(protocol=PROTOCOL, ring=1, epoch=1, steps=[0])
    monkeypatch.setattr(Links, "receive", lambda _: skip)
    with started(opening, PATIENT) as (process, opened):
        process.send(Connect(NOWHERE, NOBODY, opened.key), Report())
        assert process.expect(Status).steps == 0


def test_a_head_reports_a_stopped_device_and_obeys_its_daemon(model, windows, head_windows):
    with started(a_head()) as (head, opened), neighbour(1) as worker:
        head.send(Connect(worker.endpoint, worker.key, worker.key))
        worker.connect(opened.endpoint, opened.key, opened.key)
        compute_step(model, windows, worker)
        head.expect(Serving)
        head.send(generate(1, [1]))
        overdue = head.expect(Overdue)
        assert overdue.step == 1
        assert 1 <= overdue.waited_s < TIMEOUT_S
        computed = head.status().steps
        again = head.late[0] if head.late else head.expect(Overdue)
        assert again.waited_s >= 2
        assert head.status().steps == computed, "a report is no step: a lost step is found by that"


def compute_step(model: FakeModel, windows: dict[int, FakeHiddenWindow], worker: Links) -> None:
    """Stand in for both workers during one step."""
    while (message := worker.receive()) is None:
        ready = [found for found, _ in zmq.zmq_poll(worker.watched(receiving=True), TIMEOUT_S * 1000)]
        assert ready, "no step came"
        if worker.zap in ready:
            worker.admit()
    worker.send(*Worker(dict(windows)).receive(*message))
    exchange(worker, worker, until=lambda: not worker.is_waiting)
