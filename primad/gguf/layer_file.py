"""A layer file on disk: its tree, whether it changed, and its weights piece by piece for a device that asks for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from primad.errors import DiskError
from primad.gguf.layers import (
    CHUNK_BYTES,
    HEADER_BYTES,
    StopHashing,
    chunk_count,
    chunk_size,
    is_chunk_of,
    is_tree_of,
    never,
    tree_of,
    until,
)

Stamp = tuple[int, int, int]
"""Size, modification time (ns) and inode: another stamp, another content."""


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp in ``status``."""
    return status.st_size, status.st_mtime_ns, status.st_ino


def hash_file(path: Path, stop: StopHashing = never) -> tuple[bytes, Stamp | None]:
    """The tree of the layer file ``path``, and its stamp; None when the file changed while it was hashed.

    Raises ``OSError``, and ``HashingStopped`` at ``stop``.
    """
    with path.open("rb", buffering=0) as file:
        before = stamp_of(os.fstat(file.fileno()))
        file.seek(HEADER_BYTES)
        tree = tree_of(until(stop, _chunks(file.readinto)))
        after = stamp_of(os.fstat(file.fileno()))
    return tree, after if before == after else None


def _chunks(readinto: object) -> Iterator[memoryview]:
    assert callable(readinto)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    filled = 0
    while got := readinto(buffer[filled:]):
        filled += got
        if filled == CHUNK_BYTES:
            yield buffer
            filled = 0
    if filled:
        yield buffer[:filled]


def read_chunk(path: Path, size_bytes: int, number: int) -> bytes:
    """Chunk ``number`` of the layer file of ``size_bytes`` of weights; shorter where the file is. Raises ``OSError``."""
    with path.open("rb", buffering=0) as file:
        file.seek(HEADER_BYTES + number * CHUNK_BYTES)
        wanted = chunk_size(size_bytes, number)
        parts = []
        while wanted and (part := file.read(wanted)):
            parts.append(part)
            wanted -= len(part)
    return b"".join(parts)


def save_tree(path: Path, tree: bytes) -> None:
    """Write ``tree`` to ``path``. If the disk fails, the layer is hashed again next time."""
    with contextlib.suppress(OSError):
        path.write_bytes(tree)


def write_at(path: Path, offset: int, data: bytes | memoryview) -> None:
    """Write ``data`` at ``offset`` of the weights of ``path``, which is there. Raises ``OSError``."""
    with path.open("r+b", buffering=0) as file:
        file.seek(HEADER_BYTES + offset)
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer in the cache, to be read. All bytes are compared with the digest before another device gets them.

    ``tree_path`` is the file of the tree; if it is missing or wrong, the whole layer is hashed when the tree is needed.
    """

    digest: str
    path: Path
    tree_path: Path
    size_bytes: int

    def tree(self) -> bytes:
        """The digests of the chunks. Raises ``DiskError`` when the file is not the layer or cannot be read."""
        try:
            tree = self.tree_path.read_bytes()
        except OSError:
            tree = b""  # hashing the file gives the same, only slower
        if is_tree_of(tree, self.digest, self.size_bytes):
            return tree
        try:
            tree, _ = hash_file(self.path)
        except OSError as exc:
            raise self._unreadable(exc) from exc
        if not is_tree_of(tree, self.digest, self.size_bytes):
            raise DiskError(f"{self.path}: is damaged; 'primad cache verify --fix' removes it")
        save_tree(self.tree_path, tree)
        return tree

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes of the weights from ``offset``, after comparing each chunk with its digest.

        Raises ``DiskError`` when it is damaged or cannot be read.
        """
        assert 0 <= offset <= offset + size <= self.size_bytes
        tree, pieces = self.tree(), []
        for number in range(offset // CHUNK_BYTES, chunk_count(offset + size)):
            try:
                chunk = read_chunk(self.path, self.size_bytes, number)
            except OSError as exc:
                raise self._unreadable(exc) from exc
            if not is_chunk_of(chunk, tree, number):
                raise DiskError(f"{self.path}: chunk {number} is damaged; 'primad cache verify --fix' removes the file")
            start = number * CHUNK_BYTES
            pieces.append(chunk[max(0, offset - start) : offset + size - start])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _unreadable(self, exc: OSError) -> DiskError:
        return DiskError(f"{self.path}: cannot be read: {exc.strerror or exc}")
