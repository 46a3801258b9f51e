"""Models whose layers are of several kinds in a ring of three: a worker dies, and the answer goes on word for word."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.e2e.kept import Lab
from tools import synth

pytestmark = pytest.mark.slow

TOKENS = 48


@pytest.mark.parametrize("architecture", ["qwen35moe", "gemma4-moe"])
def test_an_answer_survives_the_death_of_a_worker(architecture, tmp_path, new_home):
    model = tmp_path / "model.gguf"
    synth.write_model(model, architecture=architecture, layers=16, width=256)
    with ExitStack() as stack:
        lab = Lab(stack, model, new_home, tokens=TOKENS, middle=TOKENS // 2)
        first, _ = lab.two()
        assert lab.ask().text == lab.undisturbed, "asked again"
        told = lab.ask(lab.workers[first].kill)
        assert told.error is None, lab.head.run.output
        assert told.text == lab.undisturbed
        assert lab.undisturbed
