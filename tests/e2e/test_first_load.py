"""A model of an architecture in no table: certified on first load, then served by a ring."""

from __future__ import annotations

import httpx
import pytest

from primad.engine.vocabulary import LlamaVocabulary
from tests.e2e.cluster import ring
from tests.e2e.reference import Plain
from tools import synth

pytestmark = pytest.mark.slow

PROMPT = "Lighthouse:"
TOKENS = 24


def test_a_ring_of_an_unknown_architecture_gives_the_text_of_llama_cpp(tmp_path, new_home, cluster):
    """Bloom normalises token embeddings, which must happen in the first window only."""
    model = tmp_path / "model.gguf"
    synth.write_model(model, architecture="bloom")
    plain = Plain(model)
    expected = plain.continue_(plain.tokenize(PROMPT), TOKENS).tokens
    plain.release()
    vocabulary = LlamaVocabulary(model)
    text = b"".join(map(vocabulary.piece, expected)).decode(errors="replace")
    vocabulary.release()
    homes = [new_home("head"), new_home("worker")]
    with ring(model, homes, cluster, "--windows", "2,2", "--rounds", 2) as (head, _):
        head.run.wait_for("architecture 'bloom': certified")
        assert "checked bit for bit" in head.status()["checked"]
        asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        asked["model"] = httpx.get(f"{head.url}/v1/models").json()["data"][0]["id"]
        answer = httpx.post(f"{head.url}/v1/completions", json=asked, timeout=120)
        assert answer.json()["choices"][0]["text"] == text
