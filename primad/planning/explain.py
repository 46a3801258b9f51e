"""From a question to the whole answer: the plan, what it costs, and what else could be.

Everything is judged by one evaluator (``halda.evaluate``): this plan, each device alone, each device that was left out
taking part after all, and what was before ``--what-if``. With ``--solver paper`` the plan is that of Halda as published,
which only a source checkout has (``halda_research``), beside ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Final

from halda import DeviceProfile, Infeasible, Plan, Workload
from halda.evaluate import evaluate
from halda.instance import Instance, instance
from halda.search import CHUNKS, solve
from halda.solution import Solution
from primad import __version__
from primad.errors import ConfigError, PlanError
from primad.planning.batching import Batches
from primad.planning.context import widened_context
from primad.planning.default_context import HURRIED_S, WithContext, wanted_context, with_wanted_context
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
from primad.planning.extra_buffers import solved_as_planned, suited, why_extra
from primad.planning.fitting import fitted
from primad.planning.question import Question
from primad.planning.schema import SCHEMA, AloneJson, Explanation, LeftOutJson, WhatIf
from primad.settings.quantities import show_ms

MOST_LEFT_OUT: Final = 8
"""Devices for which it is worked out what they would cost; of more only the solver's reason is given."""
LEFT_OUT_TIME_LIMIT_S: Final = 2.0
_SAME: Final = 0.001
"""Relative difference that is not worth a number."""
_OF: Final = {"latency": "a token", "ttft": "the first token", "throughput": "a token of all", "balanced": "a request"}


def explain(question: Question, changes: Sequence[str] = (), before: Question | None = None) -> Explanation:
    """The answer to ``question``; with ``changes``, next to that of the question ``before`` them.

    Raises ``PlanError`` when there is no plan, saying which limit is short, and ``ConfigError`` where this primad has not
    got the paper's solver.
    """
    earlier = None if before is None else _before(changes, before)
    try:
        question = _with_room(question)
        halda, chosen = _plans(question)
    except Infeasible as exc:
        raise PlanError(_no_plan(f"{exc}{_because_of_tail(question)}", earlier)) from exc
    ring, as_solved = ring_part(chosen), _as_solved(question, chosen)
    return Explanation(
        schema=SCHEMA,
        primad=__version__,
        solver=ring.solver,
        head=ring.head,
        rounds=ring.rounds,
        output_on_gpu=ring.output_on_gpu,
        chunk_rows=ring.chunk_rows,
        devices=ring.devices,
        predicted=ring.predicted,
        short=ring.short,
        one_disk=ring.one_disk,
        model=model_part(question),
        workload=workload_part(chosen),
        proof=proof_part(question, chosen),
        left_out=_left_out(as_solved, chosen),
        alone=_alone(question),
        load=None if chosen.batches is None else load_part(chosen.batches),
        kept=kept_part(chosen),
        compared=None if chosen is halda else ring_part(halda),
        what_if=earlier,
        draft=draft_part(question, chosen.plan, chosen.instance),
        tail=None if chosen.solution is None else _tail(as_solved, chosen.solution),
    )


def _as_solved(question: Question, chosen: DescribedPlan) -> Question:
    """``question`` for the context that ``chosen`` was solved with, so that others are compared with the same."""
    tokens = chosen.solved_tokens or question.workload.context_tokens
    return replace(question, workload=replace(question.workload, context_tokens=tokens), widens=False)


def _with_room(question: Question) -> Question:
    """``question`` with room for the model that guesses on the head, the best one without it. Raises ``Infeasible``."""
    if question.draft is None:
        return question
    return with_room_for_draft(question, question.head or best_plan(question).plan.head)


def _plans(question: Question) -> tuple[DescribedPlan, DescribedPlan]:
    """Halda's plan, with the best head where the question leaves it open, and that of the solver that was asked for.

    Raises ``Infeasible``.
    """
    halda = best_plan(question)
    return halda, _paper(_as_solved(question, halda), halda.plan.head) if question.solver == "paper" else halda


def best_plan(question: Question) -> DescribedPlan:
    """Halda's plan, with the best head where the question leaves it open. Raises ``Infeasible``."""
    heads = [device.device for device in question.devices] if question.head is None else [question.head]
    planned, found = _solve(question, question.devices, heads, question.time_limit_s)
    extra = {
        measured.device: why_extra(measured, device, question.model)
        for measured, device in zip(question.devices, planned.devices, strict=True)
    }
    return replace(_answer(planned, found), extra_buffers=extra)


