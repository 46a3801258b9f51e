"""ggml's calls that llama_cpp does not bind, and the evaluation callback that copies hidden states out of the graph."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from primad.engine.binding import llama
from primad.engine.kv_cache import CacheTensors
from primad.engine.kv_cache import bind as bind_cache
from primad.engine.layer_inputs import BEHIND, SCALED, SELECTED, LayerInputs
from primad.engine.llama.sums import Sums
from primad.engine.protocol import GroupExchange, Hidden
from primad.engine.quiet import bind as bind_quiet
from primad.engine.quiet import leave_out
from primad.engine.streaming.prefetch import WindowStream
from primad.engine.streaming.residency import Residency
from primad.engine.streaming.scratch import LARGE_ROWS, Scratch
from primad.engine.streaming.scratch import bind as bind_scratch
from primad.engine.tensor import Tensor
from primad.errors import EngineError
from primad.gguf.architecture import Architecture
from primad.gguf.architectures.table import SUPPORTED

_ENTRIES: Final = frozenset(
    (b"embd", b"attn_norm_in-0", SCALED, b"inp_embd_scaled", b"model.input_embed", b"model.embed_tokens")
)
"""Names of the first hidden state in llama.cpp's graphs: the rows of the embedding, plain or scaled."""


_OP_OFFSET: Final = Tensor.op.offset
EMPTY: Final[Mapping[int, Hidden]] = {}
_TURNED_BY: Final = b"inp_pos"
"""The graph's name of the positions that rotate keys and queries; the name of a GPU's copy contains it."""
_POSITIONS: Final = b"pos_embd"
"""The graph's name of the rows of a position embedding."""


def _ggml() -> ctypes.CDLL:
    """libggml-base, which holds the tensor calls that llama_cpp does not bind."""
    folder = Path(llama.__file__).parent / "lib"
    names = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll", "libggml-base.dll")
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        raise EngineError(f"llama-cpp-python at {folder} has no ggml-base library; install a stock llama-cpp-python")
    library = ctypes.CDLL(str(path))
    library.ggml_get_name.restype = ctypes.c_char_p
    library.ggml_get_name.argtypes = [ctypes.c_void_p]
    library.ggml_nbytes.restype = ctypes.c_size_t
    library.ggml_nbytes.argtypes = [ctypes.c_void_p]
    library.ggml_backend_tensor_get.restype = None
    library.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    library.ggml_backend_tensor_set.restype = None
    library.ggml_backend_tensor_set.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    library.ggml_nelements.restype = ctypes.c_int64
    library.ggml_nelements.argtypes = [ctypes.c_void_p]
    library.ggml_nrows.restype = ctypes.c_int64
    library.ggml_nrows.argtypes = [ctypes.c_void_p]
    library.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    library.ggml_backend_cpu_buffer_type.argtypes = []
    library.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
    library.ggml_get_type_traits.argtypes = [ctypes.c_int]
    bind_scratch(library)
    bind_cache(library)
    bind_quiet(library)
    return library


class _TypeTraits(ctypes.Structure):
    """The leading fields of ``struct ggml_type_traits`` (ggml.h)."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("block_interleave", ctypes.c_int64),
        ("type_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    )


EVAL_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
"""The callback's true prototype has two more parameters; in the C calling convention a callee may ignore them."""


ggml_base: Final = _ggml()


def node_name(node: int) -> bytes:
    """Return llama.cpp's name of a graph node, as the evaluation callback gets it."""
    name: bytes = ggml_base.ggml_get_name(node)
    return name


