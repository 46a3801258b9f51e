"""Devices of one machine share its disk, unless their layers are on separate disks."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from halda import Infeasible, evaluate
from halda.instance import Instance
from tests.solver.test_solve import CLOSE, solved
from tools.research.random_fleets import random_instance, random_plan


def named(question: Instance, *names: str) -> Instance:
    """``question`` with its devices on disks of these names in turn."""
    devices = tuple(
        replace(device, disk=replace(device.disk, disk_id=names[i % len(names)]))
        for i, device in enumerate(question.devices)
    )
    return replace(question, devices=devices)


def on_one_machine(seed: int, devices: int, memory: str) -> Instance:
    question = random_instance(random.Random(seed), devices=devices, layers=12, memory=memory, shared_hosts=False)
    return replace(question, devices=tuple(replace(device, host="desk") for device in question.devices))


@pytest.mark.parametrize("seed", range(20))
def test_devices_on_one_disk_wait_for_each_other_and_those_on_their_own_do_not(seed):
    question = on_one_machine(seed, 3, "short")
    plan = random_plan(random.Random(seed), question, streams=1.0)
    unnamed, one, own = (
        evaluate(plan, each) for each in (question, named(question, "a"), named(question, "a", "b", "c"))
    )
    assert unnamed == one
    each = [device.disk_s for device in own.devices]
    assert one.disk_s == pytest.approx(sum(each))
    assert own.disk_s == max(each)
    assert own.ttft_s <= one.ttft_s
    assert {(short.what, short.where) for short in own.short} <= {(short.what, short.where) for short in one.short}


def test_disks_of_two_machines_are_two_whatever_they_are_called():
    question = named(random_instance(random.Random(1), devices=3, shared_hosts=False), "a")
    assert question.disks == ((0,), (1,), (2,))
    assert named(on_one_machine(1, 3, "short"), "a", "b").disks == ((0, 2), (1,))


@pytest.mark.parametrize("seed", range(4))
def test_the_solver_knows_which_devices_share_a_disk(seed):
    shared = None
    while shared is None:
        question = on_one_machine(seed, 2, "short")
        with suppress(Infeasible):  # the model does not fit
            shared = solved(named(question, "a"), "latency", time_limit_s=3.0)
        seed += 1000
    own = solved(named(question, "a", "b"), "latency", time_limit_s=3.0)
    for found in (shared, own):
        assert found.bound_s <= found.objective_s * (1 + CLOSE)
    assert own.objective_s <= shared.objective_s * (1 + CLOSE) or not own.proven
