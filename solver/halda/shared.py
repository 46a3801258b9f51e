"""Groups as places of a question: the joint cost of devices that share each layer, as if they were one device.

Each rank computes its share of a layer's attention and feed-forward, and waits twice for the sums of all ranks. So a
layer takes the slowest rank's attention time, the slowest rank's feed-forward time, and two exchanges. A group can hold
what its tightest rank can hold of its share. Streamed weights are read on all ranks' disks concurrently, and the group
waits for the slowest. A rank on a GPU has its share in VRAM. For each sum the GPU stops and copies in both directions,
which counts as a window's cost there besides its layers. With one member per group a plan costs as much as any ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

from halda import cost
from halda.instance import Instance, Member, Phase, disk_of, gpu_of, grouped, sharing_cores
from halda.plan import Plan, Rank, Streaming
from halda.profile import DeviceProfile, ModelProfile

SUMS: Final = 2
"""Sums per layer: after its attention and after its feed-forward."""
ECHO_SHARE: Final = 0.5
"""Share of ``token_s`` that the programs at both ends need for an echo one way. A rank polls its connection itself,
without a thread or an event loop in between, and needs ``SUM_SHARE``. (Measured on x86-64: 0.04 ms for 2 to 8 kB, where
``token_s`` is 0.36 ms; a program that has just computed is slower.)"""
SUM_SHARE: Final = 0.15
MIN_DELAY_SHARE: Final = 0.2
"""Minimum share of an echo that is the network."""
VALUE_BYTES: Final = 4
HALVING_S: Final = 5e-9
"""Seconds per value that is sent in 16 bits; measured on x86-64."""
SLICED_BYTES: Final = 1 << 16
"""The same limit as in the exchange (``ring/group/exchange.py``)."""


@dataclass(frozen=True)
class SharedPlace:
    """The place of a group: the question of each rank, as one device with its share of the model, and the seconds of
    exchanges: a sum in decode and in a prompt chunk, a step's tokens, and the logits of the tail."""

    ranks: tuple[Rank, ...]
    own: tuple[Instance, ...]
    member: Member
    sum_s: float
    chunk_sum_s: float
    spread_s: float
    gather_s: float

    def streaming_of(self, plan: Plan) -> Streaming:
        """Return the streaming of the place as one device: bytes that take it as long as the ranks' slowest disk."""
        found = [plan.streaming_of(rank.device) for rank in self.ranks]
        disks = grouped(disk_of(own.members[0].profile) for own in self.own)

        def on_slowest(sizes: Sequence[float]) -> int:
            seconds = (sum(sizes[i] for i in disk) / self.own[disk[0]].members[0].disk_bytes_per_s for disk in disks)
            return int(self.member.disk_bytes_per_s * max(seconds))

        spared = [
            own.members[0].decode.streamed_bytes(s.streamed_bytes) for own, s in zip(self.own, found, strict=True)
        ]
        spare_bytes = self.member.decode.spare_bytes if any(spared) else 0
        streamed = spare_bytes + on_slowest(spared)
        late = on_slowest([each.streamed_bytes - each.read_ahead_bytes for each in found])
        return Streaming(device=self.ranks[0].device, streamed_bytes=streamed, read_ahead_bytes=max(0, streamed - late))

    def exchange_s(self, plan: Plan) -> float:
        """Return the seconds of a token's exchanges."""
        windows = plan.windows_of(self.ranks[0].device)
        layers = sum(len(window.layers) for _, window in windows)
        gather_s = self.gather_s if plan.place_of(self.ranks[0].device) == plan.head else 0.0
        return SUMS * layers * self.sum_s + len(windows) * self.spread_s + gather_s


def places_of(question: Instance, groups: Sequence[tuple[Rank, ...]]) -> tuple[Instance, dict[str, SharedPlace]]:
    """Return ``question`` with each of ``groups`` as one device, named as its first rank, and the places by these
    names."""
    key = tuple(groups)
    found: tuple[Instance, dict[str, SharedPlace]] | None = question.shared_places.get(key)
    if found is None:
        found = question.shared_places[key] = _places(question, key)
    return found


