"""The layer files a device holds, by content: fetched once, checked against their digest, kept for the next time.

    <folder>/<digest>.gguf       a layer file; only its header changes when the layer moves to another window
    <folder>/<digest>-1.gguf     a second copy, where one device computes two layers of equal content
    <folder>/partial/            files on their way; emptied when the cache is opened

A file appears under its name only after its weights were hashed and flushed, so a crash leaves nothing half-written. A
file (or copy) that was there before this process started is hashed once, the first time it is asked for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from primad.errors import ClusterError
from primad.gguf.layers import DIGEST_BYTES, HEADER_BYTES, READ_BYTES, LayerRef, layer_header


class LayerWriter:
    """Takes the weights of one layer in order; ``LayerCache.writing`` hands it out."""

    def __init__(self, file: BinaryIO, ref: LayerRef) -> None:
        self._file = file
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        self.ref = ref
        self.written = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``. Raises ``ClusterError`` when more arrives than the layer has."""
        if self.written + len(data) > self.ref.size_bytes:
            raise ClusterError(f"layer {self.ref.digest[:12]}: more than its {self.ref.size_bytes} bytes arrived")
        self._file.write(data)
        self._hash.update(data)
        self.written += len(data)

    def finish(self) -> None:
        """Check the digest and flush. Raises ``ClusterError`` when the bytes are not those of the layer."""
        if self.written != self.ref.size_bytes or self._hash.hexdigest() != self.ref.digest:
            raise ClusterError(
                f"layer {self.ref.digest[:12]}: the {self.written} bytes that arrived are not the layer's"
            )
        self._file.flush()
        os.fsync(self._file.fileno())


class LayerCache:
    """The layer files under ``folder``; one process at a time owns it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = folder / "partial"
        self._verified: set[str] = set()
        try:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ClusterError(f"{folder}: the layer cache cannot be opened: {exc.strerror or exc}") from exc

    def path(self, digest: str, copy: int = 0) -> Path:
        """Where the layer file lies; ``copy`` numbers further copies of the same content."""
        return self._folder / (f"{digest}-{copy}.gguf" if copy else f"{digest}.gguf")

    def missing(self, refs: Iterable[LayerRef]) -> list[LayerRef]:
        """Those of ``refs`` that are not here whole, each once; damaged files are removed on the way."""
        return [ref for ref in dict.fromkeys(refs) if not self.holds(ref)]

    def holds(self, ref: LayerRef) -> bool:
        """Whether the layer is here and its weights hash to their name; a file that does not is removed.

        Raises ``ClusterError`` when the disk refuses to read or remove it.
        """
        try:
            if self._is_whole(self.path(ref.digest), ref):
                return True
            self._drop(ref.digest)
        except OSError as exc:
            raise ClusterError(
                f"{self._folder}: layer {ref.digest[:12]} cannot be read: {exc.strerror or exc}; "
                "check that folder or use another --home"
            ) from exc
        return False

    def _is_whole(self, path: Path, ref: LayerRef) -> bool:
        """Whether ``path`` holds the weights of ``ref``; hashes them the first time."""
        try:
            if path.stat().st_size != ref.file_bytes:
                return False
        except FileNotFoundError:
            return False
        if path.name not in self._verified and _digest(path) == ref.digest:
            self._verified.add(path.name)
        return path.name in self._verified

    @contextmanager
    def writing(self, ref: LayerRef) -> Iterator[LayerWriter]:
        """Write one layer file; it appears whole when the block ends and not at all when it raises.

        Raises ``ClusterError`` when the bytes do not hash to the layer's digest or the disk refuses them.
        """
        partial = self._partial / ref.digest
        try:
            try:
                with partial.open("wb") as file:
                    file.write(layer_header(ref.tensors, number=0, split=1))
                    writer = LayerWriter(file, ref)
                    yield writer
                    writer.finish()
                partial.replace(self.path(ref.digest))
            except OSError as exc:
                raise ClusterError(
                    f"{self._folder}: layer {ref.digest[:12]} ({ref.size_bytes} bytes) cannot be written: "
                    f"{exc.strerror or exc}; make room or use another --home"
                ) from exc
        finally:
            partial.unlink(missing_ok=True)
        self._verified.add(self.path(ref.digest).name)

    def place(self, ref: LayerRef, *, number: int, split: int, copy: int = 0) -> Path:
        """Make the file layer ``number`` of its window and split ``split`` of its model; its path.

        The layer must be here (``holds``). Rewrites the header only; ``copy`` > 0 makes a copy of the file first where
        there is none that is whole. Raises ``ClusterError`` when the disk refuses it.
        """
        path = self.path(ref.digest, copy)
        header = layer_header(ref.tensors, number=number, split=split)
        try:
            if copy and not self._is_whole(path, ref):
                self._copy(self.path(ref.digest), path)
            with path.open("r+b") as file:
                if file.read(HEADER_BYTES) != header:
                    file.seek(0)
                    file.write(header)
        except OSError as exc:
            raise ClusterError(f"{path}: the layer file cannot be prepared: {exc.strerror or exc}") from exc
        return path

    def _copy(self, source: Path, target: Path) -> None:
        self._verified.discard(target.name)
        partial = self._partial / target.name
        try:
            shutil.copyfile(source, partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        self._verified.add(target.name)

    def _drop(self, digest: str) -> None:
        for path in self._folder.glob(f"{digest}*.gguf"):
            self._verified.discard(path.name)
            path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    digest = blake2b(digest_size=DIGEST_BYTES)
    with path.open("rb", buffering=0) as file:
        file.seek(HEADER_BYTES)
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
