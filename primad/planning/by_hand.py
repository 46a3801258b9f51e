"""Plans set by hand with ``--windows``: layers are given; streaming and the context size are computed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from halda import Infeasible, ModelProfile, Objective, Plan, Rank, Solution, Workload, arrange, evaluate, residency
from halda.chunk_rows import in_best_chunks
from halda.instance import Instance
from primad.errors import PlanError
from primad.planning.default_context import SolvedPlan, WithContext, with_wanted_context
from primad.settings.quantities import show_bytes


def plan_by_hand(
    names: Sequence[str],
    windows: tuple[int, ...],
    rounds: int | None,
    model: ModelProfile,
    ranks: tuple[int, ...] = (),
) -> Plan:
    """Return the plan in which the first of the devices ``names`` have these layers per round, each window shared by
    its number of ``ranks``.

    Raises ``PlanError`` naming the flag.
    """
    ranks = ranks or (1,) * len(windows)
    parts = (f"{layers}x{count}" if count > 1 else str(layers) for layers, count in zip(windows, ranks, strict=True))
    flag = f"--windows {','.join(parts)}"
    if sum(ranks) > len(names):
        raise PlanError(
            f"{flag} is for {sum(ranks)} devices; found {len(names)}, including this one; start 'primad join' on more "
            "or give fewer windows"
        )
    firsts = [sum(ranks[:i]) for i in range(len(ranks))]
    try:
        plan = arrange([names[first] for first in firsts], windows, rounds=rounds or 1, model=model)
    except Infeasible as exc:
        raise PlanError(f"{flag}: {exc}; choose other windows") from exc
    places = (names[first : first + count] for first, count in zip(firsts, ranks, strict=True) if count > 1)
    return replace(plan, groups=tuple(tuple(Rank(device=name, weight=1) for name in place) for place in places))


def senders_by_hand(names: Sequence[str], ranks: Sequence[int]) -> list[tuple[str, str]]:
    """Pairs of sender and receiver for windows with these ``ranks``: each window's first device sends to the next
    window's, and the devices of a group to each other."""
    places = [names[sum(ranks[:i]) : sum(ranks[: i + 1])] for i in range(len(ranks))]
    firsts = [place[0] for place in places]
    ring = zip(firsts, (*firsts[1:], firsts[0]), strict=True)
    return [pair for pair in ring if len(firsts) > 1] + [pair for place in places for pair in combinations(place, 2)]


def stream_by_hand(plan: Plan, question: Instance) -> Plan:
    """Return ``plan`` with as little streaming as the memory of its devices needs.

    Raises ``PlanError`` where a device lacks memory even so.
    """
    plan, work = residency(plan, question), question.workload
    for short in evaluate(plan, question).short:
        if short.what == "RAM" and short.where in plan.devices:
            raise PlanError(
                f"--windows: {short.where} is short of {show_bytes(short.short_bytes)} of RAM for its "
                f"{plan.layers_of(short.where)} layers, streaming included; give it fewer layers, or choose a smaller "
                f"--context than {work.context_tokens} or another --kv-type than {work.kv_type}"
            )
    return plan


def with_context_by_hand(plan: Plan, question: Instance, wanted_tokens: int, objective: Objective) -> WithContext:
    """Return ``plan``, set by hand, with ``wanted_tokens`` of context if they cost little. Raises ``PlanError``."""

    def asked(work: Workload) -> Instance:
        return replace(question, workload=work)

    def placed(work: Workload, hurries: bool) -> SolvedPlan:
        found = residency(plan, asked(work))
        prediction = evaluate(found, asked(work))
        if work != question.workload and prediction.short:
            raise Infeasible("the windows do not fit", short_bytes=0)
        value_s = prediction.objective_s(objective, work.answer_tokens)
        solution = Solution(
            plan=found, prediction=prediction, objective=objective, objective_s=value_s, bound_s=0.0, proven=False
        )
        return in_best_chunks(solution, asked(work)), [*question.devices]

    stream_by_hand(plan, question)
    return with_wanted_context(question.workload, wanted_tokens, placed, asked)
