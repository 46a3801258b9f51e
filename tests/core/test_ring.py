"""Head and workers joined by variables: any ring gives the tokens of one device, whatever happens in between."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primad.engine.protocol import packed_biases
from primad.errors import AlteredStepError, EngineError, NotFiniteError, RingError, SenderError
from primad.kv import keys
from primad.kv.keys import KvBlock
from primad.ring.chunks import ChunkSize, Pieces
from primad.ring.grouping import Batching
from primad.ring.head import Notify, Send, log_softmax, most_likely
from primad.ring.keeping import prompt_blocks, without_old_states
from primad.ring.messages import (
    PROTOCOL,
    Drained,
    Finished,
    KvForgotten,
    KvKept,
    KvRemove,
    PromptProgress,
    Sampled,
    Sampling,
    Serving,
    Step,
)
from primad.ring.scheduler import admission
from primad.ring.speculation.drafter import Drafting
from primad.ring.worker import FEW_NUMBERS, Worker, is_finite
from tests.core.test_speculation import knowing
from tests.fakes.engine import VOCABULARY, WIDTH, FakeModel
from tests.fakes.kv_writer import FakeKvWriter
from tests.fakes.replica import FakeReplica
from tests.fakes.ring import GREEDY, STEP_TIMEOUT_S, FakeRing, generate

CONTEXT = 2048
SAMPLED = msgspec.structs.replace(GREEDY, temperature=1.0)
SMALL = ([[2, 1, 3]], 2)
"""Three devices, one round."""

rings = settings(suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Shape:
    """A ring drawn by hypothesis."""

    rounds: list[list[int]]
    tail: int
    rows: int
    depth: int
    seed: int
    needs_state: bool = False
    """The model's KV cache needs a state to continue."""

    def ring(self, **options) -> FakeRing:
        return FakeRing(
            self.rounds, self.tail, rows=self.rows, depth=self.depth, context=CONTEXT, seed=self.seed, **options
        )


@st.composite
def shapes(draw, min_devices=1):
    devices, rounds = draw(st.integers(min_devices, 5)), draw(st.integers(1, 3))
    sizes = st.lists(st.integers(1, 4), min_size=devices, max_size=devices)
    return Shape(
        rounds=draw(st.lists(sizes, min_size=rounds, max_size=rounds)) if devices > 1 else [],
        tail=draw(st.integers(1, 4)),
        rows=draw(st.sampled_from([1, 7, 64, 512])),
        depth=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 2**32)),
        needs_state=draw(st.booleans()),
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCABULARY, length).tolist()


@st.composite
def prompts(draw, shape: Shape | None = None):
    maximum = 2000 if shape is None or shape.rows > 1 else 100
    return prompt(draw(st.one_of(st.integers(1, 20), st.integers(1, maximum))), draw(st.integers(0, 3)))


@rings
@given(st.data(), shapes())
def test_any_ring_gives_the_tokens_of_one_device(data, shape):
    text, ring = data.draw(prompts(shape)), shape.ring()
    tokens, finished = ring.ask(generate(1, text))
    assert tokens == ring.model.answer(text, 8, GREEDY)
    assert (finished.reason, finished.error) == ("length", None)
    assert (finished.prompt_tokens, finished.completion_tokens) == (len(text), 8)


@rings
@given(st.data(), shapes())
def test_any_ring_samples_the_tokens_of_one_device(data, shape):
    text, seed = data.draw(prompts(shape)), data.draw(st.integers(0, 2**32 - 2))
    sampling = msgspec.structs.replace(
        SAMPLED, seed=seed, presence_penalty=0.5, penalty_tokens=16, logit_bias=packed_biases(((3, 1.5), (9, -50.0)))
    )
    ring = shape.ring()
    tokens, _ = ring.ask(generate(1, text, sampling=sampling))
    assert tokens == ring.model.answer(text, 8, sampling)


@rings
@given(st.data(), shapes())
def test_requests_in_a_row_do_not_know_each_other(data, shape):
    texts = data.draw(st.lists(prompts(shape), min_size=2, max_size=4))
    ring = shape.ring()
    for request, text in enumerate(texts):
        ring.head.submit(generate(request, text, tokens=4))
    ring.run()
    for request, text in enumerate(texts):
        assert ring.answer(request)[0] == ring.model.answer(text, 4, GREEDY)
    order = [event.request for event in ring.events if isinstance(event, Finished)]
    assert order == list(range(len(texts)))


@rings
@given(st.data(), shapes())
def test_a_cancel_at_any_moment_never_disturbs_the_next_request(data, shape):
    first, second = data.draw(prompts(shape)), data.draw(prompts(shape))
    moves = data.draw(st.integers(0, 120))
    ring = shape.ring()
    ring.head.submit(generate(1, first, tokens=6))
    queued_before = data.draw(st.booleans())
    if queued_before:
        ring.head.submit(generate(2, second, tokens=6))
    for _ in range(moves):
        ring.move()
    reported, over = ring.reported(1), any(isinstance(event, Finished) and event.request == 1 for event in ring.events)
    ring.cancel(1)
    if not queued_before:
        ring.head.submit(generate(2, second, tokens=6))
    ring.run()
    assert ring.answer(2)[0] == ring.model.answer(second, 6, GREEDY)
    assert ring.reported(1) == reported, "something was reported of a request after its cancel"
    if over:
        assert ring.answer(1)[0] == ring.model.answer(first, 6, GREEDY)


