"""Ranges of weight files and their pages: find their mappings, read ahead, release, query and pin them.

llama.cpp maps weight files; these mappings are used in place, so that a layer that was read ahead costs the computing
threads no page fault. Linux shows where a file is mapped (``/proc/self/maps``) and reads a range with
``MADV_POPULATE_READ``: one call, large requests, errors reported. There a range is released by dropping its pages from
the mapping and then from the page cache; the second step alone has no effect on mapped pages. Other systems get a
second mapping: the range is announced and its pages are touched, which brings them into the shared page cache;
releasing is at most a hint, and which pages are in memory is not known.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from primad.errors import EngineError, WeightsError
from primad.gguf.layer_file import Stamp, stamp_of

if sys.platform != "win32":
    import fcntl
    import resource

PIECE_BYTES: Final = 8 << 20
"""A range is read in pieces of this size: large enough for the disk, small enough to change course in between."""
ASK_BYTES: Final = 512 << 10
"""For one advice the system reads at most its largest request, and forgets the rest."""
IDLE_S: Final = 1.0
"""After this time without a step, weights that must be in memory are checked before use."""
COLD: Final = 0.02
"""If more than this share is missing, a range is read again; single pages come by page faults."""
SMALL_BYTES: Final = 32 << 20
"""For a smaller range, the system would read too large a share of what follows it: several megabytes each time."""
GROUP_BYTES: Final = 2 << 20
"""The system keeps file pages in groups of up to this size, aligned in the file, and drops only whole groups."""
_PAGE: Final = mmap.PAGESIZE
POPULATE_READ: Final = 22
"""``MADV_POPULATE_READ`` (Linux 5.14), which Python does not name."""
HUGEPAGE: Final = 14
"""``MADV_HUGEPAGE``: file pages are read in groups of ``GROUP_BYTES``, where the file system supports groups.

(Measured on ext4, Linux 6.18: parts of 4 to 28 MB are read at 1.5 to 2.1 GB/s, without it at 0.7 to 1.1; releasing
takes a hundredth of the time; and little is read beyond them.)
"""
_DONTNEED: Final = 4
_RANDOM: Final = 1
_WILLNEED: Final = 3
F_RDADVISE: Final = 44
"""``fcntl`` command of macOS."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """``size`` bytes of the file ``path`` from ``offset``."""

    path: str
    offset: int
    size: int


def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


_LIBC: Final = _libc()


def _knows_groups() -> bool:
    """Whether ``MADV_HUGEPAGE`` affects files: since Linux 5.18; earlier kernels accept and ignore it."""
    found = re.match(r"(\d+)\.(\d+)", platform.release()) if sys.platform == "linux" else None
    return found is not None and (int(found[1]), int(found[2])) >= (5, 18)


KNOWS_GROUPS: Final = _knows_groups()


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Addresses ``start <= a < end`` of this process map a file from ``offset``."""

    start: int
    end: int
    offset: int


def _mappings(paths: Iterable[str]) -> dict[str, list[_Mapping]]:
    """Return where this process has mapped ``paths``, without those that are not mapped. Linux only."""
    if sys.platform != "linux":
        return {}
    wanted: dict[tuple[str, str] | str, str] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = Path(path).stat()
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            wanted[device, str(status.st_ino)] = path
            wanted[os.path.realpath(path)] = path  # some file systems show another device in maps
    found: dict[str, list[_Mapping]] = {}
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) < 6:
                continue
            path = wanted.get((fields[3], fields[4]), "") or wanted.get(fields[5], "")
            if path:
                start, end = (int(part, 16) for part in fields[0].split("-"))
                found.setdefault(path, []).append(_Mapping(start, end, int(fields[2], 16)))
    return found


def disk_read_bytes() -> int | None:
    """Bytes that this process read from disk, by calls, page faults and read-ahead; None where the system does not
    count."""
    with contextlib.suppress(OSError, ValueError), Path("/proc/self/io").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return None


