"""Which models are loaded: every request is served eventually, and no model in use is unloaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from primad.api.answering.models import ModelState
from primad.head.offer.loader import (
    NOBODY,
    Grant,
    LoaderEffect,
    LoaderEvent,
    LoaderState,
    LoadFailed,
    LoadModel,
    ModelAsked,
    ModelLoaded,
    ModelUnloaded,
    NeedsRoom,
    RefuseRequest,
    TimePassed,
    UnloadAsked,
    UnloadModel,
    UseEnded,
    step,
    wake_at,
)

SIZES = {"small": 1, "medium": 2, "large": 3, "huge": 9}
ROOM = 4


@dataclass
class Household:
    """Devices with ``ROOM`` in all, which carry out the core's decisions when the test lets them."""

    state: LoaderState
    now: float = 0.0
    held: dict[str, int] = field(default_factory=dict)
    """Memory in use, by loaded models or models being loaded."""
    due: list[LoadModel | UnloadModel] = field(default_factory=list)
    granted: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, *pinned: str, keep_s: float = 300.0) -> Household:
        return cls(LoaderState(keep_s=keep_s, pinned=frozenset(pinned)))

    def post(self, event: LoaderEvent) -> None:
        self.state, effects = step(self.state, event, self.now)
        for effect in effects:
            self._take(effect)

    def _take(self, effect: LoaderEffect) -> None:
        match effect:
            case Grant(number):
                assert number not in self.granted, "granted twice"
                name = self.names[number]
                assert name in self.held, "granted what is not there"
                assert not self._is_due(name), "granted what goes"
                self.granted[number] = name
            case RefuseRequest(number, reason):
                self.refused[number] = reason
            case LoadModel(name):
                assert not any(isinstance(each, LoadModel) for each in self.due), "one at a time"
                self.due.append(effect)
            case UnloadModel(name):
                assert name not in self.granted.values(), "unloaded under a request"
                self.due = [each for each in self.due if each.name != name]
                self.due.append(effect)

    def _is_due(self, name: str) -> bool:
        return any(each.name == name for each in self.due)

    def ask(self, number: int, name: str, keep_s: float | None = None) -> None:
        self.names[number] = name
        self.post(ModelAsked(number, name, keep_s))

    def leave(self, number: int) -> None:
        self.granted.pop(number, None)
        self.names.pop(number, None)
        self.post(UseEnded(number))

    def work(self) -> None:
        """Carry out the oldest pending decision."""
        match self.due.pop(0):
            case UnloadModel(name):
                self.held.pop(name, None)
                self.gone.append(name)
                self.post(ModelUnloaded(name))
            case LoadModel(name, may_go):
                lacking = sum(self.held.values()) + SIZES[name] - ROOM
                claims: list[str] = []
                for other in may_go if lacking > 0 else ():
                    if lacking - sum(self.held[each] for each in claims) > 0:
                        claims.append(other)
                if lacking - sum(self.held[each] for each in claims) > 0:
                    self.post(LoadFailed(name, "too large"))
                elif claims:
                    self.post(NeedsRoom(name, frozenset(claims)))
                else:
                    self.held[name] = SIZES[name]
                    self.post(ModelLoaded(name))

    def rest(self) -> None:
        """Carry out all pending decisions."""
        while self.due:
            self.work()

    def phase(self, name: str) -> ModelState:
        return self.state.of(name).phase

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.post(TimePassed())
        self.rest()


def test_a_request_waits_until_its_model_is_loaded():
    household = Household.of()
    household.ask(1, "small")
    assert not household.granted
    assert household.phase("small") is ModelState.LOADING
    household.rest()
    assert household.granted == {1: "small"}
    household.ask(2, "small")
    assert household.granted == {1: "small", 2: "small"}


def test_models_for_which_there_is_room_stay_side_by_side():
    household = Household.of()
    household.ask(1, "small")
    household.ask(2, "large")
    household.rest()
    assert household.granted == {1: "small", 2: "large"}


def test_the_least_recently_used_model_goes_first_and_one_that_is_used_last():
    household = Household.of()
    for number, name in enumerate(("small", "medium"), 1):
        household.ask(number, name)
        household.rest()
        household.now += 1
    household.leave(2)  # the smaller one is older but in use
    household.ask(3, "large")
    household.rest()
    assert household.gone == ["medium"]
    assert household.granted == {1: "small", 3: "large"}


def test_a_model_in_use_is_waited_for_and_later_requests_for_it_queue():
    household = Household.of()
    household.ask(1, "large")
    household.rest()
    household.ask(2, "medium")
    household.rest()
    household.ask(3, "large")
    assert household.granted == {1: "large"}
    household.leave(1)
    household.rest()
    assert household.granted == {2: "medium"}
    household.leave(2)
    household.rest()
    assert household.granted == {3: "large"}


def test_requests_that_never_stop_coming_for_one_model_do_not_starve_another():
    household = Household.of()
    household.ask(1, "large")
    household.rest()
    household.ask(2, "medium")
    for number in range(3, 30):  # one request is always active
        household.ask(number, "large")
        household.leave(number - 1 if number > 3 else 1)
        if household.due:
            household.work()
        if 2 in household.granted:
            break
    assert 2 in household.granted


def test_two_requests_for_two_models_that_do_not_fit_together_are_both_served():
    household = Household.of()
    household.ask(1, "large")
    household.ask(2, "medium")
    household.rest()
    assert household.granted == {1: "large"}
    household.leave(1)
    household.rest()
    assert household.granted == {2: "medium"}