@rings
@given(st.data(), shapes(min_devices=2))
def test_cancels_of_many_waiting_and_running_requests_leave_the_others_whole(data, shape):
    texts = data.draw(st.lists(prompts(shape), min_size=3, max_size=5))
    ring = shape.ring()
    for request, text in enumerate(texts):
        ring.head.submit(generate(request, text, tokens=3))
    cancelled = data.draw(st.sets(st.integers(0, len(texts) - 1)))
    for request in sorted(cancelled, reverse=True):
        for _ in range(data.draw(st.integers(0, 20))):
            ring.move()
        ring.cancel(request)
    ring.run()
    for request in set(range(len(texts))) - cancelled:
        assert ring.answer(request)[0] == ring.model.answer(texts[request], 3, GREEDY)


def test_a_cancelled_request_that_waited_computes_nothing():
    ring = FakeRing(*SMALL)
    ring.head.submit(generate(1, prompt(5), tokens=2))
    ring.head.submit(generate(2, prompt(900)))
    ring.cancel(2)
    ring.run()
    assert all(len(step) < 900 for step in ring.windows[0].steps)
    assert ring.reported(2) == 0


def test_a_cancel_of_an_unknown_request_changes_nothing():
    ring = FakeRing(*SMALL)
    ring.head.submit(generate(1, prompt(5)))
    ring.move()
    ring.cancel(99)
    ring.run()
    assert ring.answer(1)[0] == ring.model.answer(prompt(5), 8, GREEDY)


@rings
@given(shapes())
def test_a_warm_up_reports_serving_once_and_is_forgotten_everywhere(shape):
    ring = shape.ring()
    ring.head.warm_up()
    ring.head.submit(generate(1, [5, 6]))
    ring.run()
    assert [event for event in ring.events if isinstance(event, Serving)] == [Serving()]
    assert ring.events[0] == Serving()
    assert ring.answer(1)[0] == ring.model.answer([5, 6], 8, GREEDY)


def test_a_warm_up_whose_token_ends_the_answer_serves_too():
    ring = FakeRing(*SMALL, ends=frozenset(range(VOCABULARY)))
    ring.head.warm_up()
    ring.run()
    assert ring.events == [Serving()]


@rings
@given(st.data(), shapes())
def test_an_end_token_ends_the_completion_and_is_not_reported(data, shape):
    text = data.draw(prompts(shape))
    answer = FakeModel(1).answer(text, 8, GREEDY)
    end = data.draw(st.integers(0, 7))
    ring = shape.ring(ends=frozenset([answer[end]]))
    tokens, finished = ring.ask(generate(1, text))
    assert tokens == answer[: answer.index(answer[end])]
    assert (finished.reason, finished.completion_tokens) == ("stop", len(tokens))


@rings
@given(shapes(), st.integers(1, 12))
def test_an_answer_has_at_most_max_tokens(shape, maximum):
    ring = shape.ring()
    tokens, finished = ring.ask(generate(1, [1, 2, 3], tokens=maximum))
    assert (len(tokens), finished.reason) == (maximum, "length")


@rings
@given(shapes(), st.integers(1, 6))
def test_an_answer_ends_with_the_context(shape, left):
    ring = FakeRing(shape.rounds, shape.tail, rows=shape.rows, depth=shape.depth, context=32, seed=shape.seed)
    text = prompt(32 - left)
    tokens, finished = ring.ask(generate(1, text, tokens=1000))
    assert tokens == ring.model.answer(text, left, GREEDY)
    assert finished.reason == "length"


@pytest.mark.parametrize("wanted", [0, 1, 5, VOCABULARY, VOCABULARY + 10])
def test_logprobs_are_those_of_the_model(wanted):
    ring = FakeRing(*SMALL)
    text = prompt(20)
    ring.ask(generate(1, text, tokens=4, sampling=SAMPLED, logprobs=wanted))
    for event in ring.events:
        if isinstance(event, Sampled):
            logits = ring.model.logits(text).astype(np.float64)
            expected = logits - np.log(np.exp(logits).sum())
            assert event.logprob == pytest.approx(expected[event.token], abs=1e-9)
            assert len(event.top) == min(wanted, VOCABULARY)
            assert [token for token, _ in event.top] == np.argsort(-expected)[:wanted].tolist()
            assert [logprob for _, logprob in event.top] == pytest.approx(np.sort(expected)[::-1][:wanted], abs=1e-9)
            text.append(event.token)


def test_without_logprobs_none_are_computed():
    ring = FakeRing(*SMALL)
    ring.ask(generate(1, [1]))
    assert all(event.logprob is None and event.top == () for event in ring.events if isinstance(event, Sampled))


def test_logprobs_of_huge_and_of_equal_logits():
    spread = log_softmax(np.array([3e38, -3e38, 0], np.float32))
    assert spread[0] == 0
    assert not np.isnan(spread).any()
    flat = log_softmax(np.zeros(4, np.float32))
    assert flat == pytest.approx([-math.log(4)] * 4)
    assert [token for token, _ in most_likely(flat, 4)] == [0, 1, 2, 3]
    assert most_likely(flat, 0) == ()


