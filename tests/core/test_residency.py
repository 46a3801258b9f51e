"""What a device holds at each point of a ring pass: within limits, nothing read twice, nothing under full pressure."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from primad.engine.streaming.residency import _STEPS, Residency, Spread, ladder, two_slots

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=24)


def cuts_of(sizes: tuple[int, ...]) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    """Any places where units may be cut."""
    return st.tuples(*(st.frozensets(st.integers(0, size)).map(lambda cuts: tuple(sorted(cuts))) for size in sizes))


@st.composite
def residencies(draw: st.DrawFn) -> Residency:
    """Any units, any part of each streamed, any read-ahead limit."""
    sizes = tuple(draw(SIZES))
    ahead = draw(st.integers(0, 2 * sum(sizes)))
    if draw(st.booleans()):
        return Residency.whole(sizes, draw(st.frozensets(st.integers(0, len(sizes) - 1))), ahead)
    parts = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in sizes]
    return Residency(sizes, tuple((begin, end) for begin, end in parts), ahead, cuts=draw(st.just(()) | cuts_of(sizes)))


@st.composite
def spreads(draw: st.DrawFn) -> Spread:
    """Any units that may be cut anywhere."""
    sizes = tuple(draw(SIZES))
    return Spread(sizes, draw(cuts_of(sizes)), draw(st.integers(0, 60)), draw(st.booleans()))


class Loader:
    """An infinitely fast loader that follows a residency: what is wanted is held at once."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.held: dict[int, int] = {} if residency.streams else residency.wanted(0)
        self.read_bytes = 0

    def move(self, position: int) -> None:
        """Move to ``position``: release what is not wanted, then read what is, nearest first."""
        residency = self._residency
        wanted = residency.wanted(position)
        self.held = {unit: min(held, wanted[unit]) for unit, held in self.held.items() if unit in wanted}
        for unit, size in wanted.items():
            self.read_bytes += size - self.held.get(unit, 0)
            self.held[unit] = size
            assert sum(self.held.values()) <= max(residency.read_ahead_bytes, residency.part_sizes[next(iter(wanted))])
        assert self.held.get(position, 0) == residency.part_sizes[position], "the unit that is computed is in memory"

    def ring_pass(self) -> None:
        for position in range(len(self._residency.sizes)):
            self.move(position)


@given(residencies())
def test_a_ring_pass_reads_each_streamed_unit_once_and_nothing_else(residency):
    loader = Loader(residency)
    loader.ring_pass()
    for _ in range(3):
        before = loader.read_bytes
        loader.ring_pass()
        assert loader.read_bytes - before == residency.read_bytes <= residency.streamed_bytes