def _places(question: Instance, groups: Sequence[tuple[Rank, ...]]) -> tuple[Instance, dict[str, SharedPlace]]:
    followers = {rank.device for ranks in groups for rank in ranks[1:]}
    places = {ranks[0].device: _place(question, ranks) for ranks in groups}
    members = [
        places[member.name].member if member.name in places else member
        for member in question.members
        if member.name not in followers
    ]
    found = question.changed(devices=tuple(member.profile for member in members), crowded=question.shared_hosts)
    vars(found)["members"] = tuple(members)
    return found, places


def _place(question: Instance, ranks: tuple[Rank, ...]) -> SharedPlace:
    index = {device.device: i for i, device in enumerate(question.devices)}
    group = _Group(question, [index[rank.device] for rank in ranks], ranks)
    first, at, width = question.members[group.at[0]], group.at, question.model.hop_values
    decode_rows, chunk_rows = question.decode_rows, first.prefill.rows
    sum_s, chunk_sum_s = (
        _sum_s(question, at, rows * width) + group.copy_s(rows * width) for rows in (decode_rows, chunk_rows)
    )
    spread_s = max(message_s(question, at[0], other, decode_rows * width) for other in at[1:])
    gather_s = max(
        message_s(question, other, at[0], decode_rows * question.model.vocabulary * rank.weight / _total(ranks))
        for other, rank in zip(at[1:], ranks[1:], strict=True)
    )
    step_s = group.slowest(group.own, _step_s) + spread_s
    none = (0.0,) * len(question.kinds)
    no_gpus: dict[str, Any] = {"gpu": none, "experts_on_cpu": none, "gpu_steps_s": ()}
    member = replace(
        first,
        profile=replace(
            first.profile.with_gpus(()),
            cpu=replace(first.profile.cpu, step_s=step_s),
            disk=replace(first.profile.disk, prefetch_bytes_per_s=group.disk_bytes_per_s),
        ),
        decode=replace(
            first.decode,
            cpu=group.layers_s(lambda member: member.decode, sum_s),
            spare_bytes=group.spare_bytes,
            **no_gpus,
        ),
        prefill=replace(first.prefill, cpu=group.layers_s(lambda member: member.prefill, chunk_sum_s), **no_gpus),
        ram_limit=group.ram_limit,
        vram_limits=(),
        disk_limit=group.disk_limit,
        cpu_output_s=group.slowest(group.own, _output_s) + gather_s,
        gpu_output_s=0.0,
        offloads_prefill=False,
    )
    return SharedPlace(ranks, tuple(group.own), member, sum_s, chunk_sum_s, spread_s, gather_s)


def _total(ranks: Sequence[Rank]) -> int:
    return sum(rank.weight for rank in ranks)


def _step_s(own: Instance) -> float:
    """Return the cost of a window for a rank besides its layers; the rank has a GPU if its share is there."""
    member = own.members[0]
    return member.gpu_step_s if member.has_gpu else member.step_s


def _output_s(own: Instance) -> float:
    member = own.members[0]
    return member.gpu_output_s if member.has_gpu else member.cpu_output_s