def test_the_seed_decides_the_sampled_tokens():
    ring = FakeRing(*SMALL)
    answers = [
        ring.ask(generate(request, [1, 2], sampling=msgspec.structs.replace(SAMPLED, seed=seed)))[0]
        for request, seed in enumerate([1, 2, 1, 3])
    ]
    assert answers[0] == answers[2]
    assert len({tuple(answer) for answer in answers}) == 3


def test_a_grammar_that_cannot_be_followed_ends_its_answer_and_no_other():
    ring = FakeRing(*SMALL)
    strange = msgspec.structs.replace(SAMPLED, grammar="strange")
    tokens, finished = ring.ask(generate(1, [1, 2], sampling=strange))
    assert (tokens, finished.reason, finished.completion_tokens) == ([], "refused", 0)
    assert "grammar" in finished.error
    assert ring.ask(generate(2, [1, 2]))[0] == ring.model.answer([1, 2], 8, GREEDY)


def test_at_most_one_sampler_is_open():
    ring = FakeRing(*SMALL)
    ring.head.warm_up()
    for request in range(3):
        ring.ask(generate(request, [1, 2], sampling=SAMPLED))
        assert ring.model.open_samplers == 1


@rings
@given(shapes(), st.integers(0, 40))
def test_no_more_steps_are_in_flight_than_the_depth_allows(shape, moves):
    ring = shape.ring()
    ring.head.submit(generate(1, prompt(600 if shape.rows > 1 else 50)))
    for _ in range(moves):
        ring.move()
        assert ring.scheduler.in_flight <= shape.depth + (shape.depth > 1)  # a waiting chunk
    ring.run()


# ---- time -----------------------------------------------------------------------------------------------------------


def quiet_until_the_workers_answer() -> FakeRing:
    """A ring in which the head has sent one step."""
    ring = FakeRing(*SMALL)
    ring.head.submit(generate(1, [1, 2]))
    assert ring.head.turn() is not None
    assert ring.head.turn() is None
    return ring


def test_a_quiet_head_waits_for_nothing():
    assert FakeRing(*SMALL).head.wait_s() == math.inf


def test_the_start_of_a_generation_is_reported_while_its_first_step_is_in_flight():
    ring = FakeRing(*SMALL)
    ring.head.submit(msgspec.structs.replace(generate(1, [1, 2]), reports_begin=True))
    assert isinstance(ring.head.turn(), Send)
    assert ring.head.turn() == Notify([PromptProgress(request=1, tokens=0)])
    assert ring.head.turn() is None


def test_a_step_in_flight_is_waited_for_until_its_deadline():
    ring = quiet_until_the_workers_answer()
    looks = []
    while (wait_s := ring.head.wait_s()) + ring.now_s < 100.0 + STEP_TIMEOUT_S:
        ring.now_s += wait_s
        looks += ring.head.news()
    assert [look.waited_s for look in looks] == [5, 10, 20, 40, 80, 160]
    assert all(look.is_first for look in looks)
    assert ring.head.wait_s() == STEP_TIMEOUT_S - 160


def test_an_overdue_step_breaks_the_ring_by_its_number():
    ring = quiet_until_the_workers_answer()
    ring.now_s += STEP_TIMEOUT_S
    with pytest.raises(RingError, match=f"step 0 did not come back within {STEP_TIMEOUT_S:g} s"):
        ring.head.wait_s()


def test_the_oldest_of_several_overdue_steps_is_named():
    ring = FakeRing(*SMALL, rows=4, depth=3)
    ring.head.submit(generate(1, prompt(12)))
    for _ in range(3):
        ring.head.turn()
        ring.now_s += 1
    assert [ring.now_s, ring.head.wait_s()] == [103.0, 2.0]
    ring.now_s += STEP_TIMEOUT_S
    with pytest.raises(RingError, match=r"step 0 "):
        ring.head.wait_s()


def test_a_sign_of_life_moves_the_deadline():
    ring = FakeRing([[1, 1], [1, 1]], 1)
    ring.head.submit(generate(1, [1, 2], tokens=1))
    ring._turn()
    ring.now_s += STEP_TIMEOUT_S - 1
    ring._deliver(1)
    ring._deliver(0)
    assert ring.head.wait_s() == 0, "there is work"
    ring._turn()
    assert ring.head._deadlines[0] == ring.now_s + STEP_TIMEOUT_S
    ring.run()
    assert ring.answer(1)[1].reason == "length"


def test_times_are_those_of_the_clock():
    ring = FakeRing([], 3)
    ring.head.submit(generate(1, [1, 2], tokens=3))
    while ring.move():
        ring.now_s += 2
    finished = ring.answer(1)[1]
    assert (finished.prompt_s, finished.decode_s) == (0, 4)


# ---- misplaced messages ---------------------------------------------------------------------------------------------


def a_step(number: int, window: int, rows: int = 1) -> Step:
    return Step(
        protocol=PROTOCOL,
        ring=7,
        epoch=3,
        step=number,
        window=window,
        dtype="f32",
        shape=(rows, WIDTH),
        positions=list(range(rows)),
        sequences=[[0]] * rows,
        outputs=[True] * rows,
        ops=[],
    )


def test_a_step_that_is_not_in_flight_is_refused():
    ring = quiet_until_the_workers_answer()
    with pytest.raises(SenderError, match=r"sent step 99, which is not in flight"):
        ring.head.receive(a_step(99, 3), np.zeros((1, WIDTH), np.float32))


