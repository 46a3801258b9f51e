"""Memory that this process may use (the machine's, or less if a cgroup limits it), and memory that programs hold.

Older kernels and other systems lack the cgroup files; then only the machine's figures count.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from primad.system import cgroups

_UNLIMITED: Final = 1 << 60
staying: Final = set[int]()
"""Processes that this one started and that outlive plans: their memory does not become free."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory: the total for this process, and the part that is free or can be reclaimed now."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """A cgroup's limit and its use by processes and files; both kinds of file pages are part of ``used_bytes``."""

    limit_bytes: int
    used_bytes: int
    inactive_file_bytes: int
    active_file_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A memory cgroup (version 1 or 2) by its folder."""

    folder: Path
    version: int

    def usage(self) -> MemoryUsage | None:
        """The group's current figures; None without a limit."""
        limits, current, prefix = ["memory.max", "memory.high"], "memory.current", ""
        if self.version == 1:
            limits, current, prefix = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"
        found = [limit for name in limits if (limit := _number(self.folder / name)) is not None]
        if not found or min(found) >= _UNLIMITED:
            return None
        used = _number(self.folder / current)
        if used is None:
            return None
        fields = _stat(self.folder / "memory.stat")
        return MemoryUsage(
            limit_bytes=min(found),
            used_bytes=used,
            inactive_file_bytes=fields.get(f"{prefix}inactive_file", 0),
            active_file_bytes=fields.get(f"{prefix}active_file", 0),
        )


def memory(proc: Path = cgroups.PROC, root: Path = cgroups.ROOT, ours: Iterable[int] = ()) -> Memory:
    """The memory of this machine or of the tightest cgroup around this process.

    The memory of the processes ``ours`` counts as available, as far as it is known: they give it back when another plan
    needs it. Inactive file pages of a cgroup count as available as well; active ones are in use, unless ``ours`` have
    mapped them.
    """
    ours = list(ours)
    held, mapped = held_bytes(ours), sum(map(_mapped, ours))
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for group in groups(proc, root):
        usage = group.usage()
        if usage is not None:
            total = min(total, usage.limit_bytes)
            free = usage.limit_bytes - usage.used_bytes + usage.inactive_file_bytes
            free += min(usage.active_file_bytes, mapped)
            available = min(available, max(0, free))
    return Memory(total, min(available + held, total))


def children() -> list[int]:
    """The running processes that this one started, except those in ``staying``."""
    return [child.pid for child in psutil.Process().children() if child.pid not in staying]


def groups(proc: Path = cgroups.PROC, root: Path = cgroups.ROOT) -> list[MemoryGroup]:
    """Every memory cgroup from ours up to the root, with and without a limit."""
    return [MemoryGroup(folder, version) for folder, version in cgroups.folders("memory", proc, root)]


def held_bytes(pids: Iterable[int], proc: Path = Path("/proc")) -> int:
    """Bytes of memory of the processes ``pids`` that the system cannot reclaim immediately.

    That is anonymous and shared memory, and locked file pages; other file pages are clean copies of the disk and are
    not counted, and memory shared between processes is counted once. Processes that are gone take nothing. Where the
    system has no such figure, the closest one counts: private memory, else all resident memory.
    """
    return sum(_held(pid, proc) for pid in pids)


def _held(pid: int, proc: Path) -> int:
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return _private(pid)
    fields = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    ours = fields.get("Pss_Anon", 0) + fields.get("Pss_Shmem", 0)
    if "Pss_Anon" not in fields:  # an older kernel, which reports this differently or not at all
        return fields.get("Private_Dirty", 0) + fields.get("Shared_Dirty", 0)
    return ours + min(fields.get("Pss_File", 0), max(0, fields.get("Locked", 0) - ours))


def _mapped(pid: int) -> int:
    """Bytes of resident file pages that the process has mapped; 0 if the system does not report them."""
    try:
        return int(getattr(psutil.Process(pid).memory_info(), "shared", 0))
    except psutil.Error:
        return 0


def _private(pid: int) -> int:
    try:
        process = psutil.Process(pid)
        info = process.memory_info()
        if sys.platform == "darwin":
            with contextlib.suppress(psutil.AccessDenied):
                return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0
    private = getattr(info, "private", None)  # Windows
    if private is None and sys.platform == "linux":
        private = info.rss - info.shared
    return int(info.rss if private is None else private)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path) -> dict[str, int]:
    try:
        return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}
    except (OSError, ValueError):
        return {}
