"""The ring process releases layers when memory is short, takes them back later, and does not oscillate."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primad.engine.streaming.pressure import (
    INTERVAL_S,
    LINGER_S,
    MAX_WAIT_S,
    RELAPSE_S,
    REPLAN_AFTER_S,
    REPLAN_AGAIN_S,
    WAIT_S,
    Action,
    Grow,
    Hold,
    Holding,
    PressureWatch,
    Reading,
    Replan,
    Shrink,
    Stall,
    reserve_bytes,
)

MIB = 1 << 20
GIB = 1 << 30
LAYER = 60 * MIB
QUIET = Reading(
    total_bytes=4 * GIB,
    available_bytes=4 * GIB,
    counts_mapped=True,
    stalls=(Stall(0.0, 0.0), None),
    swapped_in_bytes=0,
    major_faults=0,
    verdict=None,
)
HOLDING = Holding(held_bytes=GIB, layer_bytes=LAYER, shrinkable=3, growable=0, returned_bytes=0, evicted_bytes=0)
"""An idle machine with nothing evicted."""


@dataclass
class World:
    """A device of 4 GiB with 40 layers of 60 MiB, all but ``ahead`` resident at first, and its samples.

    ``taken`` are the bytes allocated by other programs, and by us besides weights. The rates of symptoms are shares of
    time, bytes per second and faults per second.
    """

    taken: int = 0
    layers: int = 40
    ahead: int = 2
    some: float = 0.0
    full: float = 0.0
    swapped_in: float = 0.0
    evicted: float = 0.0
    faults: float = 0.0
    reading: Reading = QUIET
    now: float = 100.0
    streamed: int = 0
    reported: list[tuple[float, Action]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = PressureWatch(self._read)

    @property
    def resident(self) -> int:
        return self.layers - self.ahead - self.streamed

    @property
    def held(self) -> int:
        return (self.resident + self.ahead) * LAYER

    @property
    def room(self) -> int:
        return self.reading.total_bytes - self.taken - self.held

    def _read(self) -> Reading:
        return replace(self.reading, available_bytes=max(0, self.reading.total_bytes - self.taken))

    def step(self, seconds: float = 0.25) -> Action:
        """Let time pass, then sample and carry out the action."""
        self.now += seconds
        before = self.reading
        stalls = tuple(
            stall and Stall(stall.some_s + self.some * seconds, stall.full_s + self.full * seconds)
            for stall in before.stalls
        )
        swapped = None if before.swapped_in_bytes is None else before.swapped_in_bytes + int(self.swapped_in * seconds)
        faults = None if before.major_faults is None else before.major_faults + int(self.faults * seconds)
        self.reading = replace(before, stalls=stalls, swapped_in_bytes=swapped, major_faults=faults)
        holding = Holding(
            held_bytes=self.held,
            layer_bytes=LAYER,
            shrinkable=self.resident,
            growable=self.streamed,
            returned_bytes=0,
            evicted_bytes=int(self.evicted * seconds),
        )
        action = self.watch.sample(self.now, holding)
        match action:
            case Shrink(layers):
                assert 1 <= layers <= self.resident
                self.streamed += layers
            case Grow():
                assert self.streamed > 0
                self.streamed -= 1
        if not isinstance(action, Hold):
            self.reported.append((self.now, action))
        return action

    def run(self, seconds: float) -> list[Action]:
        """Let time pass; the actions meanwhile."""
        start = len(self.reported)
        end = self.now + seconds
        while self.now < end:
            self.step(0.25 if seconds < 100 else 1.0)
        return [action for _, action in self.reported[start:]]

    def only_room(self, room: int) -> None:
        """Let programs take all but ``room``."""
        self.taken = self.reading.total_bytes - self.held - room


# ---- calm -----------------------------------------------------------------------------------------------------------


def test_a_machine_with_room_is_left_alone():
    world = World(taken=GIB)
    assert world.run(600) == []
    assert world.watch.level == "calm"


def test_all_that_fits_stays_to_the_last_byte_where_nobody_suffers():
    world = World()
    world.only_room(0)
    assert world.run(600) == []


@pytest.mark.parametrize("symptom", ["some", "full", "swapped_in", "evicted", "faults"])
def test_symptoms_on_a_machine_with_room_have_other_causes(symptom):
    """Another cgroup thrashes within its own limit; idle page cache is evicted; a sleeping program is swapped in."""
    world = World(taken=GIB, **{symptom: 0.9 if symptom in ("some", "full") else 1e9})
    assert world.run(60) == []


def test_our_own_page_cache_is_no_pressure():
    """Our layers fill the memory but can be evicted."""
    world = World(taken=GIB, layers=50)
    assert world.room < 2 * LAYER
    assert world.run(60) == []


def test_a_few_symptoms_are_no_pressure():
    world = World(some=0.02, full=0.01, swapped_in=1e5, evicted=1e6, faults=50)
    world.only_room(LAYER // 2)
    assert world.run(60) == []


# ---- pressure -------------------------------------------------------------------------------------------------------


def test_memory_that_the_owner_takes_is_released_at_the_next_sample():
    world = World()
    world.only_room(100 * MIB)
    world.run(3)
    world.taken += 500 * MIB
    assert world.step() == Shrink(8)  # 400 MiB short, plus the reserve
    assert world.room >= reserve_bytes(4 * GIB)
    assert world.watch.level == "high"
    assert world.run(10) == []
    assert world.watch.level == "calm"


def test_a_level_is_shown_for_a_while():
    world = World()
    world.only_room(-1)
    assert world.step() == Shrink(1)
    assert world.watch.level == "some"
    world.run(LINGER_S - 1)
    assert world.watch.level == "some"
    world.run(2)
    assert world.watch.level == "calm"


@pytest.mark.parametrize(
    ("symptoms", "layers"),
    [
        ({"some": 0.15}, 1),
        ({"swapped_in": 2.0 * MIB}, 1),
        ({"evicted": 1.5 * LAYER}, 1),
        ({"faults": 400.0}, 1),
        ({"some": 0.5}, 9),
        ({"some": 0.2, "full": 0.15}, 9),
        ({"swapped_in": 30.0 * MIB}, 9),
    ],
)
def test_where_memory_is_tight_symptoms_count(symptoms, layers):
    world = World(**symptoms)
    world.only_room(LAYER // 2)
    assert world.run(1.25) == [Shrink(layers)]
    assert world.watch.level == ("some" if layers == 1 else "high")


def test_it_shrinks_again_while_symptoms_stay():
    world = World(some=0.2)
    for _ in range(20):
        world.only_room(LAYER // 2)  # other programs take whatever is released
        world.step()
    assert [action for _, action in world.reported] == [Shrink(1)] * 4


def test_symptoms_of_before_a_shrink_do_not_count_after_it():
    world = World(some=0.2)
    world.only_room(LAYER // 2)
    assert world.run(1.25) == [Shrink(1)]
    world.some = 0.0
    assert world.run(3) == []


@pytest.mark.parametrize("verdict", ["some", "high"])
def test_a_system_that_judges_for_itself_is_believed(verdict):
    world = World(taken=GIB, reading=replace(QUIET, verdict=verdict, stalls=(None, None), swapped_in_bytes=None))
    assert isinstance(world.step(), Shrink)
    assert world.watch.level == verdict


def test_a_cgroup_may_suffer_where_the_machine_does_not():
    world = World(some=0.3, reading=replace(QUIET, stalls=(None, Stall(0.0, 0.0))))
    world.only_room(LAYER // 2)
    assert world.run(1.25) == [Shrink(1)]


def test_missing_sources_count_as_calm():
    bare = replace(QUIET, stalls=(None, None), swapped_in_bytes=None, major_faults=None)
    world = World(reading=bare, some=0.9, full=0.9, swapped_in=1e9, faults=1e6)
    world.only_room(LAYER // 2)
    assert world.run(30) == []


def test_where_mapped_pages_are_not_available_they_are_not_subtracted():
    world = World(taken=3 * GIB, reading=replace(QUIET, counts_mapped=False, stalls=(None, None)))
    assert world.run(30) == []


def test_readings_are_taken_only_so_often():
    count = 0

    def read() -> Reading:
        nonlocal count
        count += 1
        return QUIET

    watch = PressureWatch(read)
    for i in range(1000):
        watch.sample(i * 0.001, HOLDING)
    assert count <= 1 / INTERVAL_S + 1


def test_pages_evicted_between_readings_are_counted():
    watch = PressureWatch(lambda: replace(QUIET, available_bytes=GIB + MIB))
    actions = [watch.sample(i * 0.01, replace(HOLDING, evicted_bytes=LAYER // 50)) for i in range(150)]
    assert Shrink(1) in actions


# ---- growing back ---------------------------------------------------------------------------------------------------


def test_it_grows_back_layer_by_layer_once_it_was_calm():
    world = World()
    world.only_room(100 * MIB)
    world.run(10)
    world.taken += 500 * MIB
    world.step()
    streamed, given = world.streamed, world.now
    world.taken -= 500 * MIB
    assert world.run(60) == [Grow()] * streamed
    times = [at for at, action in world.reported if isinstance(action, Grow)]
    assert times[0] - given >= WAIT_S
    assert all(after - before >= 1.0 for before, after in pairwise(times))
    assert world.streamed == 0


def test_it_grows_only_into_room_for_a_layer_and_the_reserve():
    world = World(streamed=5)
    world.only_room(LAYER + reserve_bytes(4 * GIB) - 1)
    assert world.run(120) == []
    world.taken -= 1
    assert world.run(120) == [Grow()]


def test_memory_that_a_program_takes_again_and_again_stays_its_own():
    """The program takes 500 MiB for one second of every four."""
    world = World()
    world.only_room(200 * MIB)
    for i in range(2400):
        world.step()
        world.taken += 500 * MIB if i % 16 == 0 else -500 * MIB if i % 16 == 4 else 0
    assert [type(action) for _, action in world.reported] == [Shrink]


def test_pressure_after_it_grew_makes_it_wait_longer():
    world = World(streamed=20)
    waits, since = [], world.now
    world.only_room(300 * MIB)
    for _ in range(5):
        while world.step() != Grow():
            assert world.now - since < 2 * MAX_WAIT_S + 5
        waits.append(world.now - since)
        world.only_room(-1)
        assert isinstance(world.step(), Shrink)
        since = world.now
        world.only_room(300 * MIB)
    assert all(after > 1.5 * before for before, after in pairwise(waits[1:]))


def test_a_long_calm_is_trusted_again():
    world = World(streamed=20)
    world.only_room(300 * MIB)
    for _ in range(3):
        while world.step() != Grow():
            pass
        world.only_room(-1)
        world.step()
        world.only_room(300 * MIB)
    world.only_room(0)
    assert world.run(1000) == []
    world.only_room(LAYER + 50 * MIB)
    start = world.now
    while world.step() != Grow():
        pass
    assert world.now - start <= 2 * WAIT_S + 1


# ---- the end of the ladder ------------------------------------------------------------------------------------------


def test_with_nothing_left_it_asks_for_another_plan_once():
    world = World(layers=4)
    world.only_room(-100 * MIB)
    while world.resident:
        world.step()
        world.only_room(-100 * MIB)
    start = world.now
    world.only_room(-100 * MIB)
    printed = world.run(60)
    assert printed == [Replan(100 * MIB + reserve_bytes(4 * GIB))]
    assert REPLAN_AFTER_S <= world.reported[-1][0] - start <= REPLAN_AFTER_S + 1
    assert world.run(REPLAN_AGAIN_S - 60) == []
    assert len(world.run(60)) == 1


def test_a_burst_asks_for_no_plan():
    world = World(layers=2)
    world.only_room(-100 * MIB)
    world.run(REPLAN_AFTER_S - 1)
    world.only_room(GIB)
    world.run(1)
    world.only_room(-100 * MIB)
    assert world.run(REPLAN_AFTER_S - 1) == []


def test_the_needed_memory_is_never_zero():
    world = World(layers=2, some=0.5)
    world.only_room(LAYER // 2)
    assert world.run(20) == [Replan(LAYER)]


# ---- any sequence of events -----------------------------------------------------------------------------------------

moods = st.builds(
    dict,
    seconds=st.floats(0.1, 90.0),
    room=st.integers(-800, 800),
    follows=st.booleans(),
    some=st.sampled_from((0.0, 0.0, 0.02, 0.2, 0.9)),
    full=st.sampled_from((0.0, 0.0, 0.3)),
    swapped_in=st.sampled_from((0.0, 0.0, 1e7, 1e9)),
    evicted=st.sampled_from((0.0, 0.0, 1e7, 1e9)),
    verdict=st.sampled_from((None, None, "calm", "some", "high")),
    interval_s=st.sampled_from((0.02, 0.25, 0.9, 4.0)),
)


def live(world: World, mood: dict) -> None:
    """Apply ``mood`` to ``world``; programs take what is released if it ``follows``."""
    for name in ("some", "full", "swapped_in", "evicted"):
        setattr(world, name, mood[name])
    world.reading = replace(world.reading, verdict=mood["verdict"])
    world.only_room(mood["room"] * MIB)
    end = world.now + mood["seconds"]
    while world.now < end:
        world.step(mood["interval_s"])
        if mood["follows"]:
            world.only_room(mood["room"] * MIB)


def swings(world: World) -> int:
    """The number of shrinks after a growth."""
    kinds = [type(action) for _, action in world.reported if not isinstance(action, Replan)]
    return sum(before is Grow and after is Shrink for before, after in pairwise(kinds))


@settings(deadline=None, max_examples=12)
@given(st.lists(moods, min_size=1, max_size=12), st.integers(0, 38))
def test_it_swings_a_bounded_number_of_times(changes, streamed):
    world = World(streamed=streamed)
    start = world.now
    for mood in changes:
        live(world, mood)
    # Six doublings reach the longest wait; further swings are at least a relapse apart.
    assert swings(world) <= 7 + (world.now - start) / RELAPSE_S


@settings(deadline=None, max_examples=4)
@given(st.integers(0, 2**32))
def test_it_does_not_follow_a_program_that_takes_and_frees_at_random(seed):
    """500 MiB for 0.2 to 6 s, then none for 0.2 to 6 s, for half an hour."""
    chance, world = random.Random(seed), World()
    world.only_room(100 * MIB)
    changes_s, taken = world.now, False
    end = world.now + 1800
    while world.now < end:
        if world.now >= changes_s:
            changes_s = world.now + chance.uniform(0.2, 6.0)
            taken = not taken
            world.taken += 500 * MIB if taken else -500 * MIB
        world.step()
        assert world.room >= 0, "the kernel has to take for longer than a token"
    assert swings(world) <= 8
    assert not any(isinstance(action, Replan) for _, action in world.reported)


@settings(deadline=None, max_examples=12)
@given(st.lists(moods, max_size=6), st.integers(0, 38), st.floats(0, 300))
def test_it_never_shrinks_when_it_is_calm(changes, streamed, room):
    world = World(streamed=streamed)
    for mood in changes:
        live(world, mood)
    world.some = world.full = world.swapped_in = world.evicted = 0.0
    world.reading = replace(world.reading, verdict=None)
    world.only_room(GIB)
    world.run(2)  # the pending window of symptoms
    world.only_room(int(room * MIB))
    assert not any(isinstance(action, Shrink | Replan) for action in world.run(300))


@settings(deadline=None, max_examples=12)
@given(
    st.lists(moods, max_size=6),
    st.integers(0, 38),
    st.sampled_from(
        (
            {"room": -1},
            {"room": -700},
            {"verdict": "some"},
            {"verdict": "high"},
            {"room": 10, "some": 0.2},
            {"room": 10, "full": 0.3},
            {"room": 10, "swapped_in": 1e7},
            {"room": 10, "evicted": 1e9},
        )
    ),
)
def test_under_constant_pressure_it_shrinks_to_the_end_and_asks_for_another_plan(changes, streamed, pressure):
    world = World(streamed=streamed)
    for mood in changes:
        live(world, mood)
    reported = len(world.reported)
    calm = {"some": 0.0, "full": 0.0, "swapped_in": 0.0, "evicted": 0.0, "verdict": None, "room": 2000}
    left = world.resident
    live(world, {**calm, **pressure, "seconds": 1.5 * left + 3, "follows": True, "interval_s": 0.25})
    assert world.resident == 0
    assert not any(isinstance(action, Grow) for _, action in world.reported[reported:])
    live(
        world, {**calm, **pressure, "seconds": REPLAN_AGAIN_S + 2 * REPLAN_AFTER_S, "follows": True, "interval_s": 0.25}
    )
    asked = [action for _, action in world.reported[reported:] if isinstance(action, Replan)]
    assert 1 <= len(asked) <= 2
    assert all(action.needed_bytes > 0 for action in asked)


@settings(deadline=None, max_examples=12)
@given(st.lists(moods, max_size=10), st.integers(0, 38))
def test_when_it_is_calm_everything_comes_back(changes, streamed):
    world = World(streamed=streamed)
    for mood in changes:
        live(world, mood)
    world.some = world.full = world.swapped_in = world.evicted = 0.0
    world.reading = replace(world.reading, verdict=None)
    world.taken = 0
    world.run(2 * MAX_WAIT_S + 4 * world.layers)
    assert world.streamed == 0
    assert world.watch.level == "calm"


def test_memory_that_this_process_returned_is_taken_again_at_once_but_not_soon_after_pressure():
    holding = replace(HOLDING, growable=1, returned_bytes=LAYER)
    room = QUIET
    watch = PressureWatch(lambda: room)
    assert watch.sample(0.0, holding) == Grow()
    watch._state = replace(watch._state, wait_s=40.0)
    room = replace(QUIET, available_bytes=GIB - MIB)
    assert isinstance(watch.sample(1.0, replace(holding, returned_bytes=0)), Shrink)
    room = QUIET
    printed = [watch.sample(second, holding) for second in range(2, 60)]
    assert printed.index(Grow()) == 39, "the wait after the pressure"