def test_a_step_that_came_back_with_other_rows_is_refused():
    ring = quiet_until_the_workers_answer()
    with pytest.raises(AlteredStepError, match=r"step 0 came back with other rows"):
        ring.head.receive(a_step(0, 3), np.zeros((1, WIDTH), np.float32))


def test_a_step_is_taken_once_for_each_window():
    """Only the sender can have duplicated it: no other device gets the step before the head does."""
    ring = quiet_until_the_workers_answer()
    step = msgspec.structs.replace(a_step(0, 3, rows=2), outputs=[False, True])
    ring.head.receive(step, np.zeros((2, WIDTH), np.float32))
    with pytest.raises(SenderError, match=r"sent step 0 for window 3, where it has been already"):
        ring.head.receive(step, np.zeros((2, WIDTH), np.float32))


def test_a_step_comes_back_for_no_window_before_it_was_in_all_others():
    """In two rounds of three devices the head has windows 0, 3 and 6."""
    nothing = np.zeros((2, WIDTH), np.float32)
    for windows in [(6,), (3, 6)]:  # also before it is sent into the second round
        ring = FakeRing([[1, 1, 1], [1, 1, 1]], 2)
        ring.head.submit(generate(1, [1, 2]))
        ring.head.turn()
        *before, last = [msgspec.structs.replace(a_step(0, each, rows=2), outputs=[False, True]) for each in windows]
        for step in before:
            ring.head.receive(step, nothing)
        with pytest.raises(AlteredStepError, match=r"step 0 came back for window 6 before it was in all others"):
            ring.head.receive(last, nothing)


def test_a_step_that_is_over_is_refused():
    ring = FakeRing(*SMALL)
    ring.ask(generate(1, [1]))
    with pytest.raises(SenderError, match=r"sent step 0, which is not in flight"):
        ring.head.receive(a_step(0, 3), np.zeros((1, WIDTH), np.float32))


@rings
@given(st.data(), shapes(min_devices=2))
def test_a_step_that_is_lost_in_flight_never_leads_to_another_text(data, shape):
    """A broken connection loses it: a device notices the gap, or nothing more arrives and the request stays open."""
    asked = data.draw(prompts(shape))
    expected, _ = shape.ring().ask(generate(1, asked, tokens=4))
    ring = shape.ring()
    ring.head.submit(generate(1, asked, tokens=4))
    moves, lost, seen = data.draw(st.integers(0, 200)), False, ""
    try:
        while ring.move():
            moves -= 1
            if moves < 0 and not lost and (queue := next((link for link in ring.links if link), None)) is not None:
                queue.popleft()
                lost = True
    except RingError as exc:
        seen = str(exc)
    assert not seen or (lost and "or a connection was interrupted" in seen)
    reported = [event for event in ring.events if isinstance(event, Sampled | Finished)]
    sampled = [event.token for event in reported if isinstance(event, Sampled)]
    assert sampled == expected[: len(sampled)]
    assert lost != any(isinstance(event, Finished) for event in reported)


@pytest.mark.parametrize("window", range(4))
def test_a_failing_window_is_heard_of(window):
    ring = FakeRing(*SMALL)
    ring.windows[window].failure = EngineError("out of memory")
    ring.head.submit(generate(1, [1, 2, 3]))
    with pytest.raises(EngineError, match="out of memory"):
        ring.run()


