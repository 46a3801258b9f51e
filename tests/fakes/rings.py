"""Fakes of the solver, the rings and multicast, on which a head decides and acts: strict, and scripted by a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

from halda import CutOff, DeviceProfile, Infeasible, LeftOut, Plan, Prediction, Window
from primad.api.http.status import CompletionFigures
from primad.errors import PrimadError, RingError
from primad.head.rings.ring import RingInputs
from primad.kv.keys import KvBlock
from primad.membership.types import RingFailed
from primad.network.contacts import Contact
from primad.network.peer import Peer
from primad.planning.request import PlanRequest
from primad.ring.messages import Cancel, Finished, Generate, KvBegun, KvForgotten, KvKept, RingCommand, Sampled, Status
from primad.settings.timings import DiscoveryTimings
from tests.fakes.control import HEAD, HOST, FakeDevice

LAYERS = 30


class FakeSolver:
    """Replaces ``solve_in_process``: every offered device gets layers, if there are at least ``minimum`` devices.

    ``value`` gives the objective for a number of devices, ``layers`` the layers of a worker's window (default 1), and
    ``prediction`` the forecast of each plan. From the last question, ``memory`` has each device's available bytes,
    ``step_s`` its cost per window besides layers, and ``shared`` the devices with other models. With ``cut`` the links
    to the first device do not work: the others are left out, and required ones make the plan fail.
    """

    def __init__(self) -> None:
        self.minimum = 1
        self.value: Callable[[int], float] = lambda count: 10.0
        self.layers: dict[str, int] = {}
        self.cut = False
        self.prediction: Prediction | SimpleNamespace | None = None
        self.memory: dict[str, int] = {}
        self.step_s: dict[str, float] = {}
        self.shared = frozenset[str]()
        self.asked: list[tuple[str, ...]] = []
        self.precomputed: list[tuple[str, ...]] = []
        self._news = asyncio.Condition()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; checked with every question."""
        async with self._news:
            await self._news.wait_for(condition)

    async def __call__(self, question: PlanRequest, *, background: bool = False) -> SimpleNamespace:
        names = [device.device for device in question.devices]
        (self.precomputed if background else self.asked).append(tuple(names))
        if not background:
            self.memory = {device.device: device.ram_available_bytes for device in question.devices}
            self.step_s = {device.device: device.cpu.step_s for device in question.devices}
            self.shared = question.shared
        async with self._news:
            self._news.notify_all()
        if len(names) < self.minimum:
            raise Infeasible(f"{len(names)} devices are short of 1 GB", short_bytes=1)
        if self.cut:
            if question.require:
                raise CutOff("links that do not work")
            left = tuple(LeftOut(device=name, reason="the others are faster without it") for name in names[1:])
            plan = replace(plan_of(names[:1]), left_out=left)
            return self._solved(question, plan, 10.0)
        return self._solved(question, plan_of(names, self.layers), self.value(len(names)))

    def _solved(self, question: PlanRequest, plan: Plan, value: float) -> SimpleNamespace:
        solution = SimpleNamespace(plan=plan, prediction=self.prediction, objective_s=value)
        return SimpleNamespace(solution=solution, devices=question.devices, workload=question.workloads[0])


def plan_of(names: list[str], layers: Mapping[str, int] = MappingProxyType({})) -> Plan:
    """One layer, or the number in ``layers``, for each of ``names``; the rest for the first."""
    head, *others = names
    route, first = list[Window](), 0
    for name in [head, *others]:
        last = first + layers.get(name, 1)
        route.append(Window(device=name, first=first, last=last, gpu_layers=0))
        first = last
    tail = Window(device=head, first=first if others else 0, last=LAYERS, gpu_layers=0)
    return Plan(rounds=1, route=(*route, tail) if others else (tail,), output_on_gpu=False, streaming=(), left_out=())


