"""Measure the disk that holds the layer cache: with the engine's read-ahead, by page faults, and at random places.

Read-ahead runs while the processor computes, so it is measured that way: the disk is slower then, and computing takes
longer.

To keep a file out of the page cache, Linux drops it on request (``posix_fadvise``) and macOS does not cache it
(``F_NOCACHE``). Windows offers neither to an ordinary program, so the figure may be the cache's.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import numpy as np

from halda import DiskProfile
from primad.engine.streaming.pages import FileRange, Pages
from primad.errors import EngineError
from primad.profiler.trial_messages import SteppedOn
from primad.settings.profiles import with_bounded_rates

if sys.platform == "darwin":
    import fcntl

FILE_BYTES: Final = 128 << 20
_MIN_BYTES: Final = 8 << 20
_CHUNK_BYTES: Final = 4 << 20
_RANGE_BYTES: Final = 32 << 20
"""About the size of a layer, which the engine requests in one read."""
_RUNS: Final = 3
_RANDOM_READS: Final = 512
_PAGE_BYTES: Final = 4096
_MAX_LOST: Final = 0.8
"""Maximum share of its time that computing loses to concurrent reading; a disturbed trial would show more."""
_F_NOCACHE: Final = 48
"""``fcntl`` command of macOS."""


class Computing(Protocol):
    """A child that computes; a text instead of a result says how it ended."""

    def step_on(self, seconds: float) -> SteppedOn | str:
        """Compute steps of a window for ``seconds``."""


def measure_disk(folder: Path, seconds: float, beside: Computing | None = None) -> DiskProfile:
    """Measure the file system under ``folder`` in about ``seconds``, a slow one with a smaller file.

    Layers stream while others are computed, so read-ahead is measured while ``beside`` computes, together with the time
    that this costs ``beside``; without ``beside`` nothing else runs. Raises ``OSError`` when the trial cannot be written
    there, ``EngineError`` when ``beside`` ends.
    """
    path = folder / "disk.trial"
    ahead_s, other_s = seconds / 2, seconds / 6
    try:
        size = _write(path, other_s)
        if beside is None:
            rate, slows_s_per_byte = _rate(path, size, _read_ahead, ahead_s), 0.0
        else:
            rate, slows_s_per_byte = _beside(path, size, beside, ahead_s)
        measured = DiskProfile(
            prefetch_bytes_per_s=rate,
            fault_bytes_per_s=_rate(path, size, _fault, other_s),
            random_bytes_per_s=_random(path, size, other_s),
            free_bytes=shutil.disk_usage(folder).free,
            slows_s_per_byte=slows_s_per_byte,
        )
        return with_bounded_rates(measured)
    finally:
        path.unlink(missing_ok=True)


def _beside(path: Path, size: int, computing: Computing, seconds: float) -> tuple[float, float]:
    """The rate of read-ahead while ``computing`` runs, and the seconds that each byte costs ``computing``.

    It computes alone for a third of ``seconds``, then alongside reading until the file is read.
    """
    alone_s = statistics.median(_steps(computing.step_on(seconds / 3)))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(computing.step_on, seconds * 2 / 3)
        read, taken_s = 0, 0.0
        while not read or not answer.done():
            with path.open("rb", buffering=0) as file:
                _uncached(file)
                start = time.perf_counter()
                _read_ahead(file, size)
                taken_s += time.perf_counter() - start
                read += size
        steps = _steps(answer.result())
    rate = read / taken_s
    lost_share = max(0.0, 1 - alone_s / statistics.median(steps))
    return rate, min(_MAX_LOST, lost_share) / rate


def _steps(answer: SteppedOn | str) -> tuple[float, ...]:
    if isinstance(answer, str):
        raise EngineError(f"llama.cpp cannot compute a window on this device: {answer}")
    return answer.steps_s


def _write(path: Path, seconds: float) -> int:
    """Write and flush for ``seconds``, at most ``FILE_BYTES``; return the size."""
    chunk = os.urandom(_CHUNK_BYTES)
    begin, size = time.perf_counter(), 0
    with path.open("wb", buffering=0) as file:
        _uncached(file)
        while size < _MIN_BYTES or (size < FILE_BYTES and time.perf_counter() - begin < seconds):
            size += file.write(chunk)
            os.fsync(file.fileno())
    return size


def _uncached(file: BinaryIO) -> None:
    """Drop ``file`` from the page cache or, on macOS, bypass the cache."""
    if sys.platform == "linux":
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    elif sys.platform == "darwin":
        fcntl.fcntl(file.fileno(), _F_NOCACHE, 1)


def _rate(path: Path, size: int, read: Callable[[BinaryIO, int], None], seconds: float) -> float:
    """Median rate of ``read`` over the whole file; no further run begins after ``seconds``."""
    rates: list[float] = []
    begin = time.perf_counter()
    while len(rates) < _RUNS and (not rates or time.perf_counter() - begin < seconds):
        with path.open("rb", buffering=0) as file:
            _uncached(file)
            start = time.perf_counter()
            read(file, size)
            rates.append(size / (time.perf_counter() - start))
    return statistics.median(rates)


def _read_ahead(file: BinaryIO, size: int) -> None:
    """Read as the engine does: map the file, read it range by range and release each range."""
    pages = Pages([FileRange(file.name, 0, size)])
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ):
        pages.find()
        pages.in_groups()
        for start in range(0, size, _RANGE_BYTES):
            part = pages.part(start, min(start + _RANGE_BYTES, size))
            part.read()
            part.release()
    pages.close()


def _fault(file: BinaryIO, size: int) -> None:
    """Read one byte of every page, in C."""
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapping:
        np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE].max()


def _random(path: Path, size: int, seconds: float) -> float:
    """Rate of reads of 4 kB at random places for ``seconds``, one at a time, without reading ahead."""
    places = random.Random(0)
    done = 0
    with path.open("rb", buffering=0) as file:
        _uncached(file)
        if sys.platform == "linux":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        start = time.perf_counter()
        while done < _RANDOM_READS and (done == 0 or time.perf_counter() - start < seconds):
            file.seek(places.randrange(size // _PAGE_BYTES) * _PAGE_BYTES)
            file.read(_PAGE_BYTES)
            done += 1
        return done * _PAGE_BYTES / (time.perf_counter() - start)