class _Group:
    """The members ``at`` these indices of ``question``, which are ``ranks``, as questions of their own: with all that
    each has, with its attention share of everything, and with its feed-forward share. KV cache and states are those of
    its attention in each. A rank whose share is on its GPU has that GPU, the others have none."""

    def __init__(self, question: Instance, at: Sequence[int], ranks: Sequence[Rank]) -> None:
        self._question, self.at = question, at
        shares = [each.shares(_total(ranks)) for each in ranks]
        profiles = [question.devices[i] for i in at]
        profiles = [each.with_gpus(each.gpus[: rank.on_gpu]) for each, rank in zip(profiles, ranks, strict=True)]
        part, of_dense, of_read = (question.model.attention_part, *_attention_parts(question.model))
        self._shares = [part * heads + (1 - part) * values for heads, values in shares]

        own = cache(partial(_own, question))  # like devices have like shares

        def of_shares(parts: Callable[[float, float], tuple[float, float]]) -> list[Instance]:
            return [
                own(*parts(heads, values), heads).changed(devices=(device,))
                for device, (heads, values) in zip(profiles, shares, strict=True)
            ]

        self.own = of_shares(lambda heads, values: (of_dense * heads + (1 - of_dense) * values, values))
        of_heads, of_values = of_shares(lambda heads, _: (heads, heads)), of_shares(lambda _, values: (values, values))
        self._parts = [(of_read, of_heads), (1 - of_read, of_values)]
        self._processors = _taking_turns(profiles)

    def copy_s(self, values: float) -> float:
        """Return the seconds that GPU ranks add to a sum of ``values`` values: a step and copies."""
        on_gpus = [own.members[0] for own in self.own if own.members[0].has_gpu]
        return max(
            (each.gpu_step_s + cost.between_gpus_s(each.profile.gpus[0], 1, round(values)) for each in on_gpus),
            default=0.0,
        )

    def slowest(self, questions: Sequence[Instance], seconds: Callable[[Instance], float]) -> float:
        """Return the time of the slowest rank; ranks on one processor or GPU take turns."""
        each = [seconds(own) for own in questions]
        return max(sum(each[rank] for rank in here) for here in self._processors)

    def layers_s(self, phase: Callable[[Member], Phase], sum_s: float) -> tuple[float, ...]:
        """Return the seconds of a layer of each kind, with its sums."""

        def seconds(own: Instance, layer: int) -> float:
            found = phase(own.members[0])
            return (found.gpu if own.members[0].has_gpu else found.cpu)[own.kind_of[layer]]

        def layer_s(layer: int) -> float:
            return sum(part * self.slowest(questions, partial(seconds, layer=layer)) for part, questions in self._parts)

        kinds = range(len(self._question.kinds))
        return tuple(layer_s(self._question.kind_of.index(kind)) + SUMS * sum_s for kind in kinds)

    @property
    def ram_limit(self) -> int:
        """Bytes of whole layers for whose shares the ranks have memory."""
        besides = self._question.runtime_bytes(1) + self._question.head_bytes(1)
        whole = _layers_bytes(self._question)
        return int(besides + min(_room_bytes(own) * whole / _layers_bytes(own) for own in self.own))

    @property
    def disk_bytes_per_s(self) -> float:
        """Bytes of whole layers whose shares the ranks read per second; ranks on one disk take turns."""
        disks = grouped(disk_of(own.members[0].profile) for own in self.own)
        return min(
            self.own[disk[0]].members[0].disk_bytes_per_s / sum(self._shares[rank] for rank in disk) for disk in disks
        )

    @property
    def spare_bytes(self) -> int:
        """Bytes of whole layers for whose shares the ranks have room during decode."""
        rooms = (own.members[0].decode.spare_bytes / share for own, share in zip(self.own, self._shares, strict=True))
        return int(min(rooms))

    @property
    def disk_limit(self) -> int:
        """Bytes of whole layers for whose shares the ranks have disk space."""
        return int(min(own.members[0].disk_limit / share for own, share in zip(self.own, self._shares, strict=True)))


