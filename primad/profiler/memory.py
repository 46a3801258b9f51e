"""How much memory this process may use: the machine's, or less where a cgroup limits it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory: all there is for this process, and what of it is free or can be reclaimed now."""

    total_bytes: int
    available_bytes: int


def memory(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Memory:
    """The memory of this machine or of the tightest cgroup around this process (version 1 or 2)."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for limit, used in _cgroups(proc, root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return Memory(total, available)


def _cgroups(proc: Path, root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of every memory cgroup from ours up to the root."""
    try:
        lines = proc.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.strip("/")
        while True:
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None and limit < _UNLIMITED:
                found.append((limit, used - _stat(folder / "memory.stat", names[2])))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, key: str) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields.get(key, 0))
    except (OSError, ValueError):
        return 0
