"""How layers are assigned to devices, as variables of the program: evenly, in one order, or fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pulp

from halda.instance import Instance
from halda.orders import HopShare, RingOrder, ring_order
from halda.picking import Column, Columns, GpuStairs, columns_between, fixed_columns
from halda.plan import Plan
from halda.variables import Expression

_Tail = tuple[list[Expression], list[Expression], list[Expression]]


@dataclass(slots=True)
class Layout:
    """Number of layers of each member, as expressions. Lists run over members, inner lists over kinds of layers; for
    GPU layers over the kinds on the first GPU, then on the second, and so on.

    ``used[m]`` is 1 for a member that takes part; ``windows[m]`` is its number of windows per token, the minimum if
    ``loose``. ``experts_on_cpu`` are the GPU layers whose experts are on the CPU. ``tail_on_gpu`` is the number of GPU
    layers of the head's last window. ``tail`` are that window's layers on the CPU, on the GPU, and on the GPU with
    experts on the CPU, by kind, or one count each if their kinds are unknown; None without a ring. ``window_in_ram`` is
    the number of layers of each other window of the head of which the CPU computes a part, None if not needed.
    ``orders`` with ``picked``: which ring. ``columns`` is None if it is unknown which layers a window has.
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
        """Return the layers of ``m`` of which its CPU computes a part, by kind."""
        kinds = len(self.cpu[m])
        return [cpu + pulp.lpSum(self.experts_on_cpu[m][g::kinds]) for g, cpu in enumerate(self.cpu[m])]

    @property
    def tail_in_ram(self) -> Expression:
        """Layers of the tail of which the CPU computes a part."""
        assert self.tail is not None
        return pulp.lpSum(self.tail[0]) + pulp.lpSum(self.tail[2])


def new_problem(name: str) -> Any:
    """Return an empty program that minimises."""
    return pulp.LpProblem(name, pulp.LpMinimize)