class Tap(dict[int, bool]):
    """The evaluation callback of one window: finds the output of layer ``last``, copies it and stops the graph there.

    Keys are addresses of graph nodes that are not wanted. llama.cpp rebuilds its graph when its shape changes, so an
    address may come to mean another node; ``forward`` then sees that nothing was taken, calls ``clear`` and repeats the
    step. The callback also reports the outputs of layers after which a streamed unit begins or ends. One that is missed
    for the same reason costs only page faults; so the keys are cleared whenever the number of tokens changes.
    """

    def __init__(self, last: int | None) -> None:
        super().__init__()
        self._last = last
        self._asked = False
        self._hidden: Hidden | None = None
        self._cuts = False
        self._end: int | None = None
        self._feed: Hidden | None = None
        self._inputs: LayerInputs | None = None
        self._deeper: dict[bytes, Hidden] = {}
        self._rope: NDArray[np.int32] | None = None
        self._is_turned = self._only_turns = False
        self._turning_nothing: set[int] = set()
        """Kinds of nodes (ops) whose first seen node does not apply RoPE."""
        self._scaled: int | None = None
        self._awaited: set[bytes] = set()
        self._cut_points: dict[bytes, int] = {}
        self._routers: dict[bytes, tuple[int, int]] = {}
        self._residency: Residency | None = None
        self._rows = 0
        self._scratch = Scratch(ggml_base)
        self.cache = CacheTensors(ggml_base)
        self.looks = False
        """Whether the graph is only inspected: nothing is taken, fed or reported."""
        self.shares_scratch = False
        self.stream: WindowStream | None = None
        self.sums: Sums | None = None
        self.error: EngineError | None = None
        self.find(SUPPORTED["llama"], 0, 0)

    def find(self, architecture: Architecture, layers: int, width: int, *, is_whole: bool = False) -> None:
        """Set the graph's ``architecture``, and its ``layers`` of this ``width``; ``is_whole`` for the whole model."""
        self._architecture, self._layers, self._width = architecture, layers, width
        self._row = np.empty((1, width), np.float32)
        self._row_at = self._row.ctypes.data
        self._positions = _POSITIONS if architecture.adds_positions and not is_whole else None
        last = self._last
        self._wanted = None if last is None else architecture.exit_of(last, is_last=True).encode()
        self._entries = frozenset(entry.encode() for entry in architecture.entries)

    def _exit_of(self, layer: int) -> bytes:
        return self._architecture.exit_of(layer, is_last=layer == self._layers - 1).encode()

    def begin(
        self,
        rows: int,
        feed: Hidden | None,
        inputs: LayerInputs | None,
        rope: NDArray[np.int32] | None = None,
        deeper: Mapping[int, Hidden] = EMPTY,
    ) -> None:
        """Prepare a step of ``rows`` tokens: ``feed`` are their hidden states unless the batch has them, ``inputs``
        their per-layer inputs. Keys are rotated by ``rope`` (parts, rows), or by the batch's positions. ``deeper`` is
        added to the outputs of layers, by number.

        Raises ``EngineError`` when the first unit cannot be read.
        """
        before, self._rows = self._rows, rows
        self._feed, self._inputs, self._scaled = feed, inputs, None
        self._rope, self._is_turned = rope, False
        is_given = feed is not None or inputs is not None or deeper
        self._only_turns = rope is not None and not is_given and self._last is None and bool(self.cache.keys)
        self._deeper = {self._exit_of(layer): part for layer, part in deeper.items()}
        self._awaited = set() if feed is None else {b""} if inputs is None else {b"", SELECTED, BEHIND}
        if self._scratch.begin(rows) or is_given or rope is not None:
            self.clear()
        self._only_turns = self._only_turns and not self._scratch.is_full and self.stream is None
        if self.stream is None:
            return
        if rows > LARGE_ROWS:
            self.stream.streamer.prepare()
        elif before > LARGE_ROWS:
            self.stream.streamer.resolve()
        if self._residency is not self.stream.streamer.residency or before != rows:
            self._residency = self.stream.streamer.residency
            self._cut_points = {self._exit_of(layer): unit for layer, unit in self.stream.unit_ends().items()}
            self._routers = {f"ffn_moe_topk-{layer}".encode(): each for layer, each in self.stream.routers.items()}
            self.clear()
        self.stream.arrive()

    def share(self, exchange: GroupExchange | None) -> None:
        """Sum the parts of a share of layers with the other ranks' by ``exchange``. None: the window is whole."""
        self.sums = None if exchange is None else Sums(ggml_base, exchange, last=self._last, prove=self._prove)

    def _prove(self) -> None:
        if self.stream is not None:
            self.stream.prove()

    def begin_sums(self, shape: Hashable) -> None:
        """Prepare the sums of a step of this ``shape``; after another shape the graph is a new one."""
        if self.sums is not None:
            self.sums.begin(shape)
            if not self.sums.is_known:
                self.clear()

    @property
    def must_see(self) -> bool:
        """Whether the step that begins, or just ended, needs the callback before the graph's end."""
        is_given = self._feed is not None or self._rope is not None or bool(self._deeper)
        return bool(self._cut_points or self._routers or self.sums) or is_given or self._scratch.is_full

    def cut(self) -> None:
        """Remove the nodes after the output of ``last`` from the next step's graph."""
        self.clear()  # else nodes there may go unnoticed
        self._cuts = True

    @property
    def has_cut(self) -> bool:
        """Whether the last graph now ends with the output of ``last``. Reading it resets it."""
        was_cut, self._cuts = self._cuts and self._end is not None, False
        return was_cut

    def check(self) -> None:
        """Raise the ``EngineError`` of a unit that could not be read, or the error of an exchange."""
        error, self.error = self.error, None
        if error is not None:
            raise error
        if self.sums is not None:
            self.sums.check()

    def end(self) -> None:
        """Finish a step. Raises ``EngineError`` when a weight file is no longer the model's."""
        self._feed = None
        if self.sums is not None:
            self.sums.end()
        if self._awaited:
            raise EngineError("llama.cpp computed a window without its hidden states; its build is unknown to primad")
        if self._deeper:
            raise EngineError("llama.cpp computed a window without what its layers add; its build is unknown to primad")
        if self._rope is not None and not self._is_turned and self.cache.keys:
            raise EngineError(
                "llama.cpp computed a window without an image's positions; its build is unknown to primad"
            )
        if self.stream is not None and not self.stream.depart():
            self.clear()  # a router was at an address that had been another node's

    @property
    def is_scratch_full(self) -> bool:
        """Whether to free scratch memory: the next step is not large, or belongs to another window."""
        return self._scratch.is_full and (self._rows <= LARGE_ROWS or self.shares_scratch)

    def give_back(self) -> None:
        """Free the scratch memory of the last step, whose values are no longer needed."""
        if self._scratch.give_back() and self.stream is not None:
            self.stream.streamer.spare(self._scratch.size)

    def take(self) -> Hidden | None:
        """Return the last computation's output, once; None when the wanted tensor was not seen."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def read(self) -> Hidden | None:
        """Return the last computation's output at the end of a graph that was cut."""
        if self._end is not None:
            self._copy(self._end)
        return self.take()

    def __missing__(self, node: int) -> bool:
        if (
            self._only_turns
            and not self.looks
            and ctypes.c_int32.from_address(node + _OP_OFFSET).value in self._turning_nothing
        ):
            return False  # after a picture, each token of a whole model brings hundreds of nodes here
        self._scratch.note(node)
        name = ggml_base.ggml_get_name(node)
        self.cache.note(node, name)
        if name == self._positions:
            self._zero_positions(node)
            return False
        if self.looks:
            return False
        if self._rope is not None:
            self._turn(node, name, self._rope)
        if self._cuts and self._end is not None:
            if not leave_out(node, name):
                self._end = None
            return False
        if self.sums is not None and not self._asked:
            if self.sums.waits:
                return self.sums.computed(node)
            if self.sums.wants(node):
                return True
        border, router = self._cut_points.get(name), self._routers.get(name)
        is_entry = self._feed is not None and name in (self._entries or _ENTRIES)
        is_beside = self._inputs is not None and name in (SELECTED, BEHIND)
        is_passed = border is None and router is None and name not in self._deeper
        if name != self._wanted and is_passed and not is_entry and not is_beside:
            if self.sums is None or self.sums.is_known:
                self[node] = False
            return False
        if not self._asked:
            self._asked = True
            return True
        self._asked = False
        if is_entry:
            self._scaled = node if name == SCALED else self._scaled
            return self._enter(node, self._feed, b"")
        if is_beside:
            return self._enter_beside(node, name)
        if router is not None:
            return self._pick(node, *router)
        if (part := self._deeper.pop(name, None)) is not None:
            self._copy(node)
            assert self._hidden is not None
            self._hidden += part
            ggml_base.ggml_backend_tensor_set(node, self._hidden.ctypes.data, 0, self._hidden.nbytes)
        if border is not None:
            return self._cross(border)
        if name != self._wanted:
            self._hidden = None
            return True
        self._copy(node)
        self._end = node if self._cuts else None
        return self._cuts

    def _enter(self, node: int, feed: Hidden | None, what: bytes) -> bool:
        assert feed is not None
        if ggml_base.ggml_nbytes(node) != feed.nbytes:
            return False  # of an unexpected shape: ``end`` raises
        ggml_base.ggml_backend_tensor_set(node, feed.ctypes.data, 0, feed.nbytes)
        self._awaited.discard(what)
        return True

    def _enter_beside(self, node: int, name: bytes) -> bool:
        assert self._inputs is not None
        if name == SELECTED:
            return self._enter(node, self._inputs.selected, name)
        return self._scaled is not None and self._enter(self._scaled, self._inputs.embedding, name)

    def _turn(self, node: int, name: bytes, rope: NDArray[np.int32]) -> None:
        """Have ``node``, if it applies RoPE, use ``rope``. When the callback asks about it, it is not computed yet, and
        only such nodes read the positions: cells and the attention mask use those of the batch.
        """
        op = ctypes.c_int32.from_address(node + _OP_OFFSET).value
        if op in self._turning_nothing:
            return  # of hundreds of nodes of a step about ten apply RoPE
        tensor = Tensor.from_address(node)
        source = tensor.sources[1] if tensor.name == name else None
        self._turning_nothing.add(op)
        if source and _TURNED_BY in ggml_base.ggml_get_name(source) and ggml_base.ggml_nbytes(source) == rope.nbytes:
            ggml_base.ggml_backend_tensor_set(source, rope.ctypes.data, 0, rope.nbytes)
            self._is_turned = True
            self._turning_nothing.discard(op)

    def _zero_positions(self, node: int) -> None:
        """Have position embeddings, which the head has added, looked up as row 0 of a matrix of one row of zeros.

        When the callback asks about ``node``, it is not computed yet, and only it reads these indices.
        """
        tensor = Tensor.from_address(node)
        if tensor.name != _POSITIONS:
            return  # a build with another struct
        size = ggml_base.ggml_nbytes(tensor.sources[1])
        zeros = np.zeros(size, np.uint8)
        ggml_base.ggml_backend_tensor_set(tensor.sources[1], zeros.ctypes.data, 0, size)

    def _cross(self, unit: int) -> bool:
        assert self.stream is not None
        try:
            self.stream.streamer.reach(unit)
        except EngineError as exc:
            self.error = exc  # it cannot propagate through C
            return False
        return True

    def _pick(self, node: int, place: int, experts: int) -> bool:
        """Report the picked experts. The node is a view of all experts by preference, one row a token; it shows the
        first."""
        rows, elements, size = (
            ggml_base.ggml_nrows(node),
            ggml_base.ggml_nelements(node),
            ggml_base.ggml_nbytes(node),
        )
        used = elements // max(rows, 1)
        picks = np.zeros((rows, experts), np.int32)
        if rows and size != 4 * ((rows - 1) * experts + used):
            return True  # of an unexpected shape: the experts are read by page faults
        ggml_base.ggml_backend_tensor_get(node, picks.ctypes.data, 0, size)
        assert self.stream is not None
        try:
            self.stream.pick(place, picks[:, :used])
        except EngineError as exc:
            self.error = exc
            return False
        return True

    def _copy(self, node: int) -> None:
        size = ggml_base.ggml_nbytes(node)
        if size == self._row.nbytes:  # asking for an array's address takes longer than copying a row
            ggml_base.ggml_backend_tensor_get(node, self._row_at, 0, size)
            self._hidden = self._row.copy()
            return
        self._hidden = np.empty((size // (4 * self._width), self._width), np.float32)
        ggml_base.ggml_backend_tensor_get(node, self._hidden.ctypes.data, 0, size)
