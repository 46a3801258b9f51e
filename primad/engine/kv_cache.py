"""Access to llama.cpp's KV cache cell by cell: cells are read by position, and restored as if they had been computed.

llama.cpp saves and restores whole sequences (``llama_state_seq_*``). Saving one costs in proportion to its length, too
much to do after every few tokens. So cells are read in place:

* **Where.** Every node of a graph that writes or reads the cache is a view of a tensor ``cache_k_l<layer>`` or
  ``cache_v_l<layer>``, which stays in place as long as its context. The evaluation callback sees the nodes anyway.
* **Which cell.** Position p of a sequence is cell p of its stream: each sequence has its own stream (or there is only
  one), tokens come in the order of their positions, only tails are forgotten, and llama.cpp continues at the first free
  cell. A small cache of sliding windows reuses its cells: there position p is in cell p modulo the number of cells,
  until a later position overwrites it.
* **Restoring** uses llama.cpp's own restore, with a state that is written here. Cells that a sliding window has passed
  are restored too, so that each is where it was: attention adds in the order of the cells (``llama/sliding_cells.py``
  explains the small cache).

The layout of a state depends on the build of llama.cpp (this is 0.3.36's): u32 magic, u32 sequence, then for each cache
(two where layers slide) u32 streams, for each stream u32 cells and, if there are any, for each i32 position, u32 1,
three more numbers where positions have several parts, i32 sequence; u32 whether values are transposed, u32 layers; each
layer's keys: i32 type, u64 bytes a cell, cells; each layer's values: the same, or, transposed, i32 type, u32 bytes an
element, u32 elements a cell, for each element all cells. A cache without values (DeepSeek's latent attention) lacks the
last part. ``KvCache`` checks whether this build agrees.
"""

from __future__ import annotations

import ctypes
import random
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from primad.engine.state_cells import StateCells
from primad.engine.tensor import Tensor
from primad.errors import EngineError
from primad.kv.cells import MAX_POSITIONS, Bytes, CellShape, LayerCells
from primad.system.allocator import without_top

with without_top("llama_cpp"):
    from llama_cpp import llama_cpp as llama

_NAME: Final = re.compile(rb"cache_([kvrs])_l(\d+)")
_MAGIC: Final = 0xAF143CD8
_PROBED: Final = 2
"""Cells of the round trip: enough that keys and values stored in the other order look different."""

PLACES: Final = np.dtype([("position", "<i4"), ("count", "<u4"), ("sequence", "<i4")])
PLACES_2D: Final = np.dtype(
    [("position", "<i4"), ("count", "<u4"), ("x", "<i4"), ("y", "<i4"), ("token", "<i4"), ("sequence", "<i4")]
)
"""For models whose positions have several parts, which are equal for text."""

Raw = NDArray[np.uint8]


class CacheTensors:
    """The tensors of a window's keys and values, as far as its graphs have shown them. ``ggml`` is libggml-base."""

    def __init__(self, ggml: ctypes.CDLL) -> None:
        self._ggml = ggml
        self.keys: dict[int, int] = {}
        self.values: dict[int, int] = {}
        self.recurrent: set[int] = set()
        """Layers with a recurrent state."""

    def note(self, node: int, name: bytes) -> None:
        """Record ``node`` of a graph, called ``name``, if it belongs to a cache."""
        if not name.startswith(b"cache_"):
            return
        tensor = Tensor.from_address(node)
        if tensor.name != name:
            return  # of a build with another struct
        place = tensor.view_source or node
        if match := _NAME.fullmatch(self._ggml.ggml_get_name(place)):
            layer = int(match[2])
            if match[1] in b"rs":
                self.recurrent.add(layer)
            else:
                (self.keys if match[1] == b"k" else self.values)[layer] = place


def bind(ggml: ctypes.CDLL) -> None:
    """Declare the calls of libggml-base that ``KvCache`` needs."""
    ggml.ggml_backend_tensor_get_2d.restype = None
    ggml.ggml_backend_tensor_get_2d.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_size_t] * 5]


@dataclass(frozen=True, slots=True)
class _Part:
    """The keys or the values of one layer: ``cell_bytes`` a cell, in elements of ``element_bytes`` (a block's bytes
    where quantised); each stream begins ``stream_bytes`` after the one before it."""

    tensor: int
    kind: int
    cells: int
    streams: int
    cell_bytes: int
    element_bytes: int
    stream_bytes: int

    @classmethod
    def of(cls, place: int) -> _Part:
        tensor = Tensor.from_address(place)
        return cls(
            place,
            tensor.type,
            cells=tensor.elements[1],
            streams=tensor.elements[2],
            cell_bytes=tensor.strides[1],
            element_bytes=tensor.strides[0],
            stream_bytes=tensor.strides[2],
        )