class FakeRing:
    """Replaces ``HeadRing``; made by ``FakeRings``."""

    def __init__(self, inputs: RingInputs, rings: FakeRings) -> None:
        self.inputs, self._rings = inputs, rings
        self.reported: list[RingCommand] = []
        self.formed = self.drained = self.closed = self.unloaded = False
        self.keeps = rings.keeps
        self.emits: dict[str, Status | None] = {}
        self.measured: CompletionFigures | None = None
        self.broken_by: PrimadError | None = None
        self.error: PrimadError | None = rings.errors.pop(0) if rings.errors else None
        self.may_form = asyncio.Event()
        if not rings.holds_back:
            self.may_form.set()

    @property
    def epoch(self) -> int:
        return self.inputs.epoch

    @property
    def plan(self) -> Plan:
        return self.inputs.forecast.plan

    @property
    def profiles(self) -> dict[str, DeviceProfile]:
        workers = {name: link.profile for name, link in self.inputs.devices.workers.items()}
        return {self.plan.head: self.inputs.profile} | workers

    async def sources(self) -> dict[str, list[Contact]]:
        workers = self.inputs.devices.workers
        head = Contact(device=self.plan.head, key=HEAD.public, addresses=[HOST], port=self.inputs.layer_port)
        at = {
            name: Contact(device=name, key=link.key, addresses=[HOST], port=link.layer_port)
            for name, link in workers.items()
        }
        everyone = {self.plan.head: head} | at
        return {name: [each for other, each in everyone.items() if other != name] for name in everyone}

    @property
    def prediction(self) -> SimpleNamespace | None:
        return self.inputs.forecast.prediction

    @property
    def workers(self) -> set[str]:
        return set(self.inputs.devices.workers)

    async def form(self) -> None:
        assert not self.formed, "formed twice"
        await self._rings.changed()
        await self.may_form.wait()
        if self.error is not None:
            raise self.error
        self.formed = True
        await self._rings.changed()

    async def send(self, command: RingCommand) -> None:
        assert self.formed, "used before it was formed"
        assert not self.closed, f"{type(command).__name__} to a ring that was closed"
        assert not (self.drained and isinstance(command, Generate)), "a new generation for a ring that is drained"
        assert isinstance(command, Generate | Cancel)
        self.reported.append(command)
        await self._rings.changed()

    async def drain(self) -> None:
        assert self.formed
        assert not self.closed
        self.drained = True

    async def unload(self) -> None:
        self.unloaded = True
        await self.close()

    async def close(self) -> None:
        self.closed = True
        await self._rings.changed()

    def describe(self) -> list[str]:
        return [f"ring {self.epoch}: {', '.join(self.plan.devices)}"]

    async def status(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    async def statuses(self) -> dict[str, Status | None]:
        return self.emits

    @property
    def generates(self) -> list[Generate]:
        """The generations that it was given."""
        return [command for command in self.reported if isinstance(command, Generate)]

    def draw(self, request: int, *tokens: int) -> None:
        """Report ``tokens`` as sampled for ``request``."""
        for token in tokens:
            self.inputs.listener.deliver(self.epoch, Sampled(request=request, token=token, logprob=None, top=()))

    def begin_to_keep(self, *blocks: KvBlock) -> None:
        """Report that devices may keep ``blocks`` from now on."""
        self.inputs.listener.kv_changed(self.epoch, KvBegun(keys=[block.key for block in blocks]))

    def keep(self, request: int, *blocks: KvBlock) -> None:
        """Report that all devices keep ``blocks`` of ``request``."""
        self.inputs.listener.kv_changed(self.epoch, KvKept(request=request, blocks=list(blocks)))

    def forget(self, *blocks: KvBlock) -> None:
        """Report that ``blocks`` are no longer needed."""
        self.inputs.listener.kv_changed(self.epoch, KvForgotten(keys=[block.key for block in blocks]))

    def finish(self, request: int, tokens: int = 1) -> None:
        """Finish ``request`` after ``tokens`` tokens."""
        end = Finished(
            request=request,
            reason="stop",
            error=None,
            prompt_tokens=1,
            completion_tokens=tokens,
            prompt_s=0,
            decode_s=0,
        )
        self.inputs.listener.deliver(self.epoch, end)

    def breaks(self, device: str | None, reason: str | PrimadError, *, lasting: bool = False) -> None:
        """Break the ring."""
        self.broken_by = RingError(reason) if isinstance(reason, str) else reason
        self.inputs.listener.broken(RingFailed(self.epoch, device, str(reason), lasting))


class FakeRings:
    """Replaces the class ``HeadRing``; keeps all rings, by epoch.

    The next rings fail to form with ``errors``; with ``holds_back`` a ring forms when the test allows it. ``keeps``:
    whether they keep KV blocks.
    """

    def __init__(self) -> None:
        self.all: dict[int, FakeRing] = {}
        self.errors: list[PrimadError | None] = []
        self.holds_back = False
        self.keeps = False
        self._news = asyncio.Condition()

    def __call__(self, inputs: RingInputs) -> FakeRing:
        ring = FakeRing(inputs, self)
        assert ring.epoch not in self.all, "an epoch was used twice"
        own = (epoch for epoch, each in self.all.items() if each.inputs.service is inputs.service)
        assert ring.epoch > max(own, default=0), "epochs of a model went back"
        self.all[ring.epoch] = ring
        return ring

    async def changed(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def find(self, condition: Callable[[FakeRing], bool]) -> FakeRing:
        """The first ring for which ``condition`` holds, once there is one."""
        async with self._news:
            await self._news.wait_for(lambda: any(map(condition, self.all.values())))
        return next(filter(condition, self.all.values()))


class FakeDiscovery:
    """Replaces ``Discovery``: the test decides which devices are in sight."""

    def __init__(self) -> None:
        self._changed: Callable[[dict[str, Peer]], None] | None = None
        self._peers: dict[str, Peer] = {}
        self.announced = asyncio.Event()

    def __call__(
        self, host: str, interface: str | None, *, timings: DiscoveryTimings, trusts: Callable[[str], bool]
    ) -> FakeDiscovery:
        assert host == HOST
        return self

    async def browse(self, changed: Callable[[dict[str, Peer]], None]) -> None:
        self._changed = changed
        self._notify()

    async def announce(self, name: str, **what: object) -> str:
        assert what["role"] == "head"
        self.announced.set()
        return name

    async def set_pairing(self, number: int, port: int | None) -> None:
        """Does not announce pairing codes."""

    async def close(self) -> None:
        self._changed = None

    def sees(self, device: FakeDevice, /, at: str | None = None, **changes: Any) -> None:
        """``device`` appears, or changes its announcement, under the mDNS name ``at``."""
        fields: dict[str, Any] = {
            "device": device.name,
            "cluster": "test",
            "role": "worker",
            "version": "7",
            "protocol": 2,
            "addresses": (HOST,),
            "port": device.port,
            "key": device.key,
            "pairing": None,
        }
        self._peers[at or device.name] = Peer(**(fields | changes))
        self._notify()

    def misses(self, device: FakeDevice) -> None:
        """``device`` is no longer announced."""
        del self._peers[device.name]
        self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed(dict(self._peers))
