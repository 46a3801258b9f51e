"""Measure this device: memory and disk rates, what it is, how much is free. Takes a second or two, once.

The rates are kept in ``profile.json`` in the home folder; what changes from minute to minute (free memory, free disk) is
read anew each time.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import psutil

from halda import DeviceProfile
from primad.errors import ConfigError
from primad.measuring import measuring
from primad.profiler.memory import memory

VERSION: Final = 1
STEPS: Final = 2
_RAM_BYTES: Final = 128 << 20
_RAM_RUNS: Final = 5
_DISK_BYTES: Final = 64 << 20
_DISK_CHUNK_BYTES: Final = 4 << 20

Advance = Callable[[str], None]
"""Called before each step with what is measured now."""


class _Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored: rates of this machine, and what they were measured on."""

    version: int
    measured: str
    machine: str
    ram_read_bytes_per_s: float
    disk_read_bytes_per_s: float


def profile_device(name: str, home: Path, threads: int, advance: Advance) -> DeviceProfile:
    """The profile of this device, its rates measured now or taken from ``home``.

    Raises ``ConfigError`` when the home folder cannot hold the disk trial.
    """
    rates = _stored(home / "profile.json")
    if rates is None:
        with measuring():
            rates = _measure(home, threads, advance)
        (home / "profile.json").write_bytes(msgspec.json.format(msgspec.json.encode(rates), indent=2))
    now = memory()
    return DeviceProfile(
        device=name,
        host=_host(),
        system=platform.system(),
        machine=platform.machine(),
        cpu=_cpu(),
        cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        ram_total_bytes=now.total_bytes,
        ram_available_bytes=now.available_bytes,
        ram_read_bytes_per_s=rates.ram_read_bytes_per_s,
        disk_read_bytes_per_s=rates.disk_read_bytes_per_s,
        disk_free_bytes=shutil.disk_usage(home).free,
        gpu=None,
    )


def is_profiled(home: Path) -> bool:
    """Whether the rates of this device are known already."""
    return _stored(home / "profile.json") is not None


def _stored(path: Path) -> _Rates | None:
    """The stored rates, or None when there are none, they are damaged, or they belong to another machine."""
    try:
        rates = msgspec.json.decode(path.read_bytes(), type=_Rates)
    except (OSError, msgspec.DecodeError):
        return None
    usable = rates.version == VERSION and rates.machine == _host()
    return rates if usable and rates.ram_read_bytes_per_s > 0 and rates.disk_read_bytes_per_s > 0 else None


def _measure(home: Path, threads: int, advance: Advance) -> _Rates:
    advance("memory")
    ram = ram_read_bytes_per_s(threads)
    advance("disk")
    try:
        disk = disk_read_bytes_per_s(home)
    except OSError as exc:
        raise ConfigError(
            f"--home {home}: the disk cannot be measured: {exc.strerror or exc}; make room there"
        ) from exc
    return _Rates(
        version=VERSION,
        measured=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        machine=_host(),
        ram_read_bytes_per_s=ram,
        disk_read_bytes_per_s=disk,
    )


def ram_read_bytes_per_s(threads: int) -> float:
    """What ``threads`` threads together read from memory, median of several runs."""
    data = np.ones(_RAM_BYTES // 8, np.uint64)
    parts = np.array_split(data, threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_RAM_RUNS):
            start = time.perf_counter()
            list(pool.map(np.add.reduce, parts))
            rates.append(data.nbytes / (time.perf_counter() - start))
    return statistics.median(rates)


def disk_read_bytes_per_s(folder: Path) -> float:
    """The sequential read rate of the file system under ``folder``, the page cache dropped for the file where one can."""
    path = folder / f"disk-trial-{uuid.uuid4().hex}"
    try:
        with path.open("wb") as file:
            chunk = os.urandom(_DISK_CHUNK_BYTES)
            for _ in range(_DISK_BYTES // len(chunk)):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            while file.read(_DISK_CHUNK_BYTES):
                pass
            return _DISK_BYTES / (time.perf_counter() - start)
    finally:
        path.unlink(missing_ok=True)


def _host() -> str:
    """Equal for all processes of one machine; a digest, so that it tells others nothing else."""
    return blake2b(f"primad {uuid.getnode()} {platform.node()}".encode(), digest_size=8).hexdigest()


def _cpu() -> str:
    if platform.system() == "Linux":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
