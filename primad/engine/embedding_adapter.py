"""Adds a LoRA adapter's part to rows of the token embedding, computed by ggml as llama.cpp's graph does.

ggml computes the product, its scale and the sum for all tokens of the step together, so the result is bit-identical to
llama.cpp's. Rows of the adapter's first matrix, one for each token, are looked up in its file; the second matrix is in
memory.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from primad.engine.devices import CPU, bind_call, ggml_libraries
from primad.engine.llama.embedding import TokenRows
from primad.engine.llama.tap import ggml_base
from primad.engine.protocol import Hidden
from primad.errors import EngineError
from primad.gguf.adapter import Adapter

_F32: Final = 0
_ROOM_BYTES: Final = 1 << 20
"""Memory for a graph and its tensors, without the tensors' data."""


class _InitParams(ctypes.Structure):
    """``struct ggml_init_params`` (ggml.h)."""

    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Calls:
    """ggml's calls that make a graph and compute it."""

    def __init__(self, libraries: list[ctypes.CDLL]) -> None:
        pointer, extent, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
        self.init = bind_call(libraries, "ggml_init", pointer, _InitParams)
        self.free = bind_call(libraries, "ggml_free", None, pointer)
        self.matrix = bind_call(libraries, "ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, extent, extent)
        self.product = bind_call(libraries, "ggml_mul_mat", pointer, pointer, pointer, pointer)
        self.scaled = bind_call(libraries, "ggml_scale", pointer, pointer, pointer, ctypes.c_float)
        self.sum = bind_call(libraries, "ggml_add", pointer, pointer, pointer, pointer)
        self.graph = bind_call(libraries, "ggml_new_graph", pointer, pointer)
        self.expand = bind_call(libraries, "ggml_build_forward_expand", None, pointer, pointer)
        self.backend = bind_call(libraries, "ggml_backend_init_by_type", pointer, ctypes.c_int, ctypes.c_char_p)
        self.backend_free = bind_call(libraries, "ggml_backend_free", None, pointer)
        self.allocate = bind_call(libraries, "ggml_backend_alloc_ctx_tensors", pointer, pointer, pointer)
        self.buffer_free = bind_call(libraries, "ggml_backend_buffer_free", None, pointer)
        self.compute = bind_call(libraries, "ggml_backend_graph_compute", ctypes.c_int, pointer, pointer)
        self.set = bind_call(libraries, "ggml_backend_tensor_set", None, pointer, pointer, size, size)
        self.get = bind_call(libraries, "ggml_backend_tensor_get", None, pointer, pointer, size, size)


class _Memory:
    """A ggml context with its own buffer for the tensors. Its owner frees it."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self.context: Any = calls.init(_InitParams(_ROOM_BYTES, None, True))
        self._buffer: Any = None

    def fill(self, backend: Any) -> None:
        """Allocate all tensors of the context. Raises ``EngineError``."""
        self._buffer = self._calls.allocate(self.context, backend)
        if not self._buffer:
            raise EngineError("ggml has no memory for an adapter of the token embedding")

    def free(self) -> None:
        if self._buffer:
            self._calls.buffer_free(self._buffer)
        self._calls.free(self.context)


class EmbeddingAdapter:
    """The part of ``adapter`` that changes the token embedding. Raises ``EngineError`` if ggml cannot compute it."""

    def __init__(self, adapter: Adapter) -> None:
        assert adapter.embedding is not None
        a, b = adapter.embedding
        self._calls = _Calls(ggml_libraries())
        self._tokens = TokenRows(a)
        self._rank, self._width = b.shape
        own, rank = np.float32(adapter.scale), np.float32(self._rank)
        self._scale = float(own * np.float32(adapter.alpha) / rank if adapter.alpha else own)
        self._backend = self._calls.backend(CPU, None)
        if not self._backend:
            raise EngineError("llama.cpp has no backend for the CPU")
        weakref.finalize(self, self._calls.backend_free, self._backend)
        held = _Memory(self._calls)
        weakref.finalize(self, held.free)
        self._matrix = self._calls.matrix(held.context, int(b.type), *b.shape)
        held.fill(self._backend)
        with b.path.open("rb") as file:
            file.seek(b.offset)
            weights = file.read(b.bytes)
        if len(weights) != ggml_base.ggml_nbytes(self._matrix):
            raise EngineError(f"{b.path}: became shorter while it was read; fetch the adapter again")
        self._calls.set(self._matrix, weights, 0, len(weights))

    def add(self, hidden: Hidden, tokens: NDArray[np.int32]) -> None:
        """Add the adapter's part for ``tokens`` to ``hidden`` (rows, width)."""
        calls, count = self._calls, len(tokens)
        looked_up = self._tokens.rows(tokens)
        memory = _Memory(calls)
        try:
            rows = calls.matrix(memory.context, _F32, self._rank, count)
            before = calls.matrix(memory.context, _F32, self._width, count)
            product = calls.product(memory.context, self._matrix, rows)
            after = calls.sum(memory.context, before, calls.scaled(memory.context, product, self._scale))
            graph = calls.graph(memory.context)
            calls.expand(graph, after)
            memory.fill(self._backend)
            calls.set(rows, looked_up.ctypes.data, 0, looked_up.nbytes)
            calls.set(before, hidden.ctypes.data, 0, hidden.nbytes)
            if calls.compute(self._backend, graph) != 0:
                raise EngineError("ggml could not compute an adapter of the token embedding")
            calls.get(after, hidden.ctypes.data, 0, hidden.nbytes)
        finally:
            memory.free()
