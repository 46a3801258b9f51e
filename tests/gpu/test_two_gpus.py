"""Two GPUs of one device: two real ones, or Mesa's software device shown twice (``GGML_VK_VISIBLE_DEVICES=0,0``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from primad.profiler.gpus import list_gpus
from primad.system.children.spawn import environment
from tests.e2e.cluster import Head, Primad, wait_until
from tests.e2e.streams import ask
from tests.gpu.drivers import with_lost_gpu
from tests.gpu.rings import gpu_layers, measured, ring_of_two

ROOT = Path(__file__).parent.parent.parent
WORKER_THREADS = 2
TWICE = {"GGML_VK_VISIBLE_DEVICES": "0,0"}
ARCHITECTURES = ("llama", "qwen3moe", "qwen3next")
MIB = 1 << 20
MAX_OFF = 64 * MIB
SOME_LAYERS_BYTES = 320 * MIB
"""Enough for some of SmolLM2's layers; twice as much is enough for all."""


@pytest.fixture(scope="module")
def twice(gpu) -> dict[str, str]:
    """Environment variables that show a process two GPUs."""
    listed = list_gpus()
    if not isinstance(listed, str) and len(listed) > 1:
        return {}
    if gpu.backend != "Vulkan":
        pytest.skip(f"there is one GPU, and {gpu.backend} does not show it twice")
    return TWICE


@pytest.fixture(scope="module")
def other(twice) -> str:
    """llama.cpp's name for the second one."""
    return "Vulkan1" if twice else list_gpus()[1].id


@pytest.fixture(scope="module")
def reported(twice, tmp_path_factory) -> dict[str, Any]:
    """The output of ``halves``, by architecture."""
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
def test_windows_split_over_two_gpus_compute_the_same_as_on_one(architecture, reported):
    found = reported[architecture]
    assert found["both"]["logits"] == found["one"]["logits"]
    assert found["the other"]["logits"] == found["one"]["logits"]


@pytest.mark.parametrize("where", ["one", "both", "the other"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_gpu_takes_its_planned_memory(architecture, where, reported):
    allocated, planned = (reported[architecture][where][name] for name in ("taken", "planned"))
    for gpu, size in planned.items():
        assert abs(allocated.get(gpu, 0.0) - size) <= 3 * MAX_OFF, f"{gpu}: {allocated} of {planned}"
    assert min(planned.values()) > 0 or where != "both"


@pytest.fixture
def ring(smollm2, new_home, cluster, gpu) -> Callable[..., AbstractContextManager[tuple[Head, Primad]]]:
    """Starts a ring whose worker has a profile with these GPUs and may use ``each_bytes`` of each."""
    homes = new_home("head"), new_home("lap")

    @contextmanager
    def ring(each_bytes: int, others: Sequence[str], **named: str) -> Iterator[tuple[Head, Primad]]:
        limit = "--max-vram", f"{100 * each_bytes / gpu.vram_total_bytes:.6f}%"
        with (
            measured(gpu, homes[1], WORKER_THREADS, others=others),
            ring_of_two(smollm2, homes, cluster, WORKER_THREADS, "--sequences", 1, of_worker=limit, **named) as (
                head,
                worker,
            ),
        ):
            yield head, worker
            assert "too little memory left" not in worker.output
            assert "Traceback" not in worker.output + head.run.output

    return ring


def layers_by_gpu(head: Head) -> dict[str, int]:
    """The number of layers on each GPU of the worker, if it has several."""
    (worker,) = (device for device in head.status()["devices"] if device["role"] == "worker")
    return {each["id"]: each["layers"] for each in worker["gpus"]}


def test_a_ring_on_two_gpus_gives_the_text_of_one(ring, twice, other):
    with ring(2 * SOME_LAYERS_BYTES, []) as (head, _):
        layers_on_one, single = gpu_layers(head), ask(head)
    with ring(SOME_LAYERS_BYTES, [other], **twice) as (head, _):
        assert min(layers_by_gpu(head).values()) > 0
        assert gpu_layers(head) == layers_on_one > 0
        assert (ask(head).text, single.error) == (single.text, None)


def test_a_vanished_gpu_leaves_the_other_in_use(ring, twice, other):
    """The worker's profile has both GPUs."""
    if not twice:
        pytest.skip("real GPUs stay where they are")
    with ring(SOME_LAYERS_BYTES, [other], GGML_VK_VISIBLE_DEVICES="0") as (head, _):
        assert gpu_layers(head) > 0, head.run.output
        assert not layers_by_gpu(head), "one is left"
        answer = ask(head)
        assert (answer.finish, answer.error) == ("length", None), head.run.output


def test_a_gpu_lost_during_a_response_leaves_the_other_in_use(ring, twice, other, tmp_path):
    """The driver ends the ring process each time, and nothing names the lost GPU."""
    if not twice:
        pytest.skip("real GPUs stay where they are")
    lost = tmp_path / "lost"
    with ring(SOME_LAYERS_BYTES, [other], **with_lost_gpu(tmp_path, lost)) as (head, worker):
        assert min(layers_by_gpu(head).values()) > 0
        answer = ask(head, lost.touch)
        assert (answer.finish, answer.error) == ("length", None), head.run.output + worker.output
        assert answer.text
        worker.wait_for(r"of the GPUs only Vulkan\d is used")
        wait_until(lambda: gpu_layers(head) > 0, "the other one has layers again")
        assert not layers_by_gpu(head), "one is left"


def test_two_daemons_with_a_gpu_each_share_every_layer(smollm2, new_home, cluster, gpu, twice, other):
    homes = new_home("head"), new_home("lap")
    own = "--gpu", gpu.id, "--threads", WORKER_THREADS, "--parallel", "tensor"
    with (
        measured(gpu, homes[0], WORKER_THREADS, others=[other]),
        measured(gpu, homes[1], WORKER_THREADS, others=[other]),
        ring_of_two(smollm2, homes, cluster, WORKER_THREADS, *own, of_worker=("--gpu", other), **twice) as (
            head,
            worker,
        ),
    ):
        assert [each["gpu_layers"] for each in head.status()["devices"]] == [30, 30], head.run.output
        answer = ask(head, tokens=8)
        assert (answer.finish, answer.error) == ("length", None), head.run.output + worker.output
