"""Where the bytes of a layer lie on a hub, for devices that fetch no more of a model than they hold.

What nobody has fetched yet has no digest. Until somebody has, a layer is called by its *origin*: a hash of the files that it
lies in, as the hub's own hashes name them, and of where in them each of its tensors is. One origin is one content, as far as
the hub keeps its word; the digest of what came says from then on what the content is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Final, NamedTuple

import msgspec

from primad.errors import ProtocolError, printable
from primad.gguf.layers import CHUNK_BYTES, DIGEST_BYTES, MAX_LAYER_TENSORS, LayerRef, chunk_size

MAX_FILES: Final = 1000
MAX_FILE_BYTES: Final = 1 << 44
MAX_URL_CHARS: Final = 1000
GAP_BYTES: Final = 4096
"""Tensors so close in a file come with one request, and what is between them too."""
_URL: Final = re.compile(rf"https?://[\x21-\x7e]{{3,{MAX_URL_CHARS}}}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class RemoteFile(msgspec.Struct, frozen=True, array_like=True):
    """A file on a hub, in one revision that its ``url`` names, and the SHA-256 (hex) that the hub states of it."""

    url: str
    size_bytes: int
    sha256: str


class LayerOrigin(msgspec.Struct, frozen=True, array_like=True):
    """Where a layer comes from: of each tensor the file, by its number, and the byte in it.

    ``layer`` is what windows call it: its digest where that is known, else ``name``, which is ``origin_name`` of it.
    """

    layer: str
    name: str
    places: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=MAX_LAYER_TENSORS)]


class Run(NamedTuple):
    """``size`` bytes from ``offset`` of file number ``file``; ``pieces`` of it (begin, bytes, where in what is read)."""

    file: int
    offset: int
    size: int
    pieces: list[tuple[int, int, int]]


def origin_name(files: Sequence[RemoteFile], places: Sequence[tuple[int, int]], ref: LayerRef) -> str:
    """What the layer ``ref``, whose tensors lie at ``places`` of ``files``, is called before anybody has fetched it."""
    facts = [
        (files[file].sha256, offset, tensor.offset, tensor.size_bytes)
        for (file, offset), tensor in zip(places, ref.tensors, strict=True)
    ]
    return blake2b(repr(("primad origin 1", ref.size_bytes, facts)).encode(), digest_size=DIGEST_BYTES).hexdigest()


def runs_of_chunk(ref: LayerRef, places: Sequence[tuple[int, int]], number: int) -> list[Run]:
    """What to read for chunk ``number`` of the layer; between its tensors a chunk has zeros."""
    begin = number * CHUNK_BYTES
    end = begin + chunk_size(ref.size_bytes, number)
    found: list[Run] = []
    for (file, offset), tensor in zip(places, ref.tensors, strict=True):
        first, last = max(begin, tensor.offset), min(end, tensor.offset + tensor.size_bytes)
        if first >= last:
            continue
        at, size = offset + first - tensor.offset, last - first
        run = found[-1] if found else None
        if run is not None and run.file == file and 0 <= at - run.offset - run.size <= GAP_BYTES:
            run.pieces.append((at - run.offset, size, first - begin))
            found[-1] = run._replace(size=at + size - run.offset)
        else:
            found.append(Run(file, at, size, [(0, size, first - begin)]))
    return found


def check_origins(files: Sequence[RemoteFile], origins: Sequence[LayerOrigin], refs: Sequence[LayerRef]) -> None:
    """Judge what a head says of where the layers ``refs`` come from. Raises ``ProtocolError``."""
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
        for (number, offset), tensor in zip(origin.places, ref.tensors, strict=True):
            if not 0 <= number < len(files) or not 0 <= offset <= files[number].size_bytes - tensor.size_bytes:
                raise ProtocolError(f"layer {origin.layer[:12]} lies outside of its file on the hub")
        if origin.name != origin_name(files, origin.places, ref):
            raise ProtocolError(f"layer {origin.layer[:12]} is not called by where it comes from")
