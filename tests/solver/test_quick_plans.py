"""Quick plans: a search cut short is never worse than they are; one that finishes proves its answer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from halda import (
    CpuProfile,
    DeviceProfile,
    DiskProfile,
    Infeasible,
    Instance,
    LayerProfile,
    Limits,
    LinkProfile,
    ModelProfile,
    Plan,
    TypeSpeed,
    Workload,
    arrange,
    evaluate,
    instance,
    residency,
    solve,
)
from halda.cuts import good_cuts
from halda.orders import good_order
from halda.streaming import RESERVE_BYTES
from tests.solver.small_fleets import small_instance
from tools.research.random_fleets import random_instance

HURRIED_S = 0.5
LAYERS = 64
DEVICES = 4
PARTS = [(1024, 1024), (1024, 64), (1024, 1024), (1024, 4096), (1024, 4096)]
"""Rows and columns of a layer's matrices that are always Q4_K."""
MIXED = [(1024, 64), (4096, 1024)]
"""Rows and columns of those that are Q6_K in half of the layers."""
WORK = Workload(context_tokens=512, kv_type="f16", sequences=1, prompt_tokens=256, answer_tokens=256, chunk_rows=128)


def deep_model() -> ModelProfile:
    """575 MB in 64 layers of two kinds, mixed as in Q4_K_M."""
    always, sometimes = (sum(rows * columns for rows, columns in parts) for parts in (PARTS, MIXED))
    plain = {"Q4_K": (always + sometimes) * 144 // 256, "F32": 8192}
    finer = {"Q4_K": always * 144 // 256, "Q6_K": sometimes * 210 // 256, "F32": 8192}
    eighth = LAYERS // 8
    layers = [
        LayerProfile(
            bytes_by_type=finer if i < eighth or i >= LAYERS - eighth or (i - eighth) % 3 == 2 else plain,
            expert_bytes_by_type={},
            kv_bytes_per_token=256,
        )
        for i in range(LAYERS)
    ]
    return ModelProfile(
        name="deep",
        architecture="llama",
        layers=tuple(layers),
        embedding_bytes=4096 * 1024 * 144 // 256,
        output_bytes_by_type={"Q6_K": 4096 * 1024 * 210 // 256},
        tied=False,
        width=1024,
        vocabulary=4096,
        context_tokens=8192,
        experts=0,
        experts_used=0,
        kv_head_width=64,
        cut_multiple=1,
    )


def slow_device(name: str, ram: int) -> DeviceProfile:
    """Half of a core, and a disk so slow that reading streamed layers takes as long as computing all."""
    rates = {"Q4_K": 2.5e9, "Q6_K": 2.25e9, "F32": 3.75e9}
    speeds = [
        TypeSpeed(
            type=kind,
            decode_bytes_per_s=rate,
            batch_bytes_per_s=rate / 2,
            prefill_flop_per_s=2e10,
            extra_buffers=False,
            decode_spread=0.0,
            prefill_spread=0.0,
        )
        for kind, rate in rates.items()
    ]
    cpu = CpuProfile(
        name="half a core", cores=1, threads=1, batch_threads=1, step_s=4e-4, layer_s=4e-5, speeds=tuple(speeds)
    )
    disk = DiskProfile(prefetch_bytes_per_s=250e6, fault_bytes_per_s=250e6, random_bytes_per_s=25e6, free_bytes=10**12)
    return DeviceProfile(
        device=name,
        host=name,
        system="Linux",
        machine="x86_64",
        cpu=cpu,
        ram_total_bytes=2 * ram,
        ram_available_bytes=ram,
        ram_read_bytes_per_s=8e9,
        disk=disk,
        gpu=None,
    )


@pytest.fixture(scope="module")
def streaming_fleet() -> Instance:
    """Four slow devices, each with memory for an eighth of the layers and two layers of read-ahead."""
    model, names = deep_model(), [f"d{i}" for i in range(DEVICES)]
    links = [
        LinkProfile(source=a, target=b, address="", round_trip_s=2e-4, bytes_per_s=1e9)
        for a in names
        for b in names
        if a != b
    ]
    asked = instance([slow_device(name, 0) for name in names], links, model, WORK, {})
    held = sum(layer.size_bytes for layer in model.layers) + LAYERS * max(asked.kv_bytes)
    each = held // DEVICES // 2 + 2 * asked.model.largest_layer_bytes + RESERVE_BYTES + asked.runtime_bytes(1)
    head = model.output_bytes + asked.head_bytes(2)
    rams = [int(1.02 * (each + (0 if i else head))) for i in range(DEVICES)]
    devices = tuple(slow_device(name, ram) for name, ram in zip(names, rams, strict=True))
    return replace(asked, devices=devices)


def solved(asked: Instance, **options: object):
    links = list(asked.links.values())
    return solve(asked.devices, links, asked.model, asked.workload, limits=asked.limits, **options)


def even_plans(asked: Instance, rounds: int) -> list[Plan]:
    """All plans within the limits with one size for the head's windows and one for all others'."""
    names, found = [device.device for device in asked.devices], []
    for head in range(1, LAYERS // rounds + 1):
        for other in range(1, (LAYERS // rounds - head) // (len(names) - 1) + 1):
            if not LAYERS // 2 <= rounds * (head + other * (len(names) - 1)) < LAYERS:
                continue  # the tail would have nearly all layers, or take from a window, which would then be uneven
            try:
                plan = arrange(names, [head, *[other] * (len(names) - 1)], rounds=rounds, model=asked.model)
            except Infeasible:
                continue
            plan = residency(plan, asked)
            if not evaluate(plan, asked).short:
                found.append(plan)
    return found


def best_s(asked: Instance, plans: list[Plan]) -> float:
    return min(evaluate(plan, asked).tpot_s for plan in plans)


@pytest.mark.parametrize("required", [True, False])
def test_within_a_short_time_rounds_are_found_where_slow_devices_stream(streaming_fleet, required):
    names = frozenset(device.device for device in streaming_fleet.devices) if required else frozenset()
    found = solved(streaming_fleet, objective="latency", require=names, time_limit_s=HURRIED_S)
    even_s = {rounds: best_s(streaming_fleet, even_plans(streaming_fleet, rounds)) for rounds in (1, 2, 3, 4, 5, 8)}
    assert found.objective_s <= min(even_s.values()) * (1 + 1e-9)
    # Otherwise the fleet does not show the value of rounds.
    assert found.objective_s < 0.5 * even_s[1]
    assert found.plan.rounds > 1
    assert len(found.plan.devices) == DEVICES
    assert found.bound_s <= found.objective_s


def test_with_time_enough_the_plan_of_a_fleet_that_streams_is_proven(streaming_fleet):
    found = solved(streaming_fleet, objective="latency", time_limit_s=120.0)
    assert found.proven
    hurried = solved(streaming_fleet, objective="latency", time_limit_s=HURRIED_S)
    assert hurried.bound_s <= found.objective_s * (1 + 1e-6) <= hurried.objective_s * (1 + 2e-6)


def check_cuts(asked: Instance, objective, required: frozenset[int]) -> int:
    """The number of one-round plans within all limits. Checks that every plan is whole and has the required devices,
    and that no one-round plan, with which every search begins, is better than the answer."""
    order = good_order(asked, range(len(asked.devices))).members
    names = frozenset(asked.devices[m].device for m in required)
    values = []
    for rounds in (1, 2, 3):
        found = good_cuts(asked, [order], rounds, objective, required)
        assert found == good_cuts(asked, [order], rounds, objective, required)
        assert [price for price, _ in found] == sorted(price for price, _ in found)
        for _, route in found:
            on_gpu = route[-1].gpu_layers > 0
            plan = Plan(rounds=rounds, route=route, output_on_gpu=on_gpu, streaming=(), left_out=())
            assert names <= set(plan.devices)
            assert plan.head == asked.devices[0].device
            assert plan.layer_count == len(asked.model.layers)
            plan = residency(plan, asked)
            prediction = evaluate(plan, asked)
            if rounds == 1 and not prediction.short:
                values.append(prediction.objective_s(objective, asked.workload.answer_tokens))
    if values:
        best = solved(asked, objective=objective, require=names, time_limit_s=1e-3)
        assert best.objective_s <= min(values) * (1 + 1e-6)
        assert best.bound_s <= best.objective_s
    return len(values)


def test_no_quick_plan_is_better_than_the_answer():
    counts = []
    for seed in range(12):
        rng = random.Random(seed)
        asked = random_instance(rng, devices=rng.randint(2, 6), layers=rng.randint(8, 64))
        objective = rng.choice(["latency", "ttft", "throughput", "balanced"])
        required = frozenset({rng.randrange(1, len(asked.devices))}) if rng.random() < 0.4 else frozenset()
        counts.append(check_cuts(asked, objective, required))
    assert sum(counts) > len(counts)


def test_small_fleets_have_quick_plans_as_well():
    asked = [small_instance(random.Random(seed)) for seed in range(300, 320)]
    assert sum(check_cuts(question, objective, frozenset()) > 0 for question, objective in asked) > 5


@pytest.mark.parametrize("objective", ["latency", "balanced"])
def test_nothing_streams_where_memory_is_ample(streaming_fleet, objective):
    """Also on one machine, where all splits take equally long and streaming would leave memory free."""
    ample = tuple(replace(device, ram_available_bytes=10**10, host="one") for device in streaming_fleet.devices)
    names = frozenset(device.device for device in ample)
    found = solved(replace(streaming_fleet, devices=ample), objective=objective, require=names, time_limit_s=3)
    assert found.plan.streaming == ()


def test_no_device_streams_more_than_it_must_unless_that_is_faster(streaming_fleet):
    found = solved(streaming_fleet, objective="latency", require=frozenset({"d1"}), time_limit_s=3)
    minimum = residency(found.plan, streaming_fleet)
    assert not evaluate(minimum, streaming_fleet).short
    for streaming in found.plan.streaming:
        if streaming.streamed_bytes > minimum.streaming_of(streaming.device).streamed_bytes:
            others = tuple(each for each in found.plan.streaming if each.device != streaming.device)
            trial = replace(found.plan, streaming=(*others, minimum.streaming_of(streaming.device)))
            assert evaluate(trial, streaming_fleet).tpot_s > found.prediction.tpot_s


def test_a_shortage_of_many_devices_is_reported_without_a_search():
    asked = random_instance(random.Random(1), devices=16, layers=40, memory="about")
    poor = replace(asked, limits={device.device: Limits(ram_bytes=60 << 20) for device in asked.devices})
    with pytest.raises(Infeasible, match=r"RAM of d0 is short of .* MB") as caught:
        solve(poor.devices, list(poor.links.values()), poor.model, poor.workload, limits=poor.limits, time_limit_s=60)
    assert caught.value.short_bytes > 0
