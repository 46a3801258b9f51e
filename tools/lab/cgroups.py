"""The cgroups of a lab, version 1 or 2, whichever has the controllers here.

A lab has one group, ``primad-lab-<id>``, in every hierarchy it needs. Below it are one group for each device and one,
``lab``, for the lab's own processes. Nothing above that group is changed, except that version 2 enables its controllers
for children. Every process of a lab is in it, so it also shows what to kill at the end.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.lab.names import PREFIX, LabError

_WANTED: Final = ("memory", "cpu", "blkio")
_PERIOD_US: Final = 20_000
"""Short, so that a device with half a core is slow instead of stopping for 50 ms at a time."""

_PATIENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where groups are made: ``version`` and a folder for each existing controller of memory, cpu and blkio (one for
    all in version 2)."""

    version: int
    folders: dict[str, Path]

    def group(self, controller: str, lab: str, name: str) -> Path:
        """Return the folder of a group in the hierarchy of ``controller``. Raises ``LabError`` if that is missing."""
        if controller not in self.folders:
            raise LabError(
                f"cgroup controller {controller}: not on this machine; leave its limits out of the fleet, or enable it"
            )
        return self.folders[controller] / f"{PREFIX}{lab}" / name

    def tops(self) -> list[Path]:
        """Return the folders without duplicates."""
        return list(dict.fromkeys(self.folders.values()))


def find(mountinfo: str, read: Path = Path("/")) -> Hierarchies:
    """Return the hierarchies named in the text of ``/proc/self/mountinfo``. Raises ``LabError`` if there is none."""
    first: dict[str, Path] = {}
    second: Path | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, *options = right.split(" ")
        where = read / left.split(" ")[4].replace("\\040", " ").lstrip("/")
        if kind == "cgroup":
            for controller in _WANTED:
                if controller in options[-1].split(","):
                    first.setdefault(controller, where)
        elif kind == "cgroup2" and second is None:
            second = where
    if second is not None:
        controllers = (second / "cgroup.controllers").read_text(encoding="ascii").split()
        if {"memory", "cpu"} <= set(controllers):
            names = {"memory": "memory", "cpu": "cpu", "io": "blkio"}
            return Hierarchies(2, {names[name]: second for name in names if name in controllers})
    if not first:
        raise LabError("cgroups: neither version 1 nor 2 holds memory and cpu here; mount /sys/fs/cgroup")
    return Hierarchies(1, first)


def here() -> Hierarchies:
    """Return the hierarchies of this machine."""
    return find(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))


