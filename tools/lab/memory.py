"""Limit the memory of some processes: a cgroup with a limit, and counters of what they did with it.

    with LimitedGroup(limit_bytes) as group:
        process = subprocess.Popen(...)
        group.add(process.pid)
        before = group.counters()

The page cache counts too: a page of a file belongs to the group whose process had it read. Pages that are already in
memory are used without being counted, so call ``disk.forget`` for the measured files before the measurement begins. The
group belongs to a lab without devices, so the next lab removes what a killed process leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tools.lab.cgroups import Cgroups, Hierarchies, here
from tools.lab.names import new_id
from tools.lab.record import Owner, Record
from tools.lab.removal import remove, remove_abandoned
from tools.lab.requirements import require

_NAME: Final = "limited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a group holds, and what it has done since it was made.

    ``anonymous_bytes`` belong to no file, ``cache_bytes`` are the page cache, of which ``shared_bytes`` are in no file
    on a disk. ``unevictable_bytes`` are locked, of any kind. ``usage_bytes`` is everything counted, including the
    kernel's own; ``oom_kills`` counts processes killed by the limit. ``read_bytes`` came from disks, by calls,
    read-ahead and page faults alike.
    """

    anonymous_bytes: int
    cache_bytes: int
    shared_bytes: int
    unevictable_bytes: int
    usage_bytes: int
    swap_bytes: int
    oom_kills: int
    read_bytes: int

    @property
    def held_bytes(self) -> int:
        """Memory of processes that cannot be reclaimed immediately; locked memory that belongs to no file counts
        twice."""
        return self.anonymous_bytes + self.shared_bytes + self.unevictable_bytes

    @property
    def kernel_bytes(self) -> int:
        """Memory that the kernel itself keeps for the processes, such as page tables."""
        return max(0, self.usage_bytes - self.anonymous_bytes - self.cache_bytes)


class LimitedGroup:
    """A cgroup with this limit, empty at first; at the end of the block its processes are killed and it is removed.

    Raises ``LabError`` if cgroups are unavailable.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lab = new_id()
        self._at: Hierarchies
        self._groups: Cgroups

    def __enter__(self) -> Self:
        require()
        self._at = here()
        remove_abandoned(self._at)
        Record(lab=self._lab, owner=Owner.this(), devices=()).create()
        try:
            self._groups = Cgroups(self._lab, self._at)
            self._groups.create(_NAME)
            self._groups.limit_memory(_NAME, self.limit_bytes)
        except BaseException:
            remove(self._lab, self._at)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove(self._lab, self._at)

    def add(self, pid: int) -> None:
        """Put a process into the group; memory that it and its children allocate from now on counts."""
        for path in self._groups.procs(_NAME):
            path.write_text(str(pid), encoding="ascii")

    def pids(self) -> set[int]:
        """Return the group's processes."""
        return self._groups.pids(_NAME)

    def proc_cgroup(self) -> str:
        """Return what ``/proc/PID/cgroup`` says about memory for a process of the group."""
        path = self._at.group("memory", self._lab, _NAME).relative_to(self._at.folders["memory"])
        return f"0::/{path}\n" if self._at.version == 2 else f"1:memory:/{path}\n"

    def counters(self) -> Counters:
        """Return the current counters."""
        return (self._second if self._at.version == 2 else self._first)()

    def _first(self) -> Counters:
        folder = self._at.group("memory", self._lab, _NAME)
        held = _fields(folder / "memory.stat")
        return Counters(
            anonymous_bytes=held["total_rss"],
            cache_bytes=held["total_cache"],
            shared_bytes=held.get("total_shmem", 0),
            unevictable_bytes=held["total_unevictable"],
            usage_bytes=_number(folder / "memory.usage_in_bytes"),
            swap_bytes=held.get("total_swap", 0),
            oom_kills=_fields(folder / "memory.oom_control").get("oom_kill", 0),
            read_bytes=self._read("blkio.throttle.io_service_bytes_recursive", _reads_of_first),
        )

    def _second(self) -> Counters:
        folder = self._at.group("memory", self._lab, _NAME)
        held, swap = _fields(folder / "memory.stat"), folder / "memory.swap.current"
        return Counters(
            anonymous_bytes=held["anon"],
            cache_bytes=held["file"],
            shared_bytes=held["shmem"],
            unevictable_bytes=held["unevictable"],
            usage_bytes=_number(folder / "memory.current"),
            swap_bytes=_number(swap) if swap.exists() else 0,
            oom_kills=_fields(folder / "memory.events")["oom_kill"],
            read_bytes=self._read("io.stat", _reads_of_second),
        )

    def _read(self, key: str, reads: Callable[[str], Iterator[int]]) -> int:
        """Return bytes read from all disks, by the cgroup's count, or by its processes' own if cgroups do not count."""
        if "blkio" in self._at.folders:
            path = self._at.group("blkio", self._lab, _NAME) / key
            if path.exists():
                return sum(reads(path.read_text(encoding="ascii")))
        return sum(read_bytes(pid) for pid in self.pids())


def read_bytes(pid: int) -> int:
    """Return the bytes that a process has read from disks, page faults included; 0 if it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(": ")
            if name == "read_bytes":
                return int(value)
    return 0


def _reads_of_first(text: str) -> Iterator[int]:
    for line in text.splitlines():
        match line.split():
            case [device, "Read", count] if not _is_loop(device):
                yield int(count)


def _reads_of_second(text: str) -> Iterator[int]:
    for line in text.splitlines():
        device, *pairs = line.split()
        if not _is_loop(device):
            yield from (int(pair.removeprefix("rbytes=")) for pair in pairs if pair.startswith("rbytes="))


def _is_loop(device: str) -> bool:
    """Whether ``major:minor`` is a loop device: reads through it are reads from another disk and counted there."""
    return device.startswith("7:")


def _fields(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
