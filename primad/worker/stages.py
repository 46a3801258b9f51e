"""A worker's stages in rings: one for each epoch, the serving one and one that is being loaded.

A stage whose ring ended leaves its ring process with its windows loaded. When the next plan, or the next head, asks for
the same windows, that process serves them immediately; otherwise it ends when something else is loaded, or after
``keep_loaded_s``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import psutil
import zmq.asyncio

from halda import DeviceProfile
from primad.daemon.bring import bring_layers
from primad.daemon.layer_files import check_layers, distrust
from primad.daemon.loaded_process import LoadedProcess
from primad.daemon.loading import WindowLoad
from primad.daemon.memory_watch import MemoryWatch
from primad.daemon.node import Node
from primad.daemon.reporter import ReportLine
from primad.errors import (
    DiskError,
    LoadAgainError,
    NextDeviceError,
    PrimadError,
    RankError,
    RingError,
    SenderError,
    WeightsError,
)
from primad.gguf.layers import LayerRef
from primad.layers.fetch import fetch_layers
from primad.layers.sources import HubRoutes, own_token
from primad.network import messages
from primad.network.messages import Broken, DownloadedLayer, Fault, Load, Loaded, Progress, WorkerMessage, WorkerStatus
from primad.network.sockets import port_of
from primad.ring.messages import (
    Connect,
    JoinGroup,
    Loading,
    Opened,
    Overdue,
    ProcessMemoryLow,
    RankAddress,
    Report,
    RingCommand,
    RingEvent,
    Status,
)
from primad.system.tasks import Tasks
from primad.worker.parking import Parking
from primad.worker.standing import Standing

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S: Final = 0.2
MAX_UNREADABLE: Final = 2
"""One file is fetched again, and then another one; after a further failure the disk counts as broken."""
MAX_LOADED_STAGES: Final = 32
"""A head has a serving ring and a loading one for each of its models; a plan may change while devices of the last one
are still being released."""

NotifyHead = Callable[[WorkerMessage], Coroutine[Any, Any, None]]
"""Sends a message to the head."""


@dataclass(slots=True)
class _Stage:
    """This device's stage in one epoch: its task, and its ring process once it is loaded."""

    task: asyncio.Task[None]
    process: LoadedProcess | None = None
    unload: bool = False
    """Whether the process ends with the stage."""
    downloaded: list[DownloadedLayer] = field(default_factory=list)


