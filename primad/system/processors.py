"""The processors that this process may use: those it may run on, or less where a control group limits its CPU time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from primad.system import cgroups


def usable_cpus(proc: Path = cgroups.PROC, root: Path = cgroups.ROOT) -> float:
    """How many logical processors' worth of time this process may take: affinity and quotas count, rounded to 0.01."""
    quotas = (_quota(folder, version) for folder, version in cgroups.folders("cpu", proc, root))
    return round(min([_allowed(), *(quota for quota in quotas if quota is not None)]), 2)


def usable_cores() -> int:
    """Physical cores that this process may keep busy, at least 1."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, min(physical, int(usable_cpus())))


def _allowed() -> float:
    """Logical processors that this process may run on; all of them where the system does not say."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # Linux, Windows, FreeBSD
        with contextlib.suppress(psutil.Error, OSError):
            return float(len(process.cpu_affinity() or ()) or os.cpu_count() or 1)
    return float(os.cpu_count() or 1)


def _quota(folder: Path, version: int) -> float | None:
    """Processors' worth of time that the group may take; None without a limit."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()[:2]
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        share = int(quota) / int(period)  # "max" (version 2) is no number, -1 (version 1) no limit
        return share if share > 0 else None
    return None
