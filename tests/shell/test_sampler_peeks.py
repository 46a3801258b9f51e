"""A sampler's peek is the token that it will sample if the logits are as predicted; peeking changes no sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from primad.engine import sampling as engine
from primad.engine.masks import Allowed
from primad.engine.protocol import GREEDY, packed_biases

SIZE, TOKENS = 64, 12
LOGITS = np.random.default_rng(1).normal(0, 1.5, (TOKENS, SIZE)).astype(np.float32)
WORDS: Any = SimpleNamespace(tokens=lambda: SimpleNamespace(handle=None))


class Logits:
    def logits(self, row: int) -> Any:
        return LOGITS[row]


def chain(**fields: Any) -> engine.ChainSampler:
    """A sampler after one sampled token."""
    sampling = msgspec.structs.replace(GREEDY, **{"temperature": 0.8, "seed": 3, **fields})
    allowed = Allowed(sampling, frozenset({7}), 1, None, vocabulary=SIZE)
    return engine.ChainSampler(
        None, Logits(), engine.DrySamplers(WORDS), sampling, [1], [3], allowed, context_tokens=64
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 3.0},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.05},
        {"top_p": 0.5},
        {"ignore_eos": True, "logit_bias": packed_biases([(7, 9.0), (4, 2.0)])},
        {"xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"temperature": 1.0, "temperature_range": 0.5},
    ],
    ids=str,
)
def test_a_peek_one_or_two_tokens_ahead_is_the_later_sample_of_the_same_logits(fields):
    expected = [chain_.sample(row) for chain_ in [chain(**fields)] for row in range(TOKENS)]
    peeked = chain(**fields)
    assert peeked.peek(LOGITS[0], 1) is None, "nothing was drawn from it yet"
    found = [peeked.sample(0)]
    for row in range(1, TOKENS):
        peeks = [peeked.peek(LOGITS[place], place + 1) for place in range(row, min(row + 2, TOKENS))]
        assert peeks == expected[row : row + 2]
        found.append(peeked.sample(row))
    assert found == expected
    assert len(set(found)) > 1
    peeked.release()


def test_a_peek_at_the_likely_tokens_nearly_equals_sampling_from_all(monkeypatch):
    monkeypatch.setattr(engine, "_PEEKED", 48)
    sampled, peeked, alike = chain(top_p=0.9), chain(top_p=0.9), 0
    peeked.sample(0)
    sampled.sample(0)
    for row in range(1, TOKENS):
        alike += peeked.peek(LOGITS[row], row + 1) == sampled.sample(row)
    assert alike >= TOKENS - 3


@pytest.mark.parametrize("fields", [{"temperature": 0.0, "repeat_penalty": 1.1, "penalty_tokens": 8}, {"mirostat": 2}])
def test_samplers_without_a_seeded_draw_are_not_peeked_at(fields):
    peeked = chain(**fields)
    token = peeked.sample(0)
    assert peeked.peek(LOGITS[1], 2) is None
    assert token == chain(**fields).sample(0)
    peeked.release()