def test_a_failing_whole_model_is_heard_of():
    ring = FakeRing([], 4)
    ring.windows[0].failure = EngineError("out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        ring.ask(generate(1, [1]))


# ---- values that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 6), (3, 6), (3, FEW_NUMBERS)])
def test_whether_all_are_numbers_is_known_of_few_and_of_many(shape):
    hidden = np.full(shape, np.finfo(np.float32).max, np.float32)
    assert is_finite(hidden), "though their squares are not"
    for value in (math.nan, math.inf, -math.inf):
        spoilt = hidden.copy()
        spoilt[-1, 2] = value
        assert not is_finite(spoilt)
        spoilt[0, 1] = -value
        assert not is_finite(spoilt)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", range(4))
def test_a_window_that_gives_no_numbers_ends_the_ring_before_anything_is_computed_with_them(window, value):
    """A worker is blamed for its own values; if the head computed them, the request fails, and then the ring.

    Values that fail in the head's tail may come from any worker.
    """
    ring = FakeRing(*SMALL)
    ring.ask(generate(0, [1], tokens=1))
    ring.windows[window].spoils = value
    ring.head.submit(generate(1, [1, 2, 3]))
    fault = AlteredStepError if window == 3 else NotFiniteError
    with pytest.raises(fault, match=r"layers \d to \d gave values that are not numbers .*'--gpu off'"):
        ring.run()
    by_head = window in (0, 3)
    ends = [event for event in ring.events if isinstance(event, Finished) and event.request == 1]
    assert [end.reason for end in ends] == ["error"] * by_head
    assert all("values that are not numbers" in end.error for end in ends)


def test_a_warm_up_pass_that_gives_no_numbers_proves_nothing():
    ring = FakeRing([], 3)
    ring.windows[0].spoils = math.nan
    ring.head.warm_up()
    with pytest.raises(NotFiniteError):
        ring.run()
    assert not any(isinstance(event, Serving) for event in ring.events)


def test_finite_numbers_of_a_worker_that_spoil_what_the_head_computes_are_not_the_heads_fault():
    """1e38 overflows in a sum or a square, as in a norm. Without a culprit the first ring, and the head, would end."""
    ring = FakeRing(*SMALL)
    ring.model.scores = lambda history: np.full(VOCABULARY, np.inf, np.float32)
    ring.head.submit(generate(1, [1, 2, 3]))
    with pytest.raises(AlteredStepError, match="or another device sent what it did not compute"):
        ring.run()
    assert [event.reason for event in ring.events if isinstance(event, Finished)] == ["error"]


def test_logits_of_minus_infinity_rule_tokens_out_and_nothing_else():
    ring = FakeRing([], 3)
    scores = ring.model.scores
    ring.model.scores = lambda history: np.where(np.arange(VOCABULARY) % 2, -np.inf, scores(history)).astype(np.float32)
    tokens, finished = ring.ask(generate(1, [1, 2, 3]))
    assert finished.reason == "length"
    assert not any(token % 2 for token in tokens)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_arrive_as_no_numbers_are_the_senders_fault(value):
    hidden = np.zeros((2, WIDTH), np.float32)
    hidden[1, WIDTH - 1] = value
    model = FakeModel(4)
    window = model.middle(1, 3)
    with pytest.raises(SenderError, match=r"the device before this one sent values that are not numbers .* in step 0"):
        Worker({1: window}).receive(a_step(0, 1, 2), hidden)
    assert window.held(0) == 0
    ring = quiet_until_the_workers_answer()
    with pytest.raises(SenderError, match="the device before this one sent values that are not numbers"):
        ring.head.receive(msgspec.structs.replace(a_step(0, 3, rows=2), outputs=[False, True]), hidden)


# ---- a single worker ------------------------------------------------------------------------------------------------


def hidden_of(model: FakeModel, tokens: list[int]) -> np.ndarray:
    """The hidden states of ``tokens`` after layer 0."""
    rows = a_step(0, 0, len(tokens))
    first = Worker({0: model.first(1)})
    return first.receive(rows, np.array(tokens, np.int32))[1]


def test_a_worker_sends_the_step_on_to_the_next_window():
    model = FakeModel(4)
    following, hidden = Worker({1: model.middle(1, 3)}).receive(a_step(0, 1, 3), hidden_of(model, [1, 2, 3]))
    assert following == msgspec.structs.replace(a_step(0, 1, 3), window=2)
    assert hidden.shape == (3, WIDTH)


def test_neighbouring_windows_of_a_worker_are_visited_at_once():
    model = FakeModel(4)
    worker = Worker({1: model.middle(1, 2), 2: model.middle(2, 3), 5: model.middle(3, 4)})
    following, hidden = worker.receive(a_step(0, 1, 2), hidden_of(model, [1, 2]))
    assert (following.window, hidden[0, 0]) == (3, 3)


def test_a_step_without_rows_applies_its_operations():
    model = FakeModel(2)
    window = model.middle(1, 2)
    worker = Worker({1: window})
    worker.receive(a_step(0, 1, 3), hidden_of(model, [1, 2, 3]))
    removal = msgspec.structs.replace(a_step(1, 1, 0), ops=[KvRemove(0, 2, -1), KvRemove(0, 1, -1)])
    following, hidden = worker.receive(removal, np.empty((0, WIDTH), np.float32))
    assert (following.ops, following.window, hidden.shape) == (removal.ops, 2, (0, WIDTH))
    assert window.held(0) == 1


def test_operations_are_applied_before_the_rows():
    model = FakeModel(2)
    worker = Worker({1: model.middle(1, 2)})
    hidden = hidden_of(model, [1, 2, 3])
    worker.receive(a_step(0, 1, 3), hidden)
    again = msgspec.structs.replace(a_step(1, 1, 3), ops=[KvRemove(0, 0, -1)])
    once_more = msgspec.structs.replace(again, step=2)
    assert np.array_equal(worker.receive(again, hidden)[1], worker.receive(once_more, hidden)[1])


def test_a_worker_computes_nothing_after_a_lost_step():
    """The KV entries of the lost step would be missing. Each window counts its own steps."""
    model = FakeModel(6)
    worker = Worker({1: model.middle(1, 2), 3: model.middle(3, 4)})
    nothing = np.empty((0, WIDTH), np.float32)
    for step in (0, 1):
        worker.receive(a_step(step, 1, 0), nothing)
    worker.receive(a_step(0, 3, 0), nothing)
    with pytest.raises(SenderError, match="sent step 3 but not step 2"):
        worker.receive(a_step(3, 1, 0), nothing)
    with pytest.raises(SenderError, match="sent step 3 but not step 1"):
        worker.receive(a_step(3, 3, 0), nothing)
    with pytest.raises(SenderError, match="sent step 1 but not step 0"):
        Worker({1: model.middle(1, 2)}).receive(a_step(1, 1, 0), nothing)


def test_a_step_comes_to_no_window_of_a_worker_before_it_was_in_all_others():
    """Otherwise that window would lack KV entries, and fail at a later step through no fault of its own."""
    model = FakeModel(6)
    windows = {1: model.middle(1, 2), 2: model.middle(2, 3), 4: model.middle(4, 5)}
    nothing = np.empty((0, WIDTH), np.float32)
    for window in (2, 4):
        with pytest.raises(SenderError, match=f"sent step 0 for window {window} before it was in all others"):
            Worker(windows).receive(a_step(0, window, 0), nothing)
    worker = Worker(windows)
    assert [worker.receive(a_step(0, window, 0), nothing)[0].window for window in (1, 4)] == [3, 5]


@st.composite
def options(draw):
    """Options of a ring that caches prompts, with few rows so that prompts have several chunks."""
    rows = draw(st.sampled_from([1, 7, 64]))
    return {
        "rows": rows,
        "minimum": draw(st.integers(1, min(6, rows))),
        "depth": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 2**32)),
        "context": CONTEXT,
        "states": draw(st.sampled_from([0, 0, 1, 2, 5])),
    }


