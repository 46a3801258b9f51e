"""How layers are given to devices, as variables of the program: all alike, one order, or fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pulp

from halda.instance import Instance
from halda.orders import HopShare, RingOrder, ring_order
from halda.picking import Column, Columns, columns_between, fixed_columns
from halda.plan import Plan
from halda.variables import Expression

_Tail = tuple[list[Expression], list[Expression], list[Expression]]


@dataclass(slots=True)
class Layout:
    """How many layers each member has, as expressions. Lists run over members, inner lists over kinds of layers.

    ``used[m]`` is 1 for a member that takes part; ``windows[m]`` is its number of windows a token, where ``loose`` the least
    that it may be. ``experts_on_cpu`` are those of the layers on the GPU whose experts are on the CPU. ``tail_on_gpu``
    counts the layers of the head's last window that are on its GPU. ``tail`` are its layers on the CPU, on the GPU and
    of these the ones apart, by kind, or one count where it is not known of which kinds they are; None without a ring.
    ``window_in_ram`` counts those of each of its other windows of which the CPU computes something, None where that is not
    asked.
    ``orders`` with ``picked``: which ring. ``columns`` is None where it is not known which layers a window has.
    """

    rounds: int
    loose: bool
    cpu: list[list[Expression]]
    gpu: list[list[Expression]]
    experts_on_cpu: list[list[Expression]]
    used: list[Expression]
    windows: list[int]
    tail_on_gpu: Expression
    tail: _Tail | None
    window_in_ram: Expression | None
    orders: Sequence[RingOrder]
    picked: list[Expression]
    shares: Sequence[HopShare] = ()
    columns: Columns | None = None
    variables: dict[str, Any] = field(default_factory=dict)

    def in_ram(self, m: int) -> list[Expression]:
        """Layers of ``m`` of which its CPU computes something, by kind."""
        return [cpu + experts_on_cpu for cpu, experts_on_cpu in zip(self.cpu[m], self.experts_on_cpu[m], strict=True)]

    @property
    def tail_in_ram(self) -> Expression:
        """Those of the tail."""
        assert self.tail is not None
        return pulp.lpSum(self.tail[0]) + pulp.lpSum(self.tail[2])


def new_problem(name: str) -> Any:
    """An empty program that minimises."""
    return pulp.LpProblem(name, pulp.LpMinimize)


def integer(problem: Any, name: str, low: int, high: int) -> Any:
    """A whole number."""
    return problem.add_variable(name, low, high, pulp.LpInteger)


def even_layout(
    problem: Any,
    instance: Instance,
    rounds: int,
    orders: Sequence[RingOrder] | None,
    *,
    loose: bool = False,
    columns: int | None = None,
    shares: Sequence[HopShare] | None = None,
) -> Layout:
    """``w`` layers a round for each member; ``orders`` None: any subset of the members, whose order is chosen later.

    ``shares`` are then what each adds to the hops. ``columns`` fixes the layers of a round (W).
    """
    members, total = range(len(instance.devices)), len(instance.model.layers)
    cut, missing, last_cut = instance.model.cut_multiple, instance.model.cut_missing, instance.model.last_cut
    picked = [integer(problem, f"z_{i}", 0, 1) for i in range(len(orders or ()))]
    if orders is None:
        used: list[Expression] = [1, *(integer(problem, f"a_{m}", 0, 1) for m in members[1:])]
    else:
        problem += pulp.lpSum(picked) == 1, "one ring order"
        used = [pulp.lpSum(z for z, order in zip(picked, orders, strict=True) if m in order.members) for m in members]
    k = 1 if loose else rounds
    maximum = (last_cut + missing) // (k * cut)
    blocks = [integer(problem, f"w_{m}", 0, maximum) for m in members]
    w: list[Expression] = [cut * blocks[m] - (0 if m else missing) for m in members]
    tail = integer(problem, "tail", total - last_cut, total)
    layers: list[Expression] = [k * w[m] + (tail if m == 0 else 0) for m in members]
    problem += pulp.lpSum(layers) == total, "every layer has a place"
    if columns is not None:
        problem += pulp.lpSum(w) == columns, "layers of a round"
    minimum = rounds if loose else 1
    for m in members:
        problem += blocks[m] >= minimum * used[m], f"{m} has a window if it takes part"
        if m:
            problem += blocks[m] <= maximum * used[m], f"{m} has none if it does not"
    windows = [rounds + (m == 0) for m in members]
    room = [instance.gpu_room(m, windows[m]) for m in members]
    tail_gpu = integer(problem, "tail_gpu", 0, room[0])
    on_cpu = 0 if loose else instance.model.kept_on_cpu
    problem += tail_gpu <= tail - on_cpu, "GPU layers of the tail"
    n = [integer(problem, f"n_{m}", 0, min(maximum * cut, room[m] // k)) for m in members]
    for m in members:
        problem += n[m] <= w[m] - on_cpu * bool(m or k > 1) * used[m], f"GPU layers of {m}"
    on_gpu: list[Expression] = [k * n[m] + (tail_gpu if m == 0 else 0) for m in members]
    cpu, gpu = _by_kind(problem, instance, layers, on_gpu)
    a: list[Expression] = [_number_experts_on_cpu(problem, instance, f"apart_{m}", n[m]) for m in members]
    tail_experts_on_cpu = _number_experts_on_cpu(problem, instance, "apart_tail", tail_gpu)
    experts_on_cpu = [
        _experts_on_cpu_by_kind(
            problem, instance, f"apart_{m}", k * a[m] + (tail_experts_on_cpu if m == 0 else 0), gpu[m]
        )
        for m in members
    ]
    return Layout(
        rounds=rounds,
        loose=loose,
        cpu=cpu,
        gpu=gpu,
        experts_on_cpu=experts_on_cpu,
        used=used,
        windows=windows,
        tail_on_gpu=tail_gpu,
        tail=([tail - tail_gpu], [tail_gpu], [tail_experts_on_cpu]),
        window_in_ram=None if loose else w[0] - n[0] + a[0],
        orders=orders or (),
        picked=picked,
        shares=shares or (),
        variables={
            "w": w,
            "n": n,
            "a": a,
            "tail": tail,
            "tail_gpu": tail_gpu,
            "tail_experts_on_cpu": tail_experts_on_cpu,
        },
    )


def _number_experts_on_cpu(problem: Any, instance: Instance, name: str, on_gpu: Any) -> Expression:
    """How many of so many layers on a GPU have their experts on the CPU."""
    if not instance.parts:
        return pulp.lpSum(0)
    if instance.experts == "cpu":
        return pulp.lpSum(on_gpu)
    found = integer(problem, name, 0, on_gpu.upBound)
    problem += found <= on_gpu, f"{name} are on the GPU"
    return found


def _experts_on_cpu_by_kind(
    problem: Any, instance: Instance, name: str, count: Expression, gpu: Sequence[Expression]
) -> list[Expression]:
    """Which kinds they are of: any of those on the GPU."""
    if len(gpu) == 1:
        return [count]
    if not instance.parts:
        return [pulp.lpSum(0) for _ in gpu]
    found = [integer(problem, f"{name}_{g}", 0, instance.kind_totals[g]) for g in range(len(gpu))]
    problem += pulp.lpSum(found) == count, f"{name} by kind"
    for g, (experts_on_cpu, all_of_kind) in enumerate(zip(found, gpu, strict=True)):
        problem += experts_on_cpu <= all_of_kind, f"{name}: no more of kind {g} than on the GPU"
    return found


def _by_kind(
    problem: Any, instance: Instance, layers: Sequence[Expression], on_gpu: Sequence[Expression]
) -> tuple[list[list[Expression]], list[list[Expression]]]:
    """Which kinds the layers are of: any, as long as every layer has one place."""
    members, kinds = range(len(layers)), range(len(instance.kinds))
    if len(kinds) == 1:
        return [[layers[m] - on_gpu[m]] for m in members], [[on_gpu[m]] for m in members]
    cpu = [[integer(problem, f"cpu_{m}_{g}", 0, instance.kind_totals[g]) for g in kinds] for m in members]
    gpu = [[integer(problem, f"gpu_{m}_{g}", 0, instance.kind_totals[g]) for g in kinds] for m in members]
    for g in kinds:
        held = pulp.lpSum(cpu[m][g] + gpu[m][g] for m in members)
        problem += held == instance.kind_totals[g], f"every layer of kind {g} has a place"
    for m in members:
        problem += pulp.lpSum(gpu[m]) == on_gpu[m], f"GPU layers of {m} by kind"
        problem += pulp.lpSum(cpu[m]) + pulp.lpSum(gpu[m]) == layers[m], f"layers of {m} by kind"
    return cpu, gpu


def cut_layout(
    problem: Any, instance: Instance, rounds: int, orders: Sequence[RingOrder], sequence: Sequence[int], columns: int
) -> Layout:
    """The members in the order of ``sequence``; column i of ``columns`` stands for the layers i, W + i, 2 W + i ...

    ``end[m][i]`` is 1 when the windows of m and of those before it hold column i; ``gpu_from[m][i]`` when column i lies
    before the GPU layers of m. In one round the columns may end before the model does: the rest is the tail. ``orders`` are
    subsets in the order of ``sequence``.
    """
    total, cut, missing = len(instance.model.layers), instance.model.cut_multiple, instance.model.cut_missing
    picked = [integer(problem, f"z_{i}", 0, 1) for i in range(len(orders))]
    problem += pulp.lpSum(picked) == 1, "one ring order"
    used = [
        pulp.lpSum(z for z, order in zip(picked, orders, strict=True) if m in order.members)
        for m in range(len(sequence))
    ]
    in_columns = [[instance.kind_of[r * columns + i] for r in range(rounds)] for i in range(columns)]
    cpu: list[list[Expression]] = [[] for _ in sequence]
    gpu: list[list[Expression]] = [[] for _ in sequence]
    experts_on_cpu: list[list[Expression]] = [[] for _ in sequence]
    placed: list[list[Column]] = [[] for _ in sequence]
    before: list[Expression] = [0] * columns
    ends, starts, parted = {}, {}, {}
    for place, m in enumerate(sequence):
        open_end = place < len(sequence) - 1 or rounds == 1
        end = _staircase(problem, f"end_{m}", columns, cut, before, missing=missing) if open_end else [1] * columns
        start, whole = _gpu_stairs(problem, instance, m, str(m), before, end)
        if m or rounds > 1:
            on_cpu = pulp.lpSum(start) - pulp.lpSum(before)
            problem += on_cpu >= instance.model.kept_on_cpu * used[m], f"{m} has some on the CPU"
        cpu[m] = _counts(instance, in_columns, before, start)
        gpu[m] = _counts(instance, in_columns, start, end)
        experts_on_cpu[m] = _counts(instance, in_columns, start, whole)
        placed[m] = columns_between(in_columns, before, start, whole, end)
        width = pulp.lpSum(end) - pulp.lpSum(before)
        problem += width >= (cut if m else cut - missing) * used[m], f"{m} has a window if it takes part"
        problem += width <= columns * used[m], f"{m} has none if it does not"
        ends[m], starts[m], parted[m], before = end, start, whole, end
    # The tail: what is left in one round, a fixed range in several.
    rest = [[instance.kind_of[layer]] for layer in range(rounds * columns, total)]
    tail_columns = in_columns + rest if rounds == 1 else rest
    tail_before = [*before, *([0] * len(rest))] if rounds == 1 else [0] * len(rest)
    if rounds == 1:
        problem += pulp.lpSum(before) <= instance.model.last_cut, "the tail has its layers"
    every = [1] * len(tail_columns)
    tail_start, tail_whole = _gpu_stairs(problem, instance, 0, "tail", tail_before, every)
    on_cpu = pulp.lpSum(tail_start) - pulp.lpSum(tail_before)
    problem += on_cpu >= instance.model.kept_on_cpu, "the tail has some on the CPU"
    tail = (
        _counts(instance, tail_columns, tail_before, tail_start),
        _counts(instance, tail_columns, tail_start, every),
        _counts(instance, tail_columns, tail_start, tail_whole),
    )
    for counts, of_tail in zip((cpu[0], gpu[0], experts_on_cpu[0]), tail, strict=True):
        for g, count in enumerate(of_tail):
            counts[g] += count
    return Layout(
        rounds=rounds,
        loose=False,
        cpu=cpu,
        gpu=gpu,
        experts_on_cpu=experts_on_cpu,
        used=used,
        windows=[rounds + (m == 0) for m in range(len(sequence))],
        tail_on_gpu=len(every) - pulp.lpSum(tail_start),
        tail=tail,
        window_in_ram=pulp.lpSum(parted[sequence[0]]),
        orders=orders,
        picked=picked,
        columns=Columns(placed, columns_between(tail_columns, tail_before, tail_start, tail_whole, every), sequence),
        variables={
            "end": ends,
            "start": starts,
            "whole": parted,
            "tail_start": tail_start,
            "tail_whole": tail_whole,
            "columns": columns,
        },
    )


def _gpu_stairs(
    problem: Any, instance: Instance, m: int, name: str, before: Sequence[Expression], end: Sequence[Expression]
) -> tuple[Sequence[Expression], Sequence[Expression]]:
    """Where between two boundaries the layers on the GPU of ``m`` begin, and those that are on it with their experts."""
    if not instance.members[m].has_gpu:
        return end, end
    start = _staircase(problem, f"gpu_{name}", len(end), 1, before, end)
    if not instance.parts:
        return start, start
    if instance.experts == "cpu":
        return start, end
    return start, _staircase(problem, f"whole_{name}", len(end), 1, start, end)


def fixed_layout(instance: Instance, plan: Plan) -> Layout:
    """The layers of ``plan`` as they are: only who streams what is open. The members are those of ``instance``, all used."""
    cpu, gpu, experts_on_cpu = ([[0] * len(instance.kinds) for _ in instance.devices] for _ in range(3))
    windows = [0] * len(instance.devices)
    index = {device.device: m for m, device in enumerate(instance.devices)}
    for window in plan.route:
        m = index[window.device]
        windows[m] += 1
        for counts, layers in ((cpu, window.on_cpu), (gpu, window.on_gpu), (experts_on_cpu, window.experts_on_cpu)):
            for layer in layers:
                counts[m][instance.kind_of[layer]] += 1
    order = ring_order(instance, [index[name] for name in plan.devices])
    return Layout(
        rounds=plan.rounds,
        loose=False,
        cpu=[[pulp.lpSum([n]) for n in counts] for counts in cpu],
        gpu=[[pulp.lpSum([n]) for n in counts] for counts in gpu],
        experts_on_cpu=[[pulp.lpSum([n]) for n in counts] for counts in experts_on_cpu],
        used=[pulp.lpSum([int(n > 0)]) for n in windows],
        windows=windows,
        tail_on_gpu=pulp.lpSum([plan.route[-1].gpu_layers]),
        tail=_tail(instance, plan),
        window_in_ram=pulp.lpSum([len(plan.route[0].in_ram)]),
        orders=(order,),
        picked=[pulp.lpSum([1])],
        columns=fixed_columns(instance, plan, order.members) if len(plan.route) > 1 else None,
    )


def _tail(instance: Instance, plan: Plan) -> _Tail | None:
    """The layers of the last window of ``plan`` by kind."""
    if len(plan.route) == 1:
        return None

    def counted(layers: range) -> list[Expression]:
        return _counts(instance, [[instance.kind_of[layer]] for layer in layers], [0] * len(layers), [1] * len(layers))

    tail = plan.route[-1]
    return counted(tail.on_cpu), counted(tail.on_gpu), counted(tail.experts_on_cpu)


def single_device_layout(problem: Any, instance: Instance) -> Layout:
    """The only device computes the model in one window; the last layers on its GPU."""
    total = len(instance.model.layers)
    every = [1] * total
    start, whole = _gpu_stairs(problem, instance, 0, "alone", [0] * total, every)
    columns = [[kind] for kind in instance.kind_of]
    return Layout(
        rounds=1,
        loose=False,
        cpu=[_counts(instance, columns, [0] * total, start)],
        gpu=[_counts(instance, columns, start, every)],
        experts_on_cpu=[_counts(instance, columns, start, whole)],
        used=[1],
        windows=[1],
        tail_on_gpu=total - pulp.lpSum(start),
        tail=None,
        window_in_ram=None,
        orders=(),
        picked=[],
        variables={"start": start, "whole": whole},
    )


def _staircase(
    problem: Any,
    name: str,
    length: int,
    step: int,
    low: Sequence[Expression],
    high: Sequence[Expression] | None = None,
    *,
    missing: int = 0,
) -> list[Any]:
    """Binaries that are 1 up to a boundary and 0 behind it, boundaries at multiples of ``step``, between two others.

    The first block has as many less as are ``missing``.
    """
    blocks = [integer(problem, f"{name}_{i}", 0, 1) for i in range(-(-(length + missing) // step))]
    stairs = [blocks[(i + missing) // step] for i in range(length)]
    for i, (before, after) in enumerate(pairwise(blocks)):
        problem += before >= after, f"{name} goes down at {i}"
    for i in range(length):
        if high is None and i and (i + missing) % step:
            continue  # its block was
        if not isinstance(low[i], int) or low[i]:
            problem += stairs[i] >= low[i], f"{name} begins after the one before at {i}"
        if high is not None and not isinstance(high[i], int):
            problem += stairs[i] <= high[i], f"{name} ends with its window at {i}"
    if (length + missing) % step:
        # A boundary inside the last, incomplete block would not be at a multiple.
        problem += blocks[-1] == 0, f"{name} leaves the incomplete block"
    return stairs


def _counts(
    instance: Instance, columns: Sequence[Sequence[int]], before: Sequence[Expression], end: Sequence[Expression]
) -> list[Expression]:
    """Layers of each kind in the columns from boundary ``before`` to boundary ``end``."""
    return [
        pulp.lpSum(column.count(g) * (b - a) for column, a, b in zip(columns, before, end, strict=True) if g in column)
        for g in range(len(instance.kinds))
    ]
