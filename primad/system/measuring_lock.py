"""Daemons on one machine measure one after another: timings taken at once would disturb each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import filelock
import platformdirs

TURN_TIMEOUT_S: Final = 180.0
LOOK_UP_S: Final = 0.2
"""While a daemon waits for its turn, it looks this often whether it is to stop."""


@contextmanager
def measuring(stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Wait for this process's turn to measure, at most ``TURN_TIMEOUT_S``; then, or once ``stopped``, go on anyway."""
    folder = Path(platformdirs.user_cache_dir("primad", appauthor=False))
    lock = None
    deadline = time.monotonic() + TURN_TIMEOUT_S
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / "measuring.lock", timeout=LOOK_UP_S)
        while not lock.is_locked and not stopped() and time.monotonic() < deadline:
            with suppress(filelock.Timeout):
                lock.acquire()
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
