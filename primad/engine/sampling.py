"""Samples tokens with llama.cpp's samplers, in the order in which its own programs use them.

Bias, penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature, sampling; with mirostat: bias,
temperature, mirostat. Where only some tokens are allowed, the samplers see only those.

Random samplers (XTC, mirostat and the last one) are created for each token with its own seed (``sampling_seed``), so
the token depends on the text before it and not on state of a ring process. Only mirostat has a state, ``mu``: the bound
on the next token's surprise, which follows from the probabilities of all tokens before. llama.cpp neither exposes nor
accepts it, but starts with twice the ``tau`` of its creation. So each token's sampler is created with half of ``mu``,
and ``mu`` is updated here, by the same rule; whichever process continues a completion gets it with the tokens.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from primad.engine.masks import Allowed, Candidates, Words, likeliest
from primad.engine.protocol import MIN_TEMPERATURE, LogitsRow, Sampling, sampling_seed
from primad.errors import EngineError
from primad.system.allocator import without_top

with without_top("llama_cpp"):
    from llama_cpp import llama_cpp as llama

MIROSTAT_WINDOW: Final = 100
"""Tokens from which mirostat 1 estimates the distribution's shape; llama.cpp's programs use this number."""
_PEEKED: Final = 1024
"""Number of likely tokens that are sorted for a draft."""
_MIN_P: Final = 1e-30
_BIAS: Final = np.dtype([("token", "<i4"), ("bias", "<f4")])
"""As ``packed_biases`` packs them."""
_ENTRY: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class HasLogits(Protocol):
    """A source of logits."""

    def logits(self, row: int) -> LogitsRow:
        """Logits (vocabulary,) of row ``row``."""


class GreedySampler:
    """The most likely token; the first of equals, as llama.cpp's greedy sampler takes it."""

    mirostat_mu: Final = None

    def __init__(self, window: HasLogits, allowed: Allowed | None = None) -> None:
        self._window = window
        self._allowed = allowed

    def is_ready(self, wait_s: float) -> bool:
        return self._allowed is None or self._allowed.is_ready(wait_s)

    def sample(self, row: int, kept: LogitsRow | None = None) -> int:
        allowed = self._allowed.next() if self._allowed is not None else None
        token = likeliest(self._window.logits(row) if kept is None else kept, allowed)
        if self._allowed is not None:
            self._allowed.took(token)
        return token

    def peek(self, logits: LogitsRow, index: int) -> None:
        """Return None: the most likely token is the best draft."""

    def release(self) -> None:
        """Free the grammar."""
        if self._allowed is not None:
            self._allowed.release()


class DryBase:
    """A DRY sampler without a text, copied for each completion; freed with its last reference."""

    def __init__(self, handle: Any) -> None:
        if not handle:
            raise EngineError("llama.cpp refused DRY; check its parameters")
        self.handle: Final = handle
        weakref.finalize(self, llama.llama_sampler_free, handle)


class DrySamplers:
    """DRY samplers of one window. llama.cpp searches the vocabulary for each breaker, which may take a second.

    So that runs in a thread, during prefill, and once for all choices of a request.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dry")
        self._last: tuple[Any, ...] = ()
        self._base: Future[DryBase] | None = None

    def begin(self, sampling: Sampling) -> Future[DryBase]:
        """Start to build the sampler of ``sampling``, unless the last one was the same."""
        breakers = tuple(dict.fromkeys(sampling.dry_breakers))
        wanted = (
            sampling.dry_multiplier,
            sampling.dry_base,
            sampling.dry_allowed_length,
            sampling.dry_tokens,
            breakers,
        )
        if self._base is None or wanted != self._last:
            self._last, self._base = wanted, self._thread.submit(self._make, *wanted)
        return self._base

    def _make(self, multiplier: float, base: float, length: int, tokens: int, breakers: tuple[str, ...]) -> DryBase:
        texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
        handle = self._words.tokens().handle
        return DryBase(llama.llama_sampler_init_dry(handle, multiplier, base, length, tokens, texts, len(breakers)))

    def release(self) -> None:
        """End the thread, before the vocabulary is freed."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._base = None


