"""Sampling is right at every ring size: it follows the model's distribution, and each parameter has its effect."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest

from primad.engine.protocol import Sampling, packed_biases
from primad.ring.messages import Sampled
from tests.e2e.reference import Plain
from tests.lazily import Lazily
from tools.lab.local_ring import GREEDY, LocalRing
from tools.synth import write_model

stats = Lazily("scipy.stats")

pytestmark = pytest.mark.slow

SAMPLED = msgspec.structs.replace(GREEDY, temperature=1.0)
TEXT = "The best thing about the sea is"
SAMPLES = 5_000


class Ring:
    """A ``LocalRing`` that a test calls without ``await``."""

    def __init__(self, runner: asyncio.Runner, ring: LocalRing, is_alone: bool) -> None:
        self._runner, self._ring, self.is_alone = runner, ring, is_alone

    def tokens(self, prompt: list[int], count: int, sampling=GREEDY, **changes) -> list[int]:
        """Return ``count`` tokens after ``prompt``."""
        sampling = msgspec.structs.replace(sampling, **changes)
        sampled, _ = self._runner.run(self._ring.generate(prompt, count, sampling=sampling))
        return [event.token for event in sampled]

    def events(
        self, prompt: list[int], count: int, sampling: Sampling, *, replayed: Sequence[int] = ()
    ) -> list[Sampled]:
        """Return the events of the tokens after ``replayed``, up to ``count`` tokens after ``prompt``."""
        sampled, _ = self._runner.run(self._ring.generate(prompt, count, sampling=sampling, replayed=replayed))
        return sampled

    def samples(self, prompt: list[int], count: int, **changes) -> Counter[int]:
        """Count the first tokens after ``prompt`` for seeds below ``count``; tokens that end the completion are -1."""

        async def sample() -> Counter[int]:
            found: Counter[int] = Counter()
            for seed in range(count):
                sampling = msgspec.structs.replace(SAMPLED, seed=seed, **changes)
                sampled, _ = await self._ring.generate(prompt, 1, sampling=sampling)
                found[sampled[0].token if sampled else -1] += 1
            return found

        return self._runner.run(sample())


@contextmanager
def opened(model: Path, windows: tuple[int, ...] | None) -> Iterator[Ring]:
    with asyncio.Runner() as runner:
        ring = LocalRing(model, windows, context=512, threads=1)
        runner.run(ring.__aenter__())
        try:
            yield Ring(runner, ring, windows is None)
        finally:
            runner.run(ring.__aexit__(None, None, None))


@pytest.fixture(scope="module", params=[None, (5, 6, 3)], ids=["one device", "three devices"])
def ring(request: pytest.FixtureRequest, quick_model: Path) -> Iterator[Ring]:
    with opened(quick_model, request.param) as ring:
        yield ring


@pytest.fixture(scope="module")
def one(quick_model: Path) -> Iterator[Ring]:
    """One device, for what is alike in every ring because every ring samples the same tokens."""
    with opened(quick_model, None) as ring:
        yield ring


class Model:
    """Plain llama.cpp's results for ``TEXT`` and for ``start``; ``order`` ranks the tokens after ``start``."""

    def __init__(self, path: Path) -> None:
        plain = Plain(path)
        self.prompt = plain.tokenize(TEXT)
        self.start = plain.tokenize("The")
        self.loop = plain.tokenize("sea sea sea sea sea sea sea sea")
        self.ends = [token for token in range(plain.vocabulary) if plain.is_end(token)]
        self.greedy = plain.continue_(self.prompt, 24).tokens
        self.probabilities = self.distribution(plain, self.start)
        self.order = np.argsort(-self.probabilities, kind="stable")
        self._plain = plain
        self.sampled = cache(self._sampled)

    def _sampled(self, seed: int, **chain: Any) -> list[int]:
        """Sample with plain llama.cpp after ``prompt``."""
        return self._plain.sample(self.prompt, 24, seed=seed, **chain)

    def release(self) -> None:
        """Free its memory."""
        self._plain.release()

    @staticmethod
    def distribution(plain: Plain, prompt: list[int]) -> np.ndarray:
        """Return the softmax (vocabulary + 1,) of the next token; the last entry is for all tokens that end a text."""
        logits = plain.continue_(prompt, 1).logits[0].astype(np.float64)
        all_tokens = np.exp(logits - np.logaddexp.reduce(logits))
        ends = [token for token in range(plain.vocabulary) if plain.is_end(token)]
        ending = all_tokens[ends].sum()
        all_tokens[ends] = 0
        return np.append(all_tokens, ending)


