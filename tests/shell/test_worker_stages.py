"""A worker's stages: what stays loaded, what ends, and what the head is notified of when something breaks."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from halda.assignment import in_memory
from primad.daemon import loading
from primad.daemon import memory_watch as memory_watch
from primad.daemon.layer_files import Workspace
from primad.daemon.memory_watch import MemoryWatch, ram_room
from primad.daemon.node import Node
from primad.engine.protocol import WindowSource
from primad.errors import ClusterError, DiskError, ModelError, RankError, SenderError, WeightsError
from primad.gguf.layers import LayerRef, layer_digest, tree_of
from primad.gguf.windows import WindowSpec
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from primad.network.messages import (
    Broken,
    Load,
    Loaded,
    MemoryLow,
    Progress,
    StageState,
    StageStates,
    WorkerMessage,
    WorkerStatus,
)
from primad.ring.messages import (
    Connect,
    GpuLoaded,
    GpuLow,
    GroupRank,
    JoinGroup,
    Loading,
    Open,
    Opened,
    Overdue,
    RankAddress,
    Reopen,
    Sampled,
)
from primad.ring.messages import ProcessMemoryLow as RingPressed
from primad.settings.config import load_config, open_home
from primad.settings.timings import Timings, WorkerTimings
from primad.system.memory import Memory
from primad.system.tasks import in_thread
from primad.trust.identity import new_identity
from primad.trust.local_trust import LocalTrust
from primad.trust.trust import TrustStore
from primad.worker import stages
from primad.worker.stages import Stages
from tests.fakes import load as loads
from tests.fakes.layers import here
from tests.fakes.process import STATUS, FakeProcesses, FakeRingProcess
from tests.fakes.profile import PROFILE

PATIENCE_S = 180
FILES = WindowSource(window=0, metadata="window.gguf", layers=(), assignment=in_memory(0, 2), extra_buffers=False)
KEY, OTHER_KEY = new_identity().public, new_identity().public
LAYER = LayerRef("ab" * 32, 1000, ())
a_load = partial(loads.a_load, layers=(), place=1)
SOURCE = here("desk", KEY, 1)

Kind = TypeVar("Kind")


class Worker:
    """The stages of one worker, and what they reported to the head and the owner."""

    def __init__(self, home: Path, processes: FakeProcesses, keep_loaded: float, **timings: float) -> None:
        config = load_config({"home": home, "name": "lap", "keep_loaded": keep_loaded, "host": "127.0.0.1"}, {})
        open_home(config)
        self.processes = processes
        self.place = Workspace(
            cache=LayerCache(home / "layers"),
            kv=KvStore(home / "cells"),
            run=config.run,
            usage=home / "v",
            build="b",
        )
        self.reported: list[WorkerMessage] = []
        self.printed: list[str] = []
        self._news = asyncio.Condition()
        self.memory_watch = MemoryWatch(partial(ram_room, config.limits), self._memory_recovered)
        identity = new_identity()
        node = Node(
            config=config,
            workspace=self.place,
            identity=identity,
            trust=TrustStore(home, identity, LocalTrust(home / "local")),
            timings=Timings(worker=WorkerTimings(**timings)),
        )
        self.less_of_the_gpu = 0
        node.gpu_care.attend(
            lambda: PROFILE,
            report_line=self.printed.append,
            changed=self._on_gpu,
            recovered=partial(self._memory_recovered, 0),
        )
        self.parts = Stages(
            node,
            context=None,
            memory_watch=self.memory_watch,
            notify=self._notify,
            report_line=self.printed.append,
        )

    async def _memory_recovered(self, _: int) -> None:
        raise AssertionError("nobody waited for it")

    def _on_gpu(self) -> None:
        self.less_of_the_gpu += 1

    async def _notify(self, message: WorkerMessage) -> None:
        self.reported.append(message)
        async with self._news:
            self._news.notify_all()

    async def receive(self, kind: type[Kind], condition: Callable[[Kind], bool] = lambda _: True) -> Kind:
        """Wait for the first message of ``kind`` for which ``condition`` holds."""
        async with self._news:
            await self._news.wait_for(lambda: any(isinstance(m, kind) and condition(m) for m in self.reported))
        return next(m for m in self.reported if isinstance(m, kind) and condition(m))

    async def stands(self, epoch: int, condition: Callable[[StageState], bool]) -> StageState:
        """Wait for the first reported state of ``epoch`` for which ``condition`` holds."""
        await self.receive(
            StageStates, lambda reported: any(s.epoch == epoch and condition(s) for s in reported.states)
        )
        return next(state for state in self.states() if state.epoch == epoch and condition(state))

    async def loads(self, epoch: int) -> Loaded:
        loaded = (await self.stands(epoch, lambda state: state.loaded is not None)).loaded
        assert loaded is not None
        return loaded

    async def breaks(self, epoch: int = 1) -> Broken:
        broken = (await self.stands(epoch, lambda state: state.broken is not None)).broken
        assert broken is not None
        return broken

    async def serve(self, load: Load) -> FakeRingProcess:
        """Load and link ``load``; returns its ring process."""
        before = len(self.processes.all)
        await self.parts.start(load, PROFILE)
        loaded = await self.loads(load.epoch)
        (process,) = [each for each in self.processes.all if loaded.key in each.keys]
        assert loaded.port == 4000 + process.number
        await self.parts.link(load.epoch, "tcp://127.0.0.1:9", KEY, OTHER_KEY)
        await self.stands(load.epoch, lambda state: state.linked)
        assert (await process.reported(Connect)) == Connect("tcp://127.0.0.1:9", KEY, OTHER_KEY)
        assert len(self.processes.all) - before in (0, 1)
        return process

    def states(self) -> list[StageState]:
        """All states reported to the head, repeated ones included."""
        return [state for reported in self.reported if isinstance(reported, StageStates) for state in reported.states]

    def broken(self) -> set[tuple[int, Broken]]:
        """The failures reported to the head, by epoch."""
        return {(state.epoch, state.broken) for state in self.states() if state.broken is not None}


@pytest.fixture
def processes(monkeypatch) -> FakeProcesses:
    fake = FakeProcesses()
    monkeypatch.setattr(loading, "RingProcess", fake)
    monkeypatch.setattr(loading, "place_windows", lambda place, specs, *_: [FILES] * len(specs))
    monkeypatch.setattr(loading, "read_header", lambda _: None)
    return fake


@pytest.fixture
def worker(processes, tmp_path) -> Callable[..., AsyncIterator[Worker]]:
    @asynccontextmanager
    async def make(keep_loaded: float = 600, **timings: float) -> AsyncIterator[Worker]:
        async with asyncio.timeout(PATIENCE_S):
            made = Worker(tmp_path, processes, keep_loaded, **timings)
            try:
                yield made
            finally:
                await made.parts.close()
                assert not processes.alive, "a ring process was left behind"

    return make


async def test_a_stage_is_loaded_linked_and_reported(worker, processes):
    async with worker() as lap:
        process = await lap.serve(a_load(1))
        opening = await process.reported(Open)
        assert (opening.ring, opening.epoch, opening.head, opening.host) == (1, 1, None, "127.0.0.1")
        assert processes.starts[0].place == 1
        assert lap.parts.is_serving
        assert lap.printed == ["computing layers 2-3"]
        await lap.parts.release(1)
        assert not lap.parts.is_serving
        assert lap.reported[-1] == StageStates(revision=lap.parts.standing.revision, states=[])
        revisions = [reported.revision for reported in lap.reported if isinstance(reported, StageStates)]
        assert revisions == [1, 2, 3, 4], "begun, loaded, linked, over"


async def test_a_loaded_process_stays_loaded_and_serves_the_same_windows_again(worker, processes):
    """Another epoch, another head, another place in the route: nothing is loaded again."""
    async with worker() as lap:
        process = await lap.serve(a_load(1))
        await lap.parts.release(1)
        assert not process.closed
        assert await lap.serve(a_load(2, ring=9, window=4, route=7, read_ahead_bytes=5)) is process
        reopened = await process.reported(Reopen)
        assert (reopened.ring, reopened.epoch, reopened.route, reopened.windows) == (9, 2, 7, [4])
        assert reopened.read_ahead_bytes == 5
        await lap.parts.release(2)
        assert await lap.serve(a_load(3, window=2)) is process
        assert (await process.reported(Reopen)).windows == [2]
        assert len(process.keys) == len(set(process.keys)) == 3, "each opening has its own key"
        assert len(processes.all) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"first": 5},
        {"context": 128},
        {"rows": 8},
        {"width": 16},
        {"assignment": in_memory(2, 4, gpu_layers=1)},
        {"extra_buffers": True},
    ],
    ids=str,
)
async def test_a_parked_process_ends_before_other_windows_are_loaded(worker, processes, changes):
    async with worker() as lap:
        first = await lap.serve(a_load(1))
        await lap.parts.release(1)
        second = await lap.serve(a_load(2, **changes))
        assert second is not first
        assert first.closed, "both at once may not fit"
        assert processes.alive == [second]


async def test_a_parked_process_expires(worker, processes):
    async with worker(keep_loaded=0.05) as lap:
        process = await lap.serve(a_load(1))
        await lap.parts.release(1)
        await process.ended()


async def test_a_parked_process_that_serves_again_does_not_expire(worker, monkeypatch):
    async with worker(keep_loaded=PATIENCE_S / 4) as lap:
        process = await lap.serve(a_load(1))
        await lap.parts.release(1)
        assert await lap.serve(a_load(2)) is process
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + PATIENCE_S / 3)  # a parked process would have expired
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.ended(), 0.2)


async def test_no_process_is_parked_if_the_owner_forbids_it(worker):
    async with worker(keep_loaded=0) as lap:
        process = await lap.serve(a_load(1))
        await lap.parts.release(1)
        await process.ended()


async def test_a_parked_process_ends_even_if_nobody_awaits_its_end(worker):
    """This happens when the daemon ends while its owner's pause takes effect."""
    async with worker() as lap:
        process = await lap.serve(a_load(1))
        await lap.parts.release(1)
        started, may_end, close = asyncio.Event(), asyncio.Event(), process.close

        async def close_slowly() -> None:
            started.set()
            await may_end.wait()
            await close()

        process.close = close_slowly
        unloading = asyncio.create_task(lap.parts.unload())
        await started.wait()
        unloading.cancel()
        await asyncio.wait([unloading])
        may_end.set()


