"""A model loaded whole for embeddings, with llama.cpp.

A generative model has an output matrix, and llama.cpp multiplies every token of a text by it before it pools: 2 GB for
2,048 tokens of Gemma, and 2 GB more for a copy, which nothing reads. So the graph of such a model is stopped at the
norm before, as ``llama`` stops that of a window, and pooling is done here. If its attention is causal, a text is also
computed in parts, for which less is copied.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from primad.engine.llama.tap import EVAL_CALLBACK, node_name
from primad.engine.vocabulary import LlamaVocabulary
from primad.errors import EngineError
from primad.system.allocator import without_top

with without_top("llama_cpp"):
    from llama_cpp import llama_cpp as llama

MAX_TOKENS: Final = 2048
"""Limit for a text: where llama.cpp pools, it needs the whole text in one step."""
PART_ROWS: Final = 128
"""Tokens in one step where pooling is done here."""
_NORM: Final = b"result_norm"
_LOGITS: Final = b"result_output"
_ROWS: Final = b"result_embd_pooled"
"""The norm's name where llama.cpp does not pool."""
_POOLINGS: Final = (llama.LLAMA_POOLING_TYPE_MEAN, llama.LLAMA_POOLING_TYPE_CLS, llama.LLAMA_POOLING_TYPE_LAST)


