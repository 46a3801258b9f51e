"""A layer file in transfer: chunks in any order and from any source, and what survives a stop.

    <digest>.part       the file, of full length from the start
    <digest>.journal    the tree, followed by one byte per chunk: 1 when the chunk was written

The journal is trusted if its tree hashes to the digest. A chunk that it marks as written is hashed before it counts,
since the two files may disagree after a power cut. A layer without a known digest is named by its origin, and its tree grows
as chunks arrive.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from primad.gguf.layer_file import read_chunk, write_at
from primad.gguf.layers import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    LayerRef,
    chunk_count,
    chunk_digest,
    chunk_size,
    is_chunk_of,
    is_tree_of,
    layer_digest,
    layer_header,
)


class PartialLayer:
    """The part of layer ``ref`` that is here, in ``folder``. Its methods block and may be called from several threads.

    Not ``hashed``: its name is no digest. All raise ``OSError`` as the disk does; ``LayerCache`` translates.
    """

    def __init__(self, folder: Path, ref: LayerRef, *, hashed: bool = True) -> None:
        self.ref = ref
        self._hashed = hashed
        self.path = folder / f"{ref.digest}.part"
        self._journal = folder / f"{ref.digest}.journal"
        self._written: set[int] = set()
        self._lock = threading.Lock()
        self.tree: bytes | None = None

    def resume(self) -> None:
        """Keep the chunks of an earlier run whose hashes are right; remove the rest."""
        try:
            content = self._journal.read_bytes()
            whole = self.path.stat().st_size == self.ref.file_bytes
        except FileNotFoundError:
            content, whole = b"", False
        count = chunk_count(self.ref.size_bytes)
        tree, flags = content[: count * DIGEST_BYTES], content[count * DIGEST_BYTES :]
        named = not self._hashed or is_tree_of(tree, self.ref.digest, self.ref.size_bytes)
        if not whole or len(flags) != count or not named:
            self.discard()
            return
        self.tree = tree
        for number in range(count):
            if flags[number] and is_chunk_of(read_chunk(self.path, self.ref.size_bytes, number), tree, number):
                self._written.add(number)
        with self._journal.open("r+b") as journal:
            journal.write(tree + bytes(number in self._written for number in range(count)))

    @property
    def digest(self) -> str:
        """The digest of the layer, which must be complete."""
        if not self._hashed and self.tree is not None:
            return layer_digest(self.ref.size_bytes, self.tree)
        return self.ref.digest

    def begin(self, tree: bytes | None = None) -> None:
        """Start with the tree of the layer, which the caller has compared with its digest; None if it has none yet."""
        tree = bytes(chunk_count(self.ref.size_bytes) * DIGEST_BYTES) if tree is None else tree
        assert not self._hashed or is_tree_of(tree, self.ref.digest, self.ref.size_bytes)
        with self.path.open("wb") as file:
            file.write(layer_header(self.ref.tensors, number=0, split=1))
            file.truncate(self.ref.file_bytes)
        self._journal.write_bytes(tree + bytes(chunk_count(self.ref.size_bytes)))
        self.tree = tree

    def lacking(self) -> list[int]:
        """The numbers of the chunks that are not here."""
        with self._lock:
            return [number for number in range(chunk_count(self.ref.size_bytes)) if number not in self._written]

    @property
    def present_bytes(self) -> int:
        """Bytes of the chunks that are here."""
        with self._lock:
            return sum(chunk_size(self.ref.size_bytes, number) for number in self._written)

    def write(self, number: int, chunk: bytes | memoryview) -> bool:
        """Write chunk ``number``, which the caller has compared with the tree; whether the layer is complete now."""
        assert self.tree is not None
        write_at(self.path, number * CHUNK_BYTES, chunk)
        own = None if self._hashed else chunk_digest(chunk)
        with self._journal.open("r+b", buffering=0) as journal:
            if own is not None:
                journal.seek(number * DIGEST_BYTES)
                journal.write(own)
            journal.seek(len(self.tree) + number)
            journal.write(b"\x01")
        with self._lock:
            self._written.add(number)
            if own is not None:
                self.tree = self.tree[: number * DIGEST_BYTES] + own + self.tree[(number + 1) * DIGEST_BYTES :]
            return len(self._written) == chunk_count(self.ref.size_bytes)

    def finish(self, path: Path, tree_path: Path) -> None:
        """Flush the complete file and give it its name ``path``; its tree goes to ``tree_path``."""
        assert self.tree is not None
        with self.path.open("r+b") as file:
            os.fsync(file.fileno())
        with self._journal.open("r+b") as journal:
            journal.truncate(len(self.tree))
        self._journal.replace(tree_path)
        self.path.replace(path)

    def discard(self) -> None:
        """Remove all chunks; the next ``resume`` finds nothing."""
        for path in (self.path, self._journal):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        with self._lock:
            self._written.clear()
        self.tree = None
