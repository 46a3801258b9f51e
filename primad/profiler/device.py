"""The profile of this device: measured once, then read from its record; values that change by the minute are read
again.

Measuring takes half a minute, or a few seconds at first. A device that was measured before does not load the measuring
code: it needs numpy, which takes 6 MB for the life of a daemon.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from halda import DeviceProfile, GpuProfile
from primad.errors import ConfigError
from primad.profiler.disk_name import disk_name
from primad.profiler.effort import Effort
from primad.profiler.gpus import choose_gpus, gpu_now, list_gpus
from primad.profiler.records import HomeRecord, MachineRecord, UnusedGpu, host_id, read_home, read_machine, write
from primad.profiler.store import utc_now
from primad.settings.config import layer_folder
from primad.settings.limits import NO_LIMITS, OwnerLimits
from primad.settings.profiles import Implausible, check_profile
from primad.system.memory import children, memory
from primad.system.process_start import measuring
from primad.system.processors import bound_cores
from primad.system.wireless import is_wireless

if TYPE_CHECKING:
    from primad.profiler.processors import Advance

_TRIES: Final = 3
"""Number of attempts to measure a device whose figures contradict each other."""


def profile_device(
    name: str,
    home: Path,
    threads: int | None,
    advance: Advance,
    *,
    again: bool = False,
    limits: OwnerLimits = NO_LIMITS,
    effort: Effort = Effort(),
) -> DeviceProfile:
    """The profile of this device, measured now unless it was measured before with at least this ``effort`` (``again``
    measures anyway).

    ``threads`` pins the number of compute threads; None chooses the best of several counts. Free resources are
    capped by the owner's ``limits``; measured figures and totals stay the machine's. Raises ``ConfigError`` when the
    home folder cannot hold the trials or the figures make no sense, ``EngineError`` when llama.cpp fails.
    """
    if not again:
        machine, disk = _known(home, threads, effort)
        if machine is not None and disk is not None:
            return within(limits, _compose(name, home, machine, disk, limits.gpu), cached_bytes(home))
    from primad.profiler.measure import measure_home, measure_machine, trial_folder

    with measuring(), trial_folder(home) as folder:
        # A daemon with another home on this machine may have measured it meanwhile.
        machine, disk = (None, None) if again else _known(home, threads, effort)
        for tries_left in reversed(range(_TRIES)):
            machine = machine or measure_machine(folder, threads, advance, effort)
            disk = disk or measure_home(folder, advance, effort)
            profile = _compose(name, home, machine, disk, limits.gpu)
            try:
                check_profile(profile)
                break
            except (
                Implausible
            ) as exc:  # another program started or ended during the measurement, so the figures are inconsistent
                machine = disk = None
                if not tries_left:
                    raise _contradictory(exc) from exc
    assert machine is not None
    assert disk is not None
    write(machine, disk, home)
    return within(limits, profile, cached_bytes(home))


def _known(home: Path, threads: int | None, effort: Effort) -> tuple[MachineRecord | None, HomeRecord | None]:
    """Records made with at least this effort, and undisturbed ones if this is the full effort."""
    machine, disk = read_machine(home, threads), read_home(home)
    if not effort.is_quick:
        machine = None if machine is None or machine.is_quick or machine.is_disturbed else machine
        disk = None if disk is None or disk.is_quick else disk
    return machine, disk


def is_profiled(home: Path, threads: int | None, effort: Effort) -> bool:
    """Whether the figures of this device are known already, as measured with ``effort``."""
    return None not in _known(home, threads, effort)


def how_measured(home: Path, threads: int | None) -> tuple[str, str]:
    """When (UTC) and how the figures of this device were measured, to store with a published profile."""
    machine = read_machine(home, threads)
    build = "" if machine is None else f" with {machine.build}"
    quick = " --quick" if machine is not None and machine.is_quick else ""
    return utc_now() if machine is None else machine.measured, (
        f"measured by 'primad profile{quick}'{build}: windows of synthetic layers, medians of runs with swept caches, 1, 8 "
        "and 512 rows or fewer; disk with the page cache dropped"
    )


def check_chosen_gpu(home: Path, threads: int | None, wanted: str | None) -> None:
    """Raise ``ConfigError`` if this device was measured and has no GPU that is ``wanted``."""
    machine = read_machine(home, threads)
    if machine is not None:
        choose_gpus(machine.gpus, wanted)


def is_disturbed(home: Path, threads: int | None) -> bool:
    """Whether other programs ran while this device was measured."""
    machine = read_machine(home, threads)
    return machine is not None and machine.is_disturbed


def unused_gpus(home: Path, threads: int | None) -> tuple[UnusedGpu, ...]:
    """The GPUs of this device that were left out when it was measured."""
    machine = read_machine(home, threads)
    return () if machine is None else machine.unused_gpus


def _compose(name: str, home: Path, machine: MachineRecord, disk: HomeRecord, wanted_gpu: str | None) -> DeviceProfile:
    """The profile from measured figures and current values."""
    now, host = memory(ours=children()), host_id()
    layers = layer_folder(home) if layer_folder(home).is_dir() else home
    chosen = choose_gpus(machine.gpus, wanted_gpu)
    devices = list_gpus() if chosen else ()
    gpus = [gpu for gpu in (gpu_now(each, devices) for each in chosen) if gpu is not None]
    profile = DeviceProfile(
        device=name,
        host=host,
        system=platform.system() or "unknown",
        machine=platform.machine() or "unknown",
        cpu=machine.cpu,
        ram_total_bytes=now.total_bytes,
        ram_available_bytes=min(now.available_bytes, now.total_bytes),
        ram_read_bytes_per_s=machine.ram_read_bytes_per_s,
        disk=replace(disk.disk, free_bytes=shutil.disk_usage(home).free, disk_id=disk_name(layers, host)),
        gpu=None,
        wireless=is_wireless(),
        cores=bound_cores(),
    )
    return profile.with_gpus(gpus)


def within(limits: OwnerLimits, profile: DeviceProfile, cached_bytes: int) -> DeviceProfile:
    """``profile`` as the plan may use it, if the layer cache already holds ``cached_bytes``.

    Memory that the GPU shares with the processor is bounded by the owner's limit for RAM too.
    """
    gpus, sizes = list[GpuProfile](), [(gpu.vram_available_bytes, gpu.vram_total_bytes) for gpu in profile.gpus]
    for gpu, free in zip(profile.gpus, limits.vram_of_each(sizes), strict=True):
        allowed = limits.ram_bytes(free, profile.ram_total_bytes) if gpu.unified_memory else free
        gpus.append(replace(gpu, vram_available_bytes=allowed))
    return replace(
        profile.with_gpus(gpus),
        ram_available_bytes=limits.ram_bytes(profile.ram_available_bytes, profile.ram_total_bytes),
        disk=replace(profile.disk, free_bytes=limits.disk_for_layers(profile.disk.free_bytes, cached_bytes)),
    )


def cached_bytes(home: Path) -> int:
    """Bytes in the layer cache of ``home``, including partial files."""
    size = 0
    for folder in (layer_folder(home), layer_folder(home) / "partial"):
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # a file that arrived or was pruned meanwhile
                        size += entry.stat().st_size if entry.is_file(follow_symlinks=False) else 0
        except OSError:  # no cache yet, or an unreadable one, which is reported when it is used
            continue
    return size


def _contradictory(exc: Implausible) -> ConfigError:
    return ConfigError(
        f"this device was measured {_TRIES} times, but {exc}; wait until the machine is idle and run 'primad profile "
        "--remeasure'"
    )
