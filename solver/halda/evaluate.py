"""The cost of a plan: the one evaluator by which every plan is judged, whatever made it.

Each device takes the time in which a token's windows compute or wait for its disk (``streaming.py``), so a token takes

    TPOT = max(sum of V_m + hops, read time of the slowest disk),

and more where a disk cannot read all it has to between its stops.

Prefill is the same for a chunk of tokens. Chunks follow each other through the ring, so each after the first costs the
time that the busiest machine, disk or link needs for one, and the output matrix is computed once. Where layers stream
by expert, windows differ from round to round, and chunks are followed stop by stop (``ring_passes.py``). Devices on one
machine share cores and disk.
``tests.solver.simulator`` simulates the same ring event by event and reports where the two differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from halda.instance import Instance, Member, Phase, disk_of, grouped, sharing_cores
from halda.plan import Plan, Streaming, Window
from halda.profile import Workload
from halda.ring_passes import Hop, Stop, all_chunks
from halda.shared import SharedPlace, places_of
from halda.streaming import held_read_ahead, is_held

Objective = Literal["latency", "ttft", "throughput", "balanced"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("latency", "ttft", "throughput", "balanced")
_READ_AHEAD_TRIALS: Final = (0.25, 0.5, 0.75, 1.0)
"""Shares of the read-ahead with which nothing waits."""


class RequestWeights(NamedTuple):
    """Weights of a second of decode and of a prompt chunk in an objective, where times of devices add up."""

    decode: float
    prefill: float


def request_weights(objective: Objective, workload: Workload) -> RequestWeights:
    """Return the weights for ``objective``."""
    match objective:
        case "latency" | "throughput":
            return RequestWeights(1.0, 0.0)
        case "ttft":
            return RequestWeights(0.0, 1.0)
        case "balanced":
            return RequestWeights(float(workload.answer_tokens), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPrediction:
    """One GPU of a device under a plan: its layers, its used memory, and the memory that plans may use."""

    name: str
    id: str
    layers: int
    vram_bytes: int
    vram_limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrediction:
    """One device under a plan. Seconds and disk bytes are those of one token in decode.

    ``window_s`` is compute and stall; ``hop_s`` is of the device's outgoing hops; ``shard_bytes`` is on its disk. Where
    a disk's read time limits a token, the difference to the sum of the other times is the stall of the device that
    reads longest.
    """

    device: str
    windows: int
    layers: int
    gpu_layers: int
    cpu_experts: int
    streamed_bytes: int
    read_ahead_bytes: int
    ram_bytes: int
    vram_bytes: int
    shard_bytes: int
    disk_bytes_per_token: int
    compute_s: float
    stall_s: float
    hop_s: float
    disk_s: float
    prefill_s: float
    each_gpu: tuple[GpuPrediction, ...] = ()

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
    """The cost of a plan: ``tpot_s`` per token, ``ttft_s`` to the first one, ``period_s`` between tokens of all
    sequences.

    Prompts are computed in chunks of ``chunk_rows`` tokens, each in ``prefill_chunk_s``; a step has at most
    ``step_rows`` tokens.
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
    step_rows: int
    devices: tuple[DevicePrediction, ...]
    short: tuple[Short, ...]

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all sequences together."""
        return 1 / self.period_s

    def exchange_s(self, answer_tokens: int) -> float:
        """Return the seconds of a request with a response of ``answer_tokens``."""
        return self.ttft_s + answer_tokens * self.tpot_s

    def objective_s(self, objective: Objective, answer_tokens: int) -> float:
        """Return the seconds that ``objective`` minimises."""
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
    """What one device has under a plan: layers on CPU and GPU by kind, windows, and the streamed bytes of its CPU
    layers.

    GPU layers are as in ``Phase``: by kind on the first GPU, then on the second, and so on.
    """

    member: Member
    is_head: bool
    windows: int
    cpu: tuple[int, ...]
    gpu: tuple[int, ...]
    streamable_bytes: int
    streamed_bytes: int
    read_ahead_bytes: int
    tail_cpu: tuple[int, ...]
    tail_gpu: tuple[int, ...]
    experts_on_cpu: tuple[int, ...]
    """GPU layers whose experts are on the CPU."""
    tail_experts_on_cpu: tuple[int, ...]

    def of_gpu(self, counts: tuple[int, ...], gpu: int) -> tuple[int, ...]:
        """Return the items of ``counts`` on that GPU, by kind."""
        kinds = len(self.cpu)
        return counts[gpu * kinds : (gpu + 1) * kinds]

    def uses_gpu(self, plan: Plan, gpu: int) -> bool:
        """Whether any part of this device's share is on that GPU; the first GPU has the output matrix."""
        return any(self.of_gpu(self.gpu, gpu)) or (gpu == 0 and self.is_head and plan.output_on_gpu)

    @property
    def uses_cpu(self) -> bool:
        """Whether its CPU computes any part of a layer."""
        return any(self.cpu) or any(self.experts_on_cpu)

    def step_s(self, plan: Plan, phase: Phase) -> float:
        """Return the seconds of a window besides its layers: on the CPU if it has any of them, and on each GPU
        likewise."""
        on_gpus = sum(seconds * self.uses_gpu(plan, gpu) for gpu, seconds in enumerate(phase.gpu_steps_s))
        return self.member.step_s * self.uses_cpu + on_gpus

    def output_s(self, plan: Plan) -> float:
        """Return the seconds of the output matrix."""
        if not self.is_head:
            return 0.0
        return self.member.gpu_output_s if plan.output_on_gpu else self.member.cpu_output_s

    def compute_s(self, phase: Phase, plan: Plan) -> float:
        """Return the seconds of all windows without the output matrix."""
        layers_s = (
            _dot(self.cpu, phase.cpu) + _dot(self.gpu, phase.gpu) + _dot(self.experts_on_cpu, phase.experts_on_cpu)
        )
        return layers_s + self.windows * self.step_s(plan, phase)

    def read_bytes(self, phase: Phase) -> float:
        """Return the bytes read for a token or a chunk."""
        return phase.read_bytes(self.streamed_bytes, self.streamable_bytes)

    def token_s(self, plan: Plan, instance: Instance, output_s: float) -> float:
        """Return the seconds of a token's windows and of the output matrix, computing or waiting for the disk."""
        phase = self.member.decode
        compute_s, read = self.compute_s(phase, plan) + output_s, self.read_bytes(phase)
        if instance.by_expert:
            return compute_s + read / self.member.disk_bytes_per_s
        if self.has_long_stop(plan):
            return sum(self.stops_s(plan, output_s))
        return self._reading_s(phase, compute_s, self.rest_s(phase, plan, output_s), read, plan.rounds)

    def chunk_s(self, plan: Plan, instance: Instance, chunks: int = 1) -> tuple[float, float]:
        """Return the seconds of a prompt chunk, computing or waiting for the disk: of all windows but the tail, and of
        the tail.

        This is the average over ``chunks`` that follow each other without a pause.
        """
        phase, read, layers = self.member.prefill, self.read_bytes(self.member.prefill), sum(self.cpu)
        tail_s = self.tail_s(phase, plan) if self.is_head else 0.0
        windows_s, rest_s = self.compute_s(phase, plan) - tail_s, self.rest_s(phase, plan, 0.0)

        def reading_s(compute_s: float, rest_s: float, read: float, layers: int, stops: int) -> float:
            within = 2 * read - (layers + stops / chunks) * self.read_ahead_bytes
            return self._reading_s(phase, compute_s, rest_s, read, stops, max(0.0, within))

        if instance.by_expert:
            return windows_s + read / self.member.disk_bytes_per_s, tail_s
        if not read:
            return windows_s, tail_s
        if self.has_long_stop(plan):
            in_tail = sum(self.tail_cpu)
            of_tail = read * in_tail / layers
            return (
                reading_s(windows_s, rest_s, read - of_tail, layers - in_tail, plan.rounds),
                reading_s(tail_s, 0.0, of_tail, in_tail, 1),
            )
        return reading_s(windows_s + tail_s, rest_s, read, layers, plan.rounds) - tail_s, tail_s

    def _reading_s(
        self, phase: Phase, compute_s: float, rest_s: float, read: float, stops: int, within: float = 0.0
    ) -> float:
        """Return the seconds of ``stops`` stops that compute and read; layers wait for each other for ``within``
        bytes."""
        waiting, disk = read - stops * self.read_ahead_bytes, self.member.disk_bytes_per_s
        compute_s += self.slowed_s(read, stops) + within / disk
        if waiting <= 0:
            return compute_s
        return max(compute_s, rest_s + stops * phase.edge_s + waiting / disk)

    def picking_s(self, window: Window, plan: Plan, instance: Instance) -> float:
        """Return the seconds of a window for a chunk where layers stream by expert: computing, and reading the picked
        experts."""
        phase, in_ram = self.member.prefill, _by_kind(window.in_ram, instance)
        read = self.read_bytes(phase) * _total(in_ram, instance.streamable) / max(1, self.streamable_bytes)
        return self.window_s(window, phase, plan, instance) + read / self.member.disk_bytes_per_s

    def window_s(self, window: Window, phase: Phase, plan: Plan, instance: Instance) -> float:
        """Return the seconds that a window computes."""
        counts = _counts(window, self.member, instance)
        layers_s = _dot(counts.cpu, phase.cpu) + _dot(counts.gpu, phase.gpu)
        return layers_s + _dot(counts.experts_on_cpu, phase.experts_on_cpu) + self.step_s(plan, phase)

    def has_long_stop(self, plan: Plan) -> bool:
        """Whether one of a token's stops here has the tail in addition to a window."""
        return self.is_head and plan.rounds > 1

    def stops_s(self, plan: Plan, output_s: float) -> tuple[float, float]:
        """Return the seconds of the head's stop with the tail and the next token's first window, and of its other stops
        together.

        Only the number of layers counts: the other windows are taken as equally long.
        """
        phase, others, layers, in_tail = self.member.decode, plan.rounds - 1, sum(self.cpu), sum(self.tail_cpu)
        read, tail_s = self.read_bytes(phase), self.tail_s(phase, plan)
        window_s = (self.compute_s(phase, plan) - tail_s) / plan.rounds
        if not read:
            return tail_s + output_s + window_s, others * window_s
        of_tail = read * in_tail / layers
        of_window = (read - of_tail) / plan.rounds
        rest_s = self.rest_s(phase, plan, output_s) / plan.rounds
        other_s = self._reading_s(phase, window_s, rest_s, of_window, 1)
        first_s = self._reading_s(phase, tail_s + output_s + window_s, rest_s, of_tail + of_window, 1)
        return max(first_s, tail_s + output_s + other_s), others * other_s

    def slowed_s(self, read: float, stops: int) -> float:
        """Return the seconds that bytes of ``read`` read during computing add to it, in ``stops`` stops."""
        return self.member.slows_s_per_byte * (
            max(0.0, read - stops * self.read_ahead_bytes) if self.member.has_own_host else read
        )

    def rest_s(self, phase: Phase, plan: Plan, output_s: float) -> float:
        """Return the seconds of computing besides the CPU's layers that certainly add to reading."""
        rest_s = _dot(self.gpu, phase.gpu) + self.windows * self.step_s(plan, phase) + output_s
        if self.is_head and len(plan.route) > 1:
            # Reading may continue after the tail, so none of the tail certainly adds up.
            rest_s -= sum(self.tail_gpu) * max(phase.gpu) + self.step_s(plan, phase) + output_s
        return rest_s

    def tail_s(self, phase: Phase, plan: Plan) -> float:
        """Return the seconds of the head's last window, 0 if it is its only one."""
        if len(plan.route) == 1:
            return 0.0
        layers_s = (
            _dot(self.tail_cpu, phase.cpu)
            + _dot(self.tail_gpu, phase.gpu)
            + _dot(self.tail_experts_on_cpu, phase.experts_on_cpu)
        )
        return layers_s + self.step_s(plan, phase)


