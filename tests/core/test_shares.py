"""Callers share a limit: one that takes as much as it can leaves room for others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from primad.system.shares import Shares, Turns


def fill(shares: Shares, caller: str, amount: int = 1) -> int:
    """The total that ``caller`` gets in portions of ``amount``."""
    got = 0
    while shares.has_room(caller, amount):
        shares.take(caller, amount)
        got += amount
    return got


def test_one_alone_gets_half_and_the_next_ones_find_room():
    shares = Shares(128)
    assert [fill(shares, caller) for caller in "abc"] == [64, 32, 16]
    shares.give_back("a", 64)
    assert fill(shares, "c") == 32, "now it has as much as is left"
    assert fill(shares, "a") == 24


def test_a_caller_that_holds_none_may_have_one_however_many_came_before():
    shares = Shares(8, minimum=1)
    assert [fill(shares, caller) for caller in "abcdefghi"] == [4, 2, 1, 1, 1, 1, 1, 1, 1]
    assert not shares.has_room("b")


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 40), st.booleans()), max_size=60))
def test_without_a_minimum_no_more_than_the_limit_is_given_out(asked):
    shares, held = Shares(100), dict.fromkeys("abcdef", 0)
    for caller, amount, gives in asked:
        if gives and held[caller] >= amount:
            shares.give_back(caller, amount)
            held[caller] -= amount
        elif shares.has_room(caller, amount):
            shares.take(caller, amount)
            held[caller] += amount
        assert sum(held.values()) <= 100
        assert max(held.values()) <= 50
    assert shares.has_room("newcomer", 1) == (sum(held.values()) <= 98)


def test_callers_take_turns_and_one_with_a_single_request_comes_before_the_rest_of_the_others():
    turns = Turns[str]()
    for number in range(3):
        turns.add("a", f"a{number}")
    assert turns.next() == "a0"
    turns.add("b", "b0")
    assert turns.next() == "b0"
    assert turns.next() == "a1"
    turns.add("b", "b1")
    turns.add("c", "c0")
    assert [turns.next() for _ in range(3)] == ["b1", "c0", "a2"]
    assert not turns