@given(residencies(), st.integers(0, 100))
def test_a_ring_pass_reads_all_streamed_units_unless_less_than_a_part_does_not_fit(residency, percent):
    maximum = residency.streamed_bytes - max(residency.part_sizes)
    residency = replace(residency, read_ahead_bytes=maximum * percent // 100)
    assert residency.read_bytes == (residency.streamed_bytes if residency.streams else 0)


@given(residencies())
def test_no_room_is_left_in_which_something_more_fits(residency):
    """All of the limit is used, up to the next place where a part may be cut."""
    count = len(residency.sizes)
    for position in range(count):
        wanted = residency.wanted(position)
        room = residency.read_ahead_bytes - sum(wanted.values())
        order = [unit for unit in ((position + i) % count for i in range(count)) if residency.part_sizes[unit]]
        assert list(wanted) == order[: len(wanted)]
        assert all(wanted[unit] == residency.part_sizes[unit] for unit in list(wanted)[:-1]), (
            "the last one alone in part"
        )
        begun = [unit for unit in order if wanted.get(unit, 0) < residency.part_sizes[unit]][:1]
        for unit in begun:
            begin, held = residency.parts[unit][0], wanted.get(unit, 0)
            assert held + room < residency.part_sizes[unit], "all of it would fit"
            cuts = residency.cuts[unit] if residency.cuts else ()
            assert not [cut for cut in cuts if held < cut - begin <= held + room], "more of it would fit"


def test_a_single_streamed_unit_stays_however_small_the_room():
    residency = Residency.whole((3, 4), frozenset({1}), 0)
    assert (residency.streams, residency.read_bytes, residency.held_bytes) == (False, 0, 7)


@given(residencies())
def test_nothing_is_read_when_everything_fits(residency):
    assume(residency.streamed_bytes <= residency.read_ahead_bytes)
    loader = Loader(residency)
    for _ in range(3):
        loader.ring_pass()
    assert loader.read_bytes == 0
    assert not residency.streams
    assert residency.read_bytes == 0


@given(residencies(), st.data())
def test_a_step_that_goes_back_costs_no_more_than_the_slots(residency, data):
    """Several chunks of a prompt in flight visit one window in turn before any visits the next."""
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
            visited += residency.part_sizes[position]
        expected = last % count
        loader.move(expected)
    slots = max(residency.read_ahead_bytes, *residency.part_sizes)
    assert loader.read_bytes <= visited + jumps * slots


@given(residencies(), st.lists(st.integers(0, 1000), max_size=40))
def test_wherever_steps_jump_no_more_is_held_than_the_slots(residency, positions):
    loader = Loader(residency)
    for position in positions:
        loader.move(position % len(residency.sizes))


@given(residencies())
def test_the_unit_needed_next_is_requested_first(residency):
    count = len(residency.sizes)
    for position in range(count):
        wanted = residency.wanted(position)
        assert list(wanted) == sorted(wanted, key=lambda unit: (unit - position) % count)
        following = next(
            ((position + i) % count for i in range(count) if (position + i) % count in residency.streamed), None
        )
        assert list(wanted)[:1] == ([] if following is None else [following])
        assert following is None or wanted[following] == residency.part_sizes[following], "all of it"


@given(residencies())
def test_resident_and_streamed_units_are_all_units(residency):
    assert sorted([*residency.resident, *residency.streamed]) == list(range(len(residency.sizes)))
    assert residency.resident_bytes + residency.streamed_bytes == sum(residency.sizes)
    assert residency.resident_bytes <= residency.held_bytes <= sum(residency.sizes)


@given(residencies())
def test_under_pressure_less_and_less_is_held_down_to_nothing_resident(base):
    """For units that stream as a whole."""
    assume(base == Residency.whole(base.sizes, base.streamed, base.read_ahead_bytes))
    levels = ladder(base, None)
    assert levels[0] == base
    for upper, lower in pairwise(levels):
        assert lower.held_bytes < upper.held_bytes
        assert upper.streamed < lower.streamed
    # The last level is the minimum: no less is held with everything streamed.
    sizes = base.sizes
    everything = frozenset(range(len(sizes)))
    minimum = Residency.whole(sizes, everything, max(base.read_ahead_bytes, two_slots(sizes)))
    assert levels[-1].held_bytes <= max(base.held_bytes if len(levels) == 1 else 0, minimum.held_bytes)


@given(SIZES, st.integers(0, 100))
def test_the_rung_that_fits_reads_no_more_than_the_overflow_the_slots_and_a_unit(sizes, percent):
    everything = Residency.whole(tuple(sizes), frozenset(), 0)
    budget = sum(sizes) * percent // 100
    level = next((level for level in ladder(everything, None) if level.held_bytes <= budget), None)
    assume(level is not None)
    assert level is not None
    overflow = sum(sizes) - budget
    assert level.read_bytes <= overflow + level.read_ahead_bytes + max(sizes)


@given(st.integers(1, 40), st.integers(1, 40))
def test_streamed_units_are_spread_evenly(count, streams):
    """With equal units, the gaps between streamed ones differ by little more than a factor of two."""
    assume(streams <= count)
    levels = ladder(Residency.whole((10,) * count, frozenset(), 0), None)
    level = next((level for level in levels if len(level.streamed) == streams), None)
    assume(level is not None)
    assert level is not None
    places = sorted(level.streamed)
    gaps = [(after - before) % count or count for before, after in pairwise([*places, places[0]])]
    assert sum(gaps) == count
    assert max(gaps) <= 2 * min(gaps) + 1


@given(st.lists(st.integers(7, 10), min_size=3, max_size=20))
def test_an_output_matrix_is_the_last_to_stream(layers):
    sizes = (*layers, 100)
    for level in ladder(Residency.whole(sizes, frozenset(), 0), None):
        assert len(layers) not in level.streamed or set(range(len(layers))) <= level.streamed


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 11))
def test_as_many_units_are_wanted_as_there_are_slots(count, slots, position):
    residency = Residency.whole((10,) * count, frozenset(range(count)), 10 * slots)
    assert len(residency.wanted(position % count)) == min(slots, count)


def steps(spread: Spread) -> int:
    """The largest rounding error of a share of the units: one step, and the longest distance between cuts."""
    longest = 0
    for size, cuts in zip(spread.sizes, spread.cuts, strict=True):
        places = sorted({0, size, *(cuts[-1] - cut for cut in cuts)})
        longest = max(longest, *(after - before for before, after in pairwise(places)))
    return sum(spread.sizes) // _STEPS + 2 * longest + 2


