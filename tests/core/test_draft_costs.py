"""What drafts cost where they are wrong, and win where they are right, under a simulated clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from primad.ring.drafting.drafter import Drafting, Guess
from primad.ring.messages import Sampled
from tests.core.test_speculation import Oracle, prompt
from tests.fakes.engine import FakeModel
from tests.fakes.ring import GREEDY, generate
from tests.fakes.timed_ring import TimedRing

TOKENS = 500
PROMPT = prompt(5)
ANSWER = FakeModel(1).answer(PROMPT, TOKENS, GREEDY)
PREDICTED = (1.0, 1.05, 1.1, 1.15, 1.2)
MOST = 1.05
"""Times as long: what a draft that is always wrong may cost."""


def seconds(devices: int, drafter: Any = None, *, hop_s: float = 0.0, answers: int = 1, **options: Any) -> float:
    """How long the answers took, one behind the other, from the first token told of all to the last."""
    tokens = TOKENS // answers
    ring = TimedRing(devices, hop_s=hop_s, context=1024, depth=devices, drafter=drafter or Nothing, **options)
    for request in range(answers):
        ring.head.submit(generate(request, PROMPT, tokens=tokens))
        took_s = ring.finish()
        told = [event.token for event in ring.events if isinstance(event, Sampled) and event.request == request]
        assert told == ANSWER[:tokens]
    return took_s


class Nothing:
    """Has no guess."""

    works = False

    def __init__(self, prompt: Sequence[int]) -> None:
        """Looks at nothing."""

    def took(self, token: int) -> None:
        """Learns nothing."""

    def guess(self, drafts: Sequence[int]) -> Guess | None:
        return None


def oracle(share: float) -> Any:
    return lambda _: Oracle(ANSWER, share, 1.0, 3)


RINGS = [(2, 0.0, 2), (3, 0.0, 3), (4, 0.0, 4), (4, 0.01, 8), (2, 0.01, 16)]


@pytest.mark.parametrize("answers", [1, 10])
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize(("devices", "hop_s", "room"), RINGS)
def test_a_draft_ahead_that_is_always_wrong_and_always_sure_costs_little(devices, hop_s, room, skips, answers):
    drafting = Drafting(room=room, skips=skips)
    without = seconds(devices, hop_s=hop_s, answers=answers)
    assert seconds(devices, oracle(0.0), drafting=drafting, hop_s=hop_s, answers=answers) <= MOST * without


@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("answers", [1, 10])
@pytest.mark.parametrize("more", [0.1, 0.3, 1.0, 1.5])
def test_wrong_drafts_in_one_step_cost_little_though_their_rows_take_more_than_predicted(more, answers, share):
    costs = [1 + more * rows for rows in range(5)]
    drafting = Drafting(rows=5, costs=PREDICTED)
    without = seconds(1, costs=costs, answers=answers)
    assert seconds(1, oracle(share), drafting=drafting, costs=costs, answers=answers) <= MOST * without


@pytest.mark.parametrize("times", [1.2, 2.0, 5.0])
def test_a_model_that_guesses_wrong_and_takes_the_cores_of_the_head_costs_little(times):
    made: list[Working] = []

    class Working(Oracle):
        """Works whenever a guess was asked for since the last token, as a process does that was told of it."""

        works = False

        def took(self, token: int) -> None:
            super().took(token)
            self.works = False

        def guess(self, drafts: Sequence[int]) -> Guess | None:
            self.works = True
            return super().guess(drafts)

    def begin(_: Sequence[int]) -> Working:
        made.append(Working(ANSWER, 0.0, 1.0, 3))
        return made[-1]

    took_s = seconds(2, begin, drafting=Drafting(room=2), busy=lambda: times if made and made[-1].works else 1.0)
    assert took_s <= MOST * seconds(2)


@pytest.mark.parametrize(
    ("devices", "hop_s", "room", "least"), [(2, 0.0, 2, 1.4), (4, 0.0, 4, 2.2), (4, 0.01, 8, 3.5), (2, 0.01, 4, 2.2)]
)
def test_drafts_ahead_that_are_mostly_right_go_on_winning(devices, hop_s, room, least):
    """The head has two visits of a token, so a ring of two has half of them at once at most, one of four five halves."""
    took_s = seconds(devices, oracle(0.9), drafting=Drafting(room=room), hop_s=hop_s)
    assert seconds(devices, hop_s=hop_s) >= least * took_s


def test_drafts_in_one_step_that_are_mostly_right_go_on_winning():
    costs = [1 + 0.1 * rows for rows in range(5)]
    took_s = seconds(1, oracle(0.9), drafting=Drafting(rows=5, costs=PREDICTED), costs=costs)
    assert seconds(1) >= 2.5 * took_s


def test_after_long_success_drafts_that_become_wrong_are_given_up():
    class Turning(Oracle):
        def guess(self, drafts: Sequence[int]) -> Guess | None:
            self._share = 0.9 if self._taken < 100 else 0.0
            return super().guess(drafts)

    drafting = Drafting(rows=5, costs=PREDICTED)
    costs = [1 + 0.5 * rows for rows in range(5)]
    assert seconds(1, lambda _: Turning(ANSWER, 0.9, 1.0, 3), drafting=drafting, costs=costs) < seconds(1)
