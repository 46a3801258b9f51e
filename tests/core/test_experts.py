"""The pool of experts: picked experts are present, the limit holds, and the most used ones stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from halda.streaming import read_bytes, read_lines
from primad.engine.streaming.experts import LIKELY, Change, ExpertUsage, LayerExperts, Pool
from primad.engine.streaming.residency import Residency, by_expert, ladder
from primad.planning.adapters import grouped
from tests.fakes import planning


def picks(*rows):
    return np.array(rows, np.int32)


def a_pool(counts, capacity, *, size=10):
    return Pool([LayerExperts(count, size) for count in counts], capacity, [ExpertUsage(count) for count in counts])


class Memory:
    """The contents of memory as changes are applied; checks the invariants of each change."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.held = set(pool.fill())
        self.read_bytes = 0
        self._check(frozenset())

    def apply(self, change: Change, needed: frozenset = frozenset()) -> None:
        assert set(change.release) <= self.held, "only what is there is given back"
        assert not set(change.release) & needed, "nothing that a step needs is given back"
        assert len(set(change.release)) == len(change.release)
        self.held -= set(change.release)
        assert not set(change.read) & self.held, "nothing is read that is there"
        assert len(set(change.read)) == len(change.read)
        self.held |= set(change.read)
        self.read_bytes += self.bytes_of(change.read)
        self._check(needed)

    def bytes_of(self, experts) -> int:
        return sum(self.pool.layers[layer].bytes_each for layer, _ in experts)

    def _check(self, needed: frozenset) -> None:
        pool = self.pool
        assert needed <= self.held, "what was picked is there"
        reported = {(layer, int(e)) for layer in range(len(pool.layers)) for e in np.flatnonzero(pool.held(layer))}
        assert reported == self.held
        assert pool.held_bytes == self.bytes_of(self.held) <= max(pool.capacity, self.bytes_of(needed))


LAYERS = st.lists(st.builds(LayerExperts, st.integers(2, 6), st.integers(1, 9)), min_size=1, max_size=4)


@given(layers=LAYERS, room=st.floats(0, 1.2), data=st.data())
def test_whatever_happens_picked_experts_are_there_and_the_room_is_kept(layers, room, data):
    total = sum(layer.count * layer.bytes_each for layer in layers)
    pool = Pool(layers, int(room * total), [ExpertUsage(layer.count) for layer in layers])
    memory = Memory(pool)
    needed: frozenset = frozenset()
    for _ in range(data.draw(st.integers(1, 20))):
        layer = data.draw(st.integers(0, len(layers) - 1))
        match data.draw(st.sampled_from(["pick", "pick", "pick", "ahead", "fill", "lost", "resize", "depart"])):
            case "pick":
                experts = st.integers(0, layers[layer].count - 1)
                used = data.draw(st.integers(1, layers[layer].count))
                rows = data.draw(
                    st.lists(st.lists(experts, min_size=used, max_size=used, unique=True), min_size=1, max_size=4)
                )
                needed = frozenset((layer, e) for row in rows for e in row)
                missing = needed - memory.held
                change = pool.pick(layer, picks(*rows))
                assert set(change.read) == missing, "only what was picked is read"
                memory.apply(change, needed)
            case "ahead":
                maximum = data.draw(st.integers(0, total))
                change = pool.ahead(layer, data.draw(st.integers(1, 64)), maximum)
                assert memory.bytes_of(change.read) <= maximum
                assert {each for each, _ in change.read} <= {layer}
                memory.apply(change, needed)
            case "fill":
                memory.apply(Change((), pool.fill(data.draw(st.none() | st.integers(0, total)))), needed)
            case "lost":
                gone = [e for each, e in memory.held if each == layer and (each, e) not in needed][:2]
                pool.lost(layer, gone)
                memory.held -= {(layer, e) for e in gone}
            case "resize":
                memory.apply(Change(pool.resize(data.draw(st.integers(0, total))), ()), needed)
            case "depart":
                needed = frozenset()
                memory.apply(Change(pool.depart(), ()))


