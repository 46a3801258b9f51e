"""Two GPUs of one device: two that there are, or Mesa's software device shown twice (``GGML_VK_VISIBLE_DEVICES=0,0``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from primad.profiler.gpus import list_gpus
from primad.system.children.spawn import environment
from tests.e2e.streams import ask
from tests.gpu.rings import gpu_layers, measured, ring_of_two

ROOT = Path(__file__).parent.parent.parent
WORKER_THREADS = 2
TWICE = {"GGML_VK_VISIBLE_DEVICES": "0,0"}
ARCHITECTURES = ("llama", "qwen3moe", "qwen3next")
MIB = 1 << 20
MAX_OFF = 64 * MIB


@pytest.fixture(scope="module")
def twice(gpu) -> dict[str, str]:
    """What shows two GPUs to a process."""
    listed = list_gpus()
    if not isinstance(listed, str) and len(listed) > 1:
        return {}
    if gpu.backend != "Vulkan":
        pytest.skip(f"there is one GPU, and {gpu.backend} does not show it twice")
    return TWICE


@pytest.fixture(scope="module")
def reported(twice, tmp_path_factory) -> dict[str, Any]:
    """What ``halves`` says of each architecture."""
    folder = tmp_path_factory.mktemp("halves")
    child = subprocess.run(
        [sys.executable, "-m", "tests.gpu.halves", str(folder), *ARCHITECTURES],
        env=environment({**os.environ, **twice}, 1, 0, gpu=True),
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    return {line["architecture"]: line for line in map(json.loads, child.stdout.splitlines())}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_windows_split_over_two_compute_what_one_does(architecture, reported):
    found = reported[architecture]
    assert found["both"]["logits"] == found["one"]["logits"]
    assert found["the other"]["logits"] == found["one"]["logits"]


@pytest.mark.parametrize("where", ["one", "both", "the other"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_takes_what_was_planned_of_it(architecture, where, reported):
    taken, planned = (reported[architecture][where][name] for name in ("taken", "planned"))
    for gpu, size in planned.items():
        assert abs(taken.get(gpu, 0.0) - size) <= 3 * MAX_OFF, f"{gpu}: {taken} of {planned}"
    assert min(planned.values()) > 0 or where != "both"


@pytest.mark.parametrize("shown", [["0", "1"], ["0"]])
def test_a_gpu_that_is_gone_leaves_the_other(shown: Sequence[str], twice, smollm2, new_home, cluster, gpu):
    """The worker counts as measured with both."""
    if not twice:
        pytest.skip("real GPUs stay where they are")
    home, named = new_home("lap"), {"GGML_VK_VISIBLE_DEVICES": ",".join("0" for _ in shown)}
    with (
        measured(gpu, home, WORKER_THREADS, others=["Vulkan1"]),
        ring_of_two(smollm2, (new_home("head"), home), cluster, WORKER_THREADS, **named) as (head, worker),
    ):
        assert gpu_layers(head) > 0, head.run.output
        answer = ask(head)
        assert (answer.finish, answer.error) == ("length", None), head.run.output
        assert "Traceback" not in worker.output + head.run.output