class ChainSampler:
    """llama.cpp's sampler chain over the logits of ``window``, which are in ``context`` or elsewhere.

    No sampler looks further back than ``context_tokens``: llama.cpp allocates memory for all tokens that it may look
    at.
    """

    def __init__(
        self,
        context: Any,
        window: HasLogits,
        dry: DrySamplers,
        sampling: Sampling,
        prompt: Sequence[int],
        sampled: Sequence[int],
        allowed: Allowed,
        *,
        context_tokens: int,
    ) -> None:
        self._context, self._window, self._allowed = context, window, allowed
        self._sampling = sampling = msgspec.structs.replace(
            sampling,
            penalty_tokens=min(sampling.penalty_tokens, context_tokens),
            dry_tokens=min(sampling.dry_tokens, context_tokens),
        )
        self._sampled = len(sampled)
        self._vocabulary = allowed.vocabulary
        self._biases = np.frombuffer(sampling.logit_bias, _BIAS)
        self._is_biased_here = allowed.leaves_out and bool(sampling.logit_bias)
        """llama.cpp searches all biases for each token that it sees, unless it sees all tokens in order: with a grammar
        and 25,000 biases each token took the ring 0.3 s."""
        self._mu = 2 * sampling.mirostat_tau if sampling.mirostat_mu is None else sampling.mirostat_mu
        known = [*prompt, *sampled]
        reach = max(
            sampling.penalty_tokens if sampling.penalises else 0, sampling.dry_tokens if sampling.breaks_loops else 0
        )
        self._known = known[max(0, len(known) - reach) :]
        self._dry = dry.begin(sampling) if sampling.breaks_loops and not self._is_mirostat else None
        self._chain: Any = None

    def _begin(self) -> None:
        """Create the samplers that stay from token to token. Runs at the first token, when all their inputs are
        ready."""
        self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for sampler in self._shaping(self._vocabulary):
            self._add(sampler)
        self._kept = llama.llama_sampler_chain_n(self._chain)
        for token in self._known:
            llama.llama_sampler_accept(self._chain, token)
        self._known = []

    def _add(self, sampler: Any) -> None:
        if not sampler:
            raise EngineError("llama.cpp refused a sampler; check the sampling parameters")
        llama.llama_sampler_chain_add(self._chain, sampler)

    def _shaping(self, vocabulary: int) -> Iterable[Any]:
        """Yield the samplers that stay from token to token."""
        sampling = self._sampling
        if sampling.logit_bias and not self._is_biased_here:
            biases = ctypes.cast(self._biases.ctypes.data, ctypes.POINTER(llama.llama_logit_bias))
            yield llama.llama_sampler_init_logit_bias(vocabulary, len(self._biases), biases)
        if self._is_mirostat:
            yield self._temperature()
            return
        if sampling.penalises:
            yield llama.llama_sampler_init_penalties(
                vocabulary,
                sampling.penalty_tokens,
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        if self._dry is not None:
            yield llama.llama_sampler_clone(self._dry.result().handle)
            self._dry = None
        if sampling.is_greedy:
            yield llama.llama_sampler_init_greedy()
            return
        if sampling.top_n_sigma > 0:
            yield llama.llama_sampler_init_top_n_sigma(sampling.top_n_sigma)
        if sampling.top_k > 0:
            yield llama.llama_sampler_init_top_k(sampling.top_k)
        if sampling.typical_p < 1:
            yield llama.llama_sampler_init_typical(sampling.typical_p, 1)
        if sampling.top_p < 1:
            yield llama.llama_sampler_init_top_p(sampling.top_p, 1)
        if sampling.min_p > 0:
            yield llama.llama_sampler_init_min_p(sampling.min_p, 1)

    def _drawing(self, index: int) -> Iterable[Any]:
        """Yield the samplers that are created for token ``index`` of the completion."""
        sampling = self._sampling
        if sampling.is_greedy:
            return
        seed = sampling_seed(sampling.seed, index)
        if sampling.mirostat:
            yield self._mirostat(seed)
            return
        if sampling.xtc_probability > 0:
            yield llama.llama_sampler_init_xtc(
                sampling.xtc_probability, sampling.xtc_threshold, 1, sampling_seed(seed, index)
            )
        yield self._temperature()
        yield llama.llama_sampler_init_dist(seed)

    def _temperature(self) -> Any:
        sampling = self._sampling
        spread = min(sampling.temperature_range, sampling.temperature - MIN_TEMPERATURE)
        return llama.llama_sampler_init_temp_ext(sampling.temperature, spread, sampling.temperature_exponent)

    def _mirostat(self, seed: int) -> Any:
        if self._sampling.mirostat == 1:
            return llama.llama_sampler_init_mirostat(self._vocabulary, seed, self._mu / 2, 0.0, MIROSTAT_WINDOW)
        return llama.llama_sampler_init_mirostat_v2(seed, self._mu / 2, 0.0)

    @property
    def _is_mirostat(self) -> bool:
        return bool(self._sampling.mirostat) and not self._sampling.is_greedy

    @property
    def mirostat_mu(self) -> float | None:
        """Mirostat's state after the last token."""
        return self._mu if self._is_mirostat else None

    def is_ready(self, wait_s: float) -> bool:
        return (self._dry is None or self._dry.done()) and self._allowed.is_ready(wait_s)

    def sample(self, row: int, kept: LogitsRow | None = None) -> int:
        allowed = self._allowed.next()
        candidates = None if allowed is None else allowed.ids
        if self._chain is None:
            self._begin()
        self._draw_at(self._sampled)
        self._sampled += 1
        is_here = kept is None and self._context is not None
        if candidates is None and (self._is_mirostat or self._is_biased_here or not is_here):
            candidates = np.arange(self._vocabulary)
        if candidates is None:
            token = int(llama.llama_sampler_sample(self._chain, self._context, row))
        else:
            token = self._choose(candidates, self._window.logits(row) if kept is None else kept)
        self._allowed.took(token)
        return token

    def _draw_at(self, index: int) -> None:
        """Set up the chain to sample token ``index``."""
        while (count := llama.llama_sampler_chain_n(self._chain)) > self._kept:
            llama.llama_sampler_free(llama.llama_sampler_chain_remove(self._chain, count - 1))
        for sampler in self._drawing(index):
            self._add(sampler)

    def peek(self, logits: LogitsRow, index: int) -> int | None:
        if self._chain is None or self._sampling.is_greedy or self._is_mirostat or self._allowed.has_grammar:
            return None
        allowed = self._allowed.next()
        candidates = np.arange(self._vocabulary) if allowed is None else allowed.ids
        if self._sorts and len(candidates) > _PEEKED:
            candidates = candidates[np.argpartition(logits[candidates], -_PEEKED)[-_PEEKED:]]
        self._draw_at(index)
        return int(self._drawn(candidates, logits).id)

    @property
    def _sorts(self) -> bool:
        """Whether the chain sorts all tokens that it sees: 10 ms for 150,000."""
        return self._sampling.top_k <= 0 and (self._sampling.top_p < 1 or self._sampling.typical_p < 1)

    def _drawn(self, candidates: Candidates, logits: LogitsRow) -> Any:
        """Sample one of ``candidates``; the chain sees only these."""
        entries = np.zeros(len(candidates), _ENTRY)
        if self._is_biased_here:
            logits = logits.copy()
            logits[self._biases["token"]] += self._biases["bias"]
        entries["id"], entries["logit"] = candidates, logits[candidates]
        data = ctypes.cast(entries.ctypes.data, ctypes.POINTER(llama.llama_token_data))
        shown = llama.llama_token_data_array(data, len(entries), -1, False)
        if len(entries) > 1:
            llama.llama_sampler_apply(self._chain, ctypes.byref(shown))
        return llama.llama_token_data.from_buffer_copy(shown.data[max(shown.selected, 0)])

    def _choose(self, candidates: Candidates, logits: LogitsRow) -> int:
        """Sample the next token from ``candidates``, and accept it."""
        chosen = self._drawn(candidates, logits)
        if self._is_mirostat:
            surprise = -math.log2(max(chosen.p, _MIN_P)) if len(candidates) > 1 else 0.0
            self._mu -= self._sampling.mirostat_eta * (surprise - self._sampling.mirostat_tau)
        token = int(chosen.id)
        llama.llama_sampler_accept(self._chain, token)
        return token

    def release(self) -> None:
        self._allowed.release()
        if self._chain is not None:
            llama.llama_sampler_free(self._chain)
            self._chain = None
