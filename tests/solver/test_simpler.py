"""The use of roaming or nearly full devices must gain something; otherwise the plan says what was given up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import Workload, solve
from halda.simpler import FULL, GAIN
from tests.fakes.planning import GB, device, link, model

WORK = Workload(context_tokens=4096, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=256, chunk_rows=512)


def between(*names):
    return [link(a, b, round_trip_s=0.0001) for a in names for b in names if a != b]


def laptop_beside_a_desk(rate):
    desk = device("desk", ram=12 * GB)
    return [desk, replace(device("laptop", ram=12 * GB, rate=rate), wireless=True)]


def found(devices, *, heads=(), settles=True, **more):
    links = between(*(each.device for each in devices))
    return solve(devices, links, model(), WORK, heads=heads, settles=settles, time_limit_s=4.0, **more)


def test_a_slightly_faster_device_on_wifi_is_not_used_and_the_plan_shows_that():
    devices = laptop_beside_a_desk(21e9)
    quickest, taken = (found(devices, heads=["desk", "laptop"], settles=settles) for settles in (False, True))
    assert "laptop" in quickest.plan.devices
    assert taken.plan.devices == ("desk",)
    assert {left.device for left in taken.plan.left_out} == {"laptop"}
    assert sum(each.objective_s for each in taken.given_up) == pytest.approx(taken.given_up_s)
    assert taken.quickest_s == pytest.approx(quickest.objective_s)
    assert 0 < taken.given_up_s <= GAIN * quickest.objective_s
    assert all("laptop" in each.what for each in taken.given_up)
    assert taken.proven == quickest.proven


def test_a_much_faster_device_on_wifi_is_taken():
    taken = found(laptop_beside_a_desk(40e9), heads=["desk", "laptop"])
    assert taken.plan.devices == ("laptop",)
    assert not taken.given_up


def test_a_device_that_must_take_part_does():
    taken = found(laptop_beside_a_desk(21e9), require=frozenset({"laptop"}), heads=["desk", "laptop"])
    assert "laptop" in taken.plan.devices
    assert taken.plan.head == "desk", "it need not be the head"


def test_the_last_of_a_devices_memory_is_left_where_that_costs_little():
    devices = [device("fast", ram=int(4.3 * GB), rate=24e9, disk=1e7), device("desk", ram=12 * GB, disk=1e7)]
    tight, taken = (found(devices, settles=settles) for settles in (False, True))
    limit = devices[0].ram_available_bytes
    used = [{each.device: each.ram_bytes for each in plan.prediction.devices}["fast"] for plan in (tight, taken)]
    assert used[0] > FULL * limit >= used[1]
    assert [each.what for each in taken.given_up] == ["the last 5% of the memory of fast"]


def test_of_identical_devices_the_one_without_another_model_is_used():
    devices = [device("desk", ram=4 * GB), device("nas", ram=8 * GB), device("pi", ram=8 * GB)]
    for shared, free in (("nas", "pi"), ("pi", "nas")):
        taken = found(devices, shared=frozenset({"desk", shared}))
        assert taken.plan.devices == ("desk", free)
        assert taken.objective_s == pytest.approx(found(devices).objective_s)


def test_a_device_with_another_model_is_taken_where_it_gains_something():
    desk = device("desk", ram=12 * GB)
    for rate, devices in ((40e9, ("desk", "nas")), (0.2e9, ("desk",))):
        asked = [desk, device("nas", ram=12 * GB, rate=rate)]
        assert found(asked, shared=frozenset({"nas"})).plan.devices == devices
    small = [device("desk", ram=4 * GB, disk=1e7), device("nas", ram=8 * GB, disk=1e7)]
    assert found(small, shared=frozenset({"nas"})).plan.devices == ("desk", "nas"), "there is no other room"
