"""llama.cpp's samplers get no more memory than the context is worth and no NaN, whatever a request asks for."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from primad.api.answering.backend import SamplingDefaults
from primad.engine import sampling as engine
from primad.engine.masks import Allowed
from primad.engine.protocol import GREEDY, packed_biases
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header, scalar_value
from primad.head.model.vocabulary import _RECOMMENDED, sampling_defaults

SIZE, CONTEXT = 8, 64
SAMPLED = msgspec.structs.replace(GREEDY, temperature=0.8)
WORDS: Any = SimpleNamespace(tokens=lambda: SimpleNamespace(handle=None))


class Logits:
    def logits(self, row: int) -> Any:
        return np.linspace(-50, 50, SIZE, dtype=np.float32)


def chain(dry: engine.DrySamplers | None = None, **fields: Any) -> engine.ChainSampler:
    sampling = msgspec.structs.replace(SAMPLED, **fields)
    allowed = Allowed(sampling, frozenset({7}), 0, None, vocabulary=SIZE)
    dry = dry or engine.DrySamplers(WORDS)
    sampler = engine.ChainSampler(None, Logits(), dry, sampling, [1, 2], [3], allowed, context_tokens=CONTEXT)
    sampler._begin()
    return sampler


@pytest.mark.parametrize("tokens", [1, CONTEXT, CONTEXT + 1, 2**31 - 1, 2**31, 2**40])
def test_samplers_never_look_back_farther_than_the_context(monkeypatch, tokens):
    counts: dict[str, int] = {}

    def penalties(vocabulary: int, last: int, *rest: float) -> Any:
        counts["penalties"] = last
        return engine.llama.llama_sampler_init_greedy()

    def dry(handle: Any, multiplier: float, base: float, length: int, last: int, *rest: Any) -> Any:
        counts["dry"] = last
        return engine.llama.llama_sampler_init_greedy()

    monkeypatch.setattr(engine.llama, "llama_sampler_init_penalties", penalties)
    monkeypatch.setattr(engine.llama, "llama_sampler_init_dry", dry)
    chain(repeat_penalty=1.5, penalty_tokens=tokens, dry_multiplier=1.0, dry_tokens=tokens).release()
    assert counts == {"penalties": min(tokens, CONTEXT), "dry": min(tokens, CONTEXT)}


def test_the_vocabulary_is_searched_for_breakers_once_for_all_choices_and_not_by_the_ring(monkeypatch):
    made = []

    def dry(handle: Any, multiplier: float, base: float, length: int, last: int, texts: Any, count: int) -> Any:
        made.append((threading.current_thread().name, list(texts)))
        return engine.llama.llama_sampler_init_greedy()

    monkeypatch.setattr(engine.llama, "llama_sampler_init_dry", dry)
    samplers = engine.DrySamplers(WORDS)
    counts = {"dry_multiplier": 1.0, "dry_tokens": 9, "dry_breakers": ("e",) * 16 + ("a",)}
    for seed in range(3):
        chain(samplers, seed=seed, **counts).release()
    ((thread, texts),) = made
    assert (thread.partition("_")[0], texts) == ("dry", [b"e", b"a"])
    chain(samplers, **counts | {"dry_breakers": ("a",)}).release()
    assert len(made) == 2
    samplers.release()


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.0}, {"mirostat": 2}, {"repeat_penalty": 1.5, "penalty_tokens": 9}]
)
@pytest.mark.parametrize("bounds", [{"min_tokens": 9}, {"ignore_eos": True}])
def test_each_bias_is_applied_once_per_token_if_some_tokens_are_banned(monkeypatch, fields, bounds):
    """In that case, llama.cpp's own sampler compares each token with each bias."""
    bias = packed_biases(
        (token, 3.0 * token - 100 * (token == 5) if token < SIZE - 1 else -math.inf) for token in range(SIZE)
    )

    def sampled_tokens(**more: Any) -> list[int]:
        sampler = chain(logit_bias=bias, seed=3, **fields, **more)
        found = [sampler.sample(-1, Logits().logits(0)) for _ in range(3)]
        sampler.release()
        return found

    as_llama_has_it = sampled_tokens()
    monkeypatch.setattr(engine.llama, "llama_sampler_init_logit_bias", None)
    assert sampled_tokens(**bounds) == as_llama_has_it


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-30, 1e-6])
def test_a_negligible_temperature_is_greedy(temperature):
    assert msgspec.structs.replace(SAMPLED, temperature=temperature).is_greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-5},
        {"temperature": 1e-5, "temperature_range": 2.0, "temperature_exponent": 100.0},
        {"temperature": 1.0, "temperature_range": 2.0, "temperature_exponent": 100.0},
        {"repeat_penalty": 0.01, "penalty_tokens": 64},
        {"top_p": 1e-320, "min_p": 1e-320, "typical_p": 1e-320, "top_n_sigma": 1e-320},
        {"xtc_probability": 1.0, "xtc_threshold": 1e-320},
        {"mirostat": 1, "mirostat_tau": 0.0},
        {"mirostat": 2, "mirostat_tau": 0.0, "mirostat_eta": 1.0},
        {"mirostat": 2, "mirostat_tau": 100.0, "mirostat_eta": 1.0},
        {"logit_bias": packed_biases((token, -math.inf) for token in range(SIZE - 1))},
    ],
)
def test_the_ends_of_every_range_sample_a_token_with_a_probability(fields):
    sampler = chain(**fields)
    for _ in range(3):
        assert 0 <= sampler.sample(-1, Logits().logits(0)) < SIZE
        assert math.isfinite(sampler.mirostat_mu or 0.0)
    sampler.release()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-320, -1.0, -2.0, 2.0**31, 2.0**64])
def test_an_invalid_recommendation_of_a_model_file_is_ignored(value):
    for key, (name, minimum, maximum) in _RECOMMENDED.items():
        values = {key: scalar_value(GGUFValueType.FLOAT64, value)}
        header = Header(path=Path("toy.gguf"), values=values, tensors={}, data_offset=0)
        usual, found = getattr(SamplingDefaults(), name), getattr(sampling_defaults(header), name)
        assert found == usual or minimum <= found <= maximum
        assert math.isfinite(found)
