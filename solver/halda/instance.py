"""One question to the solver, with every cost that does not depend on the plan computed once.

Layers that are alike (same bytes by type, same KV cache) are one kind; most models have one or two kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, Literal, get_args

from halda import cost, streaming
from halda.plan import Plan
from halda.profile import (
    CpuProfile,
    DeviceProfile,
    GpuProfile,
    LayerProfile,
    Limits,
    LinkProfile,
    ModelProfile,
    Workload,
)

ExpertPlace = Literal["auto", "cpu", "gpu"]
"""Where GPU layers have their experts: in RAM, in VRAM, or as the plan decides."""
EXPERT_PLACES: Final[tuple[ExpertPlace, ...]] = get_args(ExpertPlace)
DEFAULT_ROUND_TRIP_S: Final = 0.002
DEFAULT_LINK_BYTES_PER_S: Final = 100e6
"""Assumed figures of a link that was not measured: a home network of 1 Gbit/s."""
NO_LIMITS: Final = Limits()
_OF_MODEL: Final = frozenset(
    (
        *(
            "kinds",
            "sample",
            "kind_of",
            "kinds_before",
            "kind_totals",
            "size_bytes",
            "largest_layer_bytes",
            "by_expert",
        ),
        *("expert_bytes", "streamable", "reserve_bytes", "pool_bytes", "window_counts"),
    )
)
"""Properties of a question that follow from its model alone."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds of decode (one token) or of prefill (one prompt chunk), and what streaming reads for it."""

    rows: float
    cpu: tuple[float, ...]
    """Seconds of one layer of each kind on the CPU."""
    gpu: tuple[float, ...]
    """Seconds of one layer of each kind on the first GPU, then on the second, and so on."""
    experts_on_cpu: tuple[float, ...]
    """Extra seconds of a GPU layer with its experts on the CPU; negative if it takes less."""
    gpu_steps_s: tuple[float, ...]
    """Seconds of a window besides its layers for each GPU that it uses: copies to and from it, also between GPUs."""
    spare_bytes: int
    """Bytes that need not stream although the plan says so: free room keeps them meanwhile."""
    read_lines: tuple[streaming.ReadLine, ...]
    """Lines that give the bytes read of what streams."""

    @property
    def edge_s(self) -> float:
        """Seconds that a stop waiting for its disk needs besides reading."""
        return streaming.edge_s(self.cpu)

    def streamed_bytes(self, plan_bytes: float) -> float:
        """Return the bytes that stream in this phase when ``plan_bytes`` stream in the plan."""
        return max(0.0, plan_bytes - self.spare_bytes)

    def read_bytes(self, plan_bytes: float, streamable_bytes: float) -> float:
        """Return the bytes read when ``plan_bytes`` of ``streamable_bytes`` stream in the plan."""
        return streaming.read_bytes(self.read_lines, self.streamed_bytes(plan_bytes), streamable_bytes)


