"""When a draft model has drafted enough, and whether a step waits for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.ring.speculation.pace import best_wait, rate_without_waiting, tokens_of
from primad.ring.speculation.speculation import FIRST, Fallback

COSTS = (1.0, 1.05, 1.1, 1.15, 1.2)


def test_alpha_is_halved_after_a_step_of_which_all_held_and_rises_with_the_share_that_did_not():
    fallback = Fallback()
    assert fallback.alpha == FIRST == 0.01
    fallback.verified(4, 0)
    assert fallback.alpha == 0.005
    fallback.verified(3, 1)
    little = fallback.alpha
    fallback.verified(0, 4)
    assert 0.005 < little < fallback.alpha == pytest.approx(2 * little)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)).filter(any), max_size=60))
def test_alpha_stays_a_share_and_stays_as_it_is_where_nothing_adapts(steps):
    fallback, fixed = Fallback(), Fallback(adapts=False)
    for right, wrong in steps:
        fallback.verified(right, wrong)
        fixed.verified(right, wrong)
    assert 0 < fallback.alpha < 1
    assert fixed.alpha == FIRST


def test_a_step_waits_for_a_quick_model_and_not_for_a_slow_one():
    assert best_wait(COSTS, 0.8, 0.02) == (4, pytest.approx(tokens_of(4, 0.8) / (1.2 + (1 - 0.8**4) * 0.08)))
    assert best_wait(COSTS, 0.8, 0.02)[1] > rate_without_waiting(COSTS, 0.8, 0.02)
    assert best_wait(COSTS, 0.8, 0.3)[1] < rate_without_waiting(COSTS, 0.8, 0.3)


@given(st.floats(0, 0.99), st.floats(0.001, 5), st.floats(0, 1))
def test_neither_waiting_nor_not_waiting_is_slower_than_no_drafts(share, draft_token, more):
    costs = [1 + more * rows for rows in range(6)]
    assert best_wait(costs, share, draft_token)[1] >= 1
    assert rate_without_waiting(costs, share, draft_token) >= 1