@pytest.fixture(scope="module")
def model(quick_model: Path) -> Iterator[Model]:
    model = Model(quick_model)
    yield model
    model.release()


def test_temperature_0_top_k_1_and_greedy_agree(ring, model):
    assert ring.tokens(model.prompt, 24) == model.greedy
    assert ring.tokens(model.prompt, 24, SAMPLED, temperature=0.0, top_k=40, top_p=0.5, seed=7) == model.greedy
    assert ring.tokens(model.prompt, 24, SAMPLED, temperature=1.7, top_k=1, seed=8) == model.greedy
    # A tiny bias forces the chain of samplers instead of the shortcut.
    assert ring.tokens(model.prompt, 24, logit_bias=packed_biases([(0, -1e-6)])) == model.greedy


def test_the_same_seed_gives_the_same_text_and_others_give_others(ring, model):
    texts = {seed: ring.tokens(model.prompt, 16, SAMPLED, seed=seed) for seed in (1, 2, 3, 4)}
    assert all(ring.tokens(model.prompt, 16, SAMPLED, seed=seed) == text for seed, text in texts.items())
    assert len({tuple(text) for text in texts.values()}) == len(texts)


def test_every_ring_size_samples_the_same_tokens(quick_model, ring, model):
    with opened(quick_model, (2, 10)) as other:
        for seed in (5, 2**32 - 2):
            assert other.tokens(model.prompt, 12, SAMPLED, seed=seed) == ring.tokens(
                model.prompt, 12, SAMPLED, seed=seed
            )
        assert other.samples(model.start, 60) == ring.samples(model.start, 60)


CHAINS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.2, "top_p": 0.8, "repeat_penalty": 1.3, "penalty_tokens": 24},
    {"temperature": 1.5, "top_n_sigma": 1.0},
    {"temperature": 1.0, "top_k": 60, "typical_p": 0.5},
    {"temperature": 1.0, "top_k": 60, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 1.0, "temperature_range": 0.6, "temperature_exponent": 1.5},
    {"temperature": 0.5, "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_tokens": 64, "dry_breakers": ("\n", "*")},
]


@pytest.mark.parametrize(
    "chain", CHAINS, ids=["temperature", "truncated", "penalised", "sigma", "typical", "xtc", "range", "dry"]
)
def test_every_sample_is_that_of_plain_llama_cpp(ring, model, chain):
    for seed in (0, 2**32 - 2) if ring.is_alone else (11,):
        plain = model.sampled(seed, **chain)
        assert ring.tokens(model.prompt, len(plain), SAMPLED, seed=seed, **chain) == plain


def test_samples_fit_the_distribution_of_the_model(tmp_path):
    """One device suffices, since every ring samples the same; with a tiny model thousands of samples take seconds."""
    path, start = tmp_path / "tiny.gguf", [40]
    write_model(path)
    plain = Plain(path)
    expected = Model.distribution(plain, start) * SAMPLES
    plain.release()
    with opened(path, None) as one:
        sampled = one.samples(start, SAMPLES)
    common = np.flatnonzero(expected >= 5)
    assert len(common) > 20, "choose a prompt with a wide distribution"
    observed = [sampled[int(token) if token < len(expected) - 1 else -1] for token in common]
    observed.append(SAMPLES - sum(observed))
    wanted = [*expected[common], SAMPLES - expected[common].sum()]
    assert stats.chisquare(observed, wanted).pvalue > 1e-4


def test_a_bias_bans_and_forces(one, model):
    best, second, rare = (int(model.order[rank]) for rank in (0, 1, 4000))
    assert one.tokens(model.start, 1) == [best]
    assert one.tokens(model.start, 1, logit_bias=packed_biases([(best, -100.0)])) == [second]
    assert one.tokens(model.start, 4, logit_bias=packed_biases([(rare, 100.0)])) == [rare] * 4
    assert set(one.samples(model.start, 20, logit_bias=packed_biases([(rare, 100.0)]))) == {rare}
    assert best not in one.samples(model.start, 60, temperature=0.5, logit_bias=packed_biases([(best, -100.0)]))


