"""Models with several kinds of layers in a ring of three: a worker dies, and no token changes."""

from __future__ import annotations

import math
from contextlib import ExitStack

import httpx
import pytest

from primad.gguf.header import read_header
from tests.e2e.cluster import PATIENCE_S, wait_until
from tests.e2e.kv_lab import Lab
from tests.e2e.streams import show
from tools import synth

pytestmark = pytest.mark.slow

TOKENS, MIDDLE = 240, 24
"""Most tokens are sampled after the death, so that a client that is late can still act."""
BILLION = 10**9
FEW = {"0": -100, "2": -100, **dict.fromkeys(("70", "71", "72"), 50)}
"""Few likely tokens, so that drafts by prompt lookup are often accepted."""


def survives_a_death(model, new_home, tokens):
    """Run a request in a ring of three with and without drafts, and again while a worker is killed."""
    with ExitStack() as stack:
        serving = ("--speculate", "lookup")
        lab = Lab(stack, model, new_home, tokens=tokens, middle=MIDDLE, serving=serving, logit_bias=FEW)
        first, _ = lab.two()
        assert lab.ask(speculate=False).text == lab.undisturbed, "asked again"

        def drafts() -> bool:
            assert lab.ask().text == lab.undisturbed
            counted = lab.head.status()["drafts"]
            return counted is not None and counted["drafted"] > 0

        wait_until(drafts, "some are drafted, in a ring that lasts")
        reported = lab.ask(lab.workers[first].kill, still=True, speculate=True)
        show(
            f"{model.parent.name}: the next token after {reported.gap_s:.1f} s, the whole answer in {reported.took_s:.1f} s"
        )
        assert reported.error is None, lab.head.run.output
        assert reported.text == lab.undisturbed
        assert lab.undisturbed
        resumes_after_its_history(lab.head)


def resumes_after_its_history(head):
    """Check that the next turn computes only new tokens, and gives the same result as computing the whole prompt."""

    def answer(prompt, **more):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2, **more}
        reply = httpx.post(f"{head.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        return reply["choices"][0], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    history = "A tale of the sea. " * 20
    first, _ = answer(history)
    turn = history + first["text"] + " And then?"
    fresh, none = answer(turn, cache_prompt=False)
    assert none == 0

    def is_behind_it():
        answer(history)
        printed, cached = answer(turn)
        assert printed == fresh
        return cached > 0

    wait_until(is_behind_it, "the history is found, in a ring that lasts")


@pytest.mark.parametrize("architecture", ["qwen35moe", "gemma4-per-layer"])
def test_a_request_survives_the_death_of_a_worker(architecture, tmp_path, new_home):
    model = tmp_path / "model.gguf"
    synth.write_model(model, architecture=architecture, layers=16, width=256)
    survives_a_death(model, new_home, TOKENS)


@pytest.mark.matrix
@pytest.mark.parametrize(("architecture", "layers"), [("qwen35moe", 52), ("gemma4-moe", 44)])
def test_a_request_to_a_model_of_a_billion_weights_survives_the_death_of_a_worker(
    architecture, layers, tmp_path, new_home
):
    model = tmp_path / "model.gguf"
    synth.write_model(model, architecture=architecture, layers=layers, width=1280, quantisation="q4_k_m")
    weights = sum(math.prod(tensor.shape) for tensor in read_header(model).tensors.values())
    assert 0.9 * BILLION < weights < 1.1 * BILLION
    survives_a_death(model, new_home, TOKENS)
