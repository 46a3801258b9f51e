"""Plain llama.cpp on the whole model through its C API: what every ring is compared with. Nothing of primad is in here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

CHUNK = 512
"""Rows of a prefill step, as in the ring."""
CONTEXT = 2048
THREADS = 1
TOP = 20


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens after a prompt, and the logits (tokens, vocabulary) that each was taken from."""

    tokens: list[int]
    logits: NDArray[np.float32]

    @cached_property
    def _normalisers(self) -> list[float]:
        return [float(np.logaddexp.reduce(row.astype(np.float64))) for row in self.logits]

    def logprob(self, step: int, token: int) -> float:
        """Log-probability of ``token`` where token ``step`` was drawn."""
        return float(self.logits[step, token]) - self._normalisers[step]

    @cached_property
    def best(self) -> NDArray[np.int64]:
        """The ``TOP`` most likely tokens of each step (tokens, TOP), best first."""
        found = np.argpartition(-self.logits, TOP, axis=1)[:, :TOP]
        order = np.argsort(-np.take_along_axis(self.logits, found, 1), axis=1, kind="stable")
        return np.take_along_axis(found, order, 1)


class Plain:
    """The whole model in one context with the settings that ring processes use."""

    def __init__(self, path: Path, *, extra_buffers: bool = False) -> None:
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = extra_buffers
        self._model = llama.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, path
        settings = llama.llama_context_default_params()
        settings.n_ctx = CONTEXT
        settings.n_batch = settings.n_ubatch = CHUNK
        settings.n_seq_max = 1
        settings.n_threads = settings.n_threads_batch = THREADS
        settings.kv_unified = True
        self._context = llama.llama_init_from_model(self._model, settings)
        assert self._context, path
        self._vocab = llama.llama_model_get_vocab(self._model)
        self.vocabulary = int(llama.llama_vocab_n_tokens(self._vocab))

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text`` with what the model wants in front of it."""
        data = text.encode()
        tokens = (llama.llama_token * (len(data) + 16))()
        count = llama.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), True, True)
        assert count > 0
        return list(tokens[:count])

    def is_end(self, token: int) -> bool:
        """Whether ``token`` ends an answer."""
        return bool(llama.llama_vocab_is_eog(self._vocab, token))

    def continue_(self, prompt: list[int], count: int) -> Continuation:
        """The ``count`` most likely tokens after ``prompt``, one after another; fewer where the model ends."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        for start in range(0, len(prompt), CHUNK):
            self._decode(prompt[start : start + CHUNK], start)
        tokens: list[int] = []
        logits = [self._logits()]
        while True:
            token = int(logits[-1].argmax())
            if self.is_end(token):
                break
            tokens.append(token)
            if len(tokens) == count:
                break
            self._decode([token], len(prompt) + len(tokens) - 1)
            logits.append(self._logits())
        return Continuation(tokens, np.array(logits))

    def _decode(self, tokens: list[int], position: int) -> None:
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i == len(tokens) - 1
        code = llama.llama_decode(self._context, batch)
        llama.llama_batch_free(batch)
        assert code == 0, code

    def _logits(self) -> NDArray[np.float32]:
        pointer = llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, shape=(self.vocabulary,)).copy()

    def release(self) -> None:
        """Give back its memory."""
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)