def reused(ring: FakeRing, request: int) -> int:
    """The number of prompt tokens of ``request`` that were not recomputed."""
    return max(
        (event.reused for event in ring.events if isinstance(event, PromptProgress) and event.request == request),
        default=0,
    )


@rings
@given(st.data(), options())
def test_a_common_prefix_is_computed_once_and_completions_are_unchanged(data, options):
    """Generations follow each other, and some are cancelled midway; each window ends up as without sharing."""
    ring, texts = FakeRing(*SMALL, **options), [[]]
    for request in range(1, data.draw(st.integers(2, 5))):
        begin = data.draw(st.sampled_from(texts))
        text = begin[: data.draw(st.integers(0, len(begin)))] + prompt(data.draw(st.integers(1, 60)), request)
        texts.append(text)
        ring.head.submit(generate(request, text))
        if data.draw(st.booleans()):
            for _ in range(data.draw(st.integers(0, 60))):
                ring.move()
            ring.cancel(request)
            ring.run()
            continue
        first = [len(window.steps) for window in ring.windows]
        ring.run()
        tokens, _ = ring.answer(request)
        assert tokens == ring.model.answer(text, 8, GREEDY)
        alone = FakeRing(*SMALL, **options)
        alone.ask(generate(request, text))
        for window, own, before in zip(ring.windows, alone.windows, first, strict=True):
            assert window.steps[before:] == [step for step in own.steps if step[0] >= reused(ring, request)]


cuts_of_chunks = st.none() | st.builds(
    lambda multiple, times, twice, short: Pieces(
        multiple=multiple, rows=tuple(multiple * each for each in times), twice=twice, short=short
    ),
    st.integers(1, 4),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.none() | st.integers(1, 40),
    st.integers(0, 12),
)
replays = st.sampled_from([1, 1, 3, 7])
batchings = st.builds(
    Batching, rows=st.integers(1, 5), steps=st.integers(1, 3), pads=st.booleans(), replays=replays
) | st.builds(
    Batching, rows=st.integers(1, 5), steps=st.integers(1, 3), cells=st.sampled_from([1, 20, 50]), replays=replays
)


@st.composite
def rings_for_several(draw, shape: Shape, sampling: Sampling, kv_writers: Sequence[FakeKvWriter] = ()):
    """Any ring of the layers of ``shape``, on devices with ``kv_writers`` or without.

    It may differ in concurrency, batches, chunks, pieces and block size. Models with states may have drafts.
    """
    rows = draw(st.sampled_from([shape.rows, shape.rows, 3, 16]))
    batching = draw(batchings)
    layers = sum(map(sum, shape.rounds)) + shape.tail
    state_rows = draw(st.sampled_from([1, 4, 40])) if shape.needs_state else None
    batching = replace(batching, pads=False) if shape.needs_state else batching
    states = 0 if batching.pads else draw(st.sampled_from([1, 2, 5] if shape.needs_state else [0, 0, 2, 5]))
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=4))) if layers > 1 else []
    sizes = [last - first for first, last in pairwise([0, *cuts, layers])]
    room, block = draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 3)]))
    is_cut_again, keep_rows = draw(st.booleans()), draw(st.sampled_from([None, 1, 3, 16]))
    return FakeRing(
        shape.rounds if not is_cut_again else [sizes[:-1]] if cuts else [],
        shape.tail if not is_cut_again else sizes[-1],
        rows=rows,
        minimum=min(3, rows),
        depth=draw(st.integers(1, 4)),
        context=CONTEXT,
        sequences=draw(st.integers(1, 5)),
        batching=replace(batching, replays=min(batching.replays, rows)),
        pieces=draw(cuts_of_chunks),
        keep_rows=keep_rows,
        states=states,
        state_rows=state_rows,
        drafting=Drafting(room=room, block=block, rows=3, costs=(1.0, 1.1, 1.2))
        if states and keep_rows is None and rows >= 3
        else None,
        drafter=knowing(sampling, 0.7),
        kv_writers=kv_writers,
        seed=draw(st.integers(0, 2**32)),
    )


