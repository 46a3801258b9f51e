"""A loaded llama.cpp model with one context: its parameters, its adapters, and the devices of its tensors."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, Final

import numpy as np

from halda import WindowAssignment
from primad.engine.binding import forget, llama, why
from primad.engine.devices import find_gpu
from primad.engine.kv_cache import KvCache
from primad.engine.layer_inputs import LayerInputs
from primad.engine.llama.batch import POSITION_PARTS, LlamaBatch
from primad.engine.llama.sliding_cells import window_cells
from primad.engine.llama.states import LastRows, SequenceStates
from primad.engine.llama.tap import EVAL_CALLBACK, Tap, ggml_base
from primad.engine.protocol import (
    KV_CELL_PADDING,
    AdapterFile,
    EngineOptions,
    GroupExchange,
    Hidden,
    KvType,
    Rows,
    WindowSource,
)
from primad.engine.quiet import Quiet
from primad.engine.rope import ROPE_SCALINGS, Rope
from primad.engine.streaming.prefetch import WindowStream
from primad.engine.streaming.scratch import LARGE_ROWS
from primad.engine.streaming.units import EXPERT_TENSORS
from primad.errors import EngineError
from primad.gguf.architecture import Architecture
from primad.gguf.architectures.table import ENTRY_KEY, EXIT_KEY, LAST_EXIT_KEY, SUPPORTED
from primad.kv.cells import CellShape, LayerCells, layers_of_rank

logger = logging.getLogger(__name__)

_KV_TYPES: Final[dict[KvType, int]] = {
    "f16": llama.GGML_TYPE_F16,
    "q8_0": llama.GGML_TYPE_Q8_0,
    "q4_0": llama.GGML_TYPE_Q4_0,
}

_LAZY: Final = 2
"""llama.cpp's LLAMA_LAZY_MODE_ON: placeholder tensors of zeros are not read ahead."""
_BUCKETS: Final = 13
"""Buckets of a ``std::unordered_map`` of libstdc++ with 1 to 13 entries."""
_MAX_LOADS: Final = 100
"""Attempts to load one adapter until its address suits."""


_LOOKED: Final = -1
"""The number of a state that is restored immediately."""
_STOP: Final = llama.ggml_abort_callback(lambda _: True)
_GO_ON: Final = llama.ggml_abort_callback()


def n_gpu_layers(assignment: WindowAssignment, predicting: int = 0) -> int:
    """Return llama.cpp's ``n_gpu_layers`` for a window's layers and output matrix on the GPU.

    It counts the output as one more layer, the last of all, and offloads from the end: n + 1 is the last n layers and
    the output, 1 the output alone; layers without the output cannot be requested. A window that ends in hidden states
    has a placeholder of one row as output, which may be on the GPU as well. After the layers of a whole model there may
    be ``predicting`` more, for multi-token prediction: llama.cpp does not load them, but counts them.
    """
    if assignment.gpu_layers:
        return assignment.gpu_layers + predicting + 1
    return 1 if assignment.output == "gpu" else 0


def _turn(params: Any, rope: Rope) -> None:
    """Set ``rope`` in the parameters of a context."""
    if rope.scaling is not None:
        params.rope_scaling_type = ROPE_SCALINGS.index(rope.scaling)
    params.rope_freq_base, params.rope_freq_scale = rope.freq_base, rope.freq_scale
    params.yarn_ext_factor, params.yarn_attn_factor = rope.yarn_ext_factor, rope.yarn_attn_factor
    params.yarn_beta_fast, params.yarn_beta_slow = rope.yarn_beta_fast, rope.yarn_beta_slow
    params.yarn_orig_ctx = rope.yarn_orig_ctx


