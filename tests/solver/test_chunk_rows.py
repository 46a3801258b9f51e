"""Where layers stream, a prompt is computed in larger chunks if that is quicker: what was read serves more rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import LARGER_CHUNKS, Objective, Solution, Workload, evaluate, instance, solve
from tests.fakes.planning import GB, device, model

WORK = Workload(context_tokens=8192, kv_type="f16", sequences=1, prompt_tokens=4096, answer_tokens=16, chunk_rows=512)
SLOW_DISK = device("desk", ram=3 * GB, rate=100e9, disk=0.2e9)


def solved(
    *devices, work: Workload = WORK, objective: Objective = "balanced", chunks: tuple[int, ...] = LARGER_CHUNKS
) -> Solution:
    return solve(devices or (SLOW_DISK,), [], model(), work, objective=objective, chunks=chunks)


@pytest.mark.parametrize("objective", ["balanced", "ttft"])
def test_a_slow_disk_serves_more_rows_with_each_read(objective):
    small, large = solved(objective=objective, chunks=()), solved(objective=objective)
    assert (small.prediction.chunk_rows, large.prediction.chunk_rows) == (512, 2048)
    assert large.objective_s < small.objective_s
    assert large.prediction.ttft_s < 0.5 * small.prediction.ttft_s
    assert large.prediction.devices[0].ram_bytes <= 3 * GB
    asked = instance([SLOW_DISK], [], model(), replace(WORK, chunk_rows=2048), {})
    assert evaluate(large.plan, asked) == large.prediction


def test_the_larger_buffer_may_cost_more_than_it_gains():
    work = replace(WORK, prompt_tokens=600, answer_tokens=4000)
    (part,) = solved(work=work, chunks=()).prediction.devices
    full = device("desk", ram=part.ram_bytes, rate=100e9, disk=0.2e9)
    # One more layer would stream for each token of a long answer.
    assert solved(full, work=work).prediction.chunk_rows == 512
    assert solved(full, work=work, objective="ttft").prediction.chunk_rows == 1024


def test_a_short_prompt_and_a_plan_without_streaming_keep_their_chunks():
    assert solved(work=replace(WORK, prompt_tokens=512)).prediction.chunk_rows == 512
    assert solved(device("desk", ram=20 * GB, disk=0.2e9)).prediction.chunk_rows == 512
    assert solved(chunks=()).prediction.chunk_rows == 512


def test_where_computing_takes_all_the_time_chunks_stay_small():
    quick = device("desk", ram=3 * GB, rate=20e9, disk=5e9)
    assert solved(quick, objective="latency").prediction.chunk_rows == 512
    # A chunk of 1024 rows would keep a slow device busy for more than a minute.
    assert solved(device("desk", ram=3 * GB, rate=4e9, disk=0.05e9)).prediction.chunk_rows == 512


def test_a_ring_has_one_size_of_chunk_that_all_can_hold():
    devices = tuple(device(name, ram=22 * GB // 10, rate=100e9, disk=0.2e9) for name in ("desk", "lap"))
    found = solved(*devices)
    assert len(found.plan.devices) == 2
    assert found.prediction.chunk_rows > 512
    asked = instance(devices, [], model(), replace(WORK, chunk_rows=found.prediction.chunk_rows), {}, found.plan.head)
    assert not evaluate(found.plan, asked).short
