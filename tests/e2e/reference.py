"""Plain llama.cpp on the whole model through its C API, the reference for every ring. Contains nothing of primad."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

CONTEXT = 2048
THREADS = 1
TOP = 20


def splitmix64(seed: int, index: int) -> int:
    """Return number ``index`` of the stream of ``seed``, by the published algorithm."""
    state, mask = seed, 2**64 - 1
    for _ in range(index + 1):
        state = (state + 0x9E3779B97F4A7C15) & mask
    mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens after a prompt, and the logits (tokens, vocabulary) from which each was sampled."""

    tokens: list[int]
    logits: NDArray[np.float32]

    @cached_property
    def _normalisers(self) -> list[float]:
        return [float(np.logaddexp.reduce(row.astype(np.float64))) for row in self.logits]

    def logprob(self, step: int, token: int) -> float:
        """Return the log-probability of ``token`` at ``step``."""
        return float(self.logits[step, token]) - self._normalisers[step]

    @cached_property
    def best(self) -> NDArray[np.int64]:
        """The ``TOP`` most likely tokens of each step (tokens, TOP), best first."""
        found = np.argpartition(-self.logits, TOP, axis=1)[:, :TOP]
        order = np.argsort(-np.take_along_axis(self.logits, found, 1), axis=1, kind="stable")
        return np.take_along_axis(found, order, 1)


class Plain:
    """The whole model in one context with the settings of ring processes; prefill takes ``chunk`` tokens per step.

    ``flash`` leaves flash attention to llama.cpp; otherwise it is off. ``adapters`` are files and scales; ``context``
    are further parameters of the context.
    """

    def __init__(
        self,
        path: Path,
        *,
        chunk: int = 512,
        extra_buffers: bool = False,
        flash: bool = True,
        adapters: Sequence[tuple[Path, float]] = (),
        **context: Any,
    ) -> None:
        self._chunk = chunk
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = extra_buffers
        self._model = llama.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, path
        loaded = [llama.llama_adapter_lora_init(self._model, str(file).encode()) for file, _ in adapters]
        settings = llama.llama_context_default_params()
        settings.n_ctx = CONTEXT
        settings.n_batch = settings.n_ubatch = chunk
        settings.n_seq_max = 1
        settings.n_threads = settings.n_threads_batch = THREADS
        settings.kv_unified = True
        for name, value in context.items():
            setattr(settings, name, value)
        if not flash:
            settings.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama.llama_init_from_model(self._model, settings)
        assert self._context, path
        if adapters:
            handles = (ctypes.POINTER(ctypes.c_void_p) * len(loaded))(*loaded)
            scales = (ctypes.c_float * len(loaded))(*(scale for _, scale in adapters))
            llama.llama_set_adapters_lora(self._context, handles, len(loaded), scales)
        self._vocab = llama.llama_model_get_vocab(self._model)
        self.vocabulary = int(llama.llama_vocab_n_tokens(self._vocab))

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of ``text`` with the special tokens that the model expects."""
        data = text.encode()
        tokens = (llama.llama_token * (len(data) + 16))()
        count = llama.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), True, True)
        assert count > 0
        return list(tokens[:count])

    def is_end(self, token: int) -> bool:
        """Whether ``token`` ends a completion."""
        return bool(llama.llama_vocab_is_eog(self._vocab, token))

    def continue_(self, prompt: list[int], count: int) -> Continuation:
        """Return ``count`` greedy tokens after ``prompt``; fewer if the model ends the text."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        for start in range(0, len(prompt), self._chunk):
            self._decode(prompt[start : start + self._chunk], start)
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

    def sample(
        self,
        prompt: list[int],
        count: int,
        *,
        seed: int,
        temperature: float,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        penalty_tokens: int = 0,
        **more: Any,
    ) -> list[int]:
        """Sample ``count`` tokens after ``prompt`` with llama.cpp's samplers; fewer if the model ends the text.

        Neutral samplers stay in the chain. Random samplers are seeded again for each token i, with the upper 32 bits of
        number i of splitmix64's stream of ``seed``.
        """
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        for start in range(0, len(prompt), self._chunk):
            self._decode(prompt[start : start + self._chunk], start)
        xtc = more.get("xtc_probability", 0.0)
        keeping = [
            llama.llama_sampler_init_penalties(self.vocabulary, penalty_tokens, repeat_penalty, 0.0, 0.0),
            self._dry(**{name: value for name, value in more.items() if name.startswith("dry_")}),
            llama.llama_sampler_init_top_n_sigma(more.get("top_n_sigma", -1.0)),
            llama.llama_sampler_init_top_k(top_k),
            llama.llama_sampler_init_typical(more.get("typical_p", 1.0), 1),
            llama.llama_sampler_init_top_p(top_p, 1),
            llama.llama_sampler_init_min_p(min_p, 1),
        ]
        spread = more.get("temperature_range", 0.0), more.get("temperature_exponent", 1.0)
        for token in prompt:
            for sampler in keeping[:2]:
                llama.llama_sampler_accept(sampler, token)
        tokens: list[int] = []
        while len(tokens) < count:
            once = splitmix64(seed, len(tokens)) >> 32
            drawing = [
                llama.llama_sampler_init_xtc(
                    xtc, more.get("xtc_threshold", 0.1), 1, splitmix64(once, len(tokens)) >> 32
                ),
                llama.llama_sampler_init_temp_ext(temperature, *spread),
            ]
            token = self._sampled([*keeping, *drawing], once)
            for sampler in drawing:
                llama.llama_sampler_free(sampler)
            if self.is_end(token):
                break
            tokens.append(token)
            for sampler in keeping[:2]:
                llama.llama_sampler_accept(sampler, token)
            if len(tokens) < count:
                self._decode([token], len(prompt) + len(tokens) - 1)
        for sampler in keeping:
            llama.llama_sampler_free(sampler)
        return tokens

    def _dry(
        self,
        *,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_tokens: int = 0,
        dry_breakers: tuple[str, ...] = (),
    ) -> Any:
        breakers = (ctypes.c_char_p * len(dry_breakers))(*(text.encode() for text in dry_breakers))
        return llama.llama_sampler_init_dry(
            self._vocab, dry_multiplier, dry_base, dry_allowed_length, dry_tokens, breakers, len(dry_breakers)
        )

    def _sampled(self, shaping: list[Any], seed: int) -> int:
        """Sample a token from the latest logits, after the samplers ``shaping``, with ``seed``."""
        logits = self._logits()
        entries = (llama.llama_token_data * self.vocabulary)()
        view = np.ctypeslib.as_array(entries)
        view["id"], view["logit"] = np.arange(self.vocabulary), logits
        candidates = llama.llama_token_data_array(entries, self.vocabulary, -1, False)
        last = llama.llama_sampler_init_dist(seed)
        for sampler in (*shaping, last):
            llama.llama_sampler_apply(sampler, ctypes.byref(candidates))
        llama.llama_sampler_free(last)
        return int(candidates.data[candidates.selected].id)

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
        """Free its memory."""
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)
