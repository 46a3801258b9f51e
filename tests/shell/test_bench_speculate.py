"""Requests of ``tools/bench speculate``, the same for servers and rings."""

from __future__ import annotations

import msgspec
import pytest

from primad.api.answering.backend import TextModel
from primad.api.dialects.llama_server.schema import RawCompletionRequest
from primad.api.dialects.openai.sampling import sampling_of
from primad.engine.protocol import GREEDY
from tests.fakes.backend import ByteVocabulary
from tools.lab.drafted import RANDOM, USUAL, samplers


@pytest.mark.parametrize("sampling", [GREEDY, USUAL, RANDOM])
def test_a_server_samples_as_a_ring_does(sampling):
    served = TextModel(id="toy", created=0, context_tokens=100, vocabulary=ByteVocabulary())
    fields = samplers(sampling)
    found = sampling_of(RawCompletionRequest(prompt=[1], **fields), served, seed=sampling.seed, grammar=None)
    assert {name: getattr(found, name) for name in fields} == fields
    assert msgspec.structs.replace(found, penalty_tokens=0, dry_breakers=sampling.dry_breakers) == sampling


def test_any_token_may_be_the_next_of_random_ones():
    assert (RANDOM.top_k, RANDOM.top_p, RANDOM.min_p) == (0, 1, 0)
    assert RANDOM.temperature >= 1000, "the likeliest logits are some tens above the others"
