"""Turn a question into the full answer: the plan, its cost, and the alternatives.

The one planner (``plan.py``) makes every plan and the one evaluator (``halda.evaluate``) rates it: this plan, each
device alone, each left-out device taking part after all, and the plan before ``--what-if``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from msgspec import structs

from halda import DeviceProfile, Infeasible, Solution
from primad import __version__
from primad.errors import PlanError
from primad.planning.describe import (
    DescribedPlan,
    kept_part,
    load_part,
    model_part,
    predicted_part,
    proof_part,
    ring_part,
    workload_part,
)
from primad.planning.draft_gain import draft_part, with_room_for_draft
from primad.planning.extra_buffers import why_extra
from primad.planning.plan import Planned, plan, search
from primad.planning.question import Question, with_room_for_encoder
from primad.planning.request import PlanRequest, Settled
from primad.planning.schema import SCHEMA, Explanation, GivenUpJson, LeftOutJson, SingleDeviceJson, WhatIf
from primad.settings.quantities import show_ms

MAX_LEFT_OUT: Final = 8
"""Number of unlike devices whose cost in the ring is computed; for others only the solver's reason is given."""
LEFT_OUT_TIME_LIMIT_S: Final = 1.0
"""Time limit for all of them."""
ALONE_TIME_LIMIT_S: Final = 1.0
"""Time limit for all plans of single devices together."""
_SAME: Final = 0.001
"""Relative difference that is too small to report."""
_OF: Final = {
    "latency": "a token",
    "ttft": "the first token",
    "throughput": "a token of all sequences",
    "balanced": "a request",
}


def explain(question: Question, changes: Sequence[str] = (), before: Question | None = None) -> Explanation:
    """Answer ``question``; with ``changes``, next to the answer for the question ``before`` them.

    Raises ``PlanError`` naming the limit that is short when there is no plan.
    """
    earlier = None if before is None else _before(changes, before)
    try:
        question = _with_room(question)
        chosen = best_plan(question)
    except Infeasible as exc:
        raise PlanError(_no_plan(f"{exc}{_because_of_tail(question)}", earlier)) from exc
    ring, settled = ring_part(_described(question, chosen)), _as_settled(chosen)
    solution = chosen.solved.solution
    return Explanation(
        schema=SCHEMA,
        primad=__version__,
        head=ring.head,
        rounds=ring.rounds,
        output_on_gpu=ring.output_on_gpu,
        chunk_rows=ring.chunk_rows,
        devices=ring.devices,
        predicted=ring.predicted,
        short=ring.short,
        one_disk=ring.one_disk,
        model=model_part(question, chosen.encoder_place),
        workload=workload_part(chosen),
        proof=proof_part(question, solution),
        left_out=_left_out(question, chosen, settled),
        single_device=_single_device(question),
        load=load_part(chosen.batches),
        kept=kept_part(chosen),
        what_if=earlier,
        draft=draft_part(question.draft, chosen.drafting, chosen.draft_device, chosen.plan, chosen.question),
        tail=_tail(question, solution, settled),
        given_up=[GivenUpJson(what=each.what, objective_ms=each.objective_s * 1e3) for each in solution.given_up],
        parallel=chosen.why_parallel,
    )


def _as_settled(chosen: Planned) -> Settled:
    """What ``chosen`` settled: alternatives are compared with the same context, attention and chunks."""
    found = chosen.solved.solution.prediction
    work = chosen.solved.workload.with_rows(found.chunk_rows, found.step_rows)
    return Settled(workload=work, prefill_offload=frozenset(chosen.plan.prefill_offload))


def _with_room(question: Question) -> Question:
    """Return ``question`` with room for encoder and draft model on the head, which is the best head without them.

    Raises ``Infeasible``.
    """
    if question.draft is None and question.encoder is None:
        return question
    head = question.head or best_plan(question).plan.head
    return with_room_for_draft(with_room_for_encoder(question, head), head)