def _solve(
    question: Question,
    devices: Sequence[DeviceProfile],
    heads: Sequence[str],
    time_limit_s: float,
    require: frozenset[str] = frozenset(),
) -> tuple[Question, WithContext]:
    """The best plan for ``devices`` with the best of ``heads``, and the question with devices and context as they are in it.

    Raises ``Infeasible``.
    """

    def planned(work: Workload, hurries: bool) -> tuple[Solution, list[DeviceProfile]]:
        limit_s = min(HURRIED_S, time_limit_s) if hurries else time_limit_s

        def of(devices: list[DeviceProfile]) -> Solution:
            return solve(
                devices,
                question.all_links,
                question.model,
                work,
                objective=question.objective,
                heads=heads,
                limits=question.limits,
                require=require,
                chunks=CHUNKS,
                time_limit_s=limit_s,
                helps=True,
                experts=question.experts,
            )

        fit = [suited(device, work, question.objective) for device in devices]
        return solved_as_planned(of, fit, question.model, "auto")

    def asked(work: Workload) -> Instance:
        return instance(devices, question.all_links, question.model, work, question.limits)

    wanted = wanted_context(question.model) if question.widens else 0
    found = with_wanted_context(question.workload, wanted, planned, asked)
    fit = {device.device: device for device in found.devices}
    fitted_to = tuple(fit.get(each.device, each) for each in question.devices)
    return replace(question, devices=fitted_to, workload=found.workload), found


def _answer(question: Question, settled: WithContext) -> DescribedPlan:
    solution = settled.solution
    asked = _instance(question, solution.plan.head)
    asked = asked.with_rows(solution.prediction.chunk_rows)
    batches = _batches(question, solution, asked) if asked.workload.sequences > 1 else None
    if not question.widens or question.solver == "paper":
        tokens = asked.workload.context_tokens
        return DescribedPlan(
            solution.plan, solution.prediction, asked, solution=solution, solved_tokens=tokens, batches=batches
        )
    found = widened_context(solution.plan, asked)
    asked = replace(asked, workload=replace(asked.workload, context_tokens=found.tokens))
    return DescribedPlan(
        solution.plan,
        evaluate(solution.plan, asked),
        asked,
        solution=solution,
        why_context=settled.why or found.why,
        solved_tokens=question.workload.context_tokens,
        batches=batches,
    )


def _batches(question: Question, solution: Solution, asked: Instance) -> Batches:
    """How ``serve --sequences`` would compute as many answers at once."""
    sequences = asked.workload.sequences
    return fitted(solution, asked, objective=question.objective, sequences=sequences, widens=question.widens).batches


def _paper(question: Question, head: str) -> DescribedPlan:
    """The paper's plan with the same head, under our evaluation. Raises ``Infeasible``, and ``ConfigError`` without it."""
    try:
        research = import_module("halda_research.published")
    except ModuleNotFoundError as exc:
        raise ConfigError("--solver paper: needs a source checkout of primad; this one has only halda") from exc
    plan: Plan = research.solve_published(
        question.devices, question.all_links, question.model, question.workload, limits=question.limits, head=head
    ).plan
    devices = tuple(suited(device, question.workload, question.objective) for device in question.devices)
    asked = _instance(replace(question, devices=devices), head)
    return DescribedPlan(plan, evaluate(plan, asked), asked)


def _instance(question: Question, head: str) -> Instance:
    return instance(question.devices, question.all_links, question.model, question.workload, question.limits, head)


def _before(changes: Sequence[str], before: Question) -> WhatIf:
    try:
        _, answer = _plans(_with_room(before))
    except Infeasible as exc:
        return WhatIf(changes=list(changes), before=None, reason=str(exc), context_tokens=None)
    return WhatIf(
        changes=list(changes),
        before=ring_part(answer),
        reason=None,
        context_tokens=answer.instance.workload.context_tokens,
    )


def _no_plan(reason: str, earlier: WhatIf | None) -> str:
    if earlier is None:
        return reason
    changes = " and ".join(f"--what-if {change}" for change in earlier.changes)
    if earlier.before is None:
        return f"no plan with {changes}, nor without: {reason}"
    return f"no plan with {changes}: {reason}; without, a token takes {show_ms(earlier.before.predicted.tpot_ms)}"


