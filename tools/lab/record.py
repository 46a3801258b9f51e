"""What a lab records about itself, for later commands and for cleaning up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tools.lab.cgroups import Hierarchies
from tools.lab.fleet import DeviceSpec
from tools.lab.names import ROOTS, LabError, lab_ids, root

_FILE = "lab.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, distinguished from a later one with the same id by its start time."""

    pid: int
    started: int

    @classmethod
    def this(cls) -> Owner:
        """Return the current process."""
        started = _started(os.getpid())
        assert started is not None
        return cls(pid=os.getpid(), started=started)

    def lives(self) -> bool:
        """Whether it still runs."""
        return _started(self.pid) == self.started


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A lab. ``owner`` is the process that takes it down at its end; None if it stays until ``homelab down``.

    ``holders`` hold the namespaces of the devices, in order, ``switch`` those of the bridge; empty while it is being
    built.
    """

    lab: str
    owner: Owner | None
    devices: tuple[DeviceSpec, ...]
    ready: bool = False
    switch: int | None = None
    relay: int | None = None
    holders: tuple[int, ...] = ()
    netem: bool = False

    def create(self) -> None:
        """Make the lab's folder with the record in it atomically, so that no process sees one without the other."""
        part = root(self.lab).with_suffix(".new")
        part.mkdir(parents=True)
        (part / _FILE).write_bytes(msgspec.json.encode(self))
        part.rename(root(self.lab))

    def save(self) -> None:
        """Replace the record."""
        part = root(self.lab) / f"{_FILE}.new"
        part.write_bytes(msgspec.json.encode(self))
        part.rename(root(self.lab) / _FILE)


def read(lab: str) -> Record:
    """Read the record of a lab. Raises ``LabError`` if there is no readable one."""
    try:
        return msgspec.json.decode((root(lab) / _FILE).read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as exc:
        raise LabError(
            f"lab {lab}: not there, or broken; see homelab status, remove it with homelab down {lab}"
        ) from exc


def labs(hierarchies: Hierarchies) -> list[str]:
    """Return every lab that still has something on this machine, running or left over."""
    return sorted(set().union(*(lab_ids(folder) for folder in (ROOTS, *hierarchies.tops()))))


def owner_lives(lab: str) -> bool | None:
    """Whether the process that takes the lab down still runs; False if its record is gone, None for a lab that
    stays."""
    try:
        owner = read(lab).owner
    except LabError:
        return False
    return None if owner is None else owner.lives()


def _started(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
