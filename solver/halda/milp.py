"""The integer program: which device computes how many layers a round, on what, which stream, and who takes part.

One program for one number of rounds k. Per device m and kind of layer g it has layers on the CPU ``C[m,g]`` and on the GPU
``G[m,g]`` (paper: k*w = C + G, k*n = G), of some of which the experts are on the CPU. Per device it has the bytes that
stream and those that are held ahead of them, which are no whole numbers (``streaming.py``), and whether it streams and uses
its GPU at all; ``z`` picks one ring order of one set of devices, so who takes part and in which order is decided with the
rest. A layout says how C and G come about:

- ``even_layout``: w layers a round for each device, the tail takes the rest. Exact where all layers are alike; where
  they are not it does not know which layers a device gets, so its optimum is a lower bound. ``loose`` lets go of the
  rounds too and bounds every larger k.
- ``cut_layout``: the devices in one order, W layers a round; where each window begins is a staircase of binaries, so the
  bytes of every window are exact.
- ``alone_layout``: the head computes the model alone.

Times are in milliseconds and memory in units of the largest layer, to keep the numbers near one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import pulp

from halda.evaluate import Objective, regular_tails
from halda.instance import Instance, Phase
from halda.orders import HopShare, RingOrder, ring_order
from halda.picking import Column, Columns, PickedPrompt, columns_between, fixed_columns
from halda.plan import Plan
from halda.variables import MS, Expression, positive

TIE: Final = 1e-8
"""Of plans with the same time to the first token or between tokens, the one with the quicker token is better."""
READ_TIE: Final = 1e-8
"""A millisecond of reading counts so much besides: of plans that take the same time, the one that reads less is better."""
EVEN_MS: Final = 2e-6
"""Of plans that take the same time, the one that leaves the fullest device the most memory is better."""


_Tail = tuple[list[Expression], list[Expression], list[Expression]]


@dataclass(slots=True)
class Layout:
    """How many layers each member has, as expressions. Lists run over members, inner lists over kinds of layers.

    ``used[m]`` is 1 for a member that takes part; ``windows[m]`` is its number of windows a token, where ``loose`` the least
    that it may be. ``apart`` are those of the layers on the GPU whose experts are on the CPU. ``tail_on_gpu`` counts the
    layers of the head's last window that are on its GPU. ``tail`` are its layers on the CPU, on the GPU and of these the
    ones apart, by kind, or one count where it is not known of which kinds they are; None without a ring.
    ``window_in_ram`` counts those of each of its other windows of which the CPU computes something, None where that is not
    asked.
    ``orders`` with ``picked``: which ring. ``columns`` is None where it is not known which layers a window has.
    """

    rounds: int
    loose: bool
    cpu: list[list[Expression]]
    gpu: list[list[Expression]]
    apart: list[list[Expression]]
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
        return [cpu + apart for cpu, apart in zip(self.cpu[m], self.apart[m], strict=True)]

    @property
    def tail_in_ram(self) -> Expression:
        """Those of the tail."""
        assert self.tail is not None
        return pulp.lpSum(self.tail[0]) + pulp.lpSum(self.tail[2])


@dataclass(slots=True)
class StreamVariables:
    """Per member: ``streams`` is 1 where it streams, ``bytes`` of them with ``ahead`` held ahead (in units of memory).

    ``steps`` has for each of the least that may be held ahead whether that is, and no more. ``decode`` is what streams while
    tokens are drawn.
    """

    streams: list[Any] = field(default_factory=list)
    bytes: list[Any] = field(default_factory=list)
    ahead: list[Any] = field(default_factory=list)
    steps: list[list[tuple[Expression, float]]] = field(default_factory=list)
    decode: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Program:
    """The program with the variables that a plan is read from."""

    problem: Any
    layout: Layout
    streams: StreamVariables
    output_on_gpu: Any
    objective: Expression


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
    most = (last_cut + missing) // (k * cut)
    blocks = [integer(problem, f"w_{m}", 0, most) for m in members]
    w: list[Expression] = [cut * blocks[m] - (0 if m else missing) for m in members]
    tail = integer(problem, "tail", total - last_cut, total)
    layers: list[Expression] = [k * w[m] + (tail if m == 0 else 0) for m in members]
    problem += pulp.lpSum(layers) == total, "every layer has a place"
    if columns is not None:
        problem += pulp.lpSum(w) == columns, "layers of a round"
    least = rounds if loose else 1
    for m in members:
        problem += blocks[m] >= least * used[m], f"{m} has a window if it takes part"
        if m:
            problem += blocks[m] <= most * used[m], f"{m} has none if it does not"
    windows = [rounds + (m == 0) for m in members]
    room = [instance.gpu_room(m, windows[m]) for m in members]
    tail_gpu = integer(problem, "tail_gpu", 0, room[0])
    on_cpu = 0 if loose else instance.model.kept_on_cpu
    problem += tail_gpu <= tail - on_cpu, "GPU layers of the tail"
    n = [integer(problem, f"n_{m}", 0, min(most * cut, room[m] // k)) for m in members]
    for m in members:
        problem += n[m] <= w[m] - on_cpu * bool(m or k > 1) * used[m], f"GPU layers of {m}"
    on_gpu: list[Expression] = [k * n[m] + (tail_gpu if m == 0 else 0) for m in members]
    cpu, gpu = _by_kind(problem, instance, layers, on_gpu)
    a: list[Expression] = [_number_apart(problem, instance, f"apart_{m}", n[m]) for m in members]
    tail_apart = _number_apart(problem, instance, "apart_tail", tail_gpu)
    apart = [
        _apart_by_kind(problem, instance, f"apart_{m}", k * a[m] + (tail_apart if m == 0 else 0), gpu[m])
        for m in members
    ]
    return Layout(
        rounds=rounds,
        loose=loose,
        cpu=cpu,
        gpu=gpu,
        apart=apart,
        used=used,
        windows=windows,
        tail_on_gpu=tail_gpu,
        tail=([tail - tail_gpu], [tail_gpu], [tail_apart]),
        window_in_ram=None if loose else w[0] - n[0] + a[0],
        orders=orders or (),
        picked=picked,
        shares=shares or (),
        variables={"w": w, "n": n, "a": a, "tail": tail, "tail_gpu": tail_gpu, "tail_apart": tail_apart},
    )


def _number_apart(problem: Any, instance: Instance, name: str, on_gpu: Any) -> Expression:
    """How many of so many layers on a GPU have their experts on the CPU."""
    if not instance.parts:
        return pulp.lpSum(0)
    if instance.experts == "cpu":
        return pulp.lpSum(on_gpu)
    found = integer(problem, name, 0, on_gpu.upBound)
    problem += found <= on_gpu, f"{name} are on the GPU"
    return found


def _apart_by_kind(
    problem: Any, instance: Instance, name: str, count: Expression, gpu: Sequence[Expression]
) -> list[Expression]:
    """Which kinds they are of: any of those on the GPU."""
    if len(gpu) == 1:
        return [count]
    if not instance.parts:
        return [pulp.lpSum(0) for _ in gpu]
    found = [integer(problem, f"{name}_{g}", 0, instance.kind_totals[g]) for g in range(len(gpu))]
    problem += pulp.lpSum(found) == count, f"{name} by kind"
    for g, (apart, all_of_kind) in enumerate(zip(found, gpu, strict=True)):
        problem += apart <= all_of_kind, f"{name}: no more of kind {g} than on the GPU"
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
    apart: list[list[Expression]] = [[] for _ in sequence]
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
        apart[m] = _counts(instance, in_columns, start, whole)
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
    for counts, of_tail in zip((cpu[0], gpu[0], apart[0]), tail, strict=True):
        for g, count in enumerate(of_tail):
            counts[g] += count
    return Layout(
        rounds=rounds,
        loose=False,
        cpu=cpu,
        gpu=gpu,
        apart=apart,
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
    cpu, gpu, apart = ([[0] * len(instance.kinds) for _ in instance.devices] for _ in range(3))
    windows = [0] * len(instance.devices)
    index = {device.device: m for m, device in enumerate(instance.devices)}
    for window in plan.route:
        m = index[window.device]
        windows[m] += 1
        for counts, layers in ((cpu, window.on_cpu), (gpu, window.on_gpu), (apart, window.apart)):
            for layer in layers:
                counts[m][instance.kind_of[layer]] += 1
    order = ring_order(instance, [index[name] for name in plan.devices])
    return Layout(
        rounds=plan.rounds,
        loose=False,
        cpu=[[pulp.lpSum([n]) for n in counts] for counts in cpu],
        gpu=[[pulp.lpSum([n]) for n in counts] for counts in gpu],
        apart=[[pulp.lpSum([n]) for n in counts] for counts in apart],
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
    return counted(tail.on_cpu), counted(tail.on_gpu), counted(tail.apart)


def alone_layout(problem: Any, instance: Instance) -> Layout:
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
        apart=[_counts(instance, columns, start, whole)],
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


def build(
    problem: Any, instance: Instance, layout: Layout, objective: Objective, required: frozenset[int], *, elastic: bool
) -> Program:
    """Memory, streaming and time over ``layout``. ``elastic`` asks instead how little memory would have to be added."""
    members = range(len(instance.devices))
    streams = _streaming(problem, instance, layout)
    uses_gpu = [integer(problem, f"gpu_used_{m}", 0, int(instance.members[m].has_gpu)) for m in members]
    for m in members:
        problem += (
            pulp.lpSum(layout.gpu[m]) <= instance.gpu_room(m, layout.windows[m]) * uses_gpu[m],
            f"{m} uses its GPU",
        )
    uses_cpu = _uses_cpu(problem, instance, layout, uses_gpu)
    output_on_gpu = integer(problem, "output_on_gpu", 0, int(instance.members[0].has_gpu))
    problem += (
        layout.tail_on_gpu <= len(instance.model.layers) * output_on_gpu,
        "the output is behind the tail's GPU layers",
    )
    problem += output_on_gpu <= uses_gpu[0], "the head uses its GPU for the output"
    for m in required - {0}:
        problem += layout.used[m] == 1, f"{m} is required"
    fullest = positive(problem, "fullest")
    short = _memory(problem, instance, layout, streams, uses_gpu, output_on_gpu, fullest, elastic=elastic)
    if elastic:
        wanted: Expression = pulp.lpSum(short)
    else:
        time = _Time(problem, instance, layout, (uses_cpu, uses_gpu), output_on_gpu, streams)
        wanted = time.objective(objective) + READ_TIE * time.reading() + EVEN_MS * fullest
    problem += wanted
    return Program(problem, layout, streams, output_on_gpu, wanted)


def _uses_cpu(problem: Any, instance: Instance, layout: Layout, uses_gpu: Sequence[Any]) -> list[Expression]:
    """Whether the processor of each member computes anything of a layer: without a GPU it does if it takes part."""
    found: list[Expression] = []
    for m, member in enumerate(instance.members):
        if not member.has_gpu:
            found.append(layout.used[m])
            continue
        uses = integer(problem, f"cpu_used_{m}", 0, 1)
        problem += pulp.lpSum(layout.in_ram(m)) <= len(instance.model.layers) * uses, f"{m} uses its processor"
        problem += uses + uses_gpu[m] >= layout.used[m], f"{m} uses either"
        found.append(uses)
    return found


def _streaming(problem: Any, instance: Instance, layout: Layout) -> StreamVariables:
    """Who streams how much, with how much held ahead."""
    unit, found = instance.largest_layer_bytes, StreamVariables()
    streamable = [size / unit for size in instance.streamable]
    total = sum(count * size for count, size in zip(instance.kind_totals, streamable, strict=True))
    for m, member in enumerate(instance.members):
        first, *further = member.ahead_steps
        streams = integer(problem, f"streams_{m}", 0, int(not member.is_helped))
        size, ahead, decode = (positive(problem, f"{name}_{m}") for name in ("streamed", "ahead", "in_decode"))
        most = _dot(layout.in_ram(m), streamable)
        problem += size <= most - streams * (instance.pool_bytes / unit), f"{m} streams what its CPU computes"
        problem += size <= total * streams, f"{m} streams"
        least: Expression = streams * (first.ahead_bytes / unit)
        enough: Expression = streams * (first.wide_bytes / unit)
        is_wide = 1 if instance.by_expert else integer(problem, f"wide_{m}", 0, 1)
        below, above, reached = first, streams, [streams]
        for i, step in enumerate(further, 1):
            beyond = integer(problem, f"beyond_{m}_{i}", 0, 1)
            problem += size <= below.share * most + (1 - below.share) * total * beyond, f"{m} streams a share {i}"
            problem += beyond <= above, f"{m} streams less than share {i} before"
            least += beyond * ((step.ahead_bytes - below.ahead_bytes) / unit)
            enough += beyond * ((step.wide_bytes - below.wide_bytes) / unit)
            below, above = step, beyond
            reached.append(beyond)
        problem += ahead >= least, f"{m} reads ahead"
        if not instance.by_expert:
            problem += ahead <= least + total * is_wide, f"{m} reads no more ahead than it needs"
            problem += ahead >= enough - 2 * (1 - is_wide), f"{m} reads ahead two parts"
        problem += ahead <= size, f"{m} reads ahead what streams"
        problem += decode >= size - member.decode.spare_bytes / unit, f"{m} streams less in decode"
        found.streams.append(streams)
        found.bytes.append(size)
        found.ahead.append(ahead)
        found.steps.append(
            [
                (now - after - is_wide, step.ahead_bytes / unit)
                for now, after, step in zip(reached, [*reached[1:], 0], member.ahead_steps, strict=True)
            ]
        )
        found.decode.append(decode)
    return found


def _memory(
    problem: Any,
    instance: Instance,
    layout: Layout,
    streams: StreamVariables,
    uses_gpu: Sequence[Any],
    output_on_gpu: Any,
    fullest: Any,
    *,
    elastic: bool,
) -> list[Expression]:
    """RAM, VRAM and disk of every device and machine are hard limits; the slacks where ``elastic``. Unit: largest layers.

    ``fullest`` is at least the share of its RAM that each device gives.
    """
    unit = instance.largest_layer_bytes
    sizes = [size / unit for size in instance.size_bytes]
    with_kv = [size + kv / unit for size, kv in zip(sizes, instance.kv_bytes, strict=True)]
    experts = [size / unit for size in instance.expert_bytes]
    output, ram, vram, disk = instance.model.output_bytes / unit, [], [], []
    for m, member in enumerate(instance.members):
        windows = layout.windows[m]
        besides = instance.gpu_runtime_bytes(windows, helps=member.is_helped) / unit
        apart = _dot(layout.apart[m], experts)
        on_gpu = _dot(layout.gpu[m], with_kv) - apart + (layout.used[m] if member.is_helped else uses_gpu[m]) * besides
        on_cpu = _dot(layout.cpu[m], with_kv) + apart - streams.bytes[m] + streams.ahead[m]
        on_cpu += streams.streams[m] * (instance.reserve_bytes / unit)
        on_cpu += layout.used[m] * (instance.runtime_bytes(windows) / unit)
        if m == 0:
            on_gpu += output_on_gpu * output
            if member.is_helped:
                on_gpu += (1 - output_on_gpu) * (instance.output_copy_bytes / unit)
            on_cpu += instance.head_bytes(windows) / unit + (1 - output_on_gpu) * output
        vram.append(on_gpu)
        ram.append(on_cpu + on_gpu if member.shares_memory else on_cpu)
        disk.append(_dot(layout.cpu[m], sizes) + _dot(layout.gpu[m], sizes) if len(instance.devices) > 1 else 0)
    slacks: list[Expression] = []

    def limit(what: str, where: str, needed: Expression, available: int) -> None:
        slack: Expression = 0
        if elastic:
            slack = positive(problem, f"short_{what}_{where}")
            slacks.append(slack)
        if not isinstance(needed, int):
            problem.addConstraint(needed <= available / unit + slack, f"{what} of {where}")

    for m, member in enumerate(instance.members):
        limit("RAM", str(m), ram[m], member.ram_limit)
        problem.addConstraint(ram[m] <= max(1, member.ram_limit) / unit * fullest, f"{m} is as full as the fullest")
        limit("VRAM", str(m), vram[m], member.vram_limit)
        limit("disk", str(m), disk[m], member.disk_limit)
    for host in instance.hosts:
        if len(host) > 1:
            profiles = [instance.devices[m] for m in host]
            name = "_".join(map(str, host))
            limit("RAM", name, pulp.lpSum(ram[m] for m in host), max(p.ram_available_bytes for p in profiles))
            there = max(p.gpu.vram_available_bytes if p.gpu is not None else 0 for p in profiles)
            limit("VRAM", name, pulp.lpSum(vram[m] for m in host), there)
    for here in instance.disks:
        if len(here) > 1:
            free = max(instance.devices[m].disk.free_bytes for m in here)
            limit("disk", "_".join(map(str, here)), pulp.lpSum(disk[m] for m in here), free)
    return slacks


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Numbers of layers ``what`` of the head may have, each with a binary that says whether it has."""

    what: str
    lengths: range
    picked: list[Any]


