"""Looks up the first hidden states in the model file itself."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from primad.engine.layer_inputs import LayerTable
from primad.engine.llama.tap import ggml_base
from primad.engine.protocol import Hidden, Rows, Tokens
from primad.engine.streaming.units import is_still_whole
from primad.errors import EngineError, WeightsError
from primad.gguf.architectures.layers import layer_inputs
from primad.gguf.architectures.table import known
from primad.gguf.architectures.tensors import LAYER_INPUTS, embedding_scale
from primad.gguf.constants import GGMLQuantizationType
from primad.gguf.header import Header, TensorInfo
from primad.gguf.windows import position_embedding, sent_layers, token_embedding

_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class TokenRows:
    """A matrix of a file with a row for each token or position, whose rows are looked up."""

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
        """Return rows (rows, width) of ``tokens``, as llama.cpp looks them up.

        Raises ``WeightsError`` if the file was written to.
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
        """Check the file: reading one that was cut short would crash the process, an overwritten one would change
        results."""
        status = os.fstat(self._file)
        if status.st_mtime_ns != self._changed_ns and is_still_whole(str(self._path)):
            self._changed_ns = status.st_mtime_ns  # a layer file's header, for another window
        if status.st_size < self._end or status.st_mtime_ns != self._changed_ns:
            raise WeightsError(f"{self._path}: the model file was modified while it was used", str(self._path))


class ChangesRows(Protocol):
    """Changes rows that were looked up in the token embedding."""

    def add(self, hidden: Hidden, tokens: NDArray[np.int32]) -> None:
        """Add its part for ``tokens`` to ``hidden`` (rows, width)."""


class TokenEmbedding:
    """Looks up the first hidden states in the model file itself; ``adapters`` change them in order.

    If the model has position embeddings, a row of ``positions`` is added to each. ``layers`` is the table of per-layer
    inputs. With ``scales_tokens_alone``, a picture's rows are not multiplied by ``scale``.
    """

    def __init__(
        self,
        tensor: TensorInfo,
        scale: float,
        adapters: Sequence[ChangesRows] = (),
        positions: TensorInfo | None = None,
        layers: LayerTable | None = None,
        *,
        scales_tokens_alone: bool = False,
    ) -> None:
        self.layers = layers
        self._picture_scale = np.float32(1 if scales_tokens_alone else scale)
        self.width = tensor.shape[0]
        self._scale = np.float32(scale)
        self._table = TokenRows(tensor)
        self._adapters = adapters
        self._positions = None if positions is None else TokenRows(positions)

    @classmethod
    def of(cls, header: Header, table: Header | None = None, adapters: Sequence[ChangesRows] = ()) -> TokenEmbedding:
        """Return the embedding of the model of ``header``; its tensors may be in the file of ``table``."""
        file = header if table is None else table
        layers = None
        if each := layer_inputs(header):
            inputs = file.tensors[LAYER_INPUTS]
            layers = LayerTable(TokenRows(inputs).rows, each, sent_layers(header), inputs.shape[1])
        positions = position_embedding(header, file)
        architecture = known(header)
        return cls(
            token_embedding(file),
            embedding_scale(header),
            adapters,
            positions,
            layers,
            scales_tokens_alone=architecture is not None and architecture.scales_tokens_alone,
        )

    def first(self, rows: Rows) -> Hidden:
        """Return the first window's input for tokens or a picture's rows: hidden states, with per-layer inputs if
        any."""
        if rows.content.dtype == np.float32:
            hidden = self.of_picture(rows.content)  # type: ignore[arg-type]
            return hidden if self.layers is None else self.layers.of_picture(hidden)
        tokens: Tokens = rows.content  # type: ignore[assignment]
        hidden = self.rows(tokens, rows.positions)
        return hidden if self.layers is None else self.layers.joined(hidden, tokens)

    def of_picture(self, rows: Hidden) -> Hidden:
        """Return hidden states of a picture's ``rows``, as llama.cpp computes them from embeddings."""
        return rows if self._picture_scale == 1 else rows * self._picture_scale

    def rows(self, tokens: NDArray[np.int32], positions: Sequence[int]) -> Hidden:
        """Return hidden states (rows, width) of ``tokens`` at ``positions``, as llama.cpp computes them from token
        input.

        Raises ``WeightsError`` if the file was written to, ``EngineError`` for a position beyond the model's.
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