def evaluate(plan: Plan, instance: Instance) -> Prediction:
    """Return the cost of ``plan`` in ``instance`` and the limits it breaks. The heads of both are the same device."""
    assert plan.head == instance.devices[0].device
    if plan.groups:
        return _of_groups(plan, instance)
    shares = _shares(plan, instance)
    outputs = [share.output_s(plan) for share in shares]
    decode = [share.token_s(plan, instance, out) for share, out in zip(shares, outputs, strict=True)]
    prefill = [share.chunk_s(plan, instance) for share in shares]
    read = [share.read_bytes(share.member.decode) for share in shares]
    disk = [size / share.member.disk_bytes_per_s for size, share in zip(read, shares, strict=True)]
    hops, chunk_hops, occupied = _hops(plan, instance)
    hosts, disks = _by_host(shares), _by_disk(shares)
    disk_s = max(sum(disk[i] for i in here) for here in disks)
    between = _waiting_between(plan, instance, shares, decode, sum(hops), outputs[0])
    token = [window + waiting for window, waiting in zip(decode, between, strict=True)]
    tpot_s = max(sum(token) + sum(hops), disk_s)
    chunk_s, ttft_s = (
        _prompt_s(plan, instance, shares, prefill, chunk_hops, occupied[1], chunks) for chunks in (1, instance.chunks)
    )
    ttft_s += sum(outputs)
    busy = max(sum(decode[i] for i in here) for here in _by_processor(shares))
    period_s = max(tpot_s / instance.workload.sequences, busy, disk_s, occupied[0])
    ram, vram, short = _memory(plan, instance, shares, hosts, disks)
    slowest = max(range(len(shares)), key=lambda i: disk[i])
    compute = [
        min(window, share.compute_s(share.member.decode, plan) + out + share.slowed_s(size, plan.rounds))
        for window, share, out, size in zip(decode, shares, outputs, read, strict=True)
    ]
    late_s = max(0.0, disk_s - sum(token) - sum(hops))
    return Prediction(
        tpot_s=tpot_s,
        ttft_s=ttft_s,
        period_s=period_s,
        compute_s=sum(compute),
        stall_s=sum(token) - sum(compute) + late_s,
        hop_s=sum(hops),
        disk_s=disk_s,
        prefill_chunk_s=chunk_s,
        chunk_rows=instance.workload.chunk_rows,
        step_rows=instance.workload.step_rows,
        devices=tuple(
            DevicePrediction(
                device=share.member.name,
                windows=share.windows,
                layers=sum(share.cpu) + sum(share.gpu),
                gpu_layers=sum(share.gpu),
                cpu_experts=sum(share.experts_on_cpu),
                streamed_bytes=share.streamed_bytes,
                read_ahead_bytes=share.read_ahead_bytes,
                ram_bytes=ram[i],
                vram_bytes=sum(vram[i]),
                shard_bytes=_shard_bytes(plan, instance, share),
                disk_bytes_per_token=round(read[i]),
                compute_s=compute[i],
                stall_s=token[i] - compute[i] + (late_s if i == slowest else 0.0),
                hop_s=hops[i],
                disk_s=disk[i],
                prefill_s=sum(prefill[i]),
                each_gpu=_each_gpu(share, vram[i]),
            )
            for i, share in enumerate(shares)
        ),
        short=short,
    )


