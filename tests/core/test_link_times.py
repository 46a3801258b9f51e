"""Link properties derived from measured times."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halda import LinkProfile
from halda.cost import message_s
from primad.network.linkprobe import _profile, _way, beyond_empty, late_one_way_s

times = st.floats(1e-6, 10)


@given(st.lists(times, min_size=1, max_size=200))
def test_at_most_one_message_of_twenty_is_later_than_the_stated_time(found):
    late_s = 2 * late_one_way_s(found)
    ordered = sorted(found)
    middle = (ordered[(len(found) - 1) // 2] + ordered[len(found) // 2]) / 2
    limit = middle + late_s
    assert late_s >= 0
    assert sum(time > limit * (1 + 1e-9) for time in found) <= len(found) / 20
    assert sum(time >= limit * (1 - 1e-9) for time in found) >= math.floor(len(found) / 20)


def test_each_direction_has_half_of_the_lateness():
    assert late_one_way_s([0.002] * 94 + [0.012] * 6) == pytest.approx(0.005)
    assert late_one_way_s([0.002] * 96 + [0.012] * 4) == 0


@given(times, st.dictionaries(st.integers(1, 1 << 20), times))
def test_larger_messages_take_as_long_at_least_and_none_less_than_an_empty_one(round_trip_s, measured):
    found = beyond_empty(round_trip_s, measured)
    assert [message.size_bytes for message in found] == sorted(measured)
    assert all(a.beyond_s <= b.beyond_s for a, b in pairwise(found))
    assert all(message.beyond_s >= max(0, measured[message.size_bytes] - round_trip_s) for message in found)


def test_the_time_beyond_an_empty_round_trip_is_that_of_the_message():
    first, second = beyond_empty(0.004, {8192: 0.005, 32768: 0.007})
    assert (first.beyond_s, second.beyond_s) == pytest.approx((0.001, 0.003))


class FakeLink:
    """A deterministic link: a round trip, a rate each way, and TCP slow start for the first large message each way."""

    def __init__(self, *, slow_start_s: float = 0.0) -> None:
        self.round_trip_s, self.there, self.back = 0.004, 10e6, 2e6
        self._slow_start_s = slow_start_s
        self._begun: set[bool] = set()

    async def exchange(self, count: int, sent_bytes: int, answer_bytes: int) -> float:
        seconds = self.round_trip_s + count * (sent_bytes / self.there + answer_bytes / self.back)
        is_there = sent_bytes > answer_bytes
        if max(sent_bytes, answer_bytes) >= 256 << 10 and is_there not in self._begun:
            self._begun.add(is_there)
            seconds += self._slow_start_s
        return seconds

    async def measured(self, *, there: bool) -> LinkProfile:
        direction = await _way(self.exchange, self.round_trip_s, there=there)
        return _profile("a", "b", "", self.round_trip_s, direction)


@pytest.mark.parametrize("size", [0, 2304, 8 << 10, 16 << 10, 32 << 10, 256 << 10, 4 << 20, 16 << 20])
async def test_each_direction_has_its_own_figures_and_every_size_its_time(size):
    link = FakeLink()
    assert message_s(await link.measured(there=True), size) == pytest.approx(0.002 + size / 10e6)
    assert message_s(await link.measured(there=False), size) == pytest.approx(0.002 + size / 2e6)
    assert (await link.measured(there=True)).late_s == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("lost_s", "counted_s"), [(0.010, 0.010), (0.016, 0.016), (0.5, 0.016)])
async def test_a_chunk_counts_with_the_slow_start_but_not_with_what_that_cannot_be(lost_s, counted_s):
    found = await FakeLink(slow_start_s=lost_s).measured(there=True)
    assert message_s(found, 4 << 20) == pytest.approx(0.002 + counted_s + (4 << 20) / 10e6)
    assert message_s(found, 8 << 10) == pytest.approx(0.002 + (8 << 10) / 10e6)
