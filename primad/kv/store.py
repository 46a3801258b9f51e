"""The KV cells that a device holds: files by the key of their block.

    <folder>/<key>/<first>-<last>.cells    the block's cells of layers first <= layer < last, computed by this device;
                                           the folder's modification time is when the block was last used
    <folder>/<key>/<first>-<last>.copy     cells computed by another device; if both have a layer, the .cells file is read

The file system is the shared truth: a ring process writes, its daemon serves and fetches. Both only ever see complete
files, of mode 0600. They are not flushed to the disk: a file that a power cut left incomplete is detected when it is
read, and any damaged file counts as missing and is removed. Layers are numbered as in the whole model, shares of them
by rank (``layers_of_rank``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from primad.errors import DiskError
from primad.kv.cells import (
    Bytes,
    CellsError,
    CellsFile,
    CellShape,
    LayerCells,
    are_numbers,
    is_key,
    pack,
    shape_of,
    unpack,
)
from primad.kv.keys import KvBlock
from primad.system.files import PRIVATE, lacking_room

logger = logging.getLogger(__name__)

_FILE: Final = re.compile(r"(\d{1,5})-(\d{1,5})\.(cells|copy)")
_COPY: Final = ".copy"
_COUNT_SHARE: Final = 16
"""What other processes write is counted again after a 16th of the limit was written here; eviction frees this share as
well."""
_numbers: Final = count()
"""Numbers of files that are being written, unique in this process, which may have several stores of one folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """A block in the store: its size, when it was last used (Unix time), and whether it is leased."""

    key: str
    size_bytes: int
    used_s: float
    leased: bool


