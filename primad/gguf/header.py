"""Read the header of a GGUF without trusting a byte of it.

Every length, count, type and offset is checked against the file before memory is taken or a tensor is believed, because
llama.cpp and the ``gguf`` package's own reader assume a well-formed file. Values are kept as the raw bytes of the file and
decoded on demand: cutting a window copies most of them verbatim and need not decode a vocabulary of 256 k tokens.

Types, block sizes and value types come from the ``gguf`` package. Format: GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import math
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

from primad.errors import ModelError, UnreadableError
from primad.gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

if TYPE_CHECKING:
    from primad.gguf.architecture import Architecture

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
MAX_KEY_BYTES: Final = 65_535
MAX_NAME_BYTES: Final = 63
MAX_TEXT_CHARS: Final = 1024
MAX_DIMENSIONS: Final = 4
MAX_KEYS: Final = 1 << 14
MAX_TENSORS: Final = 1 << 17
MAX_ITEMS: Final = 1 << 22
"""Maximum length of an array; the largest vocabularies and merge lists have some 500,000 items."""
MAX_HEADER_BYTES: Final = 1 << 28
"""Metadata and tensor infos together; those of real models take 30 MB at most."""
MAX_FLOAT32: Final = (2 - 2.0**-23) * 2.0**127
"""llama.cpp computes in single precision."""
_SMALLEST_VALUE_BYTES: Final = 8 + 4 + 1
_SMALLEST_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8

_SCALARS: Final[dict[GGUFValueType, str]] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class Value:
    """One metadata value: its type and the raw little-endian bytes as they stand in the file."""

    type: GGUFValueType
    raw: bytes

    @property
    def is_array(self) -> bool:
        """Whether this is an array."""
        return self.type == GGUFValueType.ARRAY

    @property
    def item_type(self) -> GGUFValueType:
        """Type of the items of an array, or of the value itself."""
        return GGUFValueType(struct.unpack_from("<I", self.raw)[0]) if self.is_array else self.type

    def __len__(self) -> int:
        """Number of items of an array; 1 for a scalar."""
        return int(struct.unpack_from("<Q", self.raw, 4)[0]) if self.is_array else 1

    def scalar(self) -> Scalar:
        """The decoded scalar. Arrays are a mistake of the caller."""
        assert not self.is_array
        if self.type == GGUFValueType.STRING:
            return self.raw[8:].decode("utf-8", errors="replace")
        return struct.unpack(_SCALARS[self.type], self.raw)[0]  # type: ignore[no-any-return]

    def item(self, index: int) -> Scalar:
        """An item of an array of numbers or booleans; the others are not looked at."""
        kind = _SCALARS[self.item_type]
        return struct.unpack_from(kind, self.raw, 12 + index * struct.calcsize(kind))[0]  # type: ignore[no-any-return]

    def items(self) -> list[Scalar]:
        """The decoded items of an array."""
        assert self.is_array
        if self.item_type == GGUFValueType.STRING:
            texts: list[Scalar] = []
            at = 12
            for _ in range(len(self)):
                size = int.from_bytes(self.raw[at : at + 8], "little")
                texts.append(self.raw[at + 8 : at + 8 + size].decode("utf-8", errors="replace"))
                at += 8 + size
            return texts
        return [item for (item,) in struct.iter_unpack(_SCALARS[self.item_type], memoryview(self.raw)[12:])]


def single(number: float) -> float:
    """``number``, at most ``MAX_FLOAT32``, rounded to single precision."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def scalar_value(kind: GGUFValueType, content: Scalar) -> Value:
    """A scalar ``Value`` of ``kind``."""
    return Value(GGUFValueType.STRING if isinstance(content, str) else kind, _packed(kind, content))


def array_value(kind: GGUFValueType, contents: Sequence[Scalar]) -> Value:
    """An array ``Value`` of texts, numbers or booleans, all of ``kind``."""
    body = b"".join(_packed(kind, item) for item in contents)
    return Value(GGUFValueType.ARRAY, struct.pack("<IQ", kind, len(contents)) + body)