def test_a_pinned_model_stays_and_a_model_that_does_not_fit_next_to_it_is_refused():
    household = Household.of("medium")
    household.ask(NOBODY, "medium")
    household.rest()
    household.wait(1e6)
    household.ask(1, "large")
    household.rest()
    assert household.refused == {1: "too large"}
    assert household.phase("medium") is ModelState.LOADED
    assert household.state.of("large").detail == "too large"


def test_after_a_failure_a_request_tries_again():
    household = Household.of()
    household.ask(1, "huge")
    household.rest()
    household.ask(2, "huge")
    assert household.phase("huge") is ModelState.LOADING
    household.rest()
    assert household.refused.keys() == {1, 2}


def test_a_model_is_unloaded_when_it_was_idle_for_the_time_of_the_last_request():
    household = Household.of(keep_s=300.0)
    household.ask(1, "small")
    household.rest()
    household.wait(1000.0)
    assert household.phase("small") is ModelState.LOADED
    household.leave(1)
    assert wake_at(household.state, household.now) == 1300.0
    household.wait(299.0)
    assert household.phase("small") is ModelState.LOADED
    household.wait(1.0)
    assert household.phase("small") is ModelState.UNLOADED
    household.ask(2, "small", keep_s=0.0)
    household.rest()
    household.leave(2)
    household.rest()
    assert household.phase("small") is ModelState.UNLOADED
    household.ask(3, "small", keep_s=-1.0)
    household.rest()
    household.leave(3)
    household.wait(1e9)
    assert household.phase("small") is ModelState.LOADED
    assert wake_at(household.state, household.now) is None


def test_a_load_without_waiters_continues_unless_another_model_is_waited_for():
    household = Household.of()
    household.ask(1, "large")
    household.leave(1)
    household.rest()
    assert household.phase("large") is ModelState.LOADED
    household.post(UnloadAsked("large"))
    household.rest()
    household.ask(2, "large")
    household.leave(2)
    household.ask(3, "small")
    household.rest()
    assert household.granted == {3: "small"}
    assert household.phase("large") is ModelState.UNLOADED


def test_a_request_that_leaves_the_queue_releases_its_claim():
    household = Household.of()
    household.ask(1, "large")
    household.rest()
    household.ask(2, "medium")
    household.rest()
    household.ask(3, "large")
    household.leave(2)
    assert household.granted == {1: "large", 3: "large"}


def test_an_unload_waits_for_requests_and_later_ones_load_again():
    household = Household.of()
    household.ask(1, "small")
    household.rest()
    household.post(UnloadAsked("small"))
    household.ask(2, "small")
    assert household.phase("small") is ModelState.LOADED
    household.leave(1)
    household.rest()
    assert household.gone == ["small"]
    assert household.granted == {2: "small"}


def test_an_unload_stops_a_loading_model_if_nobody_waits():
    household = Household.of()
    household.ask(NOBODY, "small")
    household.post(UnloadAsked("small"))
    household.rest()
    assert household.phase("small") is ModelState.UNLOADED
    assert not household.state.queue


def test_nothing_stays_of_a_model_that_nobody_wants_before_it_has_room():
    household = Household.of()
    household.ask(1, "medium")
    household.rest()
    household.ask(2, "large")
    household.rest()
    assert household.phase("large") is ModelState.LOADING
    household.leave(2)
    assert household.state.models.keys() == {"medium"}
    assert household.state.turn is None


_MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(sorted(SIZES)), st.sampled_from((None, 0.0, -1.0, 5.0))),
        st.tuples(st.just("load"), st.sampled_from(sorted(SIZES)), st.none()),
        st.tuples(st.just("unload"), st.sampled_from(sorted(SIZES)), st.none()),
        st.tuples(st.just("leave"), st.integers(0, 20), st.none()),
        st.tuples(st.just("work"), st.none(), st.none()),
        st.tuples(st.just("wait"), st.sampled_from((1.0, 10.0)), st.none()),
    ),
    max_size=60,
)


@given(_MOVES, st.sampled_from([(), ("small",), ("medium",)]))
def test_every_request_is_served_or_refused_in_the_end(moves, pinned):
    household, number = Household.of(*pinned, keep_s=5.0), NOBODY
    for move, what, keep_s in moves:
        match move:
            case "ask":
                number += 1
                household.ask(number, what, keep_s)
            case "load":
                household.post(ModelAsked(NOBODY, what))
            case "unload":
                household.post(UnloadAsked(what))
            case "leave" if household.names:
                household.leave(sorted(household.names)[what % len(household.names)])
            case "work" if household.due:
                household.work()
            case "wait":
                household.now += what
                household.post(TimePassed())
        assert all(household.phase(name) is ModelState.LOADED for name in household.granted.values())
        waiting = household.names.keys() - household.granted.keys() - household.refused.keys()
        assert {each.number for each in household.state.queue} - {NOBODY} == waiting
    while household.due or household.granted or household.state.queue:
        assert household.due or household.granted, "nobody is served and nothing is on its way"
        household.rest()
        for each in list(household.granted):
            household.leave(each)
    for name in household.held:
        household.post(UnloadAsked(name))
    household.rest()
    assert not household.held
    assert all(each.phase is ModelState.FAILED for each in household.state.models.values())