async def test_two_epochs_run_side_by_side_and_the_latest_to_end_stays_parked(worker, processes):
    async with worker() as lap:
        first = await lap.serve(a_load(1))
        second = await lap.serve(a_load(2, first=5))
        assert processes.alive == [first, second]
        assert (first.closed, second.closed) == (False, False)
        await lap.parts.release(1)
        assert lap.parts.is_serving
        await lap.parts.release(2)
        await first.ended()
        assert processes.alive == [second], "the latest is the likeliest to be requested"


async def test_the_same_windows_in_the_shadow_are_a_second_process(worker, processes):
    """A serving ring process cannot be reopened."""
    async with worker() as lap:
        first, second = await lap.serve(a_load(1)), await lap.serve(a_load(2))
        assert first is not second


async def test_a_ring_process_that_dies_while_serving_is_a_ring_fault_and_is_not_parked(worker, processes):
    async with worker() as lap:
        process = await lap.serve(a_load(1))
        process.die("the ring process was ended by SIGABRT: llama.cpp said something")
        broken = await lap.breaks()
        assert broken.fault == "ring"
        assert broken.error == "the ring process was ended by SIGABRT: llama.cpp said something"
        await process.ended()
        second = await lap.serve(a_load(2))
        assert second is not process
        assert len(lap.broken()) == 1


