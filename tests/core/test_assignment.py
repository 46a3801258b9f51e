"""The assignment agrees with what the engine keeps and reads: plan, status and engine count alike."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halda import (
    Assignment,
    Instance,
    LinkProfile,
    ModelProfile,
    Plan,
    Prediction,
    Streaming,
    Window,
    Workload,
    assignments,
    evaluate,
    instance,
    solve,
)
from halda.assignment import layers_worth
from halda.cost import RUNTIME_BYTES
from halda.streaming import MIN_READ_AHEAD_BYTES, smallest_read_ahead_bytes
from primad.engine.streaming.residency import Residency, Spread, by_expert
from primad.head.rings.status import Costs, device_status, plan_lines
from primad.planning.describe import DescribedPlan, ring_part
from tests.fakes import planning
from tools.research.random_fleets import random_instance, random_plan

MB = 10**6
LAYER = 50 * MB
CUT = 2 << 20
WORK = Workload(context_tokens=1024, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=256, chunk_rows=512)


def question(*rams: int, output: int = 60 * MB, disk: float = 0.2e9) -> Instance:
    toy = planning.model(layers=20, layer_bytes=LAYER)
    toy = replace(toy, output_bytes_by_type={"Q4_K": output}, width=2048)
    devices = [planning.device(f"d{i}", ram=ram, rate=2e9, disk=disk) for i, ram in enumerate(rams)]
    links = [
        LinkProfile(source=a.device, target=b.device, round_trip_s=2e-4, bytes_per_s=1e8, address="")
        for a in devices
        for b in devices
        if a is not b
    ]
    return instance(devices, links, toy, WORK, {})


def solved(asked: Instance) -> tuple[Plan, Prediction]:
    names = frozenset(device.device for device in asked.devices)
    found = solve(asked.devices, list(asked.links.values()), asked.model, asked.workload, require=names)
    return found.plan, found.prediction


def units(plan: Plan, model: ModelProfile, name: str) -> tuple[list[int], dict[int, int]]:
    """The sizes of a device's CPU units in order (layers, then the output matrix), and their experts' bytes."""
    layers = [layer for _, w in plan.windows_of(name) for layer in range(w.first, w.last - w.gpu_layers)]
    sizes = [model.layers[layer].size_bytes for layer in layers]
    experts = {unit: model.layers[layer].expert_bytes for unit, layer in enumerate(layers)}
    if plan.output_place(name) == "cpu":
        sizes.append(model.output_bytes)
    return sizes, {unit: size for unit, size in experts.items() if size}


def spread_of(kept: Assignment, sizes: list[int]) -> Spread:
    """Layer files cut every 2 MiB, as in the engine."""
    return Spread(tuple(sizes), tuple(tuple(range(0, size, CUT)) for size in sizes), kept.read_ahead_bytes)


def carried_out(kept: Assignment, sizes: list[int]) -> Residency:
    return spread_of(kept, sizes).keeping(sum(sizes) - kept.streamed_bytes)


def slack(sizes: list[int]) -> int:
    """The rounding error of a spread's cuts and steps."""
    return 2 * CUT + sum(sizes) // 500


@settings(max_examples=40)
@given(st.integers(0, 1 << 32))
def test_the_engine_keeps_what_is_assigned_and_reads_the_rest(seed):
    rng = random.Random(seed)
    asked = random_instance(rng)
    plan = random_plan(rng, asked)
    for name, kept in assignments(plan, asked.model).items():
        sizes, experts = units(plan, asked.model, name)
        streaming = plan.streaming_of(name)
        assert kept.resident_bytes + kept.streamed_bytes == sum(sizes)
        assert kept.streamed_bytes == streaming.streamed_bytes
        assert all(window.resident_bytes >= 0 and window.streamed_bytes >= 0 for window in kept.windows)
        assert [(w.first, w.last) for w in kept.windows] == [(w.first, w.last) for _, w in plan.windows_of(name)]
        if not sizes or not kept.streamed_bytes:
            continue
        if experts:
            split = by_expert(sizes, experts, kept.resident_bytes)
            assert split.held_bytes <= max(kept.resident_bytes, split.layer_pool_bytes + split.room_bytes)
            continue
        found = carried_out(kept, sizes)
        assert kept.resident_bytes - slack(sizes) <= found.resident_bytes <= kept.resident_bytes
        assert found.streamed_bytes == pytest.approx(kept.streamed_bytes, abs=slack(sizes))
        # The plan counts all bytes held, up to the rounding of a cut.
        planned = sum(sizes) - streaming.streamed_bytes + streaming.read_ahead_bytes
        assert found.held_bytes <= planned + 2 * CUT


