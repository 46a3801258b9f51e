"""Form one ring for one plan and keep it: the workers' parts, the head's own ring process, the links between them.

``open_ring`` is a context: inside it the ring serves; a device that goes away, a ring process that ends or a step that
hangs ends the body with one ``PrimadError``, and everything that was opened is closed.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import psutil

from halda import DeviceProfile, LinkProfile, Plan, Prediction
from primad.cluster.messages import Load, Progress
from primad.cluster.sockets import endpoint
from primad.config import LOOPBACK, Config, is_loopback
from primad.daemon.backend import RingBackend
from primad.daemon.extra import TRIALS, choose_extra_buffers
from primad.daemon.links import LinkBook
from primad.daemon.reporter import Reporter
from primad.daemon.shard import (
    Place,
    copy_layers,
    missing_layers,
    open_windows,
    place_windows,
    remove_metadata,
    whole_model,
)
from primad.daemon.worker_link import Worker, WorkerRing
from primad.engine.protocol import EngineOptions
from primad.errors import ClusterError, ModelError, PrimadError, RingError
from primad.gguf.header import Header
from primad.gguf.windows import ModelCutter, WindowSpec, token_embedding
from primad.ring.messages import (
    Connect,
    Finished,
    Loading,
    Open,
    Opened,
    OpenWindow,
    Report,
    RingCommand,
    Sampled,
    Serving,
    Status,
)
from primad.ring.spawn import RingProcess

LOAD_TIMEOUT_S: Final = 3600.0
STATUS_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOptions:
    """What all devices of a ring must agree on, and where the head serves layers."""

    epoch: int
    session: int
    context_tokens: int
    rows: int
    extra_buffers: str
    step_timeout_s: float
    layer_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RingParts:
    """What a ring is formed from; ``prediction`` is what the plan promises, None when it was set by hand."""

    plan: Plan
    prediction: Prediction | None
    workers: Mapping[str, Worker]
    config: Config
    place: Place
    header: Header
    cutter: ModelCutter | None
    profile: DeviceProfile
    options: RingOptions
    backend: RingBackend
    reporter: Reporter
    links: LinkBook


@asynccontextmanager
async def open_ring(parts: RingParts) -> AsyncIterator[HeadRing]:
    """Form the ring and serve in the body. Raises ``PrimadError`` when it cannot be formed or breaks."""
    ring: HeadRing | None = None
    try:
        async with asyncio.TaskGroup() as group:
            ring = HeadRing(parts, group)
            try:
                await ring.form()
                yield ring
            finally:
                ring.stop()
    except BaseExceptionGroup as failures:
        raise _first_cause(failures) from failures
    finally:
        if ring is not None:
            await ring.close()


def _first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The ``PrimadError`` that ended a ring; anything else is our mistake and stays as it is."""
    ours, others = failures.split(PrimadError)
    if others is not None or ours is None:
        return failures
    first: BaseException = ours
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


