"""Windows on the GPU with adapters or other RoPE scaling give what llama.cpp gives there for the whole model, bit for
bit.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from primad.engine.rope import Rope
from primad.gguf.adapter import open_adapter
from primad.gguf.header import read_header
from tests.fakes.gguf import write_adapter
from tests.shell import test_lora_exact, test_rope_exact
from tests.shell.test_cut_exact import OPTIONS, PROMPT, Route
from tools import synth

ON_GPU = (2, 2, 2)


def logits(route: Route) -> np.ndarray:
    """The logits after the prompt."""
    route.logits(PROMPT[:64], 0)
    found = route.logits(PROMPT[64:], 64)
    route.release()
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "gemma3"])
def test_adapters(architecture, tmp_path):
    """Adapters are placed with their layers."""
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture)
    header = read_header(path)
    output = {name: each.shape for name, each in header.tensors.items() if name == "output.weight"}
    changed = test_lora_exact.matrices(header) | output
    file = write_adapter(tmp_path / "lora.gguf", changed, architecture=architecture)
    expected, without = (test_lora_exact.llama_logits(path, each) for each in ([(file, 0.7)], []))
    adapters = [open_adapter(file, 0.7, header)]
    found, on_cpu = (
        logits(Route(header, [0, 2, 4, 6], tmp_path, on_gpu=on_gpu, adapters=adapters)) for on_gpu in (ON_GPU, ())
    )
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, on_cpu), "they are computed there"
    assert np.abs(found - on_cpu).max() < np.abs(expected - without).max() / 4


@pytest.mark.parametrize("architecture", ["llama", "gpt-oss"])
def test_windows_and_whole_models_have_the_same_logits_with_rope_scaling(architecture, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture)
    rope = Rope(scaling="yarn", freq_scale=0.125, yarn_orig_ctx=32, freq_base=20_000.0)
    expected, without = (test_rope_exact.llama_logits(path, each) for each in (rope, Rope()))
    found = logits(Route(read_header(path), [0, 2, 4, 6], tmp_path, replace(OPTIONS, rope=rope), ON_GPU))
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, without)
