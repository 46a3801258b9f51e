"""This machine as several devices of a plan, and the links between its processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from halda import CpuProfile, DeviceProfile, DiskProfile, LinkProfile, ModelProfile
from primad.profiler.effort import TYPES, Effort
from primad.profiler.measure import ram_read_bytes_per_s
from primad.profiler.processors import measure_cpu

GIB: Final = 1 << 30
NO_DISK: Final = DiskProfile(
    prefetch_bytes_per_s=1e9, fault_bytes_per_s=1e9, random_bytes_per_s=1e8, free_bytes=64 * GIB
)
"""Disk of devices that read nothing."""
_HOP: Final = LinkProfile(source="", target="", address="", round_trip_s=0.0004, bytes_per_s=2e9)
"""Link between two processes of this machine."""


def types_of(model: ModelProfile) -> tuple[str, ...]:
    """Return the types in ``model`` that can be measured."""
    sizes = Counter(model.output_bytes_by_type)
    for layer in model.layers:
        sizes.update(layer.bytes_by_type)
        sizes.update(layer.expert_bytes_by_type)
    return tuple(kind for kind in TYPES if sizes[kind] > 0.01 * sizes.total())


def measured_cpu(folder: Path, threads: int, model: ModelProfile) -> CpuProfile:
    """Measure ``threads`` threads with the types of ``model``."""
    return measure_cpu(folder, threads, lambda _: None, Effort(types=types_of(model)))


def machines_here(names: Sequence[str], cpu: CpuProfile) -> list[DeviceProfile]:
    """Return a machine for each name with one core, and more memory than any model of a bench needs."""
    rate = ram_read_bytes_per_s(1)
    return [
        DeviceProfile(
            device=name,
            host=name,
            system="Linux",
            machine="",
            cpu=cpu,
            ram_total_bytes=64 * GIB,
            ram_available_bytes=64 * GIB,
            ram_read_bytes_per_s=rate,
            disk=NO_DISK,
            gpu=None,
        )
        for name in names
    ]


def links_between(names: Sequence[str], later_s: float) -> list[LinkProfile]:
    """Return the links between any two devices, each ``later_s`` further apart each way than processes of this
    machine."""
    round_trip_s = _HOP.round_trip_s + 2 * later_s
    return [replace(_HOP, source=a, target=b, round_trip_s=round_trip_s) for a in names for b in names if a != b]
