"""Measure the disk that holds the layer cache: as the engine prefetches, by page faults, and at random places.

Three systems, three ways to have a file outside the page cache: Linux forgets it on request (``posix_fadvise``), macOS does
not take it in (``F_NOCACHE``), Windows offers neither to an ordinary program, and what is measured there may be its cache.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from halda import DiskProfile
from primad.engine.streaming.pages import F_RDADVISE, HUGEPAGE, POPULATE_READ

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FILE_BYTES: Final = 128 << 20
_CHUNK_BYTES: Final = 4 << 20
_RANGE_BYTES: Final = 32 << 20
"""Of the order of a layer, which is what the engine asks for at once."""
_RUNS: Final = 3
_ENOUGH_S: Final = 2.0
"""No further run begins after this time."""
_RANDOM_READS: Final = 512
_RANDOM_S: Final = 0.8
_PAGE_BYTES: Final = 4096
_F_NOCACHE: Final = 48
"""``fcntl`` command of macOS."""


def measure_disk(folder: Path, file_bytes: int = FILE_BYTES) -> tuple[DiskProfile, str]:
    """The file system under ``folder``, and the call that prefetched best.

    Raises ``OSError`` when the trial cannot be written there.
    """
    path = folder / "disk.trial"
    try:
        _write(path, file_bytes)
        calls = {name: rate for name, call in _prefetch_calls() if (rate := _rate(path, file_bytes, call)) is not None}
        if not calls:
            calls = {"read": _rate(path, file_bytes, _read) or 0.0}
        best = max(calls, key=lambda name: calls[name])
        fault = _rate(path, file_bytes, _fault)
        profile = DiskProfile(
            prefetch_bytes_per_s=calls[best],
            fault_bytes_per_s=calls[best] if fault is None else fault,
            random_bytes_per_s=_random(path, file_bytes),
            free_bytes=shutil.disk_usage(folder).free,
        )
        return profile, best
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, size: int) -> None:
    chunk = os.urandom(_CHUNK_BYTES)
    with path.open("wb", buffering=0) as file:
        _uncached(file)
        for start in range(0, size, len(chunk)):
            file.write(chunk[: size - start])
        os.fsync(file.fileno())


def _uncached(file: BinaryIO) -> None:
    """Have the page cache forget ``file`` or, on macOS, stay out of its way."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    elif hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(file.fileno(), _F_NOCACHE, 1)


def _rate(path: Path, size: int, read: Callable[[BinaryIO, int], None]) -> float | None:
    """Median rate of ``read`` over the whole file; None where this system refuses it."""
    rates: list[float] = []
    begin = time.perf_counter()
    while len(rates) < _RUNS and (not rates or time.perf_counter() - begin < _ENOUGH_S):
        with path.open("rb", buffering=0) as file:
            _uncached(file)
            start = time.perf_counter()
            try:
                read(file, size)
            except (OSError, ValueError):
                return None
            rates.append(size / (time.perf_counter() - start))
    return statistics.median(rates)


def _prefetch_calls() -> Iterator[tuple[str, Callable[[BinaryIO, int], None]]]:
    if hasattr(mmap.mmap, "madvise"):
        if hasattr(os, "posix_fadvise"):
            yield "MADV_POPULATE_READ", _populate
        if hasattr(mmap, "MADV_WILLNEED"):
            yield "MADV_WILLNEED", _will_need
    if hasattr(fcntl, "F_NOCACHE"):
        yield "F_RDADVISE", _read_advise


def _ranges(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, _RANGE_BYTES):
        yield start, min(_RANGE_BYTES, size - start)


def _populate(file: BinaryIO, size: int) -> None:
    with _mapped(file, size) as mapping:
        with contextlib.suppress(OSError):  # a kernel without large groups of pages
            mapping.madvise(HUGEPAGE)
        for start, length in _ranges(size):
            mapping.madvise(POPULATE_READ, start, length)


def _will_need(file: BinaryIO, size: int) -> None:
    with _mapped(file, size) as mapping:
        for start, length in _ranges(size):
            mapping.madvise(mmap.MADV_WILLNEED, start, length)
            _touch(mapping, start, length)


def _read_advise(file: BinaryIO, size: int) -> None:
    with _mapped(file, size) as mapping:
        for start, length in _ranges(size):
            fcntl.fcntl(file.fileno(), F_RDADVISE, struct.pack("qi4x", start, length))
            _touch(mapping, start, length)


def _read(file: BinaryIO, size: int) -> None:
    for _ in range(0, size, _CHUNK_BYTES):
        file.read(_CHUNK_BYTES)


def _fault(file: BinaryIO, size: int) -> None:
    with _mapped(file, size) as mapping:
        _touch(mapping, 0, size)


@contextlib.contextmanager
def _mapped(file: BinaryIO, size: int) -> Iterator[mmap.mmap]:
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapping:
        yield mapping


def _touch(mapping: mmap.mmap, start: int, length: int) -> None:
    """Read one byte of every page, in C."""
    pages = np.frombuffer(mapping, np.uint8, count=length, offset=start)[:: mmap.PAGESIZE]
    pages.max()


def _random(path: Path, size: int) -> float:
    """Rate of reads of 4 kB at random places, one at a time, without reading ahead."""
    places = random.Random(0)
    done = 0
    with path.open("rb", buffering=0) as file:
        _uncached(file)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        start = time.perf_counter()
        while done < _RANDOM_READS and (done == 0 or time.perf_counter() - start < _RANDOM_S):
            file.seek(places.randrange(size // _PAGE_BYTES) * _PAGE_BYTES)
            file.read(_PAGE_BYTES)
            done += 1
        return done * _PAGE_BYTES / (time.perf_counter() - start)