def _of_groups(plan: Plan, instance: Instance) -> Prediction:
    """Return the cost of a plan with groups: the cost with one device in the place of each, and what each rank
    holds."""
    places, shared = places_of(instance.offloading(plan), plan.groups)
    found = evaluate(_of_places(plan, places, shared), places)
    exchange_s = sum(place.exchange_s(plan) for place in shared.values())
    of_place = {each.device: each for each in found.devices}
    devices = list[DevicePrediction]()
    for name in plan.places:
        if name in shared:
            devices += _ranks(plan, shared[name], of_place[name])
        else:
            devices.append(of_place[name])
    short = [each for each in found.short if each.where not in shared]
    return replace(
        found,
        compute_s=found.compute_s - exchange_s,
        hop_s=found.hop_s + exchange_s,
        devices=tuple(devices),
        short=(*short, *_short_ranks(plan, instance, devices)),
    )


def _of_places(plan: Plan, places: Instance, shared: Mapping[str, SharedPlace]) -> Plan:
    """Return ``plan`` with a device in the place of each group, which streams for as long as the group's ranks do."""
    streaming = [each for each in plan.streaming if not plan.group_of(each.device)]
    found = replace(plan, groups=(), streaming=tuple(streaming))
    for share in _shares(found, places):
        if (place := shared.get(share.member.name)) is not None:
            own, maximum = place.streaming_of(plan), max(0, share.streamable_bytes - places.pool_bytes)
            streaming.append(replace(own, streamed_bytes=min(own.streamed_bytes, maximum)))
    return replace(found, streaming=tuple(each for each in streaming if each.streamed_bytes))


