"""Search for plans in which devices share layers, and choose between these and whole layers per device. Pure.

``groups.py`` generates the candidates. Where a context or an attention kernel has to be found too, the groups of the
first solution stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from msgspec import structs

from halda import DeviceProfile, Infeasible, Plan, Solution, Workload
from halda.instance import Instance
from primad.planning.default_context import obstacle, why_small, with_wanted_context
from primad.planning.groups import (
    GroupWishes,
    all_in_one,
    best_ring,
    best_whole,
    ring_of,
    solution_of,
    streaming_group,
    whole_group,
)
from primad.planning.request import FoundPlan, PlanRequest
from primad.settings.quantities import show_ms

MIN_GAIN: Final = 0.05
"""Gain that a group must give: it depends on each link in each layer."""
MAX_HEADS: Final = 3
"""Number of unlike heads that are tried, where any device may be head."""
RINGS_SHARE: Final = 0.2
"""Share of the planning time for all rings with groups, or for one of them that is planned again."""

_Best = Callable[[Instance], Solution | None]


def search_shared(request: PlanRequest) -> FoundPlan:
    """Return the group of all devices, as ``--parallel tensor`` asks.

    Where they have no memory for it, return the best of that group with streaming and rings with groups. Raises
    ``Infeasible``.
    """

    def together(question: Instance, *, streams: bool = False) -> Solution:
        plan = all_in_one(question, request.max_ranks, request.units, streams=streams)
        return solution_of(plan, question, request.run.objective)

    def otherwise(question: Instance) -> Solution | None:
        whole: Solution | None = None
        with suppress(Infeasible):
            whole = together(question, streams=True)
        return _best_ring(request, question, other=whole)

    try:
        return _search(request, together)
    except Infeasible as exc:
        try:
            return _search(request, otherwise)
        except Infeasible:
            raise exc from None


def search_best_shared(request: PlanRequest, below_s: float = math.inf) -> FoundPlan | None:
    """Return the best plan with groups; None where no devices can form one, or memory is short. Other plans take
    ``below_s`` a token."""

    def best(question: Instance) -> Solution | None:
        whole = best_whole(question, _wishes(request, below_s))
        return _best_ring(request, question, below_s, other=whole)

    try:
        return _search(request, best)
    except Infeasible:
        return None


def _best_ring(
    request: PlanRequest, question: Instance, below_s: float = math.inf, *, other: Solution | None
) -> Solution | None:
    return best_ring(question, _wishes(request, below_s), RINGS_SHARE * request.time_limit_s, other)


def _wishes(request: PlanRequest, below_s: float) -> GroupWishes:
    return GroupWishes(
        max_ranks=request.max_ranks, units=request.units, objective=request.run.objective, below_s=below_s
    )


def _search(request: PlanRequest, best: _Best) -> FoundPlan:
    """Return the solution of ``best`` for the first workload that has a plan.

    Extra buffers cannot hold a share of a file, so there are none. Raises ``Infeasible``.
    """
    devices, works = [device.without_extra_buffers() for device in request.devices], request.workloads
    asked, chosen = structs.replace(request, devices=devices), list[Plan]()

    def planned(work: Workload, hurries: bool) -> tuple[Solution, list[DeviceProfile]]:
        del hurries
        if chosen:
            return _again(request, asked.instance(work, chosen[0].head), chosen[0]), devices
        found = [solution for head in _heads(asked, work) if (solution := best(asked.instance(work, head)))]
        if not found:
            raise Infeasible("no devices can share layers", short_bytes=0)
        quickest = min(found, key=lambda each: each.objective_s)
        chosen.append(quickest.plan)
        return quickest, devices

    for work in works:
        try:
            found = with_wanted_context(work, request.wanted_tokens, planned, asked.instance)
        except Infeasible:
            if work is works[-1]:
                raise
        else:
            return FoundPlan(
                solution=found.solution, devices=found.devices, workload=found.workload, why_context=found.why
            )
    raise AssertionError("there is a workload")


def _heads(request: PlanRequest, work: Workload) -> list[str]:
    heads = request.heads or [request.devices[0].device]
    return request.instance(work, heads[0]).unlike(heads)[:MAX_HEADS]


def _again(request: PlanRequest, question: Instance, before: Plan) -> Solution:
    """Return the plan with the groups of ``before`` for another workload. Raises ``Infeasible``."""
    objective = request.run.objective
    if len(before.route) == 1:
        names = [rank.device for rank in before.groups[0]]
        made = streaming_group if before.streaming else whole_group
        return solution_of(made(question, names, request.units, before.left_out), question, objective)
    found = ring_of(question, before.groups, objective, RINGS_SHARE * request.time_limit_s)
    if found is None:
        raise Infeasible("the groups of this plan have no memory for it", short_bytes=0)
    return found


def quicker_of(found: FoundPlan, shared: FoundPlan) -> FoundPlan:
    """Return ``shared`` where it gains enough over ``found``, else ``found``; the result says why.

    ``shared`` may have a smaller context, where the rule for the default context finds the larger one too expensive.
    """
    wide_tokens = found.workload.context_tokens
    is_wide = shared.workload.context_tokens >= wide_tokens
    against = "" if is_wide else obstacle(found.solution, shared.solution)
    gains = shared.solution.objective_s < (1 - MIN_GAIN) * found.solution.objective_s
    tensor, other = (show_ms(each.solution.prediction.tpot_s * 1e3) for each in (shared, found))
    over = f"tensor over {_over(shared.solution.plan)}"
    if gains and (is_wide or against):
        why = why_small(wide_tokens, against) if against else shared.why_context
        return structs.replace(shared, why_parallel=f"{over}: {tensor} per token instead of {other}", why_context=why)
    less = "" if is_wide else ", and has memory for a smaller context"
    return structs.replace(found, why_parallel=f"{over} would take {tensor} per token instead of {other}{less}")


def _over(plan: Plan) -> str:
    return ", ".join(_listed([rank.device for rank in ranks]) for ranks in plan.groups)


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}"
