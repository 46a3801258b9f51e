"""Windows with layers on the GPU compute what llama.cpp computes there, and those without what a build without GPU does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from primad.gguf.architectures import SUPPORTED
from primad.gguf.header import read_header
from primad.gguf.profile import model_profile
from primad.ring.spawn import environment, how_it_ended
from tools import synth
from tools.lab import zoo

ROOT = Path(__file__).parent.parent.parent
PLAIN = ROOT / ".venv" / "bin" / "python"
LEAST_BOUND = 1e-3
"""Below this, of logits of some 10, a difference is that of adding up in another order."""
SLACK = 1.1
"""Whole-model llama.cpp cannot have any layers there that windows can: the largest of few differences varies."""
SOFTWARE = "llvmpipe"
HYBRIDS = ["lfm2", "qwen35"]
MIXTURES = ["llama-moe", "qwen3moe", "gpt-oss", "deepseek2"]


def plain_logits(model: Path, python: str, *, gpu: bool) -> bytes:
    """What a child of ``python`` computes without any layer on a GPU that it may see or not."""
    return subprocess.run(
        [python, "-m", "tests.gpu.plain", str(model)],
        env=environment(os.environ, 1, 0, gpu=gpu),
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout


def has_experts(model: Path) -> bool:
    return model_profile(read_header(model)).experts > 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3moe"])
def test_with_no_layer_offloaded_logits_are_those_of_a_build_without_gpu(architecture, tmp_path):
    """Also of prompts of more than 32 rows, which llama.cpp left to itself computes on the GPU."""
    model = tmp_path / "model.gguf"
    synth.write_model(model, architecture=architecture)
    seen = plain_logits(model, sys.executable, gpu=True)
    assert seen == plain_logits(model, sys.executable, gpu=False)
    if PLAIN.exists() and PLAIN.parent.parent != Path(sys.prefix):
        assert seen == plain_logits(model, str(PLAIN), gpu=False)


@pytest.mark.parametrize(
    "architecture", [*sorted(set(SUPPORTED) - {"smollm3"} - set(zoo.MODELS)), "llama-moe", *HYBRIDS]
)
def test_windows_differ_from_the_cpu_as_whole_models_do(architecture, tmp_path, gpu):
    """All layers there, and layers that it helps with, are the whole model's bit for bit; some differ no more than it does
    with some or all of its own."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.gpu.differences", architecture, str(tmp_path)],
        env=environment(os.environ, 1, 0, gpu=True),
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
    )
    how = how_it_ended(child.returncode)
    if child.returncode and gpu.name.startswith(SOFTWARE) and has_experts(tmp_path / "model.gguf"):
        pytest.skip(
            f"{SOFTWARE} overwrites memory where llama.cpp computes experts, of whole models too; here it {how}"
        )
    assert child.returncode == 0, f"it {how} after {child.stdout!r}"
    whole, windows = map(json.loads, child.stdout.decode().splitlines())
    assert windows["all"] == whole[-1]
    assert [windows["none, helped"], windows["the tail, the others helped"]] == whole[:2]
    assert min(whole[:2]) > 0, "prompts are computed there"
    bound = max(LEAST_BOUND, SLACK * max(whole))
    assert max(windows.values()) <= bound, f"whole models differ by {whole}, windows by {windows}"


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_on_the_cpu_leave_the_rest_on_the_gpu(architecture, tmp_path, gpu):
    """As a whole model of llama.cpp does with the same experts there, bit for bit; Mesa's computes no experts then."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.gpu.differences", architecture, str(tmp_path), "apart"],
        env=environment(os.environ, 1, 0, gpu=True),
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
    )
    assert child.returncode == 0, f"it {how_it_ended(child.returncode)} after {child.stdout!r}"
    whole, windows = map(json.loads, child.stdout.decode().splitlines())
    assert windows["all"] == whole[1], gpu.name
    assert min(*whole, *windows.values()) > 0, "attention is computed there"
    assert max(windows.values()) <= max(LEAST_BOUND, SLACK * max(whole))
