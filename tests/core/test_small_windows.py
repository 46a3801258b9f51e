"""A small sliding-window cache is planned if full ones cost layers or speed; then there are no drafts."""

from __future__ import annotations

import dataclasses

import pytest

from halda import LayerProfile, Workload, cost
from primad.gguf.shapes import shape as model_shape
from primad.planning.explain import explain
from primad.planning.fitting import Served
from primad.planning.plan import plan
from primad.planning.question import ask
from primad.planning.request import PlanRequest
from primad.planning.run_config import RunConfig
from tests.fakes.planning import GB, device, model, wishes

WORK = Workload(
    context_tokens=8192,
    kv_type="f16",
    sequences=2,
    prompt_tokens=512,
    answer_tokens=256,
    chunk_rows=512,
    small_windows=True,
)
SLIDING = LayerProfile(
    bytes_by_type={"Q4_K": GB // 4}, expert_bytes_by_type={}, kv_bytes_per_token=1 << 15, window_tokens=1000
)
FULL = dataclasses.replace(SLIDING, window_tokens=0)


def sliding_model():
    """Ten layers of which all but every fifth slide: 2.5 GB of weights, and 5 GB of KV cache for 16,384 tokens."""
    layers = tuple(SLIDING if layer % 5 != 4 else FULL for layer in range(10))
    return dataclasses.replace(model(layers=10, context_tokens=16384), layers=layers)


def asked(vram: int, **options):
    fields = {"context_tokens": 16384, "sequences": 1, **options}
    return PlanRequest(
        devices=[device("desk", ram=32 * GB, vram=vram)], links=[], model=sliding_model(), run=RunConfig(**fields)
    )


def test_cells_and_bytes_are_by_kind_of_layer():
    assert (cost.kv_cells(SLIDING, WORK), cost.kv_cells(FULL, WORK)) == (1536, 8192)
    assert cost.kv_cells(SLIDING, dataclasses.replace(WORK, small_windows=False)) == 8192
    assert cost.kv_cells(SLIDING, dataclasses.replace(WORK, context_tokens=1024)) == 1024
    assert cost.kv_bytes(SLIDING, WORK) == 2 * 1536 << 15
    assert cost.checkpoint_bytes(SLIDING, WORK) == 5 * 1000 << 15
    assert cost.checkpoint_bytes(FULL, WORK) == 0


def test_the_mask_of_a_small_cache_is_as_small():
    sliding = dataclasses.replace(sliding_model(), architecture="gemma3")
    whole = dataclasses.replace(WORK, small_windows=False)
    more = cost.compute_buffer_bytes(sliding, whole) - cost.compute_buffer_bytes(sliding, WORK)
    assert more == cost.MASK_BYTES * WORK.chunk_rows * (8192 - 1536)


def test_a_state_being_written_to_disk_has_room_besides_the_kept_ones():
    recurrent = dataclasses.replace(FULL, kv_bytes_per_token=0, state_bytes=1 << 20)
    assert cost.checkpoint_bytes(recurrent, WORK) == (cost.checkpoints(WORK.sequences) + 1) << 20


def test_attention_looks_at_no_more_cells_than_there_are():
    assert (cost.kv_cells(SLIDING, WORK, 300.5), cost.kv_cells(SLIDING, WORK, 4000)) == (301, 1536)


def test_where_all_fits_sliding_layers_have_the_cells_of_all_others():
    assert not plan(asked(12 * GB)).question.workload.small_windows


def test_where_cells_push_layers_off_a_gpu_the_cache_of_windows_is_small():
    found = plan(asked(5 * GB))
    assert found.question.workload.small_windows
    assert sum(window.gpu_layers for window in found.plan.route) == 10
    assert found.drafting is None


def test_where_long_prompts_are_typical_the_cache_of_windows_is_small_as_less_of_it_is_read():
    long, short = ({"prompt_tokens": tokens, "answer_tokens": 256} for tokens in (15000, 512))
    assert plan(asked(12 * GB, **long)).question.workload.small_windows
    assert not plan(asked(12 * GB, **short)).question.workload.small_windows


def test_a_small_cache_is_used_where_no_other_plan_fits():
    request = asked(0)
    small = dataclasses.replace(device("desk", ram=5 * GB), disk=dataclasses.replace(device("d").disk, free_bytes=0))
    assert plan(dataclasses_of(request, devices=[small])).question.workload.small_windows


def dataclasses_of(request: PlanRequest, **changes) -> PlanRequest:
    return PlanRequest(**{name: changes.get(name, getattr(request, name)) for name in request.__struct_fields__})


def test_requested_drafts_keep_the_cells_that_they_need():
    assert not plan(asked(5 * GB, speculate="lookup")).question.workload.small_windows


@pytest.mark.parametrize("small", [False, True])
def test_requests_resume_with_the_cells_that_they_had(small):
    served = Served(context_tokens=16384, sequences=1, flash=True, small_windows=small)
    request = dataclasses_of(asked(5 * GB if not small else 12 * GB), served=served, keeps_attention=True)
    assert plan(request).question.workload.small_windows == small


def test_the_plan_shows_that_the_cache_is_small():
    devices = [device(name, ram=4 * GB, vram=3 * GB) for name in ("desk", "lap")]
    question = ask(
        wishes(context_tokens=16384, sequences=1, use_all=True, head="desk", time_limit_s=20),
        devices,
        (),
        sliding_model(),
    )
    assert explain(question).workload.small_windows


def test_gemma_3_27b_with_32k_tokens_lies_on_a_gpu_of_24_gb():
    shape = model_shape("gemma3-27b-q4k")
    assert sum(layer.window_tokens == 1024 for layer in shape.layers) == 52
    work = dataclasses.replace(WORK, context_tokens=32768, sequences=1)
    kv = sum(cost.kv_bytes(layer, work) for layer in shape.layers)
    assert kv == (10 * 32768 + 52 * 1536) * 8192 * 2 // 2
