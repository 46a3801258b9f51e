"""Extra buffers are used if the profile says that most weights are faster with them, and if the copies fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from halda import DeviceProfile, LayerProfile, ModelProfile, Plan, arrange, assignments
from halda.plan import Streaming
from primad.planning.extra_buffers import (
    MEMORY_SHARE,
    as_planned,
    choose_extra_buffers,
    suited,
    why_extra,
    without_copies,
)
from primad.planning.question import default_workload
from tests.fakes.planning import GB, device, model

MODEL = model(layers=20, layer_bytes=GB // 10)
COPIES = 10 * (GB // 10) + GB // 5
"""The bytes that the head copies for its windows of ``PLAN``, including the output matrix."""
PLAN = arrange(["desk", "lap"], (10, 10), rounds=1, model=MODEL)


def profiled(name: str, *faster: str, ram: int = 100 * GB, host: str | None = None) -> DeviceProfile:
    """A device where extra buffers speed up only the types ``faster``."""
    found = device(name, ram=ram, host=host)
    speeds = tuple(
        replace(found.cpu.speeds[0], type=kind, extra_buffers=kind in faster) for kind in ("Q4_K", "Q6_K", "F16")
    )
    return replace(found, cpu=replace(found.cpu, speeds=speeds))


def chosen(
    profiles: Sequence[DeviceProfile], *, wish: str = "auto", model: ModelProfile = MODEL, plan: Plan = PLAN
) -> dict[str, bool]:
    """Whether a device's windows have extra buffers: all or none."""
    found = choose_extra_buffers(
        assignments(plan, model), {profile.device: profile for profile in profiles}, model, wish
    )
    assert {name: len(extra) for name, extra in found.items()} == {
        name: len(plan.windows_of(name)) for name in plan.devices
    }
    assert all(len(set(extra)) == 1 for extra in found.values())
    return {name: extra[0] for name, extra in found.items()}


def test_each_device_asks_its_own_profile():
    assert chosen([profiled("desk"), profiled("lap", "Q4_K")]) == {"desk": False, "lap": True}
    assert chosen([profiled("desk", "Q4_K"), profiled("lap")]) == {"desk": True, "lap": False}


@pytest.mark.parametrize(("few", "many"), [("Q6_K", "Q4_K"), ("IQ2_M", "Q4_K")])
def test_the_types_with_the_most_bytes_decide_and_unknown_ones_count_as_off(few, many):
    def mixed(fast: int, slow: int) -> ModelProfile:
        layer = LayerProfile(bytes_by_type={"Q4_K": fast, few: slow}, expert_bytes_by_type={}, kv_bytes_per_token=4096)
        return replace(MODEL, layers=(layer,) * 20, output_bytes_by_type={many: 1})

    devices = [profiled("desk", "Q4_K"), profiled("lap", "Q4_K")]
    assert chosen(devices, model=mixed(60, 40)) == {"desk": True, "lap": True}
    assert chosen(devices, model=mixed(40, 60)) == {"desk": False, "lap": False}


def test_experts_count_as_the_layers_do():
    layer = LayerProfile(bytes_by_type={"Q4_K": 10}, expert_bytes_by_type={"F16": 90}, kv_bytes_per_token=4096)
    assert chosen(
        [profiled("desk", "Q4_K"), profiled("lap", "F16")],
        model=replace(MODEL, layers=(layer,) * 20, output_bytes_by_type={"Q6_K": 1}),
    ) == {"desk": False, "lap": True}


@pytest.mark.parametrize("short", [0, 1])
def test_copies_take_at_most_a_share_of_what_plans_may_use(short):
    room = int(COPIES / MEMORY_SHARE) + 2 - 4 * short
    assert chosen([profiled("desk", "Q4_K", ram=room), profiled("lap")])["desk"] is not bool(short)


def test_devices_of_one_machine_share_its_memory():
    room = int(1.5 * COPIES / MEMORY_SHARE)
    alone = [profiled("desk", "Q4_K", ram=room), profiled("lap", "Q4_K", ram=room)]
    assert chosen(alone) == {"desk": True, "lap": True}
    together = [replace(profile, host="one") for profile in alone]
    assert chosen(together) == {"desk": False, "lap": False}
    assert chosen([together[0], replace(profiled("lap", ram=room), host="one")])["desk"], "only copies count"


@pytest.mark.parametrize("wish", ["on", "off"])
def test_the_owner_may_decide_for_all(wish):
    devices = [profiled("desk", "Q4_K"), profiled("lap", ram=1)]
    assert chosen(devices, wish=wish) == {"desk": wish == "on", "lap": wish == "on"}


