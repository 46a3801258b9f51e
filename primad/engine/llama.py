"""llama.cpp behind the engine protocol. No room but the engine imports llama_cpp.

A window is a model of its own to llama.cpp, loaded from a metadata split and its layer files, fed with hidden states
(``llama_batch.embd``). What is ours, and why:

* **Taking the hidden state out.** llama.cpp has no call for it. An evaluation callback is asked about each node of the
  graph; at ``l_out-{last}`` the graph is computed up to there, the tensor copied and the graph stopped, so the stand-in
  norm and output matrix of a middle window never run. Being asked about some 30 nodes a layer costs 0.7 us each in
  Python, 8 % of a small model's token. So the callback is a dict's own ``__getitem__``: a node that was seen before is
  answered in C without running a line of Python, and only an unknown one, or the wanted one, reaches ``__missing__``.
  While the graph stays the same, and nothing but its end is wanted, llama.cpp asks nothing (``quiet.py``).
* **The first hidden state** is looked up here, row by row, with ggml's own dequantisation: bit for bit what llama.cpp
  computes from tokens, and without the logits buffer of the whole vocabulary that a first window would allocate.
* **Positions with an embedding of their own** are added to those rows here; in a window there is one row for them, of 0.
* **Many hidden states go in through the callback too**, and any where a graph does not take them as they come. As
  ``llama_batch.embd`` they are copied four times, and two of the copies stay with the context: of 256 rows of width 4,096
  those of one window are 8 MB. So a large step is a batch of tokens 0, whose rows are overwritten where the graph has looked
  them up, and again where it has scaled them (Gemma). What layers take beside hidden states comes the same way
  (``layer_inputs.py``).
* **KV cells leave and return** by position (``kv_cache.py``).
* **The last window's matrix** is stored under the name of the token embedding (llama.cpp's tied-output fall-back), so
  that the embedding itself need not be held twice.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from halda import WindowAssignment
from primad.engine.binding import forget, llama, why
from primad.engine.devices import find_gpu
from primad.engine.kv_cache import CacheTensors, KvCache
from primad.engine.kv_cache import bind as bind_cache
from primad.engine.layer_inputs import BEHIND, SCALED, SELECTED, LayerInputs, LayerTable, split, with_hidden
from primad.engine.masks import Allowed, GrammarMask, Words
from primad.engine.protocol import (
    KV_CELL_PADDING,
    AdapterFile,
    EngineOptions,
    Hidden,
    KvType,
    Rows,
    Sampling,
    Tokens,
    WindowSource,
)
from primad.engine.quiet import Quiet, leave_out
from primad.engine.quiet import bind as bind_quiet
from primad.engine.rope import ROPE_SCALINGS, Rope
from primad.engine.sampling import ChainSampler, DrySamplers, GreedySampler
from primad.engine.streaming.prefetch import WindowStream
from primad.engine.streaming.residency import Residency
from primad.engine.streaming.scratch import LARGE_ROWS, Scratch
from primad.engine.streaming.scratch import bind as bind_scratch
from primad.engine.streaming.units import EXPERT_TENSORS, is_still_whole
from primad.engine.tensor import Tensor
from primad.engine.vocabulary import LlamaVocabulary
from primad.errors import EngineError, WeightsError
from primad.gguf.architectures import (
    ENTRY_KEY,
    EXIT_KEY,
    LAST_EXIT_KEY,
    LAYER_INPUTS,
    SUPPORTED,
    Architecture,
    embedding_scale,
    layer_inputs,
)
from primad.gguf.constants import GGMLQuantizationType
from primad.gguf.header import Header, TensorInfo
from primad.gguf.windows import position_embedding, sent_layers, token_embedding
from primad.kv.cells import CellShape, LayerCells

logger = logging.getLogger(__name__)

MAX_OUTPUT_ROWS: Final = 64
"""Rows of one step that may want logits: bounds the logits buffer (vocabulary * 4 bytes each)."""

_KV_TYPES: Final[dict[KvType, int]] = {
    "f16": llama.GGML_TYPE_F16,
    "q8_0": llama.GGML_TYPE_Q8_0,
    "q4_0": llama.GGML_TYPE_Q4_0,
}
_ENTRIES: Final = frozenset(
    (b"embd", b"attn_norm_in-0", SCALED, b"inp_embd_scaled", b"model.input_embed", b"model.embed_tokens")
)
"""What llama.cpp's graphs call the first hidden state: the rows of the embedding, and those of them that are scaled."""

_POSITIONS: Final = b"pos_embd"
"""What they call the rows of the positions' own embedding."""
_LAZY: Final = 2
"""llama.cpp's LLAMA_LAZY_MODE_ON: stand-ins of zeros are not read ahead."""
_BUCKETS: Final = 13
"""Of a ``std::unordered_map`` of libstdc++ with 1 to 13 entries."""
_MOST_LOADS: Final = 100
"""Of one adapter, until it lies where it is to."""


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


