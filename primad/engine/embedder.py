"""A model loaded whole for embeddings, with llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from primad.engine.llama import LlamaVocabulary
from primad.errors import EngineError
from primad.system.allocator import without_top

with without_top("llama_cpp"):
    from llama_cpp import llama_cpp as llama

MOST_TOKENS: Final = 2048
"""Of a text: pooling needs all of it in one step."""


class Embedder:
    """Pools as the model file says, by the mean where it says nothing.

    Each text is computed alone: in one step with others its vector would differ from the third digit on. The weights are
    read into memory of this process and not mapped: so they are seen to be taken by whoever plans with the rest.
    """

    def __init__(self, path: str, *, threads: int) -> None:
        params = llama.llama_model_default_params()
        params.n_gpu_layers, params.load_mode = 0, llama.LLAMA_LOAD_MODE_NONE
        self._model = llama.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise EngineError(f"llama.cpp cannot load {path} for embeddings")
        self.most_tokens = min(MOST_TOKENS, int(llama.llama_model_n_ctx_train(self._model)))
        self.width = int(llama.llama_model_n_embd(self._model))
        self._vocabulary = LlamaVocabulary(Path(path))
        self._threads = threads
        self._context = self._open(llama.LLAMA_POOLING_TYPE_UNSPECIFIED)
        pooling = llama.llama_pooling_type(self._context)
        if pooling == llama.LLAMA_POOLING_TYPE_NONE:
            llama.llama_free(self._context)
            self._context = self._open(llama.LLAMA_POOLING_TYPE_MEAN)
        elif pooling == llama.LLAMA_POOLING_TYPE_RANK:
            raise EngineError(f"{path}: is a model that ranks and gives no embeddings; give another --embedding")
        self._batch: Any = llama.llama_batch_init(self.most_tokens, 0, 1)

    def _open(self, pooling: int) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self.most_tokens
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = self._threads
        params.embeddings = params.no_perf = True
        params.offload_kqv = params.op_offload = False  # a GPU is the ring's
        params.pooling_type = pooling
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED  # as stock llama-cpp-python: its vectors are ours
        context = llama.llama_init_from_model(self._model, params)
        if not context:
            raise EngineError(f"llama.cpp cannot open a context of {self.most_tokens} tokens for embeddings")
        return context

    def read(self, text: str | list[int], *, cuts: bool) -> list[int]:
        """The tokens of ``text``, as many as fit if it ``cuts``.

        Raises ``ValueError`` saying what is wrong with a text that is empty or too long, or a token that is none.
        """
        if not text:
            raise ValueError("is empty; there is nothing to embed")
        vocabulary = self._vocabulary
        tokens = vocabulary.tokenize(text, add_special=True, parse_special=False) if isinstance(text, str) else text
        if not tokens:
            raise ValueError("has no token; there is nothing to embed")
        if not 0 <= min(tokens) <= max(tokens) < vocabulary.size:
            raise ValueError(f"token ids go from 0 to {vocabulary.size - 1}")
        if len(tokens) <= self.most_tokens:
            return tokens
        if not cuts:
            raise ValueError(
                f"has {len(tokens)} tokens; the embedding model takes at most {self.most_tokens}; shorten it"
            )
        ends = 1 if isinstance(text, str) and vocabulary.adds_end else 0
        return tokens[: self.most_tokens - ends] + tokens[len(tokens) - ends :]

    def embed(self, tokens: list[int]) -> NDArray[np.float32]:
        """The vector of a text that was ``read``, of length 1."""
        memory = llama.llama_get_memory(self._context)
        if memory:  # encoders have none
            llama.llama_memory_clear(memory, True)
        batch = self._batch
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, row, 1
            batch.seq_id[row][0], batch.logits[row] = 0, True
        batch.n_tokens = len(tokens)
        code = llama.llama_decode(self._context, batch)
        if code != 0:
            raise EngineError(f"llama.cpp failed to compute an embedding (code {code})")
        pooled = llama.llama_get_embeddings_seq(self._context, 0)
        if not pooled:
            raise EngineError("llama.cpp gives no embedding; this model has none")
        vector = np.ctypeslib.as_array(pooled, shape=(self.width,)).astype(np.float32)
        length = np.float32(np.linalg.norm(vector))
        return vector / length if length > 0 else vector
