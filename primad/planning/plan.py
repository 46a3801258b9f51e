"""The one planner: ``serve``, ``plan``, ``fit``, what-if and the page use it and get the same plan for the same
question.

``search`` solves, which takes seconds of CPU time; a daemon runs it in a separate process. ``complete`` determines what
else the plan has room for: concurrent requests, context, attention, chunks, drafts. ``plan`` does both. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from halda import (
    CutOff,
    DeviceProfile,
    Infeasible,
    NotBelow,
    Plan,
    Prediction,
    Solution,
    Workload,
    evaluate,
)
from halda.time_limit import TimeLimit
from primad.errors import PlanError
from primad.planning.batching import Batches, batches_of
from primad.planning.by_hand import plan_by_hand, with_context_by_hand
from primad.planning.context import MAX_AT_ONCE, attends_plainly
from primad.planning.default_context import HURRIED_S, WithContext, wanted_context, with_wanted_context
from primad.planning.draft_gain import draft_place
from primad.planning.drafting import drafting_of
from primad.planning.encoder_place import EncoderPlace, encoder_place
from primad.planning.extra_buffers import solved_as_planned, suited
from primad.planning.fitting import Fitted, fitted, in_suited_chunks
from primad.planning.question import workload_of
from primad.planning.request import FoundPlan, PlanRequest
from primad.planning.sharing import quicker_of, search_best_shared, search_shared

if TYPE_CHECKING:
    from halda.instance import Instance
    from primad.ring.speculation.drafter import Drafting


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and how it runs: ``solved`` is how it was found, ``question`` what it answers, ``prediction`` the
    forecast.

    ``why_sequences`` and ``why_context`` say why they are not more, where they were not asked for. Drafts are computed
    as ``drafting`` says, by the draft model on ``draft_device`` if there is one; pictures are encoded at
    ``encoder_place``.
    """

    solved: FoundPlan
    question: Instance
    prediction: Prediction
    objective_s: float
    batches: Batches
    why_sequences: str
    why_context: str
    drafting: Drafting | None = None
    draft_device: str | None = None
    encoder_place: EncoderPlace | None = None

    @property
    def plan(self) -> Plan:
        """The assignment of layers to devices."""
        return self.solved.solution.plan

    @property
    def why_parallel(self) -> str:
        """Why devices share layers or do not, where that was a choice."""
        return self.solved.why_parallel


def plan(request: PlanRequest) -> Planned:
    """Return the best plan, or the one that was set by hand.

    Raises ``Infeasible``, ``CutOff`` where a link that does not work would be needed, and ``PlanError`` for a plan by
    hand.
    """
    return complete(request, search(request))


def search(request: PlanRequest) -> FoundPlan:
    """Return the best plan for the first workload that has one. Raises as ``plan``."""
    if request.run.windows is not None:
        return _search_by_hand(request)
    if request.run.parallel == "tensor" and len(request.devices) > 1:
        return search_shared(request)
    is_free = not request.require and request.settled is None and not request.run.use_all
    may_share = request.run.parallel == "auto" and is_free and min(request.max_ranks, len(request.devices)) > 1
    try:
        found = _search_pipeline(request)
    except Infeasible:
        shared = search_best_shared(request) if may_share else None
        if shared is None:
            raise
        return shared
    shared = search_best_shared(request, found.solution.prediction.tpot_s) if may_share else None
    return found if shared is None else quicker_of(found, shared)


def _search_pipeline(request: PlanRequest) -> FoundPlan:
    works, budget = request.workloads, TimeLimit(request.time_limit_s)
    everyone = frozenset(device.device for device in request.devices)
    for work in works:
        try:
            if not request.run.use_all or request.require == everyone:
                return _search(request, work, request.require, budget)
            try:
                return _search(request, work, everyone, budget)
            except CutOff:  # not all devices can be in one ring
                return _search(request, work, request.require, budget)
        except CutOff:
            raise
        except Infeasible:
            if work is works[-1]:
                raise
    raise AssertionError("there is a workload")


