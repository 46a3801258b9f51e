"""Atomic file writes, files that only their owner may read, and reserved disk space."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import filelock

from primad.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 1 << 20
PRIVATE: Final = 0o600
LOCK_PATIENCE_S: Final = 3.0
"""A lock is held to write one small file. A daemon waits for it no longer than its peers wait for the daemon."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
RESERVE_BYTES: Final = 1 << 30
RESERVE_SHARE: Final = 0.02


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Prevent other primad processes from changing ``path`` meanwhile. Raises ``ConfigError`` if one keeps the lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise _unwritable(path, exc) from exc
    taken = ConfigError(f"{path}: another primad is writing it and does not end; stop that one")
    with locked(path.with_suffix(".lock"), path, taken, LOCK_PATIENCE_S):
        yield


@contextmanager
def locked(lock: Path, path: Path, taken: ConfigError, patience_s: float = 0.0) -> Iterator[None]:
    """Hold ``lock``, which guards ``path``. Raises ``taken`` if another process holds it for longer than ``patience_s``,
    ``ConfigError`` if it cannot be written.
    """
    file = filelock.FileLock(lock, timeout=patience_s)
    try:
        file.acquire()
    except filelock.Timeout as exc:
        raise taken from exc
    except OSError as exc:
        raise _unwritable(path, exc) from exc
    try:
        yield
    finally:
        file.release()


def write_private(path: Path, data: bytes) -> None:
    """Replace ``path`` atomically by ``data``, with mode 0600 from the first byte. Raises ``ConfigError``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created with mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except OSError:
            with suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as exc:
        raise _unwritable(path, exc) from exc


def _unwritable(path: Path, exc: OSError) -> ConfigError:
    """The error for ``path`` in a home folder that cannot be written."""
    return ConfigError(
        f"{path}: cannot be written: {exc.strerror or exc}; make room or the folder writable, or choose another --home"
    )


def read_private(path: Path) -> bytes | None:
    """The content of ``path``, or None when there is no such file. If others may read it, they lose that permission.

    Raises ``ConfigError`` for one that cannot be read or is larger than ``MAX_FILE_BYTES``.
    """
    try:
        with path.open("rb") as file:
            _tighten(path, file.fileno())
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}; it must be a file of your own") from exc
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes, so it is not ours; move it away")
    return data


def _tighten(path: Path, descriptor: int) -> None:
    if sys.platform == "win32":  # no mode bits: the folder's access list decides
        return
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode & _OTHERS:
        os.fchmod(descriptor, PRIVATE)
        logger.warning("%s could be read or written by others (mode %03o); it is 600 now", path, mode)


def is_ours(path: Path) -> bool:
    """Whether only this user can have written to ``path``, which is not a link."""
    try:
        found = path.lstat()
    except OSError:
        return False
    if stat.S_ISLNK(found.st_mode):
        return False
    if sys.platform == "win32":  # the user's own folders are closed to others by their access lists
        return True
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def reserve_bytes(total_bytes: int) -> int:
    """Space that stays free on a disk of ``total_bytes``: a full system disk stops other programs, too."""
    return min(RESERVE_BYTES, int(total_bytes * RESERVE_SHARE))


def lacking_room(folder: Path, size_bytes: int) -> str:
    """The free space at ``folder`` in words, if ``size_bytes`` do not fit; else empty. Raises ``OSError``."""
    usage = shutil.disk_usage(folder)
    reserve = reserve_bytes(usage.total)
    if usage.free - size_bytes >= reserve:
        return ""
    return f"{usage.free} bytes of disk are free, of which {reserve} stay free"


def write_whole(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``. Raises ``OSError``, after which nothing has changed."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