@dataclass(slots=True)
class _Chunk:
    """Milliseconds of a chunk of a prompt: of each member's windows but the tail, and of that.

    ``following`` and ``tails`` are those of one of many chunks that follow each other without a pause.
    """

    windows: list[Any] = field(default_factory=list)
    following: list[Any] = field(default_factory=list)
    tail: Expression = 0
    tails: Expression = 0


class _Time:
    """Milliseconds of a token, of the first token and between tokens, as ``evaluate.py`` counts them."""

    def __init__(
        self,
        problem: Any,
        instance: Instance,
        layout: Layout,
        uses: tuple[Sequence[Expression], Sequence[Expression]],
        output_on_gpu: Any,
        streams: StreamVariables,
    ) -> None:
        self._problem = problem
        self._instance = instance
        self._layout = layout
        self._uses_cpu, self._uses_gpu = uses
        self._output_on_gpu = output_on_gpu
        self._streams = streams
        self._unit = instance.largest_layer_bytes
        self._total = sum(layer.size_bytes for layer in instance.model.layers) / self._unit
        self._decode = [member.decode for member in instance.members]
        self._prefill = [member.prefill for member in instance.members]
        self._first_ms: Expression = 0
        self._other_ms: Expression = 0
        self._lengths: tuple[_Lengths, _Lengths] | None = None
        self._reads: dict[str, Any] = {}

    def objective(self, objective: Objective) -> Expression:
        work = self._instance.workload
        match objective:
            case "latency":
                return self._token()
            case "ttft":
                return self._first_token() + TIE * self._token()
            case "throughput":
                return self._period()
            case "balanced":
                return self._first_token() + work.answer_tokens * self._token()

    def reading(self) -> Expression:
        """Milliseconds that all disks read for a token."""
        return pulp.lpSum(self._disks(self._decode))

    def _token(self) -> Expression:
        problem, token = self._problem, positive(self._problem, "token")
        windows = self._decode_ms = self._token_windows()
        hops = self._hops(lambda order: order.hops_s, lambda share: share.hops_s)
        passing = pulp.lpSum(windows) + hops
        problem += token >= passing, "a token passes all windows and hops"
        if self._has_long_stop:
            rounds = self._layout.rounds
            laps = (rounds - 1) * (passing - self._first_ms) + self._other_ms
            for m in range(1, len(windows)):
                late = (self._size(m, self._decode[m]) - self._streams.ahead[m]) * self._unit_ms(m)
                waiting = late - (laps + windows[m]) * (1 / rounds)
                problem += token >= passing + waiting, f"the disk of {m} reads between its stops"
        for i, disk in enumerate(self._disks(self._decode)):
            problem += token >= disk, f"a token waits for disk {i}"
        return token

    def _first_token(self) -> Expression:
        """As ``evaluate`` counts it; where layouts know less of it, no more than that."""
        problem, chunks, rounds = self._problem, self._instance.chunks, self._layout.rounds
        prompt, chunk = positive(problem, "prompt"), self._chunk()
        hops = self._hops(lambda order: order.chunk_hops_s, lambda share: share.chunk_hops_s)
        link = self._hops(lambda order: order.chunk_link_s, lambda _: 0.0)
        passing = pulp.lpSum(chunk.windows) + hops
        problem += prompt >= passing + chunk.tail, "a chunk passes all windows and hops"
        if self._has_uneven_stops:
            self._uneven_stops(prompt, chunk, passing, hops, link)
            return prompt + self._output()
        problem += prompt >= chunks * link, "a link is busy"
        laps, last = positive(problem, "laps"), positive(problem, "last_lap")
        problem += laps >= passing * (1 / rounds), "laps of one chunk"
        problem += laps >= link * (chunks / rounds), "laps over the busiest link"
        problem += last >= (chunks - 1) * chunk.tails, "chunks in the tail"
        problem += last >= link * ((chunks - 1) / rounds), "chunks on a link"
        for i, here in enumerate(self._instance.disks):
            problem += prompt >= pulp.lpSum(self._first_read(m, chunks, 1) for m in here), f"disk {i} is busy"
        for i, host in enumerate(self._instance.hosts):
            first, busy = (pulp.lpSum(each[m] for m in host) for each in (chunk.windows, chunk.following))
            problem += prompt >= chunks * (busy + chunk.tails * (0 in host)), f"machine {i} is busy"
            problem += laps >= busy * (chunks / rounds), f"laps of machine {i}"
            stop = first * (1 / rounds)
            problem += last >= busy * (chunks / rounds) - stop, f"chunks at machine {i}"
            for m in host:
                if m and not self._instance.by_expert:
                    _, rest = self._computing(m, self._prefill[m])
                    train = rest * (chunks / rounds) + self._first_read(m, chunks, rounds)
                    problem += laps >= train, f"laps of the disk of {m}"
                    problem += last >= train - stop, f"chunks at the disk of {m}"
        if not self._layout.loose:
            lap = passing * (1 / rounds)
            problem += prompt >= (rounds - 1) * laps + lap + chunk.tail + last, "chunks follow each other"
            if not self._instance.by_expert:
                for m, window in enumerate(chunk.windows):
                    around = lap - window * (1 / rounds) + chunk.tail if m else 0
                    self._read_all(m, prompt, around, chunks)
        return prompt + self._output()

    @property
    def _picks_one_by_one(self) -> bool:
        """Whether chunks of a prompt follow each other through layers that stream by expert."""
        instance, layout = self._instance, self._layout
        return instance.by_expert and instance.chunks > 1 and not layout.loose and layout.tail is not None

    @property
    def _has_uneven_stops(self) -> bool:
        """Whether such stops may differ from round to round."""
        differ = len(self._instance.kinds) > 1 or self._layout.columns is not None
        return self._picks_one_by_one and differ

    def _uneven_stops(
        self, prompt: Any, chunk: _Chunk, passing: Expression, hops: Expression, link: Expression
    ) -> None:
        """Have ``prompt`` be as ``laps.py`` has it; where it is not known which layers a window has, no more than that."""
        problem, layout, chunks, rounds = self._problem, self._layout, self._instance.chunks, self._layout.rounds
        if layout.columns is not None:
            prompt_of = PickedPrompt(
                problem=problem,
                instance=self._instance,
                columns=layout.columns,
                rounds=rounds,
                used=layout.used,
                step_ms=[self._steps(m, 1) for m in range(len(layout.used))],
                read_ms=[self._read(m, phase) for m, phase in enumerate(self._prefill)],
                orders=layout.orders,
                picked=layout.picked,
            )
            problem += prompt >= prompt_of.takes(), "chunks follow each other"
            return
        last, following, least = positive(problem, "last_chunk"), chunks - 1, self._least_stops()
        problem += prompt >= passing + chunk.tail + last, "chunks follow each other"
        problem += last >= following * chunk.tail, "chunks in the tail"
        problem += last >= link * (following / rounds), "chunks on a link"
        problem += prompt >= link * chunks + (hops - link) * (1 / rounds) + chunk.tail, "all chunks pass a link"
        for i, host in enumerate(self._instance.hosts):
            of_tail, busy = int(0 in host), positive(problem, f"busy_{i}")
            problem += (
                busy >= pulp.lpSum(chunk.windows[m] for m in host) + of_tail * chunk.tail,
                f"stops at machine {i}",
            )
            problem += last >= busy * (following / (rounds + of_tail)), f"chunks at machine {i}"
            if of_tail:
                windows = busy - chunk.tail - self._most_of_tail()
                problem += last >= windows * (following / rounds), "chunks in the head's windows"
            around = (
                pulp.lpSum(stop for m, stop in enumerate(least) if m not in host) + hops * (1 / rounds) + chunk.tail
            )
            problem += prompt >= busy * chunks + (1 - of_tail) * around, f"machine {i} is busy with a prompt"

    def _most_of_tail(self) -> Expression:
        """What the head's tail reads for a chunk at the most."""
        largest = max(self._instance.streamable) / self._unit
        return self._layout.tail_in_ram * (largest * self._unit_ms(0))

    def _least_stops(self) -> list[Expression]:
        """What a window of each member takes at the least, whichever layers it has."""
        found, least = self._layout.variables, []
        for m, (phase, w, n, a) in enumerate(zip(self._prefill, found["w"], found["n"], found["a"], strict=True)):
            layers = (w - n) * min(phase.cpu) + n * min(phase.gpu) + a * min(phase.apart)
            least.append(layers * MS + self._steps(m, 1))
        return least

    def _read_all(self, m: int, prompt: Any, around: Expression, chunks: int) -> None:
        """From the beginning of its first stop to the end of its last one ``m`` reads what was not there."""
        phase = self._prefill[m]
        edge = self._streams.streams[m] * (phase.edge_s * MS)
        self._problem += prompt >= around + edge + self._first_read(m, chunks, 1), f"all chunks are read by {m}"
        computing, _ = self._computing(m, phase)
        layers = chunks * pulp.lpSum(self._layout.cpu[m]) + 1
        for i, waiting in enumerate(self._within(m, chunks * self._streams.bytes[m], layers, chunks)):
            self._problem += prompt >= around + chunks * computing + waiting, f"all chunks are read by {m} and wait {i}"

    def _first_read(self, m: int, chunks: int, rounds: int) -> Expression:
        """Milliseconds of reading of a stop, if there are as many as ``rounds``, for all chunks of a prompt that begins."""
        return self._read(m, self._prefill[m]) * (chunks / rounds) - self._streams.ahead[m] * self._unit_ms(m)

    def _tail(self, name: str, phase: Phase) -> Expression:
        """Milliseconds of computing the tail. Where it is unknown which layers it has, what suits best counts."""
        if self._layout.tail is None:
            return 0
        found, least, most = self._steps(0, 1), [], []
        for counts, seconds in zip(self._layout.tail, (phase.cpu, phase.gpu, phase.apart), strict=True):
            if len(counts) == len(seconds):
                found += _dot(counts, [s * MS for s in seconds])
            else:
                least.append(_dot(counts, [min(seconds) * MS]))
                most.append(_dot(counts, [max(seconds) * MS]))
        if not least:
            return found
        unknown = positive(self._problem, f"{name}_tail_ms")
        self._problem += unknown >= pulp.lpSum(least), f"{name}: a tail takes as long as its layers"
        self._problem += unknown <= pulp.lpSum(most), f"{name}: a tail takes no longer"
        return found + unknown

    def _period(self) -> Expression:
        period = positive(self._problem, "period")
        self._problem += period * self._instance.workload.sequences >= self._token(), "sequences take turns"
        for i, host in enumerate(self._instance.hosts):
            self._problem += period >= pulp.lpSum(self._decode_ms[m] for m in host), f"machine {i} is busy with tokens"
        for i, disk in enumerate(self._disks(self._decode)):
            self._problem += period >= disk, f"disk {i} is busy with tokens"
        link = self._hops(lambda order: order.link_s, lambda _: 0.0)
        self._problem += period >= link, "a link is busy with tokens"
        return period

    def _token_windows(self) -> list[Any]:
        """V_m: the milliseconds of all windows of each member for a token, computing or waiting for the disk."""
        windows = []
        for m, phase in enumerate(self._decode):
            window = positive(self._problem, f"decode_ms_{m}")
            windows.append(window)
            layers, rest = self._computing(m, phase)
            if m == 0 and self._has_long_stop:
                self._head_stops(phase, layers + rest, rest)
                self._problem += window >= self._first_ms + self._other_ms, "stops of the head"
                continue
            output = 0 if m else self._output()
            sure = self._sure_rest(m, phase, rest, output)
            computing, size = layers + rest + output, self._size(m, phase)
            self._stops("decode", m, phase, window, computing, sure, size, self._layout.rounds)
        return windows

    def _chunk(self) -> _Chunk:
        """The milliseconds of all windows for a chunk of a prompt."""
        rounds, tail, found = self._layout.rounds, self._tail("chunk", self._prefill[0]), _Chunk()
        for m, phase in enumerate(self._prefill):
            layers, rest = self._computing(m, phase)
            count, size = pulp.lpSum(self._layout.cpu[m]), self._size(m, phase)
            computing, sure = layers + rest - (0 if m else tail), self._sure_rest(m, phase, rest, 0)
            if m == 0 and self._has_long_stop:
                assert self._layout.tail is not None
                of_window, of_tail = self._head_parts("chunk", size)
                in_tail = pulp.lpSum(self._layout.tail[0])
                found.tail, found.tails = self._follow("tail", 0, tail, 0, of_tail, in_tail, 1)
                window, following = self._follow(
                    "windows", m, computing, sure, rounds * of_window, count - in_tail, rounds
                )
            else:
                window, following = self._follow("chunk", m, computing, sure - (0 if m else tail), size, count, rounds)
                if m == 0:
                    found.tail = found.tails = tail
            if m == 0 and self._picks_one_by_one and not self._has_uneven_stops:
                of_window, of_tail = self._head_parts("chunk", self._read(0, phase) * (1 / self._unit_ms(0)))
                window = following = computing + of_window * (rounds * self._unit_ms(0))
                found.tail = found.tails = tail + of_tail * self._unit_ms(0)
            found.windows.append(window)
            found.following.append(following)
        return found

    def _follow(
        self,
        name: str,
        m: int,
        computing: Expression,
        sure: Expression,
        size: Expression,
        layers: Expression,
        stops: int,
    ) -> tuple[Any, Any]:
        """Milliseconds of so many stops of a chunk, and of one of many chunks that follow each other without a pause.

        Where less than two of their parts are held ahead, a chunk's ``layers`` on the CPU wait for each other.
        """
        problem, chunks, phase = self._problem, self._instance.chunks, self._prefill[m]
        window = positive(problem, f"{name}_ms_{m}")
        least = self._stops(name, m, phase, window, computing, sure, size, stops)
        if self._layout.loose or self._instance.by_expert:
            return window, window
        following, passes = window, [(1, window)]
        if chunks > 1:
            following = positive(problem, f"{name}_following_ms_{m}")
            problem += following >= window, f"{name}: no chunk at {m} is quicker than the first"
            passes.append((chunks, following))
        for many, each in passes:
            for i, waiting in enumerate(self._within(m, size, layers + stops / many)):
                for j, computed in enumerate(least):
                    problem += each >= computed + waiting, f"{name}: {m} waits within windows {i} {j} of {many}"
        return window, following

    def _within(self, m: int, size: Expression, layers: Expression, passes: int = 1) -> list[Expression]:
        """Milliseconds that ``layers`` wait for each other, of which ``size`` is read: at least these."""
        unit_ms = self._unit_ms(m)
        most_ms = 2 * passes * self._total * unit_ms
        return [
            (2 * size - ahead * layers) * unit_ms - (1 - is_least) * most_ms
            for is_least, ahead in self._streams.steps[m]
        ]

    def _stops(
        self,
        name: str,
        m: int,
        phase: Phase,
        stop: Any,
        computing: Expression,
        sure: Expression,
        size: Expression,
        stops: int,
    ) -> list[Expression]:
        """Have ``stop`` be milliseconds of ``stops`` stops that compute, or read ``size`` beside what is ``sure``.

        Answers what they compute at the least: nothing read meanwhile, and longer because of what is.
        """
        problem, member, unit_ms = self._problem, self._instance.members[m], self._unit_ms(m)
        problem += stop >= computing, f"{name}: {m} computes"
        if self._instance.by_expert:
            for i, read in enumerate(self._picked(m, phase, size)):
                problem += stop >= computing + read * unit_ms, f"{name}: {m} reads what is picked {i}"
            return [computing]
        late, least = size - stops * self._streams.ahead[m], [computing]
        if member.slows_s_per_byte and not (member.is_alone and self._layout.loose):
            slowed = (late if member.is_alone else size) * (member.slows_s_per_byte * self._unit * MS)
            least.append(computing + slowed)
            problem += stop >= least[-1], f"{name}: {m} reads and computes"
        if not self._layout.loose:
            waits = integer(problem, f"{name}_waits_{m}", 0, 1)
            edges = waits * (stops * phase.edge_s * MS)
            problem += late <= waits * self._total, f"{name}: {m} has no edges if it does not wait"
            problem += stop >= sure + edges + late * unit_ms, f"{name}: {m} waits for its disk"
        return least

    @property
    def _has_long_stop(self) -> bool:
        """Whether the head's stop with the tail is told from its others."""
        return self._layout.rounds > 1 and not (self._layout.loose or self._instance.by_expert)

    def _head_stops(self, phase: Phase, all_ms: Expression, rest: Expression) -> None:
        """The head's stop with the tail and a window, and all its others."""
        problem, rounds, output = self._problem, self._layout.rounds, self._output()
        others, tail = rounds - 1, self._tail("token", phase)
        first = self._first_ms = positive(problem, "head_first_ms")
        other = self._other_ms = positive(problem, "head_other_ms")
        window = (all_ms - tail) * (1 / rounds)
        sure = self._sure_rest(0, phase, rest, output) * (1 / rounds)
        problem += first >= tail + output + other * (1 / others), "the head computes its tail and a window"
        of_window, of_tail = self._head_parts("token", self._streams.decode[0])
        self._stops("other", 0, phase, other, others * window, others * sure, others * of_window, others)
        self._stops("first", 0, phase, first, tail + output + window, sure, of_tail + of_window, 1)

    def _head_parts(self, name: str, size: Expression) -> tuple[Expression, Expression]:
        """What streams of a window of the head and of its tail, in units of memory: as much of each layer, ``size`` in all.

        Lengths of windows times what of a layer streams, which are products; so a binary stands for each length.
        """
        if self._lengths is None:
            layout, window = self._layout, self._layout.window_in_ram
            assert window is not None
            total, in_tail = len(self._instance.model.layers), layout.tail_in_ram
            least, most = regular_tails(layout.rounds)
            longest, longer = (total - least) // (layout.rounds + 1), in_tail - window
            if self._instance.by_expert:  # any tail will do
                least, most, longest, longer = 0, total, total // layout.rounds, in_tail
            self._lengths = (
                self._of_length("window", range(longest + 1), window),
                self._of_length("tail", range(least, most + 1), longer),
            )
        (part, of_window), (same, more) = (self._parts(name, lengths) for lengths in self._lengths)
        of_tail = more if self._instance.by_expert else of_window + more
        self._problem += part == same, f"{name}: as much of each layer of the head streams"
        self._problem += self._layout.rounds * of_window + of_tail == size, f"{name}: what of the head streams"
        return of_window, of_tail

    def _of_length(self, what: str, lengths: range, length: Expression) -> _Lengths:
        """Binaries for ``length``, which is one of ``lengths`` where the head streams."""
        problem, streams, total = self._problem, self._streams.streams[0], len(self._instance.model.layers)
        picked = [integer(problem, f"head_{what}_{i}", 0, 1) for i in range(len(lengths))]
        problem += pulp.lpSum(picked) == streams, f"a {what} of the head that streams has a length"
        missed = length - pulp.lpSum(n * is_it for n, is_it in zip(lengths, picked, strict=True))
        problem += missed <= total * (1 - streams), f"the {what} of the head is no longer"
        problem += -missed <= total * (1 - streams), f"the {what} of the head is no shorter"
        return _Lengths(what, lengths, picked)

    def _parts(self, name: str, lengths: _Lengths) -> tuple[Expression, Expression]:
        """What of a layer of the head streams, and the length that is picked times as much."""
        problem, largest = self._problem, max(self._instance.streamable) / self._unit
        parts = [positive(problem, f"{name}_{lengths.what}_part_{i}") for i in range(len(lengths.picked))]
        for i, (is_it, part) in enumerate(zip(lengths.picked, parts, strict=True)):
            problem += part <= largest * is_it, f"{name}: part of a layer of the head with {lengths.what} {i}"
        return pulp.lpSum(parts), pulp.lpSum(n * part for n, part in zip(lengths.lengths, parts, strict=True))

    def _computing(self, m: int, phase: Phase) -> tuple[Expression, Expression]:
        """Milliseconds of computing: the layers on the CPU, and the rest without the output matrix."""
        rest = _dot(self._layout.gpu[m], [s * MS for s in phase.gpu]) + self._steps(m, self._layout.windows[m])
        rest += _dot(self._layout.apart[m], [s * MS for s in phase.apart])
        return _dot(self._layout.cpu[m], [s * MS for s in phase.cpu]), rest

    def _size(self, m: int, phase: Phase) -> Expression:
        """What of ``m`` streams, in units of memory; below 0 where there is room for more."""
        return self._streams.bytes[m] - self._streams.streams[m] * (phase.spare_bytes / self._unit)

    def _read(self, m: int, phase: Phase) -> Expression:
        """Milliseconds in which ``m`` reads what a pass needs of what streams."""
        streamed = self._streams.decode[m] if phase.spare_bytes else self._streams.bytes[m]
        picked = self._picked(m, phase, streamed)
        if len(picked) == 1:
            return picked[0] * self._unit_ms(m)
        name = f"read_ms_{m}_{phase.rows}_{phase.spare_bytes}"
        if name not in self._reads:
            self._reads[name] = positive(self._problem, name)
            for i, size in enumerate(picked):
                self._problem += self._reads[name] >= size * self._unit_ms(m), f"{name} {i}"
        return self._reads[name]

    def _picked(self, m: int, phase: Phase, streamed: Expression) -> list[Expression]:
        """What ``m`` reads of what is ``streamed``, in units of memory: at least each of these."""
        streamable = _dot(self._layout.in_ram(m), [size / self._unit for size in self._instance.streamable])
        return [streamed * line.of_streamed + streamable * line.of_streamable for line in phase.read_lines]

    def _unit_ms(self, m: int) -> float:
        """Milliseconds in which ``m`` reads a unit of memory."""
        return self._unit / self._instance.members[m].disk_bytes_per_s * MS

    def _disks(self, phases: Sequence[Phase]) -> list[Expression]:
        """Milliseconds that each disk reads."""
        reads = [self._read(m, phase) for m, phase in enumerate(phases)]
        return [pulp.lpSum(reads[m] for m in here) for here in self._instance.disks]

    def _steps(self, m: int, windows: float) -> Expression:
        """What ``windows`` windows cost besides their layers."""
        member = self._instance.members[m]
        per_window = self._uses_cpu[m] * (member.step_s * MS) + self._uses_gpu[m] * (member.gpu_step_s * MS)
        return windows * per_window

    def _sure_rest(self, m: int, phase: Phase, rest: Expression, output: Expression) -> Expression:
        """What adds to reading: all that is not a layer on the CPU, in a ring without the tail."""
        if m:
            return rest
        if len(self._instance.devices) == 1:
            return rest + output
        return rest - self._layout.tail_on_gpu * (max(phase.gpu) * MS) - self._steps(0, 1)

    def _output(self) -> Expression:
        """The output matrix on the head."""
        head = self._instance.members[0]
        return head.cpu_output_s * MS + self._output_on_gpu * ((head.gpu_output_s - head.cpu_output_s) * MS)

    def _hops(self, of_order: Callable[[RingOrder], float], of_share: Callable[[HopShare], float]) -> Expression:
        """Milliseconds of k rounds of the ring that is picked, or of the shares of who takes part."""
        layout = self._layout
        scale = layout.rounds * MS
        return pulp.lpSum(
            z * (scale * of_order(order)) for z, order in zip(layout.picked, layout.orders, strict=True)
        ) + (
            pulp.lpSum(
                used * (scale * of_share(share)) for used, share in zip(layout.used, layout.shares, strict=False)
            )
        )


def _dot(counts: Sequence[Expression], weights: Sequence[float]) -> Expression:
    return pulp.lpSum(count * weight for count, weight in zip(counts, weights, strict=True))
