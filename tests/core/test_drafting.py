"""The choice of drafter, its confidence, and when drafts are worth their place in the ring."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.ring.speculation.drafter import Drafting, DraftToken
from primad.ring.speculation.lookup import PromptLookup
from primad.ring.speculation.pace import (
    BEGINS_AFTER,
    HOPELESS_AFTER,
    HOPELESS_IDLE,
    IDLE_COUNTS,
    JUDGED_AFTER,
    MAX_LOST,
    PAUSE_KEPT,
    PAUSES,
    Losses,
    Pace,
)
from primad.ring.speculation.row_costs import RowCosts
from primad.ring.speculation.speculation import Speculation
from tests.fakes.drafter import Nothing


def chain(lookup: PromptLookup, count: int) -> list[int]:
    """The successive drafts of ``lookup``."""
    found: list[int] = []
    for _ in range(count):
        draft_token = lookup.propose(found)
        if draft_token is None:
            break
        found.append(draft_token.token)
    return found


def test_tokens_that_followed_the_last_ones_earlier_are_drafted_as_far_as_they_go():
    assert chain(PromptLookup([1, 2, 3, 4, 5, 6, 9, 1, 2]), 4) == [3, 4, 5, 6]


def test_the_place_with_the_longest_match_is_used_and_then_the_latest():
    assert chain(PromptLookup([7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2]), 1) == [30]
    assert chain(PromptLookup([6, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2]), 1) == [40]


def test_tokens_that_never_occurred_before_give_no_draft():
    assert chain(PromptLookup([1, 2, 3, 4]), 4) == []
    assert chain(PromptLookup([1]), 4) == []


def test_a_loop_continues_into_the_drafts_themselves():
    assert chain(PromptLookup([9, 1, 2, 1, 2]), 6) == [1, 2, 1, 2, 1, 2]


def test_the_completion_is_searched_too():
    lookup = PromptLookup([50, 51])
    for token in (1, 2, 3, 4, 9, 1, 2):
        lookup.took(token)
    assert chain(lookup, 2) == [3, 4]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), max_size=30), st.data())
def test_a_draft_depends_on_the_text_alone_and_occurred_in_it_before(prompt, answer, data):
    asked, fresh = PromptLookup(prompt), PromptLookup(prompt)
    for token in answer:
        chain(asked, data.draw(st.integers(0, 4)))
        asked.took(token)
        fresh.took(token)
    text = [*prompt, *answer]
    draft_tokens = chain(asked, 3)
    assert draft_tokens == chain(fresh, 3)
    if draft_tokens:
        assert any(text[at - 1] == text[-1] and text[at] == draft_tokens[0] for at in range(1, len(text)))


def test_the_confidence_of_a_lookup_follows_from_how_often_such_drafts_held():
    def sure(of: PromptLookup) -> float:
        draft_token = of.propose([])
        assert draft_token is not None
        return draft_token.sure

    text = random.Random(5).choices(range(1000), k=400)
    right = PromptLookup(text)
    for token in text[:100]:
        right.took(token)
    assert sure(right) > 0.95
    wrong = PromptLookup([1, 2, 3])
    for token in range(100, 160):
        for each in (1, 2, token):
            wrong.took(each)
    wrong.took(1)
    wrong.took(2)
    assert sure(wrong) < 0.05


# ---- when it pays ----------------------------------------------------------------------------------------------------


def paced(gap_s: float, drafted_s: float, tokens: int, *, sure: float = 0.7) -> list[bool]:
    """Whether drafts are wanted at each token, for the given time per token without and with drafts."""
    pace, now, wanted = Pace(), 0.0, []
    for _ in range(tokens):
        wanted.append(pace.wants(sure))
        now += drafted_s if wanted[-1] else gap_s
        pace.took(now, drafted=wanted[-1], missed=False)
    return wanted


def test_the_first_tokens_have_no_drafts_to_compare_with():
    assert paced(1.0, 0.5, 20) == [False] * BEGINS_AFTER + [True] * 16


def test_a_very_sure_draft_waits_for_the_time_of_one_token():
    assert paced(1.0, 0.5, 2000, sure=1.0) == [False] * 2 + [True] * 1998


@pytest.mark.parametrize("drafted_s", [0.7, 1.0])
def test_drafts_that_began_so_and_win_little_are_left_out_until_there_is_enough_to_compare_with(drafted_s):
    wanted = paced(1.0, drafted_s, 200, sure=1.0)
    began = 2 + JUDGED_AFTER
    assert wanted[:began] == [False] * 2 + [True] * JUDGED_AFTER
    assert not any(wanted[began : began + BEGINS_AFTER - 2])
    assert all(wanted[began + BEGINS_AFTER - 2 :]) == (drafted_s < 1.0)


def test_drafts_continue_while_they_win_time():
    assert all(paced(1.0, 0.9, 2000)[BEGINS_AFTER:])


@pytest.mark.parametrize(("drafted_s", "trial"), [(1.0, JUDGED_AFTER), (1.2, JUDGED_AFTER), (1.5, 11), (3.0, 3)])
def test_drafts_that_win_no_time_end_and_are_tried_again_ever_more_rarely(drafted_s, trial):
    wanted = paced(1.0, drafted_s, 5000)
    assert wanted[BEGINS_AFTER:][:trial] == [True] * trial
    assert not any(wanted[BEGINS_AFTER + trial :][: PAUSES[0]])
    assert sum(wanted) / len(wanted) < 0.04
    assert any(wanted[-PAUSES[1] - JUDGED_AFTER :])


def unevenly_paced(times: float, tokens: int) -> tuple[float, float]:
    """The share of tokens with drafts, and the total slowdown. Times vary at random by a factor of about 1.5; a
    token with drafts takes ``times`` as long."""
    drafted, took_s, alone_s = 0, 0.0, 0.0
    for seed in range(20):
        pace, now, chance = Pace(), 0.0, random.Random(seed)
        for _ in range(tokens):
            wants, gap_s = pace.wants(0.7), chance.lognormvariate(0, 0.4)
            drafted, alone_s = drafted + wants, alone_s + gap_s
            now += gap_s * (times if wants else 1)
            pace.took(now, drafted=wants, missed=wants and chance.random() > 0.7)
        took_s += now
    return drafted / tokens / 20, took_s / alone_s


@pytest.mark.parametrize(("times", "share"), [(0.7, 0.87), (0.8, 0.77)])
def test_tokens_that_are_late_by_chance_end_no_drafts_that_win(times, share):
    assert unevenly_paced(times, 200)[0] >= share


@pytest.mark.parametrize("times", [1.1, 1.2, 1.5])
def test_drafts_that_lose_time_cost_little_though_tokens_are_late_by_chance(times):
    assert unevenly_paced(times, 1000)[1] <= 1.03


def test_drafts_that_never_hold_cost_a_short_answer_little_though_tokens_are_late_by_chance():
    shares = []
    for seed in range(12):
        late, pace, now, usual_s = random.Random(seed), Pace(), 0.0, 0.0
        for _ in range(192):
            wanted, chance = pace.wants(0.75), 1 + abs(late.gauss(0, 0.1))
            now, usual_s = now + (1.25 if wanted else 1.0) * chance, usual_s + chance
            pace.took(now, drafted=wanted, missed=wanted)
        shares.append(usual_s / now)
    assert sum(shares) / len(shares) >= 0.978


def test_drafts_that_won_before_they_lost_are_tried_again_as_soon_as_the_first_time():
    pace, now, wanted = Pace(), 0.0, []
    for token in range(3000):
        wanted.append(pace.wants(0.7))
        is_lost = token % 300 > 270
        now += (1.5 if is_lost else 0.7) if wanted[-1] else 1.0
        pace.took(now, drafted=wanted[-1], missed=False)
    assert sum(wanted) > 2500


def test_drafts_of_which_none_holds_end_sooner():
    pace = Pace()
    for now in range(BEGINS_AFTER):
        pace.took(now, drafted=False, missed=False)
    for now in range(HOPELESS_AFTER):
        assert not pace.is_off
        pace.took(BEGINS_AFTER + now, drafted=True, missed=True)
    assert pace.is_off


def idle_tokens(losses: Losses, gap_s: float, *, held: int = 0) -> int:
    """The number of tokens for which a drafter works in vain, after ``held`` accepted drafts, until it is off."""
    pace, now = Pace(losses=losses), 0.0
    for token in range(BEGINS_AFTER + 1 + held):
        pace.took(now, drafted=token > BEGINS_AFTER, missed=False)
        now += 1.0 if token < BEGINS_AFTER else gap_s
    tokens = 0
    while not pace.is_off:
        tokens += 1
        pace.took(now, drafted=False, missed=False, worked=True)
        now += gap_s
    return tokens


def test_a_drafter_that_works_for_nothing_ends_though_tokens_came_sooner_by_chance():
    assert idle_tokens(Losses(), 0.95) == JUDGED_AFTER // IDLE_COUNTS


def test_drafting_ends_sooner_after_failed_trials_unless_a_draft_held():
    losses = Losses(decode_s=1e6)
    usual = JUDGED_AFTER // IDLE_COUNTS
    assert [idle_tokens(losses, 0.95) for _ in range(4)] == [usual, usual, HOPELESS_IDLE, HOPELESS_IDLE]
    assert idle_tokens(losses, 1.05, held=1) == usual


def test_time_lost_by_one_request_counts_for_the_next_ones():
    losses = Losses()

    def begun() -> Pace:
        pace = Pace(losses=losses)
        for now in range(BEGINS_AFTER):
            pace.took(now, drafted=False, missed=False)
        return pace

    first = begun()
    for number in range(1, 4):
        first.took(BEGINS_AFTER - 1 + 3 * number, drafted=True, missed=True)
    assert first.is_off
    assert begun().is_off, "a trial would lose as much again"
    pace = begun()
    for now in range(round(2 * losses.trial_s / MAX_LOST)):
        pace.took(BEGINS_AFTER + now, drafted=False, missed=False)
    assert not begun().is_off


def test_a_request_pauses_drafts_longer_at_once_if_they_gained_nothing_before():
    losses = Losses(decode_s=1e6)

    def first_pause() -> int:
        pace, paused = Pace(losses=losses), 0
        for now in range(BEGINS_AFTER + HOPELESS_AFTER):
            pace.took(now, drafted=now >= BEGINS_AFTER, missed=True)
        while pace.is_off:
            paused += 1
            pace.took(BEGINS_AFTER + HOPELESS_AFTER + paused, drafted=False, missed=False)
        return paused

    assert [first_pause() for _ in range(4)] == [PAUSES[0], 2 * PAUSES[0], PAUSE_KEPT, PAUSE_KEPT]
    pace, now = Pace(losses=losses), 0.0
    for number in range(BEGINS_AFTER + 2 * JUDGED_AFTER):
        now += 1.0 if number < BEGINS_AFTER else 0.5
        pace.took(now, drafted=number >= BEGINS_AFTER, missed=False)
    assert first_pause() == PAUSES[0], "after a request that they sped up"


def test_drafts_must_be_surer_after_misses_and_less_so_while_the_ring_is_idle():
    pace = Pace()
    for now in range(BEGINS_AFTER):
        pace.took(now, drafted=False, missed=False)
    assert pace.wants(0.5)
    for now in range(BEGINS_AFTER, BEGINS_AFTER + HOPELESS_AFTER - 1):
        pace.took(now, drafted=True, missed=True)
    assert not pace.wants(0.5)
    for now in range(BEGINS_AFTER + HOPELESS_AFTER, 40):
        pace.wants(0.5)
        pace.took(now, drafted=False, missed=False)
    assert pace.wants(0.5)


def test_rows_that_follow_each_other_give_less_where_the_head_drafts_between_them():
    drafting = Drafting(room=2, ring_passes=2.0)
    assert drafting.rate_ahead(0.7) == pytest.approx(2 / 1.3)
    assert drafting.rate_ahead(0.7, 0.1) == pytest.approx(1 / (0.6 + 0.3 * 0.4))


class Sure(Nothing):
    """Always drafts 7, with constant confidence, in ``own_s`` each."""

    def __init__(self, sure: float, own_s: float = 0.0) -> None:
        self._sure, self._own_s = sure, own_s

    @property
    def own_s(self) -> float:
        return self._own_s

    def propose(self, drafts: object) -> DraftToken:
        return DraftToken(token=7, sure=self._sure)

    looked_up = propose


@pytest.mark.parametrize(
    ("sure", "costs", "rows"),
    [
        (0.9, (1.0, 1.1, 1.2, 1.3, 1.4), 4),
        (0.9, (1.0, 2.0, 3.0, 4.0, 5.0), 0),
        (0.9, (1.0, 1.1, 3.0, 4.0, 5.0), 1),
        (0.3, (1.0, 1.1, 1.2, 1.3, 1.4), 1),
        (0.05, (1.0, 1.1, 1.2, 1.3, 1.4), 0),
        (0.9, (1.0,), 0),
    ],
)
def test_the_number_of_rows_in_a_step_is_the_one_that_wins_the_most_time(sure, costs, rows):
    speculation = Speculation(Sure(sure), Drafting(rows=5, costs=costs))
    for now in range(BEGINS_AFTER):
        speculation.took(1, now)
    assert len(speculation.together(4)) == rows
    assert len(speculation.together(1)) == min(rows, 1)


@pytest.mark.parametrize(("longest_s", "rows"), [(1.4, 4), (3.0, 3)])
def test_steps_that_take_longer_than_planned_have_fewer_rows_in_later_answers_too(longest_s, rows):
    drafting = Drafting(rows=5, costs=(1.0, 1.1, 1.2, 1.3, 1.4))
    costs = RowCosts(drafting.costs)
    for _ in range(2):
        speculation = Speculation(Sure(0.9), drafting, costs=costs)
        for now in range(BEGINS_AFTER):
            speculation.took(1, now)
        for _ in range(20):
            nodes = speculation.together(4)
            speculation.handed_out_tree(nodes)
            speculation.measured(longest_s if len(nodes) == 4 else 1.3)
            speculation.take_back()
    assert len(nodes) == rows


def test_no_measured_time_counts_where_nothing_adapts():
    drafting = Drafting(rows=5, costs=(1.0, 1.1, 1.2, 1.3, 1.4), adapts=False)
    speculation = Speculation(Sure(0.9, own_s=100.0), drafting)
    for now in range(40):
        speculation.took(1, now)
        nodes = speculation.together(4)
        assert len(nodes) == 4 or now < BEGINS_AFTER
        speculation.handed_out_tree(nodes)
        speculation.measured(50.0)
        speculation.take_back()


def test_a_step_that_was_held_up_changes_the_cost_of_its_rows_little():
    costs = RowCosts((1.0, 1.2, 1.4))
    costs.add(2, 50.0)
    assert costs[:] == [1.0, pytest.approx(1.26), 1.4]
    for _ in range(100):
        costs.add(2, 1.1)
    assert costs[:] == [1.0, pytest.approx(1.1, abs=0.01), 1.4]


def test_the_needed_confidence_is_that_of_all_drafts_in_flight():
    speculation = Speculation(Sure(0.6), Drafting(room=9))
    for now in range(BEGINS_AFTER):
        speculation.took(1, now)
    count = 0
    while draft_tokens := speculation.next(1):
        speculation.handed_out(draft_tokens, count)
        count += 1
    assert count == 1, "two hold in 0.36 of the cases"
