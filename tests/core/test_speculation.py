"""Drafts change only when tokens come, with any drafter, any skips and any number of concurrent requests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primad.engine.protocol import Sampling, packed_biases
from primad.errors import AlteredStepError
from primad.ring.grouping import Batching
from primad.ring.head import Send
from primad.ring.messages import Cancel, Drained, KvRemove, Sampled
from primad.ring.scheduler import admission
from primad.ring.scheduler.scheduler import Scheduler
from primad.ring.scheduler.state import PlannedStep, SampledToken, SchedulerState
from primad.ring.speculation.drafter import Drafting, DraftToken
from primad.ring.speculation.pace import BEGINS_AFTER
from primad.ring.speculation.speculation import BeginsDrafter
from tests.fakes.drafter import Nothing
from tests.fakes.engine import VOCABULARY, FakeModel
from tests.fakes.ring import GREEDY, FakeRing, chunks_of, generate

CONTEXT = 256
TOKENS = 24
WILD = msgspec.structs.replace(
    GREEDY,
    temperature=1.3,
    seed=77,
    presence_penalty=0.7,
    penalty_tokens=6,
    logit_bias=packed_biases(((3, 1.5), (9, -50.0))),
)
COSTS = tuple(1 + 0.05 * rows for rows in range(8))
rings = settings(suppress_health_check=[HealthCheck.too_slow])


class Oracle(Nothing):
    """Knows the completions: a draft is right in the ``share`` of cases, with confidence ``sure``."""

    def __init__(self, answer: Sequence[int], share: float, sure: float, seed: int, late: float = 0.0) -> None:
        self._answer, self._share, self._sure, self._late = answer, share, sure, late
        self._random = random.Random(seed)
        self._taken = 0

    def took(self, token: int) -> None:
        assert token == self._answer[self._taken], "it gets another text than without a drafter"
        self._taken += 1

    draft_s: float | None = 1e-4

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        """A draft that is right half of the time the first one is wrong, and one that is always wrong."""
        at = self._taken + len(drafts)
        if at >= len(self._answer):
            return ()
        answer, wrong = self._answer[at], (self._answer[at] + 1) % VOCABULARY
        token = answer if self._random.random() < 0.5 else wrong
        return [DraftToken(token=each, sure=self._sure * 0.6) for each in dict.fromkeys((token, wrong))]

    def awaits(self, maximum: int, alpha: float) -> bool:
        return self._late > 0 and self._random.random() < self._late

    def looked_up(self, drafts: Sequence[int]) -> DraftToken | None:
        return self.propose(drafts)

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        at = self._taken + len(drafts)
        if at >= len(self._answer):
            return None
        wrong = (self._answer[at] + self._random.randrange(1, VOCABULARY)) % VOCABULARY
        return DraftToken(token=self._answer[at] if self._random.random() < self._share else wrong, sure=self._sure)


def knowing(sampling: Sampling, share: float, *, sure: float = 1.0, seed: int = 0, late: float = 0.0) -> BeginsDrafter:
    """Oracles for completions sampled with ``sampling``; the fake model's completions depend on the prompt alone.

    In the ``late`` share of cases a draft must be awaited.
    """
    return lambda prompt: Oracle(FakeModel(1).answer(prompt, 4 * TOKENS, sampling), share, sure, seed, late)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCABULARY, length).tolist()


def move(ring: FakeRing) -> bool:
    """Each move takes time, so that drafts can gain some."""
    ring.now_s += 0.01
    return ring.move()


def run(ring: FakeRing) -> None:
    while move(ring):
        pass
    assert ring.scheduler.is_idle, "the ring went quiet with work left"


def sampled(ring: FakeRing, request: int) -> list[int]:
    return [event.token for event in ring.events if isinstance(event, Sampled) and event.request == request]


@pytest.fixture(autouse=True, scope="module")
def short_turns():
    """Short turns, so that owners often preempt each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "MIN_TURN", 3)
        yield