@pytest.mark.parametrize("wish", ["auto", "on"])
def test_a_window_that_streams_has_no_copies(wish):
    streaming = Streaming(device="lap", streamed_bytes=1, read_ahead_bytes=1)
    devices = [profiled("desk", "Q4_K"), profiled("lap", "Q4_K")]
    assert chosen(devices, wish=wish, plan=replace(PLAN, streaming=(streaming,))) == {"desk": True, "lap": False}


def with_plain(profile: DeviceProfile) -> DeviceProfile:
    """``profile`` with half the speed without extra buffers."""
    speeds = tuple(
        replace(
            speed,
            plain=replace(speed, decode_bytes_per_s=speed.decode_bytes_per_s / 2, extra_buffers=False)
            if speed.extra_buffers
            else None,
        )
        for speed in profile.cpu.speeds
    )
    return replace(profile, cpu=replace(profile.cpu, speeds=speeds))


def test_a_device_that_will_have_no_copies_is_planned_for_as_it_is_without():
    devices = [with_plain(profiled("desk", "Q4_K")), with_plain(profiled("lap", "Q4_K"))]
    assert without_copies(PLAN, devices, MODEL, "auto") is None
    streams = replace(PLAN, streaming=(Streaming(device="lap", streamed_bytes=1, read_ahead_bytes=1),))
    found = without_copies(streams, devices, MODEL, "auto")
    assert found == [devices[0], devices[1].without_extra_buffers()]
    before, after = devices[1].cpu.speeds[0], found[1].cpu.speeds[0]
    assert after.decode_bytes_per_s == before.decode_bytes_per_s / 2
    assert not after.extra_buffers
    assert without_copies(streams, found, MODEL, "auto") is None, "the plan was made for them as they are"
    assert without_copies(PLAN, devices, MODEL, "off") == [device.without_extra_buffers() for device in devices]


def test_a_device_planned_without_copies_computes_without_them_whatever_fits_then():
    devices = [with_plain(profiled("desk", "Q4_K")), with_plain(profiled("lap", "Q4_K"))]
    planned = [devices[0], devices[1].without_extra_buffers()]
    assert chosen([as_planned(device, planned) for device in devices]) == {"desk": True, "lap": False}
    assert [as_planned(device, ()) for device in devices] == devices


@pytest.mark.parametrize("wish", ["auto", "on"])
def test_a_window_with_prefill_offload_has_no_copies_and_was_planned_without(wish):
    devices = [with_plain(profiled("desk", "Q4_K")), with_plain(profiled("lap", "Q4_K"))]
    plan = PLAN.with_offload(["lap"])
    assert chosen(devices, wish=wish, plan=plan) == {"desk": True, "lap": False}
    assert without_copies(plan, devices, MODEL, wish) is None


def repacked(name: str) -> DeviceProfile:
    """A device where repacked weights speed up decode 1.2 times and halve prefill speed."""
    found = device(name)
    plain = replace(found.cpu.speeds[0], type="Q4_K", decode_bytes_per_s=1e10, prefill_flop_per_s=2e11)
    speed = replace(plain, decode_bytes_per_s=1.2e10, prefill_flop_per_s=1e11, extra_buffers=True, plain=plain)
    return replace(found, cpu=replace(found.cpu, speeds=(speed,)))


@pytest.mark.parametrize(
    ("objective", "prompt", "answer", "has"),
    [
        ("latency", 1000, 10, True),
        ("throughput", 1000, 10, True),
        ("ttft", 10, 1000, False),
        ("balanced", 1000, 10, False),
        ("balanced", 10, 1000, True),
    ],
)
def test_the_objective_and_workload_decide_about_repacked_weights(objective, prompt, answer, has):
    measured = repacked("desk")
    work = default_workload(4096, 256, "f16", prompt_tokens=prompt, answer_tokens=answer)
    planned = suited(measured, work, objective)
    assert planned == (measured if has else measured.without_extra_buffers())
    assert chosen([planned, profiled("lap")])["desk"] is has
    why = why_extra(measured, planned, MODEL)
    assert why.startswith(
        "has extra buffers: for Q4_K a token takes 0.83 times as long with them, a prompt 2.00" if has else "has no"
    )


def test_no_line_mentions_extra_buffers_where_nothing_is_faster_with_them():
    assert why_extra(profiled("desk"), profiled("desk"), MODEL) == ""
    other = replace(MODEL, layers=(), output_bytes_by_type={"F16": 1})
    assert why_extra(repacked("desk"), repacked("desk"), other) == ""