SOLVE_SHARE: Final = 0.8
"""Share of the remaining time for one call of the solver: it may be called again, for a small context, or for devices
as they are in the plan."""
SMALL_WINDOWS_GAIN: Final = 0.05
"""Gain that a small cache of sliding windows must give: full caches allow drafts, and any cached prefix instead of
saved ones."""


def _search(request: PlanRequest, work: Workload, require: frozenset[str], budget: TimeLimit) -> FoundPlan:
    """Return the best plan for ``work``; with a small cache of sliding windows where that gains more than it costs."""
    small = replace(work, small_windows=True)
    if small == work or not request.may_have_small_windows:
        return _search_for(request, work, require, budget)
    try:
        found = _search_for(request, work, require, budget)
    except CutOff:
        raise
    except Infeasible:
        return _search_for(request, small, require, budget)
    if not (_is_short(found) or _is_quicker(found, small, request)):
        return found
    try:
        # A larger context is worth having whatever the plan takes.
        below_s = math.inf if found.why_context else (1 - SMALL_WINDOWS_GAIN) * found.solution.objective_s
        other = _search_for(request, small, require, budget, below_s, found.solution)
    except NotBelow:
        return found
    is_wider = other.workload.context_tokens > found.workload.context_tokens
    gains = other.solution.objective_s < (1 - SMALL_WINDOWS_GAIN) * found.solution.objective_s
    return other if is_wider or gains else found


def _is_short(found: FoundPlan) -> bool:
    """Return whether memory is short: layers stream, or lie in RAM next to a GPU, or the context is small because of
    it."""
    plan, with_gpu = found.solution.plan, {each.device for each in found.devices if each.gpu is not None}
    return bool(
        plan.streaming or found.why_context or any(each.in_ram for each in plan.route if each.device in with_gpu)
    )


def _is_quicker(found: FoundPlan, small: Workload, request: PlanRequest) -> bool:
    """Return whether the plan itself gains from small caches, of which long prompts read less."""
    solution = found.solution
    work = replace(small, context_tokens=found.workload.context_tokens).with_rows(
        solution.prediction.chunk_rows, solution.prediction.step_rows
    )
    asked = msgspec.structs.replace(request, devices=found.devices).instance(work, solution.plan.head)
    taken = evaluate(solution.plan, asked)
    return taken.objective_s(solution.objective, work.answer_tokens) < (1 - SMALL_WINDOWS_GAIN) * solution.objective_s


def _search_for(
    request: PlanRequest,
    work: Workload,
    require: frozenset[str],
    budget: TimeLimit,
    below_s: float = math.inf,
    other: Solution | None = None,
) -> FoundPlan:
    from halda import CHUNKS, solve  # only a process that solves loads the solver

    run, devices, settled = request.run, request.devices, request.settled
    if run.extra_buffers != "on":
        devices = [suited(device, work, run.objective) for device in devices]

    def planned(work: Workload, hurries: bool) -> tuple[Solution, list[DeviceProfile]]:
        def of(devices: list[DeviceProfile]) -> Solution:
            return solve(
                devices,
                request.links,
                request.model,
                work,
                objective=run.objective,
                heads=request.heads,
                limits=request.limits,
                require=require,
                chunks=CHUNKS if settled is None else (),
                time_limit_s=HURRIED_S if hurries else max(HURRIED_S, SOLVE_SHARE * budget.left_s),
                offloads=run.may_help,
                prefill_offload=None if settled is None else settled.prefill_offload,
                experts=run.experts,
                settles=True,
                at_once=run.sequences or MAX_AT_ONCE,
                simplifies=settled is None,
                below_s=math.inf if hurries else below_s,
                other=None if hurries or below_s == math.inf else other,
                shared=request.shared,
            )

        return solved_as_planned(of, devices, request.model, run.extra_buffers)

    return _settled(with_wanted_context(work, request.wanted_tokens, planned, request.instance))


