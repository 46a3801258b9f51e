"""Rings of processes answer to prompts with pictures as llama.cpp with its libmtmd does, bit for bit."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from primad.engine.pictures.encoder import PictureEncoder
from primad.engine.protocol import GREEDY
from primad.engine.vocabulary import LlamaVocabulary
from primad.ring.head import log_softmax
from tests.shell.test_picture_rows import prompt_of
from tools.lab.local_ring import LocalRing
from tools.lab.mmproj import Eye, noise, write_encoder
from tools.lab.plain_pictures import plain_answer
from tools.synth import write_model

pytestmark = pytest.mark.slow

ROWS, CONTEXT, TOKENS, END = 64, 512, 8, 2
ENDLESS = msgspec.structs.replace(GREEDY, ignore_eos=True)
ONE = ["hello ", noise(1), " what is it?"]
TWO = ["hello ", noise(1), " and ", noise(2, 160, 120), " are they alike?"]
OTHER = ["hello ", noise(3), " what is it?"]


class Seen:
    """A tiny model with its encoder: prompts of parts, and what libmtmd makes of them."""

    def __init__(self, folder, kind, architecture, eye):
        self.model, self._encoder = folder / "model.gguf", folder / "encoder.gguf"
        shape = write_model(self.model, architecture=architecture)
        write_encoder(self._encoder, kind, shape.width, eye)
        self.layers = shape.layers

    def prompt(self, parts):
        encoder, vocabulary = (
            PictureEncoder(str(self._encoder), str(self.model), threads=1),
            LlamaVocabulary(self.model),
        )
        found = prompt_of(encoder, vocabulary, parts)
        encoder.release()
        vocabulary.release()
        return found

    def expected(self, parts):
        tokens, logits = plain_answer(self.model, self._encoder, parts, TOKENS, rows=ROWS, context=CONTEXT, never=END)
        logprobs = [float(log_softmax(each)[token]) for token, each in zip(tokens, logits, strict=True)]
        return list(zip(tokens, logprobs, strict=True))


@pytest.fixture(
    scope="module",
    params=[("gemma3", "gemma3", Eye(side=128)), ("qwen3vl_merger of deeper layers", "qwen3vl", None)],
    ids=["looking-ahead", "grids and deeper layers"],
)
def seen(request, tmp_path_factory):
    return Seen(tmp_path_factory.mktemp("seen"), *request.param)


def drawn(sampled):
    return [(each.token, each.logprob) for each in sampled]


@pytest.mark.parametrize("windows", [None, [1, 3], [1, 1, 2]], ids=["one", "two", "three"])
async def test_a_ring_sees_what_libmtmd_sees(seen, windows, tmp_path):
    """One picture, two between text, several requests at once, a second turn, and a head that begins anew midway."""
    ring = LocalRing(
        seen.model, windows, rows=ROWS, context=CONTEXT, sequences=3, threads=1, folder=tmp_path, flash=True
    )
    expected = {id(parts): seen.expected(parts) for parts in (ONE, TWO, OTHER)}
    assert len({tuple(each) for each in expected.values()}) == 3
    async with asyncio.timeout(240), ring:
        for parts in (ONE, TWO, OTHER, ONE):
            prompt, pictures = seen.prompt(parts)
            sampled, finished = await ring.generate(
                prompt, TOKENS, logprobs=0, sampling=ENDLESS, reuses=True, pictures=pictures
            )
            assert finished.error is None
            assert drawn(sampled) == expected[id(parts)]
        requests = {}
        for parts in (TWO, OTHER, ONE):
            prompt, pictures = seen.prompt(parts)
            requests[await ring.ask(prompt, TOKENS, logprobs=0, sampling=ENDLESS, pictures=pictures)] = expected[
                id(parts)
            ]
        beside = await ring.follow(list(requests))
        assert {request: drawn(sampled) for request, (sampled, _) in beside.items()} == requests
        await ring.replace_head()
        prompt, pictures = seen.prompt(TWO)
        known = [token for token, _ in expected[id(TWO)][:3]]
        sampled, _ = await ring.generate(
            prompt, TOKENS, replayed=known, logprobs=0, sampling=ENDLESS, pictures=pictures
        )
        assert drawn(sampled) == expected[id(TWO)][3:]
