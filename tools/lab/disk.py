"""The disk of a device: its own file system in a file, its speed, and filling it up."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Final

from tools.lab.names import LabError
from tools.lab.requirements import tool_path

BALLAST: Final = "homelab-ballast"


def make_image(path: Path, size_bytes: int) -> None:
    """Make a sparse file with an empty file system; no blocks are reserved for root. Raises ``LabError``."""
    maker = tool_path("mkfs.ext4")
    if maker is None:
        raise LabError("disk_bytes: requires mkfs.ext4; install it (apt install e2fsprogs) or leave disk_bytes out")
    try:
        with path.open("wb") as image:
            image.truncate(size_bytes)
    except OSError as exc:
        raise LabError(f"disk_bytes = {size_bytes}: {path}: {exc.strerror}; choose another size") from exc
    done = subprocess.run(
        [maker, "-q", "-F", "-m", "0", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        raise LabError(f"disk_bytes = {size_bytes}: mkfs.ext4: {' '.join(done.stderr.split())}; choose another size")


def block_device(path: Path) -> str | None:
    """Return ``major:minor`` of the whole disk under ``path``; None if there is no single disk (overlay, tmpfs,
    btrfs)."""
    number = path.stat().st_dev
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not entry.exists():
        return None
    if (entry / "partition").exists():  # the kernel limits disks, not parts of them
        entry = entry.resolve().parent
    return (entry / "dev").read_text(encoding="ascii").strip()


def forget(path: Path) -> None:
    """Drop a file from the page cache, as far as no process has it mapped."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # unwritten pages would stay
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def fill(folder: Path) -> int:
    """Fill the file system of ``folder``. Return the bytes of the ballast file."""
    with (folder / BALLAST).open("ab") as ballast:
        handle = ballast.fileno()
        piece = 1 << 30
        while piece >= 512:
            try:
                os.posix_fallocate(handle, os.fstat(handle).st_size, piece)
            except OSError as exc:
                if exc.errno != errno.ENOSPC:
                    raise LabError(f"{folder}: cannot be filled: {exc.strerror}") from exc
                piece //= 2
        return os.fstat(handle).st_size


def free(folder: Path) -> None:
    """Remove the ballast file."""
    (folder / BALLAST).unlink(missing_ok=True)


def detach_loops(folder: Path) -> bool:
    """Detach loop devices on files under ``folder``. Return whether some are still attached.

    The kernel detaches them a moment after the last process of the device's mount namespace is gone.
    """
    found = False
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = entry.read_text(encoding="utf-8", errors="surrogateescape").strip()
        except OSError:
            continue  # detached meanwhile
        if Path(backing.removesuffix(" (deleted)")).is_relative_to(folder):
            found = True
            detach = [tool_path("losetup") or "losetup", "-d", f"/dev/{entry.parent.parent.name}"]
            subprocess.run(detach, capture_output=True, timeout=30, check=False)
    return found