class Cgroups:
    """The groups of one lab."""

    def __init__(self, lab: str, hierarchies: Hierarchies) -> None:
        self._lab = lab
        self._at = hierarchies

    def create(self, name: str) -> None:
        """Make the group ``name``. Raises ``LabError`` if the hierarchy cannot be written."""
        try:
            for top in self._at.tops():
                ours = top / f"{PREFIX}{self._lab}"
                ours.mkdir(exist_ok=True)
                if self._at.version == 2:
                    self._lend(top)
                    self._lend(ours)
                (ours / name).mkdir()
        except OSError as exc:
            where = exc.filename or ", ".join(str(top) for top in self._at.tops())
            raise LabError(f"cgroups: {where}: {exc.strerror}; a lab needs cgroups that root may write") from exc

    def _lend(self, folder: Path) -> None:
        names = {"memory": "memory", "cpu": "cpu", "blkio": "io"}
        wanted = {names[controller] for controller in self._at.folders}
        control = folder / "cgroup.subtree_control"
        lacking = wanted - set(control.read_text(encoding="ascii").split())
        if lacking:
            control.write_text(" ".join(f"+{name}" for name in sorted(lacking)), encoding="ascii")

    def procs(self, name: str) -> list[Path]:
        """Return the files into which a process writes its id to join the group."""
        return [top / f"{PREFIX}{self._lab}" / name / "cgroup.procs" for top in self._at.tops()]

    def limit_memory(self, name: str, max_bytes: int) -> None:
        """Limit the memory of the group, swap included."""
        if self._at.version == 2:
            self._set("memory", name, {"memory.max": max_bytes})
            self._set("memory", name, {"memory.swap.max": 0}, optional=True)
        else:
            self._set("memory", name, {"memory.limit_in_bytes": max_bytes})
            self._set("memory", name, {"memory.memsw.limit_in_bytes": max_bytes}, optional=True)

    def limit_cpu(self, name: str, cpus: float) -> None:
        """Limit the CPU time per second of the group; can be changed at any time."""
        quota = max(1000, round(cpus * _PERIOD_US))
        if self._at.version == 2:
            self._set("cpu", name, {"cpu.max": f"{quota} {_PERIOD_US}"})
        else:
            self._set("cpu", name, {"cpu.cfs_period_us": _PERIOD_US, "cpu.cfs_quota_us": quota})

    def limit_disk(self, name: str, device: str, read: int | None, write: int | None) -> None:
        """Limit the bytes per second that the group reads from and writes to block device ``device`` (``major:minor``).

        Version 1 counts buffered writes only when the process itself waits for them (fsync); reads always.
        """
        for key, rate in (("r", read), ("w", write)):
            if rate is None:
                continue
            if self._at.version == 2:
                self._set("blkio", name, {"io.max": f"{device} {key}bps={rate}"})
            else:
                word = "read" if key == "r" else "write"
                self._set("blkio", name, {f"blkio.throttle.{word}_bps_device": f"{device} {rate}"})

    def _set(self, controller: str, name: str, values: dict[str, object], *, optional: bool = False) -> None:
        folder = self._at.group(controller, self._lab, name)
        for key, value in values.items():
            if optional and not (folder / key).exists():
                continue  # kernels without swap accounting
            try:
                (folder / key).write_text(str(value), encoding="ascii")
            except OSError as exc:
                raise LabError(f"cgroup {folder / key}: {value}: {exc.strerror}; change that limit of {name}") from exc

    def memory_bytes(self, name: str) -> int | None:
        """Return the memory that the group uses now; None if it is not counted."""
        if "memory" not in self._at.folders:
            return None
        key = "memory.current" if self._at.version == 2 else "memory.usage_in_bytes"
        return int((self._at.group("memory", self._lab, name) / key).read_text(encoding="ascii"))

    def oom_kills(self, name: str) -> int:
        """Return how many processes of the group were killed for lack of memory; 0 if they are not counted."""
        if "memory" not in self._at.folders:
            return 0
        key = "memory.events" if self._at.version == 2 else "memory.oom_control"
        text = (self._at.group("memory", self._lab, name) / key).read_text(encoding="ascii")
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)

    def pids(self, name: str) -> set[int]:
        """Return the processes of the group."""
        found: set[int] = set()
        for path in self.procs(name):
            with suppress(FileNotFoundError, OSError):
                found |= {int(line) for line in path.read_text(encoding="ascii").split()}
        return found - {0}

    def names(self) -> list[str]:
        """Return the existing groups, the lab's own last: it holds the namespaces."""
        found = {
            entry.name
            for top in self._at.tops()
            for entry in (top / f"{PREFIX}{self._lab}").glob("*")
            if entry.is_dir()
        }
        return sorted(found, key=lambda name: (name == "lab", name))

    def kill(self, name: str) -> None:
        """Kill every process of the group and wait until none is left. Raises ``LabError`` if some do not die."""
        deadline = time.monotonic() + _PATIENCE_S
        while pids := self.pids(name):
            end(pids, deadline)
            if time.monotonic() >= deadline:
                raise LabError(f"{name}: processes {sorted(pids)} do not die; look at them with ps")

    def remove(self) -> None:
        """Kill all processes and remove every group; it is no error if there are none.

        A process that is starting may still join until its group is gone; then it ends by itself (``inside.py``).
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            for name in self.names():
                self.kill(name)
            left = [error for top in self._at.tops() if (error := _remove_groups(top / f"{PREFIX}{self._lab}"))]
            if not left:
                return
            if time.monotonic() >= deadline:
                raise LabError(
                    f"cgroup {left[0].filename}: cannot be removed: {left[0].strerror}; remove it with rmdir"
                )
            time.sleep(0.01)  # the kernel releases a dead process a moment after its end


def end(pids: set[int], deadline: float, number: int = signal.SIGKILL) -> None:
    """Send these processes a deadly signal and wait for their end until ``deadline`` (``time.monotonic``)."""
    for handle in _handles(pids):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _handles(pids: set[int]) -> Iterator[int]:
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            yield handle
        finally:
            os.close(handle)


def _remove_groups(ours: Path) -> OSError | None:
    """Remove a lab's groups in one hierarchy. Return the error of the first that stays."""
    for folder in [*(entry for entry in ours.glob("*") if entry.is_dir()), ours]:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError as exc:
            return exc
    return None
