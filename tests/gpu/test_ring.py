"""Rings of daemons whose worker has unusual layers on its GPU: a mixture's, with or without experts; layers with
adapters and other RoPE scaling; layers without a KV cache.
"""

from __future__ import annotations

from typing import Any

import pytest

from primad.gguf.header import read_header
from tests.core.test_architectures import value
from tests.e2e.streams import ask
from tests.fakes.gguf import write_adapter
from tests.gpu.rings import gpu_layers, measured, ring_of_two
from tools import synth

WORKER_THREADS = 5
LAYERS = 12
"""Three windows of DeciLM, which begin at multiples of four."""
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"width": 512, "feed_forward": 2048},
    "qwen3moe": {
        "width": 1536, "heads": 24, "heads_kv": 24, "head_width": 64, "experts": 4, "expert_feed_forward": 512,
    },
    "deci": {"values": {"deci.embedding_length": value(512), "deci.feed_forward_length": value([2048] * LAYERS)}},
}  # fmt: skip
"""Wide enough that a GPU is worth using."""


@pytest.fixture
def ring_output(smollm2, new_home, cluster, gpu, tmp_path):
    """Gets an answer from a ring with a model of ``architecture``; returns the head's output."""

    def ring_output(architecture: str, *arguments: object, changed: tuple[str, ...] = ()) -> str:
        model, more = tmp_path / "model.gguf", list[object]()
        synth.write_model(
            model, architecture=architecture, layers=LAYERS, vocabulary=f"from:{smollm2}", **WIDE[architecture]
        )
        if changed:
            tensors = {name: each.shape for name, each in read_header(model).tensors.items() if name.endswith(changed)}
            more += ["--lora", write_adapter(tmp_path / "lora.gguf", tensors)]
        homes = new_home("head"), new_home("lap")
        with (
            measured(gpu, homes[1], WORKER_THREADS),
            ring_of_two(model, homes, cluster, WORKER_THREADS, *arguments, *more) as (head, worker),
        ):
            assert gpu_layers(head) > 0, head.run.output
            reported = ask(head, tokens=20)
            assert (reported.finish, reported.error) == ("length", None), head.run.output + worker.output
            assert reported.text
            assert "too little memory left" not in worker.output
            assert "Traceback" not in head.run.output + worker.output
            return head.run.output

    return ring_output


@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_experts_are_on_the_gpu_or_not(ring_output, place):
    output = ring_output("qwen3moe", "--experts", place)
    assert ("experts of" in output) == (place == "cpu"), output


def test_adapters_and_rope_scaling_serve(ring_output):
    ring_output("llama", "--rope-freq-base", 20_000, changed=("attn_q.weight", "attn_v.weight", "ffn_down.weight"))


def test_layers_without_kv_cache_serve(ring_output):
    ring_output("deci")
