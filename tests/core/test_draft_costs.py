"""The cost of wrong drafts and the gain of right ones, on a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from primad.ring.grouping import Batching
from primad.ring.messages import Sampled
from primad.ring.speculation.drafter import Drafting, DraftToken
from primad.ring.speculation.lookup import PromptLookup
from tests.core.test_speculation import Oracle, prompt
from tests.fakes.drafter import Nothing
from tests.fakes.engine import FakeModel
from tests.fakes.ring import GREEDY, generate
from tests.fakes.timed_ring import TimedRing

TOKENS = 500
PROMPT = prompt(5)
ANSWER = FakeModel(1).answer(PROMPT, TOKENS, GREEDY)
PREDICTED = (1.0, 1.05, 1.1, 1.15, 1.2)
MAX = 1.05
"""The maximum slowdown factor by drafts that are always wrong."""


def seconds(devices: int, drafter: Any = None, *, hop_s: float = 0.0, answers: int = 1, **options: Any) -> float:
    """The total time of the requests, run one after another, from the first token of all to the last."""
    tokens = TOKENS // answers
    ring = TimedRing(devices, hop_s=hop_s, context=1024, depth=devices, drafter=drafter or Nothing, **options)
    for request in range(answers):
        ring.head.submit(generate(request, PROMPT, tokens=tokens))
        took_s = ring.finish()
        reported = [event.token for event in ring.events if isinstance(event, Sampled) and event.request == request]
        assert reported == ANSWER[:tokens]
    return took_s


undrafted = cache(seconds)
"""Without drafts; cached, since many tests compare with it."""


class NotBefore(PromptLookup):
    """Fails if asked before the first token."""

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        assert len(self._text) > len(PROMPT), "it was asked before the first token"
        return super().propose(drafts)


def oracle(share: float) -> Any:
    return lambda _: Oracle(ANSWER, share, 1.0, 3)


RINGS = [(2, 0.0, 2), (3, 0.0, 3), (4, 0.0, 4), (4, 0.01, 8), (2, 0.01, 16)]


@pytest.mark.parametrize(
    ("skips", "answers"), [(True, 1), (True, 10), (False, 1), pytest.param(False, 10, marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize(("devices", "hop_s", "room"), RINGS)
def test_a_draft_ahead_that_is_always_wrong_and_always_sure_costs_little(devices, hop_s, room, skips, answers):
    drafting = Drafting(room=room, skips=skips)
    without = undrafted(devices, hop_s=hop_s, answers=answers)
    assert seconds(devices, oracle(0.0), drafting=drafting, hop_s=hop_s, answers=answers) <= MAX * without


@pytest.mark.parametrize("share", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("more", [0.4, 0.76, 0.9])
def test_rows_of_one_step_take_no_place_of_rows_ahead_that_win_more(more, share):
    """Two rows in one step yield at most 2 / (1 + more) times the tokens, two devices nearly twice as many."""
    costs = [1 + more * rows for rows in range(8)]
    options = {"costs": costs, "shares": (0.3, 0.5, 0.2), "batching": Batching(replays=8)}
    ahead = Drafting(room=3, ring_passes=2.0)
    both = replace(ahead, rows=8, costs=tuple(costs))

    def honest(_: Sequence[int]) -> Oracle:
        return Oracle(ANSWER, share, share, 3)

    assert seconds(2, honest, drafting=both, **options) <= 1.02 * seconds(2, honest, drafting=ahead, **options)


@pytest.mark.parametrize(("devices", "hop_s", "room"), RINGS)
def test_looking_up_where_nothing_repeats_costs_next_to_nothing(devices, hop_s, room):
    """The fake model samples uniformly from 64 tokens, so every token has occurred before."""
    took_s = seconds(devices, PromptLookup, drafting=Drafting(room=room), hop_s=hop_s)
    assert took_s <= undrafted(devices, hop_s=hop_s) / 0.97


@pytest.mark.parametrize("shares", [(0.3, 0.5, 0.2), (0.4, 0.4, 0.2), (0.25, 0.33, 0.33, 0.09)], ids=str)
def test_a_row_that_waits_keeps_the_busiest_device_at_work(shares):
    devices = len(shares) - 1
    times = [
        seconds(devices, oracle(0.9), drafting=Drafting(room=devices + more), shares=shares, hop_s=0.0005)
        for more in (0, 1)
    ]
    assert times[1] <= times[0] < seconds(devices, shares=shares, hop_s=0.0005)


def test_a_row_that_a_head_begins_before_a_short_last_window_delays_the_token_that_decides():
    two, three = (seconds(2, oracle(0.7), drafting=Drafting(room=room), shares=(0.45, 0.5, 0.05)) for room in (2, 3))
    assert two <= 0.9 * three


@pytest.mark.parametrize(
    ("devices", "drafting"), [(1, Drafting(rows=8, costs=(1.0,) * 8)), (4, Drafting(room=8))], ids=["rows", "ahead"]
)
def test_drafts_do_not_change_ttft_and_nothing_is_drafted_before_the_first_token(devices, drafting):
    def first_s(drafting: Drafting | None) -> float:
        ring = TimedRing(devices, hop_s=0.01, context=1024, depth=devices, drafting=drafting, drafter=NotBefore)
        ring.head.submit(generate(1, PROMPT, tokens=20))
        ring.finish()
        return ring.reported_s[0]

    assert first_s(drafting) == first_s(None)


def test_a_head_that_is_the_busiest_device_keeps_the_ring_full_while_it_computes_what_came_back():
    shares, visit_s = (0.1, 0.2, 0.2, 0.2, 0.4), 0.01
    took_s = seconds(4, oracle(1.0), drafting=Drafting(room=16), shares=shares, hop_s=0.01, visit_s=visit_s)
    assert took_s <= 1.2 * TOKENS * visit_s * (shares[0] + shares[-1])


@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("answers", [1, 10])
@pytest.mark.parametrize("more", [0.1, 0.3, 1.0, 1.5])
def test_wrong_drafts_in_one_step_cost_little_though_their_rows_take_more_than_predicted(more, answers, share):
    costs = tuple(1 + more * rows for rows in range(5))
    drafting = Drafting(rows=5, costs=PREDICTED)
    without = undrafted(1, costs=costs, answers=answers)
    assert seconds(1, oracle(share), drafting=drafting, costs=costs, answers=answers) <= MAX * without


@pytest.mark.parametrize("times", [1.2, 2.0, 5.0])
def test_a_draft_model_that_is_wrong_and_takes_the_cores_of_the_head_costs_little(times):
    made: list[Working] = []

    class Working(Oracle):
        """Counts as working from a request for drafts to the next token, like an external draft process."""

        works = False

        def took(self, token: int) -> None:
            super().took(token)
            self.works = False

        def propose(self, drafts: Sequence[int]) -> DraftToken | None:
            self.works = True
            return super().propose(drafts)

    def begin(_: Sequence[int]) -> Working:
        made.append(Working(ANSWER, 0.0, 1.0, 3))
        return made[-1]

    took_s = seconds(2, begin, drafting=Drafting(room=2), busy=lambda: times if made and made[-1].works else 1.0)
    assert took_s <= MAX * undrafted(2)


@pytest.mark.parametrize(
    ("devices", "hop_s", "room", "minimum"), [(2, 0.0, 2, 1.4), (4, 0.0, 4, 2.2), (4, 0.01, 8, 3.5), (2, 0.01, 4, 2.2)]
)
def test_drafts_ahead_that_are_mostly_right_keep_winning(devices, hop_s, room, minimum):
    """The head has two visits per token, so without hops the speedup is at most 3/2 for two devices, 5/2 for four."""
    took_s = seconds(devices, oracle(0.9), drafting=Drafting(room=room), hop_s=hop_s)
    assert undrafted(devices, hop_s=hop_s) >= minimum * took_s


def test_drafts_in_one_step_that_are_mostly_right_keep_winning():
    costs = [1 + 0.1 * rows for rows in range(5)]
    took_s = seconds(1, oracle(0.9), drafting=Drafting(rows=5, costs=PREDICTED), costs=costs)
    assert undrafted(1) >= 2.5 * took_s


def test_after_long_success_drafts_that_become_wrong_are_given_up():
    class Turning(Oracle):
        def propose(self, drafts: Sequence[int]) -> DraftToken | None:
            self._share = 0.9 if self._taken < 100 else 0.0
            return super().propose(drafts)

    drafting = Drafting(rows=5, costs=PREDICTED)
    costs = [1 + 0.5 * rows for rows in range(5)]
    assert seconds(1, lambda _: Turning(ANSWER, 0.9, 1.0, 4), drafting=drafting, costs=costs) < undrafted(1)


# ---- drafts that come late ------------------------------------------------------------------------------------------


RIGHT = [random.Random(place).random() < 0.8 for place in range(TOKENS)]


class SlowDrafter(Oracle):
    """Drafts one token every ``draft_s`` after the latest text, as long as its drafts hold."""

    ring: TimedRing
    each_s: float
    waits = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._since_s, self._ready, self._begun = 0.0, 0, False

    def _look(self) -> None:
        if not self._begun:
            self._begun, self._since_s = True, self.ring.now_s
        self._ready += int((self.ring.now_s - self._since_s) / self.each_s)
        self._ready = min(self._ready, 16)
        self._since_s += int((self.ring.now_s - self._since_s) / self.each_s) * self.each_s

    def took(self, token: int) -> None:
        self._look()
        held = self._ready and self._drafted(0) == token
        super().took(token)
        self._ready = self._ready - 1 if held else 0
        if not held:
            self._since_s = self.ring.now_s

    @property
    def draft_s(self) -> float | None:  # type: ignore[override]
        return self.each_s if self.waits else None

    def awaits(self, maximum: int, alpha: float) -> bool:
        self._look()
        return self._ready < maximum

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        self._look()
        if len(drafts) >= self._ready or self._taken + len(drafts) >= len(ANSWER):
            return None
        return DraftToken(token=self._drafted(len(drafts)), sure=0.8)

    def _drafted(self, depth: int) -> int:
        """Deterministic; right at about four of five positions."""
        at = self._taken + depth
        return ANSWER[at] if RIGHT[at] else ANSWER[at] ^ 1


def with_slow_drafter(draft_s: float, *, waits: bool) -> float:
    """The time of a request with a draft model that takes ``draft_s`` a token, where a step of one row takes 0.01 s."""
    made = SlowDrafter(ANSWER, 0.8, 0.8, 3)
    made.each_s, made.waits = draft_s, waits
    ring = TimedRing(
        1,
        context=1024,
        depth=1,
        drafting=Drafting(rows=5, costs=PREDICTED),
        costs=PREDICTED,
        drafter=lambda _: made,
    )
    made.ring = ring
    ring.head.submit(generate(1, PROMPT, tokens=TOKENS))
    took_s = ring.finish()
    assert ring.answer(1)[0] == ANSWER
    return took_s


def test_where_a_step_takes_long_and_a_draft_little_it_pays_to_wait_for_drafts():
    without, late, waited = undrafted(1), with_slow_drafter(0.0005, waits=False), with_slow_drafter(0.0005, waits=True)
    assert waited < 0.9 * late < 0.9 * without


@pytest.mark.parametrize("draft_s", [0.002, 0.003, 0.005])
def test_no_step_waits_for_a_slow_draft_model_that_drafts_for_the_next_step_meanwhile(draft_s):
    assert with_slow_drafter(draft_s, waits=True) <= MAX * with_slow_drafter(draft_s, waits=False)


def test_no_step_waits_longer_than_half_a_token_for_a_silent_draft_model():
    assert with_slow_drafter(1e6, waits=True) <= MAX * undrafted(1)


# ---- what the bench leaves out ---------------------------------------------------------------------------------------

AHEAD, COMPUTED = Drafting(room=8), Drafting(room=8, skips=False)


@pytest.mark.parametrize(
    ("whole", "part", "share", "times"),
    [
        pytest.param(AHEAD, Drafting(room=1, rows=5, costs=(1.0,) * 5), 0.9, 1.3, id="one step"),
        pytest.param(AHEAD, COMPUTED, 0.5, 1.1, id="no skipping"),
        pytest.param(COMPUTED, replace(COMPUTED, adapts=False), 0.0, 1.1, id="fixed"),
    ],
)
def test_each_part_of_drafting_that_can_be_left_out_wins_time(whole, part, share, times):
    costs = [1 + 0.8 * rows for rows in range(5)]
    with_it, without = (
        seconds(4, oracle(share), drafting=each, hop_s=0.01, costs=costs, batching=Batching(replays=5))
        for each in (whole, part)
    )
    assert without >= times * with_it