def _settled(found: WithContext) -> FoundPlan:
    return FoundPlan(solution=found.solution, devices=found.devices, workload=found.workload, why_context=found.why)


def _search_by_hand(request: PlanRequest) -> FoundPlan:
    run = request.run
    assert run.windows is not None
    names = [device.device for device in request.devices]
    plan = plan_by_hand(names, run.windows, run.rounds, request.model, run.ranks)
    if run.shares_by_hand and max(run.ranks) > request.max_ranks:
        raise PlanError(
            f"--windows: the attention heads of this model allow at most {request.max_ranks} devices in a group"
        )
    work = workload_of(run, request.model)
    devices = request.devices[: len(plan.devices)]
    if plan.groups:  # a share of a file cannot be in extra buffers
        devices = [device.without_extra_buffers() for device in devices]
    elif run.extra_buffers != "on":
        devices = [suited(device, work, run.objective) for device in devices]
    asked = msgspec.structs.replace(request, devices=devices).instance(work, plan.head)
    wanted = 0 if run.context_tokens is not None else wanted_context(request.model)
    return _settled(with_context_by_hand(plan, asked, wanted, run.objective))


def complete(request: PlanRequest, solved: FoundPlan) -> Planned:
    """Return the plan of ``solved`` with everything that it runs with."""
    run, plan = request.run, solved.solution.plan
    asked = msgspec.structs.replace(request, devices=solved.devices).instance(solved.workload, plan.head)
    found = _fitted(request, solved, asked) if run.windows is None else _fitted_by_hand(request, solved, asked)
    drafting = drafting_of(run.speculate, run.batching, plan, found.question, found.batches)
    # A device without a window in a plan by hand may draft.
    everyone = found.question if run.windows is None else request.instance(found.question.workload, plan.head)
    return Planned(
        solved=solved,
        question=found.question,
        prediction=found.prediction,
        objective_s=found.objective_s,
        batches=found.batches,
        why_sequences=found.why_sequences,
        why_context=found.why_context,
        drafting=drafting,
        draft_device=draft_place(request.draft, run.draft_on, drafting, plan, everyone),
        encoder_place=encoder_place(request.encoder, run.encoder_on, plan, everyone),
    )


def _fitted(request: PlanRequest, solved: FoundPlan, asked: Instance) -> Fitted:
    run, served = request.run, request.served
    return fitted(
        solved.solution,
        asked,
        served,
        run=run,
        widens=run.context_tokens is None
        and (served is None or solved.workload.context_tokens < served.context_tokens),
        keeps_attention=request.keeps_attention,
        why_context=solved.why_context,
        may_be_several=request.may_be_several,
    )


def _fitted_by_hand(request: PlanRequest, solved: FoundPlan, asked: Instance) -> Fitted:
    """Complete a plan by hand: attention is chosen as for other plans; sequences and context are as asked for."""
    run, plan, chunks = request.run, solved.solution.plan, solved.solution.prediction
    work = asked.workload.with_rows(chunks.chunk_rows, chunks.step_rows)
    kept = request.served if request.keeps_attention else None
    flash = not attends_plainly(plan, asked.changed(workload=work), work) if kept is None else kept.flash
    work = replace(work, flash=flash, small_windows=kept is not None and kept.small_windows)
    question = in_suited_chunks(solved.solution, asked.changed(workload=work))
    work = question.workload
    prediction = evaluate(plan, question)
    return Fitted(
        question=question,
        prediction=prediction,
        objective_s=prediction.objective_s(run.objective, work.answer_tokens),
        batches=batches_of(run.batching, plan, question, work.sequences),
        why_sequences="--sequences sets it" if run.sequences is None else "",
        why_context=solved.why_context,
    )