@dataclass(frozen=True)
class Member:
    """One device as the solver sees it: its times, and the bytes that it may use."""

    profile: DeviceProfile
    decode: Phase
    prefill: Phase
    ram_limit: int
    vram_limits: tuple[int, ...]
    """Limit of each GPU."""
    disk_limit: int
    cpu_output_s: float
    gpu_output_s: float
    read_ahead_steps: tuple[streaming.ReadAheadStep, ...]
    """Required read-ahead by the share that streams."""
    has_own_host: bool
    """Whether no other device of the question is on its machine."""
    offloads_prefill: bool = False
    """Whether its GPU computes prompts through layers in RAM."""

    @property
    def name(self) -> str:
        return self.profile.device

    @property
    def step_s(self) -> float:
        """Seconds per step of a window besides its layers."""
        return self.profile.cpu.step_s

    @property
    def gpu_step_s(self) -> float:
        """Additional seconds per step of a window on a device that uses its first GPU."""
        return self.profile.gpu.step_s if self.profile.gpu is not None else 0.0

    @property
    def gpu_count(self) -> int:
        """Number of its GPUs."""
        return len(self.profile.gpus)

    @property
    def vram_limit(self) -> int:
        """VRAM limit of all its GPUs together."""
        return sum(self.vram_limits)

    @property
    def offloading_gpu(self) -> int | None:
        """The GPU that computes prompts through layers in RAM. llama.cpp takes the one with a window's first GPU
        layers, so it is the last GPU that can."""
        able = [i for i, gpu in enumerate(self.profile.gpus) if gpu.prefill_offload]
        return able[-1] if self.offloads_prefill else None

    @property
    def disk_bytes_per_s(self) -> float:
        """Rate at which weights stream."""
        return self.profile.disk.prefetch_bytes_per_s

    @property
    def slows_s_per_byte(self) -> float:
        """Computing time added per byte that is read meanwhile."""
        return self.profile.disk.slows_s_per_byte

    @property
    def has_gpu(self) -> bool:
        return self.profile.gpu is not None

    @property
    def shares_memory(self) -> bool:
        """Whether the first GPU's memory is the RAM."""
        return self.profile.gpu is not None and self.profile.gpu.unified_memory

    def are_alike(self, one: int, other: int) -> bool:
        """Whether swapping these GPUs changes nothing."""
        here, there = self.profile.gpus[one], self.profile.gpus[other]
        is_same = replace(here, id=there.id, pci=there.pci) == there
        return is_same and self.vram_limits[one] == self.vram_limits[other] and self.offloading_gpu not in (one, other)

    def gpu_name(self, gpu: int) -> str:
        """Return the name of that GPU in messages about limits: with llama.cpp's name if there are several."""
        return f"{self.name} ({self.profile.gpus[gpu].id or gpu})" if self.gpu_count > 1 else self.name

    def in_ram(self, vram: Sequence[Any]) -> list[Any]:
        """Return the items of ``vram``, by GPU, that are in RAM."""
        return [size for gpu, size in zip(self.profile.gpus, vram, strict=True) if gpu.unified_memory]