_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_STOP: Final = llama.ggml_abort_callback(lambda _: True)
_GO_ON: Final = llama.ggml_abort_callback()
EVAL_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
"""The callback's true prototype has two more parameters; in the C calling convention a callee may ignore them."""


ggml_base: Final = _ggml()


def node_name(node: int) -> bytes:
    """What llama.cpp calls a node of its graph, as its evaluation callback is given it."""
    name: bytes = ggml_base.ggml_get_name(node)
    return name


class _Tap(dict[int, bool]):
    """The evaluation callback of one window: finds the output of layer ``last``, copies it and stops the graph there.

    Keys are addresses of graph nodes that are not wanted. llama.cpp builds its graph anew when its shape changes, so an
    address may come to mean another node; ``forward`` then sees that nothing was taken, calls ``clear`` and repeats.
    On the way the layers' outputs that stand for borders of streamed units are told. One that is missed for the same
    reason costs page faults, no more; so the keys are forgotten whenever the number of rows changes.
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
        self._scaled: int | None = None
        self._awaited: set[bytes] = set()
        self._borders: dict[bytes, int] = {}
        self._routers: dict[bytes, tuple[int, int]] = {}
        self._residency: Residency | None = None
        self._rows = 0
        self._scratch = Scratch(ggml_base)
        self.cache = CacheTensors(ggml_base)
        self.looks = False
        """Whether the graph is only looked at: nothing is taken, fed or told."""
        self.shares_scratch = False
        self.stream: WindowStream | None = None
        self.error: EngineError | None = None
        self.find(SUPPORTED["llama"], 0, 0)

    def find(self, architecture: Architecture, layers: int, width: int, *, is_whole: bool = False) -> None:
        """The graph is this one's, of so many ``layers`` of this ``width``, or the ``whole`` model's."""
        self._architecture, self._layers, self._width = architecture, layers, width
        self._positions = _POSITIONS if architecture.adds_positions and not is_whole else None
        last = self._last
        self._wanted = None if last is None else architecture.exit_of(last, is_last=True).encode()
        self._entries = frozenset(entry.encode() for entry in architecture.entries)

    def begin(self, rows: int, feed: Hidden | None, inputs: LayerInputs | None) -> None:
        """``rows`` rows are about to be computed, of ``feed`` unless the batch says of what; ``inputs`` are beside them.

        Raises ``EngineError`` when the first unit cannot be read.
        """
        before, self._rows = self._rows, rows
        self._feed, self._inputs, self._scaled = feed, inputs, None
        self._awaited = set() if feed is None else {b""} if inputs is None else {b"", SELECTED, BEHIND}
        if self._scratch.begin(rows) or feed is not None:
            self.clear()
        if self.stream is None:
            return
        if rows > LARGE_ROWS:
            self.stream.streamer.brace()
        elif before > LARGE_ROWS:
            self.stream.streamer.settle()
        if self._residency is not self.stream.streamer.residency or before != rows:
            self._residency = self.stream.streamer.residency
            self._borders = {
                self._architecture.exit_of(layer, is_last=layer == self._layers - 1).encode(): unit
                for layer, unit in self.stream.borders().items()
            }
            self._routers = {f"ffn_moe_topk-{layer}".encode(): each for layer, each in self.stream.routers.items()}
            self.clear()
        self.stream.arrive()

    @property
    def must_see(self) -> bool:
        """Whether something of the step that begins, or just ended, is to be seen besides its end."""
        return bool(self._borders or self._routers) or self._feed is not None or self._scratch.is_full

    def cut(self) -> None:
        """What the next step's graph has behind the output of ``last`` is to be left out of it."""
        self.clear()  # else nodes there may go unnoticed
        self._cuts = True

    @property
    def has_cut(self) -> bool:
        """Whether the graph that was computed last now ends with the output of ``last``: it is asked once."""
        was_cut, self._cuts = self._cuts and self._end is not None, False
        return was_cut

    def check(self) -> None:
        """Raises the ``EngineError`` of a border that could not be crossed."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def end(self) -> None:
        """The rows were computed. Raises ``EngineError`` when a weight file is not the model's any more."""
        self._feed = None
        if self._awaited:
            raise EngineError("llama.cpp computed a window without its hidden states; its build is unknown to primad")
        if self.stream is not None and not self.stream.depart():
            self.clear()  # a router stood at an address that was another node's

    @property
    def is_scratch_full(self) -> bool:
        """Whether scratch memory is to be given back when the next step is not large, or belongs to another window."""
        return self._scratch.is_full and (self._rows <= LARGE_ROWS or self.shares_scratch)

    def give_back(self) -> None:
        """Nothing of the last step is needed any more: let the system have its scratch memory."""
        if self._scratch.give_back() and self.stream is not None:
            self.stream.streamer.spare(self._scratch.size)

    def take(self) -> Hidden | None:
        """What the last computation left, once; None when the graph never came by the wanted tensor."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def read(self) -> Hidden | None:
        """What the last computation left where the graph ends that was cut."""
        if self._end is not None:
            self._copy(self._end)
        return self.take()

    def __missing__(self, node: int) -> bool:
        self._scratch.note(node)
        name = ggml_base.ggml_get_name(node)
        self.cache.note(node, name)
        if name == self._positions:
            self._zero_positions(node)
            return False
        if self.looks:
            return False
        if self._cuts and self._end is not None:
            if not leave_out(node, name):
                self._end = None
            return False
        border, router = self._borders.get(name), self._routers.get(name)
        is_entry = self._feed is not None and name in (self._entries or _ENTRIES)
        is_beside = self._inputs is not None and name in (SELECTED, BEHIND)
        if name != self._wanted and border is None and router is None and not is_entry and not is_beside:
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
        if border is not None:
            return self._cross(border)
        self._copy(node)
        self._end = node if self._cuts else None
        return self._cuts

    def _enter(self, node: int, feed: Hidden | None, what: bytes) -> bool:
        assert feed is not None
        if ggml_base.ggml_nbytes(node) != feed.nbytes:
            return False  # of another shape than known: ``end`` says so
        ggml_base.ggml_backend_tensor_set(node, feed.ctypes.data, 0, feed.nbytes)
        self._awaited.discard(what)
        return True

    def _enter_beside(self, node: int, name: bytes) -> bool:
        assert self._inputs is not None
        if name == SELECTED:
            return self._enter(node, self._inputs.selected, name)
        return self._scaled is not None and self._enter(self._scaled, self._inputs.embedding, name)

    def _zero_positions(self, node: int) -> None:
        """Have the rows of positions, which the head has added, looked up in a matrix of one row, which is 0.

        Asked whether it is wanted, ``node`` is not computed yet, and nothing else reads the numbers that it looks up.
        """
        tensor = Tensor.from_address(node)
        if tensor.name != _POSITIONS:
            return  # of a build with another struct
        size = ggml_base.ggml_nbytes(tensor.sources[1])
        zeros = np.zeros(size, np.uint8)
        ggml_base.ggml_backend_tensor_set(tensor.sources[1], zeros.ctypes.data, 0, size)

    def _cross(self, unit: int) -> bool:
        assert self.stream is not None
        try:
            self.stream.streamer.reach(unit)
        except EngineError as exc:
            self.error = exc  # through C it would be lost
            return False
        return True

    def _pick(self, node: int, place: int, experts: int) -> bool:
        """The node is a view of the experts in order of preference, all of them, a row for each row; it sees the first."""
        rows, elements, size = (
            ggml_base.ggml_nrows(node),
            ggml_base.ggml_nelements(node),
            ggml_base.ggml_nbytes(node),
        )
        used = elements // max(rows, 1)
        picks = np.zeros((rows, experts), np.int32)
        if rows and size != 4 * ((rows - 1) * experts + used):
            return True  # of another shape than known: the experts come by page faults
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
        self._hidden = np.empty((size // (4 * self._width), self._width), np.float32)
        ggml_base.ggml_backend_tensor_get(node, self._hidden.ctypes.data, 0, size)


class _Batch:
    """One ``llama_batch`` over numpy arrays, filled anew for each forward."""

    def __init__(self, rows: int, sequences: int) -> None:
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(rows, np.int32)
        self._counts = np.zeros(rows, np.int32)
        self._sequences = np.zeros((rows, sequences), np.int32)
        self._logits = np.zeros(rows, np.int8)
        starts = self._sequences.ctypes.data + np.arange(rows, dtype=np.uint64) * np.uint64(4 * sequences)
        self._starts = starts.astype(np.uint64)
        self._batch: Any = llama.llama_batch()
        self._batch.pos = self._pointer(self._positions, ctypes.c_int32)
        self._batch.n_seq_id = self._pointer(self._counts, ctypes.c_int32)
        self._batch.seq_id = self._pointer(self._starts, ctypes.POINTER(ctypes.c_int32))
        self._batch.logits = self._pointer(self._logits, ctypes.c_int8)
        self._tokens_at = self._pointer(self._tokens, ctypes.c_int32)
        self._row: NDArray[np.float32] | None = None
        self._row_at: Any = None

    @staticmethod
    def _pointer(array: NDArray[Any], kind: Any) -> Any:
        return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))

    def fill(self, rows: Rows, *, fed: bool, every_row_out: bool) -> Any:
        """The batch holding ``rows``; valid until the next ``fill``. ``rows.content`` must stay alive meanwhile.

        ``fed``: it is not in the batch, which has a token for each row instead.
        """
        count = len(rows)
        self._positions[:count] = rows.positions
        self._logits[:count] = True if every_row_out else rows.outputs
        for i, sequences in enumerate(rows.sequences):
            self._counts[i] = len(sequences)
            self._sequences[i, : len(sequences)] = sequences
        batch = self._batch
        batch.n_tokens = count
        if fed or rows.content.dtype == np.int32:
            self._tokens[:count] = 0 if fed else rows.content
            batch.token, batch.embd = self._tokens_at, None
        else:
            assert rows.content.dtype == np.float32
            assert rows.content.flags.c_contiguous
            batch.token, batch.embd = None, self._row_of(rows.content) if count == 1 else self._floats(rows.content)
        return batch

    def _floats(self, content: NDArray[Any]) -> Any:
        return self._pointer(content, ctypes.c_float)

    def _row_of(self, content: NDArray[Any]) -> Any:
        """A copy of one row, whose place is known: to ask an array for its own takes longer."""
        if self._row is None or self._row.shape != content.shape:
            self._row = np.empty(content.shape, np.float32)
            self._row_at = self._floats(self._row)
        self._row[:] = content
        return self._row_at


def n_gpu_layers(assignment: WindowAssignment, predicting: int = 0) -> int:
    """What llama.cpp is told, for the layers and the output matrix of a window that go to the GPU.

    It counts the output as one more layer, the last of all, and offloads from the end: n + 1 is the last n layers and the
    output, 1 the output alone, and layers without the output cannot be asked for. A window that ends in hidden states has a
    stand-in of one row in the place of the output, which may lie on the GPU as well. Behind the layers of a whole model may
    be some that are ``predicting`` tokens: llama.cpp does not load them, but counts them.
    """
    if assignment.gpu_layers:
        return assignment.gpu_layers + predicting + 1
    return 1 if assignment.output == "gpu" else 0


def _turn(params: Any, rope: Rope) -> None:
    """Set what ``rope`` says in the parameters of a context."""
    if rope.scaling is not None:
        params.rope_scaling_type = ROPE_SCALINGS.index(rope.scaling)
    params.rope_freq_base, params.rope_freq_scale = rope.freq_base, rope.freq_scale
    params.yarn_ext_factor, params.yarn_attn_factor = rope.yarn_ext_factor, rope.yarn_attn_factor
    params.yarn_beta_fast, params.yarn_beta_slow = rope.yarn_beta_fast, rope.yarn_beta_slow
    params.yarn_orig_ctx = rope.yarn_orig_ctx


class _TensorPlace(ctypes.Structure):
    """``struct llama_model_tensor_buft_override`` (llama.h)."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def _experts_on_cpu(assignment: WindowAssignment) -> Any:
    """Where llama.cpp is to put the tensors of layers on the GPU that are to be in RAM; the last entry is empty."""
    layers = range(assignment.cpu_layers, assignment.ram_layers)
    cpu = ggml_base.ggml_backend_cpu_buffer_type()
    places = [_TensorPlace(rf"^blk\.{layer}\.{EXPERT_TENSORS}".encode(), cpu) for layer in layers]
    return (_TensorPlace * (len(places) + 1))(*places)