@settings(max_examples=40)
@given(st.integers(0, 1 << 32))
def test_layers_that_fit_do_not_stream(seed):
    rng = random.Random(seed)
    asked = random_instance(rng, memory="ample")
    plan = replace(random_plan(rng, asked), streaming=())
    for kept in assignments(plan, asked.model).values():
        assert (kept.streamed_bytes, kept.streamed_layers) == (0, 0)
        assert kept.resident_layers == kept.layers
        assert kept.read_ahead_bytes == smallest_read_ahead_bytes(asked.model), "for when memory gets short"


@settings(max_examples=40)
@given(st.integers(0, 1 << 32))
def test_plan_and_status_say_the_same(seed):
    rng = random.Random(seed)
    asked = random_instance(rng)
    plan = random_plan(rng, asked)
    prediction = evaluate(plan, asked)
    kept = assignments(plan, asked.model)
    ring = ring_part(DescribedPlan(plan, prediction, asked))
    assert [device.name for device in ring.devices] == list(plan.devices)
    for device, line in zip(ring.devices, plan_lines(plan, kept), strict=False):
        own = kept[device.name]
        planned = device_status(plan, prediction, own, device.name, None, Costs(), daemon_rss_bytes=0).predicted
        reported = (device.resident_layers, device.streamed_layers, device.read_ahead_bytes)
        assert reported == (planned.resident, planned.streamed, planned.read_ahead_bytes)
        assert reported == (own.resident_layers, own.streamed_layers, plan.streaming_of(device.name).read_ahead_bytes)
        assert sum(window.streamed_bytes for window in device.windows) == device.streamed_bytes == own.streamed_bytes
        assert (f" {own.streamed_layers} of them" in line) == (own.streamed_layers > 0)


@pytest.mark.parametrize("share", [0.4, 0.5, 0.75, 0.9, 0.97])
def test_a_single_device_reads_as_many_bytes_as_predicted(share):
    """During decode, the compute buffer's memory holds weights too."""
    whole = 20 * LAYER + 60 * MB + RUNTIME_BYTES + 120 * MB
    asked = question(int(share * whole))
    plan, reported = solved(asked)
    kept = assignments(plan, asked.model)["d0"]
    sizes, _ = units(plan, asked.model, "d0")
    held = carried_out(kept, sizes).held_bytes + asked.buffer_bytes
    reads = spread_of(kept, sizes).within(held).read_bytes
    assert reported.devices[0].disk_bytes_per_token == pytest.approx(reads, rel=0.05, abs=2 * CUT)
    assert reads <= kept.streamed_bytes
    assert reported.disk_s == pytest.approx(reported.devices[0].disk_bytes_per_token / 0.2e9)
    assert reported.tpot_s >= reported.disk_s


def test_layers_with_experts_have_no_read_ahead():
    toy = planning.model(layers=4, layer_bytes=10 * MB)
    layer = replace(toy.layers[0], expert_bytes_by_type={"Q4_K": 90 * MB})
    toy = replace(toy, layers=(layer,) * 4, experts=8, experts_used=2)
    window = Window(device="d0", first=0, last=4, gpu_layers=0)
    streaming = (Streaming(device="d0", streamed_bytes=100 * MB, read_ahead_bytes=0),)
    plan = Plan(rounds=1, route=(window,), output_on_gpu=False, streaming=streaming, left_out=())
    kept = assignments(plan, toy)["d0"]
    assert (kept.streamed_bytes, kept.read_ahead_bytes, kept.streamed_layers) == (100 * MB, 0, 1)


def test_the_share_of_the_windows_is_the_same():
    asked = question(4000 * MB)
    route = (
        Window(device="a", first=0, last=8, gpu_layers=0),
        Window(device="b", first=8, last=12, gpu_layers=0),
        Window(device="a", first=12, last=20, gpu_layers=0),
    )
    streaming = (Streaming(device="a", streamed_bytes=5 * LAYER, read_ahead_bytes=2 * LAYER),)
    plan = Plan(rounds=1, route=route, output_on_gpu=False, streaming=streaming, left_out=())
    kept = assignments(plan, asked.model)
    first, last = kept["a"].windows
    assert (first.output, last.output, kept["b"].windows[0].output) == ("none", "cpu", "none")
    assert (first.streamed_bytes, last.streamed_bytes) == (5 * LAYER // 2, 5 * LAYER // 2)
    assert kept["a"].read_ahead_bytes == 2 * LAYER
    assert kept["b"].read_ahead_bytes == min(MIN_READ_AHEAD_BYTES, 2 * LAYER)


@given(st.integers(0, 1000), st.integers(1, 1000), st.integers(1, 80))
def test_few_bytes_are_one_layer_and_all_are_all(streamed, layer_bytes, layers):
    worth = layers_worth(streamed, layer_bytes, layers)
    assert (worth == 0) == (streamed == 0)
    assert worth <= layers
    assert streamed < layer_bytes or worth == layers