def _described(question: Question, planned: Planned) -> DescribedPlan:
    """Describe ``planned``, with why devices have extra buffers or none."""
    measured = {device.device: device for device in question.devices}
    extra = {
        device.device: why_extra(measured[device.device], device, question.model) for device in planned.solved.devices
    }
    return DescribedPlan.of(planned, extra, question.share_bytes)


def best_plan(question: Question) -> Planned:
    """Return the plan, with the best head where the question leaves it open. Raises ``Infeasible``."""
    return plan(request_of(question))


def request_of(
    question: Question, require: frozenset[str] = frozenset(), settled: Settled | None = None
) -> PlanRequest:
    """Convert ``question`` to the planner's request, with the head in front of the other devices."""
    devices = sorted(question.devices, key=lambda device: device.device != question.head)
    return PlanRequest(
        devices=devices,
        links=list(question.all_links),
        model=question.model,
        run=question.run,
        heads=question.heads,
        limits=dict(question.limits),
        require=require,
        draft=question.draft,
        encoder=question.encoder,
        may_be_several=question.may_be_several,
        settled=settled,
        time_limit_s=question.time_limit_s,
        max_ranks=question.max_ranks,
        units=question.units,
    )


def _plan_alone(question: Question, device: DeviceProfile, time_limit_s: float) -> Planned:
    run = replace(question.run, windows=None, rounds=None, ranks=())
    limits = {name: limit for name, limit in question.limits.items() if name == device.device}
    return plan(
        request_of(
            replace(
                question,
                devices=(device,),
                links=(),
                head=device.device,
                run=run,
                limits=limits,
                time_limit_s=time_limit_s,
            )
        )
    )


def _before(changes: Sequence[str], before: Question) -> WhatIf:
    try:
        before = _with_room(before)
        planned = best_plan(before)
    except Infeasible as exc:
        return WhatIf(changes=list(changes), before=None, reason=str(exc), context_tokens=None)
    return WhatIf(
        changes=list(changes),
        before=ring_part(_described(before, planned)),
        reason=None,
        context_tokens=planned.question.workload.context_tokens,
    )


def _no_plan(reason: str, earlier: WhatIf | None) -> str:
    if earlier is None:
        return reason
    changes = " and ".join(f"--what-if {change}" for change in earlier.changes)
    if earlier.before is None:
        return f"no plan with {changes}, nor without: {reason}"
    return f"no plan with {changes}: {reason}; without, a token takes {show_ms(earlier.before.predicted.tpot_ms)}"


def _tail(question: Question, solution: Solution, settled: Settled) -> str | None:
    """Say what the minimum number of layers of the last window costs; None where it costs nothing."""
    free = _with_any_tail(question, settled)
    if free is None or solution.objective_s <= free.objective_s * (1 + _SAME):
        return None
    costs_s = solution.objective_s - free.objective_s
    more = f"{show_ms(costs_s * 1e3)} of {_OF[question.run.objective]} (+{100 * costs_s / free.objective_s:.3g} %)"
    return f"{_needs_tail(question)}; that costs {more}"


def _because_of_tail(question: Question) -> str:
    """Name the tail as reason where there is no plan but would be one without it."""
    return "" if _with_any_tail(question) is None else f"; {_needs_tail(question)}: take a head with more memory"


def _with_any_tail(question: Question, settled: Settled | None = None) -> Solution | None:
    """Return the best solution if the last window could have any number of layers; None where it can, or nothing fits."""
    if question.model.tail_layers == 1 or question.run.windows is not None:
        return None
    time_limit_s = min(LEFT_OUT_TIME_LIMIT_S, question.time_limit_s)
    free = replace(question, model=replace(question.model, tail_layers=1), time_limit_s=time_limit_s)
    try:
        return search(request_of(free, settled=settled)).solution
    except Infeasible:
        return None


def _needs_tail(question: Question) -> str:
    why = (
        "one with attention and one with a state" if question.model.is_recurrent else "which need each other's KV cells"
    )
    return f"the head's last window has at least {question.model.tail_layers} layers, {why}"


