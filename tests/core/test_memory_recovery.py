"""After a shortage a device is planned with more memory again: not at once, not for nothing, not repeatedly."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primad.membership.memory_recovery import (
    MAX_WAIT_S,
    RELAPSE_WAITS,
    WAIT_S,
    WORTH_SHARE,
    Recovery,
    Room,
    begin,
    look,
    lowered,
    report_memory_low,
)
from primad.settings.timings import Timings

LOOK_S = Timings().memory_look_every_s
MIB = 1 << 20
TOTAL = 4096 * MIB
WORTH = int(WORTH_SHARE * TOTAL)
HAD = 3000 * MIB
"""The first plan's memory on the device: all that is available then."""


@dataclass
class Device:
    """A device, the memory that plans get from it, and when that changed."""

    recovery: Recovery = field(default_factory=lambda: begin(HAD))
    now: float = 1000.0
    available: int = HAD
    limit: int = TOTAL
    ours: int = 0
    plans: list[tuple[float, int]] = field(default_factory=list)
    presses: list[float] = field(default_factory=list)

    @property
    def reported(self) -> int:
        """The memory that plans get."""
        return self.recovery.reported_bytes

    @property
    def room(self) -> Room:
        return Room(
            self.available, min(self.available, self.limit), max(0, min(self.available, self.limit) - self.ours)
        )

    def report_memory_low(self, needed: int) -> None:
        self.recovery = report_memory_low(self.recovery, self.room, needed_bytes=needed, now=self.now)
        self.presses.append(self.now)

    def run(self, seconds: float, available: int | None = None) -> list[int]:
        """Let time pass with ``available`` bytes; the amounts given to new plans."""
        self.available = self.available if available is None else available
        start, end = len(self.plans), self.now + seconds
        while self.now < end:
            self.now += LOOK_S
            self.recovery, reported = look(self.recovery, self.room, total_bytes=TOTAL, now=self.now)
            if reported is not None:
                self.plans.append((self.now, reported))
        return [reported for _, reported in self.plans[start:]]


def test_a_device_that_never_was_short_is_left_alone():
    assert Device().run(10_000, TOTAL) == []


def test_available_memory_counts_once_it_was_there_for_a_while():
    device = Device(available=1000 * MIB)
    device.report_memory_low(100 * MIB)
    assert device.reported == 1000 * MIB
    assert device.run(3600) == [], "nothing has changed"
    assert device.run(WAIT_S - LOOK_S, 3000 * MIB) == []
    assert device.run(2 * LOOK_S) == [3000 * MIB]
    assert device.reported == 3000 * MIB
    assert not device.recovery.watches
    assert device.run(3600, TOTAL) == []


def test_the_minimum_that_was_available_counts():
    device = Device(available=1000 * MIB)
    device.report_memory_low(100 * MIB)
    device.run(WAIT_S / 3, 2900 * MIB)
    device.run(WAIT_S / 3, 2000 * MIB)
    assert device.run(WAIT_S, 2900 * MIB)[0] == 2000 * MIB


def test_a_moment_without_room_restarts_the_wait():
    device = Device(available=1000 * MIB)
    device.report_memory_low(100 * MIB)
    for _ in range(20):
        assert device.run(WAIT_S - 2 * LOOK_S, 2900 * MIB) == []
        assert device.run(LOOK_S, 1000 * MIB) == []


