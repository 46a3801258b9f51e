"""Extra buffers are used where a device's profile says that most weights are faster with them, and where copies fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from halda import DeviceProfile, LayerProfile, ModelProfile, Plan, arrange
from halda.plan import Streaming
from primad.head.extra_buffers import MEMORY_SHARE, choose_extra_buffers
from primad.head.promise import Promise
from tests.fakes.planning import GB, device, model

MODEL = model(layers=20, layer_bytes=GB // 10)
COPIES = 10 * (GB // 10) + GB // 5
"""What the head copies of its windows of ``PLAN``, the output matrix among it."""
PLAN = arrange(["desk", "lap"], (10, 10), rounds=1, model=MODEL)


def profiled(name: str, *faster: str, ram: int = 100 * GB, host: str | None = None) -> DeviceProfile:
    """A device that computes the types ``faster`` faster with extra buffers, and two others without."""
    found = device(name, ram=ram, host=host)
    speeds = tuple(
        replace(found.cpu.speeds[0], type=kind, extra_buffers=kind in faster) for kind in ("Q4_K", "Q6_K", "F16")
    )
    return replace(found, cpu=replace(found.cpu, speeds=speeds))


def chosen(
    profiles: Sequence[DeviceProfile], *, wish: str = "auto", model: ModelProfile = MODEL, plan: Plan = PLAN
) -> dict[str, bool]:
    """Whether all windows of a device have extra buffers; all or none do."""
    found = choose_extra_buffers(
        Promise.of(plan, model, None, context_tokens=64), {profile.device: profile for profile in profiles}, model, wish
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
def test_the_types_that_hold_most_bytes_decide_and_unknown_ones_count_as_off(few, many):
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
def test_of_a_window_that_streams_there_are_no_copies(wish):
    streaming = Streaming(device="lap", streamed_bytes=1, ahead_bytes=1)
    devices = [profiled("desk", "Q4_K"), profiled("lap", "Q4_K")]
    assert chosen(devices, wish=wish, plan=replace(PLAN, streaming=(streaming,))) == {"desk": True, "lap": False}