@st.composite
def drafting_rings(draw, sampling: Sampling = GREEDY, **options):
    """Any ring of two devices or more, with a drafter that is right, wrong or in between. Layers may have a state;
    then KV blocks are not kept."""
    devices, rounds = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    sizes = st.lists(st.integers(1, 2), min_size=devices, max_size=devices)
    drafter = knowing(
        sampling,
        draw(st.sampled_from([0.0, 0.3, 0.7, 0.9, 1.0])),
        sure=draw(st.sampled_from([0.5, 1.0])),
        seed=draw(st.integers(0, 99)),
        late=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    states = draw(st.sampled_from([0, 0, 3]))
    room, rows = draw(st.integers(1, 6)), draw(st.sampled_from([1, 4]))
    settled = {
        "rows": draw(st.sampled_from([4, 64])),
        "minimum": draw(st.sampled_from([None, 2])),
        "states": states,
        "depth": draw(st.integers(1, 3)),
        "sequences": draw(st.integers(1, 3)),
        "keep_rows": None if states else draw(st.sampled_from([None, 2])),
        "batching": Batching(
            rows=draw(st.integers(1, 3)),
            steps=draw(st.integers(1, 3)),
            pads=not states and draw(st.booleans()),
            replays=3,
        ),
        "drafting": Drafting(
            room=room,
            block=draw(st.integers(1, 4)) if min(room, rows) > 1 else 1,
            rows=rows,
            costs=COSTS,
            skips=draw(st.booleans()),
        ),
    }
    return FakeRing(
        draw(st.lists(sizes, min_size=rounds, max_size=rounds)),
        1,
        context=CONTEXT,
        seed=draw(st.integers(0, 2**32)),
        drafter=drafter,
        **(settled | options),
    )


@rings
@given(st.data(), st.sampled_from([GREEDY, WILD]))
def test_any_drafter_leaves_the_answers_of_any_number_of_users_as_they_are(data, sampling):
    ring = data.draw(drafting_rings(sampling))
    texts = data.draw(st.lists(st.builds(prompt, st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=4))
    for request, text in enumerate(texts):
        asked = generate(request, text, tokens=TOKENS, sampling=sampling, root="r")
        ring.head.submit(msgspec.structs.replace(asked, owner=data.draw(st.sampled_from("ab"))))
        for _ in range(data.draw(st.integers(0, 99))):
            move(ring)
    run(ring)
    for request, text in enumerate(texts):
        tokens, finished = ring.answer(request)
        assert tokens == ring.model.answer(text, TOKENS, sampling)
        assert (finished.reason, finished.completion_tokens) == ("length", TOKENS)


@rings
@given(st.data())
def test_a_cancel_at_any_moment_leaks_no_cell_and_no_sequence(data):
    ring = data.draw(drafting_rings())
    first, second = prompt(5, data.draw(st.integers(0, 3))), prompt(7)
    ring.head.submit(generate(1, first, tokens=TOKENS))
    ring.head.submit(generate(2, second, tokens=TOKENS))
    for _ in range(data.draw(st.integers(0, 250))):
        move(ring)
    ring.cancel(1)
    ring.head.submit(generate(3, first, tokens=TOKENS))
    run(ring)
    for request, text in ((2, second), (3, first)):
        assert ring.answer(request)[0] == ring.model.answer(text, TOKENS, GREEDY)
    held = [[window.held(number) for number in range(ring.model.options.sequences)] for window in ring.windows]
    ring.ask(generate(4, [1], tokens=1))
    assert len(ring.scheduler._state.slots._free) == ring.model.options.sequences
    assert all(cells <= CONTEXT for each in held for cells in each)


@rings
@given(st.data())
def test_a_ring_with_drafts_in_flight_drains(data):
    ring = data.draw(drafting_rings())
    text = prompt(6)
    ring.head.submit(generate(1, text, tokens=TOKENS, root="r"))
    for _ in range(data.draw(st.integers(0, 200))):
        move(ring)
    ring.head.drain()
    while move(ring):
        pass
    assert ring.scheduler.is_drained
    assert [event for event in ring.events if isinstance(event, Drained)] == [Drained()]
    reported = sampled(ring, 1)
    assert reported == ring.model.answer(text, TOKENS, GREEDY)[: len(reported)]


@rings
@given(st.data())
def test_an_end_token_and_a_full_context_end_it_where_they_would_without(data):
    text = prompt(8, data.draw(st.integers(0, 9)))
    answer = FakeModel(1).answer(text, TOKENS, GREEDY)
    ends = frozenset([answer[data.draw(st.integers(0, TOKENS - 1))]])
    ring = data.draw(drafting_rings(ends=ends))
    tokens, finished = ring.ask(generate(1, text, tokens=TOKENS))
    assert tokens == FakeModel(1, ends).answer(text, TOKENS, GREEDY)
    assert finished.reason == "stop"


@pytest.mark.parametrize("left", [1, 2, 5, 9])
@pytest.mark.parametrize("rows", [1, 4])
def test_no_row_is_drafted_after_the_last_token_that_a_completion_may_have(left, rows):
    ring = FakeRing(
        [[1, 1, 1]],
        1,
        context=16,
        drafting=Drafting(room=6, rows=rows, costs=COSTS),
        drafter=knowing(GREEDY, 1.0),
    )
    ring.head.submit(generate(1, prompt(16 - left), tokens=100))
    run(ring)
    assert ring.answer(1)[0] == ring.model.answer(prompt(16 - left), left, GREEDY)
    assert max(position for window in ring.windows for step in window.steps for position in step) <= 14


def test_logprobs_of_drafted_tokens_are_those_of_the_model():
    def reported(**options) -> list[Sampled]:
        ring = FakeRing([[1, 1]], 1, **options)
        ring.head.submit(generate(1, [1, 2], tokens=TOKENS, sampling=WILD, logprobs=3))
        run(ring)
        return [event for event in ring.events if isinstance(event, Sampled)]

    drafting = Drafting(room=4, rows=4, costs=COSTS)
    assert reported(drafting=drafting, drafter=knowing(WILD, 0.7)) == reported()


# ---- step by step ----------------------------------------------------------------------------------------------------


ROOM_3 = Drafting(room=3)


class Counting(Nothing):
    """Drafts consecutive numbers after the last token, with constant confidence."""

    sure = 1.0

    def __init__(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]

    def took(self, token: int) -> None:
        self._last = token

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        return DraftToken(token=(drafts[-1] if drafts else self._last) + 1, sure=self.sure)


def begun(*prompts: Sequence[int], drafting: Drafting = ROOM_3, depth: int = 2, **options) -> Scheduler:
    """A generation for each prompt that has sampled 10 to 13, after which drafts begin, and waits for its next row."""
    settled = {"sequences": 2, "drafter": Counting}
    made = Scheduler(
        SchedulerState(context=100, chunking=chunks_of(64), depth=depth, drafting=drafting, **(settled | options))
    )
    for request, text in enumerate(prompts, 1):
        made.submit(generate(request, text, tokens=40))
    for token in range(10, 10 + BEGINS_AFTER):
        for step in [next_step(made) for _ in prompts]:
            bring_back(made, step, token)
    return made


def next_step(made: Scheduler) -> PlannedStep:
    step = made.next_step(0)
    assert step is not None
    return step


def bring_back(made: Scheduler, step: PlannedStep, *tokens: int) -> list[int]:
    """Return ``step`` with ``tokens`` sampled for its rows, as far as they are wanted; the reported tokens."""
    samples = [SampledToken(token=token, ends=False) for token in tokens]
    sample = msgspec.structs.replace(samples[0], more=tuple(samples[1:]))
    drawn = {each.request: sample for _, each in made.wants_samples(step.step)}
    return [event.token for event in made.commit(step.step, drawn, 0) if isinstance(event, Sampled)]


def rows_of(step: PlannedStep) -> list[tuple[int, int]]:
    return list(zip(step.tokens, step.positions, strict=True))


def test_drafts_fill_the_room_of_a_ring_after_the_next_token():
    made = begun([1, 2])
    assert [rows_of(next_step(made)) for _ in range(3)] == [[(13, 5)], [(14, 6)], [(15, 7)]]
    assert made.next_step(0) is None


def test_a_draft_that_holds_is_the_next_token_and_another_one_follows_it():
    made = begun([1, 2])
    steps = [next_step(made) for _ in range(3)]
    assert bring_back(made, steps[0], 14) == [14]
    assert rows_of(next_step(made)) == [(16, 8)]
    assert [bring_back(made, steps[1], 15), bring_back(made, steps[2], 16)] == [[15], [16]]
    assert not made.take_discarded()


def test_the_cells_after_a_rejected_draft_are_forgotten_and_nothing_is_sampled():
    made = begun([1, 2])
    steps = [next_step(made) for _ in range(3)]
    assert bring_back(made, steps[0], 99) == [99]
    assert made.take_discarded() == [steps[1].step, steps[2].step]
    assert made.take_discarded() == []
    following = next_step(made)
    assert (rows_of(following), following.ops) == ([(99, 6)], [KvRemove(0, 6, -1)])
    assert [bring_back(made, step, 15) for step in steps[1:]] == [[], []]
    assert bring_back(made, following, 40) == [40]


def test_a_ring_that_skips_nothing_gets_no_discarded_steps():
    made = begun([1, 2], drafting=Drafting(room=3, skips=False))
    steps = [next_step(made) for _ in range(2)]
    bring_back(made, steps[0], 99)
    assert made.take_discarded() == []
    assert made.is_discarded(steps[1].step)
    assert not made.skips(steps[1].step)


def test_steps_ahead_of_a_finished_generation_are_discarded():
    made = begun([1, 2])
    steps = [next_step(made) for _ in range(3)]
    made.cancel(Cancel(1))
    assert made.take_discarded() == [steps[1].step, steps[2].step]
    assert [bring_back(made, step, 14) for step in steps] == [[], [], []]
    assert made.is_idle


def test_rows_of_users_go_before_drafts_and_are_not_fewer_for_them():
    made = begun([1, 2], [3, 4], depth=3, batching=Batching(steps=2))
    steps = [next_step(made) for _ in range(3)]
    assert [step.requests for step in steps] == [[1], [2], [1]], "the third is a draft"
    bring_back(made, steps[1], 50)
    assert rows_of(next_step(made)) == [(50, 6)], (
        "two steps of next tokens may be in flight, and a draft is none of them"
    )


def test_no_draft_runs_while_a_prompt_is_computed():
    made = begun([1, 2])
    made.submit(generate(2, [5, 6], tokens=40))
    assert [next_step(made).requests for _ in range(2)] == [[2], [1]]
    assert made.next_step(0) is None


def test_a_generation_that_does_not_speculate_has_no_drafts():
    made = Scheduler(
        SchedulerState(context=100, chunking=chunks_of(64), depth=2, drafting=Drafting(room=3), drafter=Counting)
    )
    made.submit(msgspec.structs.replace(generate(1, [1, 2], tokens=40), speculates=False))
    for token in range(10, 20):
        step = next_step(made)
        assert made.next_step(0) is None
        bring_back(made, step, token)


def test_rows_that_cost_little_go_with_the_next_token_in_one_step():
    made = begun([1, 2], drafting=Drafting(rows=4, costs=COSTS))
    step = next_step(made)
    assert (rows_of(step), sorted(step.samples)) == ([(13, 5), (14, 6), (15, 7), (16, 8)], [0, 1, 2, 3])
    assert [(node.draft_token.token, node.parent) for node in made.drafts(step.step)] == [(14, -1), (15, 0), (16, 1)]
    assert bring_back(made, step, 14, 15, 99) == [14, 15, 99]
    following = next_step(made)
    assert (rows_of(following)[0], following.ops) == ((99, 8), [KvRemove(0, 8, -1)])
    assert bring_back(made, following, 100, 101, 102, 103) == [100, 101, 102, 103]
    assert next_step(made).ops == []


@pytest.mark.parametrize(
    ("drafting", "batching", "rows"),
    [
        (Drafting(rows=4, costs=(1.0, 2.0, 3.0, 4.0)), Batching(), 1),
        (Drafting(rows=2, costs=COSTS), Batching(), 2),
        (Drafting(rows=4, costs=COSTS), Batching(cells=7), 2),
        (Drafting(rows=4, costs=COSTS), Batching(cells=3), 1),
    ],
    ids=["rows that cost as much as steps", "two rows are exact", "up to 7 cells are", "there are more cells"],
)
def test_a_step_has_as_many_drafts_as_pay_and_are_exact(drafting, batching, rows):
    assert len(next_step(begun([1, 2], drafting=drafting, batching=batching)).tokens) == rows


def test_drafts_of_a_request_begun_by_another_ring_come_after_its_known_tokens():
    made = Scheduler(
        SchedulerState(context=100, chunking=chunks_of(64), depth=9, drafting=Drafting(room=3), drafter=Counting)
    )
    made.submit(generate(1, [1, 2], sampled=[7, 8, 9], tokens=40))
    steps = [next_step(made) for _ in range(4)]
    assert [rows_of(step) for step in steps[1:]] == [[(7, 2)], [(8, 3)], [(9, 4)]]
    assert made.next_step(0) is None, "the first tokens of a ring are without, to compare with"
    for token in range(10, 10 + BEGINS_AFTER):
        for step in steps:
            bring_back(made, step, token)
        steps = [next_step(made)]
    assert rows_of(next_step(made)) == [(14, 9)]


def test_over_the_drafts_of_another_one_no_row_of_nobody_is_put():
    batching = Batching(rows=3, steps=1, pads=True)
    made = Scheduler(
        SchedulerState(
            context=100,
            chunking=chunks_of(64),
            depth=4,
            sequences=3,
            batching=batching,
            drafting=Drafting(room=6),
            drafter=Counting,
        )
    )
    for request in (1, 2, 3):
        made.submit(generate(request, [request], tokens=40))
    prompts = [next_step(made) for _ in range(3)]
    for step in prompts:
        bring_back(made, step, 10)
    for token in range(11, 14):
        bring_back(made, next_step(made), token)
    whole = next_step(made)
    drafts = [next_step(made) for _ in range(3)]
    assert {step.requests[0] for step in drafts} == {1}, "all are as sure"
    made.cancel(Cancel(2))
    one, three = whole.samples[0][0], whole.samples[2][0]
    made.commit(
        whole.step,
        {one.request: SampledToken(token=14, ends=False), three.request: SampledToken(token=50, ends=False)},
        0,
    )
    assert rows_of(next_step(made)) == [(50, 5)]


# ---- in a ring -------------------------------------------------------------------------------------------------------


def ring_of_three(share: float, **drafting) -> FakeRing:
    return FakeRing(
        [[1, 1, 1]], 1, context=CONTEXT, drafting=Drafting(room=4, **drafting), drafter=knowing(GREEDY, share)
    )


def test_a_right_drafter_has_several_rows_of_one_answer_in_the_ring():
    ring = ring_of_three(1.0)
    ring.head.submit(generate(1, [1, 2], tokens=TOKENS))
    maximum = 0
    while move(ring):
        maximum = max(maximum, ring.scheduler.in_flight)
    assert maximum == 4
    _, finished = ring.answer(1)
    assert finished.accepted == finished.drafted > TOKENS // 2
    assert ring.scheduler.tally.tokens_per_pass > 2


def test_a_wrong_drafter_is_found_out_and_its_steps_are_skipped():
    def computed(**drafting) -> tuple[list[int], FakeRing]:
        ring = ring_of_three(0.0, **drafting)
        ring.head.submit(generate(1, [1, 2], tokens=TOKENS))
        run(ring)
        return [sum(map(len, window.steps)) for window in ring.windows], ring

    rows, ring = computed()
    _, finished = ring.answer(1)
    assert rows[-1] == TOKENS + 1, "the tail computes the prompt and the tokens"
    assert rows[0] == TOKENS + 1 + finished.drafted, "the first window cannot know"
    assert sum(rows) < sum(computed(skips=False)[0])
    assert (finished.accepted, ring.scheduler.tally.accepted) == (0, 0)
    assert ring.scheduler.tally.skipped == ring.scheduler.tally.drafted > 0


def test_a_step_that_nobody_asked_to_skip_is_refused():
    ring = ring_of_three(1.0)
    ring.head.submit(generate(1, [1, 2]))
    sent = ring.head.turn()
    assert isinstance(sent, Send)
    empty = np.empty((0, sent.step.shape[1]), np.float32)
    with pytest.raises(
        AlteredStepError, match="step 0 came back without having been computed, which was not requested"
    ):
        ring.head.receive(msgspec.structs.replace(sent.step, window=3, skipped=True), empty)
