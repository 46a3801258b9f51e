"""The KV cells of one sequence in one layer, as bytes that any device can import, and the files that hold them.

A file holds one block and a run of layers:

    8 bytes "primadKV", u32 bytes of the index, index (msgpack), blake2b of the index, then for each layer keys and values

The index has the block, and for each layer the types, the sizes and a blake2b of its bytes. A layer is read alone, and
every length is checked before memory is allocated for it. Devices send each other such files with one layer.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import BinaryIO, Final

import msgspec

from primad.errors import PrimadError
from primad.kv.keys import KEY_HEX, KvBlock

Bytes = bytes | bytearray | memoryview

MAGIC: Final = b"primadKV"
MAX_LAYERS: Final = 1024
LAYER_NUMBERS: Final = 16 * MAX_LAYERS
"""Numbers of layers, and of the shares that the ranks of a group have of them."""
MAX_POSITIONS: Final = 1 << 24
MAX_CELL_BYTES: Final = 1 << 20
"""Limit for the keys, or the values, of one cell in one layer."""
MAX_STATE_BYTES: Final = 1 << 27
"""Limit for each of the two parts of one layer's state; 3 MB in a model of 27 billion weights."""

_KEY: Final = re.compile(rf"[0-9a-f]{{{KEY_HEX}}}")
_HEAD: Final = struct.Struct("<8sI")
_DIGEST_BYTES: Final = 16
_MAX_INDEX_BYTES: Final = 64 * MAX_LAYERS
_MAX_TYPE: Final = 255


_SCALES: Final = {0: (3, 4, 0x7F), 1: (1, 2, 0x7C), 30: (1, 2, 0x7F), 2: (1, 18, 0x7C), 8: (1, 34, 0x7C)}
"""By ggml type (F32, F16, BF16, Q4_0, Q8_0): the place of the high byte of a number, or of a block's scale, the bytes
from one to the next, and the bits that are all set in values that are not finite (F32 and BF16: or nearly so)."""
_FINITE: Final = {bits: bytes(high for high in range(256) if high & bits != bits) for bits in (0x7C, 0x7F)}


