"""Measure this device within half a minute, or in a few seconds: memory, processors, disk."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from halda import GpuProfile
from primad.engine.build import build_id
from primad.engine.devices import GpuDevice
from primad.errors import ConfigError
from primad.profiler.beside import hold_window
from primad.profiler.disk import measure_disk
from primad.profiler.effort import Budget, Effort
from primad.profiler.gpus import list_gpus
from primad.profiler.processors import Advance, measure_cpu, measure_gpu, sweep_bytes
from primad.profiler.records import VERSION, HomeRecord, MachineRecord, UnusedGpu, host_id
from primad.profiler.store import utc_now
from primad.profiler.trials import child_trials
from primad.system.processors import Others, usable_cores

_OF_DISK: Final = 0.12
"""Share of all time in which the disk is measured."""
_OF_CPU: Final = 0.6
"""Share of the remaining time for the CPU if there is a GPU."""
_RAM_BYTES: Final = 128 << 20
_RAM_RUNS: Final = 5
_TRIALS: Final = "profile-trial-"


def measure_machine(folder: Path, threads: int | None, advance: Advance, effort: Effort) -> MachineRecord:
    """Memory, CPU and GPU of this machine, measured now with trials in ``folder``; the others as in ``profile_device``."""
    others = Others()
    advance("memory")
    ram = ram_read_bytes_per_s(usable_cores())
    listed = list_gpus()
    gpus = () if isinstance(listed, str) else listed
    budget = Budget(effort.seconds * (1 - _OF_DISK))
    counted = usable_cores() if threads is None and effort.is_quick else threads
    cpu = measure_cpu(folder, counted, advance, effort, budget.part(_OF_CPU) if gpus else budget)
    found, unused = _measure_gpus(folder, gpus, cpu.batch_threads, effort, budget)
    if isinstance(listed, str):
        unused = (UnusedGpu(name="", why=f"llama.cpp cannot list them: {listed}"),)
    return MachineRecord(
        version=VERSION,
        measured=utc_now(),
        host=host_id(),
        build=build_id(),
        is_quick=effort.is_quick,
        pinned_threads=threads,
        # Weights are read from memory, perhaps while fewer other programs ran.
        ram_read_bytes_per_s=max(ram, *(speed.decode_bytes_per_s for speed in cpu.speeds)),
        cpu=cpu,
        gpus=found,
        unused_gpus=unused,
        others_cores=others.cores(),
    )


def _measure_gpus(
    folder: Path, devices: Sequence[GpuDevice], threads: int, effort: Effort, budget: Budget
) -> tuple[tuple[GpuProfile, ...], tuple[UnusedGpu, ...]]:
    """The profile of each GPU, and those that cannot be used."""
    measured, unused = [], []
    for number, device in enumerate(devices):
        found = measure_gpu(folder, device, threads, effort, budget.part(1 / (len(devices) - number)))
        if isinstance(found, str):
            unused.append(UnusedGpu(name=f"{device.name} ({device.id})", why=found))
        else:
            measured.append(found)
    return tuple(measured), tuple(unused)


def measure_home(folder: Path, advance: Advance, effort: Effort) -> HomeRecord:
    """The disk under ``folder``, measured now while the processor computes, unless time is short.

    Raises ``OSError`` when the trial cannot be written there, ``EngineError`` when llama.cpp fails.
    """
    advance("disk")
    seconds = effort.seconds * _OF_DISK
    if effort.is_quick:
        disk = measure_disk(folder, seconds)
    else:
        threads = usable_cores()
        with child_trials(threads) as computing:
            hold_window(folder, (computing,), threads, sweep_bytes())
            disk = measure_disk(folder, seconds, computing)
    return HomeRecord(
        version=VERSION,
        measured=utc_now(),
        host=host_id(),
        is_quick=effort.is_quick,
        disk=disk,
    )


@contextlib.contextmanager
def trial_folder(home: Path) -> Iterator[Path]:
    """A folder in ``home`` for the files of trials, removed at the end, along with those that a killed process left.

    An ``OSError`` within becomes a ``ConfigError``.
    """
    try:
        for left in home.glob(f"{_TRIALS}*"):
            shutil.rmtree(left, ignore_errors=True)
        with TemporaryDirectory(prefix=_TRIALS, dir=home, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as exc:
        raise ConfigError(
            f"--home {home}: this device cannot be measured there: {exc.strerror or exc}; make room for 400 MB or choose "
            "another folder"
        ) from exc


def ram_read_bytes_per_s(threads: int) -> float:
    """Bytes per second that ``threads`` threads together read from memory, median of several runs."""
    data = np.ones(_RAM_BYTES // 8, np.uint64)
    parts = np.array_split(data, threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_RAM_RUNS):
            start = time.perf_counter()
            list(pool.map(np.add.reduce, parts))
            rates.append(data.nbytes / (time.perf_counter() - start))
    return statistics.median(rates)