async def test_a_ring_process_that_dies_while_parked_is_not_used_again(worker):
    async with worker() as lap:
        process = await lap.serve(a_load(1))
        await lap.parts.release(1)
        process.die()
        second = await lap.serve(a_load(2))
        assert second is not process
        assert process.closed
        assert lap.broken() == set(), "nobody used it"


async def test_a_ring_process_that_dies_while_loading_is_a_load_fault(worker, processes):
    async with worker() as lap:
        processes.holds_back = True
        await lap.parts.start(a_load(1), PROFILE)
        process = await processes.started(1)
        process.report_line(Loading(1))
        assert (await lap.receive(Progress)).phase == "load"
        process.die("no memory")
        assert (await lap.breaks()).fault == "load"
        await process.ended()


async def test_a_stage_released_while_loading_leaves_nothing(worker, processes):
    async with worker() as lap:
        processes.holds_back = True
        await lap.parts.start(a_load(1), PROFILE)
        process = await processes.started(1)
        await process.reported(Open)
        await lap.parts.release(1)
        await process.ended()
        assert lap.broken() == set()


async def test_a_stage_released_while_its_files_are_placed_leaves_no_files(worker, monkeypatch):
    placing, placed = threading.Event(), threading.Event()

    def place(place: Workspace, specs: list[WindowSpec], *_: object) -> list[WindowSource]:
        placing.set()
        assert placed.wait(PATIENCE_S)
        (place.run / "window-1-1.gguf").write_bytes(b"")
        return [FILES] * len(specs)

    monkeypatch.setattr(loading, "place_windows", place)
    async with worker() as lap:
        await lap.parts.start(a_load(1), PROFILE)
        assert await asyncio.to_thread(placing.wait, PATIENCE_S)
        releasing = asyncio.create_task(lap.parts.release(1))
        await asyncio.sleep(0)
        placed.set()
        await releasing
        assert list(lap.place.run.iterdir()) == []


