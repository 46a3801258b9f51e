"""The processors that this process may use, how busy others keep them, and how long it waits for one.

A process that is late because other programs had the processors does not hang, so its waiting time is measured: on
Linux for each thread; elsewhere it counts as zero.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from primad.system import cgroups

_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")
"""Guests' time is already part of their host's."""
_MAX_TIMES: Final = 10
"""In total a process may take this many times its limit; with a smaller part of a processor it would achieve nothing.
"""
_PROC: Final = Path("/proc")


def usable_cpus(proc: Path = cgroups.PROC, root: Path = cgroups.ROOT) -> float:
    """How many logical processors' worth of time this process may take: affinity and quotas count, rounded to 0.01."""
    quotas = (_quota(folder, version) for folder, version in cgroups.folders("cpu", proc, root))
    return round(min([_allowed(), *(quota for quota in quotas if quota is not None)]), 2)


def usable_cores() -> int:
    """Number of physical cores that this process may keep busy, at least 1."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, min(physical, int(usable_cpus())))


def bound_cores() -> tuple[int, ...]:
    """The logical processors that this process is bound to; empty if it may use all, or if the system does not report it."""
    allowed = _own_cpus()
    return () if len(allowed) >= (os.cpu_count() or 1) else allowed


def cores_of_parent() -> tuple[int, ...]:
    """The logical processors that this process's parent may run on; empty if the system does not report them.

    OpenMP binds the first thread of a process to one processor, and threads that it starts inherit the binding.
    """
    with contextlib.suppress(psutil.Error):
        return _affinity(os.getppid())
    return ()


def _allowed() -> float:
    """Number of logical processors that this process may run on; all of them if the system does not report it."""
    return float(len(_own_cpus()) or os.cpu_count() or 1)


def _affinity(pid: int | None = None) -> tuple[int, ...]:
    process = psutil.Process(pid)
    if hasattr(process, "cpu_affinity"):  # Linux, Windows, FreeBSD
        with contextlib.suppress(psutil.Error, OSError):
            return tuple(sorted(process.cpu_affinity() or ()))
    return ()


_AT_FIRST: Final = _affinity()


def _own_cpus() -> tuple[int, ...]:
    """The logical processors that this process may run on; empty if the system does not report them.

    The system reports those of the first thread, which OpenMP binds to one processor when it is loaded. If only one of
    the processors from this module's import is left, those from the import count.
    """
    now = _affinity()
    return _AT_FIRST if len(now) == 1 and now[0] in _AT_FIRST else now


def _quota(folder: Path, version: int) -> float | None:
    """Processors' worth of time that the group may take; None without a limit."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()[:2]
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        share = int(quota) / int(period)  # "max" (version 2) is not a number, -1 (version 1) means no limit
        return share if share > 0 else None
    return None


class Others:
    """The processors that programs other than this one and its ended children keep busy from now on."""

    def __init__(self) -> None:
        self._others_s, self._start = _others_s(), time.monotonic()

    def cores(self) -> float:
        """Their average number; 0 if the system does not report the children's time (Windows)."""
        took_s = time.monotonic() - self._start
        return 0.0 if sys.platform == "win32" or took_s <= 0 else max(0.0, (_others_s() - self._others_s) / took_s)


def _others_s() -> float:
    """Busy processor seconds of other programs since the system started."""
    every = psutil.cpu_times()._asdict()
    return float(sum(seconds for name, seconds in every.items() if name not in _NOT_BUSY) - sum(os.times()[:4]))


class OwnTime:
    """The time of process ``pid`` from now on, without the time that it waits for a processor."""

    def __init__(self, pid: int, *, proc: Path = _PROC, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads, self._clock = proc / str(pid) / "task", clock
        self._waited_ns = self._waits()
        self._start = self._looked = clock()
        self._starved_s = 0.0

    def left_s(self, max_s: float) -> float:
        """The rest of ``max_s``. Call it repeatedly; more calls make it more exact."""
        took_s, starved_s = self.took_s()
        return min(max_s - (took_s - starved_s), _MAX_TIMES * max_s - took_s)

    def took_s(self) -> tuple[float, float]:
        """The elapsed time, and the part of it spent waiting.

        The threads depend on each other, so the longest wait of any thread between two calls counts.
        """
        now, waits = self._clock(), self._waits()
        longest_ns = max((each - self._waited_ns.get(thread, 0) for thread, each in waits.items()), default=0)
        self._starved_s += min(max(0, longest_ns) / 1e9, now - self._looked)
        self._waited_ns, self._looked = waits, now
        return now - self._start, self._starved_s

    def _waits(self) -> dict[str, int]:
        found = {}
        with contextlib.suppress(OSError):  # the process has ended, or the system has no such files
            for thread in self._threads.iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    found[thread.name] = int((thread / "schedstat").read_text().split()[1])
        return found
