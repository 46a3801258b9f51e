"""Cost terms of special layers: unmeasured types, experts, states, windows entirely on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import (
    GpuProfile,
    Infeasible,
    LayerProfile,
    LinkProfile,
    OffloadSpeed,
    RoutingCost,
    Workload,
    evaluate,
    instance,
    solve,
)
from halda.cost import attention_s, experts_s, layer_s, offloaded_layer_s, seconds_per_byte, speed_of
from halda.quantisation import bytes_per_weight
from tests.fakes.planning import GB, device, link, model, speed

WORK = Workload(context_tokens=1024, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=128, chunk_rows=512)
BIG = device("big", vram=12 * GB)


def gpu_of(profile) -> GpuProfile:
    assert profile.gpu is not None
    return profile.gpu


def test_a_type_that_was_not_measured_reads_bytes_and_computes_weights_as_fast_as_its_neighbour():
    measured = replace(speed(1e10), type="Q8_0", batch_bytes_per_s=2e9)
    other = speed_of([measured], "Q4_0")
    assert other.type == "Q4_0"
    assert seconds_per_byte(other, 1) == seconds_per_byte(measured, 1)
    for rows in (512, 2048):
        of_other = seconds_per_byte(other, rows) * bytes_per_weight("Q4_0")
        assert of_other == pytest.approx(seconds_per_byte(measured, rows) * bytes_per_weight("Q8_0"))
    computing = 1 / measured.batch_bytes_per_s - 1 / measured.decode_bytes_per_s
    more = bytes_per_weight("Q8_0") / bytes_per_weight("Q4_0")
    assert seconds_per_byte(other, 8) == pytest.approx(1e-10 + more * computing)
    assert speed_of([measured], "Q8_0") is measured


def test_a_layer_with_a_state_pays_for_that_and_never_for_attention():
    state = LayerProfile(
        bytes_by_type={"Q4_K": GB},
        expert_bytes_by_type={},
        kv_bytes_per_token=0,
        state_bytes=10**6,
        attends=False,
    )
    cpu = replace(BIG.cpu, attention_s=1e-9)
    for processor in (cpu, gpu_of(BIG)):
        for rows, chunk in ((1, False), (512, True)):
            short, long = (layer_s(processor, 1e10, state, model(), rows, kv, "f16", chunk=chunk) for kv in (0, 10**5))
            assert short == long
        assert attention_s(processor, 1e10, state, model(), 2, 0, "f16") > 0
    offloading = replace(
        gpu_of(BIG), prefill_offload=(OffloadSpeed(type="F16", few_bytes_per_s=1e10, prefill_flop_per_s=1e12),)
    )
    short, long = (offloaded_layer_s(offloading, state, model(), 512, kv, "f16") for kv in (0, 10**5))
    assert short == long


def test_attention_of_many_rows_on_a_gpu_has_a_rate_of_its_own_and_the_layer_s_width():
    layer, slow = model().layers[0], replace(gpu_of(BIG), attention_flop_per_s=1e10)
    wide, narrow = (
        attention_s(slow, 1e12, replace(layer, query_width=width), model(), 512, 1000, "f16", chunk=True)
        for width in (4096, 1024)
    )
    read = 1000 * layer.kv_bytes_per_token / 1e12
    assert wide - read == pytest.approx(4 * 512 * 1000 * 4096 / 1e10)
    assert narrow - read == pytest.approx((wide - read) / 4)
    assert attention_s(gpu_of(BIG), 1e12, layer, model(), 512, 1000, "f16") < wide


def test_routing_costs_a_step_a_row_and_kernels_that_few_rows_do_not_fill():
    layer = LayerProfile(bytes_by_type={}, expert_bytes_by_type={"Q4_K": GB}, kv_bytes_per_token=0)
    mixture = replace(model(), experts=8, experts_used=2)
    plain = BIG.cpu
    routed = replace(plain, routing=RoutingCost(layer_s=1e-3, row_s=1e-6, many_ratio=2.0))
    one = experts_s(routed, layer, mixture, 1) - experts_s(plain, layer, mixture, 1)
    assert one == pytest.approx(1e-3 + 1e-6)
    many = experts_s(routed, layer, mixture, 512) - 1e-3 - 512e-6
    assert many == pytest.approx(2 * experts_s(plain, layer, mixture, 512), rel=0.02)


def test_a_window_that_a_gpu_has_all_of_takes_no_step_of_the_processor():
    slow = replace(BIG, cpu=replace(BIG.cpu, step_s=0.01))
    asked = instance([slow], [], model(), WORK, {})
    plan = solve([slow], [], model(), WORK).plan
    assert plan.route[0].gpu_layers == len(model().layers)
    quick = evaluate(plan, instance([BIG], [], model(), WORK, {}))
    assert evaluate(plan, asked).tpot_s == pytest.approx(quick.tpot_s)
    one_less = replace(plan, route=(replace(plan.route[0], gpu_layers=len(model().layers) - 1),))
    assert evaluate(one_less, asked).tpot_s > evaluate(plan, asked).tpot_s + 0.01


def like(count: int) -> tuple[list, list[LinkProfile]]:
    names = [f"pi{i}" for i in range(count)]
    return [device(name, ram=3 * GB) for name in names], [link(a, b) for a in names for b in names if a != b]


def test_only_one_of_identical_devices_is_tried_as_head():
    devices, links = like(4)
    names = [each.device for each in devices]
    asked = instance(devices, links, model(), WORK, {})
    assert asked.unlike(names) == ["pi0"]
    other = [*devices[:3], replace(devices[3], ram_available_bytes=4 * GB)]
    assert instance(other, links, model(), WORK, {}).unlike(names) == ["pi0", "pi3"]
    slow = [replace(each, round_trip_s=1.0) if "pi2" in (each.source, each.target) else each for each in links]
    assert instance(devices, slow, model(), WORK, {}).unlike(names) == ["pi0", "pi2"]
    together = [replace(each, host="one") if each.device in ("pi0", "pi1") else each for each in devices]
    asked = instance(together, links, model(), WORK, {})
    assert "pi1" in asked.unlike(names)
    assert asked.are_alike("pi1", "pi1")
    assert not asked.are_alike("pi0", "pi1")


def test_a_head_of_each_kind_is_tried_and_the_best_taken():
    devices, links = like(2)
    fast = device("fast", vram=8 * GB)
    links += [link(a, b) for one in devices for a, b in ((one.device, "fast"), ("fast", one.device))]
    found = solve([*devices, fast], links, model(), WORK, heads=["pi0", "pi1", "fast"], objective="latency")
    assert found.plan.head == "fast"
    with pytest.raises(Infeasible):
        solve(devices, links, model(layers=200), replace(WORK, context_tokens=8192), heads=["pi0", "pi1"])