class _NormTap(dict[int, bool]):
    """The evaluation callback: records which nodes exist, and if ``stops``, stops a graph without pooling before its
    logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stops = self.has_norm = self.has_logits = False
        self._asked = False

    def __missing__(self, node: int) -> bool:
        name = node_name(node)
        self.has_norm |= name == _NORM
        self.has_logits |= name == _LOGITS
        if not self.stops or name != _ROWS:
            return False  # not cached: the next text's graph has its nodes elsewhere
        self._asked = not self._asked
        return self._asked


class Embedder:
    """Computes embeddings. Pooling is the model file's, or the mean where the file names none.

    Each text is computed alone: in one step with others its vector would differ from the third digit on. The weights
    are read into this process's memory and not mapped, so that planners see this memory as used.
    """

    def __init__(self, path: str, *, threads: int) -> None:
        params = llama.llama_model_default_params()
        params.n_gpu_layers, params.load_mode = 0, llama.LLAMA_LOAD_MODE_NONE
        self._model = llama.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise EngineError(f"llama.cpp cannot load {path} for embeddings")
        self.max_text_tokens = min(MAX_TOKENS, int(llama.llama_model_n_ctx_train(self._model)))
        self.width = int(llama.llama_model_n_embd(self._model))
        self._vocabulary = LlamaVocabulary(Path(path), self._model)
        longest = self._vocabulary.longest_chars
        self._max_chars = None if longest is None else self.max_text_tokens * longest
        """A longer text has too many tokens however it is tokenised."""
        self._threads = threads
        self._step_rows = self.max_text_tokens
        self._batch: Any = llama.llama_batch_init(self.max_text_tokens, 0, 1)
        self._tap = _NormTap()
        self._callback = EVAL_CALLBACK(self._tap.__getitem__)
        self._context = self._open(llama.LLAMA_POOLING_TYPE_UNSPECIFIED)
        self._pooling = llama.llama_pooling_type(self._context)
        if self._pooling == llama.LLAMA_POOLING_TYPE_RANK:
            raise EngineError(f"{path}: is a reranking model, which gives no embeddings; give another --embedding")
        if self._pooling == llama.LLAMA_POOLING_TYPE_NONE:
            self._reopen(llama.LLAMA_POOLING_TYPE_MEAN)
            self._pooling = llama.LLAMA_POOLING_TYPE_MEAN
        self.embed([0])
        if self._tap.has_norm and self._tap.has_logits and self._pooling in _POOLINGS:
            if self._is_causal():
                self._step_rows = min(PART_ROWS, self.max_text_tokens)
            self._reopen(llama.LLAMA_POOLING_TYPE_NONE)
            self._tap.stops = True

    def _is_causal(self) -> bool:
        return self._metadata(f"{self._metadata('general.architecture')}.attention.causal") != "false"

    def _metadata(self, key: str) -> str:
        value = ctypes.create_string_buffer(128)
        llama.llama_model_meta_val_str(self._model, key.encode(), value, len(value))
        return value.value.decode("utf-8", errors="replace")

    def _reopen(self, pooling: int) -> None:
        llama.llama_free(self._context)
        self._context = self._open(pooling)

    def _open(self, pooling: int) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx = self.max_text_tokens
        params.n_batch = params.n_ubatch = self._step_rows
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = self._threads
        params.embeddings = params.no_perf = True
        params.offload_kqv = params.op_offload = False  # GPUs belong to the ring
        params.pooling_type = pooling
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED  # for the same vectors as stock llama-cpp-python
        params.cb_eval = ctypes.cast(self._callback, type(params.cb_eval))
        context = llama.llama_init_from_model(self._model, params)
        if not context:
            raise EngineError(f"llama.cpp cannot open a context of {self.max_text_tokens} tokens for embeddings")
        return context

    def read(self, text: str | list[int], *, cuts: bool) -> list[int]:
        """Return the tokens of ``text``, cut to the maximum if ``cuts``.

        Raises ``ValueError`` with the reason for a text that is empty or too long, or an id that is not a token.
        """
        if not text:
            raise ValueError("is empty; there is nothing to embed")
        vocabulary, max_chars = self._vocabulary, self._max_chars
        if isinstance(text, str) and max_chars is not None and len(text) > max_chars:
            if not cuts:
                raise ValueError(_too_long(f"at least {self.max_text_tokens + 1}", self.max_text_tokens))
            text = text[: max_chars + 1]
        tokens = vocabulary.tokenize(text, add_special=True, parse_special=False) if isinstance(text, str) else text
        if not tokens:
            raise ValueError("has no token; there is nothing to embed")
        if not 0 <= min(tokens) <= max(tokens) < vocabulary.size:
            raise ValueError(f"token ids go from 0 to {vocabulary.size - 1}")
        if len(tokens) <= self.max_text_tokens:
            return tokens
        if not cuts:
            raise ValueError(_too_long(str(len(tokens)), self.max_text_tokens))
        ends = 1 if isinstance(text, str) and vocabulary.adds_end else 0
        return tokens[: self.max_text_tokens - ends] + tokens[len(tokens) - ends :]

    def embed(self, tokens: list[int]) -> NDArray[np.float32]:
        """Return the vector, of length 1, of a text that was ``read``."""
        memory = llama.llama_get_memory(self._context)
        if memory:  # encoders have none
            llama.llama_memory_clear(memory, True)
        steps = [
            self._compute(tokens[first : first + self._step_rows], first)
            for first in range(0, len(tokens), self._step_rows)
        ]
        vector = self._pooled(np.concatenate(steps))
        length = np.float32(np.linalg.norm(vector))
        return vector / length if length > 0 else vector

    def _compute(self, tokens: list[int], first: int) -> NDArray[np.float32]:
        """Return the hidden states of ``tokens``, at positions from ``first`` on; one row where llama.cpp pools."""
        batch, stops = self._batch, self._tap.stops
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, first + row, 1
            batch.seq_id[row][0], batch.logits[row] = 0, True
        batch.n_tokens = len(tokens)
        code = llama.llama_decode(self._context, batch)
        if code != 0:
            raise EngineError(f"llama.cpp failed to compute an embedding (code {code})")
        found = llama.llama_get_embeddings(self._context) if stops else llama.llama_get_embeddings_seq(self._context, 0)
        if not found:
            raise EngineError("llama.cpp gives no embedding; this model has none")
        return np.array(np.ctypeslib.as_array(found, shape=(len(tokens) if stops else 1, self.width)), np.float32)

    def _pooled(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._pooling == llama.LLAMA_POOLING_TYPE_MEAN:
            return np.asarray(rows.mean(axis=0), np.float32)
        return np.asarray(rows[-1 if self._pooling == llama.LLAMA_POOLING_TYPE_LAST else 0], np.float32)


def _too_long(tokens: str, maximum: int) -> str:
    return f"has {tokens} tokens and exceeds the available context size of {maximum}; shorten it"