def _taking_turns(profiles: Sequence[DeviceProfile]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of ranks that compute on the same cores, or on the same GPU."""
    on_cpu = [rank for rank, device in enumerate(profiles) if device.gpu is None]
    cores = [tuple(on_cpu[place] for place in here) for here in sharing_cores([profiles[rank] for rank in on_cpu])]
    on_gpu = [rank for rank, device in enumerate(profiles) if device.gpu is not None]
    same = grouped((profiles[rank].host, gpu_of(profiles[rank].gpus[0])) for rank in on_gpu)
    return (*cores, *(tuple(on_gpu[place] for place in here) for here in same))


def _room_bytes(own: Instance) -> int:
    """Return the memory of a rank for its share of layers: VRAM or RAM."""
    member = own.members[0]
    if member.has_gpu:
        return member.vram_limits[0] - own.gpu_besides(member, 0, 1) - own.model.output_bytes
    return member.ram_limit - own.runtime_bytes(1) - own.head_bytes(1)


def _attention_parts(model: ModelProfile) -> tuple[float, float]:
    """Return attention's share of the layer weights that every token uses, and of all that a token uses, including some
    experts."""
    experts = sum(layer.expert_bytes for layer in model.layers)
    dense = sum(layer.size_bytes for layer in model.layers) - experts
    attention = min(dense, model.attention_part * (dense + experts))
    used = experts * model.experts_used / model.experts if model.experts else 0.0
    return attention / max(dense, 1), attention / max(dense + used, 1)


def _own(question: Instance, dense: float, values: float, heads: float) -> Instance:
    """Return the question of a rank with its share of the model, as ``share_of_model`` gives it; the device does not
    matter."""
    model = share_of_model(question, dense, values, heads)
    return replace(question, devices=question.devices[:1], links={}, model=model, prefill_offload=frozenset())


def _layers_bytes(question: Instance) -> int:
    """Return the memory of all layers: weights, KV cache and states."""
    work = question.workload
    return sum(
        layer.size_bytes + cost.kv_bytes(layer, work) + cost.checkpoint_bytes(layer, work)
        for layer in question.model.layers
    )


def _sum_s(question: Instance, ranks: Sequence[int], values: float) -> float:
    """Return the seconds until each of ``ranks`` has the sum of ``values`` values of each: large sums go slice by
    slice."""
    sent = 1.0 if values * VALUE_BYTES < SLICED_BYTES else 2 / len(ranks)
    halving_s = 0.0
    if question.workload.wire == "f16":
        sent, halving_s = sent / 2, HALVING_S * values

    def of(rank: int) -> float:
        others = [other for other in ranks if other != rank]
        slowest = max(message_s(question, rank, other, sent * values) for other in others)
        return slowest + sum(
            sent * values * VALUE_BYTES / question.link(rank, other).bytes_per_s for other in others[1:]
        )

    return max(map(of, ranks)) + halving_s


def message_s(question: Instance, source: int, target: int, values: float) -> float:
    """Return the seconds of a message between ranks: an echo of the same size without the programs that answer it.
    Their time is estimated if the network was not measured alone."""
    link, tokens_s = question.link(source, target), [question.devices[i].cpu.token_s for i in (source, target)]
    echo_s = link.round_trip_s / 2
    programs_s = min(SUM_SHARE * max(tokens_s), echo_s)
    if link.network_s is not None:  # answering programs are late as well, above all on a busy machine
        return cost.message_s(link, values * VALUE_BYTES) - echo_s + link.network_s / 2 + programs_s
    delay_s = max(MIN_DELAY_SHARE * echo_s, echo_s - ECHO_SHARE * sum(tokens_s) / 2)
    return cost.hop_s(link, values, 1) - echo_s + delay_s + programs_s


def share_of_model(question: Instance, dense: float, values: float, heads: float) -> ModelProfile:
    """Return the part of the model that a rank has: its shares of weights that every token uses, of experts and the
    output matrix, and of the KV cache and states of its attention."""

    def of(sizes: Mapping[str, int], share: float) -> dict[str, int]:
        return {kind: math.ceil(share * size) for kind, size in sizes.items()}

    model = question.model
    kinds = [
        replace(
            layer,
            bytes_by_type=of(layer.bytes_by_type, dense),
            expert_bytes_by_type=of(layer.expert_bytes_by_type, values),
            kv_bytes_per_token=math.ceil(heads * layer.kv_bytes_per_token),
            state_bytes=math.ceil(heads * layer.state_bytes),
            query_width=math.ceil(heads * layer.query_width),
        )
        for layer in question.kinds
    ]
    return replace(
        model,
        layers=tuple(kinds[kind] for kind in question.kind_of),
        output_bytes_by_type=of(model.output_bytes_by_type, values),
        query_width=math.ceil(heads * model.attention_width),
        heads=math.ceil(heads * model.attention_heads),
    )