def test_programs_that_end_one_after_the_other_give_it_back_in_steps():
    device = Device(available=1000 * MIB)
    device.report_memory_low(100 * MIB)
    assert device.run(2 * WAIT_S, 1500 * MIB) == [1500 * MIB]
    assert device.run(2 * WAIT_S, 1500 * MIB + WORTH // 2) == [], "not worth a plan"
    assert device.run(2 * WAIT_S, 3000 * MIB) == [3000 * MIB]
    assert not device.recovery.watches


@pytest.mark.parametrize("needed", [1, 10 * MIB, 600 * MIB])
def test_memory_that_was_missing_must_be_available_again(needed):
    """If symptoms revealed the shortage, available memory may look as before; that is no sign of recovery."""
    device = Device()
    device.report_memory_low(needed)
    assert device.reported == HAD - needed
    assert device.run(3600) == []
    assert device.run(3600, HAD + needed - MIB) == []
    more = HAD + max(needed, WORTH)
    assert device.run(2 * WAIT_S, more) == [more]


def test_beyond_what_the_owner_allows_room_counts_but_no_plan_has_it():
    device = Device(recovery=begin(1000 * MIB), available=2000 * MIB, limit=1000 * MIB)
    device.report_memory_low(200 * MIB)
    assert device.reported == 800 * MIB
    assert device.run(3600, 2199 * MIB) == []
    assert device.run(2 * WAIT_S, 2200 * MIB) == [1000 * MIB]
    assert not device.recovery.watches


def test_the_next_ring_must_fit_next_to_the_serving_one_whose_end_is_no_recovery():
    device = Device(available=1000 * MIB, ours=300 * MIB)
    device.report_memory_low(100 * MIB)
    assert device.reported == 700 * MIB
    device.ours = 0
    assert device.run(3600) == []
    assert device.run(2 * WAIT_S, 1099 * MIB) == []
    assert device.run(2 * WAIT_S, 1500 * MIB) == [1500 * MIB]


def test_a_shortage_soon_after_recovery_doubles_the_wait_and_a_later_one_does_not():
    device = Device()
    waits = []
    for _ in range(8):
        device.available = 1000 * MIB
        device.report_memory_low(100 * MIB)
        short_since_s = device.now
        device.run(10_000, HAD)
        waits.append(device.plans[-1][0] - short_since_s)
        device.now = device.plans[-1][0] + 30.0
    assert waits[:4] == [pytest.approx(WAIT_S * 2**i, abs=2 * LOOK_S) for i in range(4)]
    assert waits[-1] == pytest.approx(MAX_WAIT_S, abs=2 * LOOK_S)
    device.now += RELAPSE_WAITS * MAX_WAIT_S
    device.available = 1000 * MIB
    device.report_memory_low(100 * MIB)
    assert device.run(WAIT_S + 2 * LOOK_S, HAD) == [HAD]


def test_a_plan_made_meanwhile_does_not_forget_the_lack():
    """The head measures itself for every plan, a worker at every hello, and other programs may still be running."""
    device = Device(available=1000 * MIB)
    device.report_memory_low(100 * MIB)
    device.recovery = begin(900 * MIB, device.recovery)
    assert device.reported == 900 * MIB
    assert device.run(2 * WAIT_S, HAD) == [HAD]
    device.available = 1000 * MIB
    device.report_memory_low(100 * MIB)
    device.recovery = begin(HAD, device.recovery)
    assert not device.recovery.watches, "it has all back already"


def test_a_plan_has_less_than_it_had_whatever_is_available():
    assert lowered(10, available_bytes=20, needed_bytes=3) == 7
    assert lowered(10, available_bytes=5, needed_bytes=3) == 5
    assert lowered(10, available_bytes=5, needed_bytes=11) == 0


amounts = st.integers(0, TOTAL)
stories = st.lists(
    st.tuples(st.floats(0.0, 400.0), amounts, st.one_of(st.none(), st.integers(1, TOTAL // 4))), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(stories)
def test_plans_get_more_memory_only_after_the_wait_and_only_what_was_there_throughout(story):
    device = Device()
    known: list[tuple[float, int]] = []
    for seconds, available, needed in story:
        device.available = available
        known.append((device.now, available))
        if needed is not None:
            before = device.reported
            device.report_memory_low(needed)
            assert device.reported == lowered(before, available_bytes=available, needed_bytes=needed)
        wait_s, reported, start = device.recovery.wait_s, device.reported, len(device.plans)
        device.run(seconds)
        for at, given_bytes in device.plans[start:]:
            assert given_bytes >= reported + WORTH
            reported = given_bytes
            assert not [each for each in device.presses if at - wait_s < each <= at], "a lack just before"
            within = [there for since, there in known if since > at - wait_s]
            first = [there for since, there in known if since <= at - wait_s]
            assert given_bytes <= min(within + first[-1:]), "it was not there throughout"


@settings(max_examples=8, deadline=None)
@given(
    busy_s=st.floats(1.0, 600.0),
    calm_s=st.floats(1.0, 2000.0),
    taken=st.integers(WORTH, HAD),
    seed=st.integers(0, 1 << 32),
)
def test_programs_that_come_and_go_do_not_make_plans_swing(busy_s, calm_s, taken, seed):
    """A plan given all free memory runs short as soon as the programs need it again: the worst case for a plan.

    A day has some changes at first, and then hardly any except for programs that are away for long.
    """
    device, day_s, jitter = Device(), 86_400.0, random.Random(seed)
    end = device.now + day_s
    while device.now < end:
        device.available = HAD - taken
        if device.reported > device.available:
            device.report_memory_low(min(device.reported - device.available, TOTAL))
        device.run(busy_s * jitter.uniform(0.5, 1.5))
        device.run(calm_s * jitter.uniform(0.5, 1.5), HAD)
    gaps = [later - earlier for (earlier, _), (later, _) in zip(device.plans, device.plans[1:], strict=False)]
    # Each relapse doubles the wait; only ten times as long without a shortage resets it.
    assert all(gap >= WAIT_S for gap in gaps)
    assert len(device.plans) <= 12 + day_s / min(MAX_WAIT_S, RELAPSE_WAITS * WAIT_S)
    if calm_s * 1.5 < WAIT_S:
        assert device.plans == [], "it never had a whole wait of room"


@settings(max_examples=40, deadline=None)
@given(stories)
def test_once_programs_are_gone_for_good_plans_have_all_back(story):
    device = Device()
    for seconds, available, needed in story:
        device.available = available
        if needed is not None:
            device.report_memory_low(needed)
        device.run(seconds)
    device.run(2 * MAX_WAIT_S, TOTAL)
    if device.presses and device.recovery.enough_bytes <= TOTAL:
        assert not device.recovery.watches or device.reported + 2 * WORTH >= device.recovery.goal_bytes
