"""What a device holds at each place of a lap: never too much, nothing read twice, and down to nothing under pressure."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from primad.engine.residency import Residency, ahead_bytes, ladder, two_slots

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=24)


@st.composite
def residencies(draw: st.DrawFn) -> Residency:
    """Any units, any of them streamed, any room for those."""
    sizes = tuple(draw(SIZES))
    streamed = draw(st.frozensets(st.integers(0, len(sizes) - 1)))
    return Residency(sizes=sizes, streamed=streamed, ahead_bytes=draw(st.integers(0, 2 * sum(sizes))))


class Loader:
    """A loader that follows a residency and is as fast as can be: what is wanted is held at once."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.held: set[int] = set(residency.streamed) if not residency.streams else set()
        self.read: list[int] = []

    @property
    def read_bytes(self) -> int:
        return sum(self._residency.sizes[unit] for unit in self.read)

    def move(self, position: int) -> None:
        """Stand at ``position``: give back what is not wanted, then read what is, nearest first."""
        residency = self._residency
        wanted = residency.wanted(position)
        if residency.streams:
            self.held &= set(wanted)
        for unit in wanted:
            if unit in self.held:
                continue
            self.held.add(unit)
            self.read.append(unit)
            held = sum(residency.sizes[each] for each in self.held)
            assert held <= max(residency.ahead_bytes, residency.sizes[wanted[0]])
        assert position not in residency.streamed or position in self.held, "the unit that is computed is in memory"

    def lap(self) -> None:
        for position in range(len(self._residency.sizes)):
            self.move(position)


@given(residencies())
def test_a_lap_reads_each_streamed_unit_once_and_nothing_else(residency):
    loader = Loader(residency)
    loader.lap()
    for _ in range(3):
        before = list(loader.read)
        loader.lap()
        read = loader.read[len(before) :]
        assert len(read) == len(set(read)), "read twice before it was used"
        assert sum(residency.sizes[unit] for unit in read) == residency.read_bytes <= residency.streamed_bytes
        assert set(read) <= residency.streamed


def test_a_single_streamed_unit_stays_however_small_the_room():
    residency = Residency(sizes=(3, 4), streamed=frozenset({1}), ahead_bytes=0)
    assert (residency.streams, residency.read_bytes, residency.held_bytes) == (False, 0, 7)


@given(residencies())
def test_nothing_is_read_when_everything_fits(residency):
    assume(residency.streamed_bytes <= residency.ahead_bytes)
    loader = Loader(residency)
    for _ in range(3):
        loader.lap()
    assert loader.read == []
    assert not residency.streams
    assert residency.read_bytes == 0


@given(residencies(), st.data())
def test_a_step_that_goes_back_costs_no_more_than_the_slots(residency, data):
    """Several chunks of a prompt on their way visit one window after the other before any visits the next window."""
    count = len(residency.sizes)
    rounds = data.draw(st.integers(1, min(4, count)), label="windows")
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=rounds - 1), label="cuts")})
    windows = list(pairwise(cuts))
    visits = data.draw(st.lists(st.sampled_from(windows), min_size=1, max_size=12), label="visits")
    loader, visited, jumps, expected = Loader(residency), 0, 1, 0
    for first, last in visits:
        jumps += first != expected
        for position in range(first, last):
            loader.move(position)
            visited += residency.sizes[position] if position in residency.streamed else 0
        expected = last % count
        loader.move(expected)
    slots = max(residency.ahead_bytes, max((residency.sizes[unit] for unit in residency.streamed), default=0))
    assert loader.read_bytes <= visited + jumps * slots


@given(residencies(), st.lists(st.integers(0, 1000), max_size=40))
def test_wherever_steps_jump_no_more_is_held_than_the_slots(residency, positions):
    loader = Loader(residency)
    for position in positions:
        loader.move(position % len(residency.sizes))


@given(residencies())
def test_what_is_needed_next_is_wanted_first(residency):
    count = len(residency.sizes)
    for position in range(count):
        wanted = residency.wanted(position)
        assert list(wanted) == sorted(wanted, key=lambda unit: (unit - position) % count)
        assert len(set(wanted)) == len(wanted)
        following = next(
            ((position + i) % count for i in range(count) if (position + i) % count in residency.streamed), None
        )
        assert wanted[:1] == (() if following is None else (following,))


@given(residencies())
def test_what_is_resident_and_what_streams_is_everything(residency):
    assert sorted([*residency.resident, *residency.streamed]) == list(range(len(residency.sizes)))
    assert residency.resident_bytes + residency.streamed_bytes == sum(residency.sizes)
    assert residency.resident_bytes <= residency.held_bytes <= sum(residency.sizes)


@given(residencies())
def test_under_pressure_less_and_less_is_held_down_to_nothing_resident(base):
    rungs = ladder(base)
    assert rungs[0] == base
    for upper, lower in pairwise(rungs):
        assert lower.held_bytes < upper.held_bytes
        assert upper.streamed < lower.streamed
    # The last rung holds the least there is: with everything streamed nothing less is held.
    sizes = base.sizes
    everything = frozenset(range(len(sizes)))
    least = Residency(sizes, everything, max(base.ahead_bytes, two_slots(sizes, everything)))
    assert rungs[-1].held_bytes <= max(base.held_bytes if len(rungs) == 1 else 0, least.held_bytes)


@given(SIZES, st.integers(0, 100))
def test_the_rung_that_fits_reads_no_more_than_the_overflow_the_slots_and_a_unit(sizes, percent):
    everything = Residency(tuple(sizes), frozenset(), 0)
    budget = sum(sizes) * percent // 100
    rung = next((rung for rung in ladder(everything) if rung.held_bytes <= budget), None)
    assume(rung is not None)
    assert rung is not None
    overflow = sum(sizes) - budget
    assert rung.read_bytes <= overflow + rung.ahead_bytes + max(sizes)


@given(st.integers(1, 40), st.integers(1, 40))
def test_streamed_units_are_spread_evenly(count, streams):
    """Of equal units: between two that stream, the numbers of resident ones differ by a factor of little more than two."""
    assume(streams <= count)
    rungs = ladder(Residency((10,) * count, frozenset(), 0))
    rung = next((rung for rung in rungs if len(rung.streamed) == streams), None)
    assume(rung is not None)
    assert rung is not None
    places = sorted(rung.streamed)
    gaps = [(after - before) % count or count for before, after in pairwise([*places, places[0]])]
    assert sum(gaps) == count
    assert max(gaps) <= 2 * min(gaps) + 1


@given(st.lists(st.integers(7, 10), min_size=3, max_size=20))
def test_an_output_matrix_is_the_last_to_stream(layers):
    sizes = (*layers, 100)
    for rung in ladder(Residency(sizes, frozenset(), 0)):
        assert len(layers) not in rung.streamed or set(range(len(layers))) <= rung.streamed


def test_slots_are_of_the_size_of_the_largest_layer():
    assert ahead_bytes([10, 20, 30], [], [0, 1], 2) == 0
    assert ahead_bytes([10, 20, 30], [0, 1], [0, 1], 3) == 60
    assert ahead_bytes([10, 20, 100], [0, 1, 2], [0, 1], 2) == 120, "an output matrix takes the place of one of two"


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 11))
def test_as_many_units_are_wanted_as_there_are_slots(count, slots, position):
    residency = Residency((10,) * count, frozenset(range(count)), 10 * slots)
    assert len(residency.wanted(position % count)) == min(slots, count)
