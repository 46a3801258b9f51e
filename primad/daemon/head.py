"""``primad serve``: the shell around the membership core. It tells the core what happens and does what the core decides.

Devices are found and greeted, plans are solved, rings are formed beside each other and handed over; the HTTP endpoint stays
up throughout. Before it serves for the first time, what cannot be cured ends the program with one clear line.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

import zmq.asyncio

from halda import DeviceProfile, Infeasible, ModelProfile, Objective, Plan, Prediction
from primad import __version__
from primad.api.backend import ServedModel
from primad.cluster import members
from primad.cluster.admin import (
    AdminAnswer,
    AdminRequest,
    AdminServer,
    Describe,
    Described,
    Leave,
    OpenPairing,
    Pause,
    Refusal,
    Resume,
)
from primad.cluster.discovery import Discovery
from primad.cluster.gate import Gate
from primad.cluster.identity import Identity
from primad.cluster.layer_server import LayerServer, LayerSource
from primad.cluster.membership import phase_of, step, wake_at
from primad.cluster.peer import Peer
from primad.cluster.trust import TrustedDevice, TrustStore
from primad.config import Config, is_loopback
from primad.daemon.backend import RingBackend
from primad.daemon.extra import Tried
from primad.daemon.head_ring import HeadRing
from primad.daemon.links import LinkBook
from primad.daemon.pairing_desk import PairingDesk
from primad.daemon.questions import default_context, default_workload, model_id, plan_by_hand
from primad.daemon.reporter import Reporter
from primad.daemon.ring_parts import RingOptions, RingParts
from primad.daemon.shard import Place
from primad.daemon.solving import Question, solve_apart
from primad.daemon.vocabulary import ModelVocabulary
from primad.daemon.worker_link import Caller, DeviceLostError, WorkerLink, greet, knock, version_gap
from primad.errors import ClusterError, PlanError, PrimadError
from primad.gguf.architectures import cuttable
from primad.gguf.digests import LayerDigests
from primad.gguf.header import Header
from primad.gguf.windows import ModelCutter

logger = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""How long the head looks for devices when nobody said how many to wait for."""
SOLVE_S: Final = 5.0
HOLD_S: Final = 900.0
"""Open answers wait at most this long for a ring that is on its way: layers may have to cross a slow network first."""
TRUST_LOOK_S: Final = 2.0
MOST_FORESEEN: Final = 8
"""In larger rings the loss of one device is planned for when it comes."""
_MAX_EVENTS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What ``primad serve`` was asked for.

    ``wait`` is the number of workers to wait for (None: take who is there), at most ``wait_timeout_s``. ``windows`` and
    ``rounds`` set the plan by hand; otherwise it makes ``objective`` small, with every device in it if ``use_all``.
    ``extra_buffers`` is auto, on or off.
    """

    wait: int | None
    wait_timeout_s: float
    windows: tuple[int, ...] | None
    rounds: int | None
    extra_buffers: str
    context_tokens: int | None
    rows: int
    step_timeout_s: float
    http_port: int
    alone: bool
    objective: Objective
    use_all: bool


class HeadDaemon:
    """The head. ``profile`` gives this device's profile as of now."""

    def __init__(
        self,
        *,
        config: Config,
        options: ServeOptions,
        place: Place,
        identity: Identity,
        trust: TrustStore,
        header: Header,
        model: ModelProfile,
        profile: Callable[[], DeviceProfile],
        backend: RingBackend,
        reporter: Reporter,
    ) -> None:
        self._config, self._options, self._place = config, options, place
        self._identity, self._trust = identity, trust
        self._header, self._model, self._profile = header, model, profile
        self._backend, self._reporter = backend, reporter
        self._context = zmq.asyncio.Context()
        self._session = random.getrandbits(62)
        self._caller = Caller(
            context=self._context,
            identity=identity,
            device=config.name,
            session=self._session,
            build=place.build,
            gone_after_s=config.gone_after_s,
            ping_interval_s=config.heartbeat_interval_s,
        )
        self._context_tokens = default_context(options.context_tokens, model)
        self._workload = default_workload(self._context_tokens, options.rows)
        self._cutter: ModelCutter | None = None
        self._vocabulary: ModelVocabulary | None = None
        self._book = LinkBook(self._context, identity, config.name)
        self._desk = PairingDesk(config, identity, trust, reporter.say, self._on_paired)
        self._layer_port = 0
        self._peers: dict[str, Peer] = {}
        self._named: dict[str, tuple[str, int, str]] = {}
        self._told: set[tuple[str, str]] = set()
        self._workers: dict[str, WorkerLink] = {}
        self._known_keys: set[str] = set()
        self._tried: Tried = {}
        self._foreseen: dict[frozenset[str], tuple[Plan, Prediction | None, float]] = {}
        self._foreseeing: asyncio.Task[None] | None = None
        self._plans: dict[int, tuple[Plan, Prediction | None]] = {}
        self._rings: dict[int, HeadRing] = {}
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._events: asyncio.Queue[members.Event] = asyncio.Queue(_MAX_EVENTS)
        self._orders: asyncio.Queue[members.Serve | members.Close | members.Fail] = asyncio.Queue(_MAX_EVENTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._state: members.State | None = None

    # ---- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. Raises ``PrimadError`` when it cannot serve in the first place."""
        async with AsyncExitStack() as stack:
            stack.callback(self._context.destroy, linger=0)  # also what was not begun yet when the end came
            await stack.enter_async_context(Gate(self._context, self._trust.trusts))
            stack.push_async_callback(self._close)
            stack.push_async_callback(self._desk.close)
            stack.enter_context(self._trust.announce_locally(self._config.name))
            layers = LayerServer(
                self._context,
                self._config.host,
                self._identity,
                self._find_layer,
                bytes_per_s=self._config.transfer_limit_bytes_per_s,
                allows=self._trust.trusts,
            )
            self._layer_port = layers.port
            async with asyncio.TaskGroup() as group:
                services = [
                    group.create_task(layers.run()),
                    group.create_task(AdminServer(self._identity, self._config.home, self._administer).run()),
                    group.create_task(self._conduct()),
                ]
                try:
                    if not self._options.alone:
                        self._describe("looking for devices")
                        await self._discover(stack)
                        await self._greet_named()
                        services.append(group.create_task(self._watch_trust()))
                    await self._drive()
                finally:
                    for service in services:
                        service.cancel()

    async def _close(self) -> None:
        tasks = [*self._tasks, *self._jobs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(ring.close() for ring in self._rings.values()))
        for worker in self._workers.values():
            worker.close()

    async def _drive(self) -> None:
        """Ask the core about everything that happens, and do what it says."""
        loop = asyncio.get_running_loop()
        state = members.State(settings=self._settings(), started_s=loop.time())
        # Named devices said welcome already: they are known before it is asked whether all are there.
        event: members.Event = members.Tick() if self._events.empty() else self._events.get_nowait()
        while True:
            state, effects = step(state, event, loop.time())
            self._state = state
            for effect in effects:
                self._do(effect)
            wake = wake_at(state, loop.time())
            event = members.Tick()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(wake):
                    event = await self._events.get()

    def _settings(self) -> members.Settings:
        options, config = self._options, self._config
        patience_s = options.wait_timeout_s if options.wait else (0.0 if config.devices else LOOK_S)
        return members.Settings(
            head=config.name,
            suspect_after_s=config.suspect_after_s,
            gone_after_s=config.gone_after_s,
            gain=-math.inf if options.use_all else config.replan_gain,
            wanted=options.wait or None,
            look_s=patience_s,
            hold_s=HOLD_S,
            solo=options.alone or options.wait == 0,
        )

    def _post(self, event: members.Event) -> None:
        self._events.put_nowait(event)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_raise_ours)
        return task

    def _do(self, effect: members.Effect) -> None:
        match effect:
            case members.Greet(device):
                self._start(self._greet(device))
            case members.Drop(device):
                self._drop(device)
            case members.Measure(devices):
                self._start(self._measure(devices))
            case members.Solve(epoch, candidates):
                self._job(epoch, self._solve(epoch, candidates))
            case members.Form(epoch):
                self._job(epoch, self._form(epoch))
            case members.Abandon(epoch):
                self._start(self._abandon(epoch))
            case members.Serve() | members.Close() | members.Fail():
                self._orders.put_nowait(effect)
            case members.Dismiss(device):
                if device in self._workers:
                    self._start(self._dismiss(self._workers[device]))
            case members.Say(text):
                self._reporter.settle()
                self._reporter.say(text)
            case members.GiveUp(reason):
                raise ClusterError(reason)

    # ---- devices ----------------------------------------------------------------------------------------------------

    async def _discover(self, stack: AsyncExitStack) -> None:
        try:
            discovery = Discovery(self._config.host, self._config.interface)
        except ClusterError as exc:
            if not self._config.devices:
                self._reporter.say(str(exc))
            return
        stack.push_async_callback(discovery.close)
        await discovery.browse(self._on_peers)
        await discovery.announce(
            self._config.name,
            cluster=self._config.cluster,
            role="head",
            version=__version__,
            port=self._options.http_port,
            key=self._identity.public,
        )
        self._desk.use(discovery)
        if not is_loopback(self._config.host):
            code = await self._desk.open()
            self._reporter.say(
                f"to add a device, run there: primad join --code {code.code} (good for {code.expires_s / 60:.0f} minutes; "
                "'primad pair' shows a new one)"
            )

    def _on_peers(self, peers: dict[str, Peer]) -> None:
        seen = {
            peer.device: peer
            for peer in peers.values()
            if peer.cluster == self._config.cluster and peer.role == "worker"
        }
        before, self._peers = self._peers, seen
        for name in before.keys() - seen.keys() - self._named.keys():
            self._post(members.Vanished(name))
        for name, peer in seen.items():
            if before.get(name) != peer:
                self._see(peer)

    def _see(self, peer: Peer) -> None:
        trusted = bool(peer.key) and self._trust.trusts(peer.key)
        if not trusted and any(each.device == peer.device for each in self._trust.entries()):
            # Anyone can announce any name; what we know of the device that we trust does not change by that.
            self._tell_once(
                peer.device, f"a device that is not trusted calls itself {peer.device}; it is not listened to"
            )
            return
        self._post(members.Seen(peer.device, trusted))
        if not peer.key:
            self._tell_once(peer.device, version_gap(self._config.name, peer.device, peer.version, peer.protocol))
        elif not trusted and peer.key not in self._known_keys:
            self._tell_once(
                peer.device,
                f"{peer.device} is in sight, but not paired; 'primad pair' here shows a code for 'primad join --code' there",
            )

    def _tell_once(self, device: str, line: str) -> None:
        if (device, line) not in self._told:
            self._told.add((device, line))
            self._reporter.say(line)

    def _on_paired(self, device: TrustedDevice) -> None:
        del device  # the next look at the trust store sees it

    async def _watch_trust(self) -> None:
        """Notice what 'primad devices trust' and 'revoke', and pairing, change."""
        trusted: dict[str, bool] = {}
        entries: object = None
        while True:
            for worker in list(self._workers.values()):
                if not self._trust.trusts(worker.key):
                    self.lost(worker.name, "it is not trusted any more")
            for peer in list(self._peers.values()):  # after the loss: who is gone is greeted again, a stranger is not
                now = bool(peer.key) and self._trust.trusts(peer.key)
                if trusted.get(peer.key, now) != now:
                    self._see(peer)
                trusted[peer.key] = now
            latest = [(each.device, each.key) for each in self._trust.entries()], self._trust.revoked()
            if entries is not None and latest != entries:
                for worker in list(self._workers.values()):
                    await self._introduce(worker)
            entries = latest
            await asyncio.sleep(TRUST_LOOK_S)

    async def _greet_named(self) -> None:
        """Say hello to the devices that were named. Raises ``ClusterError`` when one does not answer."""
        for address in self._config.devices:
            host, port = address.rsplit(":", 1)
            place = (host.strip("[]"), int(port))
            keys = [each.key for each in self._trust.entries()]
            try:
                end, _ = await knock(self._caller, [place], keys)
                worker = await greet(self._caller, end, self)
            except ClusterError as exc:
                raise ClusterError(f"--device {address}: {exc}; is 'primad join' running there?") from exc
            self._named[worker.name] = (*place, worker.key)
            await self._welcome(worker)

    async def _greet(self, device: str) -> None:
        peer, named = self._peers.get(device), self._named.get(device)
        places = [named[:2]] if named is not None else []
        keys = {named[2]} if named is not None else set()
        if peer is not None:
            places += [(address, peer.port) for address in peer.addresses]
            keys.add(peer.key)
        keys = {key for key in keys if self._trust.trusts(key)}  # what is known of it may be from before it was revoked
        try:
            if not keys:
                raise ClusterError("it is not trusted any more")
            end, knocked = await knock(self._caller, places, keys)
            if knocked.device != device:
                end.close()
                raise ClusterError(f"{knocked.device} answers in its place")
            worker = await greet(self._caller, end, self)
        except ClusterError as exc:
            self._tell_once(device, f"{device} is left out: {exc}")
            self._post(members.Refused(device, str(exc)))
            return
        await self._welcome(worker)

    async def _welcome(self, worker: WorkerLink) -> None:
        """Take up a device that works for this head from now on."""
        name = worker.name
        if name == self._config.name:
            worker.close()
            reason = f"it has the head's name, {name}; give one of them another --name"
            self._post(members.Refused(name, reason))
            raise_named = any(named[2] == worker.key for named in self._named.values())
            if raise_named:
                raise ClusterError(f"--device {worker.end.address}: {reason}")
            return
        previous = self._workers.pop(name, None)
        if previous is not None:
            previous.close()
        self._workers[name] = worker
        self._known_keys.add(worker.key)
        self._told = {(device, line) for device, line in self._told if device != name}
        if worker.build != self._place.build:
            self._reporter.say(
                f"llama.cpp differs: {self._place.build} here, {worker.build} on {name}; answers may differ from those of "
                "one build in rare words; install the same version on both"
            )
        for other in list(self._workers.values()):
            await self._introduce(other)  # they trust each other before they are asked to measure or to give layers
        self._post(members.Welcomed(name))

    async def _introduce(self, worker: WorkerLink) -> None:
        entries = [(each.device, each.key) for each in self._trust.entries() if each.key != worker.key]
        with suppress(ClusterError):
            await worker.introduce(entries, self._trust.revoked() - {worker.key})

    def _drop(self, device: str) -> None:
        worker = self._workers.pop(device, None)
        if worker is not None:
            worker.close()
        self._book.forget(device)

    async def _dismiss(self, worker: WorkerLink) -> None:
        with suppress(ClusterError):
            await worker.dismiss()

    def heard(self, device: str) -> None:
        """A worker gave a sign of life."""
        self._post(members.Heard(device))

    def lost(self, device: str, reason: str) -> None:
        """The link to a worker is of no use any more."""
        self._post(members.Lost(device, reason))

    def leaving(self, device: str, reason: str) -> None:
        """A worker asks to go."""
        self._post(members.Leaving(device, reason))

    async def _measure(self, devices: frozenset[str]) -> None:
        left = set(devices)
        announced = {name: peer.addresses for name, peer in self._peers.items()}
        self._describe("measuring links")
        while workers := [self._workers[name] for name in sorted(left) if name in self._workers]:
            try:
                await self._book.measure(workers, announced, self._reporter)
                break
            except DeviceLostError as exc:
                self._post(members.Lost(exc.device, str(exc)))
                left.discard(exc.device)
        self._post(members.Measured(frozenset(left)))

    # ---- plans and rings --------------------------------------------------------------------------------------------

    def _job(self, epoch: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._start(work)
        self._jobs[epoch] = task
        task.add_done_callback(lambda done: self._jobs.pop(epoch, None) if self._jobs.get(epoch) is done else None)

    async def _solve(self, epoch: int, candidates: frozenset[str]) -> None:
        workers = [self._workers[name] for name in sorted(candidates) if name in self._workers]
        self._describe("planning")
        try:
            foreseen = self._foreseen.get(candidates)
            plan, prediction, value = foreseen if foreseen is not None else await self._plan(workers)
        except (PlanError, Infeasible) as exc:
            self._post(members.NoPlan(epoch, str(exc)))
            return
        except PrimadError as exc:
            self._post(members.Broken(epoch, None, str(exc)))
            return
        self._plans[epoch] = (plan, prediction)
        self._post(members.Solved(epoch, frozenset(plan.devices) - {plan.head}, value))

    async def _foresee(self, candidates: frozenset[str], members: frozenset[str]) -> None:
        """Plan for the loss of each of ``members``, so that no time goes into it when it comes. Nothing waits for this."""
        for lost in sorted(members):
            rest = candidates - {lost}
            workers = [self._workers[name] for name in sorted(rest) if name in self._workers]
            try:
                self._foreseen[rest] = await self._plan(workers, background=True)
            except (PrimadError, Infeasible) as exc:
                logger.info("without %s there is no plan: %s", lost, exc)

    async def _plan(
        self, workers: Sequence[WorkerLink], *, background: bool = False
    ) -> tuple[Plan, Prediction | None, float]:
        """The plan for the head and ``workers``, what it promises and its objective.

        Nothing is predicted for one that was set by hand. ``background`` lets all other work of this device go first.
        """
        windows = self._options.windows
        own = await asyncio.to_thread(self._profile)
        devices = [own, *(worker.profile for worker in workers)]
        if windows is not None:
            if len(windows) > len(devices):
                raise PlanError(
                    f"--windows {','.join(map(str, windows))} is for {len(windows)} devices; found {len(devices)}, "
                    "this one among them; start 'primad join' on more or give fewer windows"
                )
            names = [device.device for device in devices[: len(windows)]]
            return plan_by_hand(names, windows, self._options.rounds, self._model), None, 0.0
        if len(devices) > 1:
            cuttable(self._header)
        names = [device.device for device in devices]
        solution = await solve_apart(
            Question(
                devices=list(devices),
                links=self._book.between(names),
                model=self._model,
                workload=self._workload,
                objective=self._options.objective,
                require=frozenset(names if self._options.use_all else ()),
                time_limit_s=SOLVE_S,
            ),
            background=background,
        )
        return solution.plan, solution.prediction, solution.objective_s

    async def _form(self, epoch: int) -> None:
        self._describe("loading")
        ring = HeadRing(self._parts(epoch))
        self._rings[epoch] = ring
        try:
            await ring.form()
            if self._vocabulary is None:
                self._vocabulary = await asyncio.to_thread(ModelVocabulary, self._header)
        except PrimadError as exc:
            device = getattr(exc, "device", None)
            self._post(members.Broken(epoch, device, str(exc), getattr(exc, "fault", "") == "disk"))
            return
        self._post(members.Formed(epoch))

    def _parts(self, epoch: int) -> RingParts:
        plan, prediction = self._plans[epoch]
        if self._cutter is None and len(plan.route) > 1:
            self._cutter = ModelCutter(self._header, LayerDigests(self._header, self._config.home / "digests.json"))
        return RingParts(
            plan=plan,
            prediction=prediction,
            workers={name: self._workers[name] for name in plan.devices if name in self._workers},
            holders=dict(self._workers),
            config=self._config,
            key=self._identity.public,
            layer_port=self._layer_port,
            place=self._place,
            header=self._header,
            cutter=self._cutter,
            profile=self._profile(),
            options=RingOptions(
                epoch=epoch,
                session=self._session,
                context_tokens=self._context_tokens,
                rows=self._options.rows,
                extra_buffers=self._options.extra_buffers,
                step_timeout_s=self._options.step_timeout_s,
            ),
            deliver=self._backend.deliver,
            on_broken=self._on_broken,
            reporter=self._reporter,
            links=self._book,
            tried=self._tried,
        )

    def _on_broken(self, epoch: int, device: str | None, reason: str, lasting: bool) -> None:
        self._post(members.Broken(epoch, device, reason, lasting))

    def _find_layer(self, digest: str) -> LayerSource | None:
        cut = self._cutter.source(digest) if self._cutter is not None else None
        return cut if cut is not None else self._place.cache.reader(digest)

    async def _abandon(self, epoch: int) -> None:
        job = self._jobs.pop(epoch, None)
        if job is not None:
            job.cancel()
            await asyncio.wait([job])
        self._plans.pop(epoch, None)
        ring = self._rings.pop(epoch, None)
        if ring is not None:
            await ring.close()

    async def _conduct(self) -> None:
        """Hand the endpoint from ring to ring, in the order in which the core decided."""
        while True:
            match await self._orders.get():
                case members.Serve(epoch, instead):
                    await self._serve(epoch, instead)
                case members.Close(epoch, reason):
                    self._backend.hold(f"forming the ring again: {reason}")
                    self._start(self._abandon(epoch))
                case members.Fail(reason):
                    self._backend.fail(reason)
                    self._reporter.say(f"nothing can be served: {reason}; waiting for devices")

    async def _serve(self, epoch: int, instead: int | None) -> None:
        ring = self._rings[epoch]
        if instead is not None and instead in self._rings:
            self._backend.hand_over()
            await self._rings[instead].drain()
        count = len(ring.plan.devices)
        detail = f"serving with {count} device{'s' if count > 1 else ''}"
        await self._backend.attach(self._served(), epoch, ring.send, self._status_of(ring), detail)
        if instead is not None:
            self._start(self._abandon(instead))
        self._foresee_losses()
        self._reporter.settle()
        for line in ring.describe():
            self._reporter.say(line)
        if ring.prediction is not None:
            self._reporter.say(
                f"predicted {ring.prediction.tokens_per_s:.3g} tokens/s, first token of an answer to "
                f"{self._workload.prompt_tokens} tokens after {ring.prediction.ttft_s:.2g} s"
            )

    def _foresee_losses(self) -> None:
        if self._foreseeing is not None:
            self._foreseeing.cancel()
        self._foreseen.clear()
        serving = self._state.serving if self._state is not None else None
        if serving is not None and len(serving.members) <= MOST_FORESEEN and self._options.windows is None:
            self._foreseeing = self._start(self._foresee(serving.candidates, serving.members))

    def _served(self) -> ServedModel:
        assert self._vocabulary is not None
        return ServedModel(
            id=model_id(self._header.path),
            created=self._backend.created,
            context_tokens=self._context_tokens,
            vocabulary=self._vocabulary,
        )

    def _status_of(self, ring: HeadRing) -> Callable[[], Coroutine[Any, Any, dict[str, Any]]]:
        async def status() -> dict[str, Any]:
            return await ring.status() | {"cluster": self._cluster()}

        return status

    def _cluster(self) -> list[dict[str, Any]]:
        state = self._state
        if state is None:
            return []
        return [
            {"device": name, "phase": str(phase_of(state, name)), "reason": device.reason}
            for name, device in sorted(state.devices.items())
        ]

    def _describe(self, what: str) -> None:
        """What the health check says goes on, while nothing is served."""
        if not self._backend.health().serving:
            self._backend.describe(what)

    async def _administer(self, request: AdminRequest) -> AdminAnswer:
        match request:
            case OpenPairing() if self._options.alone:
                return Refusal(reason=f"{self._config.name} serves with --alone; start it without to pair devices")
            case OpenPairing():
                return await self._desk.open()
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
                    }
                )
            case Leave() | Pause() | Resume():
                return Refusal(reason=f"{self._config.name} is the head, and the others need it; Ctrl-C ends it")


def _state_text(each: dict[str, Any]) -> str:
    return f"{each['phase']}: {each['reason']}" if each["reason"] else str(each["phase"])


def _raise_ours(task: asyncio.Task[None]) -> None:
    """A task that fails is our mistake: say so where it is seen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a task of the head failed", exc_info=error)
