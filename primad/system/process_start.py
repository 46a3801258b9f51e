"""Whether a process that is recorded in a file still runs. Its id is not enough, since ids are reused.

A start is recorded twice, in seconds since the epoch and since the machine's start, because setting the clock moves one
or the other, depending on the system.

Daemons on one machine measure one after another: concurrent timings would disturb each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import filelock
import platformdirs
import psutil

_SAME_START_S: Final = 2.0
"""Maximum difference between two readings of one process's start."""
TURN_TIMEOUT_S: Final = 180.0


def start_of(pid: int) -> tuple[float, float]:
    """When the process ``pid`` started: seconds since the epoch, seconds since the machine's start.

    Raises ``psutil.Error``, and ``ValueError`` or ``OverflowError`` for an impossible process id.
    """
    created = psutil.Process(pid).create_time()
    return created, created - psutil.boot_time()


def still_runs(pid: int, created: float, since_boot: float) -> bool:
    """Whether the process ``pid`` that started then runs and may be asked for it."""
    try:
        now = start_of(pid)
    except (psutil.Error, ValueError, OverflowError):
        return False
    return abs(now[0] - created) < _SAME_START_S or abs(now[1] - since_boot) < _SAME_START_S


@contextmanager
def measuring() -> Iterator[None]:
    """Wait for this process's turn to measure, at most ``TURN_TIMEOUT_S``; then continue anyway."""
    folder = Path(platformdirs.user_cache_dir("primad", appauthor=False))
    lock = filelock.FileLock(folder / "measuring.lock", timeout=TURN_TIMEOUT_S)
    with suppress(OSError, filelock.Timeout):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
