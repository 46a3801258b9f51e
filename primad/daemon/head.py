"""``primad serve``: find devices, plan, ship layers, open the ring, serve HTTP; do it again when the ring breaks.

Before it serves for the first time, whatever goes wrong ends the program with one clear line. After that the endpoint
stays up: requests of a ring that broke end with an error, and a new ring is formed from the devices that are left.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq.asyncio

from halda import (
    DeviceProfile,
    Infeasible,
    LinkProfile,
    ModelProfile,
    Objective,
    Plan,
    Prediction,
    Workload,
    arrange,
)
from primad import __version__
from primad.api.backend import ServedModel
from primad.cluster.discovery import Discovery, Peer
from primad.cluster.transfer import LayerServer
from primad.config import Config
from primad.daemon.backend import RingBackend
from primad.daemon.head_ring import HeadRing, RingOptions, RingParts, open_ring
from primad.daemon.links import LinkBook
from primad.daemon.reporter import Reporter
from primad.daemon.shard import Place
from primad.daemon.solving import Question, solve_apart
from primad.daemon.vocabulary import ModelVocabulary
from primad.daemon.worker_link import DeviceLostError, Worker, greet
from primad.errors import ClusterError, ConfigError, PlanError, PrimadError
from primad.gguf.architectures import cuttable
from primad.gguf.digests import LayerDigests
from primad.gguf.header import Header
from primad.gguf.layers import LayerCut
from primad.gguf.windows import ModelCutter

logger = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""How long the head looks for devices when nobody said how many to wait for."""
RETRY_S: Final = 2.0
DEFAULT_CONTEXT_TOKENS: Final = 4096
SOLVE_S: Final = 5.0
TYPICAL_PROMPT_TOKENS: Final = 512
TYPICAL_ANSWER_TOKENS: Final = 256


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
        header: Header,
        model: ModelProfile,
        profile: DeviceProfile,
        backend: RingBackend,
        reporter: Reporter,
    ) -> None:
        self._config = config
        self._options = options
        self._place = place
        self._header = header
        self._model = model
        self._profile = profile
        self._backend = backend
        self._reporter = reporter
        self._context = zmq.asyncio.Context()
        self._session = random.getrandbits(62)
        self._context_tokens = default_context(options, model)
        self._workload = default_workload(self._context_tokens, options.rows)
        self._epoch = 0
        self._cutter: ModelCutter | None = None
        self._links = LinkBook(self._context, config.name, self._session)
        self._peers: dict[str, Peer] = {}
        self._seen = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled. Raises ``PrimadError`` when it cannot serve in the first place."""
        async with AsyncExitStack() as stack:
            stack.callback(self._context.term)
            if not self._options.alone:
                await self._discover(stack)
            layers = LayerServer(self._context, self._config.host, self._find_layer)
            async with asyncio.TaskGroup() as group:
                server = group.create_task(layers.run())
                try:
                    await self._serve(layers.port)
                finally:
                    server.cancel()

    async def _discover(self, stack: AsyncExitStack) -> None:
        try:
            discovery = Discovery(self._config.host)
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
        )

    def _on_peers(self, peers: dict[str, Peer]) -> None:
        self._peers = {
            peer.device: peer
            for peer in peers.values()
            if peer.cluster == self._config.cluster and peer.role == "worker"
        }
        self._seen.set()

    def _find_layer(self, digest: str) -> LayerCut | None:
        return self._cutter.source(digest) if self._cutter is not None else None

    async def _serve(self, layer_port: int) -> None:
        has_served = False
        while True:
            try:
                workers = await self._gather(first=not has_served)
                try:
                    plan, prediction = await self._plan(workers, first=not has_served)
                    self._epoch += 1
                    async with open_ring(self._parts(plan, prediction, workers, layer_port)) as ring:
                        await self._announce(ring)
                        has_served = True
                        await asyncio.get_running_loop().create_future()  # until the ring breaks or we are cancelled
                finally:
                    for worker in workers:
                        worker.close()
            except PrimadError as exc:
                self._backend.detach(str(exc))
                self._reporter.settle()
                if not has_served:
                    raise
                if isinstance(exc, DeviceLostError):
                    self._links.forget(exc.device)
                self._reporter.say(f"{exc}; forming the ring again")
                await asyncio.sleep(RETRY_S)

    async def _gather(self, *, first: bool) -> list[Worker]:
        """Say hello to the devices: those named, and those in sight.

        Raises ``ClusterError`` when too few answer the ``first`` time; later it takes who is left.
        """
        if self._options.alone:
            return []
        wanted = self._options.wait if first else None
        named = len(self._config.devices)
        workers: dict[str, Worker] = {}
        refusals: dict[str, str] = {}
        loop = asyncio.get_running_loop()
        patience_s = self._options.wait_timeout_s if wanted is not None else (0.0 if named else LOOK_S)
        deadline = loop.time() + patience_s
        try:
            for address in self._config.devices:
                host, port = address.rsplit(":", 1)
                try:
                    self._add(workers, await self._greet(host.strip("[]"), int(port)))
                except ClusterError as exc:
                    if first:
                        raise ClusterError(f"--device {address}: {exc}; is 'primad join' running there?") from exc
                    refusals[address] = str(exc)  # it was lost while serving: what is left goes on
            while True:
                await self._greet_peers(workers, refusals)
                if wanted is not None and len(workers) >= wanted:
                    break
                remaining = deadline - loop.time()
                if remaining <= 0:
                    break
                found = f"{len(workers)} of {wanted}" if wanted is not None else str(len(workers))
                self._backend.describe(f"looking for devices: {found} found")
                self._seen.clear()
                with suppress(TimeoutError):
                    # Looks again twice a second: a device that was busy may be free now.
                    async with asyncio.timeout(min(remaining, 0.5)):
                        await self._seen.wait()
            if wanted is not None and len(workers) < wanted:
                why = "; ".join(f"{name}: {reason}" for name, reason in sorted(refusals.items()))
                raise ClusterError(
                    f"--wait {wanted}: found {len(workers)} of {wanted} devices in {patience_s:g} s"
                    + (f" ({why})" if why else "")
                    + "; start 'primad join' on the others or name them with --device"
                )
        except BaseException:
            for worker in workers.values():
                worker.close()
            raise
        for name, reason in refusals.items():
            self._reporter.say(f"{name} is left out: {reason}")
        return [workers[name] for name in sorted(workers)]

    async def _greet_peers(self, workers: dict[str, Worker], refusals: dict[str, str]) -> None:
        """Say hello to all devices in sight at once: one that is gone without a goodbye must not keep the others waiting."""
        async with asyncio.TaskGroup() as group:
            for name, peer in self._peers.items():
                if name not in workers:
                    group.create_task(self._greet_peer(peer, workers, refusals))

    async def _greet_peer(self, peer: Peer, workers: dict[str, Worker], refusals: dict[str, str]) -> None:
        for address in peer.addresses:
            try:
                self._add(workers, await self._greet(address, peer.port))
            except ClusterError as exc:
                refusals[peer.device] = str(exc)
            else:
                refusals.pop(peer.device, None)
                return

    async def _greet(self, host: str, port: int) -> Worker:
        return await greet(self._context, host, port, self._config.name, self._session)

    def _add(self, workers: dict[str, Worker], worker: Worker) -> None:
        if worker.name in workers:
            worker.close()  # the same device, named and seen
        elif worker.name == self._profile.device:
            worker.close()
            raise ClusterError(f"it has the head's name, {worker.name}; give one of them another --name")
        else:
            workers[worker.name] = worker

    async def _plan(self, workers: Sequence[Worker], *, first: bool) -> tuple[Plan, Prediction | None]:
        """The plan, and what it promises; nothing is predicted for one that was set by hand."""
        try:
            if self._options.windows is not None:
                devices = [self._profile, *(worker.profile for worker in workers)]
                return self._by_hand(devices, self._options.windows), None
            if workers:
                cuttable(self._header)
            present, links = await self._measure_links(workers, first=first)
            devices = [self._profile, *(worker.profile for worker in present)]
            self._backend.describe("planning")
            solution = await solve_apart(
                Question(
                    devices=devices,
                    links=links,
                    model=self._model,
                    workload=self._workload,
                    objective=self._options.objective,
                    require=frozenset(device.device for device in devices if self._options.use_all),
                    time_limit_s=SOLVE_S,
                )
            )
        except Infeasible as exc:
            raise PlanError(str(exc)) from exc
        return solution.plan, solution.prediction

    async def _measure_links(
        self, workers: Sequence[Worker], *, first: bool
    ) -> tuple[Sequence[Worker], list[LinkProfile]]:
        """Those of ``workers`` that are still there afterwards, and all links between them and this device.

        Raises ``DeviceLostError`` when one goes away the ``first`` time, and the owner asked for it.
        """
        announced = {name: peer.addresses for name, peer in self._peers.items()}
        while workers:
            self._backend.describe("measuring links")
            try:
                return workers, await self._links.measure(workers, announced, self._reporter)
            except DeviceLostError as exc:
                if first and (self._options.wait or self._config.devices):
                    raise
                self._reporter.say(f"{exc.device} is left out: {exc}")
                workers = [worker for worker in workers if worker.name != exc.device]
        return [], []

    def _by_hand(self, devices: Sequence[DeviceProfile], windows: tuple[int, ...]) -> Plan:
        names = [device.device for device in devices[: len(windows)]]
        if len(windows) > len(devices):
            raise PlanError(
                f"--windows {','.join(map(str, windows))} is for {len(windows)} devices; found {len(devices)}, "
                "this one among them; start 'primad join' on more or give fewer windows"
            )
        return plan_by_hand(names, windows, self._options.rounds, self._model)

    def _parts(
        self, plan: Plan, prediction: Prediction | None, workers: Sequence[Worker], layer_port: int
    ) -> RingParts:
        if self._cutter is None and len(plan.route) > 1:
            self._cutter = ModelCutter(self._header, LayerDigests(self._header, self._config.home / "digests.json"))
        self._backend.describe("loading")
        return RingParts(
            plan=plan,
            prediction=prediction,
            workers={worker.name: worker for worker in workers if worker.name in plan.devices},
            config=self._config,
            place=self._place,
            header=self._header,
            cutter=self._cutter,
            profile=self._profile,
            options=RingOptions(
                epoch=self._epoch,
                session=self._session,
                context_tokens=self._context_tokens,
                rows=self._options.rows,
                extra_buffers=self._options.extra_buffers,
                step_timeout_s=self._options.step_timeout_s,
                layer_port=layer_port,
            ),
            backend=self._backend,
            reporter=self._reporter,
            links=self._links,
        )

    async def _announce(self, ring: HeadRing) -> None:
        path = self._header.path
        vocabulary = await asyncio.to_thread(ModelVocabulary, self._header)
        served = ServedModel(
            id=model_id(path),
            created=self._backend.created,
            context_tokens=self._context_tokens,
            vocabulary=vocabulary,
        )
        self._reporter.settle()
        self._backend.attach(served, ring.send, ring.status, f"serving with {len(ring.plan.devices)} devices")
        for line in ring.describe():
            self._reporter.say(line)
        if ring.prediction is not None:
            self._reporter.say(
                f"predicted {ring.prediction.tokens_per_s:.3g} tokens/s, first token of an answer to "
                f"{self._workload.prompt_tokens} tokens after {ring.prediction.ttft_s:.2g} s"
            )


def plan_by_hand(names: Sequence[str], windows: tuple[int, ...], rounds: int | None, model: ModelProfile) -> Plan:
    """The plan in which the devices ``names`` have these layers a round. Raises ``PlanError`` naming the flag."""
    try:
        return arrange(names, windows, rounds=rounds or 1, model=model)
    except Infeasible as exc:
        raise PlanError(f"--windows {','.join(map(str, windows))}: {exc}; choose other windows") from exc


def check_options(options: ServeOptions, config: Config, header: Header, model: ModelProfile) -> None:
    """Judge all that can be judged before the network is touched. Raises ``ConfigError``, ``PlanError``, ``ModelError``."""
    default_context(options, model)
    windows = options.windows
    if windows is not None:
        plan_by_hand([f"device {i}" for i in range(len(windows))], windows, options.rounds, model)
    if (windows is not None and len(windows) > 1) or options.wait or config.devices:
        cuttable(header)


def model_id(path: Path) -> str:
    """The name that clients call the model by: its file's, without the part number of a split model."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