async def test_the_release_of_a_stage_does_not_wait_for_its_disk_work(worker, processes, monkeypatch):
    """A waiting worker would not hear its head, and be taken for gone."""
    reading, read = threading.Event(), threading.Event()

    def look() -> None:
        reading.set()
        assert read.wait(PATIENCE_S)

    async def missing(*_: object) -> list[LayerRef]:
        await in_thread(look)
        return []

    monkeypatch.setattr(loading, "missing_layers", missing)
    async with worker(release_timeout_s=0.01) as lap:
        await lap.parts.start(a_load(1), PROFILE)
        assert await asyncio.to_thread(reading.wait, PATIENCE_S)
        await lap.parts.release(1)
        assert not lap.parts.is_serving
        assert not read.is_set()
        read.set()
        await lap.parts.close()
        assert processes.all == []


async def test_events_of_a_past_epoch_do_not_affect_the_next(worker, processes):
    """It was on its way when the process was asked to reopen."""
    async with worker() as lap:
        process = await lap.serve(a_load(1))
        await lap.parts.release(1)
        process.holds_back = True
        await lap.parts.start(a_load(2), PROFILE)
        await process.reported(Reopen)
        process.report_line(Overdue(step=3, waited_s=10.0))
        process.report_line(STATUS)
        process.report_line(Opened("tcp://127.0.0.1:4000", KEY))
        assert (await lap.loads(2)).key == KEY
        assert lap.broken() == set()
        assert processes.all == [process]


async def test_an_internal_error_is_reported_to_the_head(worker, monkeypatch):
    def place(*_: object) -> list[WindowSource]:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(loading, "place_windows", place)
    async with worker() as lap:
        await lap.parts.start(a_load(1), PROFILE)
        broken = await lap.breaks()
        assert broken.error == "internal error: RuntimeError: dictionary changed size during iteration"
        assert broken.fault == "load"


@pytest.mark.parametrize(
    ("error", "fault"),
    [(DiskError("the disk is full"), "disk"), (ClusterError("desk gives no layers"), "fetch")],
    ids=["disk full", "no source"],
)
async def test_layers_that_do_not_arrive_are_reported_with_the_kind_of_fault(
    worker, processes, monkeypatch, error, fault
):
    async def fetch(*_: object, **__: object) -> None:
        raise error

    async def missing(*_: object) -> list[LayerRef]:
        return [LAYER]

    monkeypatch.setattr(stages, "fetch_layers", fetch)
    monkeypatch.setattr(loading, "missing_layers", missing)
    async with worker() as lap:
        await lap.parts.start(a_load(1, sources=[SOURCE]), PROFILE)
        broken = await lap.breaks()
        assert (broken.fault, broken.error) == (fault, str(error))
        assert processes.all == []


async def test_layers_that_nobody_has_are_an_error(worker, monkeypatch):
    async def missing(*_: object) -> list[LayerRef]:
        return [LAYER]

    monkeypatch.setattr(loading, "missing_layers", missing)
    async with worker() as lap:
        await lap.parts.start(a_load(1), PROFILE)
        broken = await lap.breaks()
        assert (broken.fault, broken.error) == (
            "fetch",
            f"layer {LAYER.digest[:12]} cannot be fetched: no device was named that has it",
        )


