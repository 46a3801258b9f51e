"""A plausible device, for tests that need one without measuring."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from halda import CpuProfile, DeviceProfile, DiskProfile, GpuProfile, TypeSpeed
from primad.daemon.measuring import OwnProfile
from primad.profiler.records import VERSION, HomeRecord, MachineRecord, host_id, machine_file, write

BITS = {"Q4_K": 4.5, "Q6_K": 6.5625, "Q4_1": 5.0, "Q8_0": 8.5, "F16": 16.0}


def speeds(read_bytes_per_s: float, flop_per_s: float) -> tuple[TypeSpeed, ...]:
    """Speeds of all types, each at the same share of memory bandwidth and arithmetic rate."""
    return tuple(
        TypeSpeed(
            type=kind,
            decode_bytes_per_s=0.75 * read_bytes_per_s,
            batch_bytes_per_s=0.25 * read_bytes_per_s,
            prefill_flop_per_s=flop_per_s,
            extra_buffers=False,
            decode_spread=0.05,
            prefill_spread=0.02,
        )
        for kind in BITS
    )


CPU = CpuProfile(
    name="a cpu",
    cores=2,
    threads=2,
    batch_threads=2,
    step_s=1.5e-4,
    layer_s=3e-5,
    speeds=speeds(3e10, 2e11),
)
GPU = GpuProfile(
    id="CUDA0",
    name="a gpu",
    backend="CUDA",
    vram_total_bytes=24 << 30,
    vram_available_bytes=23 << 30,
    unified_memory=False,
    vram_read_bytes_per_s=9e11,
    step_s=1e-4,
    layer_s=1e-5,
    speeds=speeds(9e11, 6e13),
)
DISK = DiskProfile(prefetch_bytes_per_s=2e9, fault_bytes_per_s=6e8, random_bytes_per_s=5e7, free_bytes=100 << 30)
PROFILE = DeviceProfile(
    device="desk",
    host="0123456789abcdef",
    system="Linux",
    machine="x86_64",
    cpu=CPU,
    ram_total_bytes=16 << 30,
    ram_available_bytes=12 << 30,
    ram_read_bytes_per_s=3e10,
    disk=DISK,
    gpu=GPU,
)


SEEDED_CPU = replace(CPU, threads=1, batch_threads=1)
"""One thread, since the devices of a test's ring share the machine's cores with other tests."""


def machine_record(threads: int | None, speed: float = 1.0, others_cores: float = 0.0) -> MachineRecord:
    """A record of this machine with invented figures, for ``threads`` pinned threads, ``speed`` times the usual."""
    return MachineRecord(
        version=VERSION,
        measured="2026-01-02T03:04:05Z",
        host=host_id(),
        build="a build",
        is_quick=False,
        pinned_threads=threads,
        ram_read_bytes_per_s=3e10,
        cpu=replace(
            SEEDED_CPU,
            step_s=SEEDED_CPU.step_s / speed,
            layer_s=SEEDED_CPU.layer_s / speed,
            speeds=speeds(speed * 3e10, speed * 2e11),
        ),
        gpus=(),
        unused_gpus=(),
        others_cores=others_cores,
    )


def home_record() -> HomeRecord:
    """A record of a file system of this machine with invented figures."""
    return HomeRecord(version=VERSION, measured="2026-01-02T03:04:05Z", host=host_id(), is_quick=False, disk=DISK)


def seed(home: Path, speed: float = 1.0) -> Path:
    """Mark this machine and ``home`` as measured, for any number of pinned threads; the file in ``home``.

    The machine counts as ``speed`` times as fast as others.
    """
    for threads in (None, *range(1, 9)):
        write(machine_record(threads, speed), home_record(), home)
        assert machine_file(threads).is_file()
    return home / "profile.json"


class KnownProfile(OwnProfile):
    """The profile returned by ``of``, measured once ``measured`` is set, as it is at first.

    ``used`` is set when refining starts; refining ends once ``refined`` is set.
    """

    def __init__(self, of: Callable[[str], DeviceProfile]) -> None:
        self.of = of
        self.measured = asyncio.Event()
        self.measured.set()
        self.used = asyncio.Event()
        self.refined = asyncio.Event()

    @property
    def is_known(self) -> bool:
        return self.measured.is_set()

    def now(self, name: str) -> DeviceProfile:
        assert self.is_known, "asked before it was measured"
        return self.of(name)

    async def measure(self) -> None:
        await self.measured.wait()

    async def refine(self) -> bool:
        self.used.set()
        await self.refined.wait()
        return True
