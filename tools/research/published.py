"""Halda as published: PRIMA.CPP, arXiv 2504.08791, sections 3.2 and 3.3 and appendix A.3. It serves as a baseline.

The layer-to-device assignment (equations 1 to 5) minimises T = L (a'w + b'n + e'c) / (e'w) + kappa over the windows w_m
of the devices and the GPU layers n_m in them. For a fixed number of rounds k it is an integer linear program (6 to 10);
which constraints hold for a device depends on its set (cases 1 to 4), so sets and programs alternate until the sets are
stable (algorithm 1). Letters are the paper's. This implementation differs as follows:

- Compute time f/s and reading b/T are one term: ``decode_bytes_per_s`` was measured on layers and includes both. The KV
  read and the fixed times of a layer and of a window (in xi) come from the profile; t^kv_cpy is too small to measure.
- c^cpu has one compute buffer, as in the paper, and a little for each window of a device; c^gpu has a buffer for each
  window. A device has a window per round, and the head one more for the tail.
- A layer is ``cut_multiple`` layers of the model, the places where windows may begin. Layers may differ: times are means,
  bytes those of the largest, so that what fits here fits the model.
- s^disk of macOS is the rate of page faults, which the paper models as random reads; d^swapout of Android is 0.
- A GPU that shares its memory on another system than macOS counts as Metal does: the paper has no case for it.
- Calibration. The paper forces the overloaded device with the slowest disk into M4 when VRAM is left elsewhere; the
  published code compares GPU layers of different numbers of rounds there, so it nearly always does. Here it is done until
  nothing is overloaded, keeping the solution with the smallest T, which gives partitions such as the paper's figure 8.
- Without a solution for its sets the paper has no plan; here the device with the least memory is dropped, as in selection.
- Selection drops the devices with a window of one layer and solves again; the fastest of these subsets by T is kept.
- The route ends on the head, so its window has two or more layers, and the last one of the last round is the tail window.
- The paper keeps the output matrix on the head's CPU. GPU layers of the tail window move it to the GPU: where both
  do not fit, the tail's layer stays on the CPU, and a single device has as many GPU layers as fit next to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pulp

from halda.evaluate import residency
from halda.instance import Instance, Member, instance
from halda.plan import Infeasible, LeftOut, Plan, Window
from halda.profile import DeviceProfile, Limits, LinkProfile, ModelProfile, Workload
from halda.solving import run

MemorySet = Literal["M1", "M2", "M3", "M4"]
"""Memory cases of a device. M1 to M3 exceed their memory (macOS without Metal, with Metal, Linux and Android); M4 does
not, or has a slow disk."""
_PROGRAM_S: Final = 10.0
"""Time limit for one program; the paper's fleets need hundredths of a second."""
SLOW_DISK_BYTES_PER_S: Final = 100e6
"""s^disk_threshold: a slower disk is not read from while computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPlan:
    """The paper's result: its plan in primad's terms, and T by its own formula in seconds per token."""

    plan: Plan
    predicted_s: float
    sets: Mapping[str, MemorySet]
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """The platform-specific constants of one device (appendix A.3): seconds per layer, bytes, bytes/s."""

    name: str
    is_head: bool
    metal: bool
    short_set: MemorySet
    alpha: float
    beta: float
    xi: float
    s_disk: float
    d_avail: float
    """Memory that windows may fill: RAM, or the GPU's share of it with Metal."""
    vram: float
    """d^avail_gpu, and with Metal on the head less b_o (equations 34 and 35)."""
    b_io: float
    """b_i/V + b_o on the head."""
    ram_besides: float
    """c^cpu without the part of each window."""
    ram_window: float
    """RAM that each window takes."""
    gpu_besides: float
    """c^gpu without compute buffers."""
    gpu_window: float
    """Compute buffer of a window."""
    tail: int
    """1 on the head of a ring, which has the tail window besides those of the rounds."""

    def c_cpu(self, k: int) -> float:
        """RAM besides weights and KV cache in ``k`` rounds."""
        return self.ram_besides + (k + self.tail) * self.ram_window

    def c_gpu(self, k: int) -> float:
        """VRAM besides weights and KV cache in ``k`` rounds."""
        return self.gpu_besides + (k + self.tail) * self.gpu_window

    def b_cio(self, k: int) -> float:
        """(b_i/V + b_o) on the head, and the compute buffers (equation 33)."""
        return self.b_io + self.c_cpu(k) + (self.c_gpu(k) if self.metal else 0)

    def d_gpu(self, k: int) -> float:
        """VRAM for layers: d^avail_gpu - c^gpu (equations 34 and 35)."""
        return max(0.0, self.vram - self.c_gpu(k))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """The assignment problem over ``devices`` in ring order, the head first."""

    devices: tuple[_Device, ...]
    layers: int
    """L, in units of ``cut_multiple`` layers."""
    b: float
    b_prime: float
    """b' = b + 2 (h_k e_k + h_v e_v) n_kv: weights and KV cache of a layer."""
    b_row: float
    """b_i / V: the embedding of one token."""
    b_out: float
    out_s: float
    """The output matrix on the head's CPU."""

    def factors(self) -> list[int]:
        """K_L: the numbers of rounds that divide L and leave every device a layer, and the head one for the tail."""
        if len(self.devices) == 1:
            return [1]
        return [k for k in range(1, self.layers) if self.layers % k == 0 and self.layers // k > len(self.devices)]


_Sets = Mapping[str, MemorySet]
_Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solution:
    """Windows w, GPU layers n and rounds k, with the sets that they were found for and T in seconds."""

    w: _Counts
    n: _Counts
    k: int
    sets: _Sets
    t: float


def solve_published(
    devices: Sequence[DeviceProfile],
    links: Sequence[LinkProfile],
    model: ModelProfile,
    workload: Workload,
    *,
    limits: Mapping[str, Limits] | None = None,
    head: str | None = None,
) -> PublishedPlan:
    """Return the paper's plan for ``model``; the ring follows the order of ``devices`` after the head (None: the
    first).

    Layers that do not fit a device's memory stream by primad's rules (``evaluate.residency``); rate the result with
    ``evaluate``. Raises ``Infeasible`` when no subset of the devices with the head has a plan.
    """
    if model.tail_layers > model.cut_multiple:
        raise Infeasible(
            f"Halda as published knows no window of {model.tail_layers} layers at least, as the last one of {model.name}"
        )
    ring = instance(devices, links, model, workload, limits or {}, head)
    chosen = list(range(len(ring.members)))
    best: _Solution | None = None
    while True:
        problem = _problem(ring, chosen)
        solution = _halda(problem)
        if solution is not None and (best is None or solution.t < best.t):
            best = solution
        keep = [chosen[0], *_worth_keeping(problem, solution, chosen[1:])]
        if len(keep) == len(chosen):
            break
        chosen = keep
    if best is None:
        raise Infeasible(
            f"Halda as published has no plan for {model.name}: its sets leave no room on {ring.members[0].name}"
        )
    return _published_plan(ring, best)


def _worth_keeping(problem: _Problem, solution: _Solution | None, others: list[int]) -> list[int]:
    """Device selection: keep the devices besides the head with more than one layer; if nothing was found, all but the
    smallest."""
    behind = dict(zip(others, problem.devices[1:], strict=True))
    if solution is not None:
        return [i for i, device in behind.items() if solution.w[device.name] > 1]
    smallest = min(behind, key=lambda i: behind[i].d_avail + behind[i].d_gpu(1), default=None)
    return [i for i in others if i != smallest]


def _problem(ring: Instance, chosen: Sequence[int]) -> _Problem:
    model, unit = ring.model, ring.model.cut_multiple
    weights = max(layer.size_bytes for layer in model.layers)
    head = ring.members[0]
    following = [*chosen[1:], chosen[0]]
    return _Problem(
        devices=tuple(_device(ring, at, to) for at, to in zip(chosen, following, strict=True)),
        layers=-(-len(model.layers) // unit),
        b=unit * weights,
        b_prime=_layer_bytes(ring),
        b_row=model.embedding_bytes / model.vocabulary,
        b_out=model.output_bytes,
        out_s=head.cpu_output_s,
    )


def _device(ring: Instance, at: int, to: int) -> _Device:
    member, unit = ring.members[at], ring.model.cut_multiple
    profile, is_head = member.profile, at == 0
    macos = profile.system.lower() in ("macos", "darwin")
    metal = member.shares_memory
    cpu, gpu = (unit * _mean(ring, seconds) for seconds in (member.decode.cpu, member.decode.gpu))
    b_o = ring.model.output_bytes if is_head else 0
    return _Device(
        name=member.name,
        is_head=is_head,
        metal=metal,
        short_set="M2" if metal else "M1" if macos else "M3",
        alpha=cpu,
        beta=gpu - cpu if member.has_gpu else 0.0,
        xi=member.step_s + member.gpu_step_s + (ring.hops_s[at][to] if at != to else 0.0),
        s_disk=profile.disk.fault_bytes_per_s if macos else profile.disk.prefetch_bytes_per_s,
        d_avail=min(member.ram_limit, member.vram_limit) if metal else member.ram_limit,
        vram=_vram(member) - (b_o if metal else 0),
        b_io=ring.model.embedding_bytes / ring.model.vocabulary + b_o if is_head else 0.0,
        ram_besides=ring.runtime_bytes(0) + (ring.head_bytes(2) if is_head else 0),
        ram_window=ring.runtime_bytes(1) - ring.runtime_bytes(0),
        gpu_besides=ring.gpu_runtime_bytes(0),
        gpu_window=ring.gpu_runtime_bytes(1) - ring.gpu_runtime_bytes(0),
        tail=int(is_head and at != to),
    )


def _vram(member: Member) -> int:
    """d^avail_gpu: 0 without a GPU."""
    return min(member.vram_limit, member.ram_limit) if member.shares_memory else member.vram_limit


def _layer_bytes(ring: Instance) -> int:
    """Weights and KV cache of the largest layer, in units of ``cut_multiple`` layers."""
    largest = max(kv + kind.size_bytes for kv, kind in zip(ring.kv_bytes, ring.kinds, strict=True))
    return ring.model.cut_multiple * largest


def _mean(ring: Instance, seconds: Sequence[float]) -> float:
    return sum(n * s for n, s in zip(ring.kind_totals, seconds, strict=True)) / len(ring.model.layers)


def _halda(problem: _Problem) -> _Solution | None:
    """Algorithm 1 with its calibration. None when the first sets have no solution."""
    forced: set[str] = set()
    best: _Solution | None = None
    while (solution := _stable(problem, forced)) is not None:
        if best is None or solution.t < best.t:
            best = solution
        overloaded = [device for device in problem.devices if solution.sets[device.name] != "M4"]
        if not overloaded:
            break
        forced.add(min(overloaded, key=lambda device: device.s_disk).name)
    return best


def _stable(problem: _Problem, forced: set[str]) -> _Solution | None:
    """Alternate between sets from windows and windows from sets, until the sets repeat."""
    w: _Counts = _first_windows(problem)
    n: _Counts = {device.name: 0 for device in problem.devices}
    k = 1
    seen: list[_Sets] = []
    found: _Solution | None = None
    while True:
        sets = {device.name: _set_of(problem, device, w, n, k, forced) for device in problem.devices}
        if sets in seen:
            return found
        seen.append(sets)
        solution = _best_over_rounds(problem, sets)
        if solution is None:
            return found
        found, w, n, k = solution, solution.w, solution.n, solution.k


def _first_windows(problem: _Problem) -> dict[str, int]:
    """Windows in proportion to the memory budgets; the rounding error goes to the largest or comes from the smallest."""
    budget = {device.name: max(1.0, device.d_avail) for device in problem.devices}
    total = sum(budget.values())
    w = {name: round(problem.layers * size / total) for name, size in budget.items()}
    rest = problem.layers - sum(w.values())
    w[max(budget, key=budget.__getitem__) if rest > 0 else min(budget, key=budget.__getitem__)] += rest
    return w


def _set_of(problem: _Problem, device: _Device, w: _Counts, n: _Counts, k: int, forced: Iterable[str]) -> MemorySet:
    """Cases 1 to 4 of appendix A.3."""
    if device.name in forced or device.s_disk < SLOW_DISK_BYTES_PER_S:
        return "M4"
    in_memory = w[device.name] if device.short_set in ("M1", "M2") else w[device.name] - n[device.name]
    needed = k * in_memory * problem.b_prime + device.b_cio(k)
    return device.short_set if needed > device.d_avail else "M4"


def _coefficients(problem: _Problem, sets: _Sets, k: int) -> dict[str, tuple[float, float]]:
    """a_m and b_m of each device by its set."""
    b, b_prime = problem.b, problem.b_prime

    def of(d: _Device) -> tuple[float, float]:
        match sets[d.name]:
            case "M1":
                return d.alpha + b_prime / d.s_disk, 0.0
            case "M2":
                return d.alpha + b / d.s_disk, d.beta
            case "M3":
                return d.alpha + b_prime / d.s_disk, d.beta - b_prime / d.s_disk if d.d_gpu(k) else 0.0
            case "M4":
                return d.alpha, d.beta

    return {device.name: of(device) for device in problem.devices}


def _kappa(problem: _Problem, sets: _Sets, k: int) -> float:
    """kappa: the output layer and one embedding on the head, and what the overloaded devices keep in memory."""
    head = problem.devices[0]
    kappa = problem.out_s + problem.b_row / head.s_disk
    if sets[head.name] != "M4":
        kappa += problem.b_out / head.s_disk
    return kappa + sum((d.c_cpu(k) - d.d_avail) / d.s_disk for d in problem.devices if sets[d.name] in ("M1", "M3"))


def _best_over_rounds(problem: _Problem, sets: _Sets) -> _Solution | None:
    solutions = [solution for k in problem.factors() if (solution := _program(problem, sets, k)) is not None]
    return min(solutions, key=lambda solution: solution.t, default=None)


def _program(problem: _Problem, sets: _Sets, k: int) -> _Solution | None:
    """Equations 6 to 10: the integer linear program for k rounds of W layers."""
    names = [device.name for device in problem.devices]
    layers, b_prime = problem.layers, problem.b_prime
    layers_per_round = layers // k
    program = pulp.LpProblem("layer_to_device_assignment", pulp.LpMinimize)
    w = {name: program.add_variable(f"w_{i}", 1, layers, pulp.LpInteger) for i, name in enumerate(names)}
    n = {name: program.add_variable(f"n_{i}", 0, layers, pulp.LpInteger) for i, name in enumerate(names)}
    a_b = _coefficients(problem, sets, k)
    kappa = _kappa(problem, sets, k)

    program += k * pulp.lpSum(a_b[d.name][0] * w[d.name] + a_b[d.name][1] * n[d.name] + d.xi for d in problem.devices)
    program += pulp.lpSum(w.values()) == layers_per_round, "every layer of a round has a place"
    if len(names) > 1:
        program += w[names[0]] >= 2, "the head keeps a layer for the tail"
    for i, d in enumerate(problem.devices):
        in_memory = w[d.name] if d.short_set in ("M1", "M2") else w[d.name] - n[d.name]
        z = (d.d_avail - d.b_cio(k)) / (layers * b_prime)
        z_gpu = d.d_gpu(k) / (layers * b_prime)
        program += n[d.name] <= w[d.name], f"GPU layers are layers of the window {i}"
        program += n[d.name] <= layers_per_round * z_gpu, f"VRAM {i}"
        if sets[d.name] == "M4":
            program += in_memory <= layers_per_round * z, f"RAM holds all {i}"
        else:
            program += in_memory >= layers_per_round * z, f"RAM is overloaded {i}"
    if not run(program, _PROGRAM_S).found:
        return None
    return _Solution(
        w={name: round(w[name].value()) for name in names},
        n={name: round(n[name].value()) for name in names},
        k=k,
        sets=sets,
        t=pulp.value(program.objective) + kappa,
    )


def _published_plan(ring: Instance, solution: _Solution) -> PublishedPlan:
    names = list(solution.w)
    left_out = tuple(
        LeftOut(device=member.name, reason="Halda as published is quicker without it")
        for member in ring.members
        if member.name not in solution.w
    )
    route = _route(ring, solution)
    plan = Plan(
        rounds=solution.k,
        route=route,
        output_on_gpu=route[-1].gpu_layers > 0,
        streaming=(),
        left_out=left_out,
    )
    # A device that is left alone with all layers on its GPU runs as llama.cpp does, with the output matrix there too.
    head = ring.members[0]
    whole_on_gpu = len(names) == 1 and route[0].gpu_layers == len(ring.model.layers)
    saved = head.cpu_output_s - head.gpu_output_s if whole_on_gpu else 0.0
    return PublishedPlan(
        plan=residency(plan, ring), predicted_s=solution.t - saved, sets=solution.sets, rounds=solution.k
    )


def _beside_output(ring: Instance, windows: int) -> int:
    """Number of layers that the head's GPU holds besides the output matrix and the buffers of ``windows`` windows."""
    room = _vram(ring.members[0]) - ring.gpu_runtime_bytes(windows) - ring.model.output_bytes
    return max(0, room // _layer_bytes(ring))


def _route(ring: Instance, solution: _Solution) -> tuple[Window, ...]:
    """k rounds of windows in ring order; the last layer of the head's last window is the tail window."""
    model, head = ring.model, ring.members[0].name
    visits = [(name, solution.w[name], solution.n[name]) for _ in range(solution.k) for name in solution.w]
    if len(solution.w) > 1:
        of_head = (solution.k - 1) * len(solution.w)
        _, w, n = visits[of_head]
        visits[of_head] = (head, w - 1, min(n, w - 1))
        visits.append((head, 1, 1 if n == w and n * solution.k <= _beside_output(ring, solution.k + 1) else 0))
    else:
        visits = [(head, w, min(n, _beside_output(ring, 1))) for _, w, n in visits]
    route: list[Window] = []
    first = 0
    for name, w, n in visits:
        last = min(first + w * model.cut_multiple, len(model.layers))
        gpu_layers = min(n * model.cut_multiple, last - first)
        route.append(Window(device=name, first=first, last=last, gpu_layers=gpu_layers))
        first = last
    return tuple(route)
