"""A plan exists if output matrix, KV cache, buffers and two streamed layers fit in memory; otherwise none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from halda import (
    Infeasible,
    Instance,
    Limits,
    Objective,
    Plan,
    Prediction,
    Streaming,
    arrange,
    evaluate,
    instance,
    residency,
    solve,
)
from halda.profile import KV_TYPES, ModelProfile, Workload
from halda.streaming import MIN_READ_AHEAD_BYTES, RESERVE_BYTES
from tests.fakes import planning

MB = 10**6
LAYER = 50 * MB
WORK = Workload(context_tokens=1024, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=256, chunk_rows=512)


def model(*, layers: int = 12, output: int) -> ModelProfile:
    toy = planning.model(layers=layers, layer_bytes=LAYER)
    return replace(toy, output_bytes_by_type={"Q4_K": output}, width=4096)


def question(toy: ModelProfile, *rams: int, work: Workload = WORK) -> Instance:
    devices = [planning.device(f"d{i}", ram=ram) for i, ram in enumerate(rams)]
    return instance(devices, [], toy, work, {})


def solved(asked: Instance, objective: Objective = "balanced") -> tuple[Plan, Prediction]:
    found = solve(asked.devices, [], asked.model, asked.workload, objective=objective, limits=asked.limits)
    return found.plan, found.prediction


def smallest_ram(toy: ModelProfile, work: Workload = WORK) -> int:
    """The minimum memory of a single device, summed up independently of the solver."""
    asked = question(toy, 0, work=work)
    kv = sum(asked.kv_bytes[kind] for kind in asked.kind_of)
    read_ahead = max_read_ahead(asked)
    return asked.runtime_bytes(1) + asked.head_bytes(1) + kv + toy.output_bytes + read_ahead + RESERVE_BYTES


def max_read_ahead(asked: Instance) -> int:
    """The read-ahead of a device that streams all layers: one layer, and what its disk reads while one is computed."""
    seconds = max(asked.members[0].decode.cpu)
    return LAYER + math.ceil(min(LAYER, seconds * asked.devices[0].disk.prefetch_bytes_per_s))


@pytest.mark.parametrize("output", [20 * MB, LAYER, 180 * MB])
@pytest.mark.parametrize("objective", ["balanced", "ttft"])
def test_the_smallest_memory_that_runs_gets_a_plan_and_a_byte_less_none(output, objective):
    toy = model(output=output)
    asked = question(toy, smallest_ram(toy))
    plan, prediction = solved(asked, objective)
    assert plan.streaming == (
        Streaming(device="d0", streamed_bytes=12 * LAYER, read_ahead_bytes=max_read_ahead(asked)),
    )
    assert prediction.devices[0].ram_bytes == smallest_ram(toy)
    assert prediction.devices[0].disk_bytes_per_token == 12 * LAYER - asked.buffer_bytes
    with pytest.raises(Infeasible, match=r"RAM of d0 is short of 0\.\d MB") as caught:
        solved(question(toy, smallest_ram(toy) - 1), objective)
    assert caught.value.short_bytes <= 2


@pytest.mark.parametrize("output", [20 * MB, 180 * MB])
def test_at_every_budget_from_there_on_no_more_is_read_than_does_not_fit(output):
    toy = model(output=output)
    whole = evaluate(arrange(["d0"], [12], rounds=1, model=toy), question(toy, 0)).devices[0].ram_bytes
    before = float("inf")
    for ram in range(smallest_ram(toy), whole + LAYER, 30 * MB):
        asked = question(toy, ram)
        plan, prediction = solved(asked, "latency")
        assert not prediction.short
        assert prediction.devices[0].disk_bytes_per_token <= before, "more memory, more to read"
        before = prediction.devices[0].disk_bytes_per_token
        streaming, over = plan.streaming_of("d0"), max(0, whole - ram)
        assert streaming.streamed_bytes == (over + streaming.read_ahead_bytes + RESERVE_BYTES if over else 0)
        # A part of a layer, at most twice the necessary size, and the bytes read meanwhile.
        part = max(LAYER / 8, 2 * streaming.streamed_bytes / 12)
        assert streaming.read_ahead_bytes <= max(MIN_READ_AHEAD_BYTES, part + max_read_ahead(asked) - LAYER + 1)
        by_rule = residency(arrange(["d0"], [12], rounds=1, model=toy), asked)
        assert by_rule.streaming == plan.streaming
    assert before == 0


def test_in_a_ring_as_well():
    toy = model(layers=40, output=400 * MB)
    toys = question(toy, 0)
    # The head's second window in a ring, which needs no vocabulary.
    second = toys.runtime_bytes(2) + toys.head_bytes(2) - toys.runtime_bytes(1) - toys.head_bytes(1)
    small = smallest_ram(toy) + second - 20 * toys.kv_bytes[0]
    other = toys.runtime_bytes(1) + max_read_ahead(toys) + RESERVE_BYTES + 20 * toys.kv_bytes[0]
    with pytest.raises(Infeasible, match="RAM of d0 is short"):
        solved(question(toy, small))
    plan, prediction = solved(question(toy, small, other))
    assert plan.devices == ("d0", "d1")
    assert not prediction.short
    with pytest.raises(Infeasible, match="RAM of d"):
        solved(question(toy, small, other - 1))


def test_one_layer_does_not_stream_since_it_is_held_anyway():
    toy = model(layers=1, output=20 * MB)
    whole = evaluate(arrange(["d0"], [1], rounds=1, model=toy), question(toy, 0)).devices[0].ram_bytes
    assert not solved(question(toy, whole))[0].streaming
    with pytest.raises(Infeasible, match=r"RAM of d0 is short of 0\.1 MB"):
        solved(question(toy, whole - 1))


def test_a_stall_is_laid_to_the_device_that_reads_longest():
    toy = model(output=20 * MB)
    asked = question(toy, smallest_ram(toy) + LAYER)
    _, prediction = solved(asked)
    assert prediction.disk_s > prediction.compute_s
    assert sum(device.stall_s for device in prediction.devices) == pytest.approx(prediction.stall_s)
    assert prediction.devices[0].stall_s == pytest.approx(prediction.tpot_s - prediction.compute_s)


# ---- KV cache ----------------------------------------------------------------------------------------------------------


def test_a_smaller_kv_cache_takes_its_share_of_memory_and_time():
    toy = model(output=20 * MB)
    by_type = {}
    for kv_type in KV_TYPES:
        asked = question(toy, 10**10, work=replace(WORK, kv_type=kv_type))
        by_type[kv_type] = (asked.kv_bytes[0], evaluate(arrange(["d0"], [12], rounds=1, model=toy), asked))
    assert [size for size, _ in by_type.values()] == [4096 * 1024, 4096 * 1024 * 17 // 32, 4096 * 1024 * 9 // 32]
    held = [found.devices[0].ram_bytes for _, found in by_type.values()]
    assert held[0] - held[2] == 12 * 4096 * 1024 * 23 // 32
    times = [found.tpot_s for _, found in by_type.values()]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[2]


def test_a_context_that_does_not_fit_is_refused_and_never_shortened():
    toy = model(output=20 * MB)
    long = replace(WORK, context_tokens=200_000)
    ram = smallest_ram(toy, replace(long, kv_type="q8_0"))
    with pytest.raises(Infeasible) as caught:
        solved(question(toy, ram, work=long))
    printed = str(caught.value)
    assert "with 200000 tokens of context" in printed
    assert "RAM of d0 is short of" in printed
    assert printed.endswith(
        "the KV cache (f16) takes 9,830.4 MB in all: a smaller context or a KV cache in q8_0 or q4_0 takes less"
    )
    assert solved(question(toy, ram, work=replace(long, kv_type="q8_0")))[0].devices == ("d0",)
    with pytest.raises(Infeasible, match=r"\(q4_0\) takes 2,764\.8 MB in all: a smaller context takes less$"):
        solved(question(toy, 100 * MB, work=replace(long, kv_type="q4_0")))


def test_a_limit_that_is_too_low_is_refused_with_the_missing_bytes():
    toy = model(output=20 * MB)
    short = Limits(ram_bytes=smallest_ram(toy) - 10 * MB)
    asked = replace(question(toy, 10**10), limits={"d0": short})
    with pytest.raises(Infeasible, match=r"RAM of d0 is short of 10\.0 MB"):
        solved(asked)


def test_where_the_disk_alone_is_short_a_smaller_kv_cache_is_no_advice():
    asked = question(model(output=20 * MB), 10**10, 10**10)
    limits = {"d1": Limits(disk_bytes=1)}
    with pytest.raises(Infeasible, match=r"disk of d1 is short of \d+\.\d MB$"):
        solve(asked.devices, [], asked.model, asked.workload, limits=limits, require=frozenset({"d1"}))
