"""Which disk a folder lies on, so that devices of one machine know when they share one.

Two file systems may be parts of one disk, and one file system may have several numbers, so neither the path nor
``st_dev`` identifies the disk: Linux shows for each block device which disk it is a part of and which devices it is
built from. On other systems, and for a file system on no disk of this machine (a network share, memory, a container
layer), nothing is known, and the disk counts as the machine's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

SYS: Final = Path("/sys/dev/block")
MOUNTS: Final = Path("/proc/self/mountinfo")
_MAX_LEVELS: Final = 8
"""Levels of devices that a device is built from: a volume on an encrypted part of a disk has three."""


class DeviceNumbers(Protocol):
    """The attributes of a file that are needed: the number of the device that it is on, and of the device that it is."""

    @property
    def st_dev(self) -> int: ...
    @property
    def st_rdev(self) -> int: ...


NumbersOf = Callable[[str], DeviceNumbers]


def _stat(path: str) -> DeviceNumbers:
    return Path(path).stat()  # type: ignore[return-value,unused-ignore]  # Windows has no numbers of devices


def disk_name(
    folder: Path, host: str, *, look: NumbersOf = _stat, sys_folder: Path = SYS, mounts: Path = MOUNTS
) -> str:
    """A name that is equal for folders on one disk of the machine ``host``; empty if the disk is unknown.

    It is a digest, so that it reveals nothing else. ``look`` is ``os.stat``.
    """
    if sys.platform != "linux":
        return ""
    try:
        number = _number(look(str(folder)).st_dev)
        source = _source(number, mounts, look) if number.startswith("0:") else number
        disks = sorted(_disks(sys_folder, source)) if source else []
    except (OSError, ValueError):
        return ""
    return blake2b(f"primad {host} {disks}".encode(), digest_size=4).hexdigest() if disks else ""


def _number(device: int) -> str:
    number = ""
    if sys.platform != "win32":
        number = f"{os.major(device)}:{os.minor(device)}"
    return number


def _source(number: str, mounts: Path, look: NumbersOf) -> str:
    """The block device of a file system whose number is not the device's (Btrfs), from the list of mounts."""
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        mount, _, of = line.partition(" - ")
        words = of.split()
        if mount.split()[2:3] == [number] and len(words) > 1 and words[1].startswith("/dev/"):
            return _number(look(words[1]).st_rdev)
    return ""


def _disks(sys_folder: Path, number: str, level: int = 0) -> set[str]:
    """The disks that the block device ``number`` is made from."""
    here = (sys_folder / number).resolve(strict=True)
    if (here / "partition").exists():
        here = here.parent
    slaves = here / "slaves"
    under = [] if level == _MAX_LEVELS or not slaves.is_dir() else list(slaves.iterdir())
    if not under:
        return {(here / "dev").read_text().strip()}
    return {disk for each in under for disk in _disks(sys_folder, (each / "dev").read_text().strip(), level + 1)}