class Stages:
    """All stages of this worker. ``notify`` reaches the head, ``report_line`` the owner; ``memory_watch`` is notified
    when memory is low. ``standing`` has the stages' states for the head."""

    def __init__(
        self,
        node: Node,
        *,
        context: zmq.asyncio.Context,
        memory_watch: MemoryWatch,
        notify: NotifyHead,
        report_line: ReportLine,
    ) -> None:
        self._node, self._config, self._place = node, node.config, node.workspace
        self._context, self._timings = context, node.timings
        self._memory_watch, self._notify, self._report_line = memory_watch, notify, report_line
        self.standing = Standing()
        self.head = ""
        """The name of the head that this device works for, for its owner."""
        self._stages: dict[int, _Stage] = {}
        self._parking = Parking(node.config)
        self._busy, self._telling = Tasks(), Tasks()
        self._numbers = count(1)
        self._unreadable: list[tuple[str, float]] = []

    def next_number(self) -> int:
        """Return a number that distinguishes the files of one load from those of others."""
        return next(self._numbers)

    @property
    def is_serving(self) -> bool:
        """Whether a head uses this device in a ring."""
        return bool(self._stages)

    async def start(self, load: Load, profile: DeviceProfile) -> None:
        """Take part in ``load.epoch``, unless this device already has ``MAX_LOADED_STAGES`` stages. An epoch that has a
        state keeps it."""
        if load.epoch in self.standing.epochs:
            return
        if len(self._stages) >= MAX_LOADED_STAGES:
            busy = f"this device takes part in {MAX_LOADED_STAGES} rings, which is the maximum; release one first"
            self.standing.refuse(load.epoch, Broken(error=busy, fault="load"))
        else:
            self._stages[load.epoch] = _Stage(task=asyncio.create_task(self._work(load, profile)))
            self.standing.begin(load.epoch)
        await self._notify(self.standing.message())

    async def link(self, epoch: int, address: str, key: str, sender: str) -> None:
        """Connect the ring process of ``epoch`` to its neighbours, once."""
        await self._connect(epoch, Connect(address, key, sender))

    async def join(self, epoch: int, addresses: Sequence[RankAddress]) -> None:
        """Connect the ring process of ``epoch`` to the other ranks of its group, once."""
        await self._connect(epoch, JoinGroup(list(addresses)))

    async def _connect(self, epoch: int, command: Connect | JoinGroup) -> None:
        stage = self._stages.get(epoch)
        if stage is not None and stage.process is not None and not self.standing.is_linked(epoch):
            await stage.process.send(command)
            if self._stages.get(epoch) is stage:
                self.standing.change(epoch, linked=True)
                await self._notify(self.standing.message())

    async def remind(self, revision: int) -> None:
        """Notify the head of changes since ``revision``, if any."""
        if revision != self.standing.revision:
            await self._notify(self.standing.message())

    async def report(self) -> None:
        """Ask all ring processes for their status; each is sent to the head as it comes."""
        await self._to_all(Report())

    async def keep_nothing(self, epoch: int) -> None:
        """Unload the windows of ``epoch`` when it is released, and those of earlier rings now."""
        if (stage := self._stages.get(epoch)) is not None:
            stage.unload = True
        await self._parking.unload()

    async def release(self, epoch: int) -> None:
        """End the stage in ``epoch``; its windows stay loaded for a while."""
        before = self.standing.revision
        await self._end(epoch)
        await self.remind(before)

    async def _end(self, epoch: int) -> None:
        """End the task of ``epoch`` without notifying the head.

        If it is busy with the disk, this waits at most ``release_timeout_s``: the head must be served meanwhile.
        """
        self.standing.end(epoch)
        self._place.kv.expect((), of=epoch)
        stage = self._stages.pop(epoch, None)
        if stage is not None:
            stage.task.cancel()
            _, busy = await asyncio.wait([stage.task], timeout=self._timings.worker.release_timeout_s)
            for task in busy:
                self._busy.add(task)

    async def release_all(self) -> None:
        """End all stages, without notifying a head."""
        await asyncio.gather(*(self._end(epoch) for epoch in self.standing.epochs))

    async def unload(self) -> None:
        """End the parked process."""
        await self._parking.unload()

    async def close(self) -> None:
        """End everything."""
        await self.release_all()
        await self._busy.wait()  # a task that was busy with the disk may still park a process
        await self._parking.close()

    async def _to_all(self, command: RingCommand) -> None:
        for stage in list(self._stages.values()):
            if stage.process is not None:
                await stage.process.send(command)

    async def _work(self, load: Load, profile: DeviceProfile) -> None:
        """Load the windows of ``load``; forward the events of their ring process until it breaks or this task is
        cancelled."""
        own = self._stages.get(load.epoch)
        process: LoadedProcess | None = None
        windows = WindowLoad(load, self.next_number(), self._node, profile)
        fault: Fault = "fetch"
        try:
            await self._fetch(load, windows)
            fault = "load"
            process = await self._open(load, windows)
            async for event in process.events():
                if isinstance(event, Opened):
                    await check_layers(self._place.cache, windows.layers)
                    fault = "ring"
                await self._pass_on(load, process, event)
        except DiskError as exc:
            await self._broke(load, exc, "disk")
        except WeightsError as exc:
            error = distrust(self._place.cache, exc, windows.layers)
            await self._broke(load, error, self._attribute_to_disk(error, fault))
        except NextDeviceError as exc:
            await self._broke(load, exc, "next")
        except PrimadError as exc:
            again, sender = isinstance(exc, LoadAgainError), isinstance(exc, SenderError)
            rank = exc.device if isinstance(exc, RankError) else ""
            await self._broke(load, exc, fault, again=again, sender=sender, rank=rank)
        except Exception as exc:  # our own mistake; without a notice the head would wait for this stage
            logger.exception("the stage in epoch %d failed", load.epoch)
            await self._broke(load, RingError(f"internal error: {type(exc).__name__}: {exc}"), fault)
        finally:
            if process is None or process.number != windows.number:
                windows.release()
            is_kept = load.group is None and not (
                process is None or process.memory_low or self._node.gpu_care.is_cramped
            )
            if process is not None and own is not None and own.unload:
                await asyncio.wait([self._parking.end(process)])
            elif process is not None and fault == "ring" and is_kept:
                self._parking.put(process)
            elif process is not None:
                self._parking.end(process)

    def _attribute_to_disk(self, error: WeightsError, fault: Fault) -> Fault:
        """Return the fault of a stage whose weights could not be read: its disk, if that persists."""
        now = time.monotonic()
        lately = [(text, at_s) for text, at_s in self._unreadable if now - at_s < self._timings.worker.forgiven_s]
        self._unreadable = [*lately, (str(error), now)]
        return "disk" if str(error) in dict(lately) or len(lately) >= MAX_UNREADABLE else fault

    async def _broke(self, load: Load, error: PrimadError, fault: Fault, **how: bool | str) -> None:
        if fault == "fetch":  # the head reports it, unless it went away itself
            logger.info("epoch %d: %s", load.epoch, error)
        else:
            self._report_line(str(error))
        await self._change(load, broken=Broken(error=str(error), fault=fault, **how))  # type: ignore[arg-type]

    async def _change(self, load: Load, **changes: Any) -> None:
        """Change the state of this task's stage; ignored if it was released meanwhile."""
        if self._own_stage(load) is not None:
            self.standing.change(load.epoch, **changes)
            await self._notify(self.standing.message())

    def _own_stage(self, load: Load) -> _Stage | None:
        """Return the stage of this task; None if it was released, even if another has begun in its epoch."""
        stage = self._stages.get(load.epoch)
        return stage if stage is not None and stage.task is asyncio.current_task() else None

    async def _fetch(self, load: Load, windows: WindowLoad) -> None:
        async def fetch(missing: Sequence[LayerRef], arrived: Callable[[int], None]) -> None:
            await self._parking.unload_if_it_has(missing)
            cache, transfers = self._place.cache, self._node.transfers(self._context)
            if not load.origins:
                await fetch_layers(transfers, load.sources, missing, cache, arrived)
                return
            head = load.sources[0] if load.sources else None
            hub_routes = HubRoutes(files=load.files, token=own_token(), head=head, transfers=transfers)
            await bring_layers(cache, hub_routes, load.sources, load.origins, missing, arrived, windows.named)

        await windows.prepare(fetch, self._fetched(load.epoch))
        if (stage := self._own_stage(load)) is not None:
            stage.downloaded = [DownloadedLayer(name, tree) for name, tree in windows.downloaded.items()]

    def _fetched(self, epoch: int) -> Callable[[int, int], None]:
        """Return a function that reports fetched bytes and their total to the head from time to time."""
        reported_s = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal reported_s
            if done == total or time.monotonic() - reported_s >= PROGRESS_INTERVAL_S:
                reported_s = time.monotonic()
                self._telling.start(self._notify(Progress(epoch=epoch, phase="fetch", done=done, total=total)))

        return progress

    async def _open(self, load: Load, windows: WindowLoad) -> LoadedProcess:
        """Return a process with these windows: the parked one if it has them, else a new one."""
        content = windows.key()
        kept = await self._parking.reopen(load, content)
        if kept is not None:
            return kept
        await self.unload()
        return await windows.start(content)

    async def _pass_on(self, load: Load, process: LoadedProcess, event: RingEvent) -> None:
        """Forward an event of the ring process to the head. Raises ``RingError`` if it ends the stage."""
        match event:
            case Loading(windows):
                await self._notify(Progress(epoch=load.epoch, phase="load", done=windows, total=len(load.windows)))
            case Opened():
                self._place.kv.expect(event.cells, of=load.epoch)
                stage = self._own_stage(load)
                if stage is not None:
                    stage.process = process
                layers = ", ".join(f"{plan.spec.first}-{plan.spec.last - 1}" for plan in load.windows)
                share = "" if load.group is None else "a share of "
                self._report_line(f"computing {share}layers {layers}" + (f" for {self.head}" if self.head else ""))
                downloaded = [] if stage is None else stage.downloaded
                group_port = port_of(event.group)
                port = port_of(event.endpoint) or group_port
                loaded = Loaded(
                    port=port, key=event.key, keeps=event.keeps, downloaded=downloaded, group_port=group_port
                )
                await self._change(load, loaded=loaded)
            case Status():
                rss = psutil.Process().memory_info().rss
                await self._notify(WorkerStatus(epoch=load.epoch, status=event, daemon_rss_bytes=rss))
            case ProcessMemoryLow(needed_bytes):
                process.memory_low = True
                available = await self._memory_watch.report_memory_low(needed_bytes)
                await self._notify(
                    messages.MemoryLow(epoch=load.epoch, needed_bytes=needed_bytes, ram_available_bytes=available)
                )
            case Overdue(waited_s=waited_s):
                raise NextDeviceError(f"the next device accepted no step for {waited_s:.0f} s; it is gone or hangs")
            case _:
                raise RingError(f"the ring process of a worker sent {type(event).__name__}")