def _ranks(plan: Plan, place: SharedPlace, found: DevicePrediction) -> list[DevicePrediction]:
    """Return the ranks of ``place``, which is one device in ``found``: the first rank has its hops and exchanges."""
    exchange_s, made = place.exchange_s(plan), list[DevicePrediction]()
    for number, (alone, own, share) in enumerate(_of_ranks(plan, place)):
        output_s, read, vram = (
            share.output_s(alone),
            share.read_bytes(share.member.decode),
            _vram_bytes(alone, own, share),
        )
        compute_s = share.compute_s(share.member.decode, alone) + output_s
        made.append(
            replace(
                found,
                device=share.member.name,
                gpu_layers=sum(share.gpu),
                streamed_bytes=share.streamed_bytes,
                read_ahead_bytes=share.read_ahead_bytes,
                disk_bytes_per_token=round(read),
                disk_s=read / share.member.disk_bytes_per_s,
                compute_s=compute_s,
                stall_s=max(0.0, share.token_s(alone, own, output_s) - compute_s),
                hop_s=0.0 if number else found.hop_s + exchange_s,
                prefill_s=share.compute_s(share.member.prefill, alone),
                ram_bytes=_ram_bytes(alone, own, share),
                vram_bytes=sum(vram),
                shard_bytes=_layer_files(own, share) + share.is_head * own.model.output_bytes,
                each_gpu=_each_gpu(share, vram),
            )
        )
    return made


def _short_ranks(plan: Plan, instance: Instance, devices: Sequence[DevicePrediction]) -> list[Short]:
    """Return the ranks that lack memory, and the machines that lack RAM for several devices of which one is a rank."""
    found, uses = list[Short](), {each.device: each for each in devices}
    limits = {member.name: member for member in instance.members}
    for ranks in plan.groups:
        for name in (rank.device for rank in ranks):
            vram_limit = next(iter(limits[name].vram_limits), 0)
            needs: tuple[tuple[Literal["RAM", "VRAM", "disk"], int, int], ...] = (
                ("RAM", uses[name].ram_bytes, limits[name].ram_limit),
                ("VRAM", uses[name].vram_bytes, vram_limit),
                ("disk", uses[name].shard_bytes, limits[name].disk_limit),
            )
            for what, needed, limit in needs:
                if needed > limit:
                    found.append(Short(what=what, where=name, needed_bytes=needed, limit_bytes=limit))
    for host in instance.hosts:
        here = [instance.devices[i] for i in host if instance.devices[i].device in uses]
        needed = sum(uses[each.device].ram_bytes for each in here)
        limit = max((each.ram_available_bytes for each in here), default=0)
        if any(plan.group_of(each.device) for each in here) and len(here) > 1 and needed > limit:
            where = " and ".join(each.device for each in here)
            found.append(Short(what="RAM", where=where, needed_bytes=needed, limit_bytes=limit))
    return found


def _each_gpu(share: _Share, vram: Sequence[int]) -> tuple[GpuPrediction, ...]:
    return tuple(
        GpuPrediction(
            name=gpu.name,
            id=gpu.id,
            layers=sum(share.of_gpu(share.gpu, i)),
            vram_bytes=vram[i],
            vram_limit_bytes=share.member.vram_limits[i],
        )
        for i, gpu in enumerate(share.member.profile.gpus)
    )


