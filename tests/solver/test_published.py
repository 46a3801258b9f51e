"""Halda as published: small cases worked out by hand, the sets of each system, and invariants of any fleet."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from halda import (
    CpuProfile,
    DeviceProfile,
    DiskProfile,
    GpuProfile,
    Infeasible,
    LayerProfile,
    Limits,
    LinkProfile,
    ModelProfile,
    TypeSpeed,
    Workload,
)
from halda.evaluate import evaluate
from halda.instance import instance
from tools.research.published import PublishedPlan, solve_published
from tools.research.random_fleets import random_instance

GB = 10**9
WORK = Workload(context_tokens=64, kv_type="f16", sequences=1, prompt_tokens=16, answer_tokens=16, chunk_rows=1)
LINK_S = 0.01


def speed(rate: float) -> tuple[TypeSpeed, ...]:
    one = TypeSpeed(
        type="Q4_K",
        decode_bytes_per_s=rate,
        batch_bytes_per_s=rate,
        prefill_flop_per_s=1e12,
        extra_buffers=False,
        decode_spread=0,
        prefill_spread=0,
    )
    return (one,)


def device(
    name: str, ram: float = 100 * GB, *, system: str = "Linux", disk: float = GB, rate: float = 10 * GB
) -> DeviceProfile:
    return DeviceProfile(
        device=name,
        host=name,
        system=system,
        machine="any",
        cpu=CpuProfile(name="cpu", cores=4, threads=4, batch_threads=4, step_s=0, layer_s=0, speeds=speed(rate)),
        ram_total_bytes=int(2 * ram),
        ram_available_bytes=int(ram),
        ram_read_bytes_per_s=1e15,
        disk=DiskProfile(
            prefetch_bytes_per_s=disk, fault_bytes_per_s=disk, random_bytes_per_s=disk, free_bytes=1000 * GB
        ),
        gpu=None,
    )


def with_gpu(device: DeviceProfile, vram: float, *, rate: float = 100 * GB, shared: bool = False) -> DeviceProfile:
    gpu = GpuProfile(
        name="gpu",
        backend="any",
        vram_total_bytes=int(vram),
        vram_available_bytes=int(vram),
        unified_memory=shared,
        vram_read_bytes_per_s=1e15,
        step_s=0,
        layer_s=0,
        speeds=speed(rate),
    )
    return replace(device, gpu=gpu)


def model(layers: int, *, cut_multiple: int = 1) -> ModelProfile:
    """Layers and output matrix of 1 GB each."""
    layer = LayerProfile(bytes_by_type={"Q4_K": GB}, expert_bytes_by_type={}, kv_bytes_per_token=0)
    return ModelProfile(
        name="toy",
        architecture="llama",
        layers=(layer,) * layers,
        embedding_bytes=100_000,
        output_bytes_by_type={"Q4_K": GB},
        tied=False,
        width=64,
        vocabulary=100,
        context_tokens=64,
        experts=0,
        experts_used=0,
        kv_head_width=64,
        cut_multiple=cut_multiple,
    )


def links(devices: list[DeviceProfile]) -> list[LinkProfile]:
    return [
        LinkProfile(source=a.device, target=b.device, address="", round_trip_s=2 * LINK_S, bytes_per_s=1e15)
        for a in devices
        for b in devices
        if a is not b
    ]


def published(*devices: DeviceProfile, of: ModelProfile, limits: dict[str, Limits] | None = None) -> PublishedPlan:
    return solve_published(devices, links(list(devices)), of, WORK, limits=limits)


DRAW_S = 100 * device("a").cpu.value_s + device("a").cpu.token_s
OUTPUT_S = 0.1 + DRAW_S
ROW_BYTES = 1000


def test_one_device_reads_its_weights_once_a_token() -> None:
    answer = published(device("a"), of=model(4))
    assert answer.sets == {"a": "M4"}
    assert answer.predicted_s == pytest.approx(4 * 0.1 + OUTPUT_S + ROW_BYTES / GB)
    assert len(answer.plan.route) == 1


def test_gpu_layers_are_as_many_as_its_memory_holds() -> None:
    answer = published(with_gpu(device("a"), 2.9 * GB), of=model(4))
    assert answer.plan.route[0].gpu_layers == 1, "the other place is the output matrix's"
    assert answer.predicted_s == pytest.approx(2 * 0.1 + 2 * 0.01 + OUTPUT_S + ROW_BYTES / GB)


def test_a_device_alone_with_room_for_all_has_the_output_on_its_gpu() -> None:
    answer = published(with_gpu(device("a"), 6 * GB), of=model(4))
    assert answer.plan.output_on_gpu
    assert answer.predicted_s == pytest.approx(5 * 0.01 + DRAW_S + ROW_BYTES / GB)


def test_an_overloaded_device_reads_what_its_memory_lacks_from_disk() -> None:
    small = device("a", 3 * GB)
    answer = published(small, of=model(4))
    asked = instance([small], [], model(4), WORK, {})
    lacking = 4 * GB + GB + ROW_BYTES + asked.runtime_bytes(1) + asked.head_bytes(2) - 3 * GB
    assert answer.sets == {"a": "M3"}
    assert answer.predicted_s == pytest.approx(4 * 0.1 + OUTPUT_S + lacking / GB)
    assert answer.plan.streaming


def test_two_devices_share_what_neither_holds() -> None:
    answer = published(device("a", 6.5 * GB), device("b", 5.5 * GB), of=model(8))
    assert answer.sets == {"a": "M4", "b": "M4"}
    assert answer.rounds == 1
    assert answer.predicted_s == pytest.approx(8 * 0.1 + OUTPUT_S + ROW_BYTES / GB + 2 * LINK_S, rel=1e-4)
    assert not evaluate(
        answer.plan, instance([device("a", 6.5 * GB), device("b", 5.5 * GB)], [], model(8), WORK, {})
    ).short


@pytest.mark.parametrize(
    ("system", "shared", "expected"),
    [
        ("Linux", False, "M3"),
        ("Android", False, "M3"),
        ("Darwin", False, "M1"),
        ("macOS", False, "M1"),
        ("Darwin", True, "M2"),
    ],
)
def test_short_memory_puts_a_device_in_the_set_of_its_system(system: str, shared: bool, expected: str) -> None:
    short = device("a", 4 * GB, system=system)
    short = with_gpu(short, 4 * GB, shared=True) if shared else short
    assert published(short, of=model(8)).sets == {"a": expected}


def test_a_slow_disk_is_never_overloaded() -> None:
    slow = device("b", 3.5 * GB, disk=0.05 * GB)
    answer = published(device("a", 6 * GB), slow, of=model(12))
    assert answer.sets == {"a": "M3", "b": "M4"}
    assert answer.plan.layers_of("b") <= 3


def test_weak_devices_go_and_are_named() -> None:
    quick = with_gpu(device("a"), 20 * GB)
    answer = published(quick, device("b", rate=GB), device("c", rate=GB), of=model(8))
    assert [out.device for out in answer.plan.left_out] == ["b", "c"]
    assert answer.plan.devices == ("a",)


def test_free_vram_is_filled_if_another_device_is_overloaded() -> None:
    """The calibration: the overloaded device moves to M4, so that the other's GPU takes its layers."""
    answer = published(device("a", 5 * GB), with_gpu(device("b", 4 * GB), 9 * GB), of=model(10))
    assert answer.sets["a"] == "M4"
    assert sum(window.gpu_layers for _, window in answer.plan.windows_of("b")) == 8


