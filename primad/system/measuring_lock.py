"""Daemons on one machine measure one after another: timings taken at once would disturb each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import filelock
import platformdirs

TURN_TIMEOUT_S: Final = 180.0


@contextmanager
def measuring() -> Iterator[None]:
    """Wait for this process's turn to measure, at most ``TURN_TIMEOUT_S``; then go on anyway."""
    folder = Path(platformdirs.user_cache_dir("primad", appauthor=False))
    lock = filelock.FileLock(folder / "measuring.lock", timeout=TURN_TIMEOUT_S)
    with suppress(OSError, filelock.Timeout):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