def prompt_row_s(plan: Plan, instance: Instance, rows: float) -> dict[str, float]:
    """Return the seconds per token that each device of ``plan`` computes for a first prompt chunk of ``rows``
    tokens."""
    asked = replace(
        instance, workload=replace(instance.workload, prompt_tokens=math.ceil(rows), chunk_rows=math.ceil(rows))
    )
    return {share.member.name: share.compute_s(share.member.prefill, plan) / rows for share in _shares(plan, asked)}


def _waiting_between(
    plan: Plan,
    instance: Instance,
    shares: Sequence[_Share],
    windows_s: Sequence[float],
    hops_s: float,
    output_s: float,
) -> list[float]:
    """Return how long each device waits besides ``windows_s`` because reading ahead needs room: at most one device
    waits.

    All rounds but one pass between the beginning of its first stop and the end of its last one, and its disk has to
    read everything except what was held before. The stop with the tail is outside this time: by then all permitted
    read-ahead is in memory.
    """
    waiting, others = [0.0] * len(shares), plan.rounds - 1
    if not others or instance.by_expert:
        return waiting
    first_s, other_s = shares[0].stops_s(plan, output_s)
    ring_passes_s = others * (sum(windows_s) + hops_s - first_s) + other_s
    for i, share in enumerate(shares[1:], 1):
        late = share.read_bytes(share.member.decode) - share.read_ahead_bytes
        waiting[i] = late / share.member.disk_bytes_per_s - (ring_passes_s + windows_s[i]) / plan.rounds
    maximum = max(range(len(shares)), key=lambda i: waiting[i])
    return [max(0.0, seconds) if i == maximum else 0.0 for i, seconds in enumerate(waiting)]


def _prompt_s(
    plan: Plan,
    instance: Instance,
    shares: Sequence[_Share],
    chunk_s: Sequence[tuple[float, float]],
    hops_s: float,
    occupied_s: float,
    chunks: int,
) -> float:
    """Return the seconds in which ``chunks`` prompt chunks pass the ring, without the output matrix."""
    if instance.by_expert and len(plan.route) > 1:
        return _picking_prompt_s(plan, instance, shares, chunks)
    rounds, tail_s = plan.rounds, chunk_s[0][1]
    ring_pass_s = (sum(windows_s for windows_s, _ in chunk_s) + hops_s) / rounds
    stops = [windows_s / rounds for windows_s, _ in chunk_s]
    following = [share.chunk_s(plan, instance, chunks) for share in shares] if chunks > 1 else chunk_s
    trains = [chunks * windows_s / rounds for windows_s, _ in following]
    once_more_s = max(following[0][1], occupied_s / rounds)
    ring_passes_s, last_s, minimum = max(ring_pass_s, chunks * occupied_s / rounds), (chunks - 1) * once_more_s, 0.0
    reading_s = [0.0] * len(shares)
    for host in _by_processor(shares):
        stop_s = sum(stops[i] for i in host)
        train_s = sum(trains[i] for i in host)
        minimum = max(minimum, rounds * train_s + chunks * following[0][1] if 0 in host else 0.0)
        for i in host:
            share, phase = shares[i], shares[i].member.prefill
            read, disk = chunks * share.read_bytes(phase), share.member.disk_bytes_per_s
            reading_s[i] = max(0.0, read - share.read_ahead_bytes) / disk
            if not read or instance.by_expert:
                continue
            # Between the beginning of its first stop and the end of its last one a disk reads everything that was not
            # in memory.
            around_s = ring_pass_s - stops[i] + tail_s if i else 0.0
            within_s = (2 * read - (chunks * sum(share.cpu) + 1) * share.read_ahead_bytes) / disk
            all_read_s = phase.edge_s + (read - share.read_ahead_bytes) / disk
            minimum = max(minimum, around_s + max(all_read_s, chunks * _dot(share.cpu, phase.cpu) + within_s))
            if i:
                late_s = (read / rounds - share.read_ahead_bytes) / disk
                train_s = max(train_s, chunks * share.rest_s(phase, plan, 0.0) / rounds + late_s)
        ring_passes_s, last_s = max(ring_passes_s, train_s), max(last_s, train_s - stop_s)
    minimum = max(minimum, *(sum(reading_s[i] for i in here) for here in _by_disk(shares)))
    return max(minimum, (rounds - 1) * ring_passes_s + ring_pass_s + tail_s + last_s)


def _picking_prompt_s(plan: Plan, instance: Instance, shares: Sequence[_Share], chunks: int) -> float:
    """Return the same where layers stream by expert: without read-ahead each window takes its own time."""
    count, index = len(shares), {device.device: i for i, device in enumerate(instance.devices)}
    *windows, tail = plan.route
    tail_s = shares[0].picking_s(tail, plan, instance)
    seconds, stop = [0.0] * (plan.rounds * count), 0
    for window in windows:
        while plan.devices[stop % count] != window.device:  # the tail has all of the head's last window
            stop += 1
        seconds[stop] = shares[stop % count].picking_s(window, plan, instance)
        stop += 1
    host_of = {i: host for host in _by_processor(shares) for i in host}
    ring_passes = [
        [Stop(ring_pass[i], sum(ring_pass[other] for other in host_of[i])) for i in range(count)]
        for ring_pass in (seconds[first : first + count] for first in range(0, len(seconds), count))
    ]
    ring = [index[name] for name in plan.devices]
    hops = [
        Hop(instance.chunk_hops_s[a][b], occupied_s)
        for a, b, occupied_s in zip(ring, [*ring[1:], ring[0]], instance.chunk_links_s(ring), strict=True)
    ]
    all_s: float = all_chunks(ring_passes, hops, tail_s, chunks, max)
    return all_s