class HeadRing:
    """One ring. Use ``open_ring``."""

    def __init__(self, parts: RingParts, group: asyncio.TaskGroup) -> None:
        self._parts = parts
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: dict[str, WorkerRing] = {}
        self._process: RingProcess | None = None
        loop = asyncio.get_running_loop()
        self._endpoint: asyncio.Future[str] = loop.create_future()
        self._serving: asyncio.Future[None] = loop.create_future()
        self._status: asyncio.Queue[Status] = asyncio.Queue(8)
        self._status_lock = asyncio.Lock()

    @property
    def plan(self) -> Plan:
        """The plan that this ring serves."""
        return self._parts.plan

    @property
    def prediction(self) -> Prediction | None:
        """What the plan promises."""
        return self._parts.prediction

    async def form(self) -> None:
        """Have every device load its windows, link them and run a warm-up lap."""
        specs = await self._specs()
        for name, worker in self._parts.workers.items():
            ring = WorkerRing(worker, self._load(name, specs), self._on_progress)
            self._workers[name] = ring
            self._tasks.append(self._group.create_task(ring.attend()))
        await self._start_own(specs.get(self.plan.head, []))
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            own = await self._endpoint
            ports = {name: await ring.port for name, ring in self._workers.items()}
            await self._link(own, ports)
            await self._serving

    async def send(self, command: RingCommand) -> None:
        """Give the head's ring process a command."""
        assert self._process is not None
        await self._process.send(command)

    def stop(self) -> None:
        """Stop attending to processes and workers, so that the task group can end."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Let the workers go and end the head's ring process."""
        for ring in self._workers.values():
            try:
                await ring.release()
            except ClusterError:
                continue  # it is gone already, which is why the ring ends
        if self._process is not None:
            await self._process.close()
        remove_metadata(self._parts.place, self._parts.options.epoch)

    def describe(self) -> list[str]:
        """Who computes what, a line a device."""
        lines = []
        for name in self.plan.devices:
            windows = ", ".join(
                f"{window.first}-{window.last - 1}" if len(window.layers) > 1 else str(window.first)
                for _, window in self.plan.windows_of(name)
            )
            lines.append(f"{name}: {self.plan.layers_of(name)} layers ({windows})")
        lines += [f"{left.device} is left out: {left.reason}" for left in self.plan.left_out]
        return lines

    async def status(self) -> dict[str, Any]:
        """What every device did and holds now, as plain data; a device that does not answer in time has no figures."""
        async with self._status_lock:
            own = await self._own_status()
            devices = []
            for name in self.plan.devices:
                status, daemon_rss_bytes = own, psutil.Process().memory_info().rss
                if name in self._workers:
                    status, daemon_rss_bytes = await self._worker_status(name)
                devices.append(
                    {
                        "name": name,
                        "role": "head" if name == self.plan.head else "worker",
                        "windows": [[window.first, window.last] for _, window in self.plan.windows_of(name)],
                        "layers": self.plan.layers_of(name),
                        "daemon_rss_bytes": daemon_rss_bytes,
                        "ring": None if status is None else _figures(status),
                    }
                )
        return {
            "epoch": self._parts.options.epoch,
            "rounds": self.plan.rounds,
            "predicted": None if self.prediction is None else _promises(self.prediction),
            "devices": devices,
            "links": [_link(link) for link in self._parts.links.between(self.plan.devices)],
        }

    async def _own_status(self) -> Status | None:
        await self.send(Report())
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await self._status.get()
        except TimeoutError:
            return None

    async def _worker_status(self, name: str) -> tuple[Status | None, int]:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                answer = await self._workers[name].wait_status()
        except TimeoutError:
            return None, 0
        return (None, 0) if answer is None else (answer.status, answer.daemon_rss_bytes)

    async def _specs(self) -> dict[str, list[WindowSpec]]:
        """The windows of every device; hashes the layers that no plan needed before (reads them from the model file).

        One layer at a time, so that stopping waits for no more than one.
        """
        cutter, plan = self._parts.cutter, self.plan
        if len(plan.route) == 1:
            return {}
        assert cutter is not None
        needed = [layer for window in plan.route for layer in cutter.layers_of(window.first, window.last)]
        for done, layer in enumerate(needed):
            self._parts.reporter.progress(plan.head, "hash", done, len(needed))
            await asyncio.to_thread(cutter.ref, layer)
        self._parts.reporter.progress(plan.head, "hash", len(needed), len(needed))
        if cutter.digests is not None:
            cutter.digests.save()
        return {
            name: [cutter.spec(index, window.first, window.last) for index, window in plan.windows_of(name)]
            for name in plan.devices
        }

    def _load(self, name: str, specs: Mapping[str, list[WindowSpec]]) -> Load:
        options, worker = self._parts.options, self._parts.workers[name]
        first = specs[name][0].first
        return Load(
            ring=options.session,
            epoch=options.epoch,
            route=len(self.plan.route),
            width=token_embedding(self._parts.header).shape[0],
            windows=specs[name],
            gpu_layers=[window.gpu_layers for _, window in self.plan.windows_of(name)],
            probe=self._probe_spec(first, first + 1) if options.extra_buffers == "auto" else None,
            force_extra_buffers=options.extra_buffers == "on",
            sources=[endpoint(self._address_for(worker), options.layer_port)],
            context=options.context_tokens,
            sequences=1,
            rows=options.rows,
            step_timeout_s=options.step_timeout_s,
            place=self._place_of(name),
        )

    def _place_of(self, name: str) -> int:
        """Counts the devices on the machine of ``name`` from its turn in the ring to the ring's end."""
        rest = self.plan.devices[self.plan.devices.index(name) :]
        hosts = {worker: link.profile.host for worker, link in self._parts.workers.items()}
        return sum(hosts.get(other) == hosts[name] for other in rest)

    def _address_for(self, worker: Worker) -> str:
        """The address of this head that ``worker`` can reach: the one that packets to it leave from."""
        if is_loopback(self._parts.config.host) or is_loopback(worker.end.host):
            return LOOPBACK
        family = socket.AF_INET6 if ":" in worker.end.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((worker.end.host, worker.end.port))
            except OSError as exc:
                raise ClusterError(f"no route to {worker.name} at {worker.end.address}: {exc.strerror or exc}") from exc
            return str(probe.getsockname()[0])

    async def _start_own(self, specs: list[WindowSpec]) -> None:
        parts = self._parts
        options = EngineOptions(
            context=parts.options.context_tokens,
            sequences=1,
            rows=parts.options.rows,
            threads=parts.profile.cpu.threads,
            batch_threads=parts.profile.cpu.batch_threads,
        )
        if specs:
            await self._cut_own(specs)
        windows = await self._own_windows(specs, options)
        self._process = await RingProcess.start(
            parts.place.run / "ring.log", threads=max(options.threads, options.batch_threads)
        )
        self._tasks.append(self._group.create_task(self._attend(self._process, len(windows))))
        await self._process.send(
            Open(
                ring=parts.options.session,
                epoch=parts.options.epoch,
                windows=windows,
                route=len(self.plan.route),
                width=token_embedding(parts.header).shape[0],
                model=str(parts.header.path),
                host=parts.config.host,
                depth=len(self.plan.devices),
                step_timeout_s=parts.options.step_timeout_s,
                options=options,
            )
        )

    async def _cut_own(self, specs: list[WindowSpec]) -> None:
        """Cut the head's own layers out of the model file into its cache."""
        missing = await missing_layers(self._parts.place.cache, (ref for spec in specs for ref in spec.layers))
        total, done = sum(ref.size_bytes for ref in missing), 0
        free = psutil.disk_usage(str(self._parts.config.home)).free
        if total > free:
            raise ClusterError(
                f"--home {self._parts.config.home}: {free} bytes of disk are left, the head's layers take {total}; "
                "make room there or use another --home"
            )
        assert self._parts.cutter is not None

        def copied(size: int) -> None:
            nonlocal done
            done += size
            self._parts.reporter.progress(self.plan.head, "fetch", done, total)

        await copy_layers(self._parts.cutter, self._parts.place.cache, missing, copied)

    async def _own_windows(self, specs: list[WindowSpec], options: EngineOptions) -> list[OpenWindow]:
        place, plan = self._parts.place, self.plan
        extra = await self._own_extra_buffers(options)
        if not specs:
            whole = whole_model(self._parts.header.path, plan)
            return [OpenWindow(window=0, files=whole, extra_buffers=extra[0])]
        gpu_layers = [window.gpu_layers for _, window in plan.windows_of(plan.head)]
        files = await asyncio.to_thread(
            place_windows, place, specs, gpu_layers, self._parts.options.epoch, output_on_gpu=plan.output_on_gpu
        )
        return open_windows(specs, files, extra)

    async def _own_extra_buffers(self, options: EngineOptions) -> list[bool]:
        """For each of the head's windows, whether it uses extra buffers."""
        parts = self._parts
        windows = [window for _, window in self.plan.windows_of(self.plan.head)]
        if parts.options.extra_buffers != "auto":
            return [parts.options.extra_buffers == "on"] * len(windows)

        def advance(done: int) -> None:
            parts.reporter.progress(self.plan.head, "probe", done, TRIALS)

        return await choose_extra_buffers(parts.place, parts.header, windows, options, advance)

    def _probe_spec(self, first: int, last: int) -> WindowSpec | None:
        assert self._parts.cutter is not None
        try:
            return self._parts.cutter.spec(0, first, last)
        except ModelError:
            return None

    async def _attend(self, process: RingProcess, windows: int) -> None:
        """Listen to the head's ring process. Raises ``RingError`` when it ends."""
        async for event in process.events():
            match event:
                case Sampled() | Finished():
                    self._parts.backend.deliver(event)
                case Loading(done):
                    self._parts.reporter.progress(self.plan.head, "load", done, windows)
                case Opened(address):
                    self._endpoint.set_result(address)
                case Serving():
                    self._serving.set_result(None)
                case Status():
                    if self._status.full():
                        self._status.get_nowait()
                    self._status.put_nowait(event)
                case _:
                    raise RingError(f"the head's ring process said {type(event).__name__}")

    async def _link(self, own: str, ports: Mapping[str, int]) -> None:
        """Tell every device where its steps go."""
        if not self._workers:
            return
        assert self._process is not None
        for name, ring in self._workers.items():
            following = self.plan.after(name)
            if following == self.plan.head:
                address = endpoint(self._address_for(ring.worker), own.rsplit(":", 1)[1])
            else:
                host = self._parts.links.address(name, following) or self._workers[following].worker.end.host
                address = endpoint(host, ports[following])
            await ring.link(address)
        for ring in self._workers.values():
            await ring.linked
        first = self.plan.after(self.plan.head)
        host = self._parts.links.address(self.plan.head, first) or self._workers[first].worker.end.host
        await self._process.send(Connect(endpoint(host, ports[first])))

    def _on_progress(self, device: str, progress: Progress) -> None:
        self._parts.reporter.progress(device, progress.phase, progress.done, progress.total)


def _promises(prediction: Prediction) -> dict[str, float]:
    return {
        "tokens_per_s": prediction.tokens_per_s,
        "tpot_ms": prediction.tpot_s * 1e3,
        "ttft_ms": prediction.ttft_s * 1e3,
    }


def _link(link: LinkProfile) -> dict[str, Any]:
    return {
        "source": link.source,
        "target": link.target,
        "round_trip_ms": link.round_trip_s * 1e3,
        "mbit_per_s": link.bytes_per_s * 8 / 1e6,
    }


def _figures(status: Status) -> dict[str, Any]:
    hops = sorted(status.hop_s)
    return {
        "steps": status.steps,
        "rows": status.rows,
        "compute_s": status.compute_s,
        "hops": len(hops),
        "hop_median_s": statistics.median(hops) if hops else None,
        "hop_p99_s": hops[min(len(hops) - 1, len(hops) * 99 // 100)] if hops else None,
        "rss_bytes": status.rss_bytes,
        "private_bytes": status.private_bytes,
        "refused_messages": status.refused,
    }