def default_context(options: ServeOptions, model: ModelProfile) -> int:
    """The context that was asked for, or what the model was trained for, at most ``DEFAULT_CONTEXT_TOKENS``.

    Raises ``ConfigError`` when more was asked for than the model was trained for.
    """
    trained = model.context_tokens or DEFAULT_CONTEXT_TOKENS
    if options.context_tokens is None:
        return min(trained, DEFAULT_CONTEXT_TOKENS)
    if options.context_tokens > trained:
        raise ConfigError(
            f"--context {options.context_tokens}: {model.name} was trained for {trained} tokens; give less"
        )
    return options.context_tokens


def default_workload(context_tokens: int, rows: int, sequences: int = 1) -> Workload:
    """What a plan is made for when nothing else is said: a typical question and answer within the context."""
    prompt = min(TYPICAL_PROMPT_TOKENS, max(1, context_tokens // 2))
    return Workload(
        context_tokens=context_tokens,
        sequences=sequences,
        prompt_tokens=prompt,
        answer_tokens=min(TYPICAL_ANSWER_TOKENS, max(1, context_tokens - prompt)),
        chunk_rows=rows,
    )


def bind_http(host: str, port: int) -> socket.socket:
    """The listening socket of the HTTP server. Raises ``ConfigError`` when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    if sys.platform != "win32":  # there it would share a taken port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"--port {port}: cannot listen on {host}: {exc.strerror or exc}; choose another --port"
        ) from exc
    return listener