def _text_of(model: Any, key: bytes) -> str:
    """The value of a key of text in the metadata of ``model``; empty for none."""
    buffer = ctypes.create_string_buffer(128)
    size = llama.llama_model_meta_val_str(model, key, buffer, len(buffer))
    return buffer.value.decode(errors="replace") if size > 0 else ""


def _architecture_of(model: Any) -> Architecture | None:
    """What ``model`` says of its graph, which the head derived, or what the table knows."""
    name = _text_of(model, b"general.architecture")
    entry, leaves, leaves_last = (_text_of(model, key.encode()) for key in (ENTRY_KEY, EXIT_KEY, LAST_EXIT_KEY))
    if not entry:
        return SUPPORTED.get(name)
    return Architecture(name=name, is_fed=True, entries=(entry,), exit=leaves, last_exit=leaves_last)


def load_adapters(model: Any, adapters: Sequence[AdapterFile]) -> list[Any]:
    """LoRA adapters, which end with ``model``. They are loaded before there is a context, which has room for them then.

    llama.cpp adds up what they give in the order of a hash map of their addresses. libstdc++'s has so many buckets that each
    of ours can have its own, and then it is the last one first; so one that would share a bucket is loaded once more.
    Raises ``EngineError``.
    """
    loaded: list[Any] = []
    taken: set[int] = set()
    refused: list[Any] = []
    for adapter in adapters:
        for left in reversed(range(_MOST_LOADS)):
            handle = llama.llama_adapter_lora_init(model, adapter.path.encode())
            if not handle:
                raise EngineError(f"llama.cpp cannot load the adapter {adapter.path}: {why('it does not say why')}")
            bucket = int(ctypes.cast(handle, ctypes.c_void_p).value or 0) % _BUCKETS
            if bucket not in taken or not left or len(taken) == _BUCKETS:
                break
            refused.append(handle)
        loaded.append(handle)
        taken.add(bucket)
    for handle in refused:
        llama.llama_adapter_lora_free(handle)
    return loaded


