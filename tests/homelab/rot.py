"""A rotting disk: bytes of a file change below the file system, which still returns what is in the page cache.

Overwriting the file itself is different: programs that mapped it see the change at once.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import BinaryIO, Final

from tools.lab.device import Device
from tools.lab.names import root

_FIEMAP: Final = 0xC020660B
_SYNC: Final = 1
_HEAD: Final = struct.Struct("=QQIIII")
_EXTENT: Final = struct.Struct("=QQQ2QI3I")
_ENCODED: Final = 0x0002 | 0x0004 | 0x0008
"""Flags of an extent whose place on the disk is unknown, or does not hold its plain bytes."""


def rot(device: Device, file: Path) -> None:
    """Invert one byte in the middle of a device's file, on its disk only. The device must have ``disk_bytes``."""
    assert device.spec.disk_bytes is not None, f"{device.name} has no disk of its own"
    with (root(device.lab) / device.name / "disk.img").open("r+b") as image:
        turn_over(image, _on_disk(file, file.stat().st_size // 2))
        os.fsync(image.fileno())


def overwrite(file: Path) -> None:
    """Invert one byte in the middle of a file through the file system."""
    with file.open("r+b") as opened:
        turn_over(opened, file.stat().st_size // 2)


def turn_over(file: BinaryIO, place: int) -> None:
    """Invert the byte at ``place``."""
    file.seek(place)
    byte = file.read(1)
    file.seek(place)
    file.write(bytes([byte[0] ^ 0xFF]))
    file.flush()


def forget_pages(file: Path) -> None:
    """Drop a file from the page cache; no process may have it mapped."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _on_disk(path: Path, offset: int) -> int:
    """Return the position on the disk of byte ``offset`` of a file."""
    with path.open("rb") as file:
        asked = bytearray(_HEAD.pack(offset, 1, _SYNC, 0, 1, 0) + bytes(_EXTENT.size))
        fcntl.ioctl(file.fileno(), _FIEMAP, asked)
    found = _HEAD.unpack_from(asked)[3]
    assert found == 1, f"{path}: no place on the disk"
    logical, physical, _, _, _, flags, *_ = _EXTENT.unpack_from(asked, _HEAD.size)
    assert not flags & _ENCODED, f"{path}: not written plainly (flags {flags:#x})"
    return int(physical + offset - logical)