async def test_progress_of_fetching_is_reported(worker, monkeypatch):
    async def fetch(transfers, sources, refs, cache, arrived) -> None:
        assert sources == [SOURCE]
        arrived(400)
        arrived(600)

    async def missing(*_: object) -> list[LayerRef]:
        return [LAYER]

    monkeypatch.setattr(stages, "fetch_layers", fetch)
    monkeypatch.setattr(loading, "missing_layers", missing)
    async with worker() as lap:
        await lap.serve(a_load(1, sources=[SOURCE]))
        progress = await lap.receive(Progress, lambda each: each.done == each.total)
        assert (progress.phase, progress.total) == ("fetch", 1000)


WEIGHTS = b"weights" * 100


def put_layer(place: Workspace) -> LayerRef:
    """Put a whole layer into the cache."""
    ref = LayerRef(layer_digest(len(WEIGHTS), tree_of([WEIGHTS])), len(WEIGHTS), ())
    with place.cache.part(ref) as part:
        part.begin(tree_of([WEIGHTS]))
        part.write(0, WEIGHTS)
        place.cache.finish(part)
    return ref


def spoil(place: Workspace, ref: LayerRef) -> None:
    path = place.cache.path(ref.digest)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(path, ns=(1, 1))  # even if the file system's clock is coarse


def of_layer(epoch: int, ref: LayerRef) -> Load:
    return a_load(epoch, last=3, layers=(ref,), sources=[SOURCE])


async def test_a_layer_that_changes_while_it_is_loaded_never_serves(worker, processes):
    async with worker() as lap:
        ref = put_layer(lap.place)
        processes.holds_back = True
        await lap.parts.start(of_layer(1, ref), PROFILE)
        process = await processes.started(1)
        await process.reported(Open)
        spoil(lap.place, ref)
        process.report_line(Opened("tcp://127.0.0.1:4000", KEY))
        broken = await lap.breaks()
        assert (broken.fault, broken.error) == (
            "load",
            f"layer {ref.digest[:12]} changed on the disk while it was loaded; it will be fetched again",
        )
        await process.ended()
        assert not lap.place.cache.has(ref), "what is spoilt is removed, so that the next try fetches it"
        assert not any(state.loaded for state in lap.states())


async def test_a_parked_process_with_damaged_files_is_loaded_again(worker, processes, monkeypatch):
    async def fetch(*_: object, **__: object) -> None:
        put_layer(places[0])

    monkeypatch.setattr(stages, "fetch_layers", fetch)
    places: list[Workspace] = []
    async with worker() as lap:
        places.append(lap.place)
        ref = put_layer(lap.place)
        first = await lap.serve(of_layer(1, ref))
        await lap.parts.release(1)
        spoil(lap.place, ref)
        second = await lap.serve(of_layer(2, ref))
        assert second is not first
        assert first.closed


def unreadable(file: str | None, why: str = "weights cannot be read: Input/output error") -> WeightsError:
    return WeightsError(f"{file}: {why}", file) if file else WeightsError("SIGBUS", None)


async def break_with(lap: Worker, epoch: int, load: Load, error: WeightsError) -> Broken:
    process = await lap.serve(load)
    process.die(error)
    broken = await lap.breaks(epoch)
    await process.ended()
    await lap.parts.release(epoch)
    return broken


@pytest.mark.parametrize("is_named", [True, False])
async def test_unreadable_weights_are_checked_before_they_are_loaded_again(worker, processes, monkeypatch, is_named):
    fetched: list[LayerRef] = []
    async with worker() as lap:

        async def fetch(*args: object, **_: object) -> None:
            fetched.extend(args[2])
            put_layer(lap.place)

        monkeypatch.setattr(stages, "fetch_layers", fetch)
        ref = put_layer(lap.place)
        path = lap.place.cache.path(ref.digest)
        error = unreadable(str(path) if is_named else None)
        status = path.stat()
        process = await lap.serve(of_layer(1, ref))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # only reading the content shows it
        process.die(error)
        broken = await lap.breaks()
        assert (broken.fault, broken.error) == ("ring", str(error))
        await process.ended()
        await lap.serve(of_layer(2, ref))
        assert fetched == [ref]


