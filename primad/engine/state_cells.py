"""The states of recurrent layers, layer by layer: split from a sequence's state, and joined for llama.cpp.

llama.cpp returns the state of a sequence for a whole window (``llama_state_seq_get_data_ext`` with
``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``). Devices of another ring have other windows, so it is split into layers here.
These are ``LayerCells`` without positions, whose ``keys`` and ``values`` are what llama.cpp calls R and S.

The layout depends on the build, as that of cells does (``kv_cache.py``): u32 magic, u32 sequence, u32 cells (0 or 1),
and for that one cell i32 position, u32 0; u32 whether S is transposed, which it never is, u32 layers; for each layer
with a state i32 type of R, u64 bytes, R; then the same for S. In the state of a whole sequence the part from the cells
on follows the caches of attention layers.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np

from primad.engine.binding import llama
from primad.errors import EngineError
from primad.kv.cells import Bytes, CellShape, LayerCells

_PARTIAL: Final = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_HEAD: Final = struct.Struct("<Ii")
_CELL: Final = struct.Struct("<iI")
_LAYERS: Final = struct.Struct("<II")
_PART: Final = struct.Struct("<iQ")


class StateCells:
    """The states of ``recurrent`` layers of ``context``, numbered within the window of ``layers`` layers from ``first``
    on. The state of a layer after the window's last is not used: zeros are restored there.

    Create it while ``sequence`` is empty. Raises ``EngineError`` if this build returns states in another form.
    """

    def __init__(self, context: Any, recurrent: Collection[int], *, first: int, layers: int, sequence: int) -> None:
        self._context, self._first, self._layers = context, first, layers
        self._recurrent = sorted(recurrent)
        empty = self._given(sequence)
        at, count = _HEAD.size + 4 + _LAYERS.size, len(self._recurrent)
        if len(empty) != at + 2 * count * _PART.size or empty[_HEAD.size : _HEAD.size + 8] != bytes(8):
            raise EngineError(f"llama.cpp's state of {count} layers of {layers} has an unknown form")
        self.empty: Final = empty[_HEAD.size :]
        """The state's part in the data of a whole sequence that has no state."""
        parts = [_PART.unpack_from(empty, at + number * _PART.size) for number in range(2 * count)]
        self._parts = dict(zip(self._recurrent, zip(parts[:count], parts[count:], strict=True), strict=True))

    def shapes(self) -> list[CellShape]:
        """Return the types and sizes of each layer's state."""
        found = []
        for layer in range(self._layers):
            keys, values = self._parts.get(layer, ((0, 0), (0, 0)))
            found.append(CellShape(self._first + layer, keys[0], values[0], keys[1], values[1], is_state=True))
        return found

    def read(self, sequence: int, end: int) -> list[LayerCells]:
        """Return the state of ``sequence`` after ``end`` positions, for every layer. Raises ``EngineError`` if it is
        elsewhere."""
        state = self._given(sequence)
        at = _HEAD.size + 4
        size = at + _CELL.size + len(self.empty) - 4 + sum(r + s for (_, r), (_, s) in self._parts.values())
        if len(state) != size or _CELL.unpack_from(state, at) != (end - 1, 0):
            raise EngineError(f"sequence {sequence} has no state after {end} positions")
        at += _CELL.size + _LAYERS.size
        taken: list[memoryview] = []
        for _ in range(2 * len(self._recurrent)):
            _, part = _PART.unpack_from(state, at)
            at += _PART.size
            taken.append(state[at : at + part])
            at += part
        keys = dict(zip(self._recurrent, taken[: len(self._recurrent)], strict=True))
        values = dict(zip(self._recurrent, taken[len(self._recurrent) :], strict=True))
        return [
            LayerCells(
                layer=shape.layer,
                start=end,
                end=end,
                key_type=shape.key_type,
                value_type=shape.value_type,
                keys=keys.get(shape.layer - self._first, b""),
                values=values.get(shape.layer - self._first, b""),
            )
            for shape in self.shapes()
        ]

    def pieces(self, state: Sequence[LayerCells], end: int) -> list[Bytes]:
        """Return ``state`` as laid out in the state of a whole sequence of ``end`` positions.

        Raises ``EngineError`` if it belongs to another window or position.
        """
        for each, shape in zip(state, self.shapes(), strict=False):
            found = (each.layer, each.key_type, each.value_type, len(each.keys), len(each.values))
            if (each.start, each.end) != (end, end) or CellShape(*found, is_state=True) != shape:
                raise EngineError(f"the state of layer {each.layer} has another type, size or place than this window's")
        if len(state) != self._layers:
            raise EngineError(f"the state of {len(state)} layers is not that of a window of {self._layers}")
        pieces: list[Bytes] = [struct.pack("<I", 1), _CELL.pack(end - 1, 0), self.empty[4 : 4 + _LAYERS.size]]
        for part in (0, 1):
            for layer in self._recurrent:
                pieces.append(_PART.pack(*self._parts[layer][part]))
                if layer < self._layers:
                    pieces.append(state[layer].values if part else state[layer].keys)
                else:
                    pieces.append(bytes(self._parts[layer][part][1]))
        return pieces

    def _given(self, sequence: int) -> memoryview:
        size = llama.llama_state_seq_get_size_ext(self._context, sequence, _PARTIAL)
        try:
            state = np.empty(size, np.uint8)
        except MemoryError as exc:
            raise EngineError(f"there is no memory for a state of {size / 1e6:,.0f} MB") from exc
        place = ctypes.cast(state.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        if llama.llama_state_seq_get_data_ext(self._context, place, size, sequence, _PARTIAL) != size:
            raise EngineError(f"llama.cpp does not give the state of sequence {sequence}")
        return state.data
