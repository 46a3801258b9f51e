"""Forms one ring for one plan and maintains it: the workers' stages, the head's own ring process, the links between
them.

A ``HeadRing`` is formed (``form``), given work (``send``), told to finish its steps before another ring takes over
(``drain``) and closed. Two may exist at a time: one serves while the next is formed. However it ends, its listener is
told once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
import psutil

from halda import DeviceProfile, Plan, Prediction
from primad.api.http.status import CompletionFigures
from primad.daemon.layer_files import distrust, release_files
from primad.daemon.loaded_process import LoadedProcess
from primad.errors import (
    ClusterError,
    LateStepError,
    NextDeviceError,
    PrimadError,
    RankError,
    RingError,
    WeightsError,
)
from primad.head.members.core import RankLostError, StageError, StuckStepError, attributed, workers_of
from primad.head.members.stage import Stage
from primad.head.members.worker_link import WorkerLink
from primad.head.rings.drafting import RemoteDrafter
from primad.head.rings.load_own import load_own
from primad.head.rings.loads import learn_downloaded, loads_of
from primad.head.rings.ring_inputs import RingInputs
from primad.head.rings.routes import RingAddresses
from primad.head.rings.status import Costs, device_status, link_status, plan_lines, predicted_status
from primad.membership.types import LoadStage
from primad.network.contacts import Contact
from primad.network.messages import Load, Loaded, Progress
from primad.network.sockets import endpoint, port_of
from primad.ring.messages import (
    Cancel,
    Connect,
    Drain,
    Drained,
    Finished,
    Generate,
    JoinGroup,
    KvBegun,
    KvForgotten,
    KvKept,
    Loading,
    Opened,
    Overdue,
    ProcessMemoryLow,
    PromptProgress,
    RankAddress,
    Report,
    RequestDrafts,
    RingCommand,
    RingEvent,
    Sampled,
    Serving,
    Status,
)
from primad.system.tasks import mistake, resolve

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S: Final = 3600.0
LOST_S: Final = 4.0
"""A step that is overdue this long, without progress since the last check, is lost."""
GROUP_LOST_S: Final = 2 * LOST_S
"""A first rank of a group that does not reply, and has named no other rank by then, counts as hanging itself."""
FIRST_STEP_SHARE: Final = 0.25
"""A process at its first step may be silent for this share of the step's timeout: it may have to read all its
layers."""
LINK_TIMEOUT_S: Final = 30.0
"""Timeout for the last status of a worker before it connects to the next device."""
STAGES: Final = {"fetch": LoadStage.FETCH, "load": LoadStage.LOAD}
DRAIN_TIMEOUT_S: Final = 10.0
REASON_S: Final = 1.0
"""A device of a group whose connections end reports the reason within this time, if at all."""
OWN_S: Final = 2 * REASON_S


@dataclass(frozen=True, slots=True)
class _DeviceReport:
    """A device's report; no ``status`` if its ring process did not reply in time.

    A ring process replies between two steps: a silent one that ``computes`` has open requests, and need not be gone.
    """

    status: Status | None = None
    daemon_rss_bytes: int = 0
    computes: bool = False


class HeadRing:
    """One ring."""

    def __init__(self, inputs: RingInputs) -> None:
        self._inputs = inputs
        self._ring_addresses = RingAddresses(inputs)
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers: dict[str, Stage] = {}
        self._process: LoadedProcess | None = None
        self._closed = False
        loop = asyncio.get_running_loop()
        self._own: asyncio.Future[Opened] = loop.create_future()
        self._serving: asyncio.Future[None] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()
        self._broken: asyncio.Future[PrimadError] = loop.create_future()
        self._status: asyncio.Queue[Status] = asyncio.Queue(8)
        self._open_requests: set[int] = set()
        self._costs: dict[str, Costs] = {}
        self._latest: dict[str, Status | None] = {}
        self.measured: CompletionFigures | None = None
        """The times of its latest response that was long enough, as the learner reported them."""
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        self._finding_fault: asyncio.Task[None] | None = None
        self._looked: tuple[int, int] | None = None
        self._parties: Sequence[str] = ()
        self._own_keeps = False
        self._remote_drafter: RemoteDrafter | None = None

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return self._inputs.forecast.plan

    @property
    def prediction(self) -> Prediction | None:
        """The plan's forecast."""
        return self._inputs.forecast.prediction

    @property
    def epoch(self) -> int:
        """The plan's number."""
        return self._inputs.epoch

    @property
    def keeps(self) -> bool:
        """Whether every device of the ring saves KV cache."""
        return self._own_keeps and all(stage.keeps for stage in self._workers.values())

    @property
    def profiles(self) -> dict[str, DeviceProfile]:
        """Profiles of its devices when it was formed."""
        workers = {name: worker.profile for name, worker in self._inputs.devices.workers.items()}
        return {self.plan.head: self._inputs.profile} | workers

    async def sources(self) -> dict[str, list[Contact]]:
        """Return, for each device of the ring, sources for what it lacks. An unreachable one has no entry."""
        found = {self.plan.head: self._ring_addresses.own_sources()}
        for name, worker in self._inputs.devices.workers.items():
            try:
                found[name] = await self._ring_addresses.sources(worker)
            except StageError as exc:
                logger.info("%s gets no sources: %s", name, exc)
        return found

    async def sources_for(self, worker: WorkerLink) -> list[Contact]:
        """Return sources of layers for ``worker``, of the ring or not. Raises ``StageError``."""
        return await self._ring_addresses.sources(worker)

    @property
    def broken_by(self) -> PrimadError | None:
        """The error that ended it, if any."""
        return self._broken.result() if self._broken.done() else None

    async def form(self) -> None:
        """Have every device load its windows, link the devices and run a warm-up pass.

        Raises the ``PrimadError`` of a failure; call ``close`` in any case.
        """
        forming = asyncio.create_task(self._form())
        try:
            await _first_of(forming, self._broken)
        finally:
            if not forming.done():
                forming.cancel()
                await asyncio.wait([forming])
            error = None if forming.cancelled() else forming.exception()  # asyncio logs unretrieved exceptions
        if error is not None:
            raise error
        if self._broken.done():
            raise self._broken.result()

    async def _form(self) -> None:
        loads = await loads_of(self._inputs, self._ring_addresses)
        own_load = loads[self.plan.head]
        for name, worker in self._inputs.devices.workers.items():
            stage = Stage(worker, loads[name], self._on_progress)
            stage.loaded.add_done_callback(partial(self._loaded, name))
            self._workers[name] = stage
            self._start(self._watch(stage))
            await stage.load()
        self._process = await load_own(
            self._inputs, own_load, self._ring_addresses.own_sources(), self._on_own_progress
        )
        self._start(self._attend_own(self._process, own_load))
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            own = await self._own
            loaded = {name: await stage.loaded for name, stage in self._workers.items()}
            learn_downloaded(self._inputs.service.model.ranged, self._workers)
            await self._link(own, loaded)
            await self._serving
        find, device = self._inputs.devices.draft_device, self._inputs.forecast.draft_device
        if find is not None and device is not None:
            self._remote_drafter = RemoteDrafter(self._inputs, device, find, self._ring_addresses, self.send)
            self._start(self._remote_drafter.run())

    async def send(self, *commands: RingCommand) -> None:
        """Send commands to the head's ring process; they are dropped if the ring is broken."""
        assert self._process is not None
        for command in commands:
            if isinstance(command, Generate):
                self._open_requests.add(command.request)
            elif isinstance(command, Cancel):
                self._open_requests.discard(command.request)
        sending = asyncio.create_task(self._process.send(*commands))
        try:
            await _first_of(sending, self._broken)
            if sending.done():
                await sending
        finally:
            sending.cancel()

    async def drain(self) -> None:
        """Start no further step and wait until those in flight are back, or the ring breaks."""
        await self.send(Drain())
        await _first_of(self._drained, self._broken, timeout_s=DRAIN_TIMEOUT_S)

    async def close(self) -> None:
        """Release the workers and end the head's ring process."""
        await self._close(unload=False)

    async def unload(self) -> None:
        """As ``close``, but also unload everything from workers, and wait until they have confirmed it."""
        await self._close(unload=True)

    async def _close(self, *, unload: bool) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._asking is not None:
            self._asking.cancel()
        if self._remote_drafter is not None:
            await self._remote_drafter.release()
        stages = self._workers.values()
        await asyncio.gather(*(stage.unload() if unload else stage.release() for stage in stages))
        self._inputs.node.workspace.kv.expect((), of=self.epoch)
        if self._process is not None:
            await self._process.close()
        else:
            release_files(self._inputs.node.workspace, self.epoch)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, PrimadError):
            self._break(error)
        elif error is not None:
            logger.error("a task of the ring failed", exc_info=error)
            self._break(RingError(mistake(error)))

    def _break(self, error: PrimadError) -> None:
        if self._closed or self._broken.done():
            return
        self._broken.set_result(error)
        self._inputs.listener.broken(attributed(error, self.plan, self.epoch))

    async def _watch(self, stage: Stage) -> None:
        error = await stage.broken
        if isinstance(error, RankLostError) and error.rank == self.plan.head:
            # The head's own process ends as well, and says more.
            await _first_of(self._broken, timeout_s=OWN_S)
        raise await self._cause(error.rank, error, stage.name) if isinstance(error, RankLostError) else error

    def describe(self) -> list[str]:
        """Return one line per device about its layers."""
        forecast = self._inputs.forecast
        return plan_lines(self.plan, forecast.assignments, forecast.prediction)

    async def status(self) -> dict[str, Any]:
        """Return state and counters of every device, as plain data; a device that does not reply in time has no
        figures.

        Takes at most ``status_timeout_s``. Concurrent calls share one query.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        asking = self._asking
        await asyncio.wait([asking])  # a cancelled caller leaves the query to the others
        return {} if asking.cancelled() else asking.result()

    async def statuses(self) -> Mapping[str, Status | None]:
        """Return the current report of every device's ring process; None for one that does not reply in time."""
        await self.status()
        return self._latest

    async def _ask_all(self) -> dict[str, Any]:
        names = self.plan.devices
        replies = await asyncio.gather(*(self._ask(name) for name in names))
        self._latest = {name: report.status for name, report in zip(names, replies, strict=True)}
        devices = []
        for name, report in zip(names, replies, strict=True):
            status = report.status
            costs = self._costs.get(name, Costs())
            if status is not None:
                costs = self._costs[name] = costs.after(
                    status, len(self.plan.windows_of(name)), asyncio.get_running_loop().time()
                )
            devices.append(
                device_status(
                    self.plan,
                    self.prediction,
                    self._inputs.forecast.assignments[name],
                    name,
                    status,
                    costs,
                    daemon_rss_bytes=report.daemon_rss_bytes,
                    computes=report.computes,
                )
            )
        head = self._latest[self.plan.head]
        return {
            "epoch": self.epoch,
            "rounds": self.plan.rounds,
            "sequences": self._inputs.forecast.sequences,
            "predicted": None if self.prediction is None else msgspec.to_builtins(predicted_status(self.prediction)),
            "measured": None if self.measured is None else msgspec.to_builtins(self.measured),
            "devices": msgspec.to_builtins(devices),
            "drafts": None
            if head is None or head.drafts is None
            else msgspec.to_builtins(head.drafts) | {"model_on": self._draft_device()},
            "links": [msgspec.to_builtins(link_status(link)) for link in self._inputs.devices.links.between(names)],
        }

    def _draft_device(self) -> str | None:
        """The device on which the draft model runs, or None."""
        if self._inputs.draft is None:
            return None
        return self.plan.head if self._remote_drafter is None else self._remote_drafter.place

    async def _ask(self, name: str) -> _DeviceReport:
        """Return the report of the ring process of ``name``, and the daemon's memory there."""
        timeout_s = self._inputs.node.timings.head.status_timeout_s
        if name in self._workers:
            return await self._worker_status(name, timeout_s)
        status = await self._own_status(timeout_s)
        computes = status is None and bool(self._open_requests)
        return _DeviceReport(status, psutil.Process().memory_info().rss, computes)

    async def _own_status(self, timeout_s: float) -> Status | None:
        while not self._status.empty():  # a reply that was late for an earlier query
            self._status.get_nowait()
        try:
            async with asyncio.timeout(timeout_s):
                await self.send(Report())
                return await self._status.get()
        except TimeoutError:
            return None

    async def _worker_status(self, name: str, timeout_s: float) -> _DeviceReport:
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._workers[name].wait_status()
        except TimeoutError:
            return _DeviceReport(computes=bool(self._open_requests))
        except ClusterError:
            return _DeviceReport()
        return _DeviceReport() if reply is None else _DeviceReport(reply.status, reply.daemon_rss_bytes)

    async def _attend_own(self, process: LoadedProcess, load: Load) -> None:
        try:
            await process.listen(lambda event: self._hear(event, len(load.windows)))
        except WeightsError as exc:
            if not any(plan.spec.layers for plan in load.windows) and exc.file is None:  # then there is only one file
                path = str(self._inputs.service.model.header.path)
                raise WeightsError(f"{exc}: {path}", path) from exc
            # The next ring cuts the damaged layers out of the model again.
            refs = (ref for plan in load.windows for ref in plan.spec.files)
            raise distrust(self._inputs.node.workspace.cache, exc, refs) from exc
        except NextDeviceError as exc:
            raise StageError(f"{self.plan.head}: {exc}", self.plan.head, "next") from exc
        except LateStepError as exc:
            raise StuckStepError(str(exc), self._parties) from exc
        except RankError as exc:
            raise await self._cause(exc.device, exc, self.plan.head) from exc

    def _hear(self, event: RingEvent, windows: int) -> None:
        """Handle a message of the head's ring process. Raises ``RingError`` for an invalid one."""
        match event:
            case Sampled() | PromptProgress() | Finished():
                if isinstance(event, Finished):
                    self._open_requests.discard(event.request)
                self._inputs.listener.deliver(self.epoch, event)
            case Loading(done):
                self._inputs.reporter.progress(self.plan.head, "load", done, windows)
            case Opened():
                self._inputs.node.workspace.kv.expect(event.cells, of=self.epoch)
                self._own_keeps = event.keeps
                resolve(self._own, event)
            case RequestDrafts(task):
                if self._remote_drafter is not None:
                    self._remote_drafter.ask(task)
            case KvBegun() | KvKept() | KvForgotten():
                self._inputs.listener.kv_changed(self.epoch, event)
            case Serving():
                resolve(self._serving, None)
            case Drained():
                resolve(self._drained, None)
            case Overdue():
                self._look_for_fault(event)
            case ProcessMemoryLow(needed_bytes):
                logger.info("epoch %d: the head is short of %d bytes of memory", self.epoch, needed_bytes)
                self._inputs.listener.memory_low(needed_bytes)
            case Status():
                if self._status.full():
                    self._status.get_nowait()
                self._status.put_nowait(event)
            case _:
                raise RingError(f"the head's ring process sent {type(event).__name__}")

    def _look_for_fault(self, overdue: Overdue) -> None:
        logger.info("epoch %d: step %d has been in flight for %.1f s", self.epoch, overdue.step, overdue.waited_s)
        self._inputs.listener.overdue(self.epoch, overdue.waited_s)
        if self._finding_fault is None or self._finding_fault.done():
            self._finding_fault = self._start(self._find_fault(overdue))

    async def _find_fault(self, overdue: Overdue) -> None:
        """Find the device at fault for a late step. A worker whose ring process does not reply hangs; one that replies
        is slow.

        Raises ``StageError`` for a worker that hangs, unless it may be at its first step, whose duration is unknown. If
        all reply, the step is between the last worker that passed it on and the first one that did not have it. Raises
        ``StuckStepError`` if it made no progress since the last check.
        """
        names = workers_of(self.plan)
        timeout_s = self._inputs.node.timings.head.overdue_timeout_s
        replies = await asyncio.gather(*(self._worker_status(name, timeout_s) for name in names))
        silent = [name for name, report in zip(names, replies, strict=True) if report.status is None]
        waited_s = overdue.waited_s + timeout_s * bool(silent)
        if silent:
            self._parties, self._looked = silent[:1], None
            if self.plan.group_of(silent[0]) and waited_s < GROUP_LOST_S:
                return  # it may wait for another rank of its group, and report that
            if overdue.is_first and waited_s < FIRST_STEP_SHARE * self._inputs.service.options.step_timeout_s:
                return
            reason = f"{silent[0]}: its ring process hangs; a step has been in flight for {waited_s:.1f} s"
            raise StageError(reason, silent[0], "ring")
        if (
            await self._own_status(timeout_s) is None
        ):  # it computes another step, and may not have looked at what arrived
            self._looked = None
            return
        had = [report.status is not None and report.status.steps > overdue.ring_passes for report in replies]
        place = had.index(False) if False in had else len(names)
        before, self._looked = self._looked, (overdue.step, place)
        self._parties = names[max(0, place - 1) : place + 1]
        if waited_s >= LOST_S and before is not None and before[0] == overdue.step and place <= before[1]:
            raise StuckStepError(_lost(overdue, [self.plan.head, *names, self.plan.head][place:][:2]), self._parties)

    async def _link(self, own: Opened, loaded: Mapping[str, Loaded]) -> None:
        """Connect each device with the next and the previous one in the ring, and the devices of a group with each
        other."""
        if not self._workers:
            return
        assert self._process is not None
        head, places = self.plan.head, self.plan.places
        for ranks in self.plan.groups:
            await self._join([rank.device for rank in ranks], own, loaded)
        if self.plan.group_of(head):
            await self._process.send(JoinGroup([]))
        if len(places) == 1:
            return
        keys = {name: each.key for name, each in loaded.items()} | {head: own.key}
        before = {self.plan.after(name): name for name in places}
        for name in places[1:]:
            following = self.plan.after(name)
            if following == head:
                address = endpoint(
                    await self._ring_addresses.to_head(self._inputs.devices.workers[name]), port_of(own.endpoint)
                )
            else:
                address = endpoint(self._ring_addresses.host_for(name, following), loaded[following].port)
            await self._workers[name].connect(address, keys[following], keys[before[name]])
        first = self.plan.after(head)
        way = endpoint(await self._ring_addresses.to_first(self._inputs.devices.workers[first]), loaded[first].port)
        await self._process.send(Connect(way, keys[first], keys[before[head]]))
        for name in places[1:]:
            linked = self._workers[name].linked
            await _first_of(linked, timeout_s=LINK_TIMEOUT_S)
            if not linked.done():
                raise StageError(f"{name}: it does not connect to the next device", name, "load")

    async def _join(self, names: Sequence[str], own: Opened, loaded: Mapping[str, Loaded]) -> None:
        """Have the devices of a group connect, each to the ranks before it."""
        for rank, name in enumerate(names[1:], 1):
            addresses = [await self._rank_address(name, other, own, loaded) for other in names[:rank]]
            await self._workers[name].join(addresses)

    async def _rank_address(self, name: str, other: str, own: Opened, loaded: Mapping[str, Loaded]) -> RankAddress:
        """Return the address at which ``name`` reaches ``other``, a lower rank of their group."""
        if other == self.plan.head:
            to_head = await self._ring_addresses.to_head(self._inputs.devices.workers[name])
            return RankAddress(to_head, port_of(own.group))
        return RankAddress(self._ring_addresses.host_for(name, other), loaded[other].group_port)

    async def _cause(self, device: str, error: PrimadError, accuser: str) -> PrimadError:
        """Return the root cause of ``error`` in a group: ``accuser`` blames ``device``, which may report that yet
        another device is at fault."""
        asked = {self.plan.head}
        while device not in asked:
            asked.add(device)
            stage = self._workers[device]
            await _first_of(stage.broken, timeout_s=REASON_S)
            if not stage.broken.done():
                return StageError(str(error), device, "ring", between=(device, accuser))
            error = stage.broken.result()
            if not isinstance(error, RankLostError):
                return error
            accuser, device = device, error.rank
        return error

    def _on_progress(self, device: str, progress: Progress) -> None:
        self._inputs.reporter.progress(device, progress.phase, progress.done, progress.total)
        self._inputs.listener.progressed(self.epoch, device, STAGES[progress.phase], progress.done, progress.total)

    def _on_own_progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        head = self.plan.head
        self._inputs.reporter.progress(head, phase, done_bytes, total_bytes)
        self._inputs.listener.progressed(self.epoch, head, LoadStage.FETCH, done_bytes, total_bytes)

    def _loaded(self, device: str, loaded: asyncio.Future[Loaded]) -> None:
        if not loaded.cancelled():
            self._inputs.listener.progressed(self.epoch, device, LoadStage.READY, 1, 1)


def _lost(overdue: Overdue, between: Sequence[str]) -> str:
    """Describe where a step without progress is."""
    sender, receiver = between
    flight = f"step {overdue.step} has been in flight for {overdue.waited_s:.1f} s"
    return f"{flight}: {sender} passed it on, but {receiver} did not get it"


async def _first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