def integer(problem: Any, name: str, low: int, high: int) -> Any:
    """Add an integer variable."""
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
    """Return ``w`` layers a round for each member; ``orders`` None: any subset of the members, ordered later.

    ``shares`` are then each member's addition to the hops. ``columns`` fixes the layers of a round (W).
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
    rooms = [instance.gpu_rooms(m, windows[m]) for m in members]
    tail_gpu = [integer(problem, _of_gpu("tail_gpu", i), 0, room) for i, room in enumerate(rooms[0])]
    on_cpu = 0 if loose else instance.model.kept_on_cpu
    problem += pulp.lpSum(tail_gpu) <= tail - on_cpu, "GPU layers of the tail"
    n = [
        [integer(problem, _of_gpu(f"n_{m}", i), 0, min(maximum * cut, room // k)) for i, room in enumerate(rooms[m])]
        for m in members
    ]
    for m in members:
        problem += pulp.lpSum(n[m]) <= w[m] - on_cpu * bool(m or k > 1) * used[m], f"GPU layers of {m}"
    on_gpu: list[list[Expression]] = [
        [
            k * of_window + (of_tail if m == 0 else 0)
            for of_window, of_tail in zip(n[m], tail_gpu if m == 0 else n[m], strict=True)
        ]
        for m in members
    ]
    cpu, gpu = _by_kind(problem, instance, layers, on_gpu)
    a = [_number_experts_on_cpu(problem, instance, f"apart_{m}", n[m]) for m in members]
    tail_experts_on_cpu = _number_experts_on_cpu(problem, instance, "apart_tail", tail_gpu)
    experts_on_cpu = [
        [
            each
            for i, of_window in enumerate(a[m])
            for each in _experts_on_cpu_by_kind(
                problem,
                instance,
                _of_gpu(f"apart_{m}", i),
                k * of_window + (tail_experts_on_cpu[i] if m == 0 else 0),
                _of_number(gpu[m], i, len(a[m])),
            )
        ]
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
        tail_on_gpu=pulp.lpSum(tail_gpu),
        tail=([tail - pulp.lpSum(tail_gpu)], [*tail_gpu], tail_experts_on_cpu),
        window_in_ram=None if loose else w[0] - pulp.lpSum(n[0]) + pulp.lpSum(a[0]),
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


def _of_gpu(name: str, gpu: int) -> str:
    """Return the name of a variable of a GPU."""
    return f"{name}_gpu{gpu}" if gpu else name


def _of_number(counts: Sequence[Expression], gpu: int, gpus: int) -> Sequence[Expression]:
    """Return the items of one GPU from ``counts``, which are by kind for each of ``gpus`` GPUs."""
    kinds = len(counts) // gpus
    return counts[gpu * kinds : (gpu + 1) * kinds]


def _number_experts_on_cpu(problem: Any, instance: Instance, name: str, on_gpus: Sequence[Any]) -> list[Expression]:
    """Return how many layers on each GPU of a window have their experts on the CPU. These are the window's first ones,
    so a GPU has some only if all layers of the next GPU in the profile, which come earlier in the window, do."""
    if not instance.parts:
        return [pulp.lpSum(0) for _ in on_gpus]
    if instance.experts == "cpu":
        return [pulp.lpSum(on_gpu) for on_gpu in on_gpus]
    found = [integer(problem, _of_gpu(name, i), 0, on_gpu.upBound) for i, on_gpu in enumerate(on_gpus)]
    for i, (experts_on_cpu, on_gpu) in enumerate(zip(found, on_gpus, strict=True)):
        problem += experts_on_cpu <= on_gpu, f"{_of_gpu(name, i)} are on the GPU"
    for i, (after, before) in enumerate(pairwise(found)):
        begins = integer(problem, f"{name}_begin_{i}", 0, 1)
        problem += after <= on_gpus[i].upBound * begins, f"{name} begin at {i}"
        problem += on_gpus[i + 1] - before <= on_gpus[i + 1].upBound * (1 - begins), f"{name} are all before {i}"
    return [*found]


def _experts_on_cpu_by_kind(
    problem: Any, instance: Instance, name: str, count: Expression, gpu: Sequence[Expression]
) -> list[Expression]:
    """Return them by kind: any of the GPU layers' kinds."""
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
    problem: Any, instance: Instance, layers: Sequence[Expression], on_gpu: Sequence[Sequence[Expression]]
) -> tuple[list[list[Expression]], list[list[Expression]]]:
    """Return the layers by kind: any kinds, as long as every layer has one place."""
    members, kinds = range(len(layers)), range(len(instance.kinds))
    if len(kinds) == 1:
        return [[layers[m] - pulp.lpSum(on_gpu[m])] for m in members], [[*on_gpu[m]] for m in members]
    cpu = [[integer(problem, f"cpu_{m}_{g}", 0, instance.kind_totals[g]) for g in kinds] for m in members]
    gpu = [
        [
            integer(problem, f"{_of_gpu(f'gpu_{m}', i)}_{g}", 0, instance.kind_totals[g])
            for i in range(len(on_gpu[m]))
            for g in kinds
        ]
        for m in members
    ]
    for g in kinds:
        held = pulp.lpSum([cpu[m][g] + pulp.lpSum(gpu[m][g :: len(kinds)]) for m in members])
        problem += held == instance.kind_totals[g], f"every layer of kind {g} has a place"
    for m in members:
        for i, count in enumerate(on_gpu[m]):
            of_gpu = pulp.lpSum(_of_number(gpu[m], i, len(on_gpu[m])))
            problem += of_gpu == count, f"{_of_gpu(f'GPU layers of {m}', i)} by kind"
        problem += pulp.lpSum(cpu[m]) + pulp.lpSum(gpu[m]) == layers[m], f"layers of {m} by kind"
    return cpu, gpu


