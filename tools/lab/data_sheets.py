"""The rule that estimates a device's profile from data sheets: ``profiles/data_sheets.json`` in, ``DeviceProfile`` out.

A data sheet states the bandwidth of a memory and the FLOP of cores. llama.cpp reaches similar shares of them on devices
of one family, so a family has a handful of figures here, and a device has none of its own. They were chosen to
reproduce what ``tools/bench published`` shows, for a family's devices and models together. The remaining difference is
the error of the rule, which ``profiles/README.md`` states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from halda import CpuProfile, DeviceProfile, DiskProfile, GpuProfile, OffloadSpeed, RoutingCost, TypeSpeed
from halda.quantisation import bytes_per_weight

SHEETS: Final = Path(__file__).resolve().parents[2] / "profiles" / "data_sheets.json"
_GIB: Final = 1 << 30
_ROWS: Final = 512
"""Tokens of the largest measurement of a type."""
_TYPES: Final[Mapping[str, tuple[float, float]]] = {
    "Q4_K": (1.0, 1.0),
    "Q6_K": (1.0, 0.9),
    "Q8_0": (1.08, 1.1),
    "F16": (1.1, 1.0),
}
"""Bytes per second and FLOP per second of a type relative to Q4_K."""
_OF_BATCH: Final = 0.7
"""Share of a prompt's FLOP that a batch of eight tokens reaches."""
_READ: Final = 0.8
"""Share of the RAM bandwidth that all cores together read."""
_OF_RAM: Final = 0.85
_BYTES_A_FLOP: Final = 0.2
"""A core reads bytes of Q4_K at the bandwidth and then computes with them: both times add up."""
_CPU_PREFILL: Final = 0.55
_SLOWED_PASSES: Final = 1.5
"""Number of times that bytes read from disk during computing pass through memory."""
_OF_PCIE: Final = 0.65
_PCIE_LANE_GB_PER_S: Final = {3: 0.985, 4: 1.97, 5: 3.94}
_WIDE_MAC_GIB: Final = 36
"""Up to this amount of RAM macOS gives two thirds to Metal, beyond it three quarters."""
_PC_STEP_S: Final = 0.00015
_SLOW_STEP_S: Final = 0.0004


class Family(NamedTuple):
    """llama.cpp's performance on GPUs of one family.

    ``bandwidth`` and ``matrix`` are shares of the data sheet's figures, for weights of Q4_K; ``cache`` is the share of
    the bandwidth for keys and values, ``attention`` attention's share of the matrix FLOP. ``layer_s`` and ``step_s``
    are the additional costs of a layer and a window.
    """

    backend: str
    identity: str
    bandwidth: float
    cache: float
    matrix: float
    attention: float
    layer_s: float
    step_s: float
    routing: RoutingCost
    context_bytes: int = 0


FAMILIES: Final[Mapping[str, Family]] = {
    "nvidia": Family(
        "CUDA", "CUDA0", 0.78, 0.85, 0.8, 0.3, 25e-6, 2e-4, RoutingCost(layer_s=1e-5, many_ratio=2.0), 690_000_000
    ),
    "amd": Family("ROCm", "ROCm0", 0.78, 0.8, 0.41, 0.4, 6e-5, 3e-4, RoutingCost(layer_s=2e-5, many_ratio=1.7)),
    "intel": Family("Vulkan", "Vulkan0", 0.55, 0.6, 0.22, 0.3, 6e-5, 4e-4, RoutingCost(layer_s=2e-5, many_ratio=1.7)),
    "integrated": Family(
        "Vulkan", "Vulkan0", 0.82, 0.8, 0.27, 0.3, 5e-5, 4e-4, RoutingCost(layer_s=2e-5, many_ratio=1.6)
    ),
    "apple": Family("Metal", "MTL0", 0.74, 0.7, 0.65, 0.8, 1e-4, 3e-4, RoutingCost(layer_s=3e-5, many_ratio=1.7)),
}


class GpuSheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A GPU: without ``memory_gib`` it uses its processor's RAM. FLOP are of float16 matrices, dense."""

    name: str
    family: str
    matrix_tflop_per_s: float
    memory_gib: float = 0
    memory_gb_per_s: float = 0
    pcie: int = 4
    lanes: int = 16


class ProcessorSheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A processor: ``ghz`` with all ``threads`` busy, FLOP per cycle and core in float32, the bandwidth of its memory.

    ``cores_gb_per_s`` is what its cores can read, if less; ``also`` are its other names.
    """

    name: str
    cores: int
    threads: int
    ghz: float
    flop_per_cycle: float
    memory_gb_per_s: float
    ram_gib: float
    cores_gb_per_s: float = 0
    machine: str = "x86_64"
    system: str = "Linux"
    slow: bool = False
    graphics: str = ""
    graphics_share: float = 0
    also: tuple[str, ...] = ()


class MachineSheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device: its processor, its other parts, and their typically free share."""

    device: str
    processor: str
    ram_gib: float
    free_gib: float
    disk_gb_per_s: float
    disk_free_gib: float
    gpu: str = ""
    graphics: str = ""
    wireless: bool = False
    more_gpus: tuple[str, ...] = ()


class Sheets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All data sheets."""

    version: int
    source: str
    gpus: tuple[GpuSheet, ...]
    processors: tuple[ProcessorSheet, ...]
    machines: tuple[MachineSheet, ...]

    def processor(self, machine: MachineSheet) -> ProcessorSheet:
        """Return the processor of ``machine``: among those of that name the one with its graphics."""
        named = [each for each in self.processors if each.name == machine.processor]
        return next((each for each in named if each.graphics == machine.graphics), named[0])

    def gpu(self, name: str) -> GpuSheet:
        """Return the GPU of that name."""
        return next(each for each in self.gpus if each.name == name)


def read_sheets(path: Path = SHEETS) -> Sheets:
    """Read the data sheets that come with primad."""
    return msgspec.json.decode(path.read_bytes(), type=Sheets)


def profiles(sheets: Sheets) -> dict[str, tuple[DeviceProfile, str]]:
    """Return the profile of each machine by name, and how it was estimated."""
    found = {}
    for machine in sheets.machines:
        processor = sheets.processor(machine)
        name = machine.gpu or machine.graphics or processor.graphics
        gpu = sheets.gpu(name) if name else None
        device, how = profile(machine, processor, gpu), _how(processor, gpu)
        for more in (sheets.gpu(name) for name in machine.more_gpus):
            device = with_gpus_more(device, [_gpu(more, machine, processor)])
            how += f" Also {more.name}."
        found[machine.device] = device, how
    return found


def with_gpus_more(device: DeviceProfile, gpus: Sequence[GpuProfile]) -> DeviceProfile:
    """Return ``device`` with ``gpus`` added, all with llama.cpp's names."""
    found, counts = list[GpuProfile](), Counter[str]()
    for gpu in (*device.gpus, *gpus):
        family = gpu.id.rstrip("0123456789")
        found.append(replace(gpu, id=f"{family}{counts[family]}"))
        counts[family] += 1
    return device.with_gpus(sorted(found, key=lambda gpu: -gpu.vram_read_bytes_per_s))


def _how(processor: ProcessorSheet, gpu: GpuSheet | None) -> str:
    parts = [f"{processor.name} with {processor.memory_gb_per_s:g} GB/s"]
    if gpu is not None:
        size = f" with {gpu.memory_gb_per_s:g} GB/s" if gpu.memory_gib else ""
        parts.append(f"{gpu.name}{size}, {gpu.matrix_tflop_per_s:g} TFLOP/s")
    rule = "Not measured: estimated from what the manufacturers publish, by the rule of profiles/README.md"
    return f"{rule}. {'; '.join(parts)}."


def profile(machine: MachineSheet, processor: ProcessorSheet, gpu: GpuSheet | None) -> DeviceProfile:
    """Return the profile that the rule gives for a machine."""
    read = _READ * 1e9 * (processor.cores_gb_per_s or processor.memory_gb_per_s)
    prefetch = 1e9 * machine.disk_gb_per_s
    return DeviceProfile(
        device=machine.device,
        host=machine.device,
        system=processor.system,
        machine=processor.machine,
        cpu=_cpu(processor),
        ram_total_bytes=round(machine.ram_gib * _GIB),
        ram_available_bytes=round(machine.free_gib * _GIB),
        ram_read_bytes_per_s=_rounded(read),
        disk=DiskProfile(
            prefetch_bytes_per_s=prefetch,
            fault_bytes_per_s=_rounded(0.5e9 * machine.disk_gb_per_s**0.6),
            random_bytes_per_s=_rounded(40e6 * machine.disk_gb_per_s**0.35),
            free_bytes=round(machine.disk_free_gib * _GIB),
            slows_s_per_byte=_rounded(_SLOWED_PASSES / read),
        ),
        gpu=None if gpu is None else _gpu(gpu, machine, processor),
        wireless=machine.wireless,
    )


