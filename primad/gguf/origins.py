"""Where the bytes of a layer are on a hub, for devices that fetch only the layers that they hold.

A layer that no device has fetched yet has no digest. Until then it is named by its *origin*: a hash of the hub's own
hashes of its files and of the position of each of its tensors. One origin is one content, if the hub's hashes are
right; after a fetch, the digest of the received bytes identifies the content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec.structs import astuple

from primad.errors import ProtocolError, printable
from primad.gguf.layers import CHUNK_BYTES, DIGEST_BYTES, MAX_LAYER_TENSORS, LayerRef, chunk_size
from primad.gguf.slices import TensorCut

MAX_FILES: Final = 1000
MAX_FILE_BYTES: Final = 1 << 44
MAX_URL_CHARS: Final = 1000
MAX_RUN_BYTES: Final = 4 * CHUNK_BYTES
"""Maximum size of a request of which only some bytes are wanted."""
MAX_TIMES: Final = 64
"""A tensor is at most this many times as large as a share of it."""
GAP_BYTES: Final = 4096
"""Tensors this close in a file are read with one request, including the bytes between them."""
_URL: Final = re.compile(rf"https?://[\x21-\x7e]{{3,{MAX_URL_CHARS}}}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class RemoteFile(msgspec.Struct, frozen=True, array_like=True):
    """A file on a hub, in one revision that its ``url`` names, and the SHA-256 (hex) that the hub states of it."""

    url: str
    size_bytes: int
    sha256: str


class LayerOrigin(msgspec.Struct, frozen=True, array_like=True):
    """The source of a layer: for each tensor the number of its file, and its offset there.

    ``layer`` is its name in windows: its digest if that is known, else ``name``, which is its ``origin_name``. For a
    share of a layer ``cuts`` says which bytes of each tensor it has; empty: all of them.
    """

    layer: str
    name: str
    places: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=MAX_LAYER_TENSORS)]
    cuts: Annotated[tuple[TensorCut | None, ...], msgspec.Meta(max_length=MAX_LAYER_TENSORS)] = ()


class Run(NamedTuple):
    """``size`` bytes from ``offset`` of file number ``file``; ``pieces``: (begin in the run, bytes, begin in the chunk)."""

    file: int
    offset: int
    size: int
    pieces: list[tuple[int, int, int]]


def origin_name(
    files: Sequence[RemoteFile],
    places: Sequence[tuple[int, int]],
    ref: LayerRef,
    cuts: Sequence[TensorCut | None] = (),
) -> str:
    """The name of the layer ``ref``, whose tensors lie at ``places`` of ``files``, before any device has fetched it."""
    facts = [
        (files[file].sha256, offset, tensor.offset, tensor.size_bytes)
        for (file, offset), tensor in zip(places, ref.tensors, strict=True)
    ]
    parts = [cut and astuple(cut) for cut in cuts]
    content = ("primad origin 2", ref.size_bytes, facts, parts) if cuts else ("primad origin 1", ref.size_bytes, facts)
    return blake2b(repr(content).encode(), digest_size=DIGEST_BYTES).hexdigest()


def runs_of_chunk(ref: LayerRef, origin: LayerOrigin, number: int) -> list[Run]:
    """The reads for chunk ``number`` of the layer; between its tensors a chunk has zeros.

    Runs of one tensor are read together with the bytes between them: a request for each row of a matrix would take
    longer.
    """
    begin = number * CHUNK_BYTES
    end = begin + chunk_size(ref.size_bytes, number)
    found: list[Run] = []
    for place, (tensor, (file, offset)) in enumerate(zip(ref.tensors, origin.places, strict=True)):
        first, last = max(begin, tensor.offset), min(end, tensor.offset + tensor.size_bytes)
        if first >= last:
            continue
        cut, start = origin.cuts[place] if origin.cuts else None, first - tensor.offset
        runs = [(0, start, last - first)] if cut is None else cut.runs(start, last - first)
        gap_bytes = GAP_BYTES
        for behind, from_, size in runs:
            _add_run(found, file, offset + from_, (size, first - begin + behind), gap_bytes)
            gap_bytes = MAX_RUN_BYTES
    return found


def _add_run(found: list[Run], file: int, at: int, piece: tuple[int, int], gap_bytes: int) -> None:
    """Read a ``piece`` (bytes, and where in the chunk) at ``at``, together with the run before where the gap is small."""
    run, (size, into) = found[-1] if found else None, piece
    if (
        run is not None
        and run.file == file
        and 0 <= at - run.offset - run.size <= gap_bytes
        and at + size - run.offset <= MAX_RUN_BYTES
    ):
        run.pieces.append((at - run.offset, size, into))
        found[-1] = run._replace(size=at + size - run.offset)
    else:
        found.append(Run(file, at, size, [(0, size, into)]))


def check_origins(files: Sequence[RemoteFile], origins: Sequence[LayerOrigin], refs: Sequence[LayerRef]) -> None:
    """Check a head's statement of where the layers ``refs`` come from. Raises ``ProtocolError``."""
    for file in files:
        if not _URL.fullmatch(file.url) or not _SHA256.fullmatch(file.sha256):
            raise ProtocolError(f"a file of a hub at {printable(file.url, 80)!r}, which is none")
        if not 0 < file.size_bytes <= MAX_FILE_BYTES:
            raise ProtocolError(f"a file of a hub of {file.size_bytes} bytes")
    by_name = {ref.digest: ref for ref in refs}
    for origin in origins:
        ref = by_name.get(origin.layer)
        if ref is None or len(origin.places) != len(ref.tensors):
            raise ProtocolError("a layer of a hub that no window has")
        cuts = origin.cuts or (None,) * len(ref.tensors)
        if len(cuts) != len(ref.tensors):
            raise ProtocolError("a layer of a hub with other tensors than its window has")
        for (number, offset), tensor, cut in zip(origin.places, ref.tensors, cuts, strict=True):
            span = tensor.size_bytes if cut is None else _span(cut, tensor.size_bytes)
            if span is None or not 0 <= number < len(files) or not 0 <= offset <= files[number].size_bytes - span:
                raise ProtocolError(f"layer {origin.layer[:12]} lies outside of its file on the hub")
        if origin.name != origin_name(files, origin.places, ref, origin.cuts):
            raise ProtocolError(f"layer {origin.layer[:12]} is not called by where it comes from")


def _span(cut: TensorCut, size: int) -> int | None:
    """The number of file bytes that a slice of ``size`` bytes spans; None for an impossible cut."""
    bounds = [bound for each in cut.ranges for bound in each]
    each = cut.own_bytes
    if not cut.ranges:
        return 0
    if bounds != sorted(bounds) or bounds[-1] > cut.extent or each <= 0 or size % each:
        return None
    return size // each * cut.extent * cut.item_bytes if cut.extent * cut.item_bytes <= MAX_TIMES * each else None
