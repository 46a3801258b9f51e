"""The layer files on a device, by content hash: fetched once, checked against their digest, kept for later runs.

    <folder>/<digest>.gguf       a layer file; only its header changes when the layer moves to another window
    <folder>/<digest>-1.gguf     a second copy, where one device computes two layers of equal content
    <folder>/<digest>.tree       the digests of its chunks; its modification time is when the layer was last used
    <folder>/origins.json        the digests of layers fetched from hubs (``cache.py``)
    <folder>/in-use-<pid>.json   the layers that a running process needs (``leases.py``)
    <folder>/partial/            files in transfer (``partial.py``); chunks that arrived are kept for the next run

A file gets its name only after all its chunks were hashed and flushed, so a crash leaves no half-written layer. A file
(or copy) that is older than this process is hashed once, on first use, and again when its size or modification time
shows that another program wrote to it.

The digest of each layer from a hub is stored under the name of its origin, so that none is downloaded again after a
stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from primad.errors import DiskError, ModelError
from primad.gguf.layer_file import Stamp, StoredLayer, hash_file, save_tree, stamp_of
from primad.gguf.layers import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    HEADER_BYTES,
    LayerCut,
    LayerRef,
    StopHashing,
    chunk_size,
    is_chunk_of,
    is_tree_of,
    layer_header,
    never,
)
from primad.layers.eviction import CachedLayer, Disk, oldest_first
from primad.layers.leases import Leases
from primad.layers.partial import PartialLayer
from primad.system.files import write_whole

STALE_S: Final = 7 * 86_400.0
_DIGEST: Final = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_FILE: Final = re.compile(rf"({_DIGEST.pattern})(-\d+)?\.(gguf|tree)")
MAX_ORIGINS: Final = 10_000
"""Maximum number of layers whose digests are stored; the latest stay."""


class LayerCache:
    """The layer files under ``folder``, at most ``limit_bytes`` of them.

    One process at a time owns it: that process writes, and at its start removes unfinished files of an earlier one. Other
    processes open it with ``owner=False`` to read and to prune; they create nothing. Every method except ``lease`` and
    ``end_lease`` may block on the disk.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None, *, owner: bool = True) -> None:
        self._folder = folder
        self._partial = folder / "partial"
        self._limit_bytes = limit_bytes
        self._verified: dict[str, Stamp] = {}
        self._active: set[str] = set()
        self._leases = Leases(folder)
        self.origins = OriginBook(folder / "origins.json")
        """The digests of layers fetched from hubs."""
        self.turn = asyncio.Lock()
        """Held while the cache is being filled: two writers of one layer would undo each other's work."""
        try:
            if owner:
                self._partial.mkdir(parents=True, exist_ok=True)
                self._sweep()
        except OSError as exc:
            raise DiskError(f"{folder}: the layer cache cannot be opened: {exc.strerror or exc}") from exc

    def _sweep(self) -> None:
        """Remove partial files that cannot be resumed or have not been resumed for long."""
        for path in self._partial.iterdir():
            resumable = path.suffix in (".part", ".journal")
            if not resumable or time.time() - path.lstat().st_mtime > STALE_S:
                path.unlink(missing_ok=True)

    def path(self, digest: str, copy: int = 0) -> Path:
        """The path of the layer file; ``copy`` numbers further copies of the same content."""
        return self._folder / (f"{digest}-{copy}.gguf" if copy else f"{digest}.gguf")

    def _tree_path(self, digest: str) -> Path:
        return self._folder / f"{digest}.tree"

    def has(self, ref: LayerRef, stop: StopHashing = never) -> bool:
        """Whether the layer is here and its weights hash to its name; a file that does not match is removed.

        Raises ``DiskError`` when the disk refuses to read or remove it, ``HashingStopped`` at ``stop``.
        """
        with self._disk_errors(f"layer {ref.digest[:12]} cannot be read"):
            whole = self._is_whole(self.path(ref.digest), ref.digest, ref.size_bytes, stop)
            if not whole:
                self._drop(ref.digest)
            return whole

    def touched(self, digests: Iterable[str]) -> list[Path]:
        """The files of these layers that were complete and now have another size, time or inode; reads none of them."""
        wanted, found = set(digests), []
        for name, stamp in list(self._verified.items()):  # threads verify other layers at the same time
            path = self._folder / name
            if path.stem.partition("-")[0] not in wanted:
                continue
            try:
                same = stamp_of(path.stat()) == stamp
            except OSError:
                same = False
            if not same:
                found.append(path)
        return sorted(found)

    def doubt(self, file: str | None, digests: Iterable[str]) -> None:
        """The weights in ``file`` could not be read or have changed: they are hashed before they are used again.

        So are the layers ``digests`` if it is not known which file it was. Files outside the cache are ignored.
        """
        doubted = set(digests) if file is None else {Path(file).stem.partition("-")[0]}
        for name in list(self._verified):
            if Path(name).stem.partition("-")[0] in doubted:
                self._verified.pop(name, None)

    def damaged(self, digest: str, *, fix: bool) -> list[Path]:
        """The damaged files of the layer, copies among them; ``fix`` removes them.

        Needs only the digest of the layer. Raises ``DiskError``.
        """
        with self._disk_errors(f"layer {digest[:12]} cannot be read"):
            files = sorted(self._folder.glob(f"{digest}*.gguf"))
            bad = [path for path in files if not self._is_whole(path, digest, None)]
            if fix and self.path(digest) in bad:
                self._drop(digest)
            elif fix:
                for path in bad:
                    path.unlink(missing_ok=True)
            return bad

    def _is_whole(self, path: Path, digest: str, size_bytes: int | None, stop: StopHashing = never) -> bool:
        """Whether ``path`` holds the weights of ``digest``; hashes them the first time and after a change."""
        try:
            stamp = stamp_of(path.stat())
        except FileNotFoundError:
            return False
        if size_bytes is not None and stamp[0] != size_bytes + HEADER_BYTES:
            return False
        if self._verified.get(path.name) == stamp:
            return True
        try:
            tree, hashed = hash_file(path, stop)
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
            tree, hashed = b"", None  # a rewrite moves the file to another place on the disk
        if not is_tree_of(tree, digest, stamp[0] - HEADER_BYTES):
            self._verified.pop(path.name, None)
            return False
        if not self._tree_path(digest).exists():
            save_tree(self._tree_path(digest), tree)
        if hashed is not None:
            self._verified[path.name] = hashed
        return True

    def reader(self, digest: str) -> StoredLayer | None:
        """The layer for a device that requests it by ``digest``, an unchecked text; None if it is not here.

        Hashes nothing: the bytes are compared with the digest as they are read.
        """
        if not _DIGEST.fullmatch(digest):
            return None
        path = self.path(digest)
        try:
            size_bytes = path.stat().st_size - HEADER_BYTES
        except OSError:
            return None
        return StoredLayer(digest, path, self._tree_path(digest), size_bytes) if size_bytes > 0 else None

    def copying(self, ref: LayerRef, source: LayerCut) -> Generator[int, None, None]:
        """Copy the layer from the model file, yielding the bytes of each chunk; chunks that are here already come first.

        Raises ``ModelError`` when the file cannot be read or has changed, ``DiskError`` when the disk refuses the
        bytes.
        """
        with self.part(ref) as part:
            if part.tree is None:
                self.begin(part, source.tree())
            elif part.present_bytes:
                yield part.present_bytes
            for number in part.lacking():
                chunk = source.read(number * CHUNK_BYTES, chunk_size(ref.size_bytes, number))
                if not is_chunk_of(chunk, part.tree or b"", number):
                    raise ModelError(f"layer {ref.digest[:12]}: the model file changed since its layers were hashed")
                self.write(part, number, chunk)
                yield len(chunk)
            self.finish(part)

    @contextmanager
    def part(self, ref: LayerRef, *, hashed: bool = True) -> Iterator[PartialLayer]:
        """The layer with the chunks that are here already, to add others; safe from ``make_room`` inside the block.

        If it is not ``hashed``, its name is its origin.

        Chunks that arrived are kept for the next time, unless the disk refused: a ``DiskError`` in the block removes
        them. Raises ``DiskError`` when the chunks that are here cannot be read.
        """
        part = PartialLayer(self._partial, ref, hashed=hashed)
        self._active.add(ref.digest)
        try:
            with self._write_errors(ref):
                part.resume()
            yield part
        except DiskError:
            with contextlib.suppress(OSError):
                part.discard()
            raise
        finally:
            self._active.discard(ref.digest)

    def begin(self, part: PartialLayer, tree: bytes | None = None) -> None:
        """As ``part.begin``. Raises ``DiskError``."""
        with self._write_errors(part.ref):
            part.begin(tree)

    def write(self, part: PartialLayer, number: int, chunk: bytes | memoryview) -> bool:
        """As ``part.write``. Raises ``DiskError``."""
        with self._write_errors(part.ref):
            return part.write(number, chunk)

    def finish(self, part: PartialLayer) -> None:
        """Give the complete ``part`` its name; an existing file of that name stays. Raises ``DiskError``."""
        path = self.path(part.digest)
        with self._write_errors(part.ref):
            if part.digest != part.ref.digest and self._is_whole(path, part.digest, part.ref.size_bytes):
                part.discard()  # a ring may be loading that file
                return
            part.finish(path, self._tree_path(part.digest))
            self._remember(path)

    def place(self, ref: LayerRef, *, number: int, split: int, copy: int = 0) -> Path:
        """Make the file layer ``number`` of its window and split ``split`` of its model; return its path.

        The layer must be here (``holds``). Rewrites only the header; ``copy`` > 0 first makes a copy of the file if
        there is no complete one. Raises ``DiskError`` when the disk refuses it.
        """
        path = self.path(ref.digest, copy)
        header = layer_header(ref.tensors, number=number, split=split)
        try:
            if copy and not self._is_whole(path, ref.digest, ref.size_bytes):
                self._copy(self.path(ref.digest), path)
            unchanged = self._verified.get(path.name) == stamp_of(path.stat())
            with path.open("rb") as file:
                placed = file.read(HEADER_BYTES) == header
            if not placed:
                with path.open("r+b") as file:
                    file.write(header)
                if unchanged:
                    self._remember(path)
        except OSError as exc:
            raise DiskError(f"{path}: the layer file cannot be prepared: {exc.strerror or exc}") from exc
        self.touch([ref.digest])
        return path

    def _copy(self, source: Path, target: Path) -> None:
        self._verified.pop(target.name, None)
        partial = self._partial / target.name
        try:
            shutil.copyfile(source, partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        self._remember(target)

    def _remember(self, path: Path) -> None:
        self._verified[path.name] = stamp_of(path.stat())

    def _drop(self, digest: str) -> None:
        for path in [*self._folder.glob(f"{digest}*.gguf"), self._tree_path(digest)]:
            self._verified.pop(path.name, None)
            path.unlink(missing_ok=True)

    @contextmanager
    def _disk_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise DiskError(
                f"{self._folder}: {what}: {exc.strerror or exc}; make room, check that folder or use another --home"
            ) from exc

    def _write_errors(self, ref: LayerRef) -> AbstractContextManager[None]:
        return self._disk_errors(f"layer {ref.digest[:12]} ({ref.size_bytes} bytes) cannot be written")

    # ---- use and room ------------------------------------------------------------------------------------------------

    def touch(self, digests: Iterable[str]) -> None:
        """Mark these layers as used now, so that they are pruned last."""
        for digest in digests:
            with contextlib.suppress(OSError):  # not here, or the disk failed: the layer only looks older than it is
                os.utime(self._tree_path(digest))

    def lease(self, owner: str, digests: Iterable[str]) -> None:
        """Protect ``digests`` from pruning, also by other processes, replacing the earlier lease of ``owner``."""
        held = frozenset(digests)
        self._leases.lease(owner, held)
        self.touch(held)

    def end_lease(self, owner: str) -> None:
        """End the lease of ``owner``."""
        self._leases.end(owner)

    def layers(self) -> list[CachedLayer]:
        """The layers in the cache, least recently used first. Raises ``DiskError``."""
        held, sizes, used = self._leases.held(), dict[str, int](), dict[str, float]()
        with self._disk_errors("cannot be listed"):
            for path in _inside(self._folder):
                if (match := _FILE.fullmatch(path.name)) is None:
                    continue
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue  # pruned concurrently
                digest = match[1]
                sizes[digest] = sizes.get(digest, 0) + status.st_size
                if match[3] == "tree" or digest not in used:
                    used[digest] = status.st_mtime
        found = [
            CachedLayer(digest=digest, size_bytes=size, used_s=used[digest], held=digest in held)
            for digest, size in sizes.items()
        ]
        return sorted(found, key=lambda layer: (layer.used_s, layer.digest))

    def partial_bytes(self) -> int:
        """Disk space of partial layers. Raises ``DiskError``."""
        with self._disk_errors("cannot be listed"):
            return sum(map(_taken, _inside(self._partial)))

    def remove(self, layers: Iterable[CachedLayer]) -> None:
        """Remove these layers. Raises ``DiskError`` when the disk refuses."""
        with self._disk_errors("cannot be pruned"):
            for layer in layers:
                self._drop(layer.digest)

    def drop_partial(self) -> int:
        """Remove partial layers that are not being fetched; return the bytes gained. Raises ``DiskError``."""
        gained = 0
        with self._disk_errors("cannot be pruned"):
            for path, size_bytes in self.idle_partial():
                path.unlink(missing_ok=True)
                gained += size_bytes
        return gained

    def idle_partial(self) -> list[tuple[Path, int]]:
        """The partial files that are not being fetched, with the disk space they take. Raises ``DiskError``."""
        if self._leases.others_live():
            return []
        with self._disk_errors("cannot be listed"):
            paths = [path for path in _inside(self._partial) if path.stem.partition("-")[0] not in self._active]
            return [(path, _taken(path)) for path in paths]

    def make_room(self, needed_bytes: int) -> None:
        """Prune layers without a lease, least recently used first, until ``needed_bytes`` more fit the limit and the
        disk.

        Partial files that are not being fetched go first. Raises ``DiskError`` with the figures, and prunes nothing,
        when everything together is not enough.
        """
        if needed_bytes <= 0:
            return
        layers = self.layers()
        partial = self.partial_bytes()
        with self._disk_errors("cannot be looked at"):
            usage = shutil.disk_usage(self._folder)
        disk = Disk(
            used_bytes=sum(layer.size_bytes for layer in layers) + partial,
            limit_bytes=self._limit_bytes,
            free_bytes=usage.free,
            total_bytes=usage.total,
        )
        excess = disk.excess(needed_bytes)
        if excess <= 0:
            return
        idle = sum(size_bytes for _, size_bytes in self.idle_partial())
        if sum(layer.size_bytes for layer in oldest_first(layers, excess)) + idle < excess:
            raise DiskError(self._no_room(needed_bytes, disk, layers))
        self.remove(oldest_first(layers, excess - self.drop_partial()))

    def _no_room(self, needed_bytes: int, disk: Disk, layers: list[CachedLayer]) -> str:
        held = sum(layer.size_bytes for layer in layers if layer.held)
        limit = "" if disk.limit_bytes is None else f", limit {disk.limit_bytes}"
        return (
            f"{self._folder}: {needed_bytes} bytes of layers do not fit: {disk.free_bytes} bytes of disk are free "
            f"({disk.reserve_bytes} stay free), the cache takes {disk.used_bytes}{limit}, {held} of it in use; make room "
            "there, raise the limit or use another --home"
        )


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


def _taken(path: Path) -> int:
    """Bytes on disk: a partial file has holes on systems that support them."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0
    blocks = getattr(status, "st_blocks", None)
    return status.st_size if blocks is None else min(status.st_size, int(blocks) * 512)


class OriginBook:
    """The digests of layers downloaded from a hub, in the file ``memory``. One process at a time writes to it."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, str] | None = None

    def _read(self) -> dict[str, str]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, msgspec.DecodeError):
                self._known = msgspec.json.decode(self._memory.read_bytes(), type=dict[str, str])
        return self._known

    def get(self, name: str) -> str | None:
        """The digest of the layer of this origin, if it was downloaded here."""
        return self._read().get(name)

    def put(self, name: str, digest: str) -> None:
        """Record that the layer of this origin has ``digest``. If the disk fails, the layer may be fetched again."""
        known = self._read()
        known.pop(name, None)
        self._known = dict(list(known.items())[-(MAX_ORIGINS - 1) :]) | {name: digest}
        with contextlib.suppress(OSError):
            write_whole(self._memory, msgspec.json.encode(self._known))
