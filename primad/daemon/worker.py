"""``primad join``: announce this device, wait for a head, compute its windows, and wait again when it goes away.

One head at a time holds the lease: it keeps it as long as it is heard. Whatever happens to a ring, the daemon goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import zmq.asyncio

from halda import DeviceProfile
from primad import __version__
from primad.cluster.control import WorkerEnd
from primad.cluster.discovery import Discovery
from primad.cluster.linkprobe import measure_links
from primad.cluster.messages import (
    GONE_AFTER_S,
    PROTOCOL,
    Broken,
    Echo,
    Echoed,
    HeadMessage,
    Hello,
    Link,
    Linked,
    LinksMeasured,
    LinkTarget,
    Load,
    Loaded,
    MeasureLinks,
    Ping,
    Pong,
    Progress,
    Refused,
    Release,
    Welcome,
    WorkerMessage,
    WorkerStatus,
)
from primad.cluster.transfer import fetch_layers
from primad.config import DEFAULT_CONTROL_PORT, Config
from primad.daemon.shard import (
    Place,
    fits_twice,
    missing_layers,
    open_windows,
    place_windows,
    remove_metadata,
    try_extra_buffers,
)
from primad.engine.probe import is_worth_it
from primad.engine.protocol import EngineOptions
from primad.errors import ClusterError, PrimadError, RingError
from primad.gguf.header import read_header
from primad.gguf.layers import LayerRef
from primad.ring.messages import Connect, Loading, Open, Opened, Report, Status
from primad.ring.spawn import RingProcess

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.2

Say = Callable[[str], None]
"""Tells the owner one line."""


@dataclass(slots=True)
class _Lease:
    """The head that this worker works for, and the profile that it was given."""

    peer: bytes
    head: str
    session: int
    heard_s: float
    profile: DeviceProfile


@dataclass(slots=True)
class _Part:
    """This device's part in one epoch: its task, and its ring process once that runs."""

    epoch: int
    task: asyncio.Task[None]
    ring: RingProcess | None = None


