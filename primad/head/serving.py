"""One model that a head serves: its membership core, plans, rings, KV cache and picture encoder, and the backend that
takes its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from primad.daemon.kv_blocks import HeldBlocks
from primad.daemon.pictures import PictureService
from primad.errors import ClusterError
from primad.head.members.core import HeadContext
from primad.head.members.core_loop import CoreLoop, Epochs
from primad.head.model.service import Service
from primad.head.rings.backend import RingBackend
from primad.head.rings.kv_backup import KvBackup
from primad.head.rings.planner import DevicePool, Planner
from primad.head.rings.remote_encoder import RemoteEncoder
from primad.head.rings.rings import Rings
from primad.head.rings.taken import Taken, peak
from primad.membership import types
from primad.membership.due import waiting_line
from primad.membership.step import phase_of
from primad.membership.types import DevicePhase
from primad.profiler.effort import QUICK
from primad.system.niceness import apply_nice
from primad.system.processors import usable_cores

PICTURE_NICE: Final = 10
"""Picture encoding yields to a request's next token."""
PAUSED = "paused by the owner of this head"
Reply = Callable[[types.Event], None]
DeviceEffect = types.Greet | types.Drop | types.Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """What all models of a head share: its devices, the KV blocks that it holds, the ring numbers, and ``carry_out``,
    which carries out effects that concern devices.

    ``let_go`` has a device leave once no model needs it."""

    pool: DevicePool
    held: HeldBlocks
    epochs: Epochs
    carry_out: Callable[[DeviceEffect, Reply], None]
    let_go: Callable[[ModelServing | None, str], Awaitable[None]]


class ModelServing:
    """The model of ``service``, whose requests come through ``backend``."""

    def __init__(self, head: HeadContext, service: Service, backend: RingBackend, shared: HeadParts) -> None:
        self.name = service.model.id
        self._head = replace(head, core=self)
        self._shared, self._devices, self._reporter = shared, shared.pool.others, head.reporter
        self.service, self.backend = service, backend
        self._awaited = ""
        self._core = CoreLoop(shared.epochs, self._carry_out, self._decided)
        self.planner = Planner(service, shared.pool, self.name)
        self.kv = KvBackup(self._head, service, self._devices, shared.held)
        self.changed: Callable[[], None] = lambda: None
        """Called when the state or progress may have changed."""
        backend.find_blocks = self.kv.find
        backend.around = self._around
        self.rings = Rings(
            self._head, service, shared.pool, self.planner, backend, self.kv, partial(shared.let_go, self)
        )
        self._pictures = backend.pictures = _pictures_of(self._head, service, self.rings.encoder)

    @property
    def state(self) -> types.State | None:
        """The membership core's state; None until it runs."""
        return self._core.state

    async def run(self, state: types.State) -> None:
        """Serve until cancelled; the core begins with ``state``. Raises ``ClusterError`` if there is no first ring."""
        beside = [asyncio.create_task(self.rings.conduct()), asyncio.create_task(self.kv.run())]
        core = asyncio.create_task(self._core.run(state))
        try:
            done, _ = await asyncio.wait([core, *beside], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()  # each one ends only with an error
        finally:
            for each in (core, *beside):
                each.cancel()
            await asyncio.wait([core, *beside])

    async def close(self) -> None:
        """End all rings."""
        await self.rings.close()
        await self._end_pictures()

    async def unload(self) -> None:
        """End all rings and wait until no device holds anything of the model."""
        await self.rings.unload()
        self.planner.forget()
        await self.kv.close()
        await self._end_pictures()

    async def _end_pictures(self) -> None:
        if self._pictures is not None:
            await self._pictures.close()

    @property
    def progress(self) -> float | None:
        """The share of its first ring that other devices have loaded; None before there is a plan, or without other
        devices."""
        attempt = None if self.state is None else self.state.attempt
        if attempt is None or not attempt.members:
            return None
        shares = [
            (1 if pace.stage is types.LoadStage.LOAD else 0) + pace.share
            for pace in attempt.loading.values()
            if pace.stage is not types.LoadStage.READY
        ]
        return 1 - sum(1 - share / 2 for share in shares) / len(attempt.members)

    def taken(self) -> dict[str, Taken]:
        """Return what its rings take of each device, as planned."""
        return peak(self.rings.forecasts)

    def needs(self, device: str) -> bool:
        """Whether its ring has layers on ``device``."""
        state = self.state
        return state is not None and state.serving is not None and device in state.serving.members

    def post(self, event: types.Event) -> None:
        """Post an event; the core handles events in order."""
        self._core.post(event)

    def corrected(self, event: types.Event) -> None:
        """Post a change of what is known about a device, and invalidate plans that were made in advance."""
        self.planner.forget()
        self.post(event)

    def _carry_out(self, effect: types.Effect) -> None:
        match effect:
            case types.Greet() | types.Drop() | types.Measure():
                self._shared.carry_out(effect, self._core.post)
            case types.Solve(epoch, candidates, instead):
                self.rings.solve(epoch, candidates, instead)
            case types.Form(epoch):
                self.rings.form(epoch)
            case types.Abandon(epoch):
                self.rings.abandon(epoch)
            case types.Serve() | types.Close() | types.Fail() | types.LetGo():
                self.rings.order(effect)
            case types.OwnerLine(text):
                self._reporter.resolve()
                self._reporter.report_line(text)
            case types.GiveUp(reason):
                raise ClusterError(reason)

    def _decided(self, state: types.State, now: float) -> None:
        """Notify listeners of the change, and report which devices are awaited."""
        self.changed()
        line = waiting_line(state, self._devices.measuring, QUICK.seconds, now)
        if line is not None and line != self._awaited:
            self._awaited = line
            self._reporter.resolve()
            self._reporter.report_line(line)

    def describe(self, what: str) -> None:
        """Set the line about the current state for the health check and the owner, unless requests are taken
        already."""
        if not self.backend.health().taken:
            self.backend.describe(what)
            self._reporter.wait(what)
            self.changed()

    def _around(self) -> dict[str, Any]:
        """Return the part of the status that does not depend on a ring."""
        pictures = {} if self._pictures is None else {"pictures": self._pictures.status()}
        return {"cluster": self.cluster(), "events": list(self._core.news)} | pictures

    def cluster(self) -> list[dict[str, Any]]:
        """Return the devices, as this model's core sees them."""
        return cluster_of([self.state], self._shared.pool)


def _pictures_of(head: HeadContext, service: Service, elsewhere: RemoteEncoder) -> PictureService | None:
    encoder, config = service.encoder.path, head.node.config
    if encoder is None:
        return None
    nice = max(config.nice, PICTURE_NICE)
    threads = config.threads or usable_cores()
    return PictureService(
        encoder,
        service.model.file_for_encoder(),
        threads=threads,
        image_tokens=service.options.image_tokens,
        began=lambda pid: apply_nice(pid, nice),
        elsewhere=elsewhere,
    )


def cluster_of(states: Iterable[types.State | None], pool: DevicePool) -> list[dict[str, Any]]:
    """Merge the devices of all ``states``: a device that loads or serves in any of them is shown so."""
    found: dict[str, dict[str, Any]] = {}
    for state in (each for each in states if each is not None):
        for name, device in state.devices.items():
            phase = phase_of(state, name)
            if name in found and phase not in (DevicePhase.LOADING, DevicePhase.SERVING):
                continue
            reason = device.reason or (PAUSED if pool.limits.of(name).is_paused else "")
            found[name] = {"device": name, "phase": str(phase), "reason": reason, "api": pool.others.api_of(name)}
    return [found[name] for name in sorted(found)]
