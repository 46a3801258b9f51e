"""What is made of the times that a link was measured with."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.network.linkprobe import beyond_empty, late_one_way_s

times = st.floats(1e-6, 10)


@given(st.lists(times, min_size=1, max_size=200))
def test_at_most_one_message_of_twenty_is_later_than_said(found):
    late_s = 2 * late_one_way_s(found)
    ordered = sorted(found)
    middle = (ordered[(len(found) - 1) // 2] + ordered[len(found) // 2]) / 2
    limit = middle + late_s
    assert late_s >= 0
    assert sum(time > limit * (1 + 1e-9) for time in found) <= len(found) / 20
    assert sum(time >= limit * (1 - 1e-9) for time in found) >= math.floor(len(found) / 20)


def test_both_ways_have_half_of_the_lateness_each():
    assert late_one_way_s([0.002] * 94 + [0.012] * 6) == pytest.approx(0.005)
    assert late_one_way_s([0.002] * 96 + [0.012] * 4) == 0


@given(times, st.dictionaries(st.integers(1, 1 << 20), times))
def test_larger_messages_take_as_long_at_least_and_none_less_than_an_empty_one(round_trip_s, measured):
    found = beyond_empty(round_trip_s, measured)
    assert [message.size_bytes for message in found] == sorted(measured)
    assert all(a.beyond_s <= b.beyond_s for a, b in pairwise(found))
    assert all(message.beyond_s >= max(0, measured[message.size_bytes] - round_trip_s) for message in found)


def test_of_a_message_there_and_an_empty_one_back_the_rest_is_the_messages():
    first, second = beyond_empty(0.004, {8192: 0.005, 32768: 0.007})
    assert (first.beyond_s, second.beyond_s) == pytest.approx((0.001, 0.003))
