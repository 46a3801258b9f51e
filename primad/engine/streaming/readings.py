"""Reads the system's memory figures for ``pressure.py``: /proc and cgroups, PSI, signals of macOS and Windows.

Every source may be missing; then its figure is None. A reading takes well below a millisecond.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from primad.engine.streaming.pages import major_faults
from primad.engine.streaming.pressure import Level, Reading, Stall
from primad.system.memory import MemoryGroup, groups

GROUPS_S: Final = 10.0
"""A process hardly ever changes its cgroup, and limits are seldom set later."""
_LOW_MEMORY: Final = 0
_MACOS_LEVELS: Final[dict[int, Level]] = {1: "calm", 2: "some", 4: "high"}
"""Normal, warning, critical (``dispatch_source_memorypressure``)."""


class Sources:
    """All sources of this machine. ``proc`` and ``root`` are the folders of the kernel's files."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        root: Path = Path("/sys/fs/cgroup"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc, self._root, self._clock = proc, root, clock
        self._groups: list[MemoryGroup] = []
        self._groups_due_s = -float("inf")
        self._page_bytes = _page_bytes()
        self._macos = _MacOs.open()
        self._windows = _LowMemory.open()

    def read(self) -> Reading:
        """Take a reading."""
        memory = _meminfo(self._proc / "meminfo")
        counts_mapped = memory is not None
        if memory is None:
            machine = psutil.virtual_memory()
            total, available = int(machine.total), int(machine.available)
            has_swap = False
            files = None if self._macos is None else self._macos.available_bytes(self._page_bytes)
            if files is not None:
                available, counts_mapped = files, True
        else:
            total, available, has_swap = memory
        group: Stall | None = None
        for member in self._limited():
            usage = member.usage()
            if usage is None:
                continue
            files = usage.inactive_file_bytes + usage.active_file_bytes
            free = max(0, usage.limit_bytes - usage.used_bytes + files)
            if free < available:
                total, available = min(total, usage.limit_bytes), free
            if group is None and member.version == 2:  # the nearest one
                group = _stall(member.folder / "memory.pressure")
        return Reading(
            total_bytes=total,
            available_bytes=available,
            counts_mapped=counts_mapped,
            stalls=(_stall(self._proc / "pressure" / "memory"), group),
            swapped_in_bytes=_swapped_in(self._proc / "vmstat", self._page_bytes) if has_swap else None,
            major_faults=major_faults(),
            verdict=self._verdict(),
        )

    def _limited(self) -> list[MemoryGroup]:
        """Return the cgroups around this process that have a limit, the nearest first."""
        now = self._clock()
        if now >= self._groups_due_s:
            self._groups_due_s = now + GROUPS_S
            around = groups(self._proc / "self" / "cgroup", self._root)
            self._groups = [group for group in around if group.usage() is not None]
        return self._groups

    def _verdict(self) -> Level | None:
        if self._macos is not None:
            return self._macos.level()
        if self._windows is not None:
            return self._windows.level()
        return None


def _page_bytes() -> int:
    return mmap.PAGESIZE


def _meminfo(path: Path) -> tuple[int, int, bool] | None:
    """Return total and available bytes, and whether there is swap; None where the kernel does not report them."""
    found: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            name, _, rest = line.partition(b":")
            if name in (b"MemTotal", b"MemAvailable", b"SwapTotal"):
                found[name] = int(rest.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        return None
    if b"MemTotal" not in found or b"MemAvailable" not in found:
        return None
    return found[b"MemTotal"], found[b"MemAvailable"], found.get(b"SwapTotal", 0) > 0


def _stall(path: Path) -> Stall | None:
    """Return the totals of a PSI file; None where the kernel has PSI switched off."""
    totals: dict[str, float] = {}
    try:
        for line in path.read_text().splitlines():
            kind, _, rest = line.partition(" ")
            totals[kind] = int(rest.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        return None
    return None if "some" not in totals else Stall(totals["some"], totals.get("full", 0.0))


def _swapped_in(path: Path, page_bytes: int) -> int | None:
    try:
        data = path.read_bytes()
        start = data.index(b"\npswpin ") + 8
        return int(data[start : data.index(b"\n", start)]) * page_bytes
    except (OSError, ValueError):
        return None


class _MacOs:
    """macOS: values of ``sysctlbyname``."""

    def __init__(self, sysctl: Any) -> None:
        self._sysctl = sysctl

    @classmethod
    def open(cls) -> _MacOs | None:
        """Return None on other systems."""
        if sys.platform == "darwin":
            with contextlib.suppress(OSError, AttributeError):
                return cls(ctypes.CDLL(None).sysctlbyname)
        return None

    def level(self) -> Level | None:
        """Return the kernel's verdict."""
        value = self._value("kern.memorystatus_vm_pressure_level")
        return None if value is None else _MACOS_LEVELS.get(value)

    def available_bytes(self, page_bytes: int) -> int | None:
        """Return the bytes of free pages and file pages, mapped or not."""
        free, files = self._value("vm.page_free_count"), self._value("vm.page_pageable_external_count")
        return None if free is None or files is None else (free + files) * page_bytes

    def _value(self, name: str) -> int | None:
        value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        failed = self._sysctl(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
        return None if failed or size.value != ctypes.sizeof(ctypes.c_int) else value.value


class _LowMemory:
    """Windows: the notification that physical memory is low."""

    def __init__(self, kernel: Any, handle: Any) -> None:
        self._kernel, self._handle = kernel, handle

    @classmethod
    def open(cls) -> _LowMemory | None:
        """Return None on other systems."""
        windll = getattr(ctypes, "WinDLL", None)
        if windll is None:
            return None
        try:
            kernel = windll("kernel32")
            kernel.CreateMemoryResourceNotification.restype = ctypes.c_void_p
            handle = kernel.CreateMemoryResourceNotification(_LOW_MEMORY)
        except (OSError, AttributeError):
            return None
        return cls(kernel, handle) if handle else None

    def level(self) -> Level | None:
        """Return high once memory is low: Windows reports it late."""
        low = ctypes.c_int(0)
        if not self._kernel.QueryMemoryResourceNotification(ctypes.c_void_p(self._handle), ctypes.byref(low)):
            return None
        return "high" if low.value else "calm"
