"""A ring of real processes with a LoRA adapter and RoPE scaling gives the same text as llama.cpp."""

from __future__ import annotations

import httpx
import pytest

from primad.engine.vocabulary import LlamaVocabulary
from primad.gguf.header import read_header
from tests.e2e.cluster import ring
from tests.e2e.reference import Plain
from tests.fakes.gguf import write_adapter
from tools import synth

pytestmark = pytest.mark.slow

PROMPT = "The keeper of the lighthouse wrote in his book:"
TOKENS = 24
BASE = 20_000.0
SCALE = 0.02


def test_a_ring_with_an_adapter_and_rope_scaling_gives_the_text_of_llama_cpp(smollm2, tmp_path, new_home, cluster):
    """The adapter changes layers, the token embedding and the output matrix."""
    model = tmp_path / "model.gguf"
    synth.write_model(model, layers=8, vocabulary=f"from:{smollm2}", tokens=synth.FEW_TOKENS, quantisation="q4_1")
    changed = {
        name: tensor.shape
        for name, tensor in read_header(model).tensors.items()
        if name.endswith(("attn_q.weight", "attn_v.weight", "ffn_down.weight", "token_embd.weight", "output.weight"))
    }
    lora = write_adapter(tmp_path / "lora.gguf", changed)
    plain = Plain(model, adapters=[(lora, SCALE)], rope_freq_base=BASE, flash=False)
    prompt = plain.tokenize(PROMPT)
    expected = plain.continue_(prompt, TOKENS).tokens
    plain.release()
    without = Plain(model)
    assert without.continue_(prompt, TOKENS).tokens != expected
    without.release()
    vocabulary = LlamaVocabulary(smollm2)
    text = b"".join(map(vocabulary.piece, expected)).decode(errors="replace")
    vocabulary.release()
    homes = [new_home("head"), new_home("worker")]
    options = ("--windows", "1,3", "--rounds", 2, "--lora", f"{lora}={SCALE}", "--rope-freq-base", BASE)
    with ring(model, homes, cluster, *options) as (head, _):
        asked = {"model": "any", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        name = httpx.get(f"{head.url}/v1/models").json()["data"][0]["id"]
        answer = httpx.post(f"{head.url}/v1/completions", json={**asked, "model": name}, timeout=120)
        assert answer.json()["choices"][0]["text"] == text