def test_the_named_head_comes_first_and_the_others_keep_their_order() -> None:
    devices = [device(name, 4.5 * GB) for name in "abc"]
    answer = solve_published(devices, links(devices), model(9), WORK, head="c")
    assert answer.plan.devices == ("c", "a", "b")


def test_limits_of_the_owner_count() -> None:
    free = published(device("a"), of=model(4))
    bound = published(device("a"), of=model(4), limits={"a": Limits(ram_bytes=3 * GB)})
    assert free.sets == {"a": "M4"}
    assert bound.sets == {"a": "M3"}


def test_windows_begin_where_the_model_may_be_cut() -> None:
    answer = published(device("a", 9 * GB), device("b", 6 * GB), of=model(11, cut_multiple=2))
    assert all(window.first % 2 == 0 for window in answer.plan.route)
    assert answer.plan.route[-1].last == 11


def test_a_slow_disk_alone_that_cannot_hold_the_model_is_infeasible() -> None:
    with pytest.raises(Infeasible, match="toy"):
        published(device("a", 3 * GB, disk=0.05 * GB), of=model(8))


@pytest.mark.parametrize("seed", range(25))
def test_any_answer_is_a_legal_plan_of_whole_windows(seed: int) -> None:
    """Every layer has a place, windows of a device are equal except the tail, GPU layers fit, and T is positive."""
    asked = random_instance(random.Random(seed))
    try:
        answer = solve_published(
            asked.devices, list(asked.links.values()), asked.model, asked.workload, limits=asked.limits
        )
    except Infeasible:
        return
    plan = answer.plan
    assert plan.route[-1].last == len(asked.model.layers)
    assert plan.head == asked.devices[0].device
    assert answer.predicted_s > 0
    assert set(answer.sets) == set(plan.devices)
    assert set(answer.sets) | {out.device for out in plan.left_out} == {device.device for device in asked.devices}
    for name in plan.devices[1:]:
        sizes = {len(window.layers) for _, window in plan.windows_of(name)}
        assert len(sizes) == 1 or len(asked.model.layers) % asked.model.cut_multiple
    assert not [short for short in evaluate(plan, asked).short if short.what == "VRAM" and " and " not in short.where]