def residency(
    plan: Plan, instance: Instance, value: Callable[[Prediction], float] = lambda prediction: prediction.tpot_s
) -> Plan:
    """Return ``plan`` with the streaming that its memory needs, for a plan made without regard to streaming.

    The read-ahead is the minimum, or the larger amount that minimises ``value`` among a few trials. The result may
    still break limits.
    """
    bare = replace(plan, streaming=())
    over = {
        share.member.name: _ram_bytes(bare, instance, share) - share.member.ram_limit
        for share in _shares(bare, instance)
    }
    if max(over.values()) <= 0:
        return bare
    tried = [stream(bare, instance, {}), stream(bare, instance, {}, wide=True)]
    if plan.rounds > 1 and not instance.by_expert:
        for part in _READ_AHEAD_TRIALS:
            more = {name: int(part * size / (plan.rounds - 1)) for name, size in over.items() if size > 0}
            tried.append(stream(bare, instance, more))

    def judged(plan: Plan) -> tuple[int, float]:
        prediction = evaluate(plan, instance)
        return sum(short.short_bytes for short in prediction.short), value(prediction)

    return min(tried, key=judged)


def stream(
    plan: Plan,
    instance: Instance,
    read_ahead: Mapping[str, int],
    minimum: Mapping[str, int] | None = None,
    *,
    wide: bool = False,
) -> Plan:
    """Return ``plan`` with each device streaming what its memory does not hold, and at least ``minimum``.

    The read-ahead is ``read_ahead`` by device name, or the engine's minimum where that is more, or two parts if
    ``wide``. Everything streams where that is not enough.
    """
    plan, found = replace(plan, streaming=()), []
    for alone, own, share in _with_ranks(plan, instance):
        name = share.member.name
        over = _ram_bytes(alone, own, share) - share.member.ram_limit
        wanted = (minimum or {}).get(name, 0)
        if share.member.offloads_prefill or (over <= 0 and not wanted):
            continue
        steps, maximum = share.member.read_ahead_steps, share.streamable_bytes
        for step in steps:
            asked = step.wide_bytes if wide else read_ahead.get(name, 0)
            held = 0 if own.by_expert else held_read_ahead(steps, step, asked)
            streamed = max(over + own.reserve_bytes + held, wanted)
            if step.holds(streamed, maximum):
                break
        streamed = min(streamed, maximum - own.pool_bytes)
        if streamed > held + own.reserve_bytes:
            found.append(Streaming(device=name, streamed_bytes=streamed, read_ahead_bytes=held))
    return replace(plan, streaming=tuple(found))