class _TensorPlace(ctypes.Structure):
    """``struct llama_model_tensor_buft_override`` (llama.h)."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def gpus_in_order(assignment: WindowAssignment, options: EngineOptions) -> list[tuple[str, int]]:
    """Return the GPUs of a window with their layer counts, in llama.cpp's order: by layer, so the device's first GPU is
    last.

    The last one has the output matrix. The first one also does prefill offload: if another is to do that, it is added
    in front without layers. Raises ``EngineError`` if the plan has more GPUs than the device.
    """
    if not assignment.uses_gpu:
        return []
    names = (options.gpu, *options.other_gpus)
    if len(assignment.other_gpus) >= len(names):
        raise EngineError(
            f"a window with layers on {len(assignment.other_gpus) + 1} GPUs; this device has {len(names)}"
        )
    found = [(name, count) for name, count in zip(names, assignment.on_each_gpu, strict=False) if count][::-1]
    if assignment.output == "gpu" and (not found or found[-1][0] != options.gpu):
        found.append((options.gpu, 0))
    offloading = options.offloading_gpu or options.gpu
    if assignment.prefill_offload and (not found or found[0][0] != offloading):
        found = [(offloading, 0), *found]
    return found


def tensor_split(layers: Sequence[int], n_gpu_layers: int) -> Any:
    """Return llama.cpp's ``tensor_split``: the number of layers of each GPU, the output counted with the last one's.

    llama.cpp divides the running sum of the numbers by their total, and compares it with a layer's number divided by
    ``n_gpu_layers``. The total is ``n_gpu_layers`` too, so both quotients of a boundary are equal and each layer is on
    its GPU.
    """
    counts = [*layers[:-1], n_gpu_layers - sum(layers[:-1])] if layers else []
    return (ctypes.c_float * max(int(llama.llama_max_devices()), len(counts)))(*counts)


def _tensor_places(assignment: WindowAssignment, *, is_split: bool) -> Any:
    """Return overrides that keep tensors of GPU layers in RAM; the last entry is empty.

    A window that ``is_split`` over GPUs has at least one override, which matches no tensor: with any, llama.cpp does
    not keep the inputs of several steps on each GPU, of which a ring has one.
    """
    layers = range(assignment.cpu_layers, assignment.ram_layers)
    cpu = ggml_base.ggml_backend_cpu_buffer_type()
    places = [_TensorPlace(rf"^blk\.{layer}\.{EXPERT_TENSORS}".encode(), cpu) for layer in layers]
    places += [_TensorPlace(b"^no tensor$", cpu)] * (is_split and not places)
    return (_TensorPlace * (len(places) + 1))(*places)


def _text_of(model: Any, key: bytes) -> str:
    """Return the text at a key in the metadata of ``model``; empty if there is none."""
    buffer = ctypes.create_string_buffer(128)
    size = llama.llama_model_meta_val_str(model, key, buffer, len(buffer))
    return buffer.value.decode(errors="replace") if size > 0 else ""


def _architecture_of(model: Any) -> Architecture | None:
    """Return the architecture that the head wrote to the metadata of ``model``, else the table's."""
    name = _text_of(model, b"general.architecture")
    entry, leaves, leaves_last = (_text_of(model, key.encode()) for key in (ENTRY_KEY, EXIT_KEY, LAST_EXIT_KEY))
    if not entry:
        return SUPPORTED.get(name)
    return Architecture(name=name, is_fed=True, entries=(entry,), exit=leaves, last_exit=leaves_last)


def load_adapters(model: Any, adapters: Sequence[AdapterFile]) -> list[Any]:
    """Load LoRA adapters, which are freed with ``model``. Load them before the context, which then reserves memory for
    them.

    llama.cpp adds the adapters' results in the order of a hash map of their addresses. libstdc++'s has enough buckets
    for each adapter to have its own; then the order is last one first. So an adapter that would share a bucket is
    loaded again. Raises ``EngineError``.
    """
    loaded: list[Any] = []
    taken: set[int] = set()
    refused: list[Any] = []
    for adapter in adapters:
        for left in reversed(range(_MAX_LOADS)):
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
    """Return the count at ``key`` in the metadata of ``model``; 0 if there is none."""
    return int(_text_of(model, f"{architecture.name}.{key}".encode()) or 0) if key else 0


def _shape(rows: Rows, *, is_fed: bool, every_row_out: bool) -> tuple[object, ...]:
    """Return what determines a step's graph: tokens by sequence, number of outputs, and how the input enters."""
    by_sequence = tuple((tuple(key), sum(1 for _ in each)) for key, each in groupby(rows.sequences))
    return by_sequence, len(rows) if every_row_out else sum(rows.outputs), is_fed, rows.look_ahead


