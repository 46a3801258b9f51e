"""The multi-token prediction (MTP) layers that a model file may have after the others. From a token and the state that
it was sampled from they predict the next token.

What llama.cpp requires, tried with 0.3.36 on tiny models:

- A model loaded with ``load_mtp`` takes a second context of type MTP, which needs no link to the first one. Its memory
  holds the cells of these layers only, the first context's those of all others, whose logits stay bit-identical.
- The first context keeps the states with ``llama_set_embeddings_nextn``: with ``masked``, of tokens with logits; else
  of all tokens, but then the last layer is computed differently, and the last bits of logits may differ. So that is for
  steps without logits: the KV cells of the last layer are the same, since only the part after its attention is skipped
  for the other tokens.
- An entry is token p and the state of token p - 1, at position p. A plain ``llama_batch`` with both ``token`` and
  ``embd`` holds them. When several tokens are drafted in sequence, the state that an entry leaves is used as that of
  token p.
- Positions begin anywhere. A later gap is refused (-1); ``llama_memory_seq_rm`` removes any number of entries.
- Tokens are looked up in ``token_embd.weight``, or in the layer's own table, so a tail window needs the real one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from primad.engine.binding import llama, nextn, why
from primad.engine.protocol import PREDICTOR_CELLS, EngineOptions, Hidden, LogitsRow
from primad.errors import EngineError

_PART_ROWS: Final = 64


class LlamaPredictor:
    """The context of the MTP layers of ``model``; from now on ``context``, of all other layers, keeps its states."""

    def __init__(self, model: Any, context: Any, params: Any, options: EngineOptions) -> None:
        self._context: Any = None
        if nextn is None:
            raise EngineError("this build of llama.cpp has no way to its layers for multi-token prediction")
        params.n_ctx = self.cells = min(PREDICTOR_CELLS, -(-options.context // 256) * 256)
        params.n_batch = params.n_ubatch = _PART_ROWS
        params.n_seq_max = params.n_outputs_max = params.n_outputs_max_per_seq = 1
        params.kv_unified = True
        params.n_rs_seq = 0
        params.cb_eval = type(params.cb_eval)()
        params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
        self._context = llama.llama_init_from_model(model, params)
        if not self._context:
            raise EngineError(f"llama.cpp cannot draft with this model's own layers: {why('it does not say why')}")
        self._of = context
        for each in (context, self._context):
            nextn.llama_set_embeddings_nextn(each, True, True)
        self._memory = llama.llama_get_memory(self._context)
        self._width = int(llama.llama_model_n_embd_out(model))
        self._vocabulary = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)))
        self._batch: Any = llama.llama_batch_init(_PART_ROWS, 0, 1)

    def state(self, row: int) -> Hidden:
        """Return the state (width,) of ``row`` of the last step, which has logits."""
        return self._state_of(self._of, row)

    def _state_of(self, context: Any, row: int) -> Hidden:
        assert nextn is not None
        pointer = nextn.llama_get_embeddings_nextn_ith(context, row)
        if not pointer:
            raise EngineError(f"row {row} of the last step left no state")
        return np.ctypeslib.as_array(pointer, (self._width,)).copy()

    def keep_all(self, *, keeps: bool) -> None:
        """Set whether the next steps, without output rows, keep the ``states`` of all rows."""
        assert nextn is not None
        nextn.llama_set_embeddings_nextn(self._of, True, not keeps)

    def states(self, rows: int) -> Hidden:
        """Return the states (rows, width) of the last step."""
        assert nextn is not None
        pointer = nextn.llama_get_embeddings_nextn(self._of)
        if not pointer:
            raise EngineError("the last step left no states")
        return np.ctypeslib.as_array(pointer, (rows, self._width)).copy()

    def read(self, tokens: Sequence[int], states: Sequence[Hidden] | Hidden, first: int) -> None:
        """Add ``tokens`` from position ``first`` on, each with the state from which it was sampled. Earlier content
        from ``first`` on is forgotten."""
        self._read(tokens, states, first, is_last=False)

    def _read(self, tokens: Sequence[int], states: Sequence[Hidden] | Hidden, first: int, *, is_last: bool) -> int:
        """Return the number of the last row in its batch, which gets logits if ``is_last``."""
        llama.llama_memory_seq_rm(self._memory, 0, first, -1)
        row = 0
        for begin in range(0, len(tokens), _PART_ROWS):
            part = slice(begin, begin + _PART_ROWS)
            is_end = is_last and part.stop >= len(tokens)
            row = self._compute(tokens[part], states[part], first + begin, is_last=is_end)
        return row

    def predict(self, tokens: Sequence[int], states: Sequence[Hidden] | Hidden, first: int) -> tuple[LogitsRow, Hidden]:
        """Do as ``read``, and return the logits (vocabulary,) after the last token, valid until the next call, and its
        state."""
        row = self._read(tokens, states, first, is_last=True)
        pointer = llama.llama_get_logits_ith(self._context, row)
        if not pointer:
            raise EngineError("llama.cpp drafted nothing with the model's own layers")
        return np.ctypeslib.as_array(pointer, (self._vocabulary,)), self._state_of(self._context, row)

    def _compute(self, tokens: Sequence[int], states: Sequence[Hidden] | Hidden, first: int, *, is_last: bool) -> int:
        """Compute one batch; return the number of its last row."""
        batch, content = self._batch, np.ascontiguousarray(states, np.float32)
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, first + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = is_last and row == len(tokens) - 1
        batch.embd = content.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        code = llama.llama_decode(self._context, batch)
        batch.embd = None  # llama.cpp must not free it
        if code != 0:
            raise EngineError(f"llama.cpp failed to draft with the model's own layers (code {code})")
        return len(tokens) - 1

    def release(self) -> None:
        """Free its memory, before that of its model."""
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)
