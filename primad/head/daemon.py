"""``primad serve``: the head's side that all its models share.

Devices are found and greeted (``head/members/devices.py``); their events go to the membership core of each model
(``head/serving.py``), where plans are solved (``head/rings/planner.py``), and rings are formed side by side and handed over
(``head/rings/rings.py``). The HTTP endpoint stays up throughout. Before the first ring of its only model serves, an
incurable error ends the program with one clear line.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack
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
from primad.head.admin_api import HeadAdminApi
from primad.head.members.core import HeadContext
from primad.head.members.devices import Devices
from primad.head.model.learning import Learning
from primad.head.model.limits import DeviceLimits
from primad.head.model.service import Service
from primad.head.rings.backend import RingBackend
from primad.head.rings.planner import DevicePool, OwnDevice
from primad.head.serving import DeviceEffect, HeadParts, ModelServing
from primad.layers.server import LayerServer, LayerSource
from primad.membership import types
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
from primad.relay.server import RelayServer
from primad.system.notify import report
from primad.system.tasks import Tasks
from primad.trust.trust import WORKER

HOLD_S: Final = 900.0
"""The longest that open requests wait for a ring in preparation: layers may have to cross a slow network first."""


class HeadDaemon:
    """The head of ``service``. Its ``profile`` is measured while it looks for devices, and no plan is made before."""

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
        self._reporter = reporter
        self._memory_watch = MemoryWatch(
            partial(ram_room, config.limits), self._memory_recovered, look_every_s=node.timings.memory_look_every_s
        )
        self._context = zmq.asyncio.Context()
        self.app: ASGIApp | None = None
        """The HTTP application for requests that devices relay, if they may."""
        self._missing: list[str] = []
        self._tasks = Tasks()
        self._head = HeadContext(node=node, options=self._options, sockets=self._context, core=self, reporter=reporter)
        self._pairing = PairingService(node, reporter.report_line, WORKER)
        self._devices = Devices(self._head, self._pairing)
        self._profile = profile
        pool = DevicePool(
            own=OwnDevice(lambda: profile.now(config.name), self._memory_watch, node.gpu_care),
            others=self._devices,
            learning=Learning(config.home),
            limits=DeviceLimits(config.home),
        )
        self._held = HeldBlocks(node, self._context)
        self._shared = HeadParts(pool=pool, held=self._held, carry_out=self._carry_out)
        self.serving = ModelServing(self._head, service, backend, self._shared)
        self.admin_api = HeadAdminApi(self._head, pool, self._pairing, lambda: self.serving)
        node.gpu_care.attend(
            lambda: profile.now(config.name),
            report_line=reporter.report_line,
            changed=self._corrected,
            recovered=partial(self._memory_recovered, 0),
        )

    async def run(self) -> None:
        """Serve until cancelled. Raises ``PrimadError`` if it cannot start."""
        async with AsyncExitStack() as stack:
            stack.callback(self._context.destroy, linger=0)  # also what had not begun at the end
            await stack.enter_async_context(Gate(self._context, self._node.trust.trusts))
            stack.callback(self._devices.close)
            stack.push_async_callback(self._tasks.close)
            stack.push_async_callback(self.serving.close)
            stack.push_async_callback(self._pairing.close)
            stack.enter_context(self._node.trust.announce_locally(self._config.name))
            sight = await stack.enter_async_context(AsyncExitStack())
            layers = LayerServer(
                self._context,
                self._config.host,
                self._node.identity,
                self._find_layer,
                cells=self._node.workspace.kv,
                bytes_per_s=self._config.transfer_limit_bytes_per_s,
                allows=self._node.trust.trusts,
            )
            self.serving.rings.layer_port = layers.port
            async with asyncio.TaskGroup() as group:
                services = [
                    group.create_task(layers.run()),
                    group.create_task(AdminServer(self._node.identity, self._config.home, self._administer).run()),
                    group.create_task(self._memory_watch.run()),
                    group.create_task(self._node.gpu_care.run()),
                    group.create_task(report(lambda: self.serving.backend.health().detail)),
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
                    now = asyncio.get_running_loop().time()
                    await self.serving.run(types.State(settings=self._settings(), started_s=now))
                finally:
                    for service in services:
                        service.cancel()
                    # Concurrently: to say goodbye takes a while, and so does the end of a ring process.
                    await asyncio.gather(self._devices.farewell(), sight.aclose(), self.serving.close())
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
            self._corrected()

    def _corrected(self) -> None:
        """Other figures of this device are known."""
        self.serving.corrected(types.DevicesCorrected(frozenset({self._config.name})))

    async def _memory_recovered(self, _: int) -> None:
        """This device was short of memory, or its GPU was, and has room again."""
        self.serving.corrected(types.DeviceMemoryRecovered(self._config.name))

    def post(self, event: types.Event) -> None:
        """Post an event of a device."""
        self.serving.post(event)

    def describe(self, what: str) -> None:
        """The line about the current state for health check and owner, while nothing is served."""
        self.serving.describe(what)

    def _carry_out(self, effect: DeviceEffect) -> None:
        match effect:
            case types.Greet(device):
                self._tasks.start(self._devices.greet(device))
            case types.Drop(device):
                self._devices.drop(device)
            case types.Measure(devices, again):
                self._tasks.start(self._devices.measure(devices, again=again))

    def _find_layer(self, digest: str) -> LayerSource | None:
        """The layer ``digest``: from a model file, or the cache."""
        cut = self.serving.rings.find_layer(digest)
        return cut if cut is not None else self._node.workspace.cache.reader(digest)

    def _refused(self) -> dict[str, str]:
        """Why trusted devices do not work for this head, by key."""
        cluster = self.serving.cluster()
        reasons = {each["device"]: each["reason"] for each in cluster if each["phase"] == DevicePhase.PAIRED}
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
                state, health = self.serving.state, self.serving.backend.health()
                return Described(
                    status={
                        "device": self._config.name,
                        "role": "head",
                        "epoch": 0 if state is None else state.epoch,
                        "serving": health.serving,
                        "detail": health.detail,
                        "devices": {each["device"]: _state_text(each) for each in self.serving.cluster()},
                        "refused": self._refused(),
                    }
                )
            case Leave() | Pause() | Resume():
                return Refusal(reason=f"{self._config.name} is the head, and the others need it; Ctrl-C ends it")


def _state_text(each: dict[str, Any]) -> str:
    return f"{each['phase']}: {each['reason']}" if each["reason"] else str(each["phase"])
