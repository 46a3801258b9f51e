"""A ring of real ring processes on this machine, without daemons: for benchmarks and exactness tests."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec

from halda import CpuProfile, ModelProfile, Plan, Rank, Window, arrange, assignments
from halda.cost import checkpoints
from primad.daemon.layer_files import Workspace, copy_layers, place_windows
from primad.daemon.ring_process import RingProcess
from primad.engine.build import build_id
from primad.engine.protocol import GREEDY, EngineOptions, KvType, Sampling, WindowSource
from primad.engine.vocabulary import LlamaVocabulary
from primad.gguf.architectures.layers import layer_count
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.gguf.share_rules import ShareRules
from primad.gguf.shares import share_header
from primad.gguf.windows import ModelCutter, WindowPlan
from primad.head.rings.loads import group_ranks
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from primad.network.sockets import port_of
from primad.planning.extra_buffers import is_faster
from primad.ring.chunks import Pieces
from primad.ring.grouping import Batching
from primad.ring.messages import (
    Connect,
    Finished,
    Generate,
    GpuLoaded,
    HeadPart,
    JoinGroup,
    Loading,
    Open,
    Opened,
    Overdue,
    RankAddress,
    Reopen,
    Report,
    Sampled,
    Serving,
    Status,
)
from primad.ring.speculation.drafter import Drafting
from primad.ring.speculation.messages import DraftModel
from tools.lab import LabError, disk
from tools.lab.delayed import DelayedLink
from tools.lab.memory import LimitedGroup


def even_windows(layers: int, devices: int) -> list[int] | None:
    """Return the layers per device for a ring of ``devices``: even, with one left over for the tail."""
    if devices == 1:
        return None
    share, more = divmod(layers - 1, devices)
    return [share + (devices - i <= more) for i in range(devices)]


def even_group(model: Path, devices: int) -> Plan:
    """Return a group of ``devices`` with equal shares of each layer."""
    names, layers = [f"d{i}" for i in range(devices)], layer_count(open_model(model))
    whole = Window(device=names[0], first=0, last=layers, gpu_layers=0)
    ranks = tuple(Rank(device=name, weight=1) for name in names)
    return Plan(rounds=1, route=(whole,), output_on_gpu=False, streaming=(), left_out=(), groups=(ranks,))


def even_bytes(model: ModelProfile, devices: int) -> list[int] | None:
    """Return the layers per device for a ring of ``devices`` with about equal bytes of weights each, as in plans for
    equal devices: the head's bytes include the output matrix and the tail's layer.
    """
    if devices == 1:
        return None
    layers = [layer.size_bytes for layer in model.layers]
    output = sum(model.output_bytes_by_type.values())
    share = (sum(layers) + output) / devices
    mean = sum(layers) / len(layers)
    first = min(len(layers) - devices, max(1, round((share - output - layers[-1]) / mean)))
    return [first, *(even_windows(len(layers) - first, devices - 1) or [len(layers) - first - 1])]


def _arranged(plan: Plan, gpu: str) -> Plan:
    """Return ``plan``, entirely on the ``gpu`` if there is one."""
    if not gpu:
        return plan
    return replace(
        plan, route=tuple(replace(each, gpu_layers=each.last - each.first) for each in plan.route), output_on_gpu=True
    )


@contextmanager
def slow_links(links: Sequence[tuple[str, int, float]]) -> Iterator[list[int]]:
    """Yield ports to use instead of those of ``links``, which are host, port, and additional seconds each way."""
    script = Path(__file__).with_name("slow_links.py")
    command = [sys.executable, "-I", "-S", str(script), json.dumps(links)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


@dataclass(eq=False)
class LocalRing:
    """``windows[i]`` layers a round for device ``i``; ``windows=None`` is the whole model in one process.

    ``plan`` replaces ``windows`` and ``rounds``, and may stream.
    ``groups`` limits the memory of a device's process; then no process finds pages of its files in the page cache when
    it starts. ``gpu``, llama.cpp's name of a GPU, computes all layers and the output matrix unless ``plan`` says
    otherwise. Extra buffers are used where ``cpu`` says that they are faster; without ``cpu`` they are off. Each hop
    takes ``latency_s`` longer than on this machine. ``started`` is called with the device and process of each start.

    ``async with LocalRing(...) as ring`` loads and links it; layer files are in ``folder`` (shared between rings).
    """

    model: Path
    windows: Sequence[int] | None
    _: KW_ONLY
    rounds: int = 1
    plan: Plan = None  # type: ignore[assignment]  # made from windows and rounds unless given
    groups: Mapping[str, LimitedGroup] = field(default_factory=dict)
    context: int = 2048
    rows: int = 512
    sequences: int = 1
    batching: Batching = field(default_factory=Batching)
    pieces: Pieces | None = None
    drafting: Drafting | None = None
    draft: DraftModel | None = None
    predicts: bool = False
    kv_type: KvType = "f16"
    flash: bool = True
    threads: int = 2
    cpu: CpuProfile | None = None
    folder: Path | None = None
    step_timeout_s: float = 120
    latency_s: float = 0.0
    started: Callable[[str, int], None] = lambda _device, _pid: None
    gpu: str = ""
    small_windows: bool = False

    def __post_init__(self) -> None:
        self._header = open_model(self.model)
        self._profile = profile = model_profile(self._header)
        windows = self.windows or [len(profile.layers)]
        if cast("Plan | None", self.plan) is None:
            names = [f"d{i}" for i in range(len(windows))]
            self.plan = _arranged(arrange(names, windows, rounds=self.rounds, model=profile), self.gpu)
        self.assignments = assignments(self.plan, profile)
        self._folder = self.folder
        self._stack = AsyncExitStack()
        self._ring = random.getrandbits(62)
        self._requests = 0
        self._opens: dict[str, Open] = {}
        self._epoch = 1
        self.processes: dict[str, RingProcess] = {}
        self.extra_buffers: list[bool] = []
        self._events: dict[str, asyncio.Queue[object]] = {}

    async def __aenter__(self) -> LocalRing:
        if self._folder is None:
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-ring-")))
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def _states(self) -> int:
        """Return the number of states kept for going back."""
        if not (self.small_windows or self._profile.is_recurrent):
            return 0
        return checkpoints(self.sequences) + (0 if self.drafting is None else self.drafting.states)

    async def _open(self) -> None:
        plan, width = self.plan, self._profile.hop_values
        vocabulary = LlamaVocabulary(self.model)
        self._stack.callback(vocabulary.release)
        cutter = ModelCutter(self._header, predicts=self.predicts) if len(plan.route) > 1 else None
        in_group = group_ranks(plan)
        for name in plan.devices:
            assert self._folder is not None
            run = self._folder / f"run-{self._ring}-{name}"
            run.mkdir(parents=True)
            options = EngineOptions(
                context=self.context,
                sequences=self.sequences,
                rows=self.rows,
                threads=self.threads,
                batch_threads=self.threads,
                kv_type=self.kv_type,
                lock=False,
                flash=self.flash,
                small_windows=self.small_windows,
                states=self._states,
                rollback=self.drafting.rows - 1 if self.drafting is not None and self._profile.is_recurrent else 0,
                gpu=self.gpu,
                branches=self.drafting.branches if self.drafting is not None else 0,
            )
            place = Workspace(
                cache=LayerCache(self._folder / name),
                kv=KvStore(self._folder / "cells"),
                run=run,
                usage=self._folder / "usage",
                build=build_id(),
            )
            extra = [
                self.cpu is not None and not window.streamed_bytes and is_faster(window, self._profile, self.cpu)
                for window in self.assignments[name].windows
            ]
            self.extra_buffers += extra
            windows = await self._windows(self._share_cutter(name) or cutter, name, place, extra)
            self._opens[name] = Open(
                ring=self._ring,
                epoch=self._epoch,
                windows=windows,
                route=len(plan.route),
                width=width,
                host="127.0.0.1",
                head=None
                if name != plan.head
                else HeadPart(
                    model=str(self.model),
                    vocabulary=vocabulary.size,
                    ends=tuple(sorted(vocabulary.ends)),
                    depth=len(plan.places),
                    at_once=self.sequences,
                    chunk_rows=self.rows,
                    min_rows=self.rows,
                    batching=self.batching,
                    pieces=self.pieces,
                    states=self._states,
                    drafting=self.drafting,
                    draft=self.draft,
                    predicts=self.predicts,
                ),
                step_timeout_s=self.step_timeout_s,
                options=options,
                read_ahead_bytes=self.assignments[name].read_ahead_bytes,
                usage=str(place.usage),
                group=in_group.get(name),
            )
        if self.groups:
            self._forget_files()
        for name in plan.devices:
            await self._start(name)
        await self.link({name: await self.opened(name) for name in plan.devices})

    def _forget_files(self) -> None:
        """Drop the files from the page cache: a cached page would not count as memory of the group that uses it."""
        files = {path for opening in self._opens.values() for window in opening.windows for path in window.layers}
        for path in (self.model, *map(Path, files)):
            disk.forget(path)

    async def _start(self, name: str) -> None:
        """Start a process for device ``name`` and let it load its windows."""
        assert self._folder is not None
        number = self.plan.devices.index(name)
        process = await RingProcess.start(
            self._folder / f"run-{self._ring}-{name}" / "log",
            threads=self.threads,
            place=(len(self.plan.devices) - number) if number else 0,
            gpu=bool(self.gpu),
        )
        self.started(name, process.pid)
        if name in self.groups:
            self.groups[name].add(process.pid)
        self._stack.push_async_callback(process.close)
        self.processes[name] = process
        events: asyncio.Queue[object] = asyncio.Queue()
        self._events[name] = events
        pump = asyncio.create_task(self._pump(events, process))
        self._stack.callback(pump.cancel)
        await process.send(self._opens[name])

    async def replace_head(self) -> None:
        """End the head's process and form the next epoch from a new one and the unchanged workers."""
        plan = self.plan
        await self.processes[plan.head].close()
        self._epoch += 1
        self._opens[plan.head] = msgspec.structs.replace(self._opens[plan.head], epoch=self._epoch)
        await self._start(plan.head)
        for name in plan.devices[1:]:
            await self.processes[name].send(
                Reopen(
                    ring=self._ring,
                    epoch=self._epoch,
                    windows=[index for index, _ in plan.windows_of(name)],
                    route=len(plan.route),
                    host="127.0.0.1",
                    step_timeout_s=self.step_timeout_s,
                    assignments=list(self.assignments[name].windows),
                    read_ahead_bytes=self.assignments[name].read_ahead_bytes,
                )
            )
        await self.link({name: await self.opened(name) for name in plan.devices})

    async def link(self, opened: Mapping[str, Opened]) -> None:
        """Join the processes, which have reported ``opened``, into a ring, and wait until it computes."""
        plan = self.plan
        for ranks in plan.groups:
            await self._join([rank.device for rank in ranks], opened)
        if len(plan.places) > 1:
            before = {plan.after(name): name for name in plan.places}
            for name in reversed(plan.places):
                following = opened[plan.after(name)]
                address = await self._address(following)
                await self.processes[name].send(Connect(address, following.key, opened[before[name]].key))
        event = await self._next(plan.head)
        assert isinstance(event, Serving), event

    async def _join(self, names: Sequence[str], opened: Mapping[str, Opened]) -> None:
        """Join the devices of a group; a worker that is its first rank joins when it is connected to the ring."""
        ports = [port_of(opened[name].group) for name in names]
        places = [ports[other] for rank in range(len(ports)) for other in range(rank)]
        if self.latency_s:
            places = self._stack.enter_context(slow_links([("127.0.0.1", port, self.latency_s) for port in places]))
        for rank, name in enumerate(names):
            own, places = places[:rank], places[rank:]
            if rank or name == self.plan.head:
                await self.processes[name].send(JoinGroup([RankAddress("127.0.0.1", port) for port in own]))

    def _share_cutter(self, name: str) -> ModelCutter | None:
        ranks = self.plan.group_of(name)
        if not ranks:
            return None
        number = [rank.device for rank in ranks].index(name)
        return ModelCutter(share_header(ShareRules(self._header), [rank.weight for rank in ranks], number))

    async def _address(self, following: Opened) -> str:
        if not self.latency_s:
            return following.endpoint
        link = DelayedLink(following.endpoint, self.latency_s)
        self._stack.push_async_callback(link.close)
        return await link.open()

    async def _windows(
        self, cutter: ModelCutter | None, name: str, place: Workspace, extra: list[bool]
    ) -> list[WindowSource]:
        kept = self.assignments[name].windows
        if cutter is None:
            path = str(self.model)
            return [WindowSource(window=0, metadata=path, layers=(), assignment=kept[0], extra_buffers=extra[0])]
        plans = [
            WindowPlan(spec=cutter.spec(index, each.first, each.last), assignment=assignment, extra_buffers=buffers)
            for (index, each), assignment, buffers in zip(self.plan.windows_of(name), kept, extra, strict=True)
        ]
        await copy_layers(
            cutter.source, place.cache, (ref for plan in plans for ref in plan.spec.layers), lambda _: None
        )
        return place_windows(place, plans, 1)

    async def _pump(self, events: asyncio.Queue[object], process: RingProcess) -> None:
        try:
            async for event in process.events():
                if isinstance(event, GpuLoaded) and event.layers < event.planned:
                    raise LabError(f"the GPU took {event.layers} of {event.planned} layers: {event.why}")
                if not isinstance(event, Loading | Overdue | GpuLoaded):
                    await events.put(event)
        except Exception as exc:  # noqa: BLE001  (handed to the waiting caller)
            await events.put(exc)

    async def _next(self, name: str) -> object:
        event = await self._events[name].get()
        if isinstance(event, Exception):
            raise event
        return event

    async def opened(self, name: str) -> Opened:
        """Return the next event of device ``name``, which opens or reopens."""
        event = await self._next(name)
        assert isinstance(event, Opened), event
        return event

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        heard: Callable[[Sampled], None] = lambda _: None,
        reported: Callable[[Status], None] = lambda _: None,
        **how: Any,
    ) -> tuple[list[Sampled], Finished]:
        """Continue ``prompt``, with ``how`` passed to ``ask``. Return the newly sampled tokens, and how generation
        ended.

        ``heard`` is called with each token as it comes, ``reported`` with the head's counts if ``report`` requests
        them.
        """
        request = await self.ask(prompt, max_tokens, **how)
        return (await self.follow([request], heard, reported))[request]

    async def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        heard: Callable[[Sampled], None] = lambda _: None,
        **how: Any,
    ) -> list[list[Sampled]]:
        """Continue all ``prompts`` concurrently. Return the tokens sampled for each; ``heard`` is called as they
        come."""
        requests = [await self.ask(prompt, max_tokens, **how) for prompt in prompts]
        return [sampled for sampled, _ in (await self.follow(requests, heard, lambda _: None)).values()]

    async def follow(
        self,
        requests: Sequence[int],
        heard: Callable[[Sampled], None] = lambda _: None,
        reported: Callable[[Status], None] = lambda _: None,
    ) -> dict[int, tuple[list[Sampled], Finished]]:
        """Return the tokens sampled for each of ``requests``, and how each ended; other arguments as in
        ``generate``."""
        sampled: dict[int, list[Sampled]] = {request: [] for request in requests}
        ended: dict[int, Finished] = {}
        while len(ended) < len(requests):
            match await self.next_event():
                case Sampled() as event if event.request in sampled:
                    sampled[event.request].append(event)
                    heard(event)
                case Status() as event:
                    reported(event)
                case Finished() as event if event.request in sampled:
                    ended[event.request] = event
        return {request: (sampled[request], ended[request]) for request in requests}

    async def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        replayed: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        logprobs: int | None = None,
        **how: Any,
    ) -> int:
        """Give the head a generation, after tokens ``replayed`` that were sampled before. Return its number;
        ``next_event`` reports its tokens. ``how`` has more fields of ``Generate``."""
        self._requests += 1
        generate = Generate(
            request=self._requests,
            prompt=list(prompt),
            sampled=list(replayed),
            max_tokens=max_tokens,
            sampling=sampling,
            logprobs=logprobs,
            **{"reuses": False, **how},
        )
        await self.processes[self.plan.head].send(generate)
        return generate.request

    async def next_event(self) -> object:
        """Return the head's next event."""
        return await self._next(self.plan.head)

    async def report(self) -> None:
        """Request a report of the head's counts while it generates; see ``generate``."""
        await self.processes[self.plan.head].send(Report())

    async def status(self, name: str) -> Status:
        """Return the counts and sizes that the process of device ``name`` reports. Call it while nothing generates."""
        await self.processes[name].send(Report())
        event = await self._next(name)
        assert isinstance(event, Status), event
        return event