async def test_a_truncated_file_is_named_even_if_the_process_could_not(worker):
    async with worker() as lap:
        ref = put_layer(lap.place)
        path = lap.place.cache.path(ref.digest)
        process = await lap.serve(of_layer(1, ref))
        os.truncate(path, 10)
        process.die(unreadable(None))
        assert (await lap.breaks()).error == f"SIGBUS: {path}"


async def test_a_disk_that_fails_twice_at_one_file_is_at_fault(worker):
    async with worker() as lap:
        faults = [(await break_with(lap, epoch, a_load(epoch), unreadable("a"))).fault for epoch in (1, 2, 3)]
        assert faults == ["ring", "disk", "disk"]


async def test_a_disk_that_fails_at_several_files_in_turn_is_at_fault(worker):
    async with worker() as lap:
        errors = [unreadable(name) for name in "abcd"]
        faults = [
            (await break_with(lap, epoch, a_load(epoch), error)).fault for epoch, error in enumerate(errors, start=1)
        ]
        assert faults == ["ring", "ring", "disk", "disk"]


async def test_a_disk_that_failed_long_ago_is_forgiven(worker):
    async with worker(forgiven_s=0.0) as lap:
        faults = [(await break_with(lap, epoch, a_load(epoch), unreadable("a"))).fault for epoch in (1, 2, 3)]
        assert faults == ["ring", "ring", "ring"]


async def test_invalid_metadata_never_reaches_llama_cpp(worker, processes, monkeypatch):
    def read(_: Path) -> None:
        raise ModelError("window.gguf: is not a GGUF file")

    monkeypatch.setattr(loading, "read_header", read)
    async with worker() as lap:
        await lap.parts.start(a_load(1), PROFILE)
        assert (await lap.breaks()).fault == "load"
        assert processes.all == []


async def test_a_status_is_forwarded_with_the_daemons_own_memory(worker):
    async with worker() as lap:
        await lap.serve(a_load(1))
        await lap.parts.report()
        status = await lap.receive(WorkerStatus)
        assert (status.epoch, status.status) == (1, STATUS)
        assert status.daemon_rss_bytes > 1 << 20


async def test_a_lack_of_memory_is_reported_with_the_memory_for_the_next_plan(worker, monkeypatch):
    """The room next to the ring process, which continues until the next one is loaded."""
    async with worker() as lap:
        process = await lap.serve(a_load(1))
        monkeypatch.setattr(memory_watch, "children", lambda: [process.pid])
        found = {(process.pid,): (Memory(8 << 30, 400 << 20), 300 << 20)}
        monkeypatch.setattr(memory_watch, "memory", lambda ours: found[tuple(ours)][0])
        monkeypatch.setattr(memory_watch, "held_bytes", lambda pids: found[tuple(pids)][1])
        process.report_line(RingPressed(50 << 20))
        assert await lap.receive(MemoryLow) == MemoryLow(epoch=1, needed_bytes=50 << 20, ram_available_bytes=100 << 20)
        await lap.parts.report()
        assert await lap.receive(WorkerStatus), "the stage continues"
        assert lap.broken() == set()
        await lap.parts.release(1)
        await process.ended()  # parked processes use memory as well


async def test_layers_on_a_gpu_whose_memory_others_need_are_released_at_once_without_fault(worker):
    async with worker() as lap:
        process = await lap.serve(a_load(1, assignment=in_memory(2, 4, gpu_layers=2)))
        process.report_line(GpuLoaded(layers=2, planned=2, held_bytes=1 << 30, why=""))
        process.report_line(GpuLow(free_bytes=0, needed_bytes=256 << 20))
        broken = await lap.breaks()
        assert (broken.fault, broken.again) == ("ring", True)
        assert "other programs need memory of the GPU, 256 MiB more than is free" in broken.error
        assert lap.less_of_the_gpu == 1
        await process.ended()  # it is not parked


