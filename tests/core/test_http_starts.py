"""Only some of many simultaneous requests start per turn of the loop: newest connection first, machines in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from primad.api.http.starts import BESIDE_CHECKS, MAX_CHECKS, MAX_STARTS, Starts
from primad.api.http.turns import TURN_S


class Loop:
    """Runs scheduled calls on demand."""

    def __init__(self) -> None:
        self._soon: list[Callable[[], None]] = []

    def call_soon(self, work: Callable[..., None], *arguments: Any) -> None:
        self._soon.append(lambda: work(*arguments))

    def turn(self) -> bool:
        """Run what is due; whether there was something."""
        due, self._soon = self._soon, []
        for work in due:
            work()
        return bool(due)


class Connections:
    def __init__(self) -> None:
        self.loop, self.begun, self.now_s = Loop(), list[str](), 0.0
        self.starts = Starts(lambda: self.now_s)

    def ready(
        self, name: str, machine: str = "", *, is_new: bool = True, takes_s: float = 0.0, is_check: bool = False
    ) -> Any:
        connection = Connection(self, name, takes_s)
        self.starts.ready(connection, machine, is_new=is_new, is_check=is_check)  # type: ignore[arg-type]
        return connection

    def at_each_turn(self) -> list[list[str]]:
        turns = [self.begun[:]]
        while self.loop.turn():
            turns.append(self.begun[sum(map(len, turns)) :])
        return [turn for turn in turns if turn]


class Connection:
    def __init__(self, of: Connections, name: str, takes_s: float) -> None:
        self.loop, self._of, self._name, self._takes_s = of.loop, of, name, takes_s

    def begin(self) -> None:
        self._of.begun.append(self._name)
        self._of.now_s += self._takes_s


def test_one_request_begins_at_once_and_the_loop_comes_to_rest():
    here = Connections()
    here.ready("one")
    assert here.at_each_turn() == [["one"]]


def test_few_of_many_requests_start_per_turn_and_the_newest_connection_is_first():
    here = Connections()
    for number in range(40):
        here.ready(f"{number}")
    turns = here.at_each_turn()
    assert all(len(turn) <= MAX_STARTS for turn in turns)
    assert turns[1][0] == "39"
    assert sorted(here.begun) == sorted(f"{number}" for number in range(40))


def test_machines_take_turns():
    here = Connections()
    for number in range(40):
        here.ready(f"{number}", "greedy")
    here.ready("modest", "other")
    here.ready("41", "greedy")
    assert "modest" in here.at_each_turn()[1]


def test_a_client_served_before_waits_for_new_ones_but_not_for_ever():
    here = Connections()
    for number in range(MAX_STARTS):
        here.ready(f"{number}")
    here.ready("again", is_new=False)
    for number in range(MAX_STARTS):
        here.ready(f"new {number}")
    turn = here.at_each_turn()[1]
    assert turn[0] == f"new {MAX_STARTS - 1}"
    assert "again" in turn


def test_a_client_that_is_gone_starts_nothing_and_no_client_waits_twice():
    here = Connections()
    for number in range(MAX_STARTS):
        here.ready(f"{number}")
    gone, twice = here.ready("gone"), here.ready("twice")
    here.starts.ready(twice, "", is_new=True)
    here.starts.forget(gone)
    assert (gone in here.starts, twice in here.starts) == (False, True)
    assert here.at_each_turn()[1] == ["twice"]


def test_a_request_that_takes_long_to_start_ends_a_turn():
    here = Connections()
    for number in range(MAX_STARTS):
        here.ready(f"{number}")
    for number in range(4):
        here.ready(f"long {number}", takes_s=TURN_S / 2)
    assert here.at_each_turn()[1:] == [["long 3", "long 2"], ["long 1", "long 0"]]


def test_a_health_check_is_answered_at_once_however_many_wait():
    here = Connections()
    for number in range(99):
        here.ready(f"{number}")
    here.ready("check", is_check=True)
    assert here.begun[-1] == "check"


def test_many_health_checks_take_turns_and_others_begin_all_the_same():
    here = Connections()
    for number in range(2 * MAX_CHECKS + 1):
        here.ready(f"check {number}", "greedy", is_check=True)
        here.ready(f"new {number}", "greedy")
    here.ready("modest check", "other", is_check=True)
    first, second, third, fourth, *_ = here.at_each_turn()
    assert [sum("check" in name for name in turn) for turn in (first, second, third, fourth)] == [
        MAX_CHECKS,
        MAX_CHECKS,
        2,
        0,
    ]
    assert [sum("new" in name for name in turn) for turn in (second, third)] == [BESIDE_CHECKS, MAX_STARTS]
    assert "modest check" in second
