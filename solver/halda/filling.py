"""Among plans with about the same request time, choose the one that fills the ring best.

Any split of a model between like devices gives one user's token the same time. Splits differ in the speed of several
concurrent requests, drafts, and prompt chunks: these follow each other as fast as the busiest machine computes. So a
second of the busiest machine for a typical request counts as ``WEIGHT`` seconds of the request itself while plans are
compared. Once the best plan is known it counts as ``WEIGHT_AT_ONCE`` for each expected concurrent request, and the plan
may then take ``simpler.GAIN`` longer.

Layers move one cut at a time from the busiest machine to one that does not become as busy, where that costs the request
least. Where a layer costs a device the same in any place, no plan with the same busiest machine is faster than the one
on that path: the device with the cheapest layers is always full. The best plan of the path is taken. Where layers
stream every step reads all of them, so steps do not follow each other; such plans stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from halda.evaluate import Objective, Prediction, evaluate, request_weights
from halda.instance import Instance
from halda.plan import Plan, Window

WEIGHT: Final = 0.05
"""Seconds of a request that a second of the busiest machine is worth."""
WEIGHT_AT_ONCE: Final = 0.1
"""The same per expected concurrent request: as if for a tenth of the time that many requests ran and waited for each
other."""
EVEN_COST: Final = 0.005
"""Maximum share of a request's time that equal windows at both ends of a ring may cost: layers differ slightly."""
_SAME: Final = 1e-9


@dataclass(frozen=True, slots=True)
class _Tried:
    plan: Plan
    objective_s: float
    busy_s: dict[str, float]
    """For each device, the computing time per request of all devices that share its processor."""

    @property
    def busiest_s(self) -> float:
        return max(self.busy_s.values())

    def cost_s(self, weight: float) -> float:
        return self.objective_s + weight * self.busiest_s


def filled(
    plan: Plan, question: Instance, objective: Objective, *, weight: float = WEIGHT, longest_s: float = math.inf
) -> Plan:
    """Return ``plan``, or one of the same ring that is about as good for ``objective`` with a less busy machine, each
    second of which is worth ``weight``. Its objective is at most ``longest_s``."""
    if plan.streaming or plan.rounds > 1 or len(plan.devices) == 1:
        return plan
    now = _tried(plan, question, objective)
    assert now is not None
    best, worst_s = now, min(now.cost_s(weight), longest_s)
    while now.objective_s < worst_s:
        found = [
            trial
            for moved in _with_less_of_busiest(now, question)
            if (trial := _tried(moved, question, objective)) is not None and _is_less_busy(trial, now)
        ]
        if not found:
            break
        now = min(found, key=lambda each: (each.objective_s, each.busiest_s))
        if now.cost_s(weight) < best.cost_s(weight) * (1 - _SAME) and now.objective_s <= longest_s:
            best = now
    return best.plan


def evened(plan: Plan, question: Instance, objective: Objective) -> Plan:
    """Return ``plan`` with the head's layers split about evenly between both ends, if that costs the request at most
    ``EVEN_COST``.

    The head alternates between the end of one chunk and the beginning of a later one: with a long window at one end the
    others wait for it, or it for them.
    """
    now, cut = _tried(plan, question, objective), question.model.cut_multiple
    sizes = [len(window.layers) for window in plan.route]
    shift = int((sizes[0] - sizes[-1]) / (2 * cut)) * cut
    if now is None or plan.streaming or plan.uses_gpu or plan.rounds > 1 or len(plan.devices) == 1 or not shift:
        return plan
    sizes[0] -= shift
    sizes[-1] += shift
    bounds = [0, *accumulate(sizes)]
    if sizes[0] <= 0 or any(bound not in question.model.cut_points for bound in bounds[1:-1]):
        return plan
    trial = _tried(replace(plan, route=_route(plan.route, bounds, {}, question)), question, objective)
    costs = trial is not None and trial.objective_s > now.objective_s * (1 + EVEN_COST)
    return plan if trial is None or costs else trial.plan


