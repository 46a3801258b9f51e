"""Keeps states of a sequence at some positions, for layers whose memory llama.cpp cannot cut back.

A recurrent layer's state changes with each token. To go back, the whole state of an earlier position is restored, and
the cells of attention layers are cut there. The same holds for the small cache of sliding windows
(``sliding_cells.py``), which has overwritten what it would need (``llama_state_seq_*_ext`` with
``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``).

For some architectures llama.cpp also keeps the states after the last tokens of a step (``n_rs_seq``), so that these can
be taken back. It does not know how many tokens the step had: asked to go further back, or past all of them, it reports
success, and what it computes from there on is wrong. A step with several sequences may move the kept states of others.
So ``LastRows`` keeps track of what can be taken back.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primad.engine.binding import llama
from primad.engine.llama.sliding_cells import placed
from primad.engine.protocol import Rows
from primad.errors import EngineError

_PARTIAL = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class SequenceStates:
    """States of sequences of ``context``, by number.

    If sliding windows have a separate cache, it has ``window_cells`` cells.
    """

    def __init__(self, context: Any, window_cells: int | None = None) -> None:
        self._context, self._window_cells = context, window_cells
        self._memory = llama.llama_get_memory(context)
        self._held: dict[int, tuple[int, NDArray[np.uint8]]] = {}

    def keep(self, number: int, sequence: int, end: int) -> None:
        """Keep the state of ``sequence``, which has ``end`` positions, as ``number``."""
        has = llama.llama_memory_seq_pos_max(self._memory, sequence) + 1
        if has != end:
            raise EngineError(f"sequence {sequence} has {has} positions; its state is to be kept after {end}")
        size = llama.llama_state_seq_get_size_ext(self._context, sequence, _PARTIAL)
        _, held = self._held.pop(number, (0, np.empty(0, np.uint8)))
        if held.nbytes != size:
            try:
                held = np.empty(size, np.uint8)
            except MemoryError as exc:
                raise EngineError(f"there is no memory for a state of {size / 1e6:,.0f} MB") from exc
        if llama.llama_state_seq_get_data_ext(self._context, _bytes_at(held), size, sequence, _PARTIAL) != size:
            raise EngineError(f"llama.cpp does not give the state of sequence {sequence}")
        self._held[number] = end, held

    def restore(self, number: int, sequence: int, end: int) -> None:
        """Restore state ``number``, kept of this ``sequence`` after ``end`` positions; later positions are forgotten.

        Without later positions, as after a skipped step, there is nothing to restore and the state need not exist.
        """
        if llama.llama_memory_seq_pos_max(self._memory, sequence) + 1 == end:
            return
        kept, held = self._held.get(number, (0, np.empty(0, np.uint8)))
        if kept != end:
            raise EngineError(f"state {number} after {end} positions is not kept here")
        if self._window_cells is not None:
            held = placed(held, end, self._window_cells)
        took = llama.llama_state_seq_set_data_ext(self._context, _bytes_at(held), held.nbytes, sequence, _PARTIAL)
        if took != held.nbytes or not llama.llama_memory_seq_rm(self._memory, sequence, end, -1):
            raise EngineError(f"llama.cpp does not take back the state of sequence {sequence} that it gave")

    def drop(self, number: int) -> None:
        """Drop state ``number``."""
        del self._held[number]

    def forget(self) -> None:
        """Drop all states."""
        self._held.clear()


class LastRows:
    """Which tokens can be taken back, at most ``maximum``: all but the first of a sequence's last step, once, until a
    step with several sequences comes."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._of: dict[int, range] = {}

    def computed(self, rows: Rows) -> None:
        """Record the tokens of a step."""
        firsts = {
            sequence: rows.positions[row] for row, of in reversed([*enumerate(rows.sequences)]) for sequence in of
        }
        lasts = {sequence: rows.positions[row] for row, of in enumerate(rows.sequences) for sequence in of}
        if len(firsts) > 1:
            self._of.clear()
        self._of |= {sequence: range(first, lasts[sequence] + 1) for sequence, first in firsts.items()}

    def forget(self, sequence: int) -> None:
        """Allow no token of ``sequence`` to be taken back."""
        self._of.pop(sequence, None)

    def take_back(self, sequence: int, start: int, end: int) -> None:
        """Take back positions ``start`` to ``end`` of ``sequence``. Raises ``EngineError`` if that is impossible."""
        last = self._of.pop(sequence, range(0))
        if not (last.start < start < last.stop == end and end - start <= self._maximum):
            raise EngineError(
                f"positions {start} to {end - 1} of sequence {sequence} cannot be taken back: layers have a state, and its "
                f"last step had {len(last)} tokens that are still known; all but one can go, {self._maximum} at most"
            )


def _bytes_at(array: NDArray[np.uint8]) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
