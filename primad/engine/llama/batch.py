"""One ``llama_batch`` over numpy arrays."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from primad.engine.binding import llama
from primad.engine.protocol import Rows

POSITION_PARTS: Final = 4
"""Numbers that llama.cpp reads for the position of a hidden state: as many as the model's positions have parts, at most
these."""


class LlamaBatch:
    """One ``llama_batch`` over numpy arrays, refilled for each forward."""

    def __init__(self, rows: int, sequences: int) -> None:
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(POSITION_PARTS * rows, np.int32)
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
        """Return the batch holding ``rows``; valid until the next ``fill``. ``rows.content`` must stay alive meanwhile.

        With ``fed``, the content enters elsewhere, and the batch has a token 0 for each row instead.
        """
        count = len(rows)
        if count == 1:  # numpy takes several times as long for a list
            self._positions[0], self._logits[0] = rows.positions[0], every_row_out or rows.outputs[0]
        else:
            self._positions[:count] = rows.positions
            self._logits[:count] = True if every_row_out else rows.outputs
        for i, sequences in enumerate(rows.sequences):
            self._counts[i] = len(sequences)
            for place, sequence in enumerate(sequences):
                self._sequences[i, place] = sequence
        batch = self._batch
        batch.n_tokens = count
        if fed or rows.content.dtype == np.int32:
            self._tokens[:count] = 0 if fed else rows.content
            batch.token, batch.embd = self._tokens_at, None
        else:
            assert rows.content.dtype == np.float32
            assert rows.content.flags.c_contiguous
            batch.token = None
            if count == 1:
                self._positions[1:POSITION_PARTS] = rows.positions[0]
                batch.embd = self._row_of(rows.content)
            else:
                self._positions[: POSITION_PARTS * count].reshape(POSITION_PARTS, count)[:] = rows.positions
                batch.embd = self._floats(rows.content)
        return batch

    def _floats(self, content: NDArray[Any]) -> Any:
        return self._pointer(content, ctypes.c_float)

    def _row_of(self, content: NDArray[Any]) -> Any:
        """Copy one row to a buffer whose address is known: asking an array for its address takes longer."""
        if self._row is None or self._row.shape != content.shape:
            self._row = np.empty(content.shape, np.float32)
            self._row_at = self._floats(self._row)
        self._row[:] = content
        return self._row_at
