"""One model that a head serves: its membership core, its plans and rings, its KV cache, and the door to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from primad.daemon.kv_blocks import HeldBlocks
from primad.errors import ClusterError
from primad.head.members.core import HeadContext
from primad.head.members.core_loop import CoreLoop
from primad.head.model.service import Service
from primad.head.rings.backend import RingBackend
from primad.head.rings.kv_backup import KvBackup
from primad.head.rings.planner import DevicePool, Planner
from primad.head.rings.rings import Rings
from primad.membership import types
from primad.membership.due import waiting_line
from primad.membership.step import phase_of
from primad.profiler.effort import QUICK

PAUSED = "paused by the owner of this head"
DeviceEffect = types.Greet | types.Drop | types.Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """What all models of a head share: its devices, the KV blocks that it holds, and who carries out what concerns
    devices."""

    pool: DevicePool
    held: HeldBlocks
    carry_out: Callable[[DeviceEffect], None]


class ModelServing:
    """The model of ``service``, whose requests come through ``backend``."""

    def __init__(self, head: HeadContext, service: Service, backend: RingBackend, shared: HeadParts) -> None:
        self._head = replace(head, core=self)
        self._shared, self._devices, self._reporter = shared, shared.pool.others, head.reporter
        self.service, self.backend = service, backend
        self._awaited = ""
        self._core = CoreLoop(self._carry_out, self._decided)
        self.planner = Planner(service, shared.pool)
        self.kv = KvBackup(self._head, service, self._devices, shared.held)
        backend.find_blocks = self.kv.find
        backend.around = self._around
        self.rings = Rings(self._head, service, shared.pool, self.planner, backend, self.kv)

    @property
    def state(self) -> types.State | None:
        """The membership core's; None until it runs."""
        return self._core.state

    async def run(self, state: types.State) -> None:
        """Serve until cancelled; the core begins with ``state``. Raises ``ClusterError`` if there is no first ring."""
        beside = [asyncio.create_task(self.rings.conduct()), asyncio.create_task(self.kv.run())]
        core = asyncio.create_task(self._core.run(state))
        try:
            done, _ = await asyncio.wait([core, *beside], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()  # none ends by itself but with an error
        finally:
            for each in (core, *beside):
                each.cancel()
            await asyncio.wait([core, *beside])

    async def close(self) -> None:
        """End all rings."""
        await self.rings.close()

    def post(self, event: types.Event) -> None:
        """Post an event, which the core handles in turn."""
        self._core.post(event)

    def corrected(self, event: types.Event) -> None:
        """What is known of this device changed: plans that were made in advance are invalid."""
        self.planner.forget()
        self.post(event)

    def _carry_out(self, effect: types.Effect) -> None:
        match effect:
            case types.Greet() | types.Drop() | types.Measure():
                self._shared.carry_out(effect)
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
        """Report who is awaited."""
        line = waiting_line(state, self._devices.measuring, QUICK.seconds, now)
        if line is not None and line != self._awaited:
            self._awaited = line
            self._reporter.resolve()
            self._reporter.report_line(line)

    def describe(self, what: str) -> None:
        """The line about the current state for health check and owner, while nothing is served."""
        if not self.backend.health().taken:
            self.backend.describe(what)
            self._reporter.wait(what)

    def _around(self) -> dict[str, Any]:
        """The part of the status that does not depend on a ring."""
        return {"cluster": self.cluster(), "events": list(self._core.news)}

    def cluster(self) -> list[dict[str, Any]]:
        """The devices, as this model has them."""
        state = self.state
        if state is None:
            return []
        limits = self._shared.pool.limits
        return [
            {
                "device": name,
                "phase": str(phase_of(state, name)),
                "reason": device.reason or (PAUSED if limits.of(name).is_paused else ""),
                "api": self._devices.api_of(name),
            }
            for name, device in sorted(state.devices.items())
        ]
