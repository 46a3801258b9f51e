"""A model on a hub of which only the header is local: enough to plan with. ``ranged_cutter.py`` assigns the fetching.

    <folder>/<owner>/<repo>/.header/<quantisation>/
        <file>.gguf        the header of each part, unchanged; no weights
        vocabulary.primad  the metadata, for llama.cpp to read the vocabulary from, and the small tensors of every window
        origin.json        where the files are: their URLs with the revision, sizes and hashes

Its ``Header`` equals the file's: tensors have their offsets in the header files, where no data exists, except the small
ones, which are in ``vocabulary.primad``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from primad.errors import DiskError
from primad.gguf.architectures.table import ADVICE, NotCutError
from primad.gguf.architectures.tensors import TensorRole, tensor_roles
from primad.gguf.header import Header, read_header, read_header_of
from primad.gguf.hub_ranges import HubRanges
from primad.gguf.layers import CHUNK_BYTES, SmallTensor, metadata_split
from primad.gguf.model import open_model
from primad.gguf.origins import RemoteFile
from primad.gguf.windows import MAX_SMALL_BYTES
from primad.system.files import write_whole

HEADERS: Final = ".header"
_ORIGIN: Final = "origin.json"
VOCABULARY: Final = "vocabulary.primad"
_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RangedModel:
    """A model with a local ``header``; ``files`` are its parts on the hub, in order. ``vocabulary`` is a local file."""

    header: Header
    files: tuple[RemoteFile, ...]
    parts: tuple[Path, ...]
    vocabulary: Path


def open_ranged(folder: Path) -> RangedModel | None:
    """The model whose header is stored in ``folder``; None if it is missing or incomplete. Raises ``ModelError``."""
    try:
        files = msgspec.json.decode((folder / _ORIGIN).read_bytes(), type=dict[str, RemoteFile])
    except (OSError, msgspec.DecodeError):
        return None
    parts = tuple(folder / name for name in files)
    if not parts or any(part.parent != folder or not part.is_file() for part in (*parts, folder / VOCABULARY)):
        return None
    header = open_model(parts[0], header_only=True)
    small = read_header(folder / VOCABULARY).tensors
    return RangedModel(
        header=replace(header, tensors={**header.tensors, **small}),
        files=tuple(files.values()),
        parts=parts,
        vocabulary=folder / VOCABULARY,
    )


def keep_header(files: dict[str, RemoteFile], folder: Path, reader: HubRanges) -> None:
    """Read the headers of ``files``, which are the parts of one model by name, from the hub into ``folder``.

    Raises ``HubError`` if the hub serves no ranges, ``ModelError`` for a file that is not a model, ``NotCutError`` for one
    whose windows would need too much, ``DiskError``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, file in files.items():
            part = _Forward(reader, file)
            read_header_of(part, folder / name, file.size_bytes)
            write_whole(folder / name, bytes(part.taken))
        header = open_model(folder / next(iter(files)), header_only=True)
        small = list(_small_tensors(header, {folder / name: file for name, file in files.items()}, reader))
        write_whole(folder / VOCABULARY, metadata_split(header.values, small, splits=1, tensors=len(small)))
        write_whole(folder / _ORIGIN, msgspec.json.encode(files))
    except OSError as exc:
        raise DiskError(
            f"{folder}: cannot be written: {exc.strerror or exc}; make room or the folder writable"
        ) from exc


def _small_tensors(header: Header, files: dict[Path, RemoteFile], reader: HubRanges) -> Iterator[SmallTensor]:
    for name, role in tensor_roles(header).items():
        if role not in (TensorRole.OUTPUT_NORM, TensorRole.SHARED):
            continue
        tensor = header.tensors[name]
        if tensor.bytes > MAX_SMALL_BYTES:
            raise NotCutError(
                f"{tensor.path}: tensor '{name}' of {tensor.bytes} bytes is too large to go with every window", ADVICE
            )
        data = reader.read(files[tensor.path], tensor.offset, tensor.bytes)
        yield SmallTensor(name=name, type=tensor.type, shape=tensor.shape, data=data)


class _Forward:
    """A file on the hub, read from its beginning in large blocks; ``taken`` holds the bytes returned so far."""

    def __init__(self, reader: HubRanges, file: RemoteFile) -> None:
        self._reader, self._file = reader, file
        self._data = bytearray()
        self._at = 0

    @property
    def taken(self) -> memoryview:
        return memoryview(self._data)[: self._at]

    def read(self, size: int, /) -> bytes:
        """The next ``size`` bytes."""
        end = min(self._at + size, self._file.size_bytes)
        while len(self._data) < end:
            have = len(self._data)
            block = min(max(_BLOCK_BYTES, have, end - have), CHUNK_BYTES, self._file.size_bytes - have)
            self._data += self._reader.read(self._file, have, block)
        begin, self._at = self._at, end
        return bytes(self._data[begin:end])
