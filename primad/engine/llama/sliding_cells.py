"""Restores the state of a small cache of sliding windows, with each position in the cell where it was.

Layers with a sliding window may have a cache little larger than the window (``EngineOptions.small_windows``), whose
cells are reused: position p is in cell p modulo their number. Attention adds in the order of the cells, so the last
bits depend on it. llama.cpp returns the cells of the window in their order, and restores them to the first free cells.

So the state that is restored here has all cells from the first on; those that the window has passed are zeros, which no
token attends to. The next token must get the cell after that of the last position. llama.cpp starts its search at the
cell that was freed last: so a future position is put there, and then forgotten with everything after the state.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from primad.engine.kv_cache import PLACES, PLACES_2D, Raw, places_of, positions_of
from primad.engine.protocol import KV_CELL_PADDING
from primad.errors import EngineError

_MAX_LAYERS: Final = 1024


def window_cells(cells: int, window: int, rows: int) -> int:
    """Return the number of cells for a ``window`` of tokens, at most the main cache's ``cells``, with ``rows`` tokens a
    step."""
    padded = -(-(window + rows) // KV_CELL_PADDING) * KV_CELL_PADDING
    return min(-(-cells // KV_CELL_PADDING) * KV_CELL_PADDING, padded)


@dataclass(frozen=True, slots=True)
class _Part:
    """The keys or values of a layer: in each line the data of all cells, after the bytes ``head``."""

    head: bytes
    data: Raw  # (lines, cells, bytes)


class _Reader:
    def __init__(self, state: Raw) -> None:
        self._state, self.at = state, 0

    def take(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(f"<{form}", self._state.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def raw(self, size: int) -> Raw:
        found = self._state[self.at : self.at + size]
        if found.nbytes != size:
            raise struct.error
        self.at += size
        return found


def placed(state: Raw, end: int, cells: int) -> Raw:
    """Rearrange ``state``, as llama.cpp returned it for a sequence of ``end`` positions, for a cache of ``cells``
    cells.

    Raises ``EngineError`` for one of an unknown form.
    """
    for places in (PLACES, PLACES_2D):
        try:
            return _placed(state, end, cells, places)
        except (struct.error, ValueError):
            continue
    raise EngineError("llama.cpp's state of a sliding window has an unknown form")


def _placed(state: Raw, end: int, cells: int, places: np.dtype[np.void]) -> Raw:
    reader = _Reader(state)
    magic, sequence, streams = reader.take("IiI")
    before = 0
    while before < streams and not (count := reader.take("I")[0]):
        before += 1
    known = reader.raw(count * places.itemsize).view(places)
    transposed, layers = reader.take("II")
    if transposed > 1 or not 0 < layers <= _MAX_LAYERS:
        raise ValueError
    parts = [_part(reader, count, transposed=False) for _ in range(layers)]
    parts += [_part(reader, count, transposed=bool(transposed)) for _ in range(layers)]
    rest = reader.raw(4 * (streams - before - 1))
    if reader.at != state.nbytes or rest.any():
        raise ValueError
    numbers = positions_of(end, cells)
    held = len(numbers)
    cell = known["position"] % cells
    if not count or known["position"].max() != end - 1 or (known["position"] < end - held).any():
        raise ValueError
    all_places = places_of(numbers, sequence, places)
    all_places[cell] = known
    if end >= cells:
        all_places["position"][end % cells] = end
    pieces = [struct.pack(f"<IiI{before + 1}I", magic, sequence, streams, *[0] * before, held)]
    pieces += [all_places.tobytes(), struct.pack("<II", transposed, layers)]
    for part in parts:
        lines = np.zeros((part.data.shape[0], held, part.data.shape[2]), np.uint8)
        lines[:, cell] = part.data
        pieces += [part.head, lines.tobytes()]
    pieces.append(rest.tobytes())
    return np.frombuffer(b"".join(pieces), np.uint8)


def _part(reader: _Reader, count: int, *, transposed: bool) -> _Part:
    begin = reader.at
    if transposed:
        _, size, lines = reader.take("iII")
    else:
        _, size = reader.take("iQ")
        lines = 1
    head = reader._state[begin : reader.at].tobytes()
    return _Part(head, reader.raw(lines * count * size).reshape(lines, count, size))
