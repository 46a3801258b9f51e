"""What a plan costs: the one evaluator that every plan is judged by, whoever made it.

Streaming. In each of k rounds a device's loader fills at most ``slots`` buffers while the other devices compute; what a
round needs beyond that is read during the device's own window. That reading cannot begin before the first streamed layer is
computed and gives its slot back, and what comes behind the last streamed layer waits for it. So the windows of device m
take a token at least

    V_m >= compute_m          and          V_m >= rest_m + k * edge_m + waiting_m,

where ``waiting`` is the reading of what k times the slots do not hold, ``edge`` the first streamed layer and the shorter of
computing and reading the last, ``rest`` what is not computed by the CPU's layers. A token as a whole takes

    TPOT = max(sum of V_m + hops, streamed_m / disk_m of the slowest disk).

With streamed/k slots nothing waits: that many slots make streaming free as long as the disk keeps up, and more rounds need
fewer of them.

A layer with experts streams by expert in decode. Its memory is that of whole layers (what is resident, and the slots), but
it holds the experts used most of all such layers and what else these have; a token reads at most the experts that the router
of a streamed layer picks, ``picked``. They are known only when the layer's turn has come, so nothing is computed while they
are read, no slot holds them before, and both bounds of V_m get ``picked_m`` more. (Less is read where the experts in memory
are among the picked ones; more where there is no memory for what these layers have besides experts.) Since a device may
then have no layer that is read ahead, ``edge`` is left out.

Prefill is the same for a chunk of rows, which together use all experts: every streamed layer is read whole, ahead. Chunks
follow each other through the ring, so after the first each costs what the busiest machine, disk or link needs for one, and
the output matrix is computed once. A head that streams the output matrix reads it with its layers, for each token and each
chunk. Devices on one machine share cores and disk.
``halda_research.simulate`` plays the same ring event by event and says where the two part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from halda.instance import MIN_SLOTS, Instance, Member, Phase, ahead_bytes
from halda.plan import Plan, Streaming, Window
from halda.profile import ModelProfile

Objective = Literal["latency", "ttft", "throughput", "balanced"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("latency", "ttft", "throughput", "balanced")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrediction:
    """One device under a plan. Seconds and disk bytes are those of one token in decode: of layers with experts at most
    those that are picked are read.

    ``window_s`` is compute and stall; ``hop_s`` belongs to what the device sends; ``shard_bytes`` is what its disk holds.
    Where a token takes as long as a disk reads, what others do not take of it is the stall of the device that reads longest.
    ``streams_output``: the output matrix is read with the ``streamed_layers``. ``room_bytes`` of RAM are left over, less
    than another layer takes in most plans that stream.
    """

    device: str
    windows: int
    layers: int
    gpu_layers: int
    resident_layers: int
    streamed_layers: int
    streams_output: bool
    slots: int
    ram_bytes: int
    room_bytes: int
    vram_bytes: int
    shard_bytes: int
    disk_bytes_per_token: int
    compute_s: float
    stall_s: float
    hop_s: float
    disk_s: float
    prefill_s: float

    @property
    def window_s(self) -> float:
        """Seconds a token spends in the windows of this device."""
        return self.compute_s + self.stall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """A limit that a plan breaks. ``where`` names the device, or those on one machine."""

    what: Literal["RAM", "VRAM", "disk"]
    where: str
    needed_bytes: int
    limit_bytes: int

    @property
    def short_bytes(self) -> int:
        """Bytes that are missing."""
        return self.needed_bytes - self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan costs: ``tpot_s`` a token, ``ttft_s`` to the first one, ``period_s`` between tokens of all sequences.

    Prompts are computed ``chunk_rows`` rows at a time, of which a chunk takes ``prefill_chunk_s``.
    """

    tpot_s: float
    ttft_s: float
    period_s: float
    compute_s: float
    stall_s: float
    hop_s: float
    disk_s: float
    prefill_chunk_s: float
    chunk_rows: int
    devices: tuple[DevicePrediction, ...]
    short: tuple[Short, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together."""
        return 1 / self.period_s

    def exchange_s(self, answer_tokens: int) -> float:
        """Seconds of a request with an answer of that length."""
        return self.ttft_s + answer_tokens * self.tpot_s

    def objective_s(self, objective: Objective, answer_tokens: int) -> float:
        """The seconds that ``objective`` makes small."""
        match objective:
            case "latency":
                return self.tpot_s
            case "ttft":
                return self.ttft_s
            case "throughput":
                return self.period_s
            case "balanced":
                return self.exchange_s(answer_tokens)


@dataclass(frozen=True, slots=True)
class _Share:
    """What one device has under a plan: layers on CPU and GPU and streamed ones by kind, windows, streamed bytes and slots.

    ``output_bytes`` are those of the output matrix where it streams, else 0; they are in ``streamed_bytes`` too.
    """

    member: Member
    is_head: bool
    windows: int
    cpu: tuple[int, ...]
    gpu: tuple[int, ...]
    streamed: tuple[int, ...]
    streamed_bytes: int
    output_bytes: int
    streams_output: bool
    slots: int
    tail_gpu: int

    @property
    def streamed_layers(self) -> int:
        """How many layers stream."""
        return sum(self.streamed)

    def uses_gpu(self, plan: Plan) -> bool:
        """Whether anything of this device is on its GPU."""
        return any(self.gpu) or (self.is_head and plan.output_on_gpu)

    def step_s(self, plan: Plan) -> float:
        """Seconds a window costs besides its layers."""
        return self.member.step_s + (self.member.gpu_step_s if self.uses_gpu(plan) else 0.0)

    def output_s(self, plan: Plan) -> float:
        """Seconds of the output matrix."""
        if not self.is_head:
            return 0.0
        return self.member.gpu_output_s if plan.output_on_gpu else self.member.cpu_output_s

    def compute_s(self, phase: Phase, plan: Plan) -> float:
        """Seconds of all windows, the output matrix aside."""
        return _dot(self.cpu, phase.cpu) + _dot(self.gpu, phase.gpu) + self.windows * self.step_s(plan)

    def ahead_bytes(self, phase: Phase) -> int:
        """Bytes that are read ahead for a token or a chunk."""
        return _total(self.streamed, phase.ahead) + self.output_bytes

    def picked_bytes(self, phase: Phase) -> int:
        """Bytes that are read for it only when a router has picked."""
        return _total(self.streamed, phase.picked)

    def read_bytes(self, phase: Phase) -> int:
        """All that is read for it."""
        return self.ahead_bytes(phase) + self.picked_bytes(phase)

    def window_s(self, phase: Phase, plan: Plan, instance: Instance, output_s: float) -> float:
        """Seconds of all windows and of the output matrix, computing or waiting for the disk."""
        compute_s = self.compute_s(phase, plan) + output_s
        if not self.streamed_bytes:
            return compute_s
        if self.streams_output:
            output_s = 0.0  # reading goes on while it is computed
        rest_s = _dot(self.gpu, phase.gpu) + self.windows * self.step_s(plan) + output_s
        if self.is_head and len(plan.route) > 1:
            # Reading may go on behind the tail, so nothing of it is sure to add up.
            rest_s -= self.tail_gpu * max(phase.gpu) + self.step_s(plan) + output_s
        disk = self.member.disk_bytes_per_s
        passes = plan.rounds * self.slots
        held = passes * instance.slot_bytes + self.streams_output * plan.rounds * instance.output_excess_bytes
        layers = sum(count for count, size in zip(self.streamed, phase.ahead, strict=True) if size)
        waiting = max(self.ahead_bytes(phase) - held, (layers - passes) * phase.smallest_ahead)
        beside_s = rest_s + plan.rounds * phase.edge_s(disk) + waiting / disk
        return max(compute_s, beside_s) + self.picked_bytes(phase) / disk


def evaluate(plan: Plan, instance: Instance) -> Prediction:
    """What ``plan`` costs in ``instance``, and which limits it breaks. The heads of both are the same device."""
    assert plan.head == instance.devices[0].device
    shares = _shares(plan, instance)
    outputs = [share.output_s(plan) for share in shares]
    decode = [
        share.window_s(share.member.decode, plan, instance, out) for share, out in zip(shares, outputs, strict=True)
    ]
    prefill = [share.window_s(share.member.prefill, plan, instance, 0.0) for share in shares]
    read = [share.read_bytes(share.member.decode) for share in shares]
    disk = [size / share.member.disk_bytes_per_s for size, share in zip(read, shares, strict=True)]
    chunk_disk = [share.read_bytes(share.member.prefill) / share.member.disk_bytes_per_s for share in shares]
    hops, chunk_hops, occupied = _hops(plan, instance)
    hosts = _by_host(shares)
    disk_s = max(sum(disk[i] for i in host) for host in hosts)
    chunk_disk_s = max(sum(chunk_disk[i] for i in host) for host in hosts)
    tpot_s = max(sum(decode) + sum(hops), disk_s)
    chunk_s = max(sum(prefill) + chunk_hops, chunk_disk_s)
    busiest = max(sum(prefill[i] for i in host) for host in hosts)
    ttft_s = chunk_s + (instance.chunks - 1) * max(busiest, chunk_disk_s, occupied[1]) + sum(outputs)
    busy = max(sum(decode[i] for i in host) for host in hosts)
    period_s = max(tpot_s / instance.workload.sequences, busy, disk_s, occupied[0])
    ram, vram, short = _memory(plan, instance, shares, hosts)
    room = _room(shares, hosts, ram)
    slowest = max(range(len(shares)), key=lambda i: disk[i])
    compute = [share.compute_s(share.member.decode, plan) + out for share, out in zip(shares, outputs, strict=True)]
    late_s = max(0.0, disk_s - sum(decode) - sum(hops))
    return Prediction(
        tpot_s=tpot_s,
        ttft_s=ttft_s,
        period_s=period_s,
        compute_s=sum(compute),
        stall_s=sum(decode) - sum(compute) + late_s,
        hop_s=sum(hops),
        disk_s=disk_s,
        prefill_chunk_s=chunk_s,
        chunk_rows=instance.workload.chunk_rows,
        devices=tuple(
            DevicePrediction(
                device=share.member.name,
                windows=share.windows,
                layers=sum(share.cpu) + sum(share.gpu),
                gpu_layers=sum(share.gpu),
                resident_layers=sum(share.cpu) + sum(share.gpu) - share.streamed_layers,
                streamed_layers=share.streamed_layers,
                streams_output=share.streams_output,
                slots=share.slots,
                ram_bytes=ram[i],
                room_bytes=room[i],
                vram_bytes=vram[i],
                shard_bytes=_shard_bytes(plan, instance, share),
                disk_bytes_per_token=read[i],
                compute_s=compute[i],
                stall_s=decode[i] - compute[i] + (late_s if i == slowest else 0.0),
                hop_s=hops[i],
                disk_s=disk[i],
                prefill_s=prefill[i],
            )
            for i, share in enumerate(shares)
        ),
        short=short,
    )


def residency(plan: Plan, instance: Instance) -> Plan:
    """``plan`` with as little streaming as its memory needs, for a plan that was made without a thought of it.

    Each device streams just enough layers, evenly spread, and gives what memory is left to slots; the head streams the
    output matrix too where it cannot hold that with all layers streaming. The result may still break limits.
    """
    plan = replace(plan, streaming=())
    found = []
    for share in _shares(plan, instance):
        overflow = _ram_bytes(plan, instance, share) - share.member.ram_limit
        if overflow > 0:
            found += _least_streaming(plan, instance, share, overflow)
    return replace(plan, streaming=tuple(found))


def _least_streaming(plan: Plan, instance: Instance, share: _Share, overflow: int) -> list[Streaming]:
    """The least that frees ``overflow`` bytes, or all that can; nothing where there is too little to stream."""
    layers = [layer for _, window in plan.windows_of(share.member.name) for layer in cpu_layers(window)]
    sizes = [kind.size_bytes for kind in instance.kinds]
    ways = [(count, False) for count in range(MIN_SLOTS + 1, len(layers) + 1)]
    if share.is_head and not plan.output_on_gpu:
        ways += [(count, True) for count in range(MIN_SLOTS, len(layers) + 1)]

    def units(count: int, output: bool) -> tuple[int, ...]:
        return (*spread(layers, count), *([plan.layer_count] if output else []))

    for count, output in ways:
        outside = instance.model.output_bytes if output else 0
        least = overflow + ahead_bytes(instance.model, MIN_SLOTS, output=output)
        if count * instance.slot_bytes + outside < least:
            continue  # too few, whichever they are
        chosen = units(count, output)
        freed = outside + sum(sizes[instance.kind_of[layer]] for layer in chosen[:count])
        if freed >= least:
            slots = min(len(chosen) - 1, (freed - overflow) // instance.slot_bytes)
            return [Streaming(device=share.member.name, layers=chosen, slots=slots)]
    return [Streaming(device=share.member.name, layers=units(*ways[-1]), slots=MIN_SLOTS)] if ways else []


def unit_bytes(model: ModelProfile, unit: int) -> int:
    """Bytes of what a plan streams as ``unit``: a layer, or behind the last one the output matrix."""
    return model.layers[unit].size_bytes if unit < len(model.layers) else model.output_bytes


def cpu_layers(window: Window) -> range:
    """The layers of a window that the CPU computes: all but the last ``gpu_layers``."""
    return range(window.first, window.last - window.gpu_layers)


def spread(layers: Sequence[int], count: int) -> list[int]:
    """``count`` of ``layers`` at even distances."""
    return [layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count)]


def _shares(plan: Plan, instance: Instance) -> list[_Share]:
    members = {member.name: member for member in instance.members}
    return [_share(plan, instance, members[name]) for name in plan.devices]


def _share(plan: Plan, instance: Instance, member: Member) -> _Share:
    windows = [window for _, window in plan.windows_of(member.name)]
    streaming = plan.streaming_of(member.name)
    on_cpu = [layer for window in windows for layer in cpu_layers(window)]
    on_gpu = [layer for window in windows for layer in window.layers[len(cpu_layers(window)) :]]
    streams_output = member.name == plan.head and plan.streams_output
    streamed = [layer for layer in streaming.layers if layer < plan.layer_count]
    assert len(streaming.layers) > streams_output or not streaming.layers, "alone it would only be held anew"
    assert not streaming.layers or streaming.slots >= MIN_SLOTS
    assert not on_gpu or member.has_gpu
    assert member.has_gpu or member.name != plan.head or not plan.output_on_gpu
    assert plan.output_on_gpu or member.name != plan.head or not windows[-1].gpu_layers, (
        "llama.cpp puts the output there too"
    )
    return _Share(
        member=member,
        is_head=member.name == plan.head,
        windows=len(windows),
        cpu=_by_kind(on_cpu, instance),
        gpu=_by_kind(on_gpu, instance),
        streamed=_by_kind(streamed, instance),
        streamed_bytes=sum(unit_bytes(instance.model, layer) for layer in streaming.layers),
        output_bytes=instance.model.output_bytes if streams_output else 0,
        streams_output=streams_output,
        slots=streaming.slots,
        tail_gpu=windows[-1].gpu_layers,
    )


def _dot(counts: Sequence[int], seconds: Sequence[float]) -> float:
    return sum(n * s for n, s in zip(counts, seconds, strict=True))


def _total(counts: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(n * size for n, size in zip(counts, sizes, strict=True))


def _by_kind(layers: Sequence[int], instance: Instance) -> tuple[int, ...]:
    counts = [0] * len(instance.kinds)
    for layer in layers:
        counts[instance.kind_of[layer]] += 1
    return tuple(counts)


def _by_host(shares: Sequence[_Share]) -> list[list[int]]:
    hosts: dict[str, list[int]] = {}
    for i, share in enumerate(shares):
        hosts.setdefault(share.member.profile.host, []).append(i)
    return list(hosts.values())


def _hops(plan: Plan, instance: Instance) -> tuple[list[float], float, tuple[float, float]]:
    """Seconds of each device's hops for a token; of all for a chunk; of the busiest link or the air, too."""
    index = {device.device: i for i, device in enumerate(instance.devices)}
    order = [index[name] for name in plan.devices]
    if len(order) == 1:
        return [0.0], 0.0, (0.0, 0.0)
    pairs = list(zip(order, [*order[1:], order[0]], strict=True))
    rows, rounds = instance.members[0].prefill.rows, plan.rounds
    decode = [rounds * instance.hops_s[a][b] for a, b in pairs]
    chunk = math.fsum(rounds * instance.chunk_hops_s[a][b] for a, b in pairs)
    one = rounds * instance.occupied_s(order)
    return decode, chunk, (one, rows * one)


def _weights(counts: Sequence[int], instance: Instance) -> int:
    return _total(counts, [kind.size_bytes for kind in instance.kinds])


def _kv(counts: Sequence[int], instance: Instance) -> int:
    return _total(counts, instance.kv_bytes)


def _ram_bytes(plan: Plan, instance: Instance, share: _Share) -> int:
    ahead = ahead_bytes(instance.model, share.slots, output=share.streams_output)
    total = _weights(share.cpu, instance) - share.streamed_bytes + ahead + _kv(share.cpu, instance)
    total += instance.runtime_bytes(share.windows)
    if share.is_head:
        total += instance.head_bytes(share.windows) + (0 if plan.output_on_gpu else instance.model.output_bytes)
    if share.member.shares_memory:
        total += _vram_bytes(plan, instance, share)
    return total


def _vram_bytes(plan: Plan, instance: Instance, share: _Share) -> int:
    if not share.uses_gpu(plan):
        return 0
    output = instance.model.output_bytes if share.is_head and plan.output_on_gpu else 0
    return _weights(share.gpu, instance) + _kv(share.gpu, instance) + instance.gpu_runtime_bytes(share.windows) + output


def _shard_bytes(plan: Plan, instance: Instance, share: _Share) -> int:
    """Bytes of layer files; the head needs none when it computes the model file alone."""
    if len(plan.route) == 1:
        return 0
    return _weights(share.cpu, instance) + _weights(share.gpu, instance)


def _room(shares: Sequence[_Share], hosts: Sequence[Sequence[int]], ram: Sequence[int]) -> list[int]:
    """RAM that each device has left; of what is left of a machine its devices get equal shares."""
    room = [0] * len(shares)
    for host in hosts:
        there = max(shares[i].member.profile.ram_available_bytes for i in host) - sum(ram[i] for i in host)
        for i in host:
            own = shares[i].member.ram_limit - ram[i]
            room[i] = max(0, own if len(host) == 1 else min(own, there // len(host)))
    return room


def _memory(
    plan: Plan, instance: Instance, shares: Sequence[_Share], hosts: Sequence[Sequence[int]]
) -> tuple[list[int], list[int], tuple[Short, ...]]:
    ram = [_ram_bytes(plan, instance, share) for share in shares]
    vram = [_vram_bytes(plan, instance, share) for share in shares]
    disk = [_shard_bytes(plan, instance, share) for share in shares]
    short: list[Short] = []

    def check(what: Literal["RAM", "VRAM", "disk"], where: str, needed: int, limit: int) -> None:
        if needed > limit:
            short.append(Short(what=what, where=where, needed_bytes=needed, limit_bytes=limit))

    for i, share in enumerate(shares):
        check("RAM", share.member.name, ram[i], share.member.ram_limit)
        check("VRAM", share.member.name, vram[i], share.member.vram_limit)
        check("disk", share.member.name, disk[i], share.member.disk_limit)
    for host in hosts:
        if len(host) > 1:
            profiles = [shares[i].member.profile for i in host]
            where = " and ".join(profile.device for profile in profiles)
            check("RAM", where, sum(ram[i] for i in host), max(p.ram_available_bytes for p in profiles))
            vram_there = max(p.gpu.vram_available_bytes if p.gpu is not None else 0 for p in profiles)
            check("VRAM", where, sum(vram[i] for i in host), vram_there)
            check("disk", where, sum(disk[i] for i in host), max(p.disk.free_bytes for p in profiles))
    return ram, vram, tuple(short)