def _tail(question: Question, solution: Solution) -> str | None:
    """What it costs that the last window has some layers at the least; None where it costs nothing."""
    free = _with_any_tail(question)
    if free is None or solution.objective_s <= free.objective_s * (1 + _SAME):
        return None
    costs_s = solution.objective_s - free.objective_s
    more = f"{show_ms(costs_s * 1e3)} of {_OF[question.objective]} (+{100 * costs_s / free.objective_s:.3g} %)"
    return f"{_needs_tail(question)}; that costs {more}"


def _because_of_tail(question: Question) -> str:
    """What to say of the tail where there is no plan, and would be one without it."""
    return "" if _with_any_tail(question) is None else f"; {_needs_tail(question)}: take a head with more memory"


def _with_any_tail(question: Question) -> Solution | None:
    """What were best if the last window could have any layers; None where it can, or nothing fits."""
    if question.model.tail_layers == 1:
        return None
    heads = [device.device for device in question.devices] if question.head is None else [question.head]
    time_limit_s = min(LEFT_OUT_TIME_LIMIT_S, question.time_limit_s)
    free = replace(question, model=replace(question.model, tail_layers=1))
    try:
        return _solve(free, question.devices, heads, time_limit_s)[1].solution
    except Infeasible:
        return None


def _needs_tail(question: Question) -> str:
    return f"the head's last window has at least {question.model.tail_layers} layers, which need each other's KV cells"


def _left_out(question: Question, chosen: DescribedPlan) -> list[LeftOutJson]:
    reasons = {left.device: left.reason for left in chosen.plan.left_out}
    names = [device.device for device in question.devices if device.device not in chosen.plan.devices]
    parts = []
    for i, name in enumerate(names):
        reason = reasons.get(name, "the plan is better without it")
        if chosen.solution is None or i >= MOST_LEFT_OUT:
            parts.append(LeftOutJson(name=name, reason=reason, slower_ms=None, objective_ms=None))
        else:
            parts.append(_with_device(question, chosen, chosen.solution, name))
    return parts


def _with_device(question: Question, chosen: DescribedPlan, solution: Solution, name: str) -> LeftOutJson:
    """What it would cost to have ``name`` take part, with the same head."""
    time_limit_s = min(LEFT_OUT_TIME_LIMIT_S, question.time_limit_s)
    try:
        _, forced = _solve(question, question.devices, [chosen.plan.head], time_limit_s, frozenset({name}))
    except Infeasible as exc:
        return LeftOutJson(name=name, reason=f"cannot take part: {exc}", slower_ms=None, objective_ms=None)
    slower_s = forced.solution.prediction.tpot_s - chosen.prediction.tpot_s
    objective_s = forced.solution.objective_s - solution.objective_s
    reason = _verdict(question, slower_s, chosen.prediction.tpot_s, objective_s, solution.objective_s)
    return LeftOutJson(name=name, reason=reason, slower_ms=slower_s * 1e3, objective_ms=objective_s * 1e3)


def _verdict(question: Question, slower_s: float, tpot_s: float, objective_s: float, best_s: float) -> str:
    """In words what a device would change: a token by ``slower_s`` of ``tpot_s``, the objective by ``objective_s``."""
    share, what = slower_s / tpot_s, _OF[question.objective]
    quicker = f"though a token would take {show_ms(-slower_s * 1e3)} less"
    if share > _SAME:
        return f"would slow the ring by {show_ms(slower_s * 1e3)} a token (+{100 * share:.3g} %)"
    if objective_s > _SAME * best_s:
        more = f"would make {what} take {show_ms(objective_s * 1e3)} more (+{100 * objective_s / best_s:.3g} %)"
        return f"{more}, {quicker}" if share < -_SAME else more
    return f"would not make {what} quicker, {quicker}" if share < -_SAME else "would make nothing faster"


def _alone(question: Question) -> list[AloneJson]:
    """Each device without the others, the best one first."""
    parts = []
    for device in question.devices:
        try:
            asked, answer = _solve(question, [device], [device.device], question.time_limit_s / len(question.devices))
        except Infeasible as exc:
            parts.append((float("inf"), AloneJson(name=device.device, predicted=None, reason=str(exc))))
        else:
            found = predicted_part(_answer(asked, answer))
            parts.append((answer.solution.objective_s, AloneJson(name=device.device, predicted=found, reason=None)))
    return [part for _, part in sorted(parts, key=lambda pair: pair[0])]
