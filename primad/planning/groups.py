"""Generate candidate plans with tensor-parallel groups: which devices share layers, with which shares, in which ring.
Pure.

A group needs devices of similar speed, and between any two of them a cable on which the all-reduce of all layers takes
less time than a token without groups. A device whose GPU is faster than its CPU has its whole share there.

A group that holds the whole model costs what the evaluator says. In a ring the solver sees a group as one more device
and divides the layers; the evaluator rates the result like any other plan. Where memory is short each device streams
part of its share: all disks read at once, and the weights are those for which the slowest device takes the least time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, TypeAlias

from halda import (
    DeviceProfile,
    Infeasible,
    LeftOut,
    NotBelow,
    Objective,
    Plan,
    Prediction,
    Rank,
    Solution,
    Window,
    evaluate,
)
from halda.evaluate import stream
from halda.instance import Instance
from halda.shared import SUMS, SharedPlace, message_s, places_of
from primad.gguf.splits import ShareUnits
from primad.planning.corrections import DeviceFactors, slower_cpu
from primad.settings.quantities import show_bytes

MAX_WEIGHT: Final = 16
"""Weight of the fastest device. Weights are coarse, so that shares stay the same where figures hardly change."""
MAX_COMBINED: Final = 4
"""Up to this size all combinations of devices are tried as groups; larger groups take the fastest devices."""
MAX_RATIO: Final = 8.0
"""A device that is slower than another by this factor would have hardly any share."""
MAX_SETS: Final = 60
MAX_RINGS: Final = 6
"""Rings for which the solver is called."""
MAX_STREAMING: Final = 4
"""Number of streaming groups that are rated, where no group has enough memory."""
STAND_IN_ERROR: Final = 0.1
"""The solver's cost of a ring may exceed the evaluator's by this share: the solver sees a group as one device."""
STEPS: Final = (4, 2, 1)
"""Steps by which weights of streaming groups are changed."""
_Able: TypeAlias = dict[int, float]
_Pairs: TypeAlias = set[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWishes:
    """At most ``max_ranks`` devices share layers, cut by ``units`` where these are known, to minimise ``objective``.

    A token takes ``below_s`` without groups.
    """

    max_ranks: int
    units: ShareUnits | None = None
    objective: Objective = "latency"
    below_s: float = math.inf


def group_sets(question: Instance, wishes: GroupWishes) -> list[tuple[str, ...]]:
    """Sets of devices that can be a group, those with the highest total speed first."""
    return _combined(question, wishes, *_able_pairs(question, wishes))


def _combined(question: Instance, wishes: GroupWishes, able: _Able, pairs: _Pairs) -> list[tuple[str, ...]]:
    found = [
        each
        for size in range(2, min(wishes.max_ranks, MAX_COMBINED) + 1)
        for each in combinations(able, size)
        if pairs.issuperset(combinations(each, 2))
    ]
    found.sort(key=lambda each: -sum(able[i] for i in each))
    return [_names(question, each) for each in found]


def _unlike(question: Instance, places: Iterable[list[tuple[str, ...]]]) -> list[list[tuple[str, ...]]]:
    """Drop the rings of groups in ``places`` that are like an earlier one: with like devices."""
    head, *others = (device.device for device in question.devices)
    unlike = question.unlike(others)
    kinds = {name: next(at for at, each in enumerate(unlike) if question.are_alike(name, each)) for name in others}
    kinds[head] = -1
    found: dict[object, list[tuple[str, ...]]] = {}
    for sets in places:
        found.setdefault(tuple(sorted(tuple(sorted(kinds[name] for name in names)) for names in sets)), sets)
    return [*found.values()][:MAX_SETS]


def _large_sets(question: Instance, wishes: GroupWishes, able: _Able, pairs: _Pairs) -> list[tuple[str, ...]]:
    """The head and the fastest devices with it, in groups of more than ``MAX_COMBINED``."""
    taken = [0] if 0 in able else []
    for i in able:
        if i and taken and all((a, i) in pairs or (i, a) in pairs for a in taken):
            taken.append(i)
    sizes = range(MAX_COMBINED + 1, min(wishes.max_ranks, len(taken)) + 1)
    return [_names(question, sorted(taken[:size], key=lambda i: -able[i])) for size in sizes]


def _names(question: Instance, devices: Sequence[int]) -> tuple[str, ...]:
    return tuple(question.devices[i].device for i in devices)


def _able_pairs(question: Instance, wishes: GroupWishes) -> tuple[_Able, _Pairs]:
    """Tokens/s of each device that can share layers, the fastest first, and the pairs that can do so together."""
    rates = {i: 1 / _alone(question, device)[0] for i, device in enumerate(question.devices)}
    sums = SUMS * len(question.model.layers)

    def is_quick(a: int, b: int) -> bool:
        sums_s = sums * max(message_s(question, *pair, question.model.hop_values) for pair in ((a, b), (b, a)))
        is_like = max(rates[a], rates[b]) <= MAX_RATIO * min(rates[a], rates[b])
        is_wired = _reach(question, a, b) and not question.in_air(a, b)  # all-reduces would share the air
        return is_wired and is_like and sums_s < wishes.below_s

    ordered = sorted(rates, key=lambda i: -rates[i])
    return {i: rates[i] for i in ordered}, {(a, b) for a, b in combinations(ordered, 2) if is_quick(a, b)}


def _reach(question: Instance, a: int, b: int) -> bool:
    """Return whether the devices ``a`` and ``b`` reach each other."""
    return question.link(a, b).works and question.link(b, a).works


def whole_group(
    question: Instance, names: Sequence[str], units: ShareUnits | None, left_out: Sequence[LeftOut] = ()
) -> Plan:
    """Place the whole model on a group of the devices ``names``, the head among them, with the fastest shares that fit
    their memory.

    Raises ``Infeasible`` where memory is short, or the shares cannot be cut.
    """
    plan = _of_whole(question, names, units, left_out)
    return _quicker(_within_memory(plan, question, units), question, units)


def streaming_group(
    question: Instance, names: Sequence[str], units: ShareUnits | None, left_out: Sequence[LeftOut] = ()
) -> Plan:
    """Like ``whole_group``, but weights that do not fit into memory stream."""
    plan = _of_whole(question, names, units, left_out)
    plan, found = _judged(plan, question)
    for step in STEPS:
        while True:
            others = [_judged(each, question) for each in _evener(plan, found, step, units)]
            other, judged = min(others, key=lambda each: _cost(each[1]), default=(plan, found))
            if _cost(judged) >= _cost(found):
                break
            plan, found = other, judged
    if found.short:
        first = found.short[0]
        raise Infeasible(
            f"{first.where} is short of {show_bytes(first.short_bytes)} of {first.what}, streaming included",
            short_bytes=first.short_bytes,
        )
    return plan


def _evener(plan: Plan, found: Prediction, step: int, units: ShareUnits | None) -> Iterator[Plan]:
    """Yield ``plan`` with less for its slowest device, or for one that is short of memory; with more for the fastest;
    and with both."""
    by_time = [each.device for each in sorted(found.devices, key=lambda each: each.window_s)]
    weights = {rank.device: rank.weight for rank in plan.groups[0]}
    slowest = next((short.where for short in found.short if short.where in weights), by_time[-1])
    more, less = {by_time[0]: weights[by_time[0]] + step}, {slowest: weights[slowest] - step}
    for changes in (less, more, less | more):
        if all(1 <= weight <= MAX_WEIGHT for weight in changes.values()):
            yield _weighing(plan, changes, units)


def _judged(plan: Plan, question: Instance) -> tuple[Plan, Prediction]:
    plan = stream(plan, question, {})
    return plan, evaluate(plan, question)


def _cost(found: Prediction) -> tuple[int, float]:
    return sum(short.short_bytes for short in found.short), found.tpot_s


def _of_whole(question: Instance, names: Sequence[str], units: ShareUnits | None, left_out: Sequence[LeftOut]) -> Plan:
    """Return the group of ``names`` with shares by speed. Raises ``Infeasible`` where they cannot be cut."""
    head = question.devices[0].device
    layers = len(question.model.layers)
    return Plan(
        rounds=1,
        route=(Window(device=head, first=0, last=layers, gpu_layers=0),),
        output_on_gpu=False,
        streaming=(),
        left_out=tuple(left_out),
        groups=(_by_speed(question, (head, *(name for name in names if name != head)), units),),
    )


def _by_speed(question: Instance, names: Sequence[str], units: ShareUnits | None) -> tuple[Rank, ...]:
    """Return the ranks ``names`` with shares by speed. Raises ``Infeasible`` where they cannot be cut."""
    devices = {device.device: device for device in question.devices}
    alone = [_alone(question, devices[name]) for name in names]
    ranks = [Rank(device=name, weight=1, on_gpu=on_gpu) for name, (_, on_gpu) in zip(names, alone, strict=True)]
    rates = [1 / seconds for seconds, _ in alone]
    return _weighed(ranks, [max(1, round(MAX_WEIGHT * rate / max(rates))) for rate in rates], units)


def _weighed(ranks: Sequence[Rank], weights: Sequence[int], units: ShareUnits | None) -> tuple[Rank, ...]:
    """Return ``ranks`` with other ``weights``. Raises ``Infeasible`` where they cannot be cut."""
    shares = [(0.0, 0.0)] * len(ranks) if units is None else units.shares(weights)
    if shares is None:
        raise Infeasible(f"this model has too few attention heads for {len(ranks)} devices", short_bytes=0)
    return tuple(
        replace(rank, weight=weight, heads=heads, values=values)
        for rank, weight, (heads, values) in zip(ranks, weights, shares, strict=True)
    )


def _alone(question: Instance, device: DeviceProfile) -> tuple[float, bool]:
    """Seconds per token on ``device`` if it had memory for the whole model, and whether on its GPU, where that is
    faster."""
    places = (False, True)[: 1 + bool(device.gpus)]
    return min((_token_s(question, device, on_gpu=on_gpu), on_gpu) for on_gpu in places)


def _token_s(question: Instance, device: DeviceProfile, *, on_gpu: bool) -> float:
    own = replace(question, devices=(device.with_gpus(device.gpus[:on_gpu]),), links={}, prefill_offload=frozenset())
    layers = len(question.model.layers)
    window = Window(device=device.device, first=0, last=layers, gpu_layers=on_gpu * layers)
    return evaluate(Plan(rounds=1, route=(window,), output_on_gpu=on_gpu, streaming=(), left_out=()), own).tpot_s


def _weighing(plan: Plan, changes: dict[str, int], units: ShareUnits | None) -> Plan:
    """Return ``plan``, of one group, with other weights."""
    (ranks,) = plan.groups
    weights = [changes.get(rank.device, rank.weight) for rank in ranks]
    return replace(plan, groups=(_weighed(ranks, weights, units),))


def _within_memory(plan: Plan, question: Instance, units: ShareUnits | None) -> Plan:
    """Reduce the shares of devices that are short of memory; one whose smallest share exceeds its VRAM computes it on
    the CPU.

    Raises ``Infeasible``.
    """
    while short := evaluate(plan, question).short:
        first = short[0]
        weight = next((rank.weight for rank in plan.groups[0] if rank.device == first.where), 1)
        if weight == 1 and first.what == "VRAM":
            (ranks,) = plan.groups
            on_gpus = (rank.on_gpu and rank.device != first.where for rank in ranks)
            ranks = tuple(replace(rank, on_gpu=on_gpu) for rank, on_gpu in zip(ranks, on_gpus, strict=True))
            plan = replace(plan, groups=(ranks,))
            continue
        if weight == 1:
            raise Infeasible(
                f"{first.where} is short of {show_bytes(first.short_bytes)} of {first.what} for a share of each layer; "
                "choose a smaller --context, add a device, or serve with --parallel pipeline",
                short_bytes=first.short_bytes,
            )
        plan = _weighing(plan, {first.where: weight - 1}, units)
    return plan


def _quicker(plan: Plan, question: Instance, units: ShareUnits | None) -> Plan:
    """Reduce the share of the slowest rank of ``plan`` as long as that makes a token faster: heads are cut whole."""
    found = evaluate(plan, question)
    while True:
        slowest = max(found.devices, key=lambda each: each.compute_s).device
        weight = next(rank.weight for rank in plan.groups[0] if rank.device == slowest)
        if weight == 1:
            return plan
        try:
            other = _weighing(plan, {slowest: weight - 1}, units)
        except Infeasible:
            return plan
        judged = evaluate(other, question)
        if judged.short or judged.tpot_s >= found.tpot_s:
            return plan
        plan, found = other, judged


def all_in_one(question: Instance, max_ranks: int, units: ShareUnits | None, *, streams: bool = False) -> Plan:
    """Return the group of the head and the fastest other devices, at most ``max_ranks``, that all reach each other;
    with ``streams`` weights that do not fit into memory stream.

    Raises as ``whole_group``, and ``Infeasible`` where the head reaches no other device.
    """
    names = [device.device for device in question.devices]
    rates = [1 / _alone(question, device)[0] for device in question.devices]
    taken, left_out = [0], list[LeftOut]()
    for other in sorted(range(1, len(names)), key=lambda each: -rates[each]):
        cut = next((each for each in taken if not _reach(question, other, each)), None)
        if cut is None and len(taken) < max_ranks:
            taken.append(other)
            continue
        reason = f"the attention heads of this model allow at most {max_ranks} devices in a group"
        if cut is not None:
            reason = f"it does not reach {names[cut]}, which is faster, and the devices of a group send to each other"
        left_out.append(LeftOut(device=names[other], reason=reason))
    if len(taken) == 1:
        raise Infeasible(f"no other device reaches {names[0]} for a group", short_bytes=0)
    made = streaming_group if streams else whole_group
    return made(question, [names[each] for each in sorted(taken)], units, left_out)


def solution_of(plan: Plan, question: Instance, objective: Objective) -> Solution:
    """Return ``plan`` with its forecast as a solution."""
    prediction = evaluate(plan, question)
    value_s = prediction.objective_s(objective, question.workload.answer_tokens)
    return Solution(
        plan=plan, prediction=prediction, objective=objective, objective_s=value_s, bound_s=0.0, proven=False
    )


def best_whole(question: Instance, wishes: GroupWishes) -> Solution | None:
    """Return the best group of the whole model that includes the head; None where there is none.

    Groups that stream are tried only where no group fits into memory.
    """
    able, pairs = _able_pairs(question, wishes)
    found = [*_combined(question, wishes, able, pairs), *_large_sets(question, wishes, able, pairs)]
    head = question.devices[0].device
    sets = [names for [names] in _unlike(question, [[names] for names in found if head in names])]
    by_disks = sorted(sets, key=lambda names: -len(names))[:MAX_STREAMING]
    return _best_of(question, wishes, sets, whole_group) or _best_of(question, wishes, by_disks, streaming_group)


def _best_of(
    question: Instance, wishes: GroupWishes, sets: Iterable[Sequence[str]], made: Callable[..., Plan]
) -> Solution | None:
    found = list[Solution]()
    for names in sets:
        try:
            plan = made(question, names, wishes.units, _not_in(question, names))
        except Infeasible:
            continue
        found.append(solution_of(plan, question, wishes.objective))
    return min(found, key=lambda each: each.objective_s, default=None)


def _not_in(question: Instance, names: Iterable[str]) -> list[LeftOut]:
    others = (device.device for device in question.devices if device.device not in names)
    return [LeftOut(device=name, reason="a share of each layer there would make nothing faster") for name in others]


def best_ring(
    question: Instance, wishes: GroupWishes, time_limit_s: float, other: Solution | None = None
) -> Solution | None:
    """Return the best ring of groups and single devices that the solver finds for the likeliest groups, all within
    ``time_limit_s``; ``other`` where none is better."""
    best, tried = other, [*_ring_sets(question, wishes)]
    for sets in tried:
        below_s = math.inf if best is None else best.objective_s / (1 - STAND_IN_ERROR)
        try:
            groups = tuple(_by_speed(question, _leader_first(question, names), wishes.units) for names in sets)
            ring = ring_of(question, groups, wishes.objective, time_limit_s / len(tried), below_s)
        except (Infeasible, NotBelow):
            continue
        if ring is not None and (best is None or ring.objective_s < best.objective_s):
            best = ring
    return best


def _ring_sets(question: Instance, wishes: GroupWishes) -> Iterator[list[tuple[str, ...]]]:
    """Sets of groups: one group each, and pairs that have no device in common."""
    sets = group_sets(question, wishes)
    count = len(question.devices)
    ones = _unlike(question, ([names] for names in sets if len(names) < count))
    twos = _unlike(question, ([a, b] for a, b in combinations(sets[:MAX_SETS], 2) if set(a).isdisjoint(b)))
    twos.sort(key=lambda pair: -sum(map(len, pair)))
    half = MAX_RINGS // 2
    yield from ones[: MAX_RINGS - min(half, len(twos))]
    yield from twos[:half]


def _leader_first(question: Instance, names: Sequence[str]) -> list[str]:
    """Put the leader first: the head, or else the fastest device."""
    head = question.devices[0].device
    return sorted(names, key=lambda name: name != head)


def ring_of(
    question: Instance,
    groups: tuple[tuple[Rank, ...], ...],
    objective: Objective,
    time_limit_s: float,
    below_s: float = math.inf,
) -> Solution | None:
    """Solve the ring in which each of ``groups`` is a place; None where there is none.

    Raises ``Infeasible``, and ``NotBelow`` where by the solver's figures it takes ``below_s`` or more.
    """
    from halda import solve  # only a process that solves loads the solver

    places, shared = places_of(question, groups)
    devices = [
        _stand_in(shared[each.device], question, each) if each.device in shared else each for each in places.devices
    ]
    solved = solve(
        devices,
        list(question.links.values()),
        question.model,
        question.workload,
        objective=objective,
        limits={name: limits for name, limits in question.limits.items() if name not in shared},
        require=frozenset(shared),
        time_limit_s=time_limit_s,
        experts=question.experts,
        settles=True,
        simplifies=False,
        below_s=below_s,
    )
    plan, rows = solved.plan, solved.prediction
    if plan.rounds > 1 or len(plan.places) == 1 or not _may_be_on_gpus(plan, groups, question):
        return None
    followers = [rank.device for ranks in groups for rank in ranks[1:]]
    left_out = tuple(each for each in plan.left_out if each.device not in followers)
    asked, alone = question.with_rows(rows.chunk_rows, rows.step_rows), plan.streaming
    singles = tuple(each for each in alone if each.device not in shared)
    plan = replace(plan, groups=groups, left_out=left_out, streaming=singles)
    if len(singles) < len(alone):  # ranks of a group stream what their own memory lacks
        read_ahead = {each.device: each.read_ahead_bytes for each in singles}
        plan = stream(plan, asked, read_ahead, {each.device: each.streamed_bytes for each in singles})
    found = solution_of(plan, asked, objective)
    return None if found.prediction.short else found


def _may_be_on_gpus(plan: Plan, groups: Sequence[Sequence[Rank]], question: Instance) -> bool:
    """Return whether ranks with shares on GPUs can have all layers of their windows there."""
    firsts = {ranks[0].device for ranks in groups if any(rank.on_gpu for rank in ranks)}
    shares = (window.layers for window in plan.route if window.device in firsts)
    return all(question.model.openable(layers, len(layers)) == len(layers) for layers in shares)


def _stand_in(place: SharedPlace, question: Instance, profile: DeviceProfile) -> DeviceProfile:
    """Return a device about as fast as the group ``place``, with as much memory."""
    first = next(member for member in question.members if member.name == profile.device)
    decode = (max(place.member.decode.cpu) - SUMS * place.sum_s) / max(first.decode.cpu)
    prefill = max(place.member.prefill.cpu) / max(first.prefill.cpu)
    factors = DeviceFactors(stamp="", compute=decode, prompts=prefill)
    cpu = slower_cpu(first.profile.cpu, factors)
    return replace(
        profile,
        cpu=replace(cpu, step_s=profile.cpu.step_s, layer_s=cpu.layer_s + SUMS * place.sum_s),
        ram_read_bytes_per_s=first.profile.ram_read_bytes_per_s / decode,
        ram_available_bytes=place.member.ram_limit,
        ram_total_bytes=max(first.profile.ram_total_bytes, place.member.ram_limit),
    )