def _packed(kind: GGUFValueType, content: Scalar) -> bytes:
    if isinstance(content, str):
        text = content.encode()
        return struct.pack("<Q", len(text)) + text
    return struct.pack(_SCALARS[kind], content)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a file: ``shape`` in ggml order (row length first), ``offset`` in bytes from the start of the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    bytes: int
    path: Path

    def runs(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Where in the file the ``size`` bytes from ``start`` are: for each run its distance from ``start``, its offset
        in the file and its size."""
        yield 0, self.offset + start, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of one GGUF file, checked against the file's size."""

    path: Path
    values: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    data_offset: int
    derived: Architecture | None = None
    """The derived entry of an architecture that is not in the table; it never comes from the file."""

    def text(self, key: str, default: str | None = None) -> str:
        """The string at ``key``, a name: templates are read elsewhere.

        Raises ``ModelError`` when it is missing (and no default is given), not a string, or too long to be shown.
        """
        if key not in self.values and default is not None:
            return default
        value = self._value(key)
        if value.type != GGUFValueType.STRING:
            raise ModelError(f"{self.path}: metadata key '{key}' is {value.type.name}, not a string")
        text = str(value.scalar())
        if len(text) > MAX_TEXT_CHARS:
            raise ModelError(
                f"{self.path}: metadata key '{key}' has {len(text)} characters; expected at most {MAX_TEXT_CHARS}; "
                "fetch the file again"
            )
        return text

    @property
    def name(self) -> str:
        """The model's name in one line: more lines could pass for primad's own output. Raises ``ModelError`` as
        ``text``."""
        return " ".join((self.text("general.name", "").strip() or self.path.stem).split())

    def number(self, key: str, default: float | None = None) -> float:
        """The number at ``key``. Raises ``ModelError`` when it is missing (and no default is given) or not a number."""
        if key not in self.values and default is not None:
            return default
        value = self._value(key)
        if value.type not in _SCALARS:
            raise ModelError(f"{self.path}: metadata key '{key}' is {value.type.name}, not a number")
        number = value.scalar()
        assert not isinstance(number, str)
        if not abs(number) <= MAX_FLOAT32:
            raise ModelError(f"{self.path}: metadata key '{key}' is {number}, not a finite number of single precision")
        return number

    def count(self, key: str, default: int | None = None, *, maximum: int = 1 << 31) -> int:
        """The non-negative integer at ``key``, at most ``maximum``. Raises ``ModelError`` otherwise."""
        number = self.number(key, default)
        if number != int(number) or not 0 <= number <= maximum:
            raise ModelError(f"{self.path}: metadata key '{key}' is {number}; expected a whole number up to {maximum}")
        return int(number)

    def _value(self, key: str) -> Value:
        if key not in self.values:
            raise ModelError(f"{self.path}: metadata key '{key}' is missing; the file is not a complete model")
        return self.values[key]


_PAGE: Final = "it may be a web page: fetch the file itself, signed in where that is asked for"
_INSTEAD: Final = {
    b"<!DO": _PAGE,
    b"<!do": _PAGE,
    b"<htm": _PAGE,
    b"vers": "it may be a pointer of Git LFS: 'git lfs pull' fetches the file",
}
"""Other content that a download may have produced, by its first bytes."""
_OTHER: Final = "give a model in GGUF format"
_LENGTH: Final = struct.Struct("<Q")


class ReadsForward(Protocol):
    """A file from which the next bytes are read."""

    def read(self, size: int, /) -> bytes:
        """The next ``size`` bytes, or fewer at the end."""


class _Cursor:
    """Reads forward through a file of known size; a length that does not fit is one ``ModelError``."""

    def __init__(self, file: ReadsForward, path: Path, size: int) -> None:
        self.file, self.path, self.size, self.at = file, path, size, 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise ModelError(
                f"{self.path}: cut short or damaged: {what} needs {count} bytes at offset {self.at}, "
                f"the file has {self.size} in all; fetch the file again"
            )
        if count > MAX_HEADER_BYTES - self.at:
            raise ModelError(f"{self.path}: damaged header: {what} makes it larger than {MAX_HEADER_BYTES} bytes")
        data = self.file.read(count)
        if len(data) != count:
            raise ModelError(f"{self.path}: became shorter while it was read; fetch the file again")
        self.at += count
        return data

    def uint32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def uint64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def text(self, what: str, maximum: int) -> str:
        size = self.uint64(what)
        if size > maximum:
            raise ModelError(f"{self.path}: {what} of {size} bytes at offset {self.at}; at most {maximum} are allowed")
        try:
            text = self.take(size, what).decode()
        except UnicodeDecodeError as exc:
            raise ModelError(f"{self.path}: damaged header: {what} at offset {self.at - size} is not text") from exc
        if not text.isprintable():
            raise ModelError(f"{self.path}: damaged header: {what} at offset {self.at - size} is not printable text")
        return text


def read_header(path: Path, *, header_only: bool = False) -> Header:
    """Read the header of the GGUF file at ``path``; with ``header_only`` the weights after it may be missing (a cut
    file).

    Raises ``ModelError`` with the file, what is wrong and what to do, for everything that is not a complete,
    little-endian GGUF of version 2 or 3 whose tensors all lie inside the file.
    """
    with _opened(path) as (file, size):
        return read_header_of(file, path, size, header_only=header_only)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open the file at ``path``, which must not be a pipe or device; yield it and its size. Raises ``ModelError``."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ModelError(f"{path}: is {kind}; give the .gguf file itself")
        if not status.st_size:
            raise ModelError(f"{path}: is empty; fetch the file again")
        with path.open("rb") as file:
            yield file, status.st_size
    except FileNotFoundError as exc:
        linked = ", but a link to none" if path.is_symlink() else ""
        raise ModelError(f"{path}: no such file{linked}; check the path") from exc
    except OSError as exc:
        raise UnreadableError(str(path), exc.strerror or exc) from exc


def read_header_of(file: ReadsForward, path: Path, size: int, *, header_only: bool = False) -> Header:
    """As ``read_header`` for an open file of ``size`` bytes at its beginning; nothing after the header is read."""
    return _read(_Cursor(file, path, size), header_only=header_only)


class _BeginningEnds(Exception):  # noqa: N818
    """More bytes are needed than were read."""


class _Beginning:
    """The first bytes of a file, as a file."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, size: int, /) -> bytes:
        self._at += size
        if self._at > len(self._data):
            raise _BeginningEnds
        return self._data[self._at - size : self._at]


def read_beginning(path: Path, max_bytes: int) -> Header:
    """The header of ``path`` without tensors, with the metadata found in its first ``max_bytes``; the rest is not read.

    Opens no pipe or device. Raises ``ModelError`` for what can be seen to be wrong there, as ``read_header``, and for a
    file that has no tensors and is not the first part of a split model.
    """
    with _opened(path) as (file, size):
        cursor = _Cursor(_Beginning(file.read(max_bytes)), path, size)
    values: dict[str, Value] = {}
    tensor_count, value_count = _counts(cursor)
    try:
        for _ in range(value_count):
            key = cursor.text("a metadata key", MAX_KEY_BYTES)
            values[key] = _read_value(cursor, key)
    except _BeginningEnds:
        pass  # the vocabulary, most often
    if not tensor_count and "split.count" not in values:
        raise ModelError(f"{path}: holds no tensors; give a complete model file")
    return Header(path=path, values=values, tensors={}, data_offset=0)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of tensors and of metadata keys, which follow the magic number and the version."""
    path = cursor.path
    if cursor.size < 4 or (magic := cursor.take(4, "the magic number")) != MAGIC:
        shown = magic if cursor.size >= 4 else cursor.take(cursor.size, "the magic number")
        raise ModelError(f"{path}: is not a GGUF file (it begins with {shown!r}); {_INSTEAD.get(shown, _OTHER)}")
    version = cursor.uint32("the version")
    if version & 0xFFFF == 0 and version:
        raise ModelError(f"{path}: is a big-endian GGUF; convert it to little-endian (gguf-convert-endian)")
    if version not in (2, 3):
        raise ModelError(f"{path}: is GGUF version {version}; versions 2 and 3 are supported; convert the model again")
    tensor_count = cursor.uint64("the tensor count")
    value_count = cursor.uint64("the metadata count")
    for count, smallest, maximum, what in (
        (tensor_count, _SMALLEST_TENSOR_BYTES, MAX_TENSORS, "tensors"),
        (value_count, _SMALLEST_VALUE_BYTES, MAX_KEYS, "metadata keys"),
    ):
        if count > min(cursor.size // smallest, maximum):
            raise ModelError(f"{path}: damaged header: {count} {what} in a file of {cursor.size} bytes; fetch it again")
    return tensor_count, value_count


def _read(cursor: _Cursor, *, header_only: bool) -> Header:
    path = cursor.path
    tensor_count, value_count = _counts(cursor)
    values: dict[str, Value] = {}
    for _ in range(value_count):
        key = cursor.text("a metadata key", MAX_KEY_BYTES)
        if key in values:
            raise ModelError(f"{path}: damaged header: metadata key '{key}' occurs twice; fetch the file again")
        values[key] = _read_value(cursor, key)
    alignment = _alignment(path, values)
    infos = [_read_tensor(cursor) for _ in range(tensor_count)]
    data_offset = -(-cursor.at // alignment) * alignment
    end = None if header_only else cursor.size
    tensors: dict[str, TensorInfo] = {}
    for name, kind, shape, offset in infos:
        if name in tensors:
            raise ModelError(f"{path}: damaged header: tensor '{name}' occurs twice; fetch the file again")
        tensors[name] = _place(path, name, kind, shape, data_offset, offset, alignment, end)
    return Header(
        path=path,
        values=values,
        tensors=tensors,
        data_offset=data_offset,
    )


def _read_value(cursor: _Cursor, key: str) -> Value:
    what = f"metadata key '{key}'"
    kind = _value_type(cursor, what)
    if kind in _SCALARS:
        return Value(kind, cursor.take(struct.calcsize(_SCALARS[kind]), what))
    if kind == GGUFValueType.STRING:
        size = cursor.uint64(what)
        return Value(kind, size.to_bytes(8, "little") + cursor.take(size, what))
    item = _value_type(cursor, what)
    count = cursor.uint64(what)
    head = struct.pack("<IQ", item, count)
    if item in _SCALARS:
        body_bytes = count * struct.calcsize(_SCALARS[item])
        if count > MAX_ITEMS and body_bytes <= min(cursor.size, MAX_HEADER_BYTES) - cursor.at:
            raise ModelError(f"{cursor.path}: damaged header: {what} has {count} items; at most {MAX_ITEMS} can be")
        return Value(kind, head + cursor.take(body_bytes, what))
    if item != GGUFValueType.STRING:
        raise ModelError(f"{cursor.path}: {what} is an array of arrays, which no model uses; the file is damaged")
    left = cursor.size - cursor.at
    if count > min(left // 8, MAX_ITEMS):
        raise ModelError(
            f"{cursor.path}: cut short or damaged: {what} has {count} strings, {left} bytes are left of the file; "
            "fetch the file again"
        )
    return Value(kind, _take_texts(cursor, head, count, what))


def _take_texts(cursor: _Cursor, head: bytes, count: int, what: str) -> bytes:
    """``head`` followed by ``count`` texts, each with at least the 8 bytes of its length, in few reads."""
    data, at = bytearray(head), len(head)
    while count:
        data += cursor.take(at + 8 * count - len(data), what)
        last = len(data) - 8
        while count and at <= last:
            at += 8 + _LENGTH.unpack_from(data, at)[0]
            count -= 1
    return bytes(data + cursor.take(at - len(data), what))


def _value_type(cursor: _Cursor, what: str) -> GGUFValueType:
    number = cursor.uint32(what)
    try:
        return GGUFValueType(number)
    except ValueError as exc:
        raise ModelError(f"{cursor.path}: damaged header: {what} has the unknown type {number}") from exc


def _alignment(path: Path, values: Mapping[str, Value]) -> int:
    value = values.get("general.alignment")
    if value is None:
        return DEFAULT_ALIGNMENT
    alignment = value.scalar() if value.type == GGUFValueType.UINT32 else None
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ModelError(f"{path}: damaged header: general.alignment is {alignment}; a power of two is expected")
    return alignment


def _read_tensor(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.text("a tensor name", MAX_NAME_BYTES)
    dimensions = cursor.uint32(f"tensor '{name}'")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ModelError(f"{cursor.path}: damaged header: tensor '{name}' has {dimensions} dimensions")
    shape = tuple(cursor.uint64(f"tensor '{name}'") for _ in range(dimensions))
    number = cursor.uint32(f"tensor '{name}'")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as exc:
        raise ModelError(
            f"{cursor.path}: tensor '{name}' has the unknown type {number}; quantise the model to a current type"
        ) from exc
    return name, kind, shape, cursor.uint64(f"tensor '{name}'")


def _place(
    path: Path,
    name: str,
    kind: GGMLQuantizationType,
    shape: tuple[int, ...],
    data_offset: int,
    offset: int,
    alignment: int,
    file_bytes: int | None,
) -> TensorInfo:
    """One tensor and its place in the file; ``file_bytes`` is None if the weights may be missing."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    elements = math.prod(shape)
    if elements == 0 or elements > 1 << 48 or shape[0] % block:
        raise ModelError(f"{path}: damaged header: tensor '{name}' has shape {shape}, impossible for {kind.name}")
    size = elements // block * block_bytes
    if offset % alignment:
        raise ModelError(f"{path}: damaged header: tensor '{name}' at offset {offset}, not a multiple of {alignment}")
    if file_bytes is not None and data_offset + offset + size > file_bytes:
        raise ModelError(
            f"{path}: cut short or damaged: tensor '{name}' ends at byte {data_offset + offset + size}, "
            f"the file has {file_bytes}; fetch the file again"
        )
    return TensorInfo(name=name, type=kind, shape=shape, offset=data_offset + offset, bytes=size, path=path)
