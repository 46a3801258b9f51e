"""The records of a measurement, and their places.

Figures of the machine (processor, GPU, RAM) are kept in the user's cache folder, so several homes on one machine
measure it once. Records are distinguished by machine, build of llama.cpp, pinned threads and the processors that this
process may use: a daemon bound to one core measures for itself. How much memory exists and may be used is not recorded
but read each time. Figures of the file system under a home are kept in that home. A file that is damaged, or of another
version or machine, is ignored.
"""

from __future__ import annotations

import contextlib
import platform
import re
import uuid
from hashlib import blake2b
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import platformdirs
import psutil

from halda import CpuProfile, DiskProfile, GpuProfile
from primad.engine.build import build_id
from primad.errors import ConfigError
from primad.settings.old_names import with_new_keys
from primad.settings.profiles import Implausible, check_cpu, check_disk, check_gpu
from primad.system.files import write_whole
from primad.system.processors import usable_cpus

VERSION: Final = 16
"""Incremented when the way of measuring changes."""
Record = TypeVar("Record")
_DISTURBED: Final = 0.15
"""Share of a machine's cores that others may keep busy while it is measured."""
_MAC: Final = re.compile(r"[0-9a-fA-F]{2}([:-][0-9a-fA-F]{2}){5}")
_MADE_UP: Final = 1 << 40
"""The multicast bit, which is set in made-up hardware addresses and never in a device's own."""
_LOCAL: Final = 1 << 41
"""The bit of a locally administered hardware address, one not assigned by the maker."""


class UnusedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that is not used, and ``why``; without ``name`` if its name is unknown."""

    name: str
    why: str

    def __str__(self) -> str:
        """As one line for the owner."""
        what = f"the GPU {self.name} stays unused" if self.name else "GPUs stay unused"
        return f"{what}: {self.why}; 'primad doctor' looks at it, 'primad profile --remeasure' tries again"


class MachineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a machine; ``is_quick`` if it was measured in a few seconds.

    ``others_cores`` is the number of processors that other programs kept busy meanwhile.
    """

    version: int
    measured: str
    host: str
    build: str
    is_quick: bool
    pinned_threads: int | None
    ram_read_bytes_per_s: float
    cpu: CpuProfile
    gpus: tuple[GpuProfile, ...]
    unused_gpus: tuple[UnusedGpu, ...]
    others_cores: float

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used so much of the machine that the figures are too slow."""
        return self.others_cores > _DISTURBED * max(self.cpu.cores, 2)


class HomeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of the file system under a home."""

    version: int
    measured: str
    host: str
    is_quick: bool
    disk: DiskProfile


def host_id() -> str:
    """An id that is equal for all processes of one machine; a digest, so that it reveals nothing else."""
    return blake2b(f"primad {_node()} {platform.node()}".encode(), digest_size=8).hexdigest()


def _node() -> int:
    """A number of this machine's hardware.

    If no interface has an IPv4 address, the standard library makes up a number that differs in every process. In that
    case, use the lowest hardware address assigned by a maker, or else the lowest.
    """
    node = uuid.getnode()
    if not node & _MADE_UP:
        return node
    found = [
        int(entry.address.replace("-", ":").replace(":", ""), 16)
        for addresses in psutil.net_if_addrs().values()
        for entry in addresses
        if entry.family == psutil.AF_LINK and _MAC.fullmatch(entry.address)
    ]
    own = [each for each in found if each and not each & _MADE_UP]
    return min(own, key=lambda each: (bool(each & _LOCAL), each), default=0)


def machine_file(threads: int | None, folder: Path | None = None) -> Path:
    """The path of this machine's figures, as far as this process may use the machine: in the user's cache folder unless
    ``folder`` is given.

    Raises ``EngineError`` when llama.cpp is not installed.
    """
    key = blake2b(repr((VERSION, host_id(), build_id(), threads, usable_cpus())).encode(), digest_size=8).hexdigest()
    return (folder or Path(platformdirs.user_cache_dir("primad", appauthor=False))) / f"machine-{key}.json"


def home_file(home: Path) -> Path:
    """The path of the figures of the file system under ``home``."""
    return home / "profile.json"


def read_machine(home: Path, threads: int | None) -> MachineRecord | None:
    """The record of this machine, from the user's cache folder or from ``home``."""
    for folder in (None, home):
        record = _read(machine_file(threads, folder), MachineRecord)
        if record is None or (record.version, record.host) != (VERSION, host_id()):
            continue
        with contextlib.suppress(Implausible):
            check_cpu(record.cpu, record.ram_read_bytes_per_s)
            for gpu in record.gpus:
                check_gpu(gpu)
            return record
    return None


def read_home(home: Path) -> HomeRecord | None:
    """The record of the file system under ``home``."""
    record = _read(home_file(home), HomeRecord)
    if record is None or (record.version, record.host) != (VERSION, host_id()):
        return None
    with contextlib.suppress(Implausible):
        check_disk(record.disk)
        return record
    return None


def write(machine: MachineRecord, disk: HomeRecord, home: Path) -> None:
    """Write both records; the machine's goes to ``home`` if the user's cache folder cannot be written.

    Raises ``ConfigError`` when ``home`` cannot be written either.
    """
    try:
        write_whole(home_file(home), _encoded(disk))
        path = machine_file(machine.pinned_threads)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, _encoded(machine))
            return
        write_whole(machine_file(machine.pinned_threads, home), _encoded(machine))
    except OSError as exc:
        raise ConfigError(
            f"--home {home}: the profile cannot be kept there: {exc.strerror or exc}; choose another folder"
        ) from exc


def _encoded(record: MachineRecord | HomeRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def _read(path: Path, kind: type[Record]) -> Record | None:
    try:
        return msgspec.json.decode(with_new_keys(path.read_bytes()), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