def regular_tails(rounds: int) -> tuple[int, int]:
    """Return by how many layers the tail of a streaming head may be longer than its other windows: minimum, maximum.

    So the head can have any number of layers, and none of its stops is much longer than the others.
    """
    return -(rounds // 2), (rounds + 1) // 2


def is_regular(plan: Plan, instance: Instance) -> bool:
    """Whether an integer program could have made ``plan``: only such plans are searched.

    With several rounds the tail of a streaming head has about as many CPU layers as each of its windows; and the
    read-ahead is what some step needs, or wide.
    """
    if instance.by_expert:
        return True
    for share in _shares(plan, instance):
        steps, streamable = share.member.read_ahead_steps, share.streamable_bytes
        if share.streamed_bytes and not is_held(steps, share.streamed_bytes, streamable, share.read_ahead_bytes):
            return False
    if plan.rounds == 1 or not plan.streaming_of(plan.head).streamed_bytes:
        return True
    minimum, maximum = regular_tails(plan.rounds)
    return minimum <= len(plan.route[-1].on_cpu) - len(plan.route[0].on_cpu) <= maximum


def route_s(plan: Plan, instance: Instance) -> list[float]:
    """Return the seconds that each window of the route computes for a token, the last one with the output matrix."""
    shares, seconds = {share.member.name: share for share in _shares(plan, instance)}, list[float]()
    for window in plan.route:
        share = shares[window.device]
        seconds.append(share.window_s(window, share.member.decode, plan, instance))
    seconds[-1] += shares[plan.head].output_s(plan)
    return seconds


def _shares(plan: Plan, instance: Instance) -> list[_Share]:
    instance = instance.offloading(plan)
    if plan.groups:
        (instance, _), plan = places_of(instance, plan.groups), replace(plan, groups=())
    members = {member.name: member for member in instance.members}
    return [_share(plan, instance, members[name]) for name in plan.places]


def _with_ranks(plan: Plan, instance: Instance) -> Iterator[tuple[Plan, Instance, _Share]]:
    """Yield each device's share, with its plan and its question; a rank's question is about its share of the model."""
    _, shared = places_of(instance.offloading(plan), plan.groups) if plan.groups else (instance, {})
    for share in _shares(plan, instance):
        if (place := shared.get(share.member.name)) is None:
            yield plan, instance, share
        else:
            yield from _of_ranks(plan, place)


def _of_ranks(plan: Plan, place: SharedPlace) -> Iterator[tuple[Plan, Instance, _Share]]:
    """Yield the share of each rank of ``place``, as ``_with_ranks`` does."""
    for rank, own in zip(place.ranks, place.own, strict=True):
        alone = plan.of_rank(rank.device)
        yield alone, own, _share(alone, own, own.members[0])


def _share(plan: Plan, instance: Instance, member: Member) -> _Share:
    windows = [window for _, window in plan.windows_of(member.name)]
    streaming = plan.streaming_of(member.name)
    counts = [_counts(window, member, instance) for window in windows]
    cpu, gpu, experts_on_cpu = (_summed(each) for each in zip(*counts, strict=True))
    kinds = len(instance.kinds)
    in_ram = _summed((cpu, *(experts_on_cpu[at : at + kinds] for at in range(0, len(experts_on_cpu), kinds))))
    streamable = _total(in_ram, instance.streamable)
    assert streaming.streamed_bytes <= max(0, streamable - instance.pool_bytes)
    assert not any(gpu) or member.has_gpu
    assert member.has_gpu or member.name != plan.head or not plan.output_on_gpu
    assert plan.output_on_gpu or member.name != plan.head or not windows[-1].gpu_layers, (
        "llama.cpp puts the output there too"
    )
    return _Share(
        member=member,
        is_head=plan.output_place(member.name) != "none",
        windows=len(windows),
        cpu=cpu,
        gpu=gpu,
        streamable_bytes=streamable,
        streamed_bytes=streaming.streamed_bytes,
        read_ahead_bytes=streaming.read_ahead_bytes,
        tail_cpu=counts[-1].cpu,
        tail_gpu=counts[-1].gpu,
        experts_on_cpu=experts_on_cpu,
        tail_experts_on_cpu=counts[-1].experts_on_cpu,
    )


class _Counts(NamedTuple):
    """Layers of a window by kind, as in ``_Share``."""

    cpu: tuple[int, ...]
    gpu: tuple[int, ...]
    experts_on_cpu: tuple[int, ...]


def _counts(window: Window, member: Member, instance: Instance) -> _Counts:
    gpus = max(1, member.gpu_count)
    key = window.first, window.last, window.gpu_layers, window.cpu_experts, window.other_gpus, gpus
    found: _Counts | None = instance.window_counts.get(key)
    if found is None:
        on_gpu, experts = (_by_gpu(window, each, gpus, instance) for each in (window.on_gpu, window.experts_on_cpu))
        found = instance.window_counts[key] = _Counts(_by_kind(window.on_cpu, instance), on_gpu, experts)
    return found


def _dot(counts: Sequence[int], seconds: Sequence[float]) -> float:
    return sum(n * s for n, s in zip(counts, seconds, strict=True))


def _total(counts: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(n * size for n, size in zip(counts, sizes, strict=True))


def _by_kind(layers: range, instance: Instance) -> tuple[int, ...]:
    if not layers:
        return (0,) * len(instance.kinds)
    return tuple(before[layers.stop] - before[layers.start] for before in instance.kinds_before)


def _by_gpu(window: Window, layers: range, gpus: int, instance: Instance) -> tuple[int, ...]:
    """Return ``layers`` of ``window``, all on GPUs, by kind for each of ``gpus`` GPUs."""
    on_each = window.on_each_gpu
    assert len(on_each) <= gpus
    both = (range(max(here.start, layers.start), min(here.stop, layers.stop)) for here in on_each)
    found = [_by_kind(here, instance) for here in both]
    missing = (gpus - len(on_each)) * len(instance.kinds)
    return (*(count for counts in found for count in counts), *(0,) * missing)


def _summed(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return rows[0] if len(rows) == 1 else tuple(map(sum, zip(*rows, strict=True)))


def _by_host(shares: Sequence[_Share]) -> tuple[tuple[int, ...], ...]:
    return grouped(share.member.profile.host for share in shares)


def _by_processor(shares: Sequence[_Share]) -> tuple[tuple[int, ...], ...]:
    return sharing_cores([share.member.profile for share in shares])


def _by_disk(shares: Sequence[_Share]) -> tuple[tuple[int, ...], ...]:
    return grouped(disk_of(share.member.profile) for share in shares)


def _hops(plan: Plan, instance: Instance) -> tuple[list[float], float, tuple[float, float]]:
    """Return seconds of each device's hops for a token, of all hops for a chunk, and of the busiest link or the air for
    both."""
    index = {device.device: i for i, device in enumerate(instance.devices)}
    order = [index[name] for name in plan.devices]
    if len(order) == 1:
        return [0.0], 0.0, (0.0, 0.0)
    pairs = list(zip(order, [*order[1:], order[0]], strict=True))
    rows, ring_passes = instance.members[0].prefill.rows, _ring_passes(plan)
    decode = [ring_passes * instance.hops_s[a][b] for a, b in pairs]
    chunk = math.fsum(ring_passes * instance.chunk_hops_s[a][b] for a, b in pairs)
    one = ring_passes * instance.occupied_s(order)
    return decode, chunk, (one, rows * one)


def _ring_passes(plan: Plan) -> int:
    """Return how often a token goes around: one round less where the tail has all of the head's last window, and the
    only worker has two windows in a row."""
    return sum(window.device == plan.head for window in plan.route[:-1])


def _weights(counts: Sequence[int], instance: Instance) -> int:
    return _total(counts, instance.size_bytes)


def _kv(counts: Sequence[int], instance: Instance) -> int:
    return _total(counts, instance.kv_bytes)


def _ram_bytes(plan: Plan, instance: Instance, share: _Share) -> int:
    experts = (share.of_gpu(share.experts_on_cpu, gpu) for gpu in range(share.member.gpu_count))
    total = _weights(share.cpu, instance) + _kv(share.cpu, instance)
    total += sum(_total(counts, instance.expert_bytes) for counts in experts)
    of_gpus = (share.of_gpu(share.gpu, gpu) for gpu in range(share.member.gpu_count))
    total += sum(_total(counts, instance.checkpoint_bytes) for counts in (share.cpu, *of_gpus))
    if share.streamed_bytes:
        total += share.read_ahead_bytes + instance.reserve_bytes - share.streamed_bytes
    total += instance.runtime_bytes(share.windows)
    if share.is_head:
        total += instance.head_bytes(share.windows) + (0 if plan.output_on_gpu else instance.model.output_bytes)
    in_ram: int = sum(share.member.in_ram(_vram_bytes(plan, instance, share)))
    return total + in_ram


def _vram_bytes(plan: Plan, instance: Instance, share: _Share) -> list[int]:
    """Return the used bytes of each GPU."""
    return [_bytes_of_gpu(plan, instance, share, gpu) for gpu in range(share.member.gpu_count)]


def _bytes_of_gpu(plan: Plan, instance: Instance, share: _Share, gpu: int) -> int:
    offloads = share.member.offloading_gpu == gpu
    if not (share.uses_gpu(plan, gpu) or offloads):
        return 0
    besides = instance.gpu_besides(share.member, gpu, share.windows)
    if share.is_head and plan.output_on_gpu:
        besides += instance.model.output_bytes * (gpu == 0)
    elif share.is_head and offloads:
        besides += instance.output_copy_bytes
    layers, experts = share.of_gpu(share.gpu, gpu), share.of_gpu(share.experts_on_cpu, gpu)
    weights = _weights(layers, instance) - _total(experts, instance.expert_bytes)
    return weights + _kv(layers, instance) + besides


def _shard_bytes(plan: Plan, instance: Instance, share: _Share) -> int:
    """Return bytes of layer files; 0 for a head that computes the whole model from its file."""
    return 0 if len(plan.route) == 1 else _layer_files(instance, share)


def _layer_files(instance: Instance, share: _Share) -> int:
    on_gpus = sum(_weights(share.of_gpu(share.gpu, gpu), instance) for gpu in range(share.member.gpu_count))
    return _weights(share.cpu, instance) + on_gpus


def _memory(
    plan: Plan,
    instance: Instance,
    shares: Sequence[_Share],
    hosts: Sequence[Sequence[int]],
    disks: Sequence[Sequence[int]],
) -> tuple[list[int], list[list[int]], tuple[Short, ...]]:
    ram = [_ram_bytes(plan, instance, share) for share in shares]
    vram = [_vram_bytes(plan, instance, share) for share in shares]
    disk = [_shard_bytes(plan, instance, share) for share in shares]
    short: list[Short] = []

    def check(what: Literal["RAM", "VRAM", "disk"], where: str, needed: int, limit: int) -> None:
        if needed > limit:
            short.append(Short(what=what, where=where, needed_bytes=needed, limit_bytes=limit))

    for i, share in enumerate(shares):
        check("RAM", share.member.name, ram[i], share.member.ram_limit)
        for gpu, limit in enumerate(share.member.vram_limits):
            check("VRAM", share.member.gpu_name(gpu), vram[i][gpu], limit)
        check("disk", share.member.name, disk[i], share.member.disk_limit)
    for host in hosts:
        if len(host) > 1:
            profiles = [shares[i].member.profile for i in host]
            where = " and ".join(profile.device for profile in profiles)
            check("RAM", where, sum(ram[i] for i in host), max(p.ram_available_bytes for p in profiles))
    place = {share.member.name: i for i, share in enumerate(shares)}
    for group in instance.vram_groups:
        there = [(place[name], gpu) for m, gpu in group if (name := instance.devices[m].device) in place]
        limits = [shares[i].member.profile.gpus[gpu].vram_available_bytes for i, gpu in there]
        where = " and ".join(shares[i].member.gpu_name(gpu) for i, gpu in there)
        if len(there) > 1:
            check("VRAM", where, sum(vram[i][gpu] for i, gpu in there), max(limits))
    for here in disks:
        if len(here) > 1:
            profiles = [shares[i].member.profile for i in here]
            where = " and ".join(profile.device for profile in profiles)
            check("disk", where, sum(disk[i] for i in here), max(p.disk.free_bytes for p in profiles))
    return ram, vram, tuple(short)
