"""The states that layers have of a sequence at one position, kept beside it: what llama.cpp cannot cut back.

A recurrent layer's state goes on from row to row. To go back, the state of an earlier position is put back whole, and the
cells of layers that attend are cut there. So it is with the small cache of sliding windows (``sliding_cells.py``), which has
lost what it would need (``llama_state_seq_*_ext`` with ``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``).

Some architectures also leave the states behind the last rows of a step (``n_rs_seq``), so that these are taken back.
llama.cpp does not know how many rows the step had: further back, or behind all of them, it answers that it went back, and
what is computed from there on is wrong. A step of several sequences may move what others left, but for those states. So that
is for ``LastRows`` to know.
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

    Where sliding windows have a cache of their own, it has so many ``window_cells``.
    """

    def __init__(self, context: Any, window_cells: int | None = None) -> None:
        self._context, self._window_cells = context, window_cells
        self._memory = llama.llama_get_memory(context)
        self._held: dict[int, tuple[int, NDArray[np.uint8]]] = {}

    def keep(self, number: int, sequence: int, end: int) -> None:
        """Keep that of ``sequence``, which has ``end`` positions, as ``number``."""
        has = llama.llama_memory_seq_pos_max(self._memory, sequence) + 1
        if has != end:
            raise EngineError(f"sequence {sequence} has {has} positions; its state is to be kept behind {end}")
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
        """Put ``number`` back, which was kept of this ``sequence`` behind ``end`` positions; what is behind is forgotten.
        Where nothing is, since it was skipped, nothing need be kept."""
        if llama.llama_memory_seq_pos_max(self._memory, sequence) + 1 == end:
            return
        kept, held = self._held.get(number, (0, np.empty(0, np.uint8)))
        if kept != end:
            raise EngineError(f"state {number} behind {end} positions is not kept here")
        if self._window_cells is not None:
            held = placed(held, end, self._window_cells)
        took = llama.llama_state_seq_set_data_ext(self._context, _bytes_at(held), held.nbytes, sequence, _PARTIAL)
        if took != held.nbytes or not llama.llama_memory_seq_rm(self._memory, sequence, end, -1):
            raise EngineError(f"llama.cpp does not take back the state of sequence {sequence} that it gave")

    def drop(self, number: int) -> None:
        """Keep ``number`` no more."""
        del self._held[number]

    def forget(self) -> None:
        """Keep none any more."""
        self._held.clear()


class LastRows:
    """Which rows can be taken back, ``maximum`` at most: those of the last step of a sequence but for its first one, once,
    until there is a step of several other sequences."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._of: dict[int, range] = {}

    def computed(self, rows: Rows) -> None:
        """``rows`` are those of a step."""
        firsts = {
            sequence: rows.positions[row] for row, of in reversed([*enumerate(rows.sequences)]) for sequence in of
        }
        lasts = {sequence: rows.positions[row] for row, of in enumerate(rows.sequences) for sequence in of}
        if len(firsts) > 1:
            self._of.clear()
        self._of |= {sequence: range(first, lasts[sequence] + 1) for sequence, first in firsts.items()}

    def forget(self, sequence: int) -> None:
        """None of ``sequence`` can be taken back."""
        self._of.pop(sequence, None)

    def take_back(self, sequence: int, start: int, end: int) -> None:
        """Those of ``sequence`` from ``start`` to ``end`` are taken back. Raises ``EngineError`` where that cannot be."""
        last = self._of.pop(sequence, range(0))
        if not (last.start < start < last.stop == end and end - start <= self._maximum):
            raise EngineError(
                f"positions {start} to {end - 1} of sequence {sequence} cannot be taken back: layers have a state, and its "
                f"last step had {len(last)} rows that are known still; all but one can go, {self._maximum} at most"
            )


def _bytes_at(array: NDArray[np.uint8]) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
