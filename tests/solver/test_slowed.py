"""Reading slows computing: forecast and simulation charge the same per byte, on single and on shared machines."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from halda import Instance, Plan, evaluate
from tests.solver.simulator import simulate
from tests.solver.small_fleets import slowing
from tests.solver.test_simulate import streaming_plans


def slowed(question: Instance, share: float) -> Instance:
    """Each second of reading delays computing by ``share`` of a second."""
    devices = tuple(replace(device, disk=slowing(device.disk, share)) for device in question.devices)
    return replace(question, devices=devices)


def cases(count: int, *, shared: bool) -> list[tuple[Plan, Instance]]:
    options = {} if shared else {"shared_hosts": False}
    return [
        (plan, slowed(asked, random.Random(i).uniform(0, 0.5)))
        for i, (plan, asked) in enumerate(streaming_plans(count, **options))
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_the_closed_form_is_near_the_simulation(shared):
    ratios = [
        simulate(plan, asked, tokens=6).tpot_s / evaluate(plan, asked).tpot_s
        for plan, asked in cases(100, shared=shared)
    ]
    assert sum(abs(ratio - 1) > 0.05 for ratio in ratios) <= 18
    assert min(ratios) > 0.7
    assert max(ratios) < 1.5


def test_more_that_is_lost_to_reading_never_makes_a_token_quicker():
    for plan, asked in streaming_plans(30):
        simulated, reported = [], []
        for share in (0.0, 0.2, 0.4):
            question = slowed(asked, share)
            simulated.append(simulate(plan, question, tokens=6).tpot_s)
            reported.append(evaluate(plan, question).tpot_s)
        assert reported == sorted(reported)
        assert all(more >= less * (1 - 1e-9) for less, more in pairwise(simulated))


def test_time_lost_to_reading_counts_as_computing():
    for plan, asked in streaming_plans(30):
        before, after = evaluate(plan, asked), evaluate(plan, slowed(asked, 0.3))
        for one, other in zip(before.devices, after.devices, strict=True):
            assert other.compute_s >= one.compute_s * (1 - 1e-9)
            if not one.streamed_bytes:
                assert other == one


def test_a_part_of_a_question_keeps_which_devices_share_a_machine():
    for _, asked in streaming_plans(20):
        for m, member in enumerate(asked.members):
            (alone,) = asked.only([m]).members
            assert alone.has_own_host == member.has_own_host
