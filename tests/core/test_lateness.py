"""When a ring pass is late: the first by a fixed rule, later ones by recent ring passes."""

from __future__ import annotations

import math

import pytest

from primad.ring.lateness import FIRST_WAIT_S, MIN_WAIT_S, TIMEOUT_FACTOR, Lateness
from primad.ring.messages import Overdue
from tests.fakes.ring import FakeRing, generate


def complete(ring_passes: Lateness, step: int, *, at: float, took: float, rows: int = 1) -> None:
    ring_passes.left(step, rows, at)
    ring_passes.back(step, at + took)


def test_the_first_ring_pass_has_longer_and_the_first_of_several_rows_the_time_of_each_row_alone():
    ring_passes = Lateness()
    ring_passes.left(0, 1, 0.0)
    assert ring_passes.due_s() == FIRST_WAIT_S
    assert ring_passes.overdue(FIRST_WAIT_S) == Overdue(step=0, waited_s=FIRST_WAIT_S, ring_passes=0, is_first=True)
    ring_passes.back(0, 6.0)
    ring_passes.left(1, 512, 10.0)
    assert ring_passes.due_s() == 10.0 + 512 * 6.0
    assert ring_passes.overdue(1e9) == Overdue(step=1, waited_s=1e9 - 10.0, ring_passes=1, is_first=True)


def test_the_first_ring_pass_of_several_rows_of_a_quick_ring_has_as_long_as_the_very_first():
    ring_passes = Lateness()
    complete(ring_passes, 0, at=0, took=0.001)
    ring_passes.left(1, 512, 10.0)
    assert ring_passes.due_s() == 10.0 + FIRST_WAIT_S


def test_nothing_is_late_when_nothing_is_out():
    ring_passes = Lateness()
    complete(ring_passes, 0, at=0, took=0.1)
    assert ring_passes.due_s() == math.inf
    assert ring_passes.overdue(1e9) is None


def test_no_ring_pass_is_late_within_the_minimum_wait():
    ring_passes = Lateness()
    complete(ring_passes, 0, at=0, took=0.001)
    ring_passes.left(1, 1, 5.0)
    assert ring_passes.due_s() == 5.0 + MIN_WAIT_S
    assert ring_passes.overdue(5.99) is None
    assert ring_passes.overdue(6.0) == Overdue(step=1, waited_s=1.0, ring_passes=1)


def test_slow_ring_passes_have_a_longer_deadline():
    ring_passes = Lateness()
    complete(ring_passes, 0, at=0, took=2.0)
    ring_passes.left(1, 1, 10.0)
    assert ring_passes.due_s() == 10.0 + TIMEOUT_FACTOR * 2.0


def test_a_late_ring_pass_is_reported_once_and_at_each_doubling():
    ring_passes = Lateness()
    complete(ring_passes, 0, at=0, took=0.01)
    ring_passes.left(1, 1, 0.0)
    ring_passes._returned_s = 0.0
    reported = [now for now in range(100) if ring_passes.overdue(float(now)) is not None]
    assert reported == [1, 2, 4, 8, 16, 32, 64]


def test_a_late_check_reports_a_late_ring_pass_once():
    ring_passes = Lateness()
    complete(ring_passes, 0, at=0, took=0.01)
    ring_passes.left(1, 1, 1.0)
    assert ring_passes.overdue(101.0) == Overdue(step=1, waited_s=100.0, ring_passes=1)
    assert ring_passes.overdue(101.0) is None
    assert ring_passes.due_s() == 1.0 + 128


def test_a_ring_pass_that_comes_back_is_no_longer_late_and_the_next_one_has_its_own_deadline():
    ring_passes = Lateness()
    complete(ring_passes, 0, at=0, took=0.01)
    ring_passes.left(1, 1, 0.01)
    assert ring_passes.overdue(1.5) is not None
    ring_passes.back(1, 1.6)
    ring_passes.left(2, 1, 1.6)
    assert ring_passes.due_s() == pytest.approx(1.6 + TIMEOUT_FACTOR * 1.59)


def test_a_bad_ring_pass_is_forgotten_in_time():
    ring_passes = Lateness()
    complete(ring_passes, 0, at=0, took=5.0)
    for step in range(1, 60):
        complete(ring_passes, step, at=step * 10, took=0.01)
    assert ring_passes.expected_s(1) < MIN_WAIT_S / TIMEOUT_FACTOR


def test_prefill_is_measured_by_its_rows_and_decode_by_itself():
    ring_passes = Lateness()
    complete(ring_passes, 0, at=0, took=0.5)
    assert ring_passes.expected_s(512) is None
    complete(ring_passes, 1, at=10, took=10.5, rows=100)
    assert ring_passes.expected_s(512) == pytest.approx(0.5 + 512 * 0.1)
    assert ring_passes.expected_s(1) == 0.5


def test_a_prefill_ring_pass_may_be_quicker_than_a_decode_ring_pass():
    ring_passes = Lateness()
    complete(ring_passes, 0, at=0, took=0.5)
    complete(ring_passes, 1, at=10, took=0.1, rows=100)
    assert ring_passes.expected_s(200) == 0.5


def test_a_ring_pass_that_waits_for_others_is_not_late_for_that():
    ring_passes = Lateness()
    complete(ring_passes, 0, at=0, took=0.5)
    complete(ring_passes, 1, at=10, took=10.5, rows=100)
    ring_passes.left(2, 100, 100.0)
    ring_passes.left(3, 1, 100.0)
    assert ring_passes.due_s() == pytest.approx(100.0 + TIMEOUT_FACTOR * 10.5)
    ring_passes.back(2, 150.0)
    assert ring_passes.due_s() == pytest.approx(150.0 + TIMEOUT_FACTOR * 0.5)
    ring_passes.back(3, 150.1)
    assert ring_passes.expected_s(1) == pytest.approx(0.45), "the time of the others does not count"


# ---- in the head ----------------------------------------------------------------------------------------------------


def test_the_head_reports_a_late_step_and_continues():
    ring = FakeRing([[2, 1, 3]], 2)
    ring.ask(generate(0, [1], tokens=3))
    ring.events.clear()
    ring.head.submit(generate(1, [2], tokens=3))
    ring._turn()
    assert ring.head.wait_s() == 1.0
    ring.now_s += 1
    assert ring.head.wait_s() == 0
    assert ring._turn()
    assert ring.events == [Overdue(step=3, waited_s=1.0, ring_passes=3)]
    assert ring.head.wait_s() == 1.0
    ring.now_s += 1
    ring._turn()
    assert ring.events[1:] == [Overdue(step=3, waited_s=2.0, ring_passes=3)]
    ring.events.clear()
    ring.run()
    assert ring.answer(1)[0] == ring.model.answer([2], 3, generate(0, [1]).sampling)


def test_a_single_head_has_no_ring_passes():
    ring = FakeRing([], 3)
    ring.ask(generate(0, [1], tokens=3))
    ring.now_s += 1e6
    assert list(ring.head.news()) == []
