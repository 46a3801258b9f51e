"""A file that is sent like a layer, identified by its hash: a picture encoder, whose loader does not accept parts.

Its bytes are those of one tensor, so that devices fetch it in chunks from any device that has it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from primad.errors import DiskError, ModelError
from primad.gguf.constants import GGMLQuantizationType
from primad.gguf.header import Header, TensorInfo
from primad.gguf.layers import CHUNK_BYTES, HEADER_BYTES, Hole, LayerCut, LayerRef, cut, metadata_split
from primad.system.files import write_whole

_NAME: Final = "file"


def cut_file(path: Path) -> LayerCut:
    """The file ``path`` as a layer. Raises ``ModelError``."""
    try:
        size = path.stat().st_size
    except OSError as exc:
        raise ModelError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    tensor = TensorInfo(name=_NAME, type=GGMLQuantizationType.I8, shape=(size,), offset=0, bytes=size, path=path)
    return cut({_NAME: tensor})


def write_file(ref: LayerRef, layer: Path, target: Path) -> None:
    """Write the file that is in the layer file ``layer`` of ``ref`` to ``target``. Raises ``OSError``."""
    left = ref.tensors[0].size_bytes
    with layer.open("rb") as source, target.open("wb") as file:
        source.seek(HEADER_BYTES)
        while left and (chunk := source.read(min(CHUNK_BYTES, left))):
            file.write(chunk)
            left -= len(chunk)


def without_weights(header: Header) -> tuple[bytes, int]:
    """The model of ``header`` in one file whose weights are a hole: what precedes it, and the hole's bytes."""
    holes = [Hole(name=name, type=each.type, shape=each.shape) for name, each in header.tensors.items()]
    values = {key: value for key, value in header.values.items() if not key.startswith("split.")}
    metadata = metadata_split(values, holes, splits=1, tensors=len(holes))
    return metadata, sum(each.padded_bytes for each in holes)


def write_with_hole(path: Path, metadata: bytes, hole_bytes: int) -> None:
    """Write the result of ``without_weights``. Raises ``OSError``."""
    write_whole(path, metadata)
    os.truncate(path, len(metadata) + hole_bytes)


def write_without_weights(header: Header, path: Path) -> None:
    """Write ``without_weights`` to ``path``; the hole takes no space on most disks. Raises ``DiskError``."""
    try:
        write_with_hole(path, *without_weights(header))
    except OSError as exc:
        raise DiskError(f"{path}: cannot be written: {exc.strerror}; make room or the folder writable") from exc