def test_the_pool_begins_with_experts_of_all_layers_equally_and_with_the_most_used_if_known():
    assert set(a_pool((4, 4), 40).fill()) == {(0, 0), (1, 0), (0, 1), (1, 1)}
    known = ExpertUsage.stored([0, 0, 50, 90], 100, 1)
    pool = Pool([LayerExperts(4, 10)] * 2, 40, [ExpertUsage(4), known])
    assert pool.fill()[:2] == ((1, 3), (1, 2))


def test_the_experts_used_most_stay_whatever_layer_they_are_of():
    rng = np.random.default_rng(3)
    chance = [np.array([0.7, 0.2, 0.06, 0.04]), np.array([0.25, 0.25, 0.25, 0.25])]
    memory = Memory(pool := a_pool((4, 4), 40))
    for _ in range(400):
        for layer in range(2):
            picked = int(rng.choice(4, p=chance[layer]))
            memory.apply(pool.pick(layer, picks([picked])), frozenset({(layer, picked)}))
    counted = memory.read_bytes
    for _ in range(400):
        for layer in range(2):
            picked = int(rng.choice(4, p=chance[layer]))
            memory.apply(pool.pick(layer, picks([picked])), frozenset({(layer, picked)}))
    assert (0, 0) in memory.held
    whole_layers = 400 * 10  # one of two layers held whole: every pick of the other may be read
    assert memory.read_bytes - counted < 0.75 * whole_layers


def test_the_pool_counts_picked_experts_and_hits():
    pool = a_pool([4, 4], 30)
    pool.pick(0, picks([0, 1], [1, 2]))
    assert (pool.picked, pool.found) == (3, 0)
    pool.pick(0, picks([1, 3], [3, 1]))
    assert (pool.picked, pool.found) == (5, 1)


def test_a_prompt_that_picks_every_expert_leaves_the_favourites():
    memory = Memory(pool := a_pool((8, 8, 8), 120))
    for _ in range(100):
        for layer in range(3):
            memory.apply(pool.pick(layer, picks([1, 2])), frozenset({(layer, 1), (layer, 2)}))
    everything = picks(*[[e, (e + 1) % 8] for e in range(8)])
    for layer in range(3):
        memory.apply(pool.pick(layer, everything), frozenset((layer, e) for e in range(8)))
    pool.depart()
    assert {(layer, e) for layer in (0, 1) for e in (1, 2)} <= memory.held
    before = memory.read_bytes
    for layer in range(3):
        memory.apply(pool.pick(layer, picks([1, 2])), frozenset({(layer, 1), (layer, 2)}))
    assert memory.read_bytes == before


def test_a_ring_pass_of_a_prompt_reads_no_more_than_the_overflow_and_two_layers():
    memory = Memory(pool := a_pool((8,) * 6, 240))
    everything = picks(*[[e, (e + 1) % 8] for e in range(8)])
    for ring_pass in range(4):
        before = memory.read_bytes
        for layer in range(6):
            needed = frozenset((layer, e) for e in range(8))
            memory.apply(pool.pick(layer, everything), needed)
            memory.apply(pool.ahead((layer + 1) % 6, 8, 80), needed)
        assert ring_pass == 0 or memory.read_bytes - before <= 6 * 80 - 240 + 2 * 80


def test_experts_that_repeat_are_read_ahead_and_others_are_not():
    pool = a_pool((8, 8), 60)
    pool.fill()
    for _ in range(200):  # each pick lasts 10 steps, and all are equally frequent
        for start in range(8):
            for _ in range(10):
                pool.pick(0, picks([start]))
            pool.pick(1, picks([(start + 4) % 8]))
        break
    likely = pool.usages[0].likely(1)
    assert likely[7] >= LIKELY
    assert (likely[:7] < LIKELY).all()
    pool.resize(20)
    pool.pick(1, picks([0]))
    pool.lost(0, range(8))
    assert pool.ahead(0, 1, 80).read == ((0, 7),)


def test_for_many_rows_the_whole_next_layer_is_read_ahead_even_before_anything_is_known_of_it():
    pool = a_pool((8, 8), 160)
    everything = picks(*[[e % 8, (e + 1) % 8] for e in range(64)])
    pool.pick(0, everything)
    assert len(pool.ahead(1, 64, 80).read) == 8