def cut_layout(
    problem: Any, instance: Instance, rounds: int, orders: Sequence[RingOrder], sequence: Sequence[int], columns: int
) -> Layout:
    """Return the members in the order of ``sequence``; column i of ``columns`` is the layers i, W + i, 2 W + i ...

    ``end[m][i]`` is 1 if the windows of m or of an earlier member hold column i; ``gpu_from[m][i]`` if column i is
    before the GPU layers of m. With one round the columns may end before the model does: the rest is the tail.
    ``orders`` are subsets in the order of ``sequence``.
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
        stairs = _gpu_stairs(problem, instance, m, str(m), before, end)
        start = stairs.bounds[0]
        if m or rounds > 1:
            on_cpu = pulp.lpSum(start) - pulp.lpSum(before)
            problem += on_cpu >= instance.model.kept_on_cpu * used[m], f"{m} has some on the CPU"
        cpu[m] = _counts(instance, in_columns, before, start)
        gpu[m] = _counts_of_gpus(instance, in_columns, stairs.bounds)
        experts_on_cpu[m] = _counts_of_gpus(instance, in_columns, stairs.wholes)
        placed[m] = columns_between(in_columns, before, stairs)
        width = pulp.lpSum(end) - pulp.lpSum(before)
        problem += width >= (cut if m else cut - missing) * used[m], f"{m} has a window if it takes part"
        problem += width <= columns * used[m], f"{m} has none if it does not"
        ends[m], starts[m], parted[m], before = end, stairs.bounds, stairs.wholes[-1], end
    # The tail: the remaining layers with one round, a fixed range with several.
    rest = [[instance.kind_of[layer]] for layer in range(rounds * columns, total)]
    tail_columns = in_columns + rest if rounds == 1 else rest
    tail_before = [*before, *([0] * len(rest))] if rounds == 1 else [0] * len(rest)
    if rounds == 1:
        problem += pulp.lpSum(before) <= instance.model.last_cut, "the tail has its layers"
    every = [1] * len(tail_columns)
    tail_stairs = _gpu_stairs(problem, instance, 0, "tail", tail_before, every)
    tail_start = tail_stairs.bounds[0]
    on_cpu = pulp.lpSum(tail_start) - pulp.lpSum(tail_before)
    problem += on_cpu >= instance.model.kept_on_cpu, "the tail has some on the CPU"
    tail = (
        _counts(instance, tail_columns, tail_before, tail_start),
        _counts_of_gpus(instance, tail_columns, tail_stairs.bounds),
        _counts_of_gpus(instance, tail_columns, tail_stairs.wholes),
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
        columns=Columns(placed, columns_between(tail_columns, tail_before, tail_stairs), sequence),
        variables={
            "end": ends,
            "start": starts,
            "whole": parted,
            "tail_start": tail_stairs.bounds,
            "tail_whole": tail_stairs.wholes[-1],
            "columns": columns,
        },
    )


def _gpu_stairs(
    problem: Any, instance: Instance, m: int, name: str, before: Sequence[Expression], end: Sequence[Expression]
) -> GpuStairs:
    """Return where the layers on each GPU of ``m`` begin between two boundaries, and those on it with their experts."""
    if not instance.members[m].has_gpu:
        return GpuStairs([end, end], [end, end])
    bounds: list[Sequence[Expression]] = [_staircase(problem, f"gpu_{name}", len(end), 1, before, end)]
    for i in reversed(range(instance.members[m].gpu_count - 1)):
        bounds.append(_staircase(problem, f"gpu_{name}_{i}", len(end), 1, bounds[-1], end))
    start, inner = bounds[0], bounds[1:]
    bounds.append(end)
    if not instance.parts:
        return GpuStairs(bounds, [start for _ in bounds])
    if instance.experts == "cpu":
        return GpuStairs(bounds, bounds)
    whole = _staircase(problem, f"whole_{name}", len(end), 1, start, end)
    both = [_both(problem, f"parted_{name}_{i}", whole, bound) for i, bound in enumerate(inner)]
    return GpuStairs(bounds, [start, *both, whole])


def _both(problem: Any, name: str, one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """Return the lower one of two staircases."""
    found = [integer(problem, f"{name}_{i}", 0, 1) for i in range(len(one))]
    for i, (a, b, both) in enumerate(zip(one, other, found, strict=True)):
        problem += both <= a, f"{name} is below the one at {i}"
        problem += both <= b, f"{name} is below the other at {i}"
        problem += both >= a + b - 1, f"{name} is as high as both at {i}"
    return found


def _counts_of_gpus(
    instance: Instance, columns: Sequence[Sequence[int]], bounds: Sequence[Sequence[Expression]]
) -> list[Expression]:
    """Return the layers of each kind between consecutive ``bounds``, starting with the last two, which are the first
    GPU's."""
    pairs = reversed([*pairwise(bounds)])
    return [count for low, high in pairs for count in _counts(instance, columns, low, high)]


