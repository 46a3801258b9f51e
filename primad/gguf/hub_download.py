"""Download a whole file of a hub by byte ranges, several concurrently, so that a download can be stopped and resumed.

Received bytes are written in order to a partial file and hashed as they arrive. The partial file is named by the hash
that the hub states for the whole one. The hub's own library deletes a partial file when a download ends early.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from primad.errors import ModelError
from primad.gguf.hub_ranges import HubError, HubRanges
from primad.gguf.origins import RemoteFile

CONNECTIONS: Final = 4
MIN_RANGE_BYTES: Final = 1 << 19
MAX_RANGE_BYTES: Final = 8 << 20
QUICK_S: Final = 0.5
SLOW_S: Final = 2.0
"""Target time per range: faster ranges grow, slower ones shrink, so progress is visible and little is read twice."""
TRIES: Final = 5
PAUSE_S: Final = 1.0
"""Pause before a range is requested again; it grows with each retry."""
PARTS: Final = ".cache"
_CHUNK_BYTES: Final = 8 << 20


class DownloadStopped(Exception):  # noqa: N818
    """The caller stopped a download; not an error, so not in the error tree."""


class StopDownload:
    """Stops a download from another thread."""

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self._readers: Sequence[HubRanges] = ()

    def set(self) -> None:
        """Stop running reads; ``check`` raises from now on."""
        with self._lock:
            self._event.set()
            for reader in self._readers:
                reader.abort()

    def check(self) -> None:
        """Raise ``DownloadStopped`` once the download is stopped."""
        if self._event.is_set():
            raise DownloadStopped

    def wait(self, seconds: float) -> None:
        """Wait. Raises ``DownloadStopped`` as soon as the download is stopped."""
        self._event.wait(seconds)
        self.check()

    @contextmanager
    def watching(self, readers: Sequence[HubRanges]) -> Iterator[None]:
        """Within the context, ``set`` aborts ``readers``."""
        with self._lock:
            self._readers = readers
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._readers = ()


def part_of(place: Path, file: RemoteFile) -> Path:
    """The path of the partial file of ``file``, of the repository at ``place``."""
    return place / PARTS / f"{file.sha256}.part"


def download(
    file: RemoteFile, part: Path, reader: Callable[[], HubRanges], advance: Callable[[int], None], stop: StopDownload
) -> None:
    """Download the rest of ``file`` into ``part``; ``advance`` is called with the number of bytes.

    Raises ``HubError`` and ``DownloadStopped``, after which ``part`` can be resumed; ``ModelError`` if the content
    differs from the hub's hash, after removing it; and ``OSError`` of the disk.
    """
    found = hashlib.sha256()
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("a+b") as out:
        done = _hashed(out, file.size_bytes, found.update, stop)
        advance(done)
        with closing(_ranges(file, done, reader, stop)) as ranges:
            for data in ranges:
                out.write(data)
                found.update(data)
                done += len(data)
                advance(done)
        out.flush()
        os.fsync(out.fileno())
    if found.hexdigest() != file.sha256:
        part.unlink()
        raise ModelError(
            f"{file.url}: differs from the checksum that the hub gives; the download was deleted, fetch it again"
        )


def _hashed(out: BinaryIO, size_bytes: int, update: Callable[[bytes], None], stop: StopDownload) -> int:
    """Hash the bytes of an earlier download in ``out`` and return their number; a file that is too long counts as
    empty."""
    if out.seek(0, os.SEEK_END) > size_bytes:
        out.truncate(0)
    out.seek(0)
    while chunk := out.read(_CHUNK_BYTES):
        stop.check()
        update(chunk)
    return out.tell()


class _Range(NamedTuple):
    """A read of ``size`` bytes from ``offset`` by ``reader``; the result is the bytes and the seconds it took."""

    offset: int
    size: int
    reader: HubRanges
    read: Future[tuple[bytes, float]]


def _ranges(
    file: RemoteFile, begin: int, reader: Callable[[], HubRanges], stop: StopDownload
) -> Generator[bytes, None, None]:
    """Yield the bytes of ``file`` from ``begin``, in order: first one range, then one per connection concurrently."""
    free = [reader() for _ in range(CONNECTIONS)]
    readers, waiting = tuple(free), deque[_Range]()
    at, size, tries, has_come = begin, MIN_RANGE_BYTES, 0, False
    with stop.watching(readers), ThreadPoolExecutor(CONNECTIONS, "download") as pool:
        try:
            while at < file.size_bytes or waiting:
                while free and at < file.size_bytes and (has_come or not waiting):
                    waiting.append(_begun(pool, free.pop(), file, at, min(size, file.size_bytes - at)))
                    at += waiting[-1].size
                first = waiting.popleft()
                try:
                    data, took_s = first.read.result()
                except HubError as exc:
                    stop.check()
                    tries += 1
                    if not exc.again or tries >= (TRIES if first.offset else 2):
                        raise
                    stop.wait(max(exc.wait_s, PAUSE_S * tries))
                    waiting.appendleft(_begun(pool, first.reader, file, first.offset, first.size))
                    continue
                stop.check()
                tries, has_come = 0, True
                size = min(size * 2, MAX_RANGE_BYTES) if took_s < QUICK_S else size
                size = max(size // 2, MIN_RANGE_BYTES) if took_s > SLOW_S else size
                free.append(first.reader)
                yield data
        finally:
            for each in readers:
                each.abort()  # otherwise the pool waits for their reads
            pool.shutdown()
            for each in readers:
                each.close()


def _begun(pool: ThreadPoolExecutor, reader: HubRanges, file: RemoteFile, offset: int, size: int) -> _Range:
    return _Range(offset, size, reader, pool.submit(_read, reader, file, offset, size))


def _read(reader: HubRanges, file: RemoteFile, offset: int, size: int) -> tuple[bytes, float]:
    begin = time.monotonic()
    return reader.read(file, offset, size), time.monotonic() - begin