class Service:
    """Successive rings, and a head's daemon: open generations, their events and the places of their KV blocks."""

    def __init__(self, data, shape: Shape, sampling: Sampling) -> None:
        self.data, self.shape, self.sampling = data, shape, sampling
        self.ring = data.draw(rings_for_several(shape, sampling))
        self.replica = FakeReplica()
        self.texts: dict[int, list[int]] = {}
        self.roots: dict[int, str] = {}
        self.owners: dict[int, str] = {}
        self.reported: dict[int, list[int]] = {}
        self.ends: dict[int, Finished] = {}

    def submit(self, request: int, blocks: Sequence[KvBlock]) -> None:
        keeps = bool(self.roots[request]) and self.ring.keep_rows is not None
        asked = generate(
            request,
            self.texts[request],
            sampled=self.reported[request],
            sampling=self.sampling,
            root=self.roots[request] if keeps else "",
            blocks=blocks if keeps else [],
            replays_rows=self.data.draw(st.booleans()),
        )
        asked = msgspec.structs.replace(asked, owner=self.owners[request])
        self.replica.give(asked)
        self.ring.head.submit(asked)

    def ask(self, request: int, text: list[int]) -> None:
        """Submit another request, with the blocks that the devices have of its prompt."""
        self.texts[request], self.reported[request] = text, []
        self.roots[request] = root = self.data.draw(st.sampled_from(["", "ann", "ann", "ben"]))
        self.owners[request] = self.data.draw(st.sampled_from(["ann", "ben", "cleo"]))
        devices = list(zip(self.ring.kv_writers, self.ring.layers, strict=True))
        blocks = prompt_blocks(self.ring.chunking, text, root)
        if self.shape.needs_state:
            blocks = [each for cells in blocks for each in (cells, keys.state_behind(cells))]
        held = keys.up_to_lacking(
            blocks, lambda each: all(kv_writer.holds(each.key, layers) for kv_writer, layers in devices)
        )
        self.submit(request, without_old_states(held))

    def move(self, maximum: int) -> None:
        """Make some moves of the ring."""
        if self.breaks(maximum):
            self.form(self.ring.kv_writers)
        self.note()

    def breaks(self, maximum: int) -> bool:
        """Whether the ring breaks within ``maximum`` moves, because KV blocks that it must load are missing."""
        try:
            moves = (self.ring.move() for _ in range(maximum))
            while next(moves, False):
                pass
        except RingError as exc:
            if not re.fullmatch(r"KV block [0-9a-f]{32}, with layers .* is not here", str(exc)):
                raise
            return True
        return False

    def note(self) -> None:
        for event in self.ring.events:
            if isinstance(event, Sampled):
                self.reported[event.request].append(event.token)
            elif isinstance(event, KvKept | KvForgotten):
                self.replica.note(event, self.ring.kv_writers)
            elif isinstance(event, Finished):
                self.ends[event.request] = event
                self.replica.chains.pop(event.request, None)
        self.ring.events.clear()

    def cancel(self, request: int) -> None:
        self.ring.cancel(request)
        self.replica.chains.pop(request, None)
        del self.texts[request]

    def drain(self) -> None:
        """A planned change: ``Drained`` is the last event, and computed blocks are kept."""
        self.ring.head.drain()
        assert self.breaks(100_000) or self.ring.events[-1] == Drained()
        self.note()
        self.form(self.ring.kv_writers)

    def form(self, left: Sequence[FakeKvWriter]) -> None:
        """Form the next ring, on the devices ``left`` of the last one, in any order, and on others."""
        left = self.data.draw(st.permutations(left))
        self.note()
        self.ring = self.data.draw(rings_for_several(self.shape, self.sampling, left))
        if self.ring.keep_rows is None:
            self.replica.chains.clear()
        self.replica.move(self.ring, left)
        for request in sorted(self.texts.keys() - self.ends.keys()):
            self.submit(request, self.replica.chains.get(request, []))

    def lose(self) -> None:
        """One device loses its part of a block."""
        kv_writer = self.data.draw(st.sampled_from(self.ring.kv_writers))
        if kv_writer.cells:
            kv_writer.forget([self.data.draw(st.sampled_from(sorted(kv_writer.cells)))])

    def finish(self) -> None:
        """Finish all requests; then new ones take all sequences, and nothing is left of the earlier ones."""
        while self.texts.keys() - self.ends.keys():
            self.move(1000)
        self.ring.run()
        for request in range(100, 100 + self.ring.model.options.sequences):
            asked = generate(request, [1], tokens=1, sampling=self.sampling)
            self.ring.head.submit(msgspec.structs.replace(asked, reuses=False))
            self.reported[request] = []
        self.ring.run()
        self.note()
        assert not any(kv_writer.cells for kv_writer in self.ring.kv_writers), "something is kept that nobody needs"