@pytest.mark.parametrize("penalty", [{"repeat_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_a_penalty_makes_repeating_rarer(one, model, penalty):
    free = one.tokens(model.loop, 24)
    penalised = one.tokens(model.loop, 24, penalty_tokens=64, **penalty)
    assert len(set(penalised)) > len(set(free))
    # Penalties over a window of no tokens change nothing.
    assert one.tokens(model.loop, 24, penalty_tokens=0, **penalty) == free


def test_a_negative_penalty_makes_repeating_more_frequent(one, model):
    printed = set(model.prompt)
    rewarded = one.tokens(model.prompt, 24, penalty_tokens=64, presence_penalty=-2.0, frequency_penalty=-2.0)
    assert len(set(rewarded) - printed) < len(set(model.greedy) - printed)


def test_truncation_restricts_the_tokens_that_can_be_sampled(one, model):
    probabilities, order = model.probabilities, model.order
    ranked = probabilities[order]
    nucleus = order[: int(np.searchsorted(ranked.cumsum(), 0.6)) + 1]
    allowed = {
        "top_k": ({"top_k": 5}, order[:5]),
        "top_p": ({"top_p": 0.6}, nucleus),
        "min_p": ({"min_p": 0.1}, order[ranked >= 0.1 * ranked[0]]),
    }
    for name, (change, support) in allowed.items():
        sampled = one.samples(model.start, 60, temperature=2.0, **change)
        assert set(sampled) <= set(map(int, support)), name
        assert len(sampled) > 0.5 * min(60, len(support)), f"{name} lets through less than it should"
    outside = one.samples(model.start, 60, temperature=2.0)
    assert not set(outside) <= set(map(int, nucleus)), "without truncation other tokens are sampled too"


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_the_surprise_near_tau(one, model, version):
    """A small tau makes the text predictable: only the likeliest tokens are sampled despite the temperature."""
    calm, wild = (
        [
            token
            for seed in range(3)
            for token in one.tokens(
                model.prompt, 24, SAMPLED, seed=seed, temperature=2.0, mirostat=version, mirostat_tau=tau
            )
        ]
        for tau in (0.5, 9.0)
    )
    assert len(set(calm)) < len(set(wild))
    assert one.tokens(model.prompt, 24, SAMPLED, temperature=0.0, mirostat=version) == model.greedy


@pytest.mark.parametrize("grammar", [None, "start: /[a-z ]{90}/"], ids=["free", "masked"])
@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_resumes_with_the_same_tokens(one, model, version, grammar):
    sampling = msgspec.structs.replace(
        SAMPLED, seed=3, temperature=2.0, mirostat=version, mirostat_tau=2.0, mirostat_eta=0.3, grammar=grammar
    )
    whole = one.events(model.prompt, 24, sampling)
    tokens = [event.token for event in whole]
    assert len({event.mirostat_mu for event in whole}) > 12
    for count in (1, 11):
        behind = msgspec.structs.replace(sampling, mirostat_mu=whole[count - 1].mirostat_mu)
        assert one.events(model.prompt, 24, behind, replayed=tokens[:count]) == [
            msgspec.structs.replace(event, request=ANY) for event in whole[count:]
        ]
    again = one.events(model.prompt, 24, sampling, replayed=tokens[:11])
    assert again[0].mirostat_mu != whole[11].mirostat_mu


def test_dry_ends_loops(one, model):
    """With few likely tokens the text repeats the same pairs again and again."""
    dry = {"dry_multiplier": 5.0, "dry_allowed_length": 1, "dry_tokens": 64}
    few = packed_biases([(token, 50.0) for token in range(300, 308)])
    free, left = (set(pairwise(one.tokens(model.loop, 24, logit_bias=few, **more))) for more in ({}, dry))
    assert len(left) > 1.2 * len(free)


def test_ignore_eos_and_min_tokens_keep_a_completion_from_ending(one, model):
    """The bias makes the model end at once."""
    likely = {"temperature": 1.5, "logit_bias": packed_biases([(token, 50.0) for token in model.ends])}
    for seed in range(3):
        assert one.tokens(model.prompt, 48, SAMPLED, seed=seed, **likely) == []
        assert len(one.tokens(model.prompt, 48, SAMPLED, seed=seed, min_tokens=30, **likely)) == 30
        assert len(one.tokens(model.prompt, 48, SAMPLED, seed=seed, ignore_eos=True, **likely)) == 48