def _left_out(question: Question, chosen: Planned, settled: Settled) -> list[LeftOutJson]:
    reasons = {left.device: left.reason for left in chosen.plan.left_out}
    names = [device.device for device in question.devices if device.device not in chosen.plan.devices]
    asked = request_of(question).instance(settled.workload, chosen.plan.head)
    parts, tried = list[LeftOutJson](), 0
    for name in names:
        reason = reasons.get(name, "the plan is better without it")
        if question.run.windows is not None:
            reason = "--windows gives it no layers"
        alike = next((each for each in parts if each.slower_ms is not None and asked.are_alike(each.name, name)), None)
        if alike is not None:
            parts.append(structs.replace(alike, name=name))
        elif question.run.windows is not None or chosen.plan.groups or tried >= MAX_LEFT_OUT:
            parts.append(LeftOutJson(name=name, reason=reason, slower_ms=None, objective_ms=None))
        else:
            tried += 1
            parts.append(_with_device(question, chosen, settled, name, LEFT_OUT_TIME_LIMIT_S / len(names)))
    return parts


def _with_device(question: Question, chosen: Planned, settled: Settled, name: str, time_limit_s: float) -> LeftOutJson:
    """Compute what it would cost to include ``name``, with the same head and everything that is ``settled``."""
    asked = replace(
        question,
        devices=tuple(chosen.solved.devices),
        head=chosen.plan.head,
        time_limit_s=min(time_limit_s, question.time_limit_s),
    )
    try:
        forced = search(request_of(asked, frozenset({name}), settled)).solution
    except Infeasible as exc:
        return LeftOutJson(name=name, reason=f"cannot take part: {exc}", slower_ms=None, objective_ms=None)
    solution = chosen.solved.solution
    slower_s = forced.prediction.tpot_s - solution.prediction.tpot_s
    objective_s = forced.objective_s - solution.objective_s
    reason = _verdict(question, slower_s, solution.prediction.tpot_s, objective_s, solution.objective_s)
    return LeftOutJson(name=name, reason=reason, slower_ms=slower_s * 1e3, objective_ms=objective_s * 1e3)


def _verdict(question: Question, slower_s: float, tpot_s: float, objective_s: float, best_s: float) -> str:
    """Say what including a device changes: a token by ``slower_s`` of ``tpot_s``, the objective by ``objective_s``."""
    share, what = slower_s / tpot_s, _OF[question.run.objective]
    quicker = f"though a token would take {show_ms(-slower_s * 1e3)} less"
    if share > _SAME:
        return f"would slow the ring by {show_ms(slower_s * 1e3)} per token (+{100 * share:.3g} %)"
    if objective_s > _SAME * best_s:
        more = f"would make {what} take {show_ms(objective_s * 1e3)} more (+{100 * objective_s / best_s:.3g} %)"
        return f"{more}, {quicker}" if share < -_SAME else more
    if objective_s < -_SAME * best_s:
        less = f"{show_ms(-objective_s * 1e3)} less (-{-100 * objective_s / best_s:.3g} %)"
        return f"would make {what} take {less}, too little for what it asks"
    return f"would not make {what} quicker, {quicker}" if share < -_SAME else "would make nothing faster"


def _single_device(question: Question) -> list[SingleDeviceJson]:
    """Each device without the others, the best one first."""
    parts, time_limit_s = [], min(ALONE_TIME_LIMIT_S, question.time_limit_s) / len(question.devices)
    for device in question.devices:
        try:
            planned = _plan_alone(question, device, time_limit_s)
        except Infeasible as exc:
            parts.append((float("inf"), SingleDeviceJson(name=device.device, predicted=None, reason=str(exc))))
        else:
            found = predicted_part(DescribedPlan.of(planned))
            parts.append((planned.objective_s, SingleDeviceJson(name=device.device, predicted=found, reason=None)))
    return [part for _, part in sorted(parts, key=lambda pair: pair[0])]