class WorkerDaemon:
    """A worker. ``profile`` gives its profile as of now, under the name that it got."""

    def __init__(self, config: Config, place: Place, profile: Callable[[str], DeviceProfile], say: Say) -> None:
        self._config = config
        self._place = place
        self._profile = profile
        self._say = say
        self._context = zmq.asyncio.Context()
        self._end = WorkerEnd(self._context, config.host, config.port, DEFAULT_CONTROL_PORT)
        self._name = config.name
        self._lease: _Lease | None = None
        self._part: _Part | None = None
        self._measuring: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until cancelled. Raises ``ClusterError`` when mDNS or the port cannot be used."""
        discovery = Discovery(self._config.host)
        try:
            name = await discovery.announce(
                self._config.name,
                cluster=self._config.cluster,
                role="worker",
                version=__version__,
                port=self._end.port,
            )
            self._name = name
            self._say(f"{name} is waiting for a head (cluster {self._config.cluster}, port {self._end.port})")
            async with asyncio.TaskGroup() as group:
                group.create_task(self._hear(group))
                group.create_task(self._watch_lease())
        finally:
            await self._drop_part()
            await discovery.close()
            self._end.close()
            self._context.term()

    async def _hear(self, group: asyncio.TaskGroup) -> None:
        while True:
            peer, message = await self._end.receive()
            if isinstance(message, Hello):
                await self._greet(peer, message)
            elif isinstance(message, Echo):
                await self._echo(peer, message)
            elif self._lease is None or self._lease.peer != peer:
                await self._end.send(peer, Refused("this device works for another head now; say hello first"))
            else:
                self._lease.heard_s = time.monotonic()
                await self._obey(message, group)

    async def _greet(self, peer: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            reason = (
                f"{self._name} runs primad {__version__} (protocol {PROTOCOL}), the head {hello.device} runs "
                f"{hello.version[:40]} (protocol {hello.protocol}); install the same version on both"
            )
            await self._end.send(peer, Refused(reason))
            return
        lease = self._lease
        if lease is not None and lease.head != hello.device:
            await self._end.send(peer, Refused(f"{self._name} works for the head {lease.head} now"))
            return
        if lease is None or lease.session != hello.session:
            self._stop_measuring()
            await self._drop_part()
            self._say(f"head {hello.device} is here")
        profile = await asyncio.to_thread(self._profile, self._name)
        self._lease = _Lease(
            peer=peer, head=hello.device, session=hello.session, heard_s=time.monotonic(), profile=profile
        )
        await self._end.send(
            peer,
            Welcome(protocol=PROTOCOL, version=__version__, build=self._place.build, profile=profile),
        )

    async def _echo(self, peer: bytes, echo: Echo) -> None:
        """Answer another device of the same head, which measures the link to here."""
        if self._lease is not None and self._lease.session == echo.session and echo.device == self._name:
            await self._end.send(peer, Echoed(bytes(echo.answer_bytes)))
        else:
            await self._end.send(peer, Refused(f"{self._name} does not work for that head now, or is another device"))

    async def _measure_links(self, targets: list[LinkTarget], session: int) -> None:
        links = await measure_links(self._context, self._name, targets, session)
        await self._tell(LinksMeasured(links=links))

    async def _obey(self, message: HeadMessage, group: asyncio.TaskGroup) -> None:
        assert self._lease is not None
        match message:
            case Load():
                await self._drop_part()
                work = group.create_task(self._work(message, self._lease.profile))
                self._part = _Part(epoch=message.epoch, task=work)
            case Link(epoch=epoch, address=address):
                if self._part is not None and self._part.ring is not None and self._part.epoch == epoch:
                    await self._part.ring.send(Connect(address))
                    await self._tell(Linked(epoch))
            case Release(epoch=epoch):
                if self._part is not None and self._part.epoch == epoch:
                    await self._drop_part()
            case Ping(status=status):
                await self._tell(Pong())
                if status and self._part is not None and self._part.ring is not None:
                    await self._part.ring.send(Report())
            case MeasureLinks(targets=targets):
                self._stop_measuring()
                self._measuring = group.create_task(self._measure_links(targets, self._lease.session))
            case Hello() | Echo():
                raise AssertionError("answered before")

    async def _watch_lease(self) -> None:
        while True:
            heard_s = self._lease.heard_s if self._lease is not None else time.monotonic()
            await asyncio.sleep(heard_s + GONE_AFTER_S - time.monotonic())
            if self._lease is not None and time.monotonic() - self._lease.heard_s >= GONE_AFTER_S:
                self._say(f"head {self._lease.head} went away; waiting for a head")
                self._lease = None
                self._stop_measuring()
                await self._drop_part()

    def _stop_measuring(self) -> None:
        """Nobody waits any more for the links that are being measured."""
        if self._measuring is not None:
            self._measuring.cancel()
            self._measuring = None

    async def _drop_part(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            part.task.cancel()
            await asyncio.wait([part.task])

    async def _tell(self, message: WorkerMessage) -> None:
        if self._lease is not None:
            await self._end.send(self._lease.peer, message)

    async def _work(self, load: Load, profile: DeviceProfile) -> None:
        """Load the windows of ``load`` and keep their ring process until it breaks or this task is cancelled."""
        try:
            await self._fetch(load)
            await self._compute(load, profile)
        except PrimadError as exc:
            logger.warning("epoch %d: %s", load.epoch, exc)
            await self._tell(Broken(epoch=load.epoch, error=str(exc)))

    async def _fetch(self, load: Load) -> None:
        refs = [ref for spec in load.windows for ref in spec.layers]
        missing = await missing_layers(self._place.cache, refs)
        total, done, told_s = sum(ref.size_bytes for ref in missing), 0, 0.0
        self._check_room(missing, total)
        pending: set[asyncio.Task[None]] = set()

        def arrived(size: int) -> None:
            nonlocal done, told_s
            done += size
            if done == total or time.monotonic() - told_s >= PROGRESS_INTERVAL_S:
                told_s = time.monotonic()
                progress = Progress(epoch=load.epoch, phase="fetch", done=done, total=total)
                task = asyncio.create_task(self._tell(progress))
                pending.add(task)
                task.add_done_callback(pending.discard)

        if missing:
            if not load.sources:
                raise ClusterError(f"{self._name} lacks {len(missing)} layers and no device was named that has them")
            await fetch_layers(self._context, load.sources[0], missing, self._place.cache, arrived)

    def _check_room(self, missing: list[LayerRef], total: int) -> None:
        free = psutil.disk_usage(str(self._config.home)).free
        if total > free:
            raise ClusterError(
                f"{self._name} has {free} bytes of disk left in {self._config.home}; {len(missing)} layers of {total} "
                "bytes do not fit; make room there or use another --home"
            )

    async def _compute(self, load: Load, profile: DeviceProfile) -> None:
        options = EngineOptions(
            context=load.context,
            sequences=load.sequences,
            rows=load.rows,
            threads=profile.cpu.threads,
            batch_threads=profile.cpu.batch_threads,
        )
        extra = [await self._extra_buffers(load, options)] * len(load.windows)
        files = await asyncio.to_thread(place_windows, self._place, load.windows, load.gpu_layers, load.epoch)
        for window in files:
            await asyncio.to_thread(
                read_header, Path(window.metadata)
            )  # the head wrote it: judged before llama.cpp sees it
        ring = await RingProcess.start(
            self._place.run / "ring.log", threads=max(options.threads, options.batch_threads), place=load.place
        )
        try:
            await ring.send(
                Open(
                    ring=load.ring,
                    epoch=load.epoch,
                    windows=open_windows(load.windows, files, extra),
                    route=load.route,
                    width=load.width,
                    model=None,
                    host=self._config.host,
                    depth=1,
                    step_timeout_s=load.step_timeout_s,
                    options=options,
                )
            )
            await self._attend(load, ring)
        finally:
            await ring.close()
            remove_metadata(self._place, load.epoch)

    async def _extra_buffers(self, load: Load, options: EngineOptions) -> bool:
        if load.force_extra_buffers:
            return True
        size = sum(ref.size_bytes for spec in load.windows for ref in spec.layers)
        if load.probe is None or not fits_twice(size):
            return False
        await self._tell(Progress(epoch=load.epoch, phase="probe", done=0, total=1))
        return is_worth_it(await try_extra_buffers(self._place, load.probe, options, width=load.width), 1)

    async def _attend(self, load: Load, ring: RingProcess) -> None:
        async for event in ring.events():
            match event:
                case Loading(windows):
                    await self._tell(Progress(epoch=load.epoch, phase="load", done=windows, total=len(load.windows)))
                case Opened(endpoint):
                    if self._part is not None:
                        self._part.ring = ring
                    layers = ", ".join(f"{spec.first}-{spec.last - 1}" for spec in load.windows)
                    self._say(f"computing layers {layers}")
                    await self._tell(Loaded(epoch=load.epoch, port=int(endpoint.rsplit(":", 1)[1])))
                case Status():
                    rss = psutil.Process().memory_info().rss
                    await self._tell(WorkerStatus(epoch=load.epoch, status=event, daemon_rss_bytes=rss))
                case _:
                    raise RingError(f"the ring process of a worker said {type(event).__name__}")
