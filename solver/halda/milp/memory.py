"""Memory: what fits, what streams, and its read-ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pulp

from halda.instance import Instance
from halda.milp.layouts import Layout, integer
from halda.variables import Expression, positive


@dataclass(slots=True)
class StreamVariables:
    """For each member: ``streams`` is 1 if it streams, ``bytes`` the streamed bytes, ``read_ahead`` their read-ahead
    (in units of memory).

    ``steps`` says for each minimum read-ahead whether it applies and no larger one does. ``decode`` is what streams
    during decode.
    """

    streams: list[Any] = field(default_factory=list)
    bytes: list[Any] = field(default_factory=list)
    read_ahead: list[Any] = field(default_factory=list)
    steps: list[list[tuple[Expression, float]]] = field(default_factory=list)
    decode: list[Any] = field(default_factory=list)


def uses_of_gpus(problem: Any, instance: Instance, layout: Layout, m: int) -> list[Any]:
    """Return whether each GPU of member ``m`` is used. Of GPUs that are alike the first ones are used."""
    member, found = instance.members[m], list[Any]()
    for i, room in enumerate(instance.gpu_rooms(m, layout.windows[m])):
        uses = integer(problem, f"gpu_used_{m}" if not i else f"gpu_used_{m}_{i}", 0, int(member.has_gpu))
        problem += pulp.lpSum(_of_gpu(instance, layout.gpu[m], i)) <= room * uses, f"{m} uses its GPU {i}"
        if i and member.has_own_host and member.are_alike(i - 1, i):
            problem += uses <= found[-1], f"{m} uses its GPU {i - 1} before {i}"
        found.append(uses)
    return found


def _of_gpu(instance: Instance, counts: Sequence[Expression], gpu: int) -> Sequence[Expression]:
    kinds = len(instance.kinds)
    return counts[gpu * kinds : (gpu + 1) * kinds]


def uses_of_cpu(
    problem: Any, instance: Instance, layout: Layout, uses_gpu: Sequence[Sequence[Any]]
) -> list[Expression]:
    """Return whether the CPU of each member computes any part of a layer: without a GPU it does if the member takes
    part."""
    found: list[Expression] = []
    for m, member in enumerate(instance.members):
        if not member.has_gpu:
            found.append(layout.used[m])
            continue
        uses = integer(problem, f"cpu_used_{m}", 0, 1)
        problem += pulp.lpSum(layout.in_ram(m)) <= len(instance.model.layers) * uses, f"{m} uses its processor"
        problem += uses + pulp.lpSum(uses_gpu[m]) >= layout.used[m], f"{m} uses either"
        found.append(uses)
    return found


def add_streaming(problem: Any, instance: Instance, layout: Layout) -> StreamVariables:
    """Add which members stream, how much, and with how much read-ahead."""
    unit, found = instance.largest_layer_bytes, StreamVariables()
    streamable = [size / unit for size in instance.streamable]
    total = sum(count * size for count, size in zip(instance.kind_totals, streamable, strict=True))
    for m, member in enumerate(instance.members):
        first, *further = member.read_ahead_steps
        streams = integer(problem, f"streams_{m}", 0, int(not member.offloads_prefill))
        size, read_ahead, decode = (positive(problem, f"{name}_{m}") for name in ("streamed", "ahead", "in_decode"))
        maximum = dot(layout.in_ram(m), streamable)
        problem += size <= maximum - streams * (instance.pool_bytes / unit), f"{m} streams what its CPU computes"
        problem += size <= total * streams, f"{m} streams"
        minimum: Expression = streams * (first.read_ahead_bytes / unit)
        enough: Expression = streams * (first.wide_bytes / unit)
        is_wide = 1 if instance.by_expert else integer(problem, f"wide_{m}", 0, 1)
        below, above, reached = first, streams, [streams]
        for i, step in enumerate(further, 1):
            beyond = integer(problem, f"beyond_{m}_{i}", 0, 1)
            problem += size <= below.share * maximum + (1 - below.share) * total * beyond, f"{m} streams a share {i}"
            problem += beyond <= above, f"{m} streams less than share {i} before"
            minimum += beyond * ((step.read_ahead_bytes - below.read_ahead_bytes) / unit)
            enough += beyond * ((step.wide_bytes - below.wide_bytes) / unit)
            below, above = step, beyond
            reached.append(beyond)
        problem += read_ahead >= minimum, f"{m} reads ahead"
        if not instance.by_expert:
            problem += read_ahead <= minimum + total * is_wide, f"{m} reads no more ahead than it needs"
            problem += read_ahead >= enough - 2 * (1 - is_wide), f"{m} reads ahead two parts"
        problem += read_ahead <= size, f"{m} reads ahead what streams"
        problem += decode >= size - member.decode.spare_bytes / unit, f"{m} streams less in decode"
        found.streams.append(streams)
        found.bytes.append(size)
        found.read_ahead.append(read_ahead)
        found.steps.append(
            [
                (now - after - is_wide, step.read_ahead_bytes / unit)
                for now, after, step in zip(reached, [*reached[1:], 0], member.read_ahead_steps, strict=True)
            ]
        )
        found.decode.append(decode)
    return found


def add_memory(
    problem: Any,
    instance: Instance,
    layout: Layout,
    streams: StreamVariables,
    uses_gpu: Sequence[Sequence[Any]],
    output_on_gpu: Any,
    fullest: Any,
    *,
    elastic: bool,
) -> list[Expression]:
    """Make RAM, VRAM and disk of every device and machine hard limits. Return the slacks if ``elastic``. Unit: largest
    layers.

    ``fullest`` is at least each device's used share of its RAM.
    """
    unit = instance.largest_layer_bytes
    sizes = [size / unit for size in instance.size_bytes]
    with_kv = [size + kv / unit for size, kv in zip(sizes, instance.kv_bytes, strict=True)]
    experts = [size / unit for size in instance.expert_bytes]
    checkpoints = [size / unit for size in instance.checkpoint_bytes]
    output, ram, disk = instance.model.output_bytes / unit, [], []
    vram: list[list[Expression]] = []
    for m, member in enumerate(instance.members):
        windows = layout.windows[m]
        vram.append([])
        for gpu in range(member.gpu_count):
            offloads = gpu == member.offloading_gpu
            on_gpu = dot(_of_gpu(instance, layout.gpu[m], gpu), with_kv)
            on_gpu -= dot(_of_gpu(instance, layout.experts_on_cpu[m], gpu), experts)
            besides = instance.gpu_besides(member, gpu, windows) / unit
            on_gpu += (layout.used[m] if offloads else uses_gpu[m][gpu]) * besides
            if m == 0 and gpu == 0:
                on_gpu += output_on_gpu * output
            if m == 0 and offloads:
                on_gpu += (1 - output_on_gpu) * (instance.output_copy_bytes / unit)
            vram[m].append(on_gpu)
        on_cpu = dot(layout.cpu[m], with_kv) - streams.bytes[m] + streams.read_ahead[m]
        on_cpu += dot(layout.cpu[m], checkpoints)
        for gpu in range(member.gpu_count):
            on_cpu += dot(_of_gpu(instance, layout.experts_on_cpu[m], gpu), experts)
            on_cpu += dot(_of_gpu(instance, layout.gpu[m], gpu), checkpoints)
        on_cpu += streams.streams[m] * (instance.reserve_bytes / unit)
        on_cpu += layout.used[m] * (instance.runtime_bytes(windows) / unit)
        if m == 0:
            on_cpu += instance.head_bytes(windows) / unit + (1 - output_on_gpu) * output
        ram.append(on_cpu + pulp.lpSum(member.in_ram(vram[m])))
        on_gpus = pulp.lpSum(dot(_of_gpu(instance, layout.gpu[m], gpu), sizes) for gpu in range(member.gpu_count))
        disk.append(dot(layout.cpu[m], sizes) + on_gpus if len(instance.devices) > 1 else 0)
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
        for gpu, available in enumerate(member.vram_limits):
            limit("VRAM", f"{m}g{gpu}", vram[m][gpu], available)
        limit("disk", str(m), disk[m], member.disk_limit)
    for host in instance.hosts:
        if len(host) > 1:
            profiles = [instance.devices[m] for m in host]
            name = "_".join(map(str, host))
            limit("RAM", name, pulp.lpSum(ram[m] for m in host), max(p.ram_available_bytes for p in profiles))
    for group in instance.vram_groups:
        there = max(instance.devices[m].gpus[gpu].vram_available_bytes for m, gpu in group)
        limit("VRAM", "_".join(f"{m}g{gpu}" for m, gpu in group), pulp.lpSum(vram[m][gpu] for m, gpu in group), there)
    for here in instance.disks:
        if len(here) > 1:
            free = max(instance.devices[m].disk.free_bytes for m in here)
            limit("disk", "_".join(map(str, here)), pulp.lpSum(disk[m] for m in here), free)
    return slacks


def dot(counts: Sequence[Expression], weights: Sequence[float]) -> Expression:
    return pulp.lpSum(count * weight for count, weight in zip(counts, weights, strict=True))