class ByteRange:
    """The bytes from ``begin`` to ``end`` of ``pages``. Thread-safe; every method may block on the disk."""

    def __init__(self, pages: Pages, begin: int, end: int) -> None:
        self.pages, self.begin, self.end = pages, begin, end

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.end - self.begin

    def pieces(self) -> Iterator[ReadCall]:
        """Yield the range in pieces of at most ``PIECE_BYTES``, in order."""
        for span in self.pages.spans(self.begin, self.end):
            for start in range(0, span.size, PIECE_BYTES):
                yield ReadCall(span, start, min(PIECE_BYTES, span.size - start))

    def read(self) -> int:
        """Bring the whole range into memory; return the bytes that were read. Raises ``EngineError``."""
        return sum(piece.read() for piece in self.pieces())

    def missing(self) -> int:
        """Return the bytes that are not in memory; 0 where the system does not say."""
        return sum(span.missing() for span in self.pages.spans(self.begin, self.end))

    def has_last_page(self) -> bool:
        """Whether the last page is in memory: then llama.cpp, which fills its mappings in order, is done with the
        range."""
        return any(span.has_last_page() for span in self.pages.spans(self.end - 1, self.end))

    def release(self) -> None:
        """Release the pages, except those shared with another range."""
        for span in self.pages.spans(self.begin, self.end):
            begin, length = span.inner()
            span.release(begin, begin + length)

    def lock(self) -> None:
        """Pin the pages to memory. Raises ``EngineError`` when the system does not allow this much."""
        for span in self.pages.spans(self.begin, self.end):
            span.lock()

    def unlock(self) -> None:
        """Undo ``lock``."""
        for span in self.pages.spans(self.begin, self.end):
            span.unlock()