def _count_of(model: Any, architecture: Architecture, key: str) -> int:
    """The count at ``key`` in the metadata of ``model``; 0 for none."""
    return int(_text_of(model, f"{architecture.name}.{key}".encode()) or 0) if key else 0


class _Model:
    """A loaded llama.cpp model with one context: the part that every kind of window shares."""

    _takes_tokens: ClassVar = False

    def __init__(
        self, source: WindowSource, options: EngineOptions, *, tap: _Tap, outputs: int, predicting: int = 0
    ) -> None:
        self._options = options
        self._batch = _Batch(options.rows, options.numbers)
        self._tap = tap
        self._inputs: LayerInputs | None = None
        params = llama.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers(source.assignment, predicting)
        params.lazy_mode = params.lazy_mode if self._takes_tokens else _LAZY
        # Whoever names no device gets them all: their memory for what the CPU computes, and layers spread over several.
        named = [find_gpu(options.gpu)] if source.assignment.uses_gpu else []
        devices = (ctypes.c_void_p * (len(named) + 1))(*named, None)
        params.devices = ctypes.cast(devices, ctypes.c_void_p)
        experts = _experts_on_cpu(source.assignment)
        if source.assignment.cpu_experts:
            params.tensor_buft_overrides = ctypes.cast(experts, ctypes.c_void_p)
        params.use_extra_bufts = source.extra_buffers
        params.no_host = True  # else a GPU's buffers in RAM come before them; files are mapped, so no weights lie there
        paths = (source.metadata, *source.layers)
        names = (ctypes.c_char_p * len(paths))(*(path.encode() for path in paths))
        self._model = (
            llama.llama_model_load_from_splits(names, len(paths), params)
            if len(paths) > 1
            else llama.llama_model_load_from_file(paths[0].encode(), params)
        )
        if not self._model:
            raise EngineError(f"llama.cpp cannot load {paths[0]}: {why('it does not say why')}")
        try:
            adapters = load_adapters(self._model, source.adapters)
        except EngineError:
            llama.llama_model_free(self._model)
            raise
        self._is_recurrent = bool(
            llama.llama_model_is_recurrent(self._model) or llama.llama_model_is_hybrid(self._model)
        )
        known = _architecture_of(self._model)
        self._each = 0 if known is None or self._takes_tokens else _count_of(self._model, known, known.layer_inputs)
        self._sharing = 0 if known is None else _count_of(self._model, known, known.shares_cells)
        params = self._context_params(outputs)
        # Without, the CPU computes its layers, of prompts too. A GPU would read a projection's input before it is there.
        params.op_offload = source.assignment.helped and not self._each
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            llama.llama_model_free(self._model)
            raise EngineError(f"llama.cpp cannot open a context of {options.context} tokens: {why('out of memory?')}")
        if adapters:
            handles = (ctypes.POINTER(ctypes.c_void_p) * len(adapters))(*adapters)
            scales = (ctypes.c_float * len(adapters))(*(each.scale for each in source.adapters))
            llama.llama_set_adapters_lora(self._context, handles, len(adapters), scales)
        self._quiet = Quiet(ggml_base, self._context, self._callback)
        self._memory = llama.llama_get_memory(self._context)
        self._is_fed = known is not None and known.is_fed
        self._width = int(llama.llama_model_n_embd(self._model))
        tap.find(known or SUPPORTED["llama"], source.assignment.layers, self._width, is_whole=self._takes_tokens)
        first = source.assignment.first
        if self._each and first and source.assignment.gpu_layers == source.assignment.layers:
            self.release()
            raise EngineError(f"layer {first} takes what its window needs beside hidden states: it cannot be on a GPU")
        self.layers: Final = range(first, first + source.assignment.layers)
        self._is_copying = False

    def _context_params(self, outputs: int) -> Any:
        options = self._options
        params = llama.llama_context_default_params()
        params.n_ctx = -(-options.context // KV_CELL_PADDING) * KV_CELL_PADDING * options.sequences
        rows = options.rows
        if self._is_recurrent:
            rows = -(-rows // options.numbers) * options.numbers  # else llama.cpp aborts over Kimi Linear
        params.n_batch = params.n_ubatch = rows
        params.n_seq_max = options.numbers
        params.n_outputs_max = max(min(outputs, options.rows), options.numbers)  # with fewer llama.cpp aborts
        params.n_outputs_max_per_seq = params.n_outputs_max
        params.n_threads = options.threads
        params.n_threads_batch = options.batch_threads
        params.kv_unified = options.sequences == 1  # else each sequence has cells of its own, and its bits
        params.swa_full = True  # else sliding layers use their cells again, and a position's cell is not known
        params.no_perf = True
        params.type_k = params.type_v = _KV_TYPES[options.kv_type]
        if options.kv_type != "f16":  # llama.cpp quantises values only for it
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        elif not options.flash:
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        _turn(params, options.rope)
        params.offload_kqv = True  # keys and values lie where their layer does
        # A bound method of a dict subclass: see the module's docstring. Kept alive beside the context.
        self._callback = EVAL_CALLBACK(self._tap.__getitem__)
        params.cb_eval = ctypes.cast(self._callback, type(params.cb_eval))
        return params

    def share_scratch(self) -> None:
        """Other windows of this process need scratch memory as well: give it back after every large step."""
        self._tap.shares_scratch = True

    def attach(self, stream: WindowStream | None) -> None:
        """Stream this window's units from now on; None: all are in memory, whatever the system does."""
        self._tap.stream = stream

    def kv_remove(self, sequence: int, start: int, end: int) -> None:
        if not llama.llama_memory_seq_rm(self._memory, sequence, start, end):
            raise EngineError(f"llama.cpp cannot forget positions {start} to {end} of sequence {sequence}")

    def kv_copy(self, source: int, target: int, end: int) -> None:
        # Sequences with cells of their own are copied whole: llama.cpp aborts where a part is asked for. Of one that shares
        # them what it had before is not forgotten.
        if self._options.sequences == 1:
            self.kv_remove(target, 0, -1)
        llama.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        self.kv_remove(target, end, -1)
        self._is_copying = self._options.sequences > 1

    @property
    def kv_supported(self) -> bool:
        """Whether KV cells can be taken out and put back. Tried when first asked, which must be before rows are computed."""
        return self._kv is not None

    @property
    def kv_shapes(self) -> list[CellShape]:
        return self._kv.shapes() if self._kv is not None else []

    @cached_property
    def _kv(self) -> KvCache | None:
        if self._is_recurrent:
            logger.info(
                "KV cells of layers %d to %d are not kept: some have a state", self.layers.start, self.layers.stop - 1
            )
            return None
        free = range(self._options.sequences)
        sequence = next((i for i in free if llama.llama_memory_seq_pos_max(self._memory, i) < 0), None)
        assert sequence is not None, "whether KV cells can leave must be asked before every sequence has some"
        try:
            for stops in (True, False):
                if len(self._tap.cache.keys) < len(self.layers) - self._sharing:
                    self._look(sequence, stops=stops)
            cache = KvCache(
                ggml_base,
                self._context,
                self._tap.cache,
                first=self.layers.start,
                layers=len(self.layers),
                sharing=self._sharing,
                sequence=sequence,
            )
        except EngineError as exc:
            logger.warning(
                "KV cells of layers %d to %d cannot be kept: %s", self.layers.start, self.layers.stop - 1, exc
            )
            return None
        finally:
            forget()
        return cache

    def kv_cells(self, sequence: int, start: int, end: int) -> list[LayerCells]:
        return self._settled().read(sequence, start, end)

    def kv_restore(self, sequence: int, blocks: Sequence[Sequence[LayerCells]]) -> None:
        self._settled().restore(sequence, blocks)

    def _settled(self) -> KvCache:
        """The cells as they are: llama.cpp puts off copying a sequence until the next step."""
        if self._kv is None:
            raise EngineError("this build of llama.cpp does not give or take the KV cells of this window")
        if self._is_copying:
            self._look(0, stops=True)
        return self._kv

    def _look(self, sequence: int, *, stops: bool) -> None:
        """Have llama.cpp prepare a step of one row and, if it ``stops``, not compute it, where its backend can leave it."""
        position = llama.llama_memory_seq_pos_max(self._memory, sequence) + 1
        hidden = np.zeros((1, llama.llama_model_n_embd(self._model)), np.float32)
        content = np.zeros(1, np.int32) if self._takes_tokens or self._is_fed else hidden
        rows = Rows(content=content, positions=[position], sequences=[[sequence]], outputs=[True])
        self._tap.clear()
        self._tap.looks = True
        self._quiet.end()
        llama.llama_set_abort_callback(self._context, _STOP if stops else _GO_ON, None)
        llama.llama_decode(self._context, self._batch.fill(rows, fed=False, every_row_out=True))
        llama.llama_set_abort_callback(self._context, _GO_ON, None)
        self._tap.looks = False
        self._is_copying = False
        self.kv_remove(sequence, position, -1)

    def release(self) -> None:
        self.__dict__.pop("_kv", None)
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)
        del self._context, self._model, self._memory, self._quiet

    def _decode(self, rows: Rows, *, every_row_out: bool) -> None:
        is_hidden = rows.content.dtype == np.float32
        feed = rows.content if is_hidden and (self._is_fed or len(rows) > LARGE_ROWS) else None
        self._tap.begin(len(rows), feed, self._inputs)  # type: ignore[arg-type]
        if self._tap.must_see or (self._quiet.is_on and len(rows) > 1):
            self._quiet.end()
        batch = self._batch.fill(rows, fed=feed is not None, every_row_out=every_row_out)
        code = llama.llama_decode(self._context, batch)
        self._is_copying = False
        self._tap.check()
        if code == 1:
            raise EngineError(f"the context of {self._options.context} tokens is full")
        if code != 0:
            raise EngineError(f"llama.cpp failed to compute a step (code {code}): {why('it does not say why')}")
        self._tap.end()
        if self._tap.is_scratch_full:
            llama.llama_synchronize(self._context)
            self._tap.give_back()


class _HiddenWindow(_Model):
    """Layers from hidden state to hidden state."""

    def __init__(self, source: WindowSource, options: EngineOptions) -> None:
        assert source.assignment.output != "gpu"
        super().__init__(source, options, tap=_Tap(source.assignment.layers - 1), outputs=options.rows)

    def forward(self, rows: Rows) -> Hidden:
        if not self._each:
            return self._forward(rows)
        content: Hidden = rows.content  # type: ignore[assignment]
        hidden, self._inputs = split(content, self._width, self._each, self.layers)
        return with_hidden(content, self._forward(replace(rows, content=hidden)))

    def _forward(self, rows: Rows) -> Hidden:
        hidden = self._compute(rows)
        if hidden is None:
            self._repeat(rows)
            hidden = self._tap.take()
        if hidden is None or len(hidden) != len(rows):
            raise EngineError(
                "llama.cpp computed a window without its last layer's output; its build is unknown to primad"
            )
        return hidden

    def _compute(self, rows: Rows) -> Hidden | None:
        """The output; None where the graph was built anew and has it at an address that was another node's."""
        self._decode(rows, every_row_out=True)
        has_same_graph = self._quiet.kept_graph()
        if self._quiet.is_on:
            llama.llama_synchronize(self._context)
            return self._tap.read()
        if self._tap.has_cut:
            self._quiet.begin()
        elif has_same_graph and len(rows) == 1 and not self._tap.must_see and self._quiet.has_one_part:
            self._tap.cut()
        return self._tap.take()

    def _repeat(self, rows: Rows) -> None:
        """Compute ``rows`` once more with a callback that knows no node yet: the graph was built anew."""
        logger.debug("graph rebuilt: repeating a step of %d rows", len(rows))
        self._tap.clear()
        for position, sequences in zip(rows.positions, rows.sequences, strict=True):
            for sequence in sequences:
                self.kv_remove(sequence, position, position + 1)
        self._decode(rows, every_row_out=True)


class TokenRows:
    """A matrix of a file with a row for each token, or position, of which rows are looked up."""

    def __init__(self, tensor: TensorInfo) -> None:
        self.width, self.count = tensor.shape
        row_bytes = tensor.bytes // tensor.shape[1]
        self._path, self._end = tensor.path, tensor.offset + tensor.bytes
        self._file = os.open(tensor.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._changed_ns = os.fstat(self._file).st_mtime_ns
        self._table = np.memmap(
            tensor.path, np.uint8, mode="r", offset=tensor.offset, shape=(tensor.shape[1], row_bytes)
        )
        to_float = ggml_base.ggml_get_type_traits(int(tensor.type)).contents.to_float
        self._to_float = _TO_FLOAT(to_float) if to_float else None
        if self._to_float is None and tensor.type != GGMLQuantizationType.F32:
            raise EngineError(f"{tensor.path}: llama.cpp cannot read rows of type {tensor.type.name}")

    def rows(self, tokens: NDArray[np.int32]) -> Hidden:
        """Rows (rows, width) of ``tokens``, as llama.cpp looks them up.

        Raises ``WeightsError`` when somebody wrote to the file.
        """
        self._check()
        packed = self._table[tokens]
        self._check()
        found = np.empty((len(tokens), self.width), np.float32)
        if self._to_float is None:
            found[:] = packed.view(np.float32)
        else:
            for i in range(len(tokens)):
                self._to_float(packed[i].ctypes.data, found[i].ctypes.data, self.width)
        return found

    def _check(self) -> None:
        """A file that was cut short would end this process where it is read, one that was overwritten change the answer."""
        status = os.fstat(self._file)
        if status.st_mtime_ns != self._changed_ns and is_still_whole(str(self._path)):
            self._changed_ns = status.st_mtime_ns  # a layer file's header, for another window
        if status.st_size < self._end or status.st_mtime_ns != self._changed_ns:
            raise WeightsError(f"{self._path}: somebody wrote to the model file while it was used", str(self._path))


class ChangesRows(Protocol):
    """Changes looked up rows of the token embedding."""

    def add(self, hidden: Hidden, tokens: NDArray[np.int32]) -> None:
        """Add to ``hidden`` (rows, width) what it has for its ``tokens``."""


class TokenEmbedding:
    """Looks up the first hidden states in the model file itself, which ``adapters`` change in their order.

    A row of ``positions`` is added to each, where the model has them. ``layers`` have inputs of their own.
    """

    def __init__(
        self,
        tensor: TensorInfo,
        scale: float,
        adapters: Sequence[ChangesRows] = (),
        positions: TensorInfo | None = None,
        layers: LayerTable | None = None,
    ) -> None:
        self.layers = layers
        self.width = tensor.shape[0]
        self._scale = np.float32(scale)
        self._table = TokenRows(tensor)
        self._adapters = adapters
        self._positions = None if positions is None else TokenRows(positions)

    @classmethod
    def of(cls, header: Header, table: Header | None = None, adapters: Sequence[ChangesRows] = ()) -> TokenEmbedding:
        """What the head looks up of the model of ``header``; its tensors may be in the file of ``table``."""
        file = header if table is None else table
        layers = None
        if each := layer_inputs(header):
            inputs = file.tensors[LAYER_INPUTS]
            layers = LayerTable(TokenRows(inputs).rows, each, sent_layers(header), inputs.shape[1])
        positions = position_embedding(header, file)
        return cls(token_embedding(file), embedding_scale(header), adapters, positions, layers)

    def rows(self, tokens: NDArray[np.int32], positions: Sequence[int]) -> Hidden:
        """Hidden states (rows, width) of ``tokens`` at ``positions``, as llama.cpp computes them from token input.

        Raises ``WeightsError`` when somebody wrote to the file, ``EngineError`` for a position that the model does not know.
        """
        hidden = self._table.rows(tokens)
        for adapter in self._adapters:
            adapter.add(hidden, tokens)
        if self._scale != 1:
            hidden *= self._scale
        if self._positions is not None:
            if max(positions, default=0) >= self._positions.count:
                raise EngineError(f"the model knows {self._positions.count} positions, not position {max(positions)}")
            hidden += self._positions.rows(np.asarray(positions, np.int32))
        return hidden


class FirstWindow(_HiddenWindow):
    """The route's first window: token ids in, hidden states out."""

    def __init__(self, source: WindowSource, options: EngineOptions, embedding: TokenEmbedding) -> None:
        super().__init__(source, options)
        self._embedding = embedding

    def forward(self, rows: Rows) -> Hidden:
        tokens: Tokens = rows.content  # type: ignore[assignment]
        hidden, table = self._embedding.rows(tokens, rows.positions), self._embedding.layers
        return super().forward(replace(rows, content=hidden if table is None else table.joined(hidden, tokens)))


class MiddleWindow(_HiddenWindow):
    """Any window but the first and the tail: hidden states in, hidden states out."""


class _LogitsWindow(_Model):
    """A window that ends in logits."""

    def __init__(
        self,
        source: WindowSource,
        options: EngineOptions,
        ends: frozenset[int],
        *,
        vocabulary: int,
        file: Path | None = None,
        predicting: int = 0,
        embedding: TokenEmbedding | None = None,
    ) -> None:
        assert source.assignment.output == "gpu" or not source.assignment.gpu_layers
        super().__init__(source, options, tap=_Tap(None), outputs=MAX_OUTPUT_ROWS, predicting=predicting)
        self._ends = ends
        self._logits_type = ctypes.c_float * vocabulary
        self._vocabulary = vocabulary
        self._embedding = embedding
        self._words = Words(lambda: LlamaVocabulary(file or Path(source.metadata)))
        self._dry = DrySamplers(self._words)

    def forward(self, rows: Rows) -> None:
        self._decode(rows, every_row_out=False)
        if not self._tap.must_see:
            self._quiet.begin()

    def logits(self, row: int) -> NDArray[np.float32]:
        pointer = llama.llama_get_logits_ith(self._context, row)
        if not pointer:
            raise EngineError(f"row {row} of the last step has no logits")
        row_of = self._logits_type.from_address(ctypes.addressof(pointer.contents))
        logits: NDArray[np.float32] = np.frombuffer(row_of, np.float32)  # type: ignore[call-overload]
        return logits

    def sampler(
        self, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]
    ) -> GreedySampler | ChainSampler:
        mask = GrammarMask(self._words, sampling.grammar, sampled) if sampling.grammar is not None else None
        allowed = Allowed(sampling, self._ends, len(sampled), mask, vocabulary=self._vocabulary)
        if sampling.is_greedy and not sampling.changes_logits:
            return GreedySampler(self, allowed)
        return ChainSampler(
            self._context,
            self,
            self._dry,
            sampling,
            prompt,
            sampled,
            allowed,
            context_tokens=self._options.context,
        )

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def release(self) -> None:
        self._dry.release()
        self._words.release()
        super().release()


class TailWindow(_LogitsWindow):
    """The route's last window: hidden states in, logits out. The ``embedding`` has what its layers take beside them."""

    def forward(self, rows: Rows) -> None:
        if self._each:
            assert self._embedding is not None
            assert self._embedding.layers is not None
            content: Hidden = rows.content  # type: ignore[assignment]
            tokens = self._embedding.layers.tokens_of(content)
            selected = self._embedding.layers.selected(tokens, self.layers)
            self._inputs = LayerInputs(self._embedding.rows(tokens, rows.positions), selected)
            rows = replace(rows, content=np.ascontiguousarray(content[:, : self._width]))
        super().forward(rows)


class WholeModel(_LogitsWindow):
    """The single window of a single-device plan: the user's file as it is, token ids in, logits out.

    The last ``predicting`` of its layers are for multi-token prediction and in no plan.
    """

    _takes_tokens: ClassVar = True
