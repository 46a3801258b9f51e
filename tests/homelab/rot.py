"""A disk that rots: bytes of a file change beneath the file system, which goes on giving out what it has in memory.

Overwriting the file itself is another thing: programs that mapped it see that at once.
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
"""Flags of an extent whose place on the disk is not known, or not where its bytes are."""


def rot(device: Device, file: Path) -> None:
    """Turn over one byte in the middle of a file of a device, on its disk only. The device must have ``disk_bytes``."""
    assert device.spec.disk_bytes is not None, f"{device.name} has no disk of its own"
    with (root(device.lab) / device.name / "disk.img").open("r+b") as image:
        turn_over(image, _on_disk(file, file.stat().st_size // 2))
        os.fsync(image.fileno())


def overwrite(file: Path) -> None:
    """Turn over one byte in the middle of a file, as a program does."""
    with file.open("r+b") as opened:
        turn_over(opened, file.stat().st_size // 2)


def turn_over(file: BinaryIO, place: int) -> None:
    """Turn over the byte at ``place``."""
    file.seek(place)
    byte = file.read(1)
    file.seek(place)
    file.write(bytes([byte[0] ^ 0xFF]))
    file.flush()


def forget_pages(file: Path) -> None:
    """Have the file system read a file from its disk again; nobody may have it mapped."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _on_disk(path: Path, offset: int) -> int:
    """Where on its disk the byte ``offset`` of a file lies."""
    with path.open("rb") as file:
        asked = bytearray(_HEAD.pack(offset, 1, _SYNC, 0, 1, 0) + bytes(_EXTENT.size))
        fcntl.ioctl(file.fileno(), _FIEMAP, asked)
    found = _HEAD.unpack_from(asked)[3]
    assert found == 1, f"{path}: no place on the disk"
    logical, physical, _, _, _, flags, *_ = _EXTENT.unpack_from(asked, _HEAD.size)
    assert not flags & _ENCODED, f"{path}: not written plainly (flags {flags:#x})"
    return int(physical + offset - logical)