class CellsError(PrimadError):
    """Bytes that are not KV cells of ours, or are damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCells:
    """Positions ``start <= p < end`` of a sequence in layer ``layer`` of the whole model, or of a share of it.

    ``keys`` and ``values`` hold one cell after the other, of ggml types ``key_type`` and ``value_type``; every cell of
    a layer takes the same number of bytes. A layer that stores only keys (DeepSeek's latent attention) has no
    ``values``; one that uses another layer's cells, or has a state instead, has neither. Without positions this is the
    state of a layer after ``end``: ``keys`` are what its convolution continues from, ``values`` the rest. The
    ``digest`` is set for cells read from a file.
    """

    layer: int
    start: int
    end: int
    key_type: int
    value_type: int
    keys: Bytes
    values: Bytes
    digest: bytes = field(default=b"", compare=False)


class CellShape(msgspec.Struct, frozen=True, array_like=True):
    """The types of a cell's keys and values in one layer, and their bytes; or those of a state."""

    layer: int
    key_type: int
    value_type: int
    key_bytes: int
    value_bytes: int
    is_state: bool = False


def layers_of_rank(rank: int, layers: range) -> range:
    """The numbers under which rank ``rank`` of a group keeps the cells of its share of ``layers``."""
    return range(rank * MAX_LAYERS + layers.start, rank * MAX_LAYERS + layers.stop)


def shape_of(cells: LayerCells) -> CellShape:
    """The shape of each of ``cells``, or of a state."""
    return _shape(
        cells.layer, cells.key_type, cells.value_type, len(cells.keys), len(cells.values), cells.end - cells.start
    )


def _shape(layer: int, key_type: int, value_type: int, key_bytes: int, value_bytes: int, count: int) -> CellShape:
    """The shape of ``count`` cells, or of a state (0), with these sizes."""
    each = max(1, count)
    return CellShape(layer, key_type, value_type, key_bytes // each, value_bytes // each, not count)


def are_numbers(cells: LayerCells) -> bool:
    """Whether ``cells`` have no NaN or infinite value, as far as their types are known."""
    for kind, data in ((cells.key_type, cells.keys), (cells.value_type, cells.values)):
        place, every, bits = _SCALES.get(kind, (0, 0, 0))
        if every and bytes(data)[place::every].translate(None, _FINITE[bits]):
            return False
    return True


class _Part(msgspec.Struct, frozen=True, array_like=True):
    layer: int
    key_type: int
    value_type: int
    key_bytes: int
    value_bytes: int
    digest: bytes


class _Listing(msgspec.Struct, frozen=True, array_like=True):
    block: KvBlock
    parts: list[_Part]


_decoder: Final = msgspec.msgpack.Decoder(_Listing)


def is_key(text: str) -> bool:
    """Whether ``text`` has the form of a block's key; then it is also a plain file name."""
    return _KEY.fullmatch(text) is not None


def is_block(block: KvBlock) -> bool:
    """Whether ``block`` has keys of the right form, and is after another block unless it is the first, which has
    positions.

    Callers that know the number of positions check where they begin and end.
    """
    is_behind = is_key(block.before) if block.start else not block.before
    return is_key(block.key) and is_behind and 0 != block.end >= block.start


def _digest(*parts: Bytes) -> bytes:
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        found.update(part)
    return found.digest()


def pack(block: KvBlock, cells: Sequence[LayerCells]) -> list[Bytes]:
    """The pieces of the file of ``block`` with ``cells``, one layer after the other."""
    assert cells
    assert all((each.start, each.end) == (block.start, block.end) for each in cells)
    assert all(each.layer == cells[0].layer + i for i, each in enumerate(cells))
    parts = [
        _Part(
            each.layer,
            each.key_type,
            each.value_type,
            len(each.keys),
            len(each.values),
            each.digest or _digest(each.keys, each.values),
        )
        for each in cells
    ]
    index = msgspec.msgpack.encode(_Listing(block, parts))
    pieces: list[Bytes] = [_HEAD.pack(MAGIC, len(index)), index, _digest(index)]
    for each in cells:
        pieces += [each.keys, each.values]
    return pieces


class CellsFile:
    """The contents of the open ``file`` of ``size`` bytes. Raises ``CellsError`` unless its index is complete and
    fits."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        magic, length = _HEAD.unpack(_read(file, _HEAD.size))
        if magic != MAGIC or length > min(_MAX_INDEX_BYTES, size):
            raise CellsError("not a file of KV cells")
        index, digest = _read(file, length), _read(file, _DIGEST_BYTES)
        if _digest(index) != digest:
            raise CellsError("the index of a file of KV cells is damaged")
        try:
            listing = _decoder.decode(index)
        except msgspec.DecodeError as exc:
            raise CellsError(f"the index of a file of KV cells cannot be read: {exc}") from exc
        self.block: Final = listing.block
        _judge(listing)
        self._places: dict[int, tuple[int, int, _Part]] = {}
        place = _HEAD.size + length + _DIGEST_BYTES
        for part in listing.parts:
            begin, place = place, place + part.key_bytes + part.value_bytes
            self._places[part.layer] = begin, place, part
        if place != size:
            raise CellsError(f"a file of KV cells has {size} bytes where its index says {place}")

    @property
    def layers(self) -> range:
        """The layers whose cells the file has."""
        return range(min(self._places), max(self._places) + 1)

    def shapes(self) -> list[CellShape]:
        """The shape of the cells of each layer."""
        count = self.block.end - self.block.start
        return [
            _shape(part.layer, part.key_type, part.value_type, part.key_bytes, part.value_bytes, count)
            for _, _, part in self._places.values()
        ]

    def read(self, layers: range) -> list[LayerCells]:
        """The cells of ``layers``, a part of those in the file. Raises ``CellsError`` when some are damaged."""
        found = [self._places[layer] for layer in layers]
        base = found[0][0]
        self._file.seek(base)
        data = memoryview(_read(self._file, found[-1][1] - base))
        return [self._judged(part, data[begin - base : end - base]) for begin, end, part in found]

    def _judged(self, part: _Part, data: memoryview) -> LayerCells:
        if _digest(data) != part.digest:
            raise CellsError(f"the KV cells of layer {part.layer} are damaged")
        return LayerCells(
            layer=part.layer,
            start=self.block.start,
            end=self.block.end,
            key_type=part.key_type,
            value_type=part.value_type,
            keys=data[: part.key_bytes],
            values=data[part.key_bytes :],
            digest=part.digest,
        )


def unpack(data: Bytes) -> tuple[KvBlock, list[LayerCells]]:
    """Return the arguments of ``pack``. Raises ``CellsError``."""
    file = CellsFile(BytesIO(data), len(data))
    return file.block, file.read(file.layers)


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise CellsError("a file of KV cells is cut short")
    return data


def _judge(listing: _Listing) -> None:
    block, parts = listing.block, listing.parts
    if not is_block(block) or block.start < 0 or block.end > MAX_POSITIONS:
        raise CellsError(f"an invalid block of KV cells, at positions {block.start} to {block.end}")
    if not parts or parts[0].layer < 0 or parts[-1].layer >= LAYER_NUMBERS:
        raise CellsError("a file of KV cells has no layers, or layers that no model has")
    if any(part.layer != parts[0].layer + i for i, part in enumerate(parts)):
        raise CellsError("the layers of a file of KV cells do not follow each other")
    cells = block.end - block.start
    for part in parts:
        if not (0 <= part.key_type <= _MAX_TYPE and 0 <= part.value_type <= _MAX_TYPE):
            raise CellsError(f"the KV cells of layer {part.layer} have an invalid type")
        for size in (part.key_bytes, part.value_bytes):
            maximum = MAX_STATE_BYTES if block.is_state else cells * MAX_CELL_BYTES
            if size % max(1, cells) or not 0 <= size <= maximum:
                raise CellsError(f"{cells} KV cells of layer {part.layer} cannot take {size} bytes")
        if part.value_bytes and not part.key_bytes:
            raise CellsError(f"the KV cells of layer {part.layer} have no keys")