class KvStore:
    """The blocks under ``folder``, at most ``limit_bytes`` in addition to leased ones (None: nothing is evicted).

    One process has the limit and the leases; others may write, read and forget at the same time. Every method but
    ``lease`` may block on the disk, and raises ``DiskError`` if the disk fails.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._leases: dict[str, frozenset[str]] = {}
        self._shapes: dict[int, dict[tuple[int, bool], CellShape]] = {}
        """For each ring, by layer and whether it is the shape of a state."""
        self._counted_bytes: int | None = None
        self._written_bytes = 0

    def expect(self, shapes: Iterable[CellShape], *, of: int = 0) -> None:
        """Set the shapes of the cells of this device's windows in ring ``of``: copies with other shapes in their layers
        are refused, and removed."""
        self._shapes.pop(of, None)
        if own := {(shape.layer, shape.is_state): shape for shape in shapes}:
            self._shapes[of] = own

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def put(self, block: KvBlock, cells: Sequence[LayerCells]) -> None:
        """Keep ``cells`` of ``block`` as this device computed them. Evicts blocks if the limit requires it."""
        self._put(block, cells, "cells")

    def _put(self, block: KvBlock, cells: Sequence[LayerCells], kind: str) -> None:
        by_layer = {each.layer: each for each in cells}
        for run in _runs_of(by_layer):
            pieces = pack(block, [by_layer[layer] for layer in run])
            size_bytes = sum(map(len, pieces))
            with self._disk_errors(f"{size_bytes} bytes of KV cells cannot be written"):
                self._write(self.folder / block.key, f"{run.start}-{run.stop}.{kind}", pieces)
            self._written_bytes += size_bytes
        self._keep_to_limit()

    def held(self, key: str, first: int, last: int, *, verify: bool = False) -> bool:
        """Whether layers ``first <= layer < last`` of a block are here; with ``verify``, also undamaged."""
        if verify:
            return first >= last or bool(self.read(key, first, last))
        return self.layers(key).issuperset(range(first, last))

    def layers(self, key: str) -> frozenset[int]:
        """The layers of a block that are here, by the names of its files, and for copies also by their shapes."""
        return frozenset(layer for path, layers in self._files(key) if self._fits(path, key) for layer in layers)

    def _fits(self, path: Path, key: str) -> bool:
        if path.suffix != _COPY or not self._shapes:
            return True
        with self._opened(path, key) as file:
            return file is not None

    def _judge(self, found: Iterable[CellShape]) -> None:
        for shape in found:
            place = shape.layer, shape.is_state
            expected = [shapes[place] for shapes in self._shapes.values() if place in shapes]
            if expected and shape not in expected:
                raise CellsError(f"KV cells of layer {shape.layer} have other types or sizes than those of this device")

    def read(self, key: str, first: int, last: int) -> list[LayerCells]:
        """The cells of layers ``first <= layer < last``, in order, verified; empty unless all of them are here."""
        return self.read_block(key, first, last)[1]

    def read_block(self, key: str, first: int, last: int) -> tuple[KvBlock | None, list[LayerCells]]:
        """The block, together with what ``read`` returns of it; None if none of these layers is here."""
        found: dict[int, LayerCells] = {}
        block: KvBlock | None = None
        for path, layers in self._files(key):
            for wanted in _runs_of(layer for layer in layers if first <= layer < last and layer not in found):
                with self._opened(path, key, block) as file:
                    if file is None:
                        continue
                    block = file.block
                    found |= {each.layer: each for each in file.read(wanted)}
        return block, [found[layer] for layer in range(first, last)] if len(found) == last - first else []

    def forget(self, keys: Iterable[str]) -> None:
        """Remove these blocks, if they are here and not leased."""
        leased = self._leased()
        for key in keys:
            if is_key(key) and key not in leased:
                self._remove(key)

    def touch(self, keys: Sequence[str]) -> None:
        """Note that the chain ``keys`` is used now; its end is evicted first, since it is worthless without its
        beginning."""
        now = time.time_ns()
        for i, key in enumerate(filter(is_key, keys)):
            with contextlib.suppress(OSError):  # not here
                os.utime(self.folder / key, ns=(now - 1000 * i, now - 1000 * i))

    # ---- between devices ---------------------------------------------------------------------------------------------

    def part(self, key: str, first: int, last: int) -> bytes | None:
        """What is here of layers ``first <= layer < last`` of a block: the first run of them, as ``add_part`` takes it.

        None if none of them is here.
        """
        runs = _runs_of(layer for layer in self.layers(key) if first <= layer < last)
        if not runs:
            return None
        block, cells = self.read_block(key, runs[0].start, runs[0].stop)
        return b"".join(pack(block, cells)) if cells and block is not None else None

    def add_part(self, block: KvBlock, part: Bytes, asked: range) -> range:
        """Keep a part of ``block`` that came from another device, which was ``asked`` for these layers; return its
        layers.

        Layers that are here already stay as they are. Raises ``CellsError`` for a part that is invalid, was not asked
        for, or fits no window.
        """
        found, cells = unpack(part)
        if found != block:
            raise CellsError(f"KV cells of block {found.key} came in place of those of block {block.key}")
        layers = range(cells[0].layer, cells[-1].layer + 1)
        self._judge(map(shape_of, cells))
        if strange := [each.layer for each in cells if not are_numbers(each)]:
            raise CellsError(f"KV cells of layer {strange[0]} came with values that are not numbers (NaN or infinity)")
        if layers.start not in asked or layers[-1] not in asked:
            raise CellsError(f"KV cells of layers {layers.start} to {layers[-1]} came, which were not asked for")
        here = self.layers(block.key)
        if new := [each for each in cells if each.layer not in here]:
            self._put(block, new, "copy")
        return layers

    # ---- use and room ------------------------------------------------------------------------------------------------

    def lease(self, owner: str, keys: Iterable[str]) -> None:
        """Protect ``keys`` from eviction and removal, in place of those that ``owner`` held before; an empty list ends
        the lease."""
        self._leases[owner] = frozenset(keys)
        if not self._leases[owner]:
            del self._leases[owner]

    def list(self) -> list[StoredBlock]:
        """The blocks that are here, least recently used first."""
        leased, found = self._leased(), []
        with self._disk_errors("cannot be listed"):
            for folder in self.folder.iterdir() if self.folder.exists() else ():
                if not is_key(folder.name):
                    continue
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # forgotten in this moment
                    size_bytes = sum(entry.stat().st_size for entry in os.scandir(folder))
                    used_s = folder.stat().st_mtime_ns / 1e9
                    found.append(
                        StoredBlock(key=folder.name, size_bytes=size_bytes, used_s=used_s, leased=folder.name in leased)
                    )
        return sorted(found, key=lambda block: (block.used_s, block.key))

    def lacking(self) -> str:
        """Describe the free space if it is too small for what the limit allows; otherwise empty. Raises
        ``DiskError``."""
        if self.limit_bytes is None:
            return ""
        held_bytes = sum(block.size_bytes for block in self.list())
        with self._disk_errors("cannot be looked at"):
            return lacking_room(self.folder, max(0, self.limit_bytes - held_bytes))

    def clear(self) -> None:
        """Remove everything that is not leased."""
        self.forget(block.key for block in self.list())

    def evict(self) -> None:
        """Enforce the limit, also on what others wrote: evict the least recently used blocks, and some more, so that
        there is room for a while."""
        assert self.limit_bytes is not None
        blocks = self.list()
        left_bytes = sum(block.size_bytes for block in blocks)
        room_bytes = self.limit_bytes // _COUNT_SHARE if left_bytes > self.limit_bytes else 0
        for block in blocks:
            if left_bytes <= self.limit_bytes - room_bytes:
                break
            if not block.leased and self._remove(block.key):
                left_bytes -= block.size_bytes
        self._counted_bytes, self._written_bytes = left_bytes, 0

    def _keep_to_limit(self) -> None:
        if self.limit_bytes is None:
            return
        counted, written, limit = self._counted_bytes, self._written_bytes, self.limit_bytes
        if counted is None or counted + written > limit or written * _COUNT_SHARE > limit:
            self.evict()

    # ---- files -------------------------------------------------------------------------------------------------------

    def _leased(self) -> frozenset[str]:
        return frozenset().union(*self._leases.values())

    def _files(self, key: str) -> Sequence[tuple[Path, range]]:
        """The block's files and the layers in their names, own ones first, then the largest."""
        if not is_key(key):
            return []
        found = []
        with self._disk_errors("cannot be listed"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in (self.folder / key).iterdir():
                if match := _FILE.fullmatch(path.name):
                    found.append((path, range(int(match[1]), int(match[2]))))
        return sorted(found, key=lambda each: (each[0].suffix, -len(each[1]), each[0].name))

    @contextmanager
    def _opened(self, path: Path, key: str, block: KvBlock | None = None) -> Iterator[CellsFile | None]:
        """Open the file if it has what its name says of ``block``; if it proves damaged in the ``with`` block it is
        removed."""
        try:
            with path.open("rb") as file:
                try:
                    cells = CellsFile(file, os.fstat(file.fileno()).st_size)
                    name = f"{cells.layers.start}-{cells.layers.stop}"
                    if cells.block.key != key or path.stem != name or block not in (None, cells.block):
                        raise CellsError("a file of KV cells has the name of another one")
                    if path.suffix == _COPY:
                        self._judge(cells.shapes())
                except CellsError as exc:
                    self._damaged(path, exc)
                    yield None
                    return
                yield cells
        except FileNotFoundError:
            yield None
        except CellsError as exc:
            self._damaged(path, exc)
        except OSError as exc:
            raise self._disk_error("cannot be read", exc) from exc

    def _damaged(self, path: Path, exc: CellsError) -> None:
        logger.warning("%s: %s; it is removed, and its cells are computed again", path, exc)
        with contextlib.suppress(OSError):
            path.unlink()

    def _write(self, folder: Path, name: str, pieces: Sequence[Bytes]) -> None:
        """Replace file ``name`` with ``pieces`` atomically, readable only by its owner from the first byte."""
        self._check_disk(sum(map(len, pieces)))
        partial = folder / f".{os.getpid()}-{next(_numbers)}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), PRIVATE)
            with os.fdopen(descriptor, "wb") as file:
                for piece in pieces:
                    file.write(piece)
            partial.replace(folder / name)
        except FileNotFoundError:  # the block is being forgotten
            return
        finally:
            partial.unlink(missing_ok=True)

    def _check_disk(self, size_bytes: int) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if lacking := lacking_room(self.folder, size_bytes):
            raise DiskError(f"{self.folder}: {size_bytes} bytes of KV cells do not fit: {lacking}; make room there")

    def _remove(self, key: str) -> bool:
        folder = self.folder / key
        try:
            while folder.exists():  # another process that removes it too may not be done
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(folder)
        except OSError as exc:  # another process writes or reads there
            logger.warning("%s: block %s cannot be removed: %s", self.folder, key, exc.strerror or exc)
            return False
        return True

    @contextmanager
    def _disk_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise self._disk_error(what, exc) from exc

    def _disk_error(self, what: str, exc: OSError) -> DiskError:
        return DiskError(f"{self.folder}: {what}: {exc.strerror or exc}; make room or the folder writable")


def _runs_of(layers: Iterable[int]) -> list[range]:
    """Group ``layers`` into runs of consecutive ones."""
    runs: list[range] = []
    for layer in sorted(layers):
        if runs and runs[-1].stop == layer:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    return runs
