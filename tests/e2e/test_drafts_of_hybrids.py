"""Models with a recurrent state, with accepted drafts, while a worker dies and another one joins."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from tests.e2e.cluster import PATIENCE_S, Head, heading, joined, ring_process
from tests.e2e.streams import in_the_middle, repeated
from tools import synth

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

FEW_LIKELY = {str(token): 100 for token in (260, 264, 281, 327, 414)}
"""Likely tokens, few so that drafts are often accepted."""
FAMILIES = ("qwen35", "qwen35moe", "qwen3next", "nemotron_h", "granitehybrid", "lfm2", "falcon-h1")

Answer = list[tuple[str, float]]


def answer(head: Head, act: Callable[[], object] | None = None, **fields: object) -> tuple[Answer, int]:
    """Return tokens with log-probabilities, and the number of accepted drafts; call ``act`` after 60 tokens, while the
    ring stands still. A request that was over before is repeated."""
    return repeated(lambda: _answer(head, act, **fields))


def _answer(head: Head, act: Callable[[], object] | None, **fields: object) -> tuple[Answer, int]:
    body = {
        "prompt": "A tale of the sea and of those who sail on it. " * 12,
        "max_tokens": 300,
        "seed": 5,
        "logprobs": 2,
        "logit_bias": FEW_LIKELY,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    ring = ring_process(head.run)
    reported: Answer = []
    counts: dict[str, int] = {}
    with httpx.stream("POST", f"{head.url}/v1/completions", json=body, timeout=PATIENCE_S) as answered:
        assert answered.status_code == 200, answered.read()
        for line in answered.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk, before = json.loads(line.removeprefix("data: ")), len(reported)
            counts = (chunk.get("usage") or {}).get("completion_tokens_details") or counts
            for lists in (each.get("logprobs") or {} for each in chunk["choices"]):
                reported += zip(lists.get("tokens", ()), lists.get("token_logprobs", ()), strict=True)
            if act is not None and before < 60 <= len(reported):
                with in_the_middle(head, ring):
                    act()
    return reported, counts.get("accepted_prediction_tokens", 0)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_drafts_a_death_and_a_join_change_no_token_of_a_hybrid(smollm2, new_home, cluster, tmp_path, architecture):
    model = tmp_path / "model.gguf"
    synth.write_model(
        model, architecture=architecture, layers=12, vocabulary=f"from:{smollm2}", tokens=synth.FEW_TOKENS
    )
    homes = [new_home(name) for name in ("head", "first", "second", "third")]
    arguments = ("--wait", 2, "--use-all", "--context", 2048, "--sequences", 2, "--speculate", "lookup")
    with (
        heading(model, homes[0], cluster, *arguments, config="") as head,
        joined(homes[1], cluster),
        joined(homes[2], cluster) as second,
    ):
        head.wait_serving()
        expected, _ = answer(head, speculate=False)
        assert len(expected) == 300
        drafted, accepted = answer(head)
        assert drafted == expected
        assert accepted > 0
        assert answer(head, second.kill)[0] == expected
        head.wait_serving()
        with joined(homes[3], cluster):
            assert answer(head)[0] == expected
