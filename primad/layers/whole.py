"""Verify a model that one device fetched entirely by ranges: compare it, file by file, with the hub's hashes.

The hub states a hash for each file, which cannot verify a single range. All ranges together can be verified, with the
bytes between the tensors, which are in no layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from primad.errors import DiskError, ModelError
from primad.gguf.header import TensorInfo
from primad.gguf.hub_ranges import HubRanges
from primad.gguf.layers import CHUNK_BYTES, HEADER_BYTES
from primad.gguf.model import open_model
from primad.gguf.origins import RemoteFile
from primad.gguf.ranged_cutter import RangedCutter
from primad.layers.cache import LayerCache
from primad.system.files import write_whole

_COMPARED: Final = "compared"
"""The file next to a model's header that records the hashes it was compared with."""


@dataclass(frozen=True, slots=True)
class _Place:
    """``size_bytes`` of a tensor from ``offset`` of the file ``path`` here."""

    path: Path
    offset: int
    size_bytes: int


def is_compared(cutter: RangedCutter) -> bool:
    """Whether all files of the model were compared before and matched."""
    try:
        return _note(cutter).read_text() == _hashes(cutter)
    except OSError:
        return False


def compare(cutter: RangedCutter, cache: LayerCache, advance: Callable[[int, int], None]) -> bool:
    """Compare the model, whose layers are in ``cache``, with the hub's hashes; return False if it is incomplete.

    ``advance`` gets the bytes done and the total. If the model differs, its layers are removed and ``ModelError`` is
    raised. Raises ``HubError`` if the hub does not serve the bytes between tensors, and ``DiskError``.
    """
    try:
        named = open_model(cutter.parts[0], header_only=True).tensors
        tensors, places = named.values(), _places(cutter, cache, named)
        if any((each.path, each.offset) not in places for each in tensors):
            return False
        done, total = 0, sum(file.size_bytes for file in cutter.files)
        for part, file in zip(cutter.parts, cutter.files, strict=True):
            own = sorted((each for each in tensors if each.path == part), key=lambda each: each.offset)
            found = hashlib.sha256()
            with cutter.reader() as reader:
                for piece in _pieces(part, file, own, places, reader):
                    found.update(piece)
                    done += len(piece)
                    advance(done, total)
            if found.hexdigest() != file.sha256:
                here = {cutter.ref(layer).digest for layer in cutter.layers_of_all}
                cache.remove(layer for layer in cache.layers() if layer.digest in here)
                raise ModelError(
                    f"{part}: what came by ranges is not the file that the hub states; 'primad rm' the model and serve it "
                    "again"
                )
        with suppress(OSError):  # the model is compared again next time
            write_whole(_note(cutter), _hashes(cutter).encode())
    except OSError as exc:
        raise DiskError(f"{cutter.parts[0].parent}: cannot be compared with the hub: {exc.strerror or exc}") from exc
    return True


def _note(cutter: RangedCutter) -> Path:
    return cutter.parts[0].parent / _COMPARED


def _hashes(cutter: RangedCutter) -> str:
    return " ".join(file.sha256 for file in cutter.files)


def _places(
    cutter: RangedCutter, cache: LayerCache, tensors: Mapping[str, TensorInfo]
) -> dict[tuple[Path, int], _Place]:
    """The local place of each of the ``tensors``, by its file and offset on the hub."""
    found = {}
    for layer in cutter.layers_of_all:
        path, cut = cache.path(cutter.ref(layer).digest), cutter.cut(layer)
        if path.exists():
            for source, tensor in zip(cut.sources, cut.tensors, strict=True):
                place = _Place(path, HEADER_BYTES + tensor.offset, tensor.size_bytes)
                found[source.path, source.offset] = place
    for name, on_hub in tensors.items():
        small = cutter.header.tensors[name]
        if small.path != on_hub.path:
            found[on_hub.path, on_hub.offset] = _Place(small.path, small.offset, small.bytes)
    return found


def _pieces(
    part: Path,
    file: RemoteFile,
    tensors: list[TensorInfo],
    places: dict[tuple[Path, int], _Place],
    reader: HubRanges,
) -> Iterator[bytes]:
    """The bytes of ``file`` from first to last; ``part`` has its header."""
    header = part.read_bytes()
    yield header
    at = len(header)
    for tensor in tensors:
        yield from _between(reader, file, at, tensor.offset)
        place = places[tensor.path, tensor.offset]
        with place.path.open("rb") as stream:
            stream.seek(place.offset)
            left = place.size_bytes
            while left and (piece := stream.read(min(left, CHUNK_BYTES))):
                yield piece
                left -= len(piece)
        at = tensor.offset + tensor.bytes
    yield from _between(reader, file, at, file.size_bytes)


def _between(reader: HubRanges, file: RemoteFile, first: int, last: int) -> Iterator[bytes]:
    for at in range(first, last, CHUNK_BYTES):
        yield reader.read(file, at, min(CHUNK_BYTES, last - at))
