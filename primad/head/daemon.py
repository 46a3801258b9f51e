"""``primad serve``: the head's side that all its models share.

``head/members/devices.py`` finds and greets devices. Their events go to the membership core of each model
(``head/serving.py``), which decides when plans are solved (``head/rings/planner.py``), and when rings are formed,
concurrently, and handed over (``head/rings/rings.py``). The HTTP endpoint stays up throughout. Before the first ring of
its only model serves, an incurable error ends the program with one clear line.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

import zmq.asyncio
from starlette.types import ASGIApp

from primad.api.answering.backend import Health
from primad.daemon.kv_blocks import HeldBlocks
from primad.daemon.measuring import OwnProfile
from primad.daemon.memory_watch import MemoryWatch, ram_room
from primad.daemon.node import Node
from primad.daemon.pairing_service import PairingService
from primad.daemon.reporter import Reporter
from primad.head.admin_api import HeadAdminApi
from primad.head.members.core import HeadContext
from primad.head.members.core_loop import CoreLoop, Epochs
from primad.head.members.devices import Devices
from primad.head.model.learning import Learning
from primad.head.model.limits import DeviceLimits
from primad.head.model.options import ServeOptions
from primad.head.model.service import Service
from primad.head.rings.backend import RingBackend
from primad.head.rings.planner import DevicePool, OwnDevice
from primad.head.serving import DeviceEffect, HeadParts, ModelServing, Reply, cluster_of
from primad.layers.server import LayerServer, LayerSource
from primad.membership import types
from primad.membership.due import is_being_measured
from primad.membership.step import usable
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
from primad.system.tasks import Tasks, to_its_end
from primad.trust.trust import WORKER

HOLD_S: Final = 900.0
"""The longest time that open requests wait for a ring in preparation: layers may have to cross a slow network first."""


class HeadDaemon:
    """The head. It measures its ``profile`` while it looks for devices, and makes no plan before that.

    It serves one model for ever (``only``), or any number of models (``begin``, ``serve`` and ``end``). In the second
    case it has its own membership core, which welcomes devices, so that they are known when a model begins.
    """

    def __init__(self, node: Node, options: ServeOptions, *, profile: OwnProfile, reporter: Reporter) -> None:
        config = node.config
        self.node, self._config, self._options = node, config, options
        self._reporter = reporter
        self._memory_watch = MemoryWatch(
            partial(ram_room, config.limits), self._memory_recovered, look_every_s=node.timings.memory_look_every_s
        )
        self._context = zmq.asyncio.Context()
        self.app: ASGIApp | None = None
        """The HTTP application that serves requests relayed by devices, if they may relay."""
        self._missing: list[str] = []
        self._tasks = Tasks()
        self._head = HeadContext(node=node, options=options, sockets=self._context, core=self, reporter=reporter)
        self._pairing = PairingService(node, reporter.report_line, WORKER)
        self._devices = Devices(self._head, self._pairing)
        self._profile = profile
        self.pool = DevicePool(
            own=OwnDevice(lambda: profile.now(config.name), self._memory_watch, node.gpu_care),
            others=self._devices,
            learning=Learning(config.home),
            limits=DeviceLimits(config.home),
        )
        self._held = HeldBlocks(node, self._context)
        self._parts = HeadParts(
            pool=self.pool, held=self._held, epochs=Epochs(), carry_out=self._carry_out, let_go=self._let_go
        )
        self._core = CoreLoop(self._parts.epochs, self._carry_out_alone, self._reply_measured)
        self._unmeasured: list[tuple[frozenset[str], Reply]] = []
        """Measurements that cores of models wait for: the devices, and how to reply."""
        self._only: ModelServing | None = None
        self._servings: list[ModelServing] = []
        self._layer_port = 0
        self._ready = asyncio.Event()
        self.about: Callable[[], Mapping[str, Any]] = dict
        """Returns what else the owner's commands show of this head."""
        self._detail = "starting"
        self.admin_api = HeadAdminApi(self._head, self.pool, self._pairing, lambda: self._servings)
        node.gpu_care.attend(
            lambda: profile.now(config.name),
            report_line=reporter.report_line,
            changed=self._corrected,
            recovered=partial(self._memory_recovered, 0),
        )

    def only(self, service: Service, backend: RingBackend) -> ModelServing:
        """Serve this model and no other. Call it before ``run``."""
        self._only = self.begin(service, backend)
        return self._only

    def begin(self, service: Service, backend: RingBackend) -> ModelServing:
        """Add a model; ``serve`` serves it."""
        serving = ModelServing(self._head, service, backend, self._parts)
        serving.rings.layer_port = self._layer_port
        self._replan_others()
        self.pool.reserved[serving.name] = service.reserved_bytes
        self._servings.append(serving)
        return serving

    def _replan_others(self) -> None:
        """Invalidate plans that were made in advance: models have another amount of memory left."""
        for serving in self._servings:
            serving.planner.forget()

    async def serve(self, serving: ModelServing) -> None:
        """Serve the model until cancelled, while ``run`` runs. Raises ``ClusterError`` if there is no first ring."""
        await self._ready.wait()
        known = self._core.state
        assert known is not None, "the core of devices runs"
        settings = self._settings(serving.service.options)
        self.pool.held[serving.name] = lambda: serving.rings.forecasts
        await serving.run(types.State(settings=settings, started_s=known.started_s, devices=known.devices))

    async def end(self, serving: ModelServing) -> None:
        """Remove the model; afterwards no device holds anything of it."""
        if serving in self._servings:
            self._servings.remove(serving)
        await to_its_end(serving.unload())
        self.pool.held.pop(serving.name, None)
        self.pool.reserved.pop(serving.name, None)
        self._replan_others()
        state = self._core.state
        for name, device in () if state is None else state.devices.items():
            if device.leaving:
                await self._let_go(serving, name)

    def taken_here(self, name: str) -> int:
        """Return the bytes of this device's RAM that the model ``name`` takes, as planned."""
        here = [serving.taken() for serving in self._servings if serving.name == name]
        return sum(taken[self._config.name].ram_bytes for taken in here if self._config.name in taken)

    async def candidates(self) -> frozenset[str]:
        """Wait until devices are known, and return those that plans may use."""
        await self._ready.wait()
        assert self._core.state is not None, "the core of devices runs"
        return usable(self._core.state, asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Serve until cancelled. Raises ``PrimadError`` if it cannot start."""
        async with AsyncExitStack() as stack:
            stack.callback(self._context.destroy, linger=0)  # also closes sockets of work that had not begun at the end
            await stack.enter_async_context(Gate(self._context, self.node.trust.trusts))
            stack.callback(self._devices.close)
            stack.push_async_callback(self._tasks.close)
            stack.push_async_callback(self._close_servings)
            stack.push_async_callback(self._pairing.close)
            stack.enter_context(self.node.trust.announce_locally(self._config.name))
            sight = await stack.enter_async_context(AsyncExitStack())
            layers = LayerServer(
                self._context,
                self._config.host,
                self.node.identity,
                self._find_layer,
                cells=self.node.workspace.kv,
                bytes_per_s=self._config.transfer_limit_bytes_per_s,
                allows=self.node.trust.trusts,
            )
            self._layer_port = layers.port
            for serving in self._servings:
                serving.rings.layer_port = layers.port
            async with asyncio.TaskGroup() as group:
                services = [
                    group.create_task(layers.run()),
                    group.create_task(AdminServer(self.node.identity, self._config.home, self._administer).run()),
                    group.create_task(self._memory_watch.run()),
                    group.create_task(self.node.gpu_care.run()),
                    group.create_task(report(lambda: self.health().detail)),
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
                    await self._decide()
                finally:
                    for service in services:
                        service.cancel()
                    # Concurrently: saying goodbye takes a while, and so does ending a ring process.
                    await asyncio.gather(self._devices.farewell(), sight.aclose(), self._close_servings())
                    await self._held.clear()

    def _accept_relayed(self, app: ASGIApp) -> RelayServer:
        node = self.node
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

    async def _decide(self) -> None:
        """Run the core of the only model, or the core of devices."""
        settings, now = self._settings(self._options), asyncio.get_running_loop().time()
        if self._only is not None:
            await self._only.run(types.State(settings=settings, started_s=now))
        self._detail = "ready"
        self._ready.set()
        await self._core.run(types.State(settings=replace(settings, plans=False), started_s=now))

    async def _close_servings(self) -> None:
        await asyncio.gather(*(serving.close() for serving in self._servings))

    def _settings(self, options: ServeOptions) -> types.Settings:
        config = self._config
        wanted = options.wait or None
        wait_s = 0.0 if config.devices else self.node.timings.head.look_s
        if options.wait:
            wait_s = math.inf if options.wait_timeout_s is None else options.wait_timeout_s
        elif options.wait is None and self._missing:  # named devices are waited for
            wanted, wait_s = len(config.devices), math.inf
        return types.Settings(
            head=config.name,
            suspect_after_s=config.suspect_after_s,
            gone_after_s=config.gone_after_s,
            gain=config.replan_gain,
            use_all=options.run.wants_all,
            wanted=wanted,
            look_s=wait_s,
            hold_s=HOLD_S,
            solo=options.single_device or options.wait == 0,
            timings=self.node.timings.membership,
        )

    async def _refine(self) -> None:
        """Measure this device more exactly when it is idle; later plans use the result."""
        if await self._profile.refine():
            self._corrected()

    def _corrected(self) -> None:
        """This device's measurements changed."""
        for serving in self._servings:
            serving.corrected(types.DevicesCorrected(frozenset({self._config.name})))

    async def _memory_recovered(self, _: int) -> None:
        """This device or its GPU was short of memory and has room again."""
        for serving in self._servings:
            serving.corrected(types.DeviceMemoryRecovered(self._config.name))

    def post(self, event: types.Event) -> None:
        """Post an event of a device."""
        if self._only is None:
            self._core.post(event)
            if isinstance(event, types.Measured):  # ``_reply_measured`` reports it to the cores of models
                return
        for serving in self._servings:
            serving.post(event)

    def describe(self, what: str) -> None:
        """Set the line about the current state for the health check and the owner, while nothing is served."""
        self._detail = what
        for serving in self._servings:
            serving.describe(what)
        if not self._servings:
            self._reporter.wait(what)

    def _carry_out(self, effect: DeviceEffect, reply: Reply) -> None:
        """Carry out an effect of a model's core. On a head of several models the core of devices greets and measures
        for all of them, and the model's core is notified of what is known already."""
        if self._only is not None:
            self._carry_out_alone(effect)
            return
        match effect:
            case types.Greet(device) if device in self._devices.workers:
                reply(types.Welcomed(device))
            case types.Measure(devices):
                self._unmeasured.append((devices, reply))
                if (state := self._core.state) is not None:
                    self._reply_measured(state, asyncio.get_running_loop().time())
            case _:
                pass

    def _reply_measured(self, state: types.State, now: float) -> None:
        """The core of devices is in ``state``: reply to each core whose devices are measured, or cannot be measured
        now."""
        waiting, self._unmeasured = self._unmeasured, []
        for devices, reply in waiting:
            known = {name: state.devices[name] for name in devices if name in state.devices}
            if any(is_being_measured(state, name, now) for name in known):
                self._unmeasured.append((devices, reply))
                continue
            ready = frozenset(name for name, device in known.items() if types.is_measured(device))
            reply(types.Measured(ready, unreached=bool(self._devices.book.unreached(ready))))

    def _carry_out_alone(self, effect: types.Effect) -> None:
        match effect:
            case types.Greet(device):
                self._tasks.start(self._devices.greet(device))
            case types.Drop(device):
                self._devices.drop(device)
            case types.Measure(devices, again):
                self._tasks.start(self._devices.measure(devices, again=again))
            case types.LetGo(device):
                self._tasks.start(self._let_go(None, device))
            case types.OwnerLine(text):
                self._reporter.report_line(text)
            case _:
                raise AssertionError(f"without a model there is nothing to {type(effect).__name__}")

    async def _let_go(self, by: ModelServing | None, device: str) -> None:
        """``device`` asked to leave, and the model ``by`` does not need it: dismiss it once no other model needs it."""
        if not any(serving.needs(device) for serving in self._servings if serving is not by):
            await self._devices.dismiss(device)

    def _find_layer(self, digest: str) -> LayerSource | None:
        """Return the layer ``digest`` from a model file or the cache."""
        cuts = (serving.rings.find_layer(digest) for serving in self._servings)
        cut = next((cut for cut in cuts if cut is not None), None)
        return cut if cut is not None else self.node.workspace.cache.reader(digest)

    @property
    def is_ready(self) -> bool:
        """Whether models can begin."""
        return self._ready.is_set()

    def health(self) -> Health:
        """Whether models are served."""
        if self._only is not None:
            return self._only.backend.health()
        return Health(serving=self.is_ready, taken=True, detail=self._detail)

    @property
    def cluster(self) -> list[dict[str, Any]]:
        """The devices, for the status."""
        if self._only is not None:
            return self._only.cluster()
        return cluster_of([self._core.state, *(each.state for each in self._servings)], self.pool)

    def _refused(self) -> dict[str, str]:
        """Why trusted devices do not work for this head, by key."""
        reasons = {each["device"]: each["reason"] for each in self.cluster if each["phase"] == DevicePhase.PAIRED}
        return {key: reasons[label] for key, label in self._devices.labels.items() if reasons.get(label)}

    async def _administer(self, request: AdminRequest) -> AdminReply:
        match request:
            case OpenPairing() | BringCode() if self._options.single_device:
                return Refusal(
                    reason=f"{self._config.name} serves with --single-device; start it without to pair devices"
                )
            case OpenPairing():
                return await self._pairing.open()
            case BringCode(code=code, at=at):
                return Done(text=f"{self._config.name} is paired with {(await self._pairing.bring(code, at)).device}")
            case Describe():
                health = self.health()
                return Described(
                    status={
                        "device": self._config.name,
                        "role": "head",
                        "epoch": self._parts.epochs.latest,
                        "serving": health.serving,
                        "detail": health.detail,
                        "devices": {each["device"]: _state_text(each) for each in self.cluster},
                        "refused": self._refused(),
                        **self.about(),
                    }
                )
            case Leave() | Pause() | Resume():
                return Refusal(reason=f"{self._config.name} is the head, and the others need it; Ctrl-C ends it")


def _state_text(each: dict[str, Any]) -> str:
    return f"{each['phase']}: {each['reason']}" if each["reason"] else str(each["phase"])