def test_for_one_row_it_is_not():
    pool = a_pool((8, 8), 160)
    pool.pick(0, picks(*[[e % 8, (e + 1) % 8] for e in range(64)]))
    pool.pick(1, picks(*[[e % 8, (e + 1) % 8] for e in range(64)]))
    pool.lost(1, range(8))
    assert len(pool.ahead(1, 64, 80).read) == 8
    pool.lost(1, range(8))
    assert pool.ahead(1, 1, 80).read == ()


@given(st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True), min_size=1, max_size=60))
def test_shares_are_probabilities_and_more_rows_need_more(rows):
    usage = ExpertUsage(8)
    for row in rows:
        usage.note(picks(row))
    share = usage.share()
    assert ((share >= 0) & (share <= 1)).all()
    assert share.sum() == pytest.approx(2)
    assert (usage.likely(8) >= usage.likely(1) - 1e-12).all()


def test_experts_picked_long_ago_count_less():
    usage = ExpertUsage(4)
    usage.note(np.zeros((3000, 1), np.int32))
    usage.note(np.ones((3000, 1), np.int32))
    assert usage.share()[1] > 5 * usage.share()[0]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=12),
    output=st.integers(1, 60),
    held=st.integers(0, 400),
)
def test_layers_by_expert_hold_no_more_than_they_may_where_that_is_possible(sizes, output, held):
    experts = {unit: each for unit, (_, each) in enumerate(sizes) if each}
    assume(experts)
    split = by_expert((*(base + each for base, each in sizes), output), experts, held)
    assert split.sizes == (*(base for base, _ in sizes), output)
    assert split.pool_bytes >= split.layer_pool_bytes == max(experts.values())
    assert split.pool_bytes <= sum(experts.values())
    minimum = ladder(Residency.whole(split.sizes, (), 0), None)[-1].held_bytes
    assert split.held_bytes <= max(held, minimum + split.layer_pool_bytes)
    if split.streamed:
        fewer = Residency.whole(split.sizes, (), 0).held_bytes + split.layer_pool_bytes
        assert fewer > held, "what is no expert stays as long as one layer's experts have room next to it"


@given(pool=st.integers(1, 100), layer=st.integers(1, 30))
def test_under_pressure_the_pool_shrinks_to_one_layer_before_any_unit_streams(pool, layer):
    base = replace(Residency.whole((10,) * 4, frozenset(), 0), pool_bytes=max(pool, layer), layer_pool_bytes=layer)
    levels = ladder(base, None)
    held = [level.held_bytes for level in levels]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(held)
    assert levels[-1].pool_bytes == layer
    for level in levels:
        assert level.pool_bytes == layer or not level.streamed


SOME = ((0.5, 0.75), (1.0, 0.5), (1.5, 0.25))


@pytest.mark.parametrize(
    ("steepness", "held"),
    [
        pytest.param(steepness, held, marks=() if (steepness, held) in SOME else pytest.mark.matrix)
        for steepness in (0.5, 1.0, 1.5)
        for held in (0.25, 0.5, 0.75)
    ],
)
def test_a_plan_forecasts_what_the_pool_reads_of_experts_that_are_picked_unevenly(steepness, held):
    """If all experts counted as equally frequent, the forecast of reads would be 1.2 to 6 times as high."""
    count, used, layers = 32, 4, 8
    rng = np.random.default_rng(0)
    liking = [-steepness * np.log(1 + rng.permutation(count)) for _ in range(layers)]
    capacity = int(held * layers * count)
    pool = Pool([LayerExperts(count, 1)] * layers, capacity, [ExpertUsage(count) for _ in range(layers)])
    pool.fill()
    read = []
    for _ in range(1200):
        picks = [np.argsort(-likes - rng.gumbel(size=count))[None, :used].astype(np.int32) for likes in liking]
        read.append(sum(len(pool.pick(layer, picked).read) for layer, picked in enumerate(picks)))
    shares = [share for usage in pool.usages for share in usage.share().tolist()]
    model = replace(planning.model(), experts=count, experts_used=used, expert_use=grouped(shares, used / count))
    sparse = replace(model.layers[0], expert_bytes_by_type={"Q4_K": count})
    lines = read_lines(replace(model, layers=(sparse,)), 1)
    assert np.mean(read[-600:]) == pytest.approx(read_bytes(lines, layers * count - capacity, layers * count), rel=0.1)