def busy_s(prediction: Prediction, question: Instance, objective: Objective) -> dict[str, float]:
    """Return, for each device of the plan, the seconds that a typical request keeps its processor busy, on any device
    there."""
    of_token, of_chunk = request_weights(objective, question.workload)
    own = {
        each.device: of_token * each.compute_s + of_chunk * question.chunks * each.prefill_s
        for each in prediction.devices
    }
    shared = {
        question.devices[m].device: [question.devices[other].device for other in here]
        for here in question.processors
        for m in here
    }
    return {name: sum(own.get(other, 0.0) for other in shared[name]) for name in own}


def _tried(plan: Plan, question: Instance, objective: Objective) -> _Tried | None:
    prediction = evaluate(plan, question)
    if prediction.short:
        return None
    objective_s = prediction.objective_s(objective, question.workload.answer_tokens)
    return _Tried(plan, objective_s, busy_s(prediction, question, objective))


def _is_less_busy(trial: _Tried, before: _Tried) -> bool:
    """Whether the set of devices at least as busy as the busiest before lost a member and gained none."""
    at_most = before.busiest_s * (1 - _SAME)
    were = {name for name, seconds in before.busy_s.items() if seconds > at_most}
    return {name for name, seconds in trial.busy_s.items() if seconds > at_most} < were


def _with_less_of_busiest(now: _Tried, question: Instance) -> Iterator[Plan]:
    """Yield plans in which one of the busiest devices has a cut less, and one that is not busy a cut more."""
    busiest_s, route = now.busiest_s * (1 - _SAME), now.plan.route
    sources = [i for i, window in enumerate(route) if now.busy_s[window.device] > busiest_s]
    takers = [i for i, window in enumerate(route) if now.busy_s[window.device] <= busiest_s]
    for source in sources:
        for taker in takers:
            yield from _moved(now.plan, question, source, taker)


def _moved(plan: Plan, question: Instance, source: int, taker: int) -> Iterator[Plan]:
    """Yield ``plan`` with a cut of layers moved from window ``source`` to window ``taker``, on its CPU or on a GPU."""
    model, cut = question.model, question.model.cut_multiple
    sizes = [len(window.layers) for window in plan.route]
    sizes[source] -= cut
    sizes[taker] += cut
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    if sizes[source] <= 0 or any(bound not in model.cut_points for bound in bounds[1:-1]):
        return
    given, taken = plan.route[source], plan.route[taker]
    gpus = {member.name: member.gpu_count for member in question.members}
    gives = {min(given.gpu_layers, sizes[source]), max(0, given.gpu_layers - cut)}
    may_take = gpus[taken.device] if plan.output_on_gpu or taker < len(plan.route) - 1 else 0
    takes = [taken, *(taken.more_on_gpu(taken.gpu_layers + cut, gpu) for gpu in range(may_take))]
    for gpu_given in gives:
        for more in takes:
            for experts in _experts(taken, more.gpu_layers, question):
                changed = {source: given.fewer_on_gpu(gpu_given), taker: replace(more, cpu_experts=experts)}
                yield replace(plan, route=_route(plan.route, bounds, changed, question))


def _experts(taken: Window, on_gpu: int, question: Instance) -> set[int]:
    """Return how many of ``on_gpu`` GPU layers may have their experts in RAM."""
    if not question.parts:
        return {taken.cpu_experts}
    return {on_gpu} if question.experts == "cpu" else {taken.cpu_experts, taken.cpu_experts + on_gpu - taken.gpu_layers}


def _route(
    route: Sequence[Window], bounds: Sequence[int], changed: dict[int, Window], question: Instance
) -> tuple[Window, ...]:
    windows = []
    for i, (window, first, last) in enumerate(zip(route, bounds, bounds[1:], strict=False)):
        found = changed.get(i, window)
        on_gpu = question.model.openable(range(first, last), found.gpu_layers)
        windows.append(replace(found.fewer_on_gpu(on_gpu), first=first, last=last))
    return tuple(windows)