class Pages(ByteRange):
    """The pages of ranges of files that llama.cpp has mapped."""

    def __init__(self, ranges: Sequence[FileRange]) -> None:
        super().__init__(self, 0, sum(part.size for part in ranges))
        self.ranges = tuple(ranges)
        self._files = {path: _File(path) for path in dict.fromkeys(part.path for part in ranges)}
        self._spans: list[_Span] = []

    def find(self) -> None:
        """Find the mappings of the ranges; call it when llama.cpp has loaded them, and again to refresh.

        Raises ``EngineError`` when a range is not mapped (on Linux; elsewhere it is mapped here).
        """
        known = _mappings(self._files) if _LIBC is not None else {}
        spans: list[_Span] = []
        before = 0
        for part in self.ranges:
            file, place = self._files[part.path], before
            before += part.size
            if _LIBC is None:
                spans.append(_Span(file, part.offset, part.size, file.own_address(), place))
                continue
            covered = 0
            for mapping in known.get(part.path, ()):
                first = max(part.offset, mapping.offset)
                last = min(part.offset + part.size, mapping.offset + mapping.end - mapping.start)
                if first < last:
                    base = mapping.start - mapping.offset
                    spans.append(_Span(file, first, last - first, base, place + first - part.offset))
                    covered += last - first
            if covered < part.size:
                raise EngineError(f"{part.path}: llama.cpp did not map its weights; primad cannot stream them")
        self._spans = spans

    def mapped(self) -> bool:
        """Whether all ranges are mapped already; called while llama.cpp loads them."""
        try:
            self.find()
        except EngineError:
            return False
        return True

    def part(self, begin: int, end: int) -> ByteRange:
        """Return the bytes from ``begin`` to ``end``, counted along the ranges."""
        return ByteRange(self, begin, end)

    def cuts(self) -> tuple[int, ...]:
        """Return where a part may begin or end without sharing a group of pages with its neighbours."""
        found, before = [], 0
        for part in self.ranges:
            first = -(-part.offset // GROUP_BYTES) * GROUP_BYTES
            found += [before + at - part.offset for at in range(first, part.offset + part.size + 1, GROUP_BYTES)]
            before += part.size
        return tuple(found)

    def spans(self, begin: int, end: int) -> Iterator[_Span]:
        """Yield where the bytes from ``begin`` to ``end`` are mapped."""
        for span in self._spans:
            first, last = max(begin - span.place, 0), min(end - span.place, span.size)
            if first < last:
                yield replace(span, offset=span.offset + first, size=last - first, place=span.place + first)

    def in_groups(self) -> None:
        """Have the system read large groups of pages at a time; call it after ``find``."""
        if KNOWS_GROUPS:
            self._spans = [replace(span, in_groups=span.advise(HUGEPAGE)) for span in self._spans]

    def at_random(self) -> None:
        """Announce that single rows will be read, so that nothing around them is."""
        for span in self._spans:
            span.advise(_RANDOM)

    def changed(self) -> list[str]:
        """Return the files that were written to since they were opened or ``trusted``."""
        files = self._files.items()  # called after each visit of a step, so all in one line
        return [path for path, file in files if stamp_of(os.fstat(file.descriptor)) != file.stamp]

    def trust(self, path: str) -> None:
        """Accept the file in its current state: its weights were checked and are unchanged."""
        self._files[path].trust()

    def close(self) -> None:
        """Close the files."""
        self._spans = []
        for file in self._files.values():
            file.close()


class Slices:
    """``count`` adjacent slices of equal size in a range of a file, queried, read and released one by one.

    A page shared by two slices is read with either, and released with the second. Thread-safe like ``Pages``.
    """

    def __init__(self, whole: FileRange, count: int) -> None:
        assert whole.size % count == 0
        self.count = count
        self.slice_bytes = whole.size // count
        self._whole = whole
        self._pages = Pages([whole])
        self._locks = False

    def find(self) -> None:
        """Find the mappings, as ``Pages.find`` does."""
        self._pages.find()

    def pieces(self, number: int) -> Iterator[ReadCall]:
        """Yield one slice in pieces of at most ``PIECE_BYTES``, in order."""
        start = self._whole.offset + number * self.slice_bytes
        for span in self._pages._spans:
            first, last = max(start, span.offset), min(start + self.slice_bytes, span.offset + span.size)
            for at in range(first, last, PIECE_BYTES):
                yield ReadCall(span, at - span.offset, min(PIECE_BYTES, last - at))

    def lock(self, number: int) -> None:
        """Pin one slice to memory until it is released. Raises ``EngineError`` when the system does not allow this
        much."""
        for piece in self.pieces(number):
            piece.lock()
        self._locks = True

    def release(self, number: int, held: NDArray[np.bool_]) -> None:
        """Release a slice, locked or not; ``held`` marks the slices that are still used.

        The system keeps pages in groups and drops only whole groups, so pages of released neighbours in the same groups
        are released again with it.
        """
        used = np.flatnonzero(held)
        place = int(np.searchsorted(used, number))
        before = int(used[place - 1]) + 1 if place else 0
        behind = int(used[place]) if place < len(used) else self.count
        start = self._whole.offset + before * self.slice_bytes
        end = self._whole.offset + behind * self.slice_bytes
        first, last = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
        for span in self._pages._spans:
            begin, length = span.inner()
            if self._locks:
                span.unlock_pages(max(first, begin), min(last, begin + length))
            span.release(max(first, begin), min(last, begin + length))

    def missing(self) -> NDArray[np.float64]:
        """Return the share of each slice that is not in memory; 0 where the system does not say."""
        gone = np.zeros(self.count)
        if _LIBC is None:
            return gone
        for span in self._pages._spans:
            begin, length = span.outer(0, span.size)
            absent = np.concatenate(([0], np.cumsum(~_present(span.base + begin, length))))
            starts = self._whole.offset + self.slice_bytes * np.arange(self.count)
            first = np.clip((starts - begin) // _PAGE, 0, len(absent) - 1)
            last = np.clip(-(-(starts + self.slice_bytes - begin) // _PAGE), 0, len(absent) - 1)
            gone += (absent[last] - absent[first]) * _PAGE / self.slice_bytes
        return np.minimum(gone, 1.0)

    def close(self) -> None:
        """Close the file."""
        self._pages.close()


class _File:
    """An open weight file with its stamp; on systems without ``/proc`` also mapped here."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.handle = Path(path).open("rb", buffering=0)  # noqa: SIM115
        except OSError as exc:
            raise EngineError(f"{path}: cannot be opened: {exc.strerror or exc}") from exc
        self.descriptor = self.handle.fileno()
        self._map: mmap.mmap | None = None
        self.stamp: Stamp
        self.trust()

    def trust(self) -> None:
        self.stamp = stamp_of(os.fstat(self.handle.fileno()))

    def own_address(self) -> int:
        """Return the address of this class's own mapping, which shows the file from its beginning."""
        if self._map is None:
            self._map = mmap.mmap(self.handle.fileno(), 0, access=mmap.ACCESS_READ)
        return int(np.frombuffer(self._map, np.uint8).ctypes.data)

    def own_touch(self, offset: int, size: int) -> None:
        """Announce a range and read a byte of each of its pages. Raises ``WeightsError`` when the file ends before
        it."""
        assert self._map is not None
        self.check_length(offset, size)
        start = offset - offset % _PAGE
        length = offset + size - start
        if hasattr(self._map, "madvise") and hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED, start, length)
        if sys.platform == "darwin":
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.handle.fileno(), F_RDADVISE, struct.pack("qi4x", start, min(length, 1 << 30)))
        if sys.platform == "win32":
            _prefetch_virtual_memory(self.own_address() + start, length)
        np.frombuffer(self._map, np.uint8, count=length, offset=start)[::_PAGE].max()

    def check_length(self, offset: int, size: int) -> None:
        """Raise ``WeightsError`` if the file ends before the range does: touching its pages would crash this
        process."""
        if os.fstat(self.handle.fileno()).st_size < offset + size:
            raise self.error(offset, size)

    def error(self, offset: int, size: int) -> WeightsError:
        """Return why a range cannot be read, found out by an ordinary read."""
        why = "the system does not say why"
        try:
            if os.fstat(self.handle.fileno()).st_size < offset + size:
                why = "it was cut short while it was used"
            else:
                self.handle.seek(offset)
                left = size
                while left > 0 and (got := self.handle.read(min(left, PIECE_BYTES))):
                    left -= len(got)
        except OSError as exc:
            why = exc.strerror or str(exc)
        return WeightsError(f"{self.path}: weights cannot be read: {why}", self.path)

    def close(self) -> None:
        self.handle.close()
        self._map = None


@dataclass(frozen=True, slots=True)
class _Span:
    """``size`` bytes of a file from ``offset``, mapped at ``base`` + offset, after ``place`` bytes of the ranges."""

    file: _File
    offset: int
    size: int
    base: int
    place: int
    in_groups: bool = False

    def outer(self, start: int, size: int) -> tuple[int, int]:
        """Return file offset and length of all pages that overlap a part of this span."""
        first = self.offset + start
        begin = first - first % _PAGE
        end = -(-(first + size) // _PAGE) * _PAGE
        return begin, end - begin

    def inner(self) -> tuple[int, int]:
        """Return file offset and length of the pages that lie wholly in this span."""
        begin = -(-self.offset // _PAGE) * _PAGE
        end = (self.offset + self.size) // _PAGE * _PAGE
        return begin, max(0, end - begin)

    def advise(self, advice: int) -> bool:
        begin, length = self.inner()
        return _LIBC is not None and length > 0 and _LIBC.madvise(self.base + begin, length, advice) == 0

    def missing(self) -> int:
        if _LIBC is None:
            return 0
        begin, length = self.outer(0, self.size)
        return _absent(self.base + begin, length)

    def has_last_page(self) -> bool:
        if _LIBC is None:
            return False
        begin, length = self.outer(self.size - 1, 1)
        return _absent(self.base + begin, length) == 0

    def release(self, first: int, last: int) -> None:
        """Release the pages of the file from offset ``first`` to ``last``."""
        if sys.platform != "linux" or _LIBC is None or last <= first:
            return
        _LIBC.madvise(self.base + first, last - first, _DONTNEED)
        os.posix_fadvise(self.file.handle.fileno(), first, last - first, os.POSIX_FADV_DONTNEED)

    def lock(self) -> None:
        self.lock_part(0, self.size)

    def lock_part(self, start: int, size: int) -> None:
        begin, length = self.outer(start, size)
        if _LIBC is not None and _LIBC.mlock(self.base + begin, length) != 0:
            raise EngineError(
                f"{self.file.path}: cannot be locked in memory: {os.strerror(ctypes.get_errno())}; "
                "leave --lock out or raise the limit (ulimit -l)"
            )

    def unlock(self) -> None:
        begin, length = self.outer(0, self.size)
        self.unlock_pages(begin, begin + length)

    def unlock_pages(self, first: int, last: int) -> None:
        """Undo ``lock`` for the pages of the file from offset ``first`` to ``last``."""
        if _LIBC is not None and first < last:
            _LIBC.munlock(self.base + first, last - first)


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A part of a range that is read in one call."""

    span: _Span
    start: int
    size: int

    def ask(self) -> None:
        """Have the disk start to read this part concurrently with others; ``read`` waits for it.

        For single slices this is needed for more than speed: on a populated range alone, the system reads on past it,
        several megabytes at a time.
        """
        if _LIBC is None:
            return
        begin, length = self.span.outer(self.start, self.size)
        for at in range(0, length, ASK_BYTES):
            _LIBC.madvise(self.span.base + begin + at, min(ASK_BYTES, length - at), _WILLNEED)

    def lock(self) -> None:
        """Pin the part to memory. Raises ``EngineError`` when the system does not allow this much."""
        self.span.lock_part(self.start, self.size)

    def missing(self) -> int:
        """Return the bytes that are not in memory; all where the system does not say."""
        if _LIBC is None:
            return self.size
        begin, length = self.span.outer(self.start, self.size)
        return _absent(self.span.base + begin, length)

    def read(self) -> int:
        """Bring the part into memory; return the bytes that were missing. Raises ``WeightsError`` on a disk error."""
        span = self.span
        if _LIBC is None:
            span.file.own_touch(span.offset + self.start, self.size)
            return self.size
        begin, length = span.outer(self.start, self.size)
        missing = _absent(span.base + begin, length)
        if missing and not span.in_groups and (self.size < PIECE_BYTES or span.size < SMALL_BYTES):
            self.ask()  # at the end of a range or near it, nothing beyond is to be read
        with _own_faults:
            while _LIBC.madvise(span.base + begin, length, POPULATE_READ) != 0:
                code = ctypes.get_errno()
                if code == errno.EINVAL:  # a kernel before 5.14
                    span.file.check_length(span.offset + self.start, self.size)
                    _touch(span.base + begin, length, span)
                    break
                if code not in (errno.EAGAIN, errno.EINTR):
                    raise span.file.error(span.offset + self.start, self.size)
        return missing


class _OwnFaults:
    """Counts the page faults of deliberate reads, which the system counts like any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self.count = 0

    def __enter__(self) -> None:
        self._local.before = self._of_thread()

    def __exit__(self, *_: object) -> None:
        more = self._of_thread() - self._local.before
        with self._lock:
            self.count += more

    @staticmethod
    def _of_thread() -> int:
        count = 0
        if sys.platform == "linux":
            count = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        return count


_own_faults: Final = _OwnFaults()


def major_faults() -> int | None:
    """Return this process's major page faults, without those of deliberate reads; None where they are not counted."""
    count = None
    if sys.platform != "win32":
        count = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_majflt - _own_faults.count)
    return count


def _touch(address: int, length: int, span: _Span) -> None:
    """Read a range by advice and by touching each page."""
    if sys.platform == "linux":
        begin = address - span.base
        os.posix_fadvise(span.file.handle.fileno(), begin, length, os.POSIX_FADV_WILLNEED)
    pages = (ctypes.c_uint8 * length).from_address(address)
    np.ctypeslib.as_array(pages)[::_PAGE].max()


def _absent(address: int, length: int) -> int:
    """Return the bytes of a mapped range that are not in memory."""
    present = _present(address, length)
    return int(len(present) - np.count_nonzero(present)) * _PAGE


def _present(address: int, length: int) -> NDArray[np.bool_]:
    """Return for each page of a mapped range whether it is in memory; True for all if the system call fails."""
    assert _LIBC is not None
    present = np.empty(length // _PAGE, np.uint8)
    if _LIBC.mincore(address, length, present.ctypes.data) != 0:
        return np.ones(len(present), np.bool_)
    return (present & 1).astype(np.bool_)


def _prefetch_virtual_memory(address: int, length: int) -> None:
    """Windows: announce a range of a mapping; where the call is missing, touching the pages suffices."""
    if sys.platform == "win32":

        class Range(ctypes.Structure):
            _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))

        kernel = ctypes.windll.kernel32
        if hasattr(kernel, "PrefetchVirtualMemory"):
            entry = Range(address, length)
            kernel.GetCurrentProcess.restype = ctypes.c_void_p
            kernel.PrefetchVirtualMemory(
                ctypes.c_void_p(kernel.GetCurrentProcess()), ctypes.c_size_t(1), ctypes.byref(entry), 0
            )