@given(spreads(), st.integers(0, 1200))
def test_a_spread_holds_no_more_than_it_may_unless_everything_streams(spread, held):
    found = spread.within(held)
    assert found.sizes == spread.sizes
    assert found.held_bytes <= held or found == spread.within(0)
    for (begin, end), cuts in zip(found.parts, spread.cuts, strict=True):
        if spread.in_groups and len(cuts) > 1 and begin < end:
            assert cuts[0] <= begin < end <= cuts[-1], "what it shares with its neighbours stays"
    assert found.room_bytes == max(spread.read_ahead_bytes, *found.part_sizes)


@given(spreads(), st.integers(0, 1200))
def test_a_spread_keeps_the_requested_bytes_resident_and_hardly_less(spread, resident):
    found = spread.keeping(resident)
    if found.resident_bytes > resident:
        assert found == spread.keeping(0), "all streams that can"
    else:
        large = sum(size for size in spread.sizes if size > 1.5 * statistics.median(spread.sizes))
        assert found.resident_bytes >= min(resident, sum(spread.sizes)) - steps(spread) - large


@given(
    st.integers(4, 400),
    st.integers(8, 80),
    st.integers(0, 4),
    st.floats(0.001, 1),
    st.integers(0, 20),
)
def test_real_layers_stream_as_many_bytes_as_planned(megabytes, layers, heads, share, header):
    """Up to about one cut, or a layer so small that it has at most one; for any share, with any output matrix."""
    cut = 2 << 20
    sizes = [megabytes * 1_000_000 * (8 if layer % 3 else 7) // 8 for layer in range(layers)]
    sizes += [2 * megabytes * 1_000_000 * heads] if heads else []
    cuts = [tuple(range(cut - header * 100_000 % cut, size + 1, cut)) for size in sizes]
    streamed = int(sum(sizes[:layers]) * share)
    ahead = int(2 * max(sizes[:layers]) * share)
    found = Spread(tuple(sizes), tuple(cuts), ahead).keeping(sum(sizes) - streamed)
    assert 0 <= found.streamed_bytes - streamed <= sum(sizes) // _STEPS + 2 * cut
    assert found.room_bytes <= max(ahead + 2 * cut, min(2 * max(sizes[:layers]), 4 * cut))
    assert share == 1 or not any(found.part_sizes[layers:]), "nothing of the output matrix"


@given(spreads())
def test_everything_stays_where_everything_fits(spread):
    assert spread.within(sum(spread.sizes)).streamed == frozenset()


@given(st.integers(1, 40), st.integers(10, 200), st.integers(1, 10), st.integers(0, 100))
def test_a_spread_reads_the_overflow_and_one_small_part(count, size, cut, percent):
    """With equal units that may be cut often, the buffer shrinks with the streamed share."""
    spread = Spread((size,) * count, (tuple(range(0, size + 1, cut)),) * count, 0)
    total = size * count
    held = total * percent // 100
    found = spread.within(held)
    assume(found.held_bytes <= held)
    assert found.read_bytes <= total - held + max(found.part_sizes) + steps(spread)
    assert max(found.part_sizes) - min(found.part_sizes) <= 2 * cut + size // _STEPS + 2, "the same share of each"


@given(st.lists(st.integers(7, 10), min_size=3, max_size=20), st.integers(0, 300))
def test_no_part_of_an_output_matrix_streams_while_part_of_a_layer_stays(layers, held):
    sizes = (*layers, 100)
    found = Spread(sizes, tuple(tuple(range(size + 1)) for size in sizes), 0).within(held)
    assert not found.part_sizes[-1] or found.part_sizes[:-1] == tuple(layers)


@given(spreads(), st.integers(0, 1200))
def test_under_pressure_a_spread_is_stepped_down_to_nothing_resident(spread, held):
    base = spread.within(held)
    levels = ladder(base, spread)
    assert levels[0] == base
    assert all(lower.held_bytes < upper.held_bytes for upper, lower in pairwise(levels))
    assert levels[-1].held_bytes <= min(base.held_bytes, spread.within(0).held_bytes)


def test_parts_begin_at_a_cut_and_end_at_the_last_one():
    cuts = (5, 25, 45, 65, 85)
    parts = Spread((100,) * 10, (cuts,) * 10, 0).within(820).parts
    assert parts == ((65, 85),) * 10
    for begin, end in Spread((100,) * 10, (cuts,) * 10, 0).within(700).parts:
        assert begin in cuts
        assert end == 85
