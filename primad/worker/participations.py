"""A worker's participations in rings: one for each epoch, the one that serves and one that is being loaded beside it.

A participation whose ring ended leaves its ring process behind, with its windows loaded. When the next plan, or the
next head, asks for the same windows, that process serves them again at once; else it is ended when something else is
loaded, or after ``keep_loaded_s``.
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
from primad.daemon.bring import bring_layers, fetch_from
from primad.daemon.layer_files import check_layers, distrust
from primad.daemon.loaded_process import LoadedProcess
from primad.daemon.loading import WindowLoad
from primad.daemon.memory_watch import MemoryWatch
from primad.daemon.reporter import Say
from primad.daemon.station import Station
from primad.errors import (
    DiskError,
    LoadAgainError,
    NextDeviceError,
    PrimadError,
    RingError,
    SenderError,
    WeightsError,
)
from primad.gguf.layers import LayerRef
from primad.layers.givers import HubWays, own_token
from primad.network import messages
from primad.network.messages import Broken, DrawnLayer, Fault, Load, Loaded, Progress, WorkerMessage, WorkerStatus
from primad.ring.messages import (
    Connect,
    Loading,
    Opened,
    Overdue,
    ProcessMemoryLow,
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
MOST_UNREADABLE: Final = 2
"""One file is read again from where it came, and another one; a disk that then fails once more is at an end."""
MOST_PARTICIPATIONS: Final = 8
"""A head has a ring that serves and one that is loaded; a plan may change while the last one's devices still let go."""

TellHead = Callable[[WorkerMessage], Coroutine[Any, Any, None]]
"""Sends a message to the head."""


@dataclass(slots=True)
class _Participation:
    """This device's participation in one epoch: its task, and its ring process once that is loaded."""

    task: asyncio.Task[None]
    process: LoadedProcess | None = None
    drawn: list[DrawnLayer] = field(default_factory=list)