def fixed_layout(instance: Instance, plan: Plan) -> Layout:
    """Return the fixed layers of ``plan``: only streaming is undecided. The members are those of ``instance``, all
    used."""
    kinds = len(instance.kinds)
    cpu = [[0] * kinds for _ in instance.devices]
    gpu, experts_on_cpu = ([[0] * (kinds * max(1, m.gpu_count)) for m in instance.members] for _ in range(2))
    windows = [0] * len(instance.devices)
    index = {device.device: m for m, device in enumerate(instance.devices)}
    for window in plan.route:
        m = index[window.device]
        windows[m] += 1
        for layer in window.on_cpu:
            cpu[m][instance.kind_of[layer]] += 1
        for i, layers in enumerate(window.on_each_gpu):
            for layer in layers:
                gpu[m][i * kinds + instance.kind_of[layer]] += 1
                experts_on_cpu[m][i * kinds + instance.kind_of[layer]] += layer in window.experts_on_cpu
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
    """Return the layers of the last window of ``plan`` by kind."""
    if len(plan.route) == 1:
        return None

    tail = plan.route[-1]
    member = next(member for member in instance.members if member.name == tail.device)

    def counted(layers: range, among: range) -> list[Expression]:
        counts = [sum(instance.kind_of[layer] == g for layer in layers if layer in among) for g in range(kinds)]
        return [pulp.lpSum([count]) for count in counts]

    kinds = len(instance.kinds)
    on_each = [*tail.on_each_gpu, *[range(0)] * (max(1, member.gpu_count) - len(tail.on_each_gpu))]
    return (
        counted(tail.on_cpu, tail.on_cpu),
        [count for layers in on_each for count in counted(layers, layers)],
        [count for layers in on_each for count in counted(layers, tail.experts_on_cpu)],
    )


def single_device_layout(problem: Any, instance: Instance) -> Layout:
    """Return the layout of a single device with one window; the last layers are on its GPU."""
    total = len(instance.model.layers)
    every = [1] * total
    stairs = _gpu_stairs(problem, instance, 0, "alone", [0] * total, every)
    start = stairs.bounds[0]
    columns = [[kind] for kind in instance.kind_of]
    return Layout(
        rounds=1,
        loose=False,
        cpu=[_counts(instance, columns, [0] * total, start)],
        gpu=[_counts_of_gpus(instance, columns, stairs.bounds)],
        experts_on_cpu=[_counts_of_gpus(instance, columns, stairs.wholes)],
        used=[1],
        windows=[1],
        tail_on_gpu=total - pulp.lpSum(start),
        tail=None,
        window_in_ram=None,
        orders=(),
        picked=[],
        variables={"start": stairs.bounds, "whole": stairs.wholes[-1]},
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
    """Return binaries that are 1 up to a boundary and 0 after it; boundaries are multiples of ``step``, between two
    others.

    The first block is shorter by ``missing``.
    """
    blocks = [integer(problem, f"{name}_{i}", 0, 1) for i in range(-(-(length + missing) // step))]
    stairs = [blocks[(i + missing) // step] for i in range(length)]
    for i, (before, after) in enumerate(pairwise(blocks)):
        problem += before >= after, f"{name} goes down at {i}"
    for i in range(length):
        if high is None and i and (i + missing) % step:
            continue  # compared at the start of its block
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
    """Return the layers of each kind in the columns from boundary ``before`` to boundary ``end``."""
    return [
        pulp.lpSum(column.count(g) * (b - a) for column, a, b in zip(columns, before, end, strict=True) if g in column)
        for g in range(len(instance.kinds))
    ]