@rings
@given(st.data(), shapes(), st.sampled_from([GREEDY, SAMPLED]))
def test_concurrent_generations_equal_single_ones_whatever_arrives_leaves_or_breaks(data, shape, sampling):
    """Requests arrive and are cancelled at any time, share prefixes or are identical, and rings break under them.

    Owners preempt each other. Kept KV blocks move along while devices that have them exist; none belongs to another
    text or appears twice.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "MIN_TURN", data.draw(st.sampled_from([1, 3])))
        check_equal_to_single(data, shape, sampling)


def check_equal_to_single(data, shape: Shape, sampling: Sampling) -> None:
    service = Service(data, shape, sampling)
    for request in range(1, data.draw(st.integers(1, 7)) + 1):
        begin = data.draw(st.sampled_from([[], *service.texts.values()]))
        is_same = bool(begin) and data.draw(st.booleans())
        new = prompt(data.draw(st.integers(1, 40)), request)
        service.ask(request, begin if is_same else begin[: data.draw(st.integers(0, len(begin)))] + new)
        service.move(data.draw(st.integers(0, 40)))
        match data.draw(st.sampled_from(["nothing", "nothing", "cancel", "death", "drain", "loss"])):
            case "cancel":
                service.cancel(data.draw(st.sampled_from(sorted(service.texts))))
            case "death":
                service.form([kv_writer for kv_writer in service.ring.kv_writers if data.draw(st.booleans())])
            case "drain":
                service.drain()
            case "loss":
                service.lose()
    service.finish()
    for request, text in service.texts.items():
        assert service.reported[request] == service.ring.model.answer(text, 8, sampling)
        finished = service.ends[request]
        assert (finished.reason, finished.prompt_tokens, finished.completion_tokens) == ("length", len(text), 8)


def test_choices_of_one_prompt_compute_it_once():
    ring, text = FakeRing(*SMALL, rows=16, sequences=4), prompt(40)
    for request in range(1, 5):
        sampling = msgspec.structs.replace(SAMPLED, seed=request)
        ring.head.submit(generate(request, text, sampling=sampling))
    ring.run()
    for request in range(1, 5):
        assert ring.answer(request)[0] == ring.model.answer(text, 8, msgspec.structs.replace(SAMPLED, seed=request))
    assert [positions for positions in ring.windows[0].steps if len(positions) > 1] == [
        tuple(range(16)),
        tuple(range(16, 32)),
        tuple(range(32, 40)),
    ]


def test_a_generation_that_reuses_nothing_computes_its_whole_prompt():
    ring, text = FakeRing(*SMALL, rows=4), prompt(20)
    ring.ask(generate(1, text))
    before = len(ring.windows[0].steps)
    ring.ask(msgspec.structs.replace(generate(2, text), reuses=False))
    assert ring.windows[0].steps[before] == (0, 1, 2, 3)
    assert not any(isinstance(event, PromptProgress) and event.reused for event in ring.events)
    ring.ask(generate(3, text))
    assert [event.tokens for event in ring.events if isinstance(event, PromptProgress) and event.reused] == [19]


@rings
@given(st.data(), st.integers(1, 4), st.integers(0, 2**32))
def test_the_beginning_of_a_chunk_is_found_again_in_pieces(data, multiple, seed):
    cut = Pieces(multiple=multiple, rows=(multiple,))
    ring, texts = FakeRing(*SMALL, rows=16, pieces=cut, seed=seed, sequences=data.draw(st.integers(1, 2))), [prompt(30)]
    for request in range(1, data.draw(st.integers(2, 6))):
        begin = data.draw(st.sampled_from(texts))
        text = begin[: data.draw(st.integers(0, len(begin)))] + prompt(data.draw(st.integers(1, 30)), request)
        texts.append(text)
        before = len(ring.windows[0].steps)
        tokens, _ = ring.ask(generate(request, text))
        assert tokens == ring.model.answer(text, 8, GREEDY)
        rows = [step for step in ring.windows[0].steps[before:] if step and step[0] < len(text)]
        assert [row for step in rows for row in step] == list(range(reused(ring, request), len(text)))
        assert all(step[-1] + 1 in (len(text), (step[0] // 16 + 1) * 16) for step in rows)


def test_a_request_begun_in_other_chunks_keeps_them_and_new_prompts_have_those_of_the_ring():
    ring, text = FakeRing(*SMALL, rows=4, step_rows=16, sequences=2), prompt(30)
    before = ring.model.answer(text, 8, GREEDY)
    tokens, _ = ring.ask(generate(1, text, sampled=before[:3], chunks=ChunkSize(rows=16, minimum=16)))
    assert tokens == before[3:]
    assert [len(step) for step in ring.windows[0].steps if step and step[0] < len(text)] == [16, 14]
    done = len(ring.windows[0].steps)
    ring.ask(generate(2, text[:16] + prompt(8, 1)))
    assert reused(ring, 2) == 0, "its chunks are others"
    assert [len(step) for step in ring.windows[0].steps[done:] if step and step[0] < 24] == [4] * 6


@rings
@given(st.data(), st.integers(1, 3), st.integers(0, 2**32))
def test_a_prompt_that_comes_again_has_nothing_computed_again_and_the_same_answer(data, sequences, seed):
    ring = FakeRing(*SMALL, rows=8, sequences=sequences, seed=seed)
    texts = [prompt(count, 1) for count in (1, 3, 8, 12)]
    for request in range(1, data.draw(st.integers(2, 6))):
        text, sampling = data.draw(st.sampled_from(texts)), data.draw(st.sampled_from([GREEDY, SAMPLED]))
        ring.head.submit(generate(request, text, sampling=sampling, logprobs=2))
        is_cut = data.draw(st.booleans())
        if is_cut:
            for _ in range(data.draw(st.integers(0, 40))):
                ring.move()
            ring.cancel(request)
        ring.run()
        before = [len(window.steps) for window in ring.windows]
        ring.head.submit(generate(100 + request, text, sampling=sampling, logprobs=2))
        ring.run()
        alone = FakeRing(*SMALL, rows=8)
        alone.ask(generate(100 + request, text, sampling=sampling, logprobs=2))
        reported = [event for event in ring.events if isinstance(event, Sampled) and event.request == 100 + request]
        assert reported == [event for event in alone.events if isinstance(event, Sampled)]
        if not is_cut:
            assert reused(ring, 100 + request) == len(text) - 1
            for window, count in zip(ring.windows, before, strict=True):
                assert all(step[0] >= len(text) for step in window.steps[count:])
