"""Plans for the head and some of its workers; those for the loss of a device are made before it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from msgspec import structs

from halda import CutOff, DeviceProfile, Infeasible, LinkProfile, Plan, Solution, Workload, evaluate, instance
from halda.instance import Instance
from primad.errors import PlanError, PrimadError
from primad.gguf.architectures import cuttable, turns_by_context, why_whole
from primad.head.devices import Devices
from primad.head.learning import Learning
from primad.head.lending import Lending
from primad.head.options import plan_by_hand, with_context_by_hand
from primad.head.own_device import OwnDevice
from primad.head.promise import Promise
from primad.head.service import Service
from primad.head.solver_process import SolverRequest, solve_apart
from primad.head.worker_link import WorkerLink
from primad.planning.batching import batches_of
from primad.planning.context import attends_plainly
from primad.planning.default_context import wanted_context
from primad.planning.draft_gain import best_gain, left_bytes
from primad.planning.drafting import drafting_of
from primad.planning.extra_buffers import as_planned, suited
from primad.planning.fitting import fitted
from primad.planning.question import LinkSpeed, both_ways
from primad.ring.drafting.drafter import Drafting
from primad.system.tasks import Tasks

logger = logging.getLogger(__name__)

SOLVE_S: Final = 5.0
MOST_FORESEEN: Final = 8
"""In larger rings the loss of one device is planned for when it comes."""

PlanResult = tuple[Promise, float]
"""A plan with what it promises, and its objective."""


class Planner:
    """Plans for ``service`` on ``own`` and the workers among ``devices``, with what ``learning`` knows of them."""

    def __init__(
        self, service: Service, own: OwnDevice, devices: Devices, learning: Learning, lending: Lending
    ) -> None:
        self._service, self._own, self._devices, self._learning = service, own, devices, learning
        self._lending = lending
        self._foreseen: dict[frozenset[str], tuple[list[DeviceProfile], PlanResult]] = {}
        self.foreseeing: asyncio.Task[None] | None = None
        """The planning for losses that is under way."""
        self.imagines = False
        """Whether a plan is made that nobody will serve."""

    async def plan(
        self, candidates: frozenset[str], served: Promise | None, *, keeps_attention: bool = False
    ) -> PlanResult:
        """The plan for the head and ``candidates``, with the context and the sequences of ``served``, if one was.

        With ``keeps_attention`` it has that of ``served`` too, where there is such a plan: running answers go on with it.

        Raises ``PlanError`` or ``Infeasible`` when there is none.
        """
        workers = self._devices.present(candidates)
        profiles, foreseen = self._foreseen.get(candidates, ([], None))
        # A device that is short of memory now has another profile than it had then.
        if foreseen is not None and profiles == [worker.profile for worker in workers]:
            return foreseen
        return await self._solve(workers, served, keeps_attention=keeps_attention)

    def forget(self) -> None:
        """What was foreseen holds no more: the head's own memory became short."""
        if self.foreseeing is not None:
            self.foreseeing.cancel()
        self._foreseen.clear()

    def foresee(self, candidates: frozenset[str], members: frozenset[str], tasks: Tasks, served: Promise) -> None:
        """Begin to plan for the loss of each of ``members``, so that no time goes into it when it comes."""
        self.forget()
        if len(members) <= MOST_FORESEEN and self._service.options.windows is None:
            self.foreseeing = tasks.start(self._foresee(candidates, members, served))

    async def _foresee(self, candidates: frozenset[str], members: frozenset[str], served: Promise) -> None:
        for lost in sorted(members):
            rest = candidates - {lost}
            workers = self._devices.present(rest)
            profiles = [worker.profile for worker in workers]
            try:
                self._foreseen[rest] = (
                    profiles,
                    await self._solve(workers, served, keeps_attention=True, background=True),
                )
            except (PrimadError, Infeasible) as exc:
                logger.info("without %s there is no plan: %s", lost, exc)

    async def value(self, promise: Promise) -> float | None:
        """The objective of a plan that was solved, with what is known now; None where a device of it is not spoken to."""
        before, options = promise.prediction, self._service.options
        workers = self._devices.present(promise.plan.devices)
        own = await self._own.profile()
        if before is None or len(workers) + 1 < len(promise.plan.devices):
            return None
        devices, links = self._known([own, *(worker.profile for worker in workers)])
        if promise.question is not None:
            devices = [as_planned(device, promise.question.devices) for device in devices]
        workload = replace(self._workload(promise), sequences=promise.sequences, flash=promise.flash)
        known = instance(devices, links, await self._service.model.planned(), workload, {}, head=own.device)
        prediction = evaluate(promise.plan, known.with_rows(before.chunk_rows))
        return prediction.objective_s(options.objective, self._service.workload.answer_tokens)

    async def slowdown_with(
        self, device: str, candidates: frozenset[str], serving_value: float, served: Promise
    ) -> float | None:
        """The share by which the best plan in which ``device`` has layers is slower than one of ``serving_value``.

        None where there is no such plan, or none is solved for.
        """
        if self._service.options.windows is not None or serving_value <= 0 or not self._lending.unpaused({device}):
            return None
        try:
            _, value = await self._solve(
                self._devices.present(candidates),
                served,
                keeps_attention=True,
                require=frozenset({device}),
                background=True,
            )
        except (PrimadError, Infeasible) as exc:
            logger.info("with %s there is no plan: %s", device, exc)
            return None
        return value / serving_value - 1

    async def what_if(
        self, served: Promise | None, without: frozenset[str], more: Sequence[DeviceProfile], speed: LinkSpeed
    ) -> Promise:
        """What a plan would promise without some devices, and with ``more`` that are not here, on links of ``speed``.

        Raises ``PlanError`` where there is none.
        """
        if self._service.options.windows is not None:
            raise PlanError("--windows sets the plan by hand; there is nothing to compare it with")
        workers = self._devices.present(frozenset(self._devices.workers) - without)
        names = [(await self._own.profile()).device, *(worker.profile.device for worker in workers)]
        links = list[LinkProfile]()
        for place, each in enumerate(more):
            others = [*names, *(other.device for other in more[:place])]
            links += [link for other in others for link in both_ways(each.device, other, speed)]
        self.imagines = True
        try:
            promise, _ = await self._solve(workers, served, background=True, more=more, more_links=links)
        except Infeasible as exc:
            raise PlanError(f"there is no such plan: {exc}") from exc
        finally:
            self.imagines = False
        return promise

    def _known(self, measured: Sequence[DeviceProfile]) -> tuple[list[DeviceProfile], list[LinkProfile]]:
        """Devices and the links between them, with what was learnt of them."""
        corrections = self._learning.planned(measured)
        links = self._devices.book.all_between(each.device for each in measured)
        lent = [self._lending.apply(corrections.apply(each)) for each in measured]
        return lent, [corrections.apply_link(link) for link in links]

    def _workload(self, served: Promise | None, *, keeps_attention: bool = False) -> Workload:
        """What was asked to be planned for, with the context of ``served``, and with its attention if that is kept."""
        workload = self._service.workload
        if served is None:
            return workload
        flash = served.flash if keeps_attention else workload.flash
        return replace(workload, context_tokens=served.context_tokens, flash=flash)

    def _wanted_tokens(self, served: Promise | None) -> int:
        """The context that a plan is to have if it costs little; 0: what its workload says.

        Of some models angles follow from the context; theirs stays as it is ``served``.
        """
        model, asked = self._service.model, self._service.options.context_tokens
        if asked is not None or (served is not None and turns_by_context(model.header)):
            return 0
        return wanted_context(model.profile)

    async def _solve(
        self,
        workers: Sequence[WorkerLink],
        served: Promise | None,
        *,
        keeps_attention: bool = False,
        require: frozenset[str] = frozenset(),
        background: bool = False,
        more: Sequence[DeviceProfile] = (),
        more_links: Sequence[LinkProfile] = (),
    ) -> PlanResult:
        """The plan for the head and ``workers``, in which those of ``require`` have layers; what it promises, its objective.

        Workers that are paused are left out of it. ``more`` are devices that are not here, with their links.

        It keeps the context of ``served``, unless nobody asked for it and there is no plan with it; its attention, if it is
        to and there is a plan with it; and its sequences, unless nobody asked for them and the plan has no room. Nothing is
        predicted for a plan that was set by hand. ``background`` lets all other work of this device go first.
        """
        model, options = self._service.model, self._service.options
        usable = self._lending.unpaused(worker.profile.device for worker in workers)
        workers = [worker for worker in workers if worker.profile.device in usable]
        devices, links = self._known([await self._own.profile(), *(worker.profile for worker in workers)])
        devices, links = [*devices, *more], [*links, *more_links]
        if options.windows is not None:
            return self._by_hand(options.windows, devices, served if keeps_attention else None), 0.0
        if len(devices) > 1:
            cuttable(model.header)
        names = [device.device for device in devices]
        workload = self._workload(served, keeps_attention=keeps_attention)
        asked = SolverRequest(
            devices=[
                device if options.extra_buffers == "on" else suited(device, workload, options.objective)
                for device in devices
            ],
            links=links,
            model=await model.planned(),
            workload=workload,
            objective=options.objective,
            require=frozenset(names) if options.use_all else require,
            time_limit_s=SOLVE_S,
            extra_buffers=options.extra_buffers,
            experts=options.experts,
            helps=options.batching != "exact" and options.extra_buffers != "on",
            wanted_tokens=self._wanted_tokens(served),
        )
        tried = [workload] if workload.flash else [workload, replace(workload, flash=True)]
        if options.context_tokens is None:
            tried += [replace(each, context_tokens=self._service.workload.context_tokens) for each in tried]
        works = list(dict.fromkeys(tried))
        for work in works:
            asked = structs.replace(asked, workload=work)
            try:
                solution, settled = await self._solve_reached(asked, require, background=background)
                break
            except Infeasible:
                if work is works[-1]:
                    raise
        widens = options.context_tokens is None and (
            served is None or settled.workload.context_tokens < served.context_tokens
        )
        return self._promise(solution, settled, served, widens=widens, keeps_attention=keeps_attention)

    async def _solve_reached(
        self, asked: SolverRequest, require: frozenset[str], *, background: bool
    ) -> tuple[Solution, SolverRequest]:
        """The answer to ``asked``; where not all devices of --use-all can be in one ring, with those of ``require`` alone.

        Raises ``PlanError`` that says why devices do not reach each other, where there is no plan for that.
        """
        try:
            try:
                return await solve_apart(asked, background=background)
            except CutOff:
                if asked.require == require:
                    raise
                return await solve_apart(structs.replace(asked, require=require), background=background)
        except CutOff as exc:
            raise PlanError(self._why_cut(device.device for device in asked.devices) or str(exc)) from exc

    def _why_cut(self, devices: Iterable[str]) -> str | None:
        """Why two of ``devices`` do not reach each other."""
        names = list(devices)
        return next((why for each in names if (why := self._devices.book.why_cut(each, names)) is not None), None)

    def _promise(
        self,
        solution: Solution,
        asked: SolverRequest,
        served: Promise | None,
        *,
        widens: bool,
        keeps_attention: bool,
    ) -> PlanResult:
        """The promise of ``solution`` and its objective."""
        plan, options = solution.plan, self._service.options
        found = fitted(
            solution,
            instance(asked.devices, asked.links, asked.model, asked.workload, {}, head=plan.head),
            served,
            objective=options.objective,
            sequences=options.sequences,
            batching=options.batching,
            widens=widens,
            keeps_attention=keeps_attention,
            why_context=asked.why_context,
            may_be_several=not why_whole(self._service.model.header),
        )
        work = found.question.workload
        drafting = drafting_of(options.speculate, options.batching, plan, found.question, found.batches)
        promise = Promise.of(
            plan,
            asked.model,
            found.prediction,
            context_tokens=work.context_tokens,
            sequences=work.sequences,
            corrections=self._learning.corrections,
            why_context=found.why_context,
            why_sequences=found.why_sequences,
            flash=work.flash,
            batches=found.batches,
            question=found.question,
            drafting=drafting,
            guesser=self._guesser(drafting, plan, found.question),
        )
        return promise, found.objective_s

    def _guesser(self, drafting: Drafting | None, plan: Plan, question: Instance) -> str | None:
        """The device on which the model guesses, if one has room: the one that was asked for, or where it wins most."""
        draft, source, wish = self._service.draft, self._service.draft_source, self._service.options.draft_on
        has_room = self._service.head_has_room
        head = plan.head if has_room else None
        if draft is None or drafting is None:
            return None
        if source is None:
            return head
        if wish is not None:
            return wish if left_bytes(plan, question).get(wish, 0) >= draft.memory_bytes else head
        found = best_gain(drafting, plan, question, source.profile, draft.memory_bytes, head_has_room=has_room)
        return None if found is None else found.device

    def _by_hand(self, windows: tuple[int, ...], devices: Sequence[DeviceProfile], served: Promise | None) -> Promise:
        """The promise of the plan in which the first of ``devices`` have ``windows``, with the attention of ``served``.

        Raises ``PlanError``.
        """
        model, workload = self._service.model.profile, self._service.workload
        if len(windows) > len(devices):
            raise PlanError(
                f"--windows {','.join(map(str, windows))} is for {len(windows)} devices; found {len(devices)}, "
                "this one among them; start 'primad join' on more or give fewer windows"
            )
        everyone, devices = devices, devices[: len(windows)]
        plan = plan_by_hand([device.device for device in devices], windows, self._service.options.rounds, model)
        for pair in zip(plan.devices, (*plan.devices[1:], plan.devices[0]), strict=True):
            if (why := self._why_cut(pair)) is not None:
                raise PlanError(f"--windows {','.join(map(str, windows))}: {why}")
        options = self._service.options
        wanted = self._wanted_tokens(None)
        settled = with_context_by_hand(plan, devices, model, workload, wanted, options.objective)
        plan, workload = settled.solution.plan, settled.workload
        question = instance(devices, [], model, workload, {}, head=plan.head)
        flash = not attends_plainly(plan, question, workload) if served is None else served.flash
        workload = replace(workload, flash=flash)
        question = replace(question, workload=workload)
        batches = batches_of(options.batching, plan, question, workload.sequences)
        why = "--sequences sets it" if self._service.options.sequences is None else ""
        drafting = drafting_of(options.speculate, options.batching, plan, question, batches)
        return Promise.of(
            plan,
            model,
            None,
            context_tokens=workload.context_tokens,
            sequences=workload.sequences,
            why_context=settled.why,
            why_sequences=why,
            flash=workload.flash,
            batches=batches,
            drafting=drafting,
            guesser=self._guesser(drafting, plan, instance(everyone, [], model, workload, {}, head=plan.head)),
        )