class KvCache:
    """The KV cache of ``context``, for a window of ``layers`` layers from ``first`` on.

    ``tensors`` are known. The last ``sharing`` layers use the cells of others: their own are empty, and so are those of
    layers that have only a state. Sliding layers have ``window_cells`` cells, or (None) as many as the others. Layers
    after the window's last have cells that are not used: zeros are restored there.

    Create it while ``sequence`` has no cells: a round trip of two made-up cells finds out how this build stores them.
    Raises ``EngineError`` if it stores them in no known way.
    """

    def __init__(
        self,
        ggml: ctypes.CDLL,
        context: Any,
        tensors: CacheTensors,
        *,
        first: int,
        layers: int,
        sharing: int,
        sequence: int,
        window_cells: int | None = None,
    ) -> None:
        self._ggml = ggml
        self._window_cells = window_cells
        self._context = context
        self._memory = llama.llama_get_memory(context)
        self._first, self._layers = first, layers
        own = tensors.keys.keys() if tensors.recurrent else set(range(layers - sharing))
        if tensors.keys.keys() != own or not tensors.values.keys() <= own:
            raise EngineError(f"llama.cpp's graph shows keys of {len(tensors.keys)} of {layers - sharing} layers")
        self._states: StateCells | None = None
        if tensors.recurrent:
            self._states = StateCells(context, tensors.recurrent, first=first, layers=layers, sequence=sequence)
        self._keys = {layer: _Part.of(place) for layer, place in tensors.keys.items()}
        self._values = {layer: _Part.of(place) for layer, place in tensors.values.items()}
        parts = (*self._keys.values(), *self._values.values())
        sizes, streams = {part.cells for part in parts} - {window_cells}, {part.streams for part in parts}
        if len(sizes) > 1 or len(streams) > 1 or not (streams or self._states):
            raise EngineError("the caches of llama.cpp's layers have different sizes")
        self._cells = sizes.pop() if sizes else MAX_POSITIONS  # where all layers slide, positions have no bound
        self._streams = streams.pop() if streams else 0
        self._caches: list[list[int]] = []
        self._transposed = False
        self._places: np.dtype[np.void] = PLACES
        if self._keys:
            self._find_layout(sequence)

    def shapes(self) -> list[CellShape]:
        """The types and sizes of each layer's cells, and of the states of layers that have one."""
        states = self._states.shapes() if self._states is not None else []
        return [*(self._shape(layer) for layer in range(self._layers)), *states]

    @property
    def _kind(self) -> int:
        """The type that layers without cells of their own report."""
        return next((part.kind for _, part in sorted(self._keys.items())), 0)

    def _shape(self, layer: int) -> CellShape:
        keys, values = self._keys.get(layer), self._values.get(layer)
        kind = keys.kind if keys is not None else self._kind
        return CellShape(
            self._first + layer,
            kind,
            values.kind if values is not None else kind,
            keys.cell_bytes if keys is not None else 0,
            values.cell_bytes if values is not None else 0,
        )

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, sequence: int, start: int, end: int) -> list[LayerCells]:
        """Return the cells at positions ``start <= p < end`` of every layer, or with ``start == end`` the state there.

        Raises ``EngineError`` where there are none.
        """
        if start == end and self._states is not None:
            llama.llama_synchronize(self._context)
            return self._states.read(sequence, end)
        first = llama.llama_memory_seq_pos_min(self._memory, sequence) if self._states is None else 0
        last = llama.llama_memory_seq_pos_max(self._memory, sequence)
        if not 0 <= first <= start < end <= last + 1 or (first and self._window_cells is None):
            raise EngineError(
                f"sequence {sequence} has no KV cells at positions {start} to {end}; it ends at {last + 1}"
            )
        llama.llama_synchronize(self._context)
        own = iter(self._read(sequence, start, end, range(self._layers)))
        return [next(own) if layer in self._keys else self._none(layer, start, end) for layer in range(self._layers)]

    def _none(self, layer: int, start: int, end: int) -> LayerCells:
        """Return the empty cells of a layer that uses another's cells, or has none."""
        kind = self._kind
        return LayerCells(
            layer=self._first + layer, start=start, end=end, key_type=kind, value_type=kind, keys=b"", values=b""
        )

    def _read(self, sequence: int, start: int, end: int, layers: Iterable[int]) -> list[LayerCells]:
        """Return the cells of those of ``layers`` that have some."""
        stream = sequence if self._streams > 1 else 0
        found = []
        for layer in filter(self._keys.__contains__, layers):
            keys, values = self._keys[layer], self._values.get(layer)
            if values is None:
                raw = np.empty(0, np.uint8)
            else:
                taken = self._columns if self._transposed else self._rows
                raw = self._taken(taken, values, stream, start, end)
            found.append(
                LayerCells(
                    layer=self._first + layer,
                    start=start,
                    end=end,
                    key_type=keys.kind,
                    value_type=values.kind if values is not None else keys.kind,
                    keys=self._taken(self._rows, keys, stream, start, end).data,
                    values=raw.data,
                )
            )
        return found

    def _taken(
        self, take: Callable[[_Part, int, int, int], Raw], part: _Part, stream: int, start: int, end: int
    ) -> Raw:
        """Read positions ``start <= p < end`` with ``take``: mostly one run of cells, which is not copied again."""
        runs = [take(part, stream, *run) for run in self._pieces(part, start, end)]
        return runs[0] if len(runs) == 1 else _joined([run.data for run in runs])

    def _pieces(self, part: _Part, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Split positions ``start <= p < end`` into runs of adjacent cells."""
        while start < end:
            cell = start % part.cells
            count = min(end - start, part.cells - cell)
            yield cell, cell + count
            start += count

    def _rows(self, part: _Part, stream: int, start: int, end: int) -> Raw:
        raw = np.empty((end - start) * part.cell_bytes, np.uint8)
        offset = stream * part.stream_bytes + start * part.cell_bytes
        self._ggml.ggml_backend_tensor_get(part.tensor, raw.ctypes.data, offset, raw.nbytes)
        return raw

    def _columns(self, part: _Part, stream: int, start: int, end: int) -> Raw:
        size, count = (end - start) * part.element_bytes, part.cell_bytes // part.element_bytes
        raw = np.empty((count, end - start, part.element_bytes), np.uint8)
        offset, stride = stream * part.stream_bytes + start * part.element_bytes, part.cells * part.element_bytes
        self._ggml.ggml_backend_tensor_get_2d(part.tensor, raw.ctypes.data, offset, size, count, stride, size)
        return np.ascontiguousarray(raw.transpose(1, 0, 2)).reshape(-1)

    # ---- restoring ---------------------------------------------------------------------------------------------------

    def restore(self, sequence: int, blocks: Sequence[Sequence[LayerCells]]) -> None:
        """Forget ``sequence``, then restore ``blocks``, contiguous from position 0, each with every layer of the
        window.

        Where layers have a state, the last of ``blocks`` is the state after the others.

        Raises ``EngineError`` for cells that are not this window's, or too many; then the sequence has none.
        """
        self._forget(sequence)
        state: Sequence[LayerCells] = []
        if self._states is not None and blocks:
            *blocks, state = blocks
        for number, block in enumerate(blocks):
            self._judge(block, blocks[number - 1][0].end if number else 0)
        if not blocks or blocks[-1][0].end > self._cells:
            raise EngineError(f"{blocks[-1][0].end if blocks else 0} KV cells do not fit a cache of {self._cells}")
        llama.llama_synchronize(self._context)
        if not self._write(sequence, blocks, state):
            raise EngineError("llama.cpp does not take KV cells that it gave; its build is unknown to primad")

    def _judge(self, block: Sequence[LayerCells], start: int) -> None:
        if [cells.layer - self._first for cells in block] != [*range(self._layers)]:
            raise EngineError(
                f"KV cells of layers {[cells.layer for cells in block]} are not those of a window of layers "
                f"{self._first} to {self._first + self._layers - 1}"
            )
        for layer, cells in enumerate(block):
            if layer not in self._keys:
                if cells != self._none(layer, start, block[0].end):
                    raise EngineError(f"layer {cells.layer} has no KV cells of its own")
                continue
            keys, values = self._keys[layer], self._values.get(layer)
            count, value_bytes = cells.end - cells.start, values.cell_bytes if values is not None else 0
            kinds = (keys.kind, values.kind if values is not None else keys.kind)
            if (cells.start, cells.end) != (start, block[0].end) or count < 1:
                raise EngineError(f"KV cells at positions {cells.start} to {cells.end} do not follow position {start}")
            if (cells.key_type, cells.value_type) != kinds or (len(cells.keys), len(cells.values)) != (
                count * keys.cell_bytes,
                count * value_bytes,
            ):
                raise EngineError(f"the KV cells of layer {cells.layer} have other types or sizes than this window's")

    def _write(self, sequence: int, blocks: Sequence[Sequence[LayerCells]], state: Sequence[LayerCells] = ()) -> bool:
        """Restore ``blocks`` and the ``state`` after them. Returns False, with no cells left, if llama.cpp refuses
        them."""
        pieces = self._pieces_of(sequence, blocks)
        if self._states is not None:
            pieces += self._states.pieces(state, blocks[-1][0].end) if state else [self._states.empty]
        whole = _joined(pieces)
        pointer = ctypes.cast(whole.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        took = llama.llama_state_seq_set_data(self._context, pointer, whole.nbytes, sequence) == whole.nbytes
        if took and self._cut(sequence, blocks[-1][0].end):
            return True
        self._forget(sequence)
        return False

    def _cut(self, sequence: int, end: int) -> bool:
        """In a small cache, forget the future position written by ``_pieces_of``: the next token is to use its cell."""
        return self._window_cells is None or bool(llama.llama_memory_seq_rm(self._memory, sequence, end, -1))

    def _forget(self, sequence: int) -> None:
        llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def _pieces_of(self, sequence: int, blocks: Sequence[Sequence[LayerCells]]) -> list[Any]:
        """Return ``blocks`` in llama.cpp's layout."""
        count = blocks[-1][0].end
        own = sequence if self._streams > 1 else 0
        pieces: list[Any] = [struct.pack("<Ii", _MAGIC, sequence)]
        for layers in self._caches:
            window = self._window_cells if layers and self._keys[layers[0]].cells == self._window_cells else None
            held = positions_of(count, window)
            positions = held.copy()
            if window is not None and count >= window:
                positions[count % window] = count
            places = places_of(positions, sequence, self._places)
            pieces.append(struct.pack(f"<{1 + own + 1}I", self._streams, *[0] * own, len(held)))
            pieces += [places.tobytes(), struct.pack("<II", self._transposed, len(layers))]
            for layer in layers:
                keys = self._keys[layer]
                pieces.append(struct.pack("<iQ", keys.kind, keys.cell_bytes))
                raw = [block[layer].keys if layer < len(block) else _zeros(block, keys) for block in blocks]
                pieces += _in_order(raw, held, count)
            for layer in layers:
                pieces += self._state_values(layer, blocks, held)
            pieces.append(bytes(4 * (self._streams - own - 1)))
        return pieces

    def _state_values(self, layer: int, blocks: Sequence[Sequence[LayerCells]], held: NDArray[np.int64]) -> list[Any]:
        values = self._values.get(layer)
        if values is None:
            return []
        taken = [block[layer].values if layer < len(block) else _zeros(block, values) for block in blocks]
        cells = _in_order(taken, held, blocks[-1][0].end)
        if not self._transposed:
            return [struct.pack("<iQ", values.kind, values.cell_bytes), *cells]
        elements = values.cell_bytes // values.element_bytes
        raw = _joined(cells).view(f"u{values.element_bytes}")
        columns = np.ascontiguousarray(raw.reshape(-1, elements).T)
        return [
            struct.pack("<iII", values.kind, values.element_bytes, elements),
            columns.view(np.uint8).reshape(-1).data,
        ]

    # ---- the layout of this build ------------------------------------------------------------------------------------

    def _find_layout(self, sequence: int) -> None:
        """Try the known layouts; llama.cpp refuses one that is not its own, and forgets it when it gets the next."""
        size, each = llama.llama_state_seq_get_size(self._context, sequence) - 8, 4 + 4 * self._streams
        size -= len(self._states.empty) if self._states is not None else 0
        if size not in (each, 2 * each):
            raise EngineError("llama.cpp's state of an empty sequence has an unknown form")
        caches = list(self._orders()) if size == 2 * each else [[sorted(self._keys)]]
        narrow = self._narrow_values()
        for values in [self._values] if narrow == self._values else [self._values, narrow]:
            self._values = values
            marks = self._marks()
            for form in product((False, True), (PLACES, PLACES_2D), caches):
                self._transposed, self._places, self._caches = form
                if self._write(sequence, [marks]):
                    self._recognise(sequence, marks)
                    return
        raise EngineError("llama.cpp takes no state in a known form")

    def _narrow_values(self) -> dict[int, _Part]:
        """Return the values with at most a key's bytes a cell: if transposed, llama.cpp allocates the largest size of
        any layer for all."""
        return {
            layer: replace(part, cell_bytes=min(part.cell_bytes, self._keys[layer].cell_bytes))
            for layer, part in self._values.items()
        }

    def _orders(self) -> Iterator[list[list[int]]]:
        """Yield the possible splits of the layers over two caches: by size of their cells, else at any layer."""
        layers = sorted(self._keys)
        sizes = [(self._keys[i].cell_bytes, self._values[i].cell_bytes if i in self._values else 0) for i in layers]
        for size in dict.fromkeys(sizes):
            yield [[i for i in layers if sizes[i] == size], [i for i in layers if sizes[i] != size]]
        for base in layers:
            yield [list(layers[:base]), list(layers[base:])]

    def _recognise(self, sequence: int, marks: list[LayerCells]) -> None:
        """Find out which layers' cells went where. Leaves the cells zero, as it found them."""
        took = {
            (bytes(cells.keys), bytes(cells.values)): cells.layer - self._first
            for cells in self._read(sequence, 0, _PROBED, sorted(self._keys))
        }
        try:
            self._caches = [
                [took[bytes(marks[layer].keys), bytes(marks[layer].values)] for layer in cache]
                for cache in self._caches
            ]
        except KeyError as exc:
            raise EngineError("llama.cpp puts KV cells in other places than its graph shows") from exc
        blank = self._marks(blank=True)
        own = [blank[layer] for layer in sorted(self._keys)]
        if not self._write(sequence, [blank]) or self._read(sequence, 0, _PROBED, sorted(self._keys)) != own:
            raise EngineError("llama.cpp does not give back the KV cells that it took")
        self._forget(sequence)

    def _marks(self, *, blank: bool = False) -> list[LayerCells]:
        """Return two cells of each layer that differ from those of every other."""
        return [
            self._mark(layer, blank=blank) if layer in self._keys else self._none(layer, 0, _PROBED)
            for layer in range(max(self._layers - 1, *self._keys) + 1)
        ]

    def _mark(self, layer: int, *, blank: bool = False) -> LayerCells:
        keys, values = self._keys[layer], self._values.get(layer)
        chance = random.Random(layer)  # NumPy's generator takes 14 ms to load
        sizes = [_PROBED * part.cell_bytes if part is not None else 0 for part in (keys, values)]
        raw = [bytes(size) if blank else chance.randbytes(size) for size in sizes]
        return LayerCells(
            layer=self._first + layer,
            start=0,
            end=_PROBED,
            key_type=keys.kind,
            value_type=values.kind if values is not None else keys.kind,
            keys=raw[0],
            values=raw[1],
        )


def positions_of(end: int, cells: int | None) -> NDArray[np.int64]:
    """Return the positions that a sequence of ``end`` tokens still has, in cell order: all, or at most ``cells``."""
    held = end if cells is None else min(end, cells)
    positions = np.arange(end - held, end)
    found = np.empty(held, np.int64)
    found[positions % max(held, 1) if cells is None else positions % cells] = positions
    return found


def places_of(positions: NDArray[np.int64], sequence: int, form: np.dtype[np.void]) -> NDArray[np.void]:
    """Return the entries of llama.cpp's state for cells at these ``positions`` of ``sequence``, in the build's
    ``form``."""
    places = np.zeros(len(positions), form)
    places["position"], places["count"], places["sequence"] = positions, 1, sequence
    if form is PLACES_2D:
        places["x"] = places["y"] = positions
    return places


def _zeros(block: Sequence[LayerCells], part: _Part) -> bytes:
    """Return zeros for a layer that no ``block`` has."""
    return bytes((block[0].end - block[0].start) * part.cell_bytes)


def _in_order(pieces: Sequence[Bytes], positions: NDArray[np.int64], end: int) -> Sequence[Bytes]:
    """Pick ``positions``, in that order, from ``pieces``, which hold the cells of all positions before ``end``."""
    if len(positions) == end and (not end or positions[0] == 0):
        return pieces
    raw = _joined(pieces)
    return [np.ascontiguousarray(raw.reshape(end, -1)[positions]).reshape(-1).data]


def _joined(pieces: Sequence[Bytes]) -> Raw:
    """Concatenate ``pieces``: hundreds of MB, for which numpy uses huge pages where available."""
    raw = np.empty(sum(map(len, pieces)), np.uint8)
    view, at = raw.data, 0
    for piece in pieces:
        view[at : at + len(piece)] = piece
        at += len(piece)
    return raw
