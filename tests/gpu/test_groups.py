"""Tensor-parallel ranks with their shares on a GPU: next to a rank on the CPU, as two processes, and as planned and
served.
"""

from __future__ import annotations

from dataclasses import replace as changed

import pytest
from msgspec.structs import replace

from primad.gguf.architectures.layers import layer_count
from primad.gguf.header import read_header
from tests.e2e.streams import ask
from tests.gpu.rings import measured, ring_of_two
from tests.shell.test_tensor_groups import MAX_DIFFERENCE, OPTIONS, difference_of, group_logits, whole_logits
from tools import synth
from tools.lab.local_ring import LocalRing, even_group

PROMPT = [*range(100, 160)]
TOKENS = 6
WORKER_THREADS = 5


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt-oss", "qwen35", "deepseek2"])
def test_a_share_on_a_gpu_and_one_on_the_cpu_give_the_whole_models_logits(architecture, rank, gpu, tmp_path):
    """The logits differ at most twice as much as the whole model's between CPU and GPU."""
    synth.write_model(tmp_path / "model.gguf", architecture=architecture, quantisation="f32")
    header, options = read_header(tmp_path / "model.gguf"), replace(OPTIONS, gpu=gpu.id)
    expected, there = (whole_logits(header, options, on_gpu=on_gpu) for on_gpu in (False, True))
    allowed = 2 * difference_of(there, expected)
    found, _, sums = group_logits(header, [1, 1], [0, 2, layer_count(header)], tmp_path, options, on_gpu=(rank,))
    assert sums
    assert difference_of(found, expected) <= max(allowed, MAX_DIFFERENCE)


async def test_two_ranks_on_gpus_write_the_same_each_time_as_one_gpu_does(gpu, smollm2, tmp_path):
    plan = even_group(smollm2, 2)
    (ranks,) = plan.groups
    both = changed(plan, groups=(tuple(changed(rank, on_gpu=True) for rank in ranks),))
    texts = []
    for windows in ({"plan": both}, {"plan": both}, {}):
        async with LocalRing(smollm2, None, context=256, gpu=gpu.id, folder=tmp_path, **windows) as ring:
            sampled, _ = await ring.generate(PROMPT, TOKENS)
            texts.append([each.token for each in sampled])
    assert texts[0] == texts[1]
    assert texts[0][0] == texts[2][0]


def test_a_head_serves_with_a_worker_whose_share_is_on_its_gpu(smollm2, new_home, cluster, gpu, tmp_path):
    homes = new_home("head"), new_home("lap")
    with (
        measured(gpu, homes[1], WORKER_THREADS),
        ring_of_two(smollm2, homes, cluster, WORKER_THREADS, "--parallel", "tensor") as (head, worker),
    ):
        placed = {each["name"]: (each.get("gpu_layers", 0), each["layers"]) for each in head.status()["devices"]}
        assert sorted(placed.values()) == [(0, 30), (30, 30)], placed
        reported = ask(head, tokens=8)
        assert (reported.finish, reported.error) == ("length", None), head.run.output + worker.output
        assert "Traceback" not in head.run.output + worker.output
