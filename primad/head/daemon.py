"""``primad serve``: the shell around the membership core. It passes events to the core and carries out its decisions.

Devices are found and greeted (``head/members/devices.py``), plans are solved (``head/rings/planner.py``), rings are
formed side by side and handed over (``head/rings/rings.py``); the HTTP endpoint stays up throughout. Before the first
ring serves, an incurable error ends the program with one clear line.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, Final

import zmq.asyncio
from starlette.types import ASGIApp

from primad.daemon.kv_blocks import HeldBlocks
from primad.daemon.measuring import OwnProfile
from primad.daemon.memory_watch import MemoryWatch, ram_room
from primad.daemon.node import Node
from primad.daemon.pairing_service import PairingService
from primad.daemon.reporter import Reporter
from primad.errors import ClusterError
from primad.head.admin_api import HeadAdminApi
from primad.head.members.core import HeadContext
from primad.head.members.devices import Devices
from primad.head.model.learning import Learning
from primad.head.model.limits import DeviceLimits
from primad.head.model.service import Service
from primad.head.rings.backend import RingBackend
from primad.head.rings.kv_backup import KvBackup
from primad.head.rings.planner import DevicePool, OwnDevice, Planner
from primad.head.rings.rings import Rings
from primad.layers.server import LayerServer
from primad.membership import types
from primad.membership.due import waiting_line
from primad.membership.news import news
from primad.membership.step import phase_of, step, wake_at
from primad.membership.types import DevicePhase
from primad.network.admin import (
    AdminReply,
    AdminRequest,
    AdminServer,
    BringCode,
    Describe,
    Described,
    Done,
    Leave,
    OpenPairing,
    Pause,
    Refusal,
    Resume,
)
from primad.network.gate import Gate
from primad.profiler.effort import QUICK
from primad.relay.server import RelayServer
from primad.system.notify import report
from primad.system.tasks import Tasks
from primad.trust.trust import WORKER

HOLD_S: Final = 900.0
"""The longest that open requests wait for a ring in preparation: layers may have to cross a slow network first."""
_MAX_EVENTS: Final = 10_000
NEWS_KEPT: Final = 100
PAUSED: Final = "paused by the owner of this head"


class HeadDaemon:
    """The head. Its ``profile`` is measured while it looks for devices, and no plan is made before."""

    def __init__(
        self,
        node: Node,
        service: Service,
        *,
        profile: OwnProfile,
        backend: RingBackend,
        reporter: Reporter,
    ) -> None:
        config = node.config
        self._node, self._config, self._options = node, config, service.options
        self._backend, self._reporter = backend, reporter
        self._memory_watch = MemoryWatch(
            partial(ram_room, config.limits), self._memory_recovered, look_every_s=node.timings.memory_look_every_s
        )
        self._context = zmq.asyncio.Context()
        self._events: asyncio.Queue[types.Event] = asyncio.Queue(_MAX_EVENTS)
        self.app: ASGIApp | None = None
        """The HTTP application for requests that devices relay, if they may."""
        self._state: types.State | None = None
        self._awaited = ""
        self._missing: list[str] = []
        self._news: deque[dict[str, Any]] = deque(maxlen=NEWS_KEPT)
        self._tasks = Tasks()
        head = HeadContext(node=node, service=service, sockets=self._context, core=self, reporter=reporter)
        self._pairing = PairingService(node, reporter.report_line, WORKER)
        self._devices = Devices(head, self._pairing)
        self._profile = profile
        pool = DevicePool(
            own=OwnDevice(lambda: profile.now(config.name), self._memory_watch, node.gpu_care),
            others=self._devices,
            learning=Learning(config.home),
            limits=DeviceLimits(config.home),
        )
        self._device_limits = pool.limits
        self._planner = Planner(service, pool)
        self._held = HeldBlocks(node, self._context)
        self._kv = KvBackup(head, self._devices, self._held)
        backend.find_blocks = self._kv.find
        backend.around = self._around
        self._rings = Rings(head, pool, self._planner, backend, self._kv)
        self.admin_api = HeadAdminApi(head, pool, self._planner, self._pairing, lambda: self._rings.offered_forecast)
        node.gpu_care.attend(
            lambda: profile.now(config.name),
            report_line=reporter.report_line,
            changed=self._rings.gpu_changed,
            recovered=partial(self._memory_recovered, 0),
        )

    async def run(self) -> None:
        """Serve until cancelled. Raises ``PrimadError`` if it cannot start."""
        async with AsyncExitStack() as stack:
            stack.callback(self._context.destroy, linger=0)  # also what had not begun at the end
            await stack.enter_async_context(Gate(self._context, self._node.trust.trusts))
            stack.callback(self._devices.close)
            stack.push_async_callback(self._tasks.close)
            stack.push_async_callback(self._rings.close)
            stack.push_async_callback(self._pairing.close)
            stack.enter_context(self._node.trust.announce_locally(self._config.name))
            sight = await stack.enter_async_context(AsyncExitStack())
            layers = LayerServer(
                self._context,
                self._config.host,
                self._node.identity,
                self._rings.find_layer,
                cells=self._node.workspace.kv,
                bytes_per_s=self._config.transfer_limit_bytes_per_s,
                allows=self._node.trust.trusts,
            )
            self._rings.layer_port = layers.port
            async with asyncio.TaskGroup() as group:
                services = [
                    group.create_task(layers.run()),
                    group.create_task(AdminServer(self._node.identity, self._config.home, self._administer).run()),
                    group.create_task(self._rings.conduct()),
                    group.create_task(self._kv.run()),
                    group.create_task(self._memory_watch.run()),
                    group.create_task(self._node.gpu_care.run()),
                    group.create_task(report(lambda: self._backend.health().detail)),
                ]
                if self.app is not None and not self._options.single_device:
                    services.append(group.create_task(self._accept_relayed(self.app).run()))
                measuring = group.create_task(self._profile.measure())
                services.append(measuring)
                try:
                    if not self._options.single_device:
                        self.describe("looking for devices")
                        await self._devices.discover(sight)
                        self._missing = await self._devices.greet_named()
                        services.append(group.create_task(self._devices.await_named(self._missing)))
                        services.append(group.create_task(self._devices.watch_trust()))
                        services.append(group.create_task(self._devices.notify_revoked()))
                    await measuring
                    services.append(group.create_task(self._refine()))
                    await self._drive()
                finally:
                    for service in services:
                        service.cancel()
                    # Concurrently: to say goodbye takes a while, and so does the end of a ring process.
                    await asyncio.gather(self._devices.farewell(), sight.aclose(), self._rings.close())
                    await self._held.clear()

    def _accept_relayed(self, app: ASGIApp) -> RelayServer:
        node = self._node
        relays = RelayServer(
            self._context,
            self._config.host,
            node.identity,
            app,
            allows=node.trust.trusts,
            gone_after_s=self._config.gone_after_s,
        )
        self._devices.accept_relayed(relays.port)
        return relays

    async def _drive(self) -> None:
        """Pass every event to the core, and carry out its decisions."""
        loop = asyncio.get_running_loop()
        state = types.State(settings=self._settings(), started_s=loop.time())
        # Named devices have been welcomed already: they are known before the core checks whether all are there.
        event: types.Event = types.Tick() if self._events.empty() else self._events.get_nowait()
        while True:
            now = loop.time()
            before = state
            state, effects = step(state, event, now)
            self._state = state
            for each in news(before, state, effects):
                self._news.append({"at_s": time.time(), "kind": str(each.kind), "text": each.text})
            for effect in effects:
                self._do(effect)
            self._report_who_is_awaited(now)
            wake = wake_at(state, now)  # overdue timers have fired by now
            event = types.Tick()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(wake):
                    event = await self._events.get()

    def _report_who_is_awaited(self, now: float) -> None:
        assert self._state is not None
        line = waiting_line(self._state, self._devices.measuring, QUICK.seconds, now)
        if line is not None and line != self._awaited:
            self._awaited = line
            self._reporter.resolve()
            self._reporter.report_line(line)

    def _settings(self) -> types.Settings:
        options, config = self._options, self._config
        wanted = options.wait or None
        wait_s = 0.0 if config.devices else self._node.timings.head.look_s
        if options.wait:
            wait_s = math.inf if options.wait_timeout_s is None else options.wait_timeout_s
        elif options.wait is None and self._missing:  # named devices are waited for
            wanted, wait_s = len(config.devices), math.inf
        return types.Settings(
            head=config.name,
            suspect_after_s=config.suspect_after_s,
            gone_after_s=config.gone_after_s,
            gain=config.replan_gain,
            use_all=options.run.use_all,
            wanted=wanted,
            look_s=wait_s,
            hold_s=HOLD_S,
            solo=options.single_device or options.wait == 0,
            timings=self._node.timings.membership,
        )

    async def _refine(self) -> None:
        """Measure this device better when it is idle; later plans use it."""
        if await self._profile.refine():
            self._planner.forget()
            self.post(types.DevicesCorrected(frozenset({self._config.name})))

    async def _memory_recovered(self, _: int) -> None:
        """This device was short of memory, or its GPU was, and has room again."""
        self._planner.forget()
        self.post(types.DeviceMemoryRecovered(self._config.name))

    def post(self, event: types.Event) -> None:
        """Post an event, which the core handles in turn."""
        self._events.put_nowait(event)

    def _do(self, effect: types.Effect) -> None:
        match effect:
            case types.Greet(device):
                self._tasks.start(self._devices.greet(device))
            case types.Drop(device):
                self._devices.drop(device)
            case types.Measure(devices, again):
                self._tasks.start(self._devices.measure(devices, again=again))
            case types.Solve(epoch, candidates, instead):
                self._rings.solve(epoch, candidates, instead)
            case types.Form(epoch):
                self._rings.form(epoch)
            case types.Abandon(epoch):
                self._rings.abandon(epoch)
            case types.Serve() | types.Close() | types.Fail() | types.LetGo():
                self._rings.order(effect)
            case types.OwnerLine(text):
                self._reporter.resolve()
                self._reporter.report_line(text)
            case types.GiveUp(reason):
                raise ClusterError(reason)

    def describe(self, what: str) -> None:
        """The line about the current state for health check and owner, while nothing is served."""
        if not self._backend.health().taken:
            self._backend.describe(what)
            self._reporter.wait(what)

    def _around(self) -> dict[str, Any]:
        """The part of the status that does not depend on a ring."""
        return {"cluster": self._cluster(), "events": list(self._news)}

    def _cluster(self) -> list[dict[str, Any]]:
        state = self._state
        if state is None:
            return []
        return [
            {
                "device": name,
                "phase": str(phase_of(state, name)),
                "reason": device.reason or (PAUSED if self._device_limits.of(name).is_paused else ""),
                "api": self._devices.api_of(name),
            }
            for name, device in sorted(state.devices.items())
        ]

    def _refused(self) -> dict[str, str]:
        """Why trusted devices do not work for this head, by key."""
        reasons = {each["device"]: each["reason"] for each in self._cluster() if each["phase"] == DevicePhase.PAIRED}
        return {key: reasons[label] for key, label in self._devices.labels.items() if reasons.get(label)}

    async def _administer(self, request: AdminRequest) -> AdminReply:
        match request:
            case OpenPairing() | BringCode() if self._options.single_device:
                return Refusal(reason=f"{self._config.name} serves with --alone; start it without to pair devices")
            case OpenPairing():
                return await self._pairing.open()
            case BringCode(code=code, at=at):
                return Done(text=f"{self._config.name} is paired with {(await self._pairing.bring(code, at)).device}")
            case Describe():
                epoch = self._state.epoch if self._state is not None else 0
                return Described(
                    status={
                        "device": self._config.name,
                        "role": "head",
                        "epoch": epoch,
                        "serving": self._backend.health().serving,
                        "detail": self._backend.health().detail,
                        "devices": {each["device"]: _state_text(each) for each in self._cluster()},
                        "refused": self._refused(),
                    }
                )
            case Leave() | Pause() | Resume():
                return Refusal(reason=f"{self._config.name} is the head, and the others need it; Ctrl-C ends it")


def _state_text(each: dict[str, Any]) -> str:
    return f"{each['phase']}: {each['reason']}" if each["reason"] else str(each["phase"])