@dataclass(frozen=True)
class Instance:
    """Devices (the first is the head), links, model, workload and the owners' limits.

    ``crowded`` are machines of which this part of a question has only some devices. A decode step has ``decode_rows``
    tokens, each of another sequence. On ``prefill_offload`` devices the GPU computes prompts through layers in RAM:
    these devices have no extra buffers, whose contents cannot be copied, and do not stream, since weights would travel
    twice. ``experts`` says where GPU layers have their experts. ``shared`` devices sometimes compute for other models
    as well.
    """

    devices: tuple[DeviceProfile, ...]
    links: Mapping[tuple[str, str], LinkProfile]
    model: ModelProfile
    workload: Workload
    limits: Mapping[str, Limits]
    crowded: frozenset[str] = frozenset()
    decode_rows: int = 1
    prefill_offload: frozenset[str] = frozenset()
    experts: ExpertPlace = "auto"
    shared: frozenset[str] = frozenset()

    @cached_property
    def kinds(self) -> tuple[LayerProfile, ...]:
        """The different layers of the model in order of first appearance."""
        kinds: list[LayerProfile] = []
        for layer in self.model.layers:
            if layer not in kinds:
                kinds.append(layer)
        return tuple(kinds)

    @cached_property
    def sample(self) -> ModelProfile:
        """The model with one layer of each kind, for costs that do not depend on the number of layers."""
        return replace(self.model, layers=self.kinds)

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """Index of the kind of each layer."""
        return tuple(self.kinds.index(layer) for layer in self.model.layers)

    @cached_property
    def kinds_before(self) -> tuple[tuple[int, ...], ...]:
        """For each kind, the number of its layers before each layer, and before the end."""
        return tuple(
            tuple(accumulate((kind == each for each in self.kind_of), initial=0)) for kind in range(len(self.kinds))
        )

    @cached_property
    def kind_totals(self) -> tuple[int, ...]:
        """Number of layers of each kind."""
        return tuple(self.kind_of.count(kind) for kind in range(len(self.kinds)))

    @cached_property
    def size_bytes(self) -> tuple[int, ...]:
        """Weights of one layer of each kind."""
        return tuple(kind.size_bytes for kind in self.kinds)

    @cached_property
    def largest_layer_bytes(self) -> int:
        """Bytes of the largest layer: the unit in which integer programs count memory."""
        return max(self.size_bytes)

    @cached_property
    def kv_bytes(self) -> tuple[int, ...]:
        """KV cache of one layer of each kind."""
        return tuple(cost.kv_bytes(kind, self.workload) for kind in self.kinds)

    @cached_property
    def checkpoint_bytes(self) -> tuple[int, ...]:
        """RAM for kept states of one layer of each kind."""
        return tuple(cost.checkpoint_bytes(kind, self.workload) for kind in self.kinds)

    @cached_property
    def by_expert(self) -> bool:
        """Whether experts stream, one by one."""
        return streaming.by_expert(self.sample)

    @property
    def parts(self) -> bool:
        """Whether GPU layers may have their experts on the CPU."""
        return self.by_expert and self.experts != "gpu"

    @cached_property
    def expert_bytes(self) -> tuple[int, ...]:
        """Bytes of the experts of one layer of each kind."""
        return tuple(kind.expert_bytes for kind in self.kinds)

    @cached_property
    def streamable(self) -> tuple[int, ...]:
        """Bytes of one layer of each kind that may stream."""
        return tuple(streaming.streamable_bytes(kind, self.sample) for kind in self.kinds)

    @cached_property
    def reserve_bytes(self) -> int:
        """Bytes that a streaming device leaves free."""
        return streaming.reserve_bytes(self.sample)

    @cached_property
    def pool_bytes(self) -> int:
        """Streamable bytes that a streaming device keeps in any case."""
        return streaming.pool_bytes(self.sample) if self.by_expert else 0

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """The devices with their costs; the head first."""
        return tuple(self._member(device) for device in self.devices)

    @cached_property
    def shared_hosts(self) -> frozenset[str]:
        """The machines with several devices of the question."""
        return self.crowded | {self.devices[host[0]].host for host in self.hosts if len(host) > 1}

    def only(self, members: Sequence[int]) -> Instance:
        """Return the part of the question with only these members, at the same costs."""
        part = self.changed(devices=tuple(self.devices[m] for m in members), crowded=self.shared_hosts)
        vars(part)["members"] = tuple(self.members[m] for m in members)
        return part

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the members of each machine: they share its memory and cores."""
        return grouped(device.host for device in self.devices)

    @cached_property
    def processors(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the members of each processor: those of one machine, unless they are bound to different cores."""
        return sharing_cores(self.devices)

    @cached_property
    def disks(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the members of each disk: while one reads, the others wait."""
        return grouped(disk_of(device) for device in self.devices)

    def with_head(self, head: str) -> Instance:
        """Return the same question with ``head`` first."""
        ordered = sorted(range(len(self.devices)), key=lambda m: self.devices[m].device != head)
        found = self.changed(devices=tuple(self.devices[m] for m in ordered))
        vars(found)["members"] = tuple(self.members[m] for m in ordered)
        vars(found).update(costing_as=self.costing_as, prices=self.prices)
        return found

    def changed(self, **changes: Any) -> Instance:
        """Return the question with ``changes`` that do not affect the model; values that follow from the model alone
        are kept."""
        found, _ = replace(self, **changes), (self.largest_layer_bytes, self.kinds_before, self.window_counts)
        vars(found).update({name: value for name, value in vars(self).items() if name in _OF_MODEL})
        return found

    @cached_property
    def costing_as(self) -> Mapping[str, str]:
        """For each device, the first by name of the devices with the same figures."""
        found, figures = dict[str, str](), list[tuple[str, object]]()
        for member in sorted(self.members, key=lambda each: each.name):
            own = replace(member, profile=replace(member.profile, device="", host=""))
            alike = next((name for name, other in figures if own == other), None)
            if alike is None:
                figures.append((member.name, own))
            found[member.name] = alike or member.name
        return found

    @cached_property
    def prices(self) -> dict[Any, Any]:
        """Cache of the costs of devices' windows, valid for any head (``cuts.py``)."""
        return {}

    @cached_property
    def window_counts(self) -> dict[Any, Any]:
        """Cache of the number of layers of each kind that windows have on CPU and GPUs (``evaluate.py``)."""
        return {}

    @cached_property
    def shared_places(self) -> dict[Any, Any]:
        """Cache of questions in which each group is one place, by groups (``shared.py``)."""
        return {}

    def unlike(self, heads: Sequence[str]) -> list[str]:
        """Return ``heads`` without those that give the same question as an earlier one: like devices with like
        links."""
        found: list[str] = []
        for head in heads:
            if not any(self.are_alike(head, before) for before in found):
                found.append(head)
        return found

    def are_alike(self, one: str, other: str) -> bool:
        """Whether swapping the two devices changes nothing."""
        if one == other:
            return True
        here, there = ({device.device: device for device in self.devices}[name] for name in (one, other))
        changed = {one: other, other: one}
        if any(sum(device.host == each.host for device in self.devices) > 1 for each in (here, there)):
            return False
        if replace(here, device=other, host=there.host) != there or (one in self.prefill_offload) != (
            other in self.prefill_offload
        ):
            return False
        if self.limits.get(one, NO_LIMITS) != self.limits.get(other, NO_LIMITS):
            return False
        for (source, target), link in self.links.items():
            swapped = self.links.get((changed.get(source, source), changed.get(target, target)))
            if swapped is None or _unnamed(link) != _unnamed(swapped):
                return False
        return True

    def with_rows(self, chunk_rows: int, step_rows: int = 0) -> Instance:
        """Return the same question with chunks of ``chunk_rows``, and buffers for as many or for ``step_rows``."""
        return self.changed(workload=self.workload.with_rows(chunk_rows, step_rows))

    def offloading(self, plan: Plan) -> Instance:
        """Return the same question with prefill offload on the devices that ``plan`` says."""
        differ = self.prefill_offload.symmetric_difference(plan.prefill_offload).intersection(plan.devices)
        return self.changed(prefill_offload=frozenset(plan.prefill_offload)) if differ else self

    def gpu_rooms(self, member: int, windows: int) -> list[int]:
        """Return the maximum layers on each GPU of a member with at least ``windows`` windows; one 0 without GPUs."""
        sizes = zip(self.kinds, self.kv_bytes, strict=True)
        smallest = max(1, min(kind.size_bytes + kv - kind.expert_bytes * self.parts for kind, kv in sizes))
        found, total = self.members[member], len(self.model.layers)
        free = [size - self.gpu_besides(found, i, windows) for i, size in enumerate(found.vram_limits)]
        return [max(0, min(total, size // smallest)) for size in free] or [0]

    @cached_property
    def vram_groups(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Member and GPU number of each GPU that several members of one machine have: they share its memory."""
        found = [(m, i) for m, device in enumerate(self.devices) for i in range(len(device.gpus))]
        keys = [(self.devices[m].host, gpu_of(self.devices[m].gpus[i])) for m, i in found]
        return tuple(tuple(found[at] for at in here) for here in grouped(keys) if len(here) > 1)

    @property
    def chunks(self) -> int:
        """Number of chunks of a typical prompt."""
        return cost.prefill_chunks(self.workload)[0]

    @cached_property
    def buffer_bytes(self) -> int:
        """Compute buffer of a window during a prompt chunk."""
        return cost.compute_buffer_bytes(self.sample, self.workload)

    @cached_property
    def gpu_buffer_bytes(self) -> int:
        """The same on a GPU, which may lack flash attention for the model's heads."""
        has_flash = all(self._has_flash(gpu) for device in self.devices for gpu in device.gpus)
        return cost.compute_buffer_bytes(self.sample, replace(self.workload, flash=has_flash))

    def _has_flash(self, gpu: GpuProfile) -> bool:
        return self.workload.flash and not cost.lacks_flash(gpu.backend, self.model)

    @cached_property
    def window_bytes(self) -> int:
        """RAM per window besides weights and KV cache."""
        return cost.window_bytes(self.sample, self.workload)

    def runtime_bytes(self, windows: int) -> int:
        """Return the RAM of a device with ``windows`` windows besides weights and KV cache.

        Only one of its windows at a time has a full compute buffer: the engine returns its pages before the next one
        computes.
        """
        moving = cost.hidden_bytes(self.model, self.workload)
        return cost.RUNTIME_BYTES + moving + windows * self.window_bytes + self.buffer_bytes

    def gpu_besides(self, member: Member, gpu: int, windows: int) -> int:
        """Return the VRAM of a used GPU of ``member`` besides weights and KV cache, with ``windows`` windows."""
        context = member.profile.gpus[gpu].context_bytes or cost.GPU_RUNTIME_BYTES
        return self.gpu_runtime_bytes(windows, offloads=gpu == member.offloading_gpu, context_bytes=context)

    def gpu_runtime_bytes(
        self, windows: int, *, offloads: bool = False, context_bytes: int = cost.GPU_RUNTIME_BYTES
    ) -> int:
        """Return the VRAM of a device that uses its GPU, besides weights and KV cache.

        The compute buffer of each window stays there, with room for copied weights if the GPU ``offloads``. A window
        without layers or output on the GPU takes nothing but counts: all windows of a device are alike, except the
        head's last.
        """
        stand_in = cost.stand_in_vram_bytes(self.model, self.workload)
        return context_bytes + windows * (self.gpu_buffer_bytes + self.copied_bytes * offloads + stand_in)

    @cached_property
    def copied_bytes(self) -> int:
        """VRAM for copies of a window with prefill offload."""
        return cost.copied_bytes(self.sample, self.workload)

    @property
    def output_copy_bytes(self) -> int:
        """Additional VRAM of the head's last window if it uses prefill offload and its CPU has the output matrix.

        The matrix is copied in a step in which many tokens want logits, so llama.cpp keeps room for it.
        """
        return max(0, self.model.output_bytes - self.copied_bytes)

    def head_bytes(self, windows: int) -> int:
        """Return the additional RAM of the head without the output matrix: for logits beyond the compute buffer that
        they are in, and for the vocabulary where it has one window and so all layers."""
        logits = max(0, cost.logits_bytes(self.model, self.workload) - self.buffer_bytes)
        return logits + (cost.RING_HEAD_BYTES if windows > 1 else cost.VOCABULARY_BYTES * self.model.vocabulary)

    def link(self, source: int, target: int) -> LinkProfile:
        """Return the link between two members; on one machine including the cost of switching cores between
        processes."""
        here, there = self.devices[source], self.devices[target]
        found = self.links.get((here.device, there.device)) or LinkProfile(
            source=here.device,
            target=there.device,
            address="",
            round_trip_s=DEFAULT_ROUND_TRIP_S,
            bytes_per_s=DEFAULT_LINK_BYTES_PER_S,
        )
        if not here.shares_cores(there):
            return found
        woken_s = 2 * there.cpu.wake_s
        network_s = None if found.network_s is None else found.network_s + woken_s
        return replace(found, round_trip_s=found.round_trip_s + woken_s, network_s=network_s)

    @cached_property
    def hops_s(self) -> list[list[float]]:
        """Seconds of the hop between each two members with a decode step; infinite to itself."""
        return self._hops(lambda link: cost.hop_s(link, self.decode_rows, self.model.hop_values))

    @cached_property
    def chunk_hops_s(self) -> list[list[float]]:
        """Seconds of the hop between each two members with a prompt chunk."""
        return self._hops(lambda link: cost.hop_s(link, self.members[0].prefill.rows, self.model.hop_values))

    @cached_property
    def transfers_s(self) -> list[list[float]]:
        """Seconds that a hop with one token occupies each link."""
        return self._hops(lambda link: cost.transfer_s(link, 1, self.model.hop_values))

    def in_air(self, source: int, target: int) -> bool:
        """Whether messages from one member to another use the air that all wireless devices share."""
        here, there = self.devices[source], self.devices[target]
        return here.host != there.host and (here.wireless or there.wireless)

    def occupied_s(self, ring: Sequence[int]) -> float:
        """Return the seconds that one round of one token around ``ring`` occupies the busiest medium.

        A wire carries each hop of a ring separately, and both directions concurrently. The air carries one message at a
        time: hops from and to wireless devices add up. Between two wireless devices a message uses the air twice, to
        the access point and from it. The measured messages did too, so the link's rate includes both.
        """
        return max(self._links_s(ring))

    def chunk_links_s(self, ring: Sequence[int]) -> list[float]:
        """Return the same for each hop of ``ring`` with a prompt chunk: the seconds of its link, or of the air."""
        return [self.members[0].prefill.rows * seconds for seconds in self._links_s(ring)]

    def _links_s(self, ring: Sequence[int]) -> list[float]:
        if len(ring) == 1:
            return [0.0]
        pairs = list(zip(ring, (*ring[1:], ring[0]), strict=True))
        air = math.fsum(self.transfers_s[a][b] for a, b in pairs if self.in_air(a, b))
        return [air if self.in_air(a, b) else self.transfers_s[a][b] for a, b in pairs]

    def _hops(self, seconds: Callable[[LinkProfile], float]) -> list[list[float]]:
        members = range(len(self.devices))
        return [[seconds(self.link(a, b)) if a != b else math.inf for b in members] for a in members]

    def _member(self, device: DeviceProfile) -> Member:
        model, work = self.sample, self.workload
        limits = self.limits.get(device.device, NO_LIMITS)
        able = [gpu for gpu in device.gpus if gpu.prefill_offload]
        offloads_prefill = device.device in self.prefill_offload and bool(able)
        if offloads_prefill:
            device = device.without_extra_buffers()
        _, chunk = cost.prefill_chunks(work)
        rows = self.decode_rows
        cpu = cost.cached(device.cpu, self.model)
        processors = device.gpus or (None,)

        def phase(cpu: CpuProfile, rows: float, kv: float, spare_bytes: int, *, is_chunk: bool) -> Phase:
            return Phase(
                rows=rows,
                cpu=tuple(
                    cost.layer_s(
                        cpu,
                        device.ram_read_bytes_per_s,
                        kind,
                        model,
                        rows,
                        cost.kv_cells(kind, work, kv),
                        work.kv_type,
                        flash=work.flash,
                        chunk=is_chunk,
                    )
                    for kind in self.kinds
                ),
                gpu=tuple(
                    cost.layer_s(
                        gpu,
                        gpu.vram_read_bytes_per_s,
                        kind,
                        model,
                        rows,
                        cost.kv_cells(kind, work, kv),
                        work.kv_type,
                        flash=self._has_flash(gpu),
                        chunk=is_chunk,
                    )
                    if gpu is not None
                    else 0.0
                    for gpu in processors
                    for kind in self.kinds
                ),
                experts_on_cpu=tuple(
                    cost.experts_on_cpu_s(cpu, gpu, kind, model, rows) if gpu is not None else 0.0
                    for gpu in processors
                    for kind in self.kinds
                ),
                gpu_steps_s=tuple(
                    gpu.step_s + (cost.between_gpus_s(gpu, rows, model.hop_values) if i else 0.0)
                    for i, gpu in enumerate(device.gpus)
                ),
                spare_bytes=spare_bytes,
                read_lines=streaming.read_lines(model, rows),
            )

        decode = phase(cpu, rows, cost.decode_kv_tokens(work), self.buffer_bytes, is_chunk=False)
        prefill = phase(device.cpu, chunk, work.prompt_tokens / 2, 0, is_chunk=True)
        if offloads_prefill and chunk >= cost.OFFLOAD_ROWS:
            prefill_offload = (
                cost.offloaded_layer_s(
                    able[-1], kind, model, chunk, cost.kv_cells(kind, work, work.prompt_tokens / 2), work.kv_type
                )
                for kind in self.kinds
            )
            experts_on_cpu = (
                cost.experts_on_cpu_s(device.cpu, gpu, kind, model, chunk, prefill_offload=able[-1])
                for gpu in device.gpus
                for kind in self.kinds
            )
            prefill = replace(prefill, cpu=tuple(prefill_offload), experts_on_cpu=tuple(experts_on_cpu))
        return Member(
            profile=device,
            decode=decode,
            prefill=prefill,
            ram_limit=_minimum(device.ram_available_bytes, limits.ram_bytes),
            vram_limits=_vram_limits(device.gpus, limits.vram_bytes, only_able=offloads_prefill),
            disk_limit=_minimum(device.disk.free_bytes, limits.disk_bytes),
            cpu_output_s=cost.output_s(cpu, cpu, model, rows),
            gpu_output_s=cost.output_s(device.cpu, device.gpu, model, rows) if device.gpu is not None else 0.0,
            read_ahead_steps=streaming.read_ahead_steps(model, max(decode.cpu), device.disk.prefetch_bytes_per_s),
            has_own_host=device.host not in self.shared_hosts,
            offloads_prefill=offloads_prefill,
        )


def instance(
    devices: Sequence[DeviceProfile],
    links: Sequence[LinkProfile],
    model: ModelProfile,
    workload: Workload,
    limits: Mapping[str, Limits],
    head: str | None = None,
) -> Instance:
    """Return the question with ``head`` first (None: the first device)."""
    names = [device.device for device in devices]
    assert devices
    assert len(set(names)) == len(names)
    question = Instance(
        devices=tuple(devices),
        links={(link.source, link.target): link for link in links},
        model=model,
        workload=workload,
        limits=limits,
    )
    return question.with_head(head or names[0])


def _unnamed(link: LinkProfile) -> LinkProfile:
    """Return the figures of a link without its devices."""
    return replace(link, source="", target="", address="")


def disk_of(device: DeviceProfile) -> tuple[str, str]:
    """Return a key that is equal for devices whose layer caches are on one disk."""
    return device.host, device.disk.disk_id


def grouped(keys: Iterable[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of equal keys, ordered by the first of each."""
    found: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return tuple(map(tuple, found.values()))


def sharing_cores(devices: Sequence[DeviceProfile]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of devices that compute on the same cores, ordered by the first of each."""
    found: list[list[int]] = []
    for place, device in enumerate(devices):
        shared = [here for here in found if any(device.shares_cores(devices[other]) for other in here)]
        found = [here for here in found if here not in shared]
        found.append(sorted([place, *(other for here in shared for other in here)]))
    return tuple(map(tuple, sorted(found)))


def gpu_of(gpu: GpuProfile) -> tuple[str, ...]:
    """Return a key that is equal for two daemons' views of one GPU: its address, else its names. A process that sees
    only one of several GPUs calls it the first, whichever it is."""
    return (gpu.pci,) if gpu.pci else (gpu.id, gpu.name)


def _vram_limits(gpus: Sequence[GpuProfile], limit: int | None, *, only_able: bool) -> tuple[int, ...]:
    """Return the usable VRAM of each GPU. ``limit`` is for all together and goes to the first ones first. If
    ``only_able``, GPUs that are not known to gain from prefill offload get nothing: llama.cpp offloads to the GPU with
    a window's first GPU layers."""
    found = list[int]()
    for gpu in gpus:
        left = None if limit is None else limit - sum(found)
        found.append(_minimum(gpu.vram_available_bytes, left) if gpu.prefill_offload or not only_able else 0)
    return tuple(found)


def _minimum(available: int, limit: int | None) -> int:
    return available if limit is None else min(available, limit)