class LlamaModel:
    """A loaded llama.cpp model with one context: the part that all kinds of windows share."""

    _takes_tokens: ClassVar = False

    def __init__(
        self,
        source: WindowSource,
        options: EngineOptions,
        *,
        tap: Tap,
        outputs: int,
        predicting: int = 0,
        predicts: bool = False,
        exchange: GroupExchange | None = None,
    ) -> None:
        self._options = options
        self._batch = LlamaBatch(options.rows, options.numbers)
        self._tap = tap
        self.exchange: Final = exchange
        tap.share(exchange)
        # A bound method of a dict subclass: see the tap's docstring. It must live as long as the context.
        self._callback = EVAL_CALLBACK(tap.__getitem__)
        self._inputs: LayerInputs | None = None
        self._deeper: dict[int, Hidden] = {}
        """Values that layers of the window add to their outputs."""
        params = llama.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers(source.assignment, predicting)
        params.lazy_mode = params.lazy_mode if self._takes_tokens else _LAZY
        if predicts:
            params.load_mtp = True
        # With no device named, llama.cpp takes all: memory on each for what the CPU computes, and layers spread over
        # several.
        gpus = gpus_in_order(source.assignment, options)
        devices = (ctypes.c_void_p * (len(gpus) + 1))(*(find_gpu(gpu) for gpu, _ in gpus), None)
        params.devices = ctypes.cast(devices, ctypes.c_void_p)
        split = tensor_split([layers for _, layers in gpus], params.n_gpu_layers)
        params.tensor_split = ctypes.cast(split, type(params.tensor_split))
        places = _tensor_places(source.assignment, is_split=len(gpus) > 1)
        if len(places) > 1:
            params.tensor_buft_overrides = ctypes.cast(places, ctypes.c_void_p)
        params.use_extra_bufts = source.extra_buffers
        params.no_host = True  # else a GPU's buffers in RAM take precedence; files are mapped, so no weights are there
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
        # Else the CPU computes its layers, for prefill too. A GPU would read a projection's input before it is there.
        params.op_offload = source.assignment.prefill_offload and not self._each
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
        self._states = SequenceStates(self._context, self._window_cells)
        self._last_rows = LastRows(options.rollback)
        if self._is_recurrent and options.rollback and llama.llama_n_rs_seq(self._context) < options.rollback:
            self.release()
            raise EngineError("this build of llama.cpp cannot take tokens back from this model's states")
        self._is_fed = known is not None and known.is_fed
        self._width = int(llama.llama_model_n_embd(self._model))
        tap.find(known or SUPPORTED["llama"], source.assignment.layers, self._width, is_whole=self._takes_tokens)
        first = source.assignment.first
        if self._each and first and source.assignment.gpu_layers == source.assignment.layers:
            self.release()
            raise EngineError(f"per-layer inputs enter at layer {first}, its window's first: it cannot be on a GPU")
        self.layers: Final = range(first, first + source.assignment.layers)
        self._is_copying = self._looks_ahead = False

    @cached_property
    def _window_cells(self) -> int | None:
        """The number of cells of sliding layers where they have fewer than others; None where all can be cut back."""
        window, options = int(llama.llama_model_n_swa(self._model)), self._options
        return window_cells(options.context, window, options.rows) if options.small_windows and window else None

    def _begins_window_cells(self, positions: Sequence[int]) -> bool:
        """Whether one of ``positions`` uses the first cell of sliding layers, again or for the first time."""
        return self._window_cells is not None and any(position % self._window_cells == 0 for position in positions)

    def _context_params(self, outputs: int) -> Any:
        options = self._options
        params = llama.llama_context_default_params()
        params.n_ctx = -(-options.context // KV_CELL_PADDING) * KV_CELL_PADDING * options.sequences
        rows = options.rows
        if self._is_recurrent:
            rows = max(rows, options.rollback + 2)  # with fewer llama.cpp aborts
            rows = -(-rows // options.numbers) * options.numbers  # with other numbers it aborts over Kimi Linear
            params.n_rs_seq = options.rollback
        params.n_batch = params.n_ubatch = rows
        params.n_seq_max = options.numbers
        params.n_outputs_max = max(min(outputs, options.rows), options.numbers)  # with fewer llama.cpp aborts
        params.n_outputs_max_per_seq = params.n_outputs_max
        params.n_threads = options.threads
        params.n_threads_batch = options.batch_threads
        params.kv_unified = options.sequences == 1  # else each sequence has its own cells, and the bits it has alone
        params.swa_full = not options.small_windows  # a small one reuses its cells
        params.no_perf = True
        params.type_k = params.type_v = _KV_TYPES[options.kv_type]
        if options.kv_type != "f16":  # llama.cpp quantises values only with flash attention
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        elif not options.flash:
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        _turn(params, options.rope)
        params.offload_kqv = True  # keys and values are on their layer's device
        params.cb_eval = ctypes.cast(self._callback, type(params.cb_eval))
        return params

    def share_scratch(self) -> None:
        """Free scratch memory after every large step: other windows of this process need it as well."""
        self._tap.shares_scratch = True

    def attach(self, stream: WindowStream | None) -> None:
        """Stream this window's units from now on; None: all count as in memory."""
        self._tap.stream = stream

    def kv_remove(self, sequence: int, start: int, end: int) -> None:
        if self._is_recurrent:
            has = llama.llama_memory_seq_pos_max(self._memory, sequence) + 1
            if 0 < start < has:
                self._last_rows.take_back(sequence, start, has if end < 0 else end)
            elif not start:
                self._last_rows.forget(sequence)
        if not llama.llama_memory_seq_rm(self._memory, sequence, start, end):
            raise EngineError(f"llama.cpp cannot forget positions {start} to {end} of sequence {sequence}")

    def kv_copy(self, source: int, target: int, end: int) -> None:
        # Sequences with separate cells are copied whole: llama.cpp aborts on a part. One that shares cells keeps its
        # earlier ones, which are removed first.
        self._last_rows.forget(target)
        if self._options.sequences == 1:
            self.kv_remove(target, 0, -1)
        llama.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        if not self._is_recurrent:  # where the source continues after ``end``, a state of ``end`` is restored next
            self.kv_remove(target, end, -1)
        self._is_copying = self._options.sequences > 1

    def state_keep(self, number: int, sequence: int, end: int) -> None:
        self._states.keep(number, sequence, end)

    def state_restore(self, number: int, sequence: int, end: int) -> None:
        if self._is_copying and self._window_cells is not None:  # else the pending copy would overwrite the state
            self._look(0, stops=True)
        self._last_rows.forget(sequence)
        self._states.restore(number, sequence, end)

    def state_forget(self) -> None:
        self._states.forget()

    @property
    def kv_supported(self) -> bool:
        """Whether KV cells can be read and restored. The first call tries it, and must come before anything is
        computed."""
        return self._kv is not None

    @property
    def kv_layers(self) -> range:
        return self.layers if self.exchange is None else layers_of_rank(self.exchange.rank, self.layers)

    @property
    def kv_shapes(self) -> list[CellShape]:
        return self._kv.shapes() if self._kv is not None else []

    @cached_property
    def _kv(self) -> KvCache | None:
        if self._is_recurrent and self._window_cells is not None:
            return None
        free = range(self._options.sequences)
        sequence = next((i for i in free if llama.llama_memory_seq_pos_max(self._memory, i) < 0), None)
        assert sequence is not None, "whether KV cells can leave must be asked before every sequence has some"
        why_not: EngineError | None = None
        for stops in (True, False):
            try:
                if self._is_recurrent or len(self._tap.cache.keys) < len(self.layers) - self._sharing:
                    self._look(sequence, stops=stops)
                return KvCache(
                    ggml_base,
                    self._context,
                    self._tap.cache,
                    first=self.kv_layers.start,
                    layers=len(self.layers),
                    sharing=self._sharing,
                    sequence=sequence,
                    window_cells=self._window_cells,
                )
            except EngineError as exc:  # the first try may stop before some layers
                why_not = exc
            finally:
                forget()
        logger.warning(
            "KV cells of layers %d to %d cannot be kept: %s", self.layers.start, self.layers.stop - 1, why_not
        )
        return None

    def kv_cells(self, sequence: int, start: int, end: int) -> list[LayerCells]:
        return self._settled().read(sequence, start, end)

    def kv_restore(self, sequence: int, blocks: Sequence[Sequence[LayerCells]]) -> None:
        self._settled().restore(sequence, blocks)

    def _settled(self) -> KvCache:
        """Return the cells after pending copies: llama.cpp defers copying a sequence until the next step."""
        if self._kv is None:
            raise EngineError("this build of llama.cpp does not give or take the KV cells of this window")
        if self._is_copying:
            self._look(0, stops=True)
        return self._kv

    def _look(self, sequence: int, *, stops: bool) -> None:
        """Have llama.cpp prepare a step of one token. With ``stops``, a backend that can abort does not compute it."""
        position = llama.llama_memory_seq_pos_max(self._memory, sequence) + 1
        if self._is_recurrent and position:  # the step's effect on the state cannot be cut back
            self._states.keep(_LOOKED, sequence, position)
        hidden = np.zeros((1, llama.llama_model_n_embd(self._model)), np.float32)
        content = np.zeros(1, np.int32) if self._takes_tokens or self._is_fed else hidden
        rows = Rows(content=content, positions=[position], sequences=[[sequence]], outputs=[True])
        self._tap.clear()
        self._tap.begin_sums(None)
        self._tap.looks = True
        self._quiet.end()
        llama.llama_set_abort_callback(self._context, _STOP if stops else _GO_ON, None)
        llama.llama_decode(self._context, self._batch.fill(rows, fed=False, every_row_out=True))
        llama.llama_set_abort_callback(self._context, _GO_ON, None)
        self._tap.looks = False
        self._is_copying = False
        if self._is_recurrent and position:
            self._states.restore(_LOOKED, sequence, position)
            self._states.drop(_LOOKED)
        else:
            self.kv_remove(sequence, position, -1)

    def release(self) -> None:
        self.__dict__.pop("_kv", None)
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)
        del self._context, self._model, self._memory, self._quiet, self._states

    def _shared(self, rows: Rows) -> Hidden:
        """Return the window's input. In a group only rank 0 has it before; the others' is overwritten."""
        content: Hidden = rows.content  # type: ignore[assignment]
        if self.exchange is not None:
            self.exchange.spread(content.reshape(-1))
        return content

    def _look_ahead(self, *, looks_ahead: bool) -> None:
        """Set whether tokens attend to later tokens of their step. llama.cpp then rebuilds its graph."""
        self._looks_ahead = looks_ahead
        llama.llama_set_causal_attn(self._context, not looks_ahead)
        self._tap.clear()
        self._quiet.end()

    def _decode(self, rows: Rows, *, every_row_out: bool) -> None:
        is_hidden = rows.content.dtype == np.float32 and not self._takes_tokens  # a picture is scaled later
        feed = rows.content if is_hidden and (self._is_fed or len(rows) > LARGE_ROWS) else None
        rope = np.array(rows.rope, np.int32).reshape(-1, POSITION_PARTS).T.copy() if rows.rope else None
        self._tap.begin(len(rows), feed, self._inputs, rope, self._deeper)  # type: ignore[arg-type]
        if self.exchange is not None:
            self._tap.begin_sums(_shape(rows, is_fed=feed is not None, every_row_out=every_row_out))
        if self._tap.must_see or (self._quiet.is_on and len(rows) > 1):
            self._quiet.end()
        batch = self._batch.fill(rows, fed=feed is not None, every_row_out=every_row_out)
        if rows.look_ahead != self._looks_ahead:
            self._look_ahead(looks_ahead=rows.look_ahead)
        code = llama.llama_decode(self._context, batch)
        self._is_copying = False
        self._tap.check()
        if code == 1:
            raise EngineError(f"the context of {self._options.context} tokens is full")
        if code != 0:
            raise EngineError(f"llama.cpp failed to compute a step (code {code}): {why('it does not say why')}")
        self._tap.end()
        if self._is_recurrent:
            self._last_rows.computed(rows)
        if self._tap.is_scratch_full:
            llama.llama_synchronize(self._context)
            self._tap.give_back()