def _cpu(sheet: ProcessorSheet) -> CpuProfile:
    peak = sheet.threads * sheet.ghz * 1e9 * sheet.flop_per_cycle
    bandwidth = 1e9 * (sheet.cores_gb_per_s or sheet.memory_gb_per_s)
    rate = 1 / (1 / (_OF_RAM * bandwidth) + 1 / (_BYTES_A_FLOP * peak))
    step_s = _SLOW_STEP_S if sheet.slow else _PC_STEP_S
    slower = step_s / _PC_STEP_S
    return CpuProfile(
        name=sheet.name,
        cores=sheet.cores,
        threads=sheet.threads,
        batch_threads=sheet.threads,
        step_s=step_s,
        layer_s=_rounded(2e-5 * slower),
        speeds=_speeds(rate, _CPU_PREFILL * peak),
        token_s=_rounded(0.00025 * slower),
        value_s=_rounded(1.2e-9 * slower),
        wake_s=_rounded(0.0004 * slower),
    )


def _gpu(sheet: GpuSheet, machine: MachineSheet, processor: ProcessorSheet) -> GpuProfile:
    family, is_discrete = FAMILIES[sheet.family], sheet.memory_gib > 0
    bandwidth = 1e9 * (sheet.memory_gb_per_s if is_discrete else processor.memory_gb_per_s)
    total, free = _gpu_memory(sheet, machine, processor)
    flop = family.matrix * 1e12 * sheet.matrix_tflop_per_s
    return GpuProfile(
        name=sheet.name.split("-core")[0].rsplit(" ", 1)[0] if sheet.family == "apple" else sheet.name,
        id=family.identity,
        backend=family.backend,
        vram_total_bytes=total,
        vram_available_bytes=free,
        unified_memory=not is_discrete,
        vram_read_bytes_per_s=_rounded(family.cache * bandwidth),
        step_s=family.step_s,
        layer_s=family.layer_s,
        speeds=_speeds(family.bandwidth * bandwidth, flop),
        attention_flop_per_s=_rounded(family.attention * flop),
        routing=family.routing,
        context_bytes=family.context_bytes if is_discrete else 0,
        prefill_offload=_offload_speeds(_OF_PCIE * 1e9 * _PCIE_LANE_GB_PER_S[sheet.pcie] * sheet.lanes, flop)
        if is_discrete
        else (),
    )


def _gpu_memory(sheet: GpuSheet, machine: MachineSheet, processor: ProcessorSheet) -> tuple[int, int]:
    """Return the bytes of the GPU's memory and those that are free: in RAM what the system grants it."""
    if sheet.memory_gib:
        return round(sheet.memory_gib * _GIB), round((0.98 * sheet.memory_gib - 0.2) * _GIB)
    of_system = (2 / 3 if machine.ram_gib <= _WIDE_MAC_GIB else 3 / 4) if sheet.family == "apple" else 1 / 2
    share = processor.graphics_share or of_system
    total = round(share * machine.ram_gib * _GIB)
    return total, min(total, round(machine.free_gib * _GIB))


def _speeds(rate: float, flop: float) -> tuple[TypeSpeed, ...]:
    return tuple(
        TypeSpeed(
            type=kind,
            decode_bytes_per_s=_rounded(more * rate),
            batch_bytes_per_s=_rounded(
                min(0.95 * more * rate, _OF_BATCH * quicker * flop * bytes_per_weight(kind) / 16)
            ),
            prefill_flop_per_s=_rounded(quicker * flop),
            extra_buffers=False,
            decode_spread=0.0,
            prefill_spread=0.0,
        )
        for kind, (more, quicker) in _TYPES.items()
    )


def _offload_speeds(copied: float, flop: float) -> tuple[OffloadSpeed, ...]:
    """Weights are copied at ``copied`` bytes per second, then computed: both times add up."""
    return tuple(
        OffloadSpeed(
            type=kind,
            few_bytes_per_s=_rounded(1 / (1 / copied + _flop_a_byte(kind, 64) / (quicker * flop))),
            prefill_flop_per_s=_rounded(1 / (1 / (quicker * flop) + 1 / (copied * _flop_a_byte(kind, _ROWS)))),
        )
        for kind, (_, quicker) in _TYPES.items()
    )


def _flop_a_byte(kind: str, rows: int) -> float:
    return 2 * rows / bytes_per_weight(kind)


def _rounded(figure: float) -> float:
    """Round to three digits, the known precision."""
    return float(f"{figure:.3g}")