class Participations:
    """All participations of this worker. ``tell`` reaches the head, ``say`` the owner; ``memory_watch`` hears when memory is
    low. ``standing`` is what the head is to know of them."""

    def __init__(
        self,
        station: Station,
        *,
        context: zmq.asyncio.Context,
        memory_watch: MemoryWatch,
        tell: TellHead,
        say: Say,
    ) -> None:
        self._station, self._config, self._place = station, station.config, station.workspace
        self._context, self._timings = context, station.timings
        self._memory_watch, self._tell, self._say = memory_watch, tell, say
        self.standing = Standing()
        self.head = ""
        """The name of the head that this device works for, for its owner."""
        self._participations: dict[int, _Participation] = {}
        self._parking = Parking(station.config)
        self._busy, self._telling = Tasks(), Tasks()
        self._numbers = count(1)
        self._unreadable: list[tuple[str, float]] = []

    def next_number(self) -> int:
        """Tells the files of a load from those of all others."""
        return next(self._numbers)

    @property
    def is_serving(self) -> bool:
        """Whether a head uses this device in a ring."""
        return bool(self._participations)

    async def start(self, load: Load, profile: DeviceProfile) -> None:
        """Take part in ``load.epoch``, unless this device has ``MOST_PARTICIPATIONS`` participations already."""
        await self._end(load.epoch)
        if len(self._participations) >= MOST_PARTICIPATIONS:
            busy = f"this device takes part in {MOST_PARTICIPATIONS} rings, which is the most; release one first"
            self.standing.refuse(load.epoch, Broken(error=busy, fault="load"))
        else:
            self._participations[load.epoch] = _Participation(task=asyncio.create_task(self._work(load, profile)))
            self.standing.begin(load.epoch)
        await self._tell(self.standing.message())

    async def link(self, epoch: int, address: str, key: str, sender: str) -> None:
        """Connect the ring process of ``epoch`` to its neighbours."""
        participation = self._participations.get(epoch)
        if participation is not None and participation.process is not None:
            await participation.process.send(Connect(address, key, sender))
            if self._participations.get(epoch) is participation:
                self.standing.change(epoch, linked=True)
                await self._tell(self.standing.message())

    async def remind(self, revision: int) -> None:
        """Tell a head that knows how the participations stood in ``revision`` what has changed since, if anything has."""
        if revision != self.standing.revision:
            await self._tell(self.standing.message())

    async def report(self) -> None:
        """Ask all ring processes for their status; the head gets it as it comes."""
        await self._to_all(Report())

    async def release(self, epoch: int) -> None:
        """The participation in ``epoch`` is over; its windows stay loaded for a while."""
        before = self.standing.revision
        await self._end(epoch)
        await self.remind(before)

    async def _end(self, epoch: int) -> None:
        """End the task of ``epoch`` without a word to the head.

        One that is busy with the disk is waited for no longer than ``release_timeout_s``: the head is to be heard meanwhile.
        """
        self.standing.end(epoch)
        participation = self._participations.pop(epoch, None)
        if participation is not None:
            participation.task.cancel()
            _, busy = await asyncio.wait([participation.task], timeout=self._timings.worker.release_timeout_s)
            for task in busy:
                self._busy.add(task)

    async def release_all(self) -> None:
        """No participation goes on, and no head is here that is to hear of it."""
        await asyncio.gather(*(self._end(epoch) for epoch in self.standing.epochs))

    async def unload(self) -> None:
        """End the process that is kept."""
        await self._parking.unload()

    async def close(self) -> None:
        """End everything."""
        await self.release_all()
        await self._busy.wait()  # what was busy with the disk may still put a process away
        await self._parking.close()

    async def _to_all(self, command: RingCommand) -> None:
        for participation in list(self._participations.values()):
            if participation.process is not None:
                await participation.process.send(command)

    async def _work(self, load: Load, profile: DeviceProfile) -> None:
        """Load the windows of ``load``; pass on what their ring process says until it breaks or this task is cancelled."""
        process: LoadedProcess | None = None
        windows = WindowLoad(load, self.next_number(), self._station, profile)
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
            await self._broke(load, error, self._blame_disk(error, fault))
        except NextDeviceError as exc:
            await self._broke(load, exc, "next")
        except PrimadError as exc:
            again, sender = isinstance(exc, LoadAgainError), isinstance(exc, SenderError)
            await self._broke(load, exc, fault, again=again, sender=sender)
        except Exception as exc:  # our own mistake; the head is to hear of it, or it waits for this participation
            logger.exception("the participation in epoch %d failed", load.epoch)
            await self._broke(load, RingError(f"internal error: {type(exc).__name__}: {exc}"), fault)
        finally:
            if process is None or process.number != windows.number:
                windows.release()
            is_kept = not (process is None or process.memory_low or self._station.gpu_care.is_cramped)
            if process is not None and fault == "ring" and is_kept:
                self._parking.put(process)
            elif process is not None:
                self._parking.end(process)

    def _blame_disk(self, error: WeightsError, fault: Fault) -> Fault:
        """What a participation failed at whose weights could not be read: its disk, if that goes on."""
        now = time.monotonic()
        lately = [(text, at_s) for text, at_s in self._unreadable if now - at_s < self._timings.worker.forgiven_s]
        self._unreadable = [*lately, (str(error), now)]
        return "disk" if str(error) in dict(lately) or len(lately) >= MOST_UNREADABLE else fault

    async def _broke(self, load: Load, error: PrimadError, fault: Fault, **how: bool) -> None:
        if fault == "fetch":  # the head says it, unless it is what went away
            logger.info("epoch %d: %s", load.epoch, error)
        else:
            self._say(str(error))
        await self._change(load, broken=Broken(error=str(error), fault=fault, **how))

    async def _change(self, load: Load, **changes: Any) -> None:
        """The participation whose task this is stands otherwise now; one that was released meanwhile is of no interest."""
        if self._own_participation(load) is not None:
            self.standing.change(load.epoch, **changes)
            await self._tell(self.standing.message())

    def _own_participation(self, load: Load) -> _Participation | None:
        """The participation whose task this is; None when it was released, though another may have begun in its epoch."""
        participation = self._participations.get(load.epoch)
        return participation if participation is not None and participation.task is asyncio.current_task() else None

    async def _fetch(self, load: Load, windows: WindowLoad) -> None:
        async def fetch(missing: Sequence[LayerRef], arrived: Callable[[int], None]) -> None:
            await self._parking.unload_if_it_has(missing)
            if load.origins:
                ways = HubWays(
                    files=load.files,
                    token=own_token(),
                    head=load.sources[0] if load.sources else None,
                    context=self._context,
                    identity=self._station.identity,
                    timings=self._timings.layers,
                )
                await bring_layers(self._station, ways, load.sources, load.origins, missing, arrived, windows.named)
                return
            await fetch_from(self._station, self._context, load.sources, missing, arrived)

        await windows.prepare(fetch, self._fetched(load.epoch))
        if (participation := self._own_participation(load)) is not None:
            participation.drawn = [DrawnLayer(name, tree) for name, tree in windows.drawn.items()]

    def _fetched(self, epoch: int) -> Callable[[int, int], None]:
        """Takes how much was fetched, and of how much; the head is told now and then."""
        told_s = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal told_s
            if done == total or time.monotonic() - told_s >= PROGRESS_INTERVAL_S:
                told_s = time.monotonic()
                self._telling.start(self._tell(Progress(epoch=epoch, phase="fetch", done=done, total=total)))

        return progress

    async def _open(self, load: Load, windows: WindowLoad) -> LoadedProcess:
        """A process with these windows: one that is kept if it has them, else a new one."""
        content = windows.key()
        kept = await self._parking.reopen(load, content)
        if kept is not None:
            return kept
        await self.unload()
        return await windows.start(content)

    async def _pass_on(self, load: Load, process: LoadedProcess, event: RingEvent) -> None:
        """Tell the head what the ring process says. Raises ``RingError`` where that ends the participation."""
        match event:
            case Loading(windows):
                await self._tell(Progress(epoch=load.epoch, phase="load", done=windows, total=len(load.windows)))
            case Opened(address, key, keeps, cells):
                self._place.cells.expect(cells)
                participation = self._own_participation(load)
                if participation is not None:
                    participation.process = process
                layers = ", ".join(f"{spec.first}-{spec.last - 1}" for spec in load.windows)
                self._say(f"computing layers {layers}" + (f" for {self.head}" if self.head else ""))
                drawn = [] if participation is None else participation.drawn
                port = int(address.rsplit(":", 1)[1])
                await self._change(load, loaded=Loaded(port=port, key=key, keeps=keeps, drawn=drawn))
            case Status():
                rss = psutil.Process().memory_info().rss
                await self._tell(WorkerStatus(epoch=load.epoch, status=event, daemon_rss_bytes=rss))
            case ProcessMemoryLow(needed_bytes):
                process.memory_low = True
                available = await self._memory_watch.press(needed_bytes)
                await self._tell(
                    messages.MemoryLow(epoch=load.epoch, needed_bytes=needed_bytes, ram_available_bytes=available)
                )
            case Overdue(waited_s=waited_s):
                raise NextDeviceError(f"the next device took no step for {waited_s:.0f} s; it is gone or hangs")
            case _:
                raise RingError(f"the ring process of a worker said {type(event).__name__}")