async def test_a_ring_process_is_not_parked_while_another_lacks_its_gpu_memory(worker):
    async with worker() as lap:
        on_gpu = in_memory(2, 4, gpu_layers=2)
        before = await lap.serve(a_load(1, assignment=on_gpu))
        before.report_line(GpuLoaded(layers=2, planned=2, held_bytes=1 << 30, why=""))
        after = await lap.serve(a_load(2, assignment=on_gpu))
        after.report_line(GpuLoaded(layers=1, planned=2, held_bytes=1 << 29, why="out of memory"))
        after.report_line(STATUS)
        await lap.receive(WorkerStatus, lambda status: status.epoch == 2)
        assert (lap.less_of_the_gpu, lap.printed[2:]) == (0, []), "plans are as they were"
        await lap.parts.release(1)
        await before.ended()
        broken = await lap.breaks(2)
        assert broken.again
        assert "the GPU has room" in broken.error


async def test_an_invalid_step_is_reported_as_the_fault_of_the_previous_device(worker):
    async with worker() as lap:
        process = await lap.serve(a_load(1))
        process.die(SenderError("the device before this one sent NaN"))
        broken = await lap.breaks()
        assert broken == Broken(error="the device before this one sent NaN", fault="ring", sender=True)


async def test_a_device_of_a_group_joins_once_names_the_failed_rank_and_parks_no_share(worker, processes):
    group, addresses = GroupRank(rank=1, devices=["desk", "lap"], key=bytes(32)), [RankAddress("192.0.2.1", 7000)]
    async with worker() as lap:
        await lap.parts.start(a_load(1, window=0, route=1, group=group), PROFILE)
        await lap.loads(1)
        for _ in range(2):
            await lap.parts.join(1, addresses)
        (process,) = processes.all
        assert (await process.reported(Open)).group == group
        assert await process.reported(JoinGroup) == JoinGroup(addresses)
        assert [type(command) for command in process.commands].count(JoinGroup) == 1
        assert "computing a share of layers 2-3" in lap.printed
        process.die(RankError("desk of this group is late", "desk"))
        assert await lap.breaks() == Broken(error="desk of this group is late", fault="ring", rank="desk")
        await lap.parts.release(1)
        await lap.parts.start(a_load(2, window=0, route=1, group=group), PROFILE)
        await lap.loads(2)
        await lap.parts.release(2)
        assert not processes.alive


@pytest.mark.parametrize(
    ("event", "fault", "error"),
    [
        (Overdue(step=5, waited_s=12.4), "next", "the next device accepted no step for 12 s; it is gone or hangs"),
        (Sampled(request=1, token=1, logprob=None, top=()), "ring", "the ring process of a worker sent Sampled"),
    ],
    ids=["a step that nobody takes", "nonsense"],
)
async def test_a_ring_that_cannot_continue_is_reported_once(worker, event, fault, error):
    async with worker() as lap:
        process = await lap.serve(a_load(1))
        process.report_line(event)
        process.report_line(event)
        broken = await lap.breaks()
        assert (broken.fault, broken.error) == (fault, error)
        await lap.parts.release(1)
        assert len(lap.broken()) == 1


async def test_a_repeated_load_or_link_changes_nothing(worker):
    async with worker() as lap:
        process = await lap.serve(a_load(1))
        reports, revision = len(lap.reported), lap.parts.standing.revision
        await lap.parts.start(a_load(1), PROFILE)
        await lap.parts.link(1, "tcp://127.0.0.1:9", KEY, OTHER_KEY)
        assert (len(lap.reported), lap.parts.standing.revision) == (reports, revision)
        assert lap.parts.is_serving
        assert [type(command) for command in process.commands].count(Connect) == 1


async def test_commands_for_an_unknown_epoch_are_ignored(worker):
    async with worker() as lap:
        await lap.parts.release(5)
        await lap.parts.link(5, "tcp://127.0.0.1:9", KEY, OTHER_KEY)
        await lap.parts.unload()
        await lap.parts.report()
        assert lap.reported == []


async def test_the_threads_are_those_that_the_profile_found_best(worker, processes):
    cpu = dataclasses.replace(PROFILE.cpu, cores=8, threads=3, batch_threads=7)
    async with worker() as lap:
        await lap.parts.start(a_load(1), dataclasses.replace(PROFILE, cpu=cpu))
        process = await processes.started(1)
        options = (await process.reported(Open)).options
        assert (options.threads, options.batch_threads) == (3, 7)
        assert processes.starts[0].threads == 7, "the process has room for the larger team"
