"""If layers stream, larger prompt chunks are used where faster, since each read serves more rows.

Where memory is short, chunks are smaller: their buffers leave more room for layers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from halda import (
    CHUNKS,
    OBJECTIVES,
    Infeasible,
    Instance,
    Objective,
    Plan,
    Solution,
    Window,
    Workload,
    evaluate,
    instance,
    solve,
)
from halda.chunk_rows import FEWER_GAIN, RING_CHUNKS, RING_GAIN
from halda.profile import DeviceProfile, ModelProfile
from halda.streaming import RESERVE_BYTES
from tests.fakes import planning
from tests.fakes.planning import GB, device, link
from tests.solver.test_filling import every_split

WORK = Workload(context_tokens=8192, kv_type="f16", sequences=1, prompt_tokens=4096, answer_tokens=16, chunk_rows=512)
SLOW_DISK = device("desk", ram=3 * GB, rate=100e9, disk=0.2e9)


def model() -> ModelProfile:
    """20 layers of 250 MB, with buffers of 150 MB for 512 rows."""
    return replace(planning.model(), width=8192)


def question(*devices: DeviceProfile, rows: int = 512, work: Workload = WORK) -> Instance:
    return instance(devices, [], model(), replace(work, chunk_rows=rows), {})


def solved(
    *devices, work: Workload = WORK, objective: Objective = "balanced", chunks: tuple[int, ...] = CHUNKS
) -> Solution:
    return solve(devices or (SLOW_DISK,), [], model(), work, objective=objective, chunks=chunks)


@pytest.mark.parametrize("objective", ["balanced", "ttft"])
def test_a_slow_disk_serves_more_rows_with_each_read(objective):
    small, large = solved(objective=objective, chunks=()), solved(objective=objective)
    rows = large.prediction.chunk_rows
    assert small.prediction.chunk_rows == 512 < rows
    for other in (512, *CHUNKS):
        alone = solved(objective=objective, work=replace(WORK, chunk_rows=other), chunks=())
        assert large.objective_s <= alone.objective_s * (1 + 1e-6)
    assert large.objective_s < small.objective_s
    assert large.prediction.ttft_s < 0.6 * small.prediction.ttft_s
    assert large.prediction.devices[0].ram_bytes <= SLOW_DISK.ram_available_bytes
    assert evaluate(large.plan, question(SLOW_DISK, rows=rows)) == large.prediction


def test_the_larger_buffer_may_cost_more_than_it_gains():
    work = replace(WORK, prompt_tokens=600, answer_tokens=4000)
    (part,) = solved(work=work, chunks=()).prediction.devices
    full = device("desk", ram=part.ram_bytes, rate=100e9, disk=0.2e9)
    # With 1024 rows one more layer would stream for each token of a long completion.
    assert solved(full, work=work).prediction.chunk_rows == 512
    assert solved(full, work=work, objective="ttft").prediction.chunk_rows == 1024


def test_a_short_prompt_and_a_plan_without_streaming_keep_their_chunks():
    assert solved(work=replace(WORK, prompt_tokens=512)).prediction.chunk_rows == 512
    assert solved(device("desk", ram=20 * GB, disk=0.2e9)).prediction.chunk_rows == 512
    assert solved(chunks=()).prediction.chunk_rows == 512


def test_where_computing_takes_all_the_time_chunks_stay_small():
    quick = device("desk", ram=3 * GB, rate=20e9, disk=5e9)
    assert solved(quick).prediction.chunk_rows == 512
    # During decode the buffer's memory holds weights, whatever its size.
    assert solved(quick, objective="latency").prediction.chunk_rows == 512
    # A chunk of 1024 rows would keep a slow device busy for more than a minute.
    assert solved(device("desk", ram=3 * GB, rate=4e9, disk=0.05e9)).prediction.chunk_rows == 512


def test_a_ring_has_one_size_of_chunk_that_all_can_hold():
    devices = tuple(device(name, ram=22 * GB // 10, rate=100e9, disk=0.2e9) for name in ("desk", "lap"))
    found = solved(*devices)
    assert len(found.plan.devices) == 2
    assert found.prediction.chunk_rows > 512
    assert not evaluate(found.plan, question(*devices, rows=found.prediction.chunk_rows)).short


def min_ram(rows: int, layers: int = 20) -> int:
    """The minimum memory of a head with this many layers, all of them streamed."""
    asked = question(device("desk", ram=0, rate=100e9, disk=0.2e9), rows=rows)
    windows = 1 if layers == 20 else 2
    kv, read_ahead = asked.kv_bytes[0], asked.members[0].read_ahead_steps[-1].read_ahead_bytes + RESERVE_BYTES
    return (
        asked.runtime_bytes(windows) + asked.head_bytes(windows) + layers * kv + asked.model.output_bytes + read_ahead
    )


def test_with_the_minimum_memory_a_chunk_has_the_fewest_rows():
    small = device("desk", ram=min_ram(128), rate=100e9, disk=0.2e9)
    for rows in (512, 256):
        with pytest.raises(Infeasible, match="RAM of desk is short"):
            solved(small, work=replace(WORK, chunk_rows=rows), chunks=())
    found = solved(small)
    assert found.prediction.chunk_rows == 128
    assert evaluate(found.plan, question(small, rows=128)) == found.prediction
    assert not found.prediction.short
    with pytest.raises(Infeasible, match=r"RAM of desk is short of 0\.1 MB"):
        solved(device("desk", ram=min_ram(128) - 1, rate=100e9, disk=0.2e9))


def test_a_fleet_with_the_minimum_memory_has_a_plan_with_the_fewest_rows():
    """Neither device could also hold the KV cache of the whole model."""
    quick = {"rate": 100e9, "disk": 0.2e9}
    asked = question(device("desk", ram=0, **quick), rows=128)
    worker = (
        asked.runtime_bytes(1)
        + 10 * asked.kv_bytes[0]
        + asked.members[0].read_ahead_steps[-1].read_ahead_bytes
        + RESERVE_BYTES
    )
    fleet = (device("desk", ram=min_ram(128, layers=10), **quick), device("lap", ram=worker, **quick))
    with pytest.raises(Infeasible):
        solved(*fleet, chunks=())
    for found in (
        solved(*fleet),
        solve(fleet, [], model(), WORK, heads=["desk", "lap"], chunks=CHUNKS),
    ):
        assert found.prediction.chunk_rows == 128
        assert len(found.plan.devices) == 2
        assert not evaluate(found.plan, question(*fleet, rows=128)).short


def test_a_device_with_memory_to_spare_has_as_many_rows_as_it_can():
    """Between the minimum for 128 rows and that for 512 there is room for 256, which read half as often."""
    assert solved(device("desk", ram=min_ram(256), rate=100e9, disk=0.2e9)).prediction.chunk_rows == 256
    assert solved(device("desk", ram=min_ram(512), rate=100e9, disk=0.2e9)).prediction.chunk_rows == 512


def test_fewer_rows_are_taken_where_a_long_answer_is_clearly_quicker():
    """With 128 rows nothing streams; with 512 some layers must, for every token."""
    work = replace(WORK, prompt_tokens=600, answer_tokens=4000)
    (whole,) = solved(device("desk", ram=20 * GB), work=replace(work, chunk_rows=128), chunks=()).prediction.devices
    assert not whole.streamed_bytes
    tight = device("desk", ram=whole.ram_bytes, rate=100e9, disk=0.2e9)
    usual, found = solved(tight, work=work, chunks=()), solved(tight, work=work)
    assert usual.plan.streaming
    assert found.prediction.chunk_rows == 128
    assert not found.plan.streaming
    assert found.objective_s < (1 - FEWER_GAIN) * usual.objective_s
    # A prompt with a very short completion is faster with one chunk than with five.
    assert solved(tight, work=work, objective="ttft").prediction.chunk_rows >= 512


def test_fewer_rows_are_not_taken_for_a_little():
    """One streamed layer of 15 less is 6 % of a token, but less than 5 % of a request with its prompt."""
    work = replace(WORK, answer_tokens=100)
    usual, fewer = (solved(work=replace(work, chunk_rows=rows), chunks=()) for rows in (512, 128))
    assert fewer.prediction.tpot_s < usual.prediction.tpot_s
    assert solved(work=work, chunks=(128, 256)).prediction.chunk_rows == 512


PROMPT = replace(WORK, context_tokens=4096, prompt_tokens=512, answer_tokens=64)
LINKS = [link(a, b) for a in "ab" for b in "ab" if a != b]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_ring_has_a_typical_prompt_in_chunks_that_fill_it_and_buffers_for_larger_ones(objective):
    devices, of = [device("a"), device("b")], planning.model()
    both = frozenset("ab")
    found = solve(devices, LINKS, of, PROMPT, objective=objective, require=both, chunks=CHUNKS, settles=True)
    whole = solve(devices[:1], [], of, PROMPT, objective=objective, chunks=CHUNKS)
    assert whole.prediction.chunk_rows == 512
    assert found.prediction.ttft_s <= 0.6 * whole.prediction.ttft_s
    assert found.prediction.chunk_rows < 512 == found.prediction.step_rows
    assert found.prediction == evaluate(
        found.plan,
        instance(devices, LINKS, of, replace(PROMPT, chunk_rows=found.prediction.chunk_rows, buffer_rows=512), {}),
    )


@pytest.mark.parametrize(("rate", "batch"), [(20e9, 0.5), (30e9, 0.05), (60e9, 0.5)])
def test_no_split_with_any_chunk_has_a_request_sooner(rate, batch):
    devices, of = [device("a"), device("b", rate=rate)], replace(planning.model(layers=8), layers=model().layers[:8])
    slow = [replace(each, batch_bytes_per_s=batch * each.decode_bytes_per_s) for each in devices[0].cpu.speeds]
    devices[0] = replace(devices[0], cpu=replace(devices[0].cpu, speeds=tuple(slow)))
    found = solve(devices, LINKS, of, PROMPT, chunks=CHUNKS)
    best_s = math.inf
    for rows in (512, *RING_CHUNKS):
        asked = instance(devices, LINKS, of, replace(PROMPT, chunk_rows=rows, buffer_rows=512), {})
        alone = Window(device="a", first=0, last=8, gpu_layers=0)
        single = Plan(rounds=1, route=(alone,), output_on_gpu=False, streaming=(), left_out=())
        for plan in (single, *every_split(asked)):
            prediction = evaluate(plan, asked)
            if not prediction.short:
                best_s = min(best_s, prediction.exchange_s(PROMPT.answer_tokens))
    assert found.objective_s <= best_s * (1 + RING_GAIN)
