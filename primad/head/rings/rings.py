"""The rings of a head: solves for a plan, forms its ring, lets it serve, hands over to the next one, closes it.

``solve``, ``form`` and ``abandon`` work concurrently and post their results; the serving ring changes in the order of
decisions (``order`` and ``conduct``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from halda import DeviceProfile, Infeasible, LeftOut, Prediction
from primad.api.answering.backend import ServedModel
from primad.errors import ClusterError, ModelError, PlanError, PrimadError
from primad.head.members.core import HeadContext, attributed
from primad.head.members.worker_link import WorkerLink
from primad.head.model.service import Service
from primad.head.model.vocabulary import facts_of, sampling_defaults
from primad.head.rings.backend import GoOn, RingBackend, StatusOf
from primad.head.rings.kv_backup import KvBackup
from primad.head.rings.planner import DevicePool, Planner
from primad.head.rings.remote_encoder import EncoderInputs, RemoteEncoder
from primad.head.rings.ring import HeadRing
from primad.head.rings.ring_inputs import RingDevices, RingInputs
from primad.head.rings.status import (
    at_once_line,
    attention_line,
    chains_line,
    draft_place_line,
    left_out_line,
    no_drafts_line,
    page_line,
    predicted_line,
)
from primad.layers.server import LayerSource
from primad.membership import types
from primad.network.contacts import Contact
from primad.planning.corrections import MIN_TOKENS
from primad.planning.default_context import too_small_for
from primad.planning.encoder_place import EncoderPlace
from primad.planning.forecast import Forecast
from primad.planning.load_times import LoadTimes, load_times
from primad.ring.messages import Finished, GenerationEvent, KvBegun, KvForgotten, KvKept, KvNews
from primad.settings.quantities import show_count
from primad.system.tasks import Tasks, mistake, to_its_end

logger = logging.getLogger(__name__)

_MAX_ORDERS: Final = 1000
MAX_EXPLAINED: Final = 4
"""The slowdown by a device that is left out is computed for at most this many devices."""

ATTENTION_CHANGES: Final = "no plan has memory for the attention of running requests; their text may change"

LetsGo = Callable[[str], Awaitable[None]]
"""Has a device that asked to leave do so."""
Order = types.Serve | types.Close | types.Fail | types.LetGo


class Rings:
    """All rings of this head, on devices of ``pool``. Workers fetch layers at ``layer_port``."""

    def __init__(
        self,
        head: HeadContext,
        service: Service,
        pool: DevicePool,
        planner: Planner,
        backend: RingBackend,
        kv: KvBackup,
        let_go: LetsGo,
    ) -> None:
        self._head, self._node, self._service, self._model = head, head.node, service, service.model
        self._core, self._reporter = head.core, head.reporter
        self._pool, self._devices = pool, pool.others
        self._planner, self._backend, self._kv = planner, backend, kv
        self._let_go = let_go
        self.layer_port = 0
        self._candidates: dict[int, frozenset[str]] = {}
        self._plans: dict[int, Forecast] = {}
        self._rings: dict[int, HeadRing] = {}
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._idle_plans: set[int] = set()
        """Rings planned while no request was open: their attention was chosen freely."""
        self._serving = self._forming = 0
        self.gave_up: Callable[[], None] = lambda: None
        """Called when nothing can be served until devices or files change."""
        self.serves = asyncio.Event()
        """Set once a ring has served."""
        self._page_reported = not service.options.is_only
        """Whether the owner was told where the page is; a head of several models reports that itself."""
        self._timed = 0
        self._times: LoadTimes | None = None
        """Load times of the first ring, whose epoch is ``_timed``."""
        self._why_left_out: dict[str, str] = {}
        """Why the serving ring has no layers on these devices."""
        self.offered_forecast: Forecast | None = None
        """The forecast of the latest serving ring; the next ring keeps its context and its sequences if it can."""
        self._learner: asyncio.Task[None] | None = None
        self._orders: asyncio.Queue[Order] = asyncio.Queue(_MAX_ORDERS)
        self._tasks = Tasks()
        self.encoder = RemoteEncoder(
            EncoderInputs(
                service=service,
                place=self._encoder_place,
                find=self._usable,
                sources=self._sources_for,
                own=head.node.config.name,
                report_line=head.reporter.report_line,
            )
        )
        """Encodes pictures on another device, if the plan has the encoder there."""

    def _encoder_place(self) -> EncoderPlace | None:
        forecast = self._plans.get(self._serving)
        return None if forecast is None else forecast.encoder_place

    async def _sources_for(self, worker: WorkerLink) -> list[Contact]:
        """Return sources of layers for ``worker``, which need not be in the ring. Raises ``ClusterError``."""
        if (ring := self._rings.get(self._serving)) is None:
            raise ClusterError("no ring serves")
        return await ring.sources_for(worker)

    def solve(self, epoch: int, candidates: frozenset[str], instead: int | None = None) -> None:
        """Start planning for the head and ``candidates``; ``Solved``, ``NoPlan`` or ``RingFailed`` follows.

        A plan with the same windows as ring ``instead`` counts as no plan.
        """
        self._candidates[epoch] = candidates
        self._job(epoch, self._solve(epoch, candidates, instead))

    def form(self, epoch: int) -> None:
        """Start forming the planned ring; ``Formed`` or ``RingFailed`` follows."""
        self._forming = epoch
        self._job(epoch, self._form(epoch))

    def abandon(self, epoch: int) -> None:
        """Drop ring ``epoch``, whatever its state."""
        self._tasks.start(self._abandon(epoch))

    def order(self, order: Order) -> None:
        """Queue an order: let another ring serve, or none. Orders are carried out in turn."""
        self._orders.put_nowait(order)

    async def close(self) -> None:
        """End everything."""
        await self._tasks.close()
        await asyncio.gather(*(ring.close() for ring in self._rings.values()))

    async def unload(self) -> None:
        """End everything. Afterwards devices hold nothing of the model, including what earlier rings left loaded."""
        await self._tasks.close()
        await asyncio.gather(*(ring.unload() for ring in self._rings.values()))
        await asyncio.gather(*(worker.unload(self._forming) for worker in self._devices.workers.values()))

    @property
    def forecasts(self) -> list[Forecast]:
        """Forecasts of the rings that hold memory of devices, or will."""
        return [self._plans[epoch] for epoch in self._plans if epoch in self._rings or epoch == self._forming]

    def _job(self, epoch: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.start(work)
        self._jobs[epoch] = task
        task.add_done_callback(lambda done: self._jobs.pop(epoch, None) if self._jobs.get(epoch) is done else None)

    async def _solve(self, epoch: int, candidates: frozenset[str], instead: int | None) -> None:
        self._core.describe("planning")
        self._tasks.start(self._read_pieces())
        try:
            await asyncio.to_thread(self._model.check)
            is_generating = self._backend.is_generating
            forecast, value = await self._planner.plan(candidates, self.offered_forecast, keeps_attention=is_generating)
            serving = self._plans.get(self._serving)
            serving_value = None if serving is None else await self._planner.value(serving)
        except (ModelError, PlanError, Infeasible) as exc:
            self._no_plan(epoch, str(exc), instead)
            return
        except PrimadError as exc:
            self._core.post(types.RingFailed(epoch, None, str(exc)))
            return
        except Exception as exc:  # a bug; the core waits for an outcome
            logger.exception("epoch %d cannot be planned", epoch)
            self._core.post(types.RingFailed(epoch, None, mistake(exc)))
            return
        before = self._plans.get(instead) if instead is not None else None
        if before is not None and (before.plan.route, before.plan.groups) == (
            forecast.plan.route,
            forecast.plan.groups,
        ):
            self._no_plan(epoch, "the best one has the same windows", instead)
            return
        self._plans[epoch] = forecast
        if not is_generating:
            self._idle_plans.add(epoch)
        members = frozenset(forecast.plan.devices) - {forecast.plan.head}
        self._core.post(types.Solved(epoch, members, value, serving_value))

    def _no_plan(self, epoch: int, reason: str, instead: int | None) -> None:
        self._core.post(types.NoPlan(epoch, reason))
        if instead in self._rings:
            self._precompute(instead)  # the earlier precomputed plans of this ring assumed more memory

    async def _form(self, epoch: int) -> None:
        self._core.describe("loading")
        try:
            inputs = self._inputs(epoch, await self._pool.own.begin())
            ring = self._rings[epoch] = HeadRing(inputs)
            if not self.serves.is_set():
                self._timed, self._times = epoch, self._load_times(inputs)
                self._core.describe("loading")
            preparing = self._tasks.start(self._kv.prepare(ring, self._backend.chains()))
            try:
                await ring.form()
                await preparing
            finally:
                preparing.cancel()
        except PrimadError as exc:
            self._model.remember(exc)
            self._failed(attributed(exc, self._plans[epoch].plan, epoch))
        except Exception as exc:  # as above
            logger.exception("ring %d cannot be formed", epoch)
            self._core.post(types.RingFailed(epoch, None, mistake(exc)))
        else:
            self._core.post(types.Formed(epoch))

    def _load_times(self, inputs: RingInputs) -> LoadTimes:
        profiles = {inputs.forecast.plan.head: inputs.profile}
        profiles |= {name: worker.profile for name, worker in inputs.devices.workers.items()}
        rates, now_s = self._devices.book.rates(profiles), asyncio.get_running_loop().time()
        from_hub = self._model.ranged is not None
        return load_times(inputs.forecast, self._model.profile, profiles, rates, now_s, from_hub=from_hub)

    async def _read_pieces(self) -> None:
        """Read the model's tokens while a plan is made; if that fails, the ring that needs them gets the error."""
        with contextlib.suppress(PrimadError):
            await self._backend.pieces()

    def _inputs(self, epoch: int, profile: DeviceProfile) -> RingInputs:
        forecast = self._plans[epoch]
        workers = self._devices.workers
        return RingInputs(
            epoch=epoch,
            session=self._devices.session,
            forecast=forecast,
            service=self._service,
            pieces=self._backend.pieces,
            devices=RingDevices(
                workers={name: workers[name] for name in forecast.plan.devices if name in workers},
                holders=dict(workers),
                links=self._devices.book,
                draft_device=None
                if forecast.draft_device in (None, forecast.plan.head)
                else partial(self._usable, forecast.draft_device),
            ),
            node=self._node,
            profile=profile,
            layer_port=self.layer_port,
            context=self._head.sockets,
            listener=self,
            reporter=self._reporter,
        )

    def _usable(self, name: str) -> WorkerLink | None:
        """Return the link to the device ``name`` if it is here and not paused."""
        return self._devices.workers.get(name) if self._pool.limits.unpaused({name}) else None

    def deliver(self, epoch: int, event: GenerationEvent) -> None:
        """Pass on an event of a generation that ring ``epoch`` computes."""
        self._backend.deliver(epoch, event)
        is_long = type(event) is Finished and event.completion_tokens >= MIN_TOKENS
        if is_long and (self._learner is None or self._learner.done()):
            self._learner = self._tasks.start(self._learn(epoch))

    async def _learn(self, epoch: int) -> None:
        """Learn from a response of ring ``epoch``, unless something else was computed meanwhile."""
        ring, forecast, planning = self._rings.get(epoch), self._plans.get(epoch), self._planner.foreseeing
        is_disturbed = (
            len(self._rings) > 1
            or bool(self._jobs)
            or self._planner.imagines
            or (planning is not None and not planning.done())
        )
        if ring is None or forecast is None or is_disturbed or forecast.plan.groups:
            return
        measured = self._pool.learning.completed(epoch, forecast, await ring.statuses())
        if measured is None:
            return
        ring.measured = measured
        changed = self._pool.learning.worth_a_plan(epoch, forecast)
        if changed:
            self._precompute(epoch)
            self._core.post(types.DevicesCorrected(frozenset(changed)))

    def kv_changed(self, epoch: int, event: KvNews) -> None:
        """Ring ``epoch`` keeps KV blocks, or no longer needs them."""
        match event:
            case KvBegun(keys=keys):
                self._kv.begun(epoch, keys)
            case KvKept(blocks=blocks):
                self._kv.kept(epoch, blocks, self._backend.kept(epoch, event))
            case KvForgotten(keys=keys):
                self._kv.forgotten(epoch, keys)

    def progressed(self, epoch: int, device: str, stage: types.LoadStage, done: int, total: int) -> None:
        """A device makes progress in loading a ring."""
        if self._times is not None and epoch == self._timed:
            if stage is types.LoadStage.FETCH:
                self._times.arrived(device, done, total, asyncio.get_running_loop().time())
            elif stage is types.LoadStage.READY:
                self._times.ready(device)
        self._core.post(types.Progressed(epoch, device, stage, done / total if total else 1.0))

    @property
    def expected_s(self) -> float | None:
        """Seconds until the first ring is loaded; None if not known."""
        return None if self._times is None else self._times.left_s(asyncio.get_running_loop().time())

    @property
    def moves(self) -> bool:
        """Whether layers had to be moved for the first ring."""
        return self._times is not None and self._times.moves

    def overdue(self, epoch: int, waited_s: float) -> None:
        """A step of a ring is late; the ring's next events show that it arrived."""
        self._backend.overdue(epoch, waited_s)

    def broken(self, failed: types.RingFailed) -> None:
        """A ring broke, while it was being formed or later."""
        if failed.epoch in self._rings:
            self._model.remember(self._rings[failed.epoch].broken_by)
        self._failed(failed)

    def _failed(self, failed: types.RingFailed) -> None:
        if failed.between:
            self._devices.book.doubt(failed.between)
        self._core.post(failed)

    def memory_low(self, needed_bytes: int) -> None:
        """The head's own windows need memory that is not available."""
        self._tasks.start(self._report_memory_low(needed_bytes))

    async def _report_memory_low(self, needed_bytes: int) -> None:
        """The head's own memory became short: later plans use less of it."""
        await self._pool.own.report_memory_low(needed_bytes)
        self._planner.forget()
        self._core.post(types.DeviceMemoryLow(self._node.config.name))

    def find_layer(self, digest: str) -> LayerSource | None:
        """Return the layer ``digest`` from the model file, the draft model's file or the encoder's file."""
        draft = self._service.draft_source
        cut: LayerSource | None = self._model.source(digest)
        if cut is None and draft is not None:
            cut = draft.source(digest)
        return self.encoder.find_layer(digest) if cut is None else cut

    async def _abandon(self, epoch: int) -> None:
        job = self._jobs.pop(epoch, None)
        if job is not None:
            job.cancel()
            await asyncio.wait([job])
        self._plans.pop(epoch, None)
        self._candidates.pop(epoch, None)
        self._idle_plans.discard(epoch)
        self._pool.learning.forget(epoch)
        ring = self._rings.pop(epoch, None)
        if ring is not None:
            await to_its_end(ring.close())  # no other code would end its process

    async def conduct(self) -> None:
        """Hand the endpoint from ring to ring, in the order of the core's decisions."""
        while True:
            match await self._orders.get():
                case types.Serve(epoch, instead):
                    await self._serve(epoch, instead)
                case types.Close(epoch, reason):
                    self._backend.hold(f"forming the ring again: {reason}")
                    self._tasks.start(self._abandon(epoch))
                case types.LetGo(device):  # after the next ring, which has its blocks by now, has taken over
                    await self._let_go(device)
                case types.Fail(reason):
                    self._backend.fail(reason)
                    self._reporter.report_line(
                        f"nothing can be served: {reason}; waiting for devices"
                        if self._service.options.is_only
                        else f"{self._model.id} cannot be served any more: {reason}"
                    )
                    self.gave_up()

    async def _serve(self, epoch: int, instead: int | None) -> None:
        changes_attention = self._changes_attention(epoch)
        if changes_attention and epoch in self._idle_plans:
            self._refuse(epoch, instead)
            return
        if changes_attention:
            self._reporter.report_line(ATTENTION_CHANGES)
        ring, self._serving = self._rings[epoch], epoch
        forecast = self.offered_forecast = self._plans[epoch]
        self._tasks.start(self.encoder.follow_plan())
        before = None if instead is None else self._rings.get(instead)
        blocks = await self._kv.bring(ring, self._backend.chains())
        if before is not None:
            self._backend.hand_over()
            await before.drain()
            blocks = await self._kv.bring(ring, self._backend.chains(), again=True)
        if changes_attention:
            blocks = {}  # the KV cache has other contents then
        blocks = {request: blocks.get(request, []) for request in self._backend.chains()}  # some ended meanwhile
        self._kv.serve(ring, await ring.sources(), epoch, forecast, blocks)
        go_on = GoOn(
            root=self._kv.root,
            blocks=blocks,
            max_replayed=self._kv.max_replayed(forecast),
            chunks=self._kv.chunks(forecast),
        )
        self._kv.went_on(*self._backend.tokens_again(blocks))
        detail = f"serving with {show_count(len(ring.plan.devices), 'device')}"
        served = await self._served(forecast)
        await self._backend.attach(served, epoch, ring.send, self._status_of(ring), detail, go_on)
        self.serves.set()
        if instead is not None:
            self._tasks.start(self._abandon(instead))
        for name in frozenset(ring.plan.devices) - {ring.plan.head} - self._pool.limits.unpaused(ring.plan.devices):
            self._core.post(types.DeviceMemoryLow(name, by_owner=True))  # it was paused while the ring was formed
        self._why_left_out = {left.device: left.reason for left in ring.plan.left_out}
        self._precompute(epoch)
        for worker in self._devices.present(ring.plan.devices):
            worker.why_idle = ""
        if ring.plan.left_out:
            self._tasks.start(self._report_what_serves(epoch, ring, forecast))  # finding the reason takes a moment
        else:
            await self._report_what_serves(epoch, ring, forecast)

    def _changes_attention(self, epoch: int) -> bool:
        """Whether running requests would resume with another attention in ring ``epoch``, and so with other tokens."""
        before = self.offered_forecast
        return before is not None and before.attention != self._plans[epoch].attention and self._backend.is_generating

    def _refuse(self, epoch: int, instead: int | None) -> None:
        """Refuse ring ``epoch``, as requests began after it was planned: the next plan keeps their attention."""
        reason = "requests began while the ring was formed, and its attention differs"
        self._backend.hold(f"forming the ring again: {reason}")
        if instead is not None:
            self._tasks.start(self._abandon(instead))
        self._core.post(types.RingFailed(epoch, None, reason))

    def _status_of(self, ring: HeadRing) -> StatusOf:
        """Return the function that reports the status of ``ring``, replication, certification and devices that are left
        out."""

        firsts = [window.first for window in ring.plan.route]

        async def status() -> dict[str, Any]:
            also = {
                "kv": msgspec.to_builtins(self._kv.status()),
                "checked": await self._service.model.checked(firsts),
                "left_out": [{"device": device, "reason": reason} for device, reason in self._why_left_out.items()],
            }
            return await ring.status() | also

        return status

    async def _report_what_serves(self, epoch: int, ring: HeadRing, forecast: Forecast) -> None:
        """Report the startup block: the endpoint, the layers of each device, devices that are left out and why, and the
        forecast."""
        why = [await self._left_out(epoch, forecast, left) for left in ring.plan.left_out[:MAX_EXPLAINED]]
        if self._serving != epoch:
            return
        for left, line in zip(ring.plan.left_out, why, strict=False):
            self._why_left_out[left.device] = line.removeprefix(f"{left.device} is left out: ")
            if (worker := self._devices.workers.get(left.device)) is not None:
                worker.why_idle = line
        why += [left_out_line(left.device, left.reason, None) for left in ring.plan.left_out[MAX_EXPLAINED:]]
        self._reporter.resolve()
        self._reporter.report_line(
            f"{self._model.id} is served at {self._service.options.url}/v1 with {forecast.context_tokens} tokens of "
            "context" + (f" ({forecast.why_context})" if forecast.why_context else "")
        )
        is_default = self._service.options.run.context_tokens is None
        if is_default and (small := too_small_for(forecast.context_tokens, self._model.profile)):
            self._reporter.report_line(small)
        self._reporter.report_line(at_once_line(forecast))
        if line := attention_line(forecast):
            self._reporter.report_line(line)
        if (name := self._service.options.embedding_id) is not None:
            self._reporter.report_line(f"{name} serves embeddings there, on this device only")
        for line in [*filter(None, [forecast.why_parallel]), *ring.describe(), *why]:
            self._reporter.report_line(line)
        options, has_cache = self._service.options, self._node.config.kv_cache is not None
        if chains := chains_line(forecast, options.block_tokens(has_cache=has_cache)):
            self._reporter.report_line(chains)
        if lacking := no_drafts_line(forecast, self._model.profile, options.run.speculate):
            self._reporter.report_line(lacking)
        draft = self._service.draft
        if draft is not None and forecast.drafting is not None:
            self._reporter.report_line(f"--draft {draft.path}: {draft_place_line(forecast, draft.memory_bytes)}")
        if ring.prediction is not None:
            load = None if forecast.batches is None else forecast.batches.load
            prompt_tokens, shared = self._service.workload.prompt_tokens, self._planner.shares(forecast)
            self._reporter.report_line(predicted_line(ring.prediction, load, prompt_tokens, shared))
        if not self._page_reported:
            self._page_reported = True
            self._reporter.report_line(page_line(self._service.options.url))

    async def _left_out(self, epoch: int, forecast: Forecast, left: LeftOut) -> str:
        slowdown = None
        if (cut := self._devices.book.why_cut(left.device, forecast.plan.devices)) is not None:
            return left_out_line(left.device, cut, None)
        if forecast.prediction is not None:
            slowdown = await self._planner.slowdown_with(
                left.device,
                self._candidates.get(epoch, frozenset()),
                self._objective_s(forecast.prediction),
                forecast,
            )
        return left_out_line(left.device, left.reason, slowdown)

    def _objective_s(self, prediction: Prediction) -> float:
        return prediction.objective_s(self._service.options.run.objective, self._service.workload.answer_tokens)

    async def _served(self, forecast: Forecast) -> ServedModel:
        return ServedModel(
            id=self._model.id,
            created=self._backend.created,
            context_tokens=forecast.context_tokens,
            vocabulary=await self._backend.pieces(),
            sampling=replace(sampling_defaults(self._model.header), **self._service.options.sampling),
            facts=facts_of(self._model.header),
            tool_parser=self._service.options.tool_parser,
            context_shift=self._service.options.context_shift,
            sequences=forecast.sequences,
            is_exact=forecast.is_exact,
            sees=self._service.encoder.sees,
            hears=self._service.encoder.hears,
            fetches=self._service.options.fetch_images,
            lacks_encoder=self._service.encoder.lacks,
        )

    def _precompute(self, epoch: int) -> None:
        ring = self._rings[epoch]
        self._planner.precompute(
            self._candidates.get(epoch, frozenset()),
            frozenset(ring.plan.devices) - {ring.plan.head},
            self._tasks,
            self._plans[epoch],
        )
