"""The scheduler's rules, one per test: which step comes next, and what its token means."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import groupby

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.errors import RingError
from primad.ring.chunks import Chunking, Pieces
from primad.ring.grouping import Batching
from primad.ring.messages import Cancel, Finished, KvCopy, KvRemove, PromptProgress, Sampled
from primad.ring.scheduler import state
from primad.ring.scheduler.admission import MIN_TURN
from primad.ring.scheduler.scheduler import Scheduler
from primad.ring.scheduler.state import PlannedStep, SampledToken, SchedulerState
from primad.ring.slots import COPIED_CELLS
from tests.fakes.ring import chunks_of, generate, never

FORGET = [KvRemove(0, 0, -1)]


def scheduler(*, context: int = 100, rows: int = 4, depth: int = 3, **options) -> Scheduler:
    return Scheduler(SchedulerState(**{"context": context, "chunking": chunks_of(rows), "depth": depth} | options))


def with_prompt(prompt, *, tokens: int = 8, **options) -> Scheduler:
    made = scheduler(**options)
    made.submit(generate(1, prompt, tokens=tokens))
    return made


def sampled_of(token: int) -> SampledToken:
    return SampledToken(token=token, ends=False)


def commit(of: Scheduler, step: int, draw: SampledToken | None, now: float):
    """Return step ``step``, with ``draw`` for its only row that needs a sample."""
    return of.commit(step, {each.request: draw for _, each in of.wants_samples(step) if draw is not None}, now)


def next_step(of: Scheduler, now: float = 0.0) -> PlannedStep:
    planned = of.next_step(now)
    assert planned is not None
    return planned


def test_nothing_to_do_is_no_step():
    made = scheduler()
    assert made.next_step(0) is None
    assert made.is_idle


def test_a_short_prompt_is_one_step_that_wants_an_output():
    assert next_step(with_prompt([7, 8, 9])) == PlannedStep(
        step=0,
        requests=[1],
        tokens=[7, 8, 9],
        positions=[0, 1, 2],
        sequences=[0, 0, 0],
        samples={2: [generate(1, [7, 8, 9])]},
        ops=[],
    )


def test_while_a_step_is_out_another_is_given_only_if_may_have_step_is_true():
    made = with_prompt(range(10), tokens=4, sequences=2)
    out, found = [], []
    for turn in range(20):
        if turn == 3:
            made.submit(generate(2, range(5), tokens=2))
        may, is_out = made.may_have_step, bool(out)
        planned = made.next_step(0)
        assert may or not is_out or planned is None
        found.append(may)
        out += [] if planned is None else [planned.step]
        if planned is None and out:
            commit(made, out.pop(0), sampled_of(5), 0)
    assert made.is_idle
    assert True in found
    assert False in found


def test_a_long_prompt_goes_in_chunks_and_only_the_last_wants_an_output():
    made = with_prompt(range(10))
    chunks = [next_step(made) for _ in range(3)]
    assert [(chunk.step, chunk.tokens, chunk.positions) for chunk in chunks] == [
        (0, [0, 1, 2, 3], [0, 1, 2, 3]),
        (1, [4, 5, 6, 7], [4, 5, 6, 7]),
        (2, [8, 9], [8, 9]),
    ]
    assert [list(chunk.samples) for chunk in chunks] == [[], [], [1]]


def test_a_prompt_of_whole_chunks_has_no_empty_chunk():
    made = with_prompt(range(8))
    assert [list(next_step(made).samples) for _ in range(2)] == [[], [3]]
    assert made.next_step(0) is None


@pytest.mark.parametrize(("depth", "in_flight"), [(1, 1), (2, 3), (3, 4)])
def test_one_chunk_waits_before_the_devices_of_a_ring_while_nobody_writes(depth, in_flight):
    made = with_prompt(range(40), depth=depth)
    for _ in range(in_flight):
        next_step(made)
    assert made.next_step(0) is None
    assert commit(made, 0, None, 0) == [PromptProgress(request=1, tokens=4)]
    assert next_step(made).step == in_flight
    assert made.in_flight == in_flight


def test_where_devices_share_cores_one_chunk_is_in_flight_and_decoding_continues():
    made = scheduler(depth=3, chunks=1, sequences=2)
    made.submit(generate(1, [1]))
    assert next_step(made).requests == [1]
    made.submit(generate(2, range(40)))
    assert made.next_step(0) is None, "its chunk would take from the other one's time"
    commit(made, 0, sampled_of(7), 0)
    assert [next_step(made).requests for _ in range(2)] == [[2], [1]]
    commit(made, 2, sampled_of(8), 0)
    assert next_step(made).requests == [1], "the next chunk waits, tokens do not"
    commit(made, 1, None, 0)
    assert next_step(made).requests == [2]


def test_while_others_decode_no_more_chunks_are_in_flight_than_devices():
    made = scheduler(depth=2, sequences=2)
    made.submit(generate(1, [1]))
    next_step(made)
    made.submit(generate(2, range(40)))
    assert next_step(made).requests == [2]
    assert made.next_step(0) is None


def test_a_decode_step_waits_for_the_token_before_it():
    made = with_prompt([1, 2])
    next_step(made)
    assert made.next_step(0) is None
    assert commit(made, 0, sampled_of(33), 0) == [Sampled(request=1, token=33, logprob=None, top=())]
    step = next_step(made)
    assert (step.step, step.requests, step.tokens, step.positions, list(step.samples)) == (1, [1], [33], [2], [0])
    commit(made, 1, sampled_of(34), 0)
    assert next_step(made).positions == [3]


def test_a_sampled_token_is_reported_unchanged():
    made = with_prompt([1])
    next_step(made)
    draw = SampledToken(token=5, ends=False, logprob=-0.5, top=((5, -0.5), (6, -1.5)))
    assert commit(made, 0, draw, 0) == [Sampled(request=1, token=5, logprob=-0.5, top=((5, -0.5), (6, -1.5)))]


def test_the_last_of_max_tokens_ends_the_answer():
    made = with_prompt([1, 2], tokens=2)
    next_step(made)
    commit(made, 0, sampled_of(3), 0)
    next_step(made)
    sampled, finished = commit(made, 1, sampled_of(4), 0)
    assert isinstance(sampled, Sampled)
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.prompt_tokens, finished.completion_tokens) == ("length", 2, 2)
    assert made.is_idle


def test_a_full_context_ends_the_answer():
    made = with_prompt([1, 2], context=4, tokens=50)
    next_step(made)
    assert len(commit(made, 0, sampled_of(3), 0)) == 1
    next_step(made)
    _, finished = commit(made, 1, sampled_of(4), 0)
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.completion_tokens) == ("length", 2)


def test_a_prompt_that_leaves_room_for_one_token_gets_one():
    made = with_prompt(range(3), context=4, tokens=50)
    next_step(made)
    sampled, finished = commit(made, 0, sampled_of(9), 0)
    assert isinstance(sampled, Sampled)
    assert isinstance(finished, Finished)


def test_a_token_that_ends_the_completion_is_not_reported():
    made = with_prompt([1])
    next_step(made)
    (finished,) = commit(made, 0, SampledToken(token=2, ends=True), 0)
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.completion_tokens) == ("stop", 0)


def test_times_count_from_the_first_step_and_from_the_first_token():
    made = with_prompt([1], tokens=2)
    next_step(made, now=10.0)
    commit(made, 0, sampled_of(3), 12.5)
    next_step(made, now=13.0)
    finished = commit(made, 1, sampled_of(4), 20.0)[-1]
    assert isinstance(finished, Finished)
    assert (finished.prompt_s, finished.decode_s) == (2.5, 7.5)


def test_generations_take_turns_in_the_order_they_came():
    made = with_prompt([1], tokens=1)
    made.submit(generate(2, [5, 6], tokens=1))
    next_step(made)
    assert made.next_step(0) is None, "one sequence at a time"
    commit(made, 0, sampled_of(3), 0)
    step = next_step(made)
    assert (step.step, step.requests, step.tokens, step.positions, step.ops) == (1, [2], [5, 6], [0, 1], FORGET)


def test_the_first_step_after_a_generation_forgets_it_once():
    made = with_prompt([1], tokens=1)
    next_step(made)
    commit(made, 0, sampled_of(3), 0)
    made.submit(generate(2, range(8)))
    assert [next_step(made).ops for _ in range(2)] == [FORGET, []]


def test_a_cancel_forgets_the_running_generation_and_drops_its_steps_in_flight():
    made = with_prompt(range(8), depth=4)
    next_step(made)
    next_step(made)
    made.cancel(Cancel(1))
    made.submit(generate(2, [9]))
    assert not made.wants_samples(1)
    following = next_step(made)
    assert (following.step, following.requests, following.ops) == (2, [2], FORGET)
    assert commit(made, 0, None, 0) == []
    assert commit(made, 1, sampled_of(50), 0) == []
    assert made.wants_samples(2) == [(0, generate(2, [9]))]
    assert len(commit(made, 2, sampled_of(51), 0)) == 1


def test_a_cancelled_generation_still_takes_its_place_in_the_depth():
    made = with_prompt(range(12), depth=2)
    for _ in range(3):
        next_step(made)
    made.cancel(Cancel(1))
    made.submit(generate(2, [9]))
    assert made.next_step(0) is None
    assert not made.is_idle
    commit(made, 0, None, 0)
    assert next_step(made).requests == [2]


def test_a_cancel_between_two_tokens_lets_the_next_one_begin():
    made = with_prompt([1])
    next_step(made)
    commit(made, 0, sampled_of(3), 0)
    made.cancel(Cancel(1))
    assert made.is_idle
    made.submit(generate(2, [9]))
    assert next_step(made).ops == FORGET


def test_a_cancelled_generation_that_waits_is_never_begun():
    made = with_prompt([1], tokens=1)
    made.submit(generate(2, [2]))
    made.submit(generate(3, [3]))
    made.cancel(Cancel(2))
    next_step(made)
    commit(made, 0, sampled_of(5), 0)
    assert next_step(made).requests == [3]


def test_a_cancel_of_nothing_changes_nothing():
    made = with_prompt([1])
    made.cancel(Cancel(77))
    assert next_step(made).requests == [1]


def test_a_draw_is_wanted_by_the_generation_of_the_step():
    made = with_prompt([1, 2])
    planned = next_step(made)
    assert made.wants_samples(planned.step) == [(1, generate(1, [1, 2]))]


# ---- what an earlier epoch has sampled ---------------------------------------------------------------------------------


def continued(prompt, sampled, *, tokens: int = 8, **options) -> Scheduler:
    made = scheduler(**options)
    assert made.submit(generate(1, prompt, sampled=sampled, tokens=tokens)) is None
    return made


def test_the_prompt_goes_in_the_same_chunks_and_each_sampled_token_alone():
    made = continued(range(6), [20, 21, 22], depth=9)
    steps = [next_step(made) for _ in range(5)]
    assert [(step.tokens, step.positions) for step in steps] == [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([4, 5], [4, 5]),
        ([20], [6]),
        ([21], [7]),
        ([22], [8]),
    ]
    assert [list(step.samples) for step in steps] == [[], [], [], [], [0]]
    assert made.next_step(0) is None
    (sampled,) = commit(made, 4, sampled_of(23), 0)
    assert isinstance(sampled, Sampled)
    assert next_step(made).tokens == [23]


def test_a_replay_keeps_to_the_depth():
    made = continued([1], range(10), tokens=20, depth=2)
    next_step(made)
    next_step(made)
    assert made.next_step(0) is None
    assert commit(made, 0, None, 0) == []
    assert next_step(made).tokens == [1]


def test_tokens_of_earlier_epochs_count():
    made = continued([1, 2], [5, 6], tokens=3)
    for _ in range(3):
        last = next_step(made)
    _, finished = commit(made, last.step, sampled_of(7), 0)
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.prompt_tokens, finished.completion_tokens) == ("length", 2, 3)


def test_the_context_ends_a_continued_answer_where_it_would_have_ended():
    made = continued([1, 2], [5], tokens=50, context=4)
    last = [next_step(made) for _ in range(2)][-1]
    _, finished = commit(made, last.step, sampled_of(6), 0)
    assert isinstance(finished, Finished)
    assert finished.completion_tokens == 2


@pytest.mark.parametrize(("sampled", "tokens", "context"), [([5, 6], 2, 100), ([5, 6, 7], 2, 100), ([5, 6], 50, 4)])
def test_a_complete_answer_ends_when_it_is_submitted(sampled, tokens, context):
    made = scheduler(context=context)
    finished = made.submit(generate(1, [1, 2], sampled=sampled, tokens=tokens))
    assert finished is not None
    assert (finished.reason, finished.completion_tokens) == ("length", len(sampled))
    assert made.is_idle


def test_the_time_to_the_first_token_is_that_of_the_first_new_one():
    made = continued([1], [5], tokens=3)
    last = [next_step(made, now=10.0) for _ in range(2)][-1]
    commit(made, 0, None, 11.0)
    commit(made, last.step, sampled_of(6), 12.0)
    finished = commit(made, next_step(made).step, sampled_of(7), 20.0)[-1]
    assert isinstance(finished, Finished)
    assert (finished.prompt_s, finished.decode_s) == (2.0, 8.0)


# ---- draining -------------------------------------------------------------------------------------------------------


def test_a_drain_hands_out_nothing_and_takes_everything_back():
    made = with_prompt(range(12), depth=2)
    next_step(made)
    next_step(made)
    made.drain()
    assert not made.is_drained
    assert commit(made, 0, None, 0) == [PromptProgress(request=1, tokens=4)]
    assert made.next_step(0) is None
    assert commit(made, 1, None, 0) == [PromptProgress(request=1, tokens=8)]
    assert made.is_drained
    assert made.next_step(0) is None


def test_a_token_in_flight_at_the_drain_is_reported():
    made = with_prompt([1, 2])
    step = next_step(made).step
    made.drain()
    assert commit(made, step, sampled_of(9), 0) == [Sampled(request=1, token=9, logprob=None, top=())]
    assert made.is_drained


def test_nothing_is_submitted_after_a_drain():
    made = scheduler()
    made.drain()
    with pytest.raises(RingError, match="request 3 was given to a ring that drains"):
        made.submit(generate(3, [1]))


# ---- our mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[], range(100), range(101)])
def test_a_prompt_that_does_not_fit_is_our_mistake(prompt):
    with pytest.raises(AssertionError):
        scheduler().submit(generate(1, prompt))


# ---- several requests -----------------------------------------------------------------------------------------------


def several(*prompts, sequences: int = 2, **options) -> Scheduler:
    made = scheduler(sequences=sequences, **options)
    for request, prompt in enumerate(prompts, 1):
        made.submit(generate(request, list(prompt)))
    return made


def requests(of: Scheduler, count: int) -> list[int]:
    return [request for _ in range(count) for request in next_step(of).requests]


def test_as_many_generations_run_as_there_are_sequences():
    made = several([1], [2], [3], depth=9)
    steps = [next_step(made) for _ in range(2)]
    assert [(step.requests, step.sequences) for step in steps] == [([1], [0]), ([2], [1])]
    assert made.next_step(0) is None
    made.cancel(Cancel(1))
    third = next_step(made)
    assert (third.requests, third.sequences, third.ops) == ([3], [0], FORGET)


def owned(*owners: str, **options) -> Scheduler:
    """A generation for each of ``owners``, with a prompt of 40 tokens."""
    made = scheduler(**options)
    for request, owner in enumerate(owners, 1):
        made.submit(msgspec.structs.replace(generate(request, [request] * 40), owner=owner))
    return made


def test_each_owner_has_the_same_share_of_the_steps():
    made = owned("a", "a", "a", "b", sequences=4, depth=99, rows=1)
    assert requests(made, 9) == [1, 4, 1, 4, 1, 4, 1, 4, 1]


def test_the_owner_with_the_fewest_running_requests_is_next():
    made = owned("a", "a", "a", "b", "b", sequences=2, depth=99, rows=1)
    assert requests(made, 4) == [1, 4, 1, 4]
    made.cancel(Cancel(1))
    assert requests(made, 2) == [2, 4]


@pytest.mark.parametrize("piece", [64, 8])
def test_four_prompts_at_once_have_their_first_tokens_as_soon_as_their_rows_cost_in_pieces_worth_having(piece):
    """A row costs 1, a step at least 32; a decode step costs the same."""
    pieces = Pieces(multiple=8, rows=(piece,))
    made = scheduler(
        context=1000, depth=1, sequences=4, chunking=Chunking(rows=512, minimum=512, begins=never, pieces=pieces)
    )
    for request in range(1, 5):
        made.submit(generate(request, [request] * 128, tokens=99))
    now_s, first_s = 0.0, dict[int, float]()
    while len(first_s) < 4:
        step = next_step(made, now_s)
        now_s += max(32, len(step.tokens))
        for _, each in made.wants_samples(step.step):
            first_s.setdefault(each.request, now_s)
        commit(made, step.step, sampled_of(9), now_s)
    assert list(first_s) == [1, 2, 3, 4]
    assert (statistics.mean(first_s.values()) <= 4 * 128) == (piece == 64)


def finish(made: Scheduler, request: int) -> list[int]:
    """The requests of all steps until ``request`` finished; every step gets a token for each row that needs one."""
    of: list[int] = []
    while True:
        step = next_step(made)
        of += step.requests
        if any(
            isinstance(each, Finished) and each.request == request for each in commit(made, step.step, sampled_of(9), 0)
        ):
            return of


def test_with_one_sequence_owners_take_turns_however_many_requests_one_has():
    made = owned("a", "a", "a", "b", "a", "b", "c", rows=64)
    order = []
    while not made.is_idle:
        request = next_step(made).requests[0]
        order.append(request)
        made.commit(len(order) - 1, {request: SampledToken(token=1, ends=True)}, 0)
    assert order == [1, 4, 7, 2, 6, 3, 5]


def test_a_waiting_owner_gets_a_sequence_of_one_who_has_several_and_the_preempted_request_resumes_later():
    made = owned("a", "a", sequences=2, rows=64, depth=1)
    for _ in range(4):
        commit(made, next_step(made).step, sampled_of(7), 0)
    in_flight = next_step(made)
    made.submit(msgspec.structs.replace(generate(3, [3], tokens=2), owner="b"))
    commit(made, in_flight.step, sampled_of(8), 0)
    assert finish(made, 3) == [3, 1, 3], "the newest of a is set back, at once since nothing was under way for it"
    again = next_step(made)
    assert (again.requests, len(again.tokens)) == ([2], 40), "its prompt is read again"
    commit(made, again.step, None, 0)
    assert set(finish(made, 2)) == {1, 2}
    assert made.is_idle


def test_one_that_is_set_back_waits_for_its_step_and_has_all_tokens_once():
    made = owned("a", "a", sequences=2, rows=64, depth=3)
    steps = [next_step(made), next_step(made)]
    made.submit(msgspec.structs.replace(generate(3, [3], tokens=1), owner="b"))
    assert made.next_step(0) is None
    commit(made, steps[0].step, sampled_of(5), 0)
    assert next_step(made).requests == [1], "what is under way for the other one is not lost"
    assert [each.token for each in commit(made, steps[1].step, sampled_of(6), 0)] == [6]
    begins = next_step(made)
    assert begins.requests == [3]
    assert any(isinstance(each, Finished) for each in commit(made, begins.step, sampled_of(7), 0))
    prompt, last = next_step(made), next_step(made)
    assert (prompt.requests, prompt.samples) == ([2], {})
    assert (last.requests, last.tokens, last.positions) == ([2], [6], [40])


def test_a_preempted_request_may_be_cancelled():
    made = owned("a", "a", sequences=2, rows=64, depth=1)
    made.submit(msgspec.structs.replace(generate(3, [3]), owner="b"))
    for _ in range(2):
        commit(made, next_step(made).step, sampled_of(7), 0)
    for request in (1, 2, 3):
        made.cancel(Cancel(request))
    assert made.next_step(0) is None
    assert made.is_idle


def test_where_each_owner_has_one_sequence_the_longest_running_is_preempted_after_its_turn():
    made = scheduler(context=9999, rows=64, depth=1)
    for request, owner in enumerate("ab", 1):
        made.submit(msgspec.structs.replace(generate(request, [request], tokens=2 * MIN_TURN), owner=owner))
    turns = [(owner, len(list(each))) for owner, each in groupby(finish(made, 1))]
    assert turns[:2] == [(1, MIN_TURN), (2, MIN_TURN)]
    again = 1 + MIN_TURN - 1
    assert turns[2:] == [(1, again + MIN_TURN)], "it comes back with its prompt and what was drawn"


def test_a_resumed_request_samples_as_many_tokens_as_its_return_cost_before_it_is_preempted_again():
    made = scheduler(context=99999, rows=64, depth=1)
    for request, owner in enumerate("ab", 1):
        made.submit(msgspec.structs.replace(generate(request, [request], tokens=9 * MIN_TURN), owner=owner))
    turns = [len(list(each)) for _, each in groupby(finish(made, 1))]
    sampled_tokens = [turns[0], turns[2] - turns[0], turns[4] - turns[0] - (turns[2] - turns[0])]
    assert sampled_tokens == [MIN_TURN, MIN_TURN, 2 * MIN_TURN]


@pytest.mark.parametrize("sequences", [1, 2, 4])
@pytest.mark.parametrize("tokens", [60, 6000])
def test_a_short_request_is_slowed_a_few_times_and_not_forty_times_by_forty_of_another_owner(sequences, tokens):
    made = scheduler(context=9999, rows=64, depth=1, sequences=sequences)
    for request in range(40):
        made.submit(msgspec.structs.replace(generate(request, [request] * 20, tokens=tokens), owner="greedy"))
    for _ in range(MIN_TURN + 1):
        commit(made, next_step(made).step, sampled_of(9), 0)
    made.submit(msgspec.structs.replace(generate(99, [99] * 20, tokens=30), owner="short"))
    alone = 30
    assert len(finish(made, 99)) <= 3 * alone + tokens % 100
    assert len(made._state.running) + sum(map(len, made._state.waiting.values())) > 30


def test_an_owner_alone_is_never_set_back():
    made = scheduler(context=9999, rows=64, depth=1)
    for request in (1, 2):
        made.submit(generate(request, [request], tokens=4 * MIN_TURN))
    assert finish(made, 1) == [1] * 4 * MIN_TURN


def test_a_sequence_that_is_free_is_another_owners_though_few_run_at_once():
    made = owned("a", "a", "b", "c", sequences=2, at_once=1, rows=64, depth=9)
    assert requests(made, 2) == [1, 3]
    made.cancel(Cancel(1))
    assert requests(made, 1) == [4]


def test_the_memory_for_inactive_owners_is_bounded(monkeypatch):
    monkeypatch.setattr(state, "MAX_OWNERS", 5)
    made = scheduler(rows=64)
    for request in range(20):
        made.submit(msgspec.structs.replace(generate(request, [1], tokens=1), owner=f"from {request}"))
        commit(made, next_step(made).step, sampled_of(1), 0)
    assert list(made._state.owners) == [f"from {request}" for request in range(15, 20)]


def begun(made: Scheduler) -> list[int]:
    """The generations of ``made`` in the order in which they begin, at most one at a time."""
    order = []
    while (step := made.next_step(0)) is not None:
        order += step.requests
        made.commit(step.step, {}, 0)
        made.cancel(Cancel(order[-1]))
    return order


def prioritised(*asked: tuple[str, int], earlier: int | None = None) -> Scheduler:
    """A generation for each owner and priority; an earlier epoch sampled tokens for number ``earlier``."""
    made = scheduler(at_once=1)
    for request, (owner, priority) in enumerate(asked, 1):
        sampled = [5] if request == earlier else []
        one = generate(request, [request], sampled=sampled)
        made.submit(msgspec.structs.replace(one, owner=owner, priority=priority))
    return made


def test_the_waiting_request_with_the_lowest_priority_is_next_and_of_equal_ones_the_first():
    assert begun(prioritised(("a", 0), ("a", 1), ("a", -1), ("a", 0), ("a", -1))) == [3, 5, 1, 4, 2]


def test_requests_begun_in_an_earlier_epoch_resume_before_waiting_ones():
    assert begun(prioritised(("a", 0), ("a", -9), ("a", 7), earlier=3)) == [3, 2, 1]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), max_size=12))
def test_no_priority_changes_whose_turn_it_is(asked):
    def owners(*of: tuple[str, int]) -> list[str]:
        return [of[request - 1][0] for request in begun(prioritised(*of))]

    assert owners(*asked) == owners(*((owner, 0) for owner, _ in asked))


def test_the_start_of_a_request_is_reported_if_it_asks_for_that():
    made = scheduler(sequences=2)
    for request in (1, 2, 3):
        made.submit(msgspec.structs.replace(generate(request, [1]), reports_begin=request > 1))
    assert made.take_begun() == []
    made.next_step(0)
    assert made.take_begun() == [PromptProgress(request=2, tokens=0)]
    made.cancel(Cancel(1))
    made.next_step(0)
    assert made.take_begun() == [PromptProgress(request=3, tokens=0)]


def test_where_less_run_at_once_the_others_wait():
    made = several([1], [2], depth=9, at_once=1)
    assert requests(made, 1) == [1]
    assert made.next_step(0) is None


def test_a_long_prompt_and_a_token_take_turns():
    made = several([1], range(40), depth=9, rows=4)
    assert requests(made, 3) == [1, 2, 2]
    commit(made, 0, sampled_of(7), 0)
    assert requests(made, 3) == [1, 2, 2]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    made = several(range(40), range(50, 58), depth=9, rows=4)
    assert requests(made, 6) == [2, 2, 1, 1, 1, 1]


def test_a_prompt_that_was_begun_continues_before_one_as_long():
    made = several([1] * 8, [2] * 8, [3] * 8, sequences=3, depth=9, rows=4)
    assert requests(made, 6) == [1, 1, 2, 2, 3, 3]


def test_a_long_prompt_waits_for_short_ones_as_long_as_it_takes_itself():
    made = several([0] * 40, depth=9, rows=4, context=99)
    order = []
    for request in range(2, 40):
        made.submit(generate(request, [request] * 4))
        step = next_step(made)
        order += step.requests
        made.commit(step.step, {each: SampledToken(token=1, ends=True) for each in step.requests}, 0)
    assert order.index(1) == 40 // 4 - 1


def test_the_depth_bounds_the_steps_of_all():
    made = several([1], [2], [3], sequences=3, depth=2)
    assert requests(made, 2) == [1, 2]
    assert made.next_step(0) is None
    commit(made, 0, sampled_of(7), 0)
    assert requests(made, 1) == [3]


def test_a_generation_takes_the_sequence_with_the_longest_common_prefix():
    made = several(range(20), range(100, 120), sequences=3, context=200, depth=99)
    while made.next_step(0) is not None:
        continue
    made.cancel(Cancel(1))
    made.cancel(Cancel(2))
    made.submit(generate(3, [*range(100, 117), 9]))
    step = next_step(made)
    assert (step.sequences[0], step.positions[0], step.ops) == (1, 16, [KvRemove(1, 16, -1)])


def test_of_equally_good_sequences_the_least_recently_used_is_taken():
    made = several([1], [2], sequences=2, depth=9)
    assert requests(made, 2) == [1, 2]
    commit(made, 0, sampled_of(7), 0)
    assert requests(made, 1) == [1]
    made.cancel(Cancel(1))
    made.cancel(Cancel(2))
    made.submit(generate(3, [5]))
    assert next_step(made).sequences == [1]


def test_one_that_is_cancelled_before_its_first_step_leaves_the_cells_of_the_one_before():
    made = several(range(12), depth=1, rows=4)
    for step in range(3):
        assert next_step(made).step == step
        commit(made, step, None, 0)
    made.cancel(Cancel(1))
    made.submit(generate(2, [77]))
    made.submit(generate(3, [*range(8), 50, 51]))
    assert next_step(made).requests == [2]
    made.cancel(Cancel(3))
    made.submit(generate(4, [*range(8), 60, 61]))
    commit(made, 3, None, 0)
    step = next_step(made)
    assert (step.requests, step.positions[0], step.ops) == ([4], 8, [KvRemove(0, 8, -1)])


# ---- batched decoding ---------------------------------------------------------------------------------------------------


def decoding(*generations: int, batching: Batching, sequences: int = 4, **options) -> Scheduler:
    """Generations ``1, 2, ...`` after prompts of ``generations`` tokens, waiting for the step of their second token."""
    made = several(
        *([number] * length for number, length in enumerate(generations)),
        sequences=sequences,
        depth=9,
        rows=64,
        batching=batching,
        **options,
    )
    steps = [next_step(made) for _ in generations]
    for step in sorted(steps, key=lambda each: each.requests):
        commit(made, step.step, sampled_of(99 + step.requests[0]), 0)
    return made


def test_tokens_are_computed_together_as_far_as_may_be():
    made = decoding(2, 3, 4, batching=Batching(rows=2, steps=1))
    step = next_step(made)
    assert (step.requests, step.tokens, step.positions, step.sequences) == ([1, 2], [100, 101], [2, 3], [0, 1])
    assert {row: [each.request for each in of] for row, of in step.samples.items()} == {0: [1], 1: [2]}
    assert next_step(made).requests == [3]
    assert made.next_step(0) is None


def test_tokens_sampled_in_one_step_are_reported_for_each_request():
    made = decoding(2, 3, batching=Batching(rows=4))
    step = next_step(made)
    made.cancel(Cancel(1))
    assert [row for row, _ in made.wants_samples(step.step)] == [1]
    (sampled,) = made.commit(step.step, {2: sampled_of(7)}, 0)
    assert isinstance(sampled, Sampled)
    assert (sampled.request, sampled.token) == (2, 7)


def test_a_ring_is_filled_with_steps_of_the_same_size():
    made = decoding(1, 1, 1, 1, batching=Batching(rows=4, steps=2))
    assert [next_step(made).requests for _ in range(2)] == [[1, 2], [3, 4]]
    assert made.next_step(0) is None


def test_one_that_comes_late_waits_for_a_step_to_come_back_and_goes_with_its_generations():
    made = decoding(1, 1, batching=Batching(rows=4, steps=1), sequences=3)
    step = next_step(made)
    assert step.requests == [1, 2]
    made.submit(generate(3, [5]))
    prompt = next_step(made)
    commit(made, prompt.step, sampled_of(9), 0)
    assert made.next_step(0) is None
    made.commit(step.step, {1: sampled_of(7), 2: sampled_of(8)}, 0)
    assert next_step(made).requests == [1, 2, 3]


def test_only_sequences_that_follow_each_other_are_computed_together():
    made = decoding(1, 1, 1, batching=Batching(rows=4, steps=1))
    made.cancel(Cancel(2))
    step = next_step(made)
    assert step.requests == [1]
    assert made.next_step(0) is None
    commit(made, step.step, sampled_of(7), 0)
    assert next_step(made).requests == [3]


def test_a_gap_is_filled_by_a_row_of_nobody_which_is_forgotten():
    made = decoding(1, 5, 1, batching=Batching(rows=4, steps=1, pads=True), sequences=3)
    made.cancel(Cancel(2))
    step = next_step(made)
    assert (step.requests, step.sequences, step.positions) == ([1, 3], [0, 1, 2], [1, 5, 1])
    assert sorted(step.samples) == [0, 2]
    made.commit(step.step, {1: sampled_of(7), 3: sampled_of(8)}, 0)
    assert next_step(made).ops == [KvRemove(1, 5, -1)]
    made.submit(generate(4, [1, 1, 1, 1, 9]))
    assert next_step(made).ops == [KvRemove(1, 0, -1)]


def test_rows_after_many_cells_are_computed_alone():
    made = decoding(20, 1, 1, 20, batching=Batching(rows=4, steps=1, cells=20))
    assert next_step(made).requests == [2, 3]
    assert made.next_step(0) is None
    commit(made, 4, sampled_of(7), 0)
    assert next_step(made).requests == [1]


def test_each_of_several_owners_has_the_same_share_of_the_rows():
    made = scheduler(sequences=5, depth=9, batching=Batching(rows=8, steps=1))
    for request, owner in enumerate("aaaab", 1):
        made.submit(msgspec.structs.replace(generate(request, [request]), owner=owner))
    for step in [next_step(made).step for _ in range(5)]:
        commit(made, step, sampled_of(3), 0)
    step = next_step(made)
    owners = [each.owner for of in step.samples.values() for each in of]
    assert (owners.count("a"), owners.count("b")) == (3, 1)


def test_tokens_sampled_in_earlier_epochs_are_fed_in_batches_without_waiting():
    made = scheduler(sequences=2, depth=9, batching=Batching(rows=2, steps=1))
    for request in (1, 2):
        made.submit(generate(request, [request], sampled=[5, 6, 7]))
    assert [next_step(made).requests for _ in range(5)] == [[1], [2], [1, 2], [1, 2], [1, 2]]
    assert made.next_step(0) is None


@pytest.mark.parametrize(("cells", "steps"), [(None, [3, 3, 1]), (6, [3, 1, 1, 1, 1]), (2, [1] * 7)])
def test_tokens_sampled_in_an_earlier_epoch_are_fed_several_at_a_time_where_that_is_exact(cells, steps):
    made = scheduler(depth=99, batching=Batching(replays=3, cells=cells))
    made.submit(generate(1, [1, 2, 3], sampled=range(10, 18), tokens=20))
    prompt = next_step(made)
    assert len(prompt.tokens) == 3
    replayed = [next_step(made) for _ in steps]
    assert [len(step.tokens) for step in replayed] == steps
    assert [token for step in replayed for token in step.tokens] == list(range(10, 17))
    assert [position for step in replayed for position in step.positions] == list(range(3, 10))
    assert not any(step.samples for step in replayed)
    last = next_step(made)
    assert (last.tokens, list(last.samples)) == ([17], [0])


def in_pieces(short: int = 0) -> Scheduler:
    """One generation decodes; another has a prompt of 20 tokens in chunks of 9, cut while the first decodes."""
    chunking = replace(chunks_of(9), pieces=Pieces(multiple=2, rows=(2, 4), short=short))
    made = Scheduler(SchedulerState(context=100, chunking=chunking, depth=1, sequences=3))
    made.submit(generate(1, [1]))
    commit(made, next_step(made).step, sampled_of(7), 0)
    made.submit(generate(2, range(20)))
    return made


def test_while_others_decode_a_chunk_is_computed_in_pieces_between_their_tokens():
    made = in_pieces()
    found = []
    for _ in range(14):
        step = next_step(made)
        found.append((step.requests[0], len(step.tokens)))
        commit(made, step.step, sampled_of(9), 0)
    pieces = [rows for request, rows in found if request == 2]
    assert [request for request, _ in found] == [2, 1] * 7
    assert pieces == [2, 2, 2, 3, 2, 2, 2]
    last = next_step(made)
    assert (last.requests, last.tokens) == ([2], [15, 16, 17])


def test_the_rest_of_a_prompt_is_one_piece_once_it_is_short():
    made = in_pieces(short=8)
    pieces = []
    for _ in range(16):
        step = next_step(made)
        pieces += [len(step.tokens)] if step.requests == [2] and len(pieces) < 8 else []
        commit(made, step.step, sampled_of(9), 0)
    assert pieces == [2, 2, 2, 3, 2, 2, 5, 2], "chunks end where they do"


def test_pieces_far_from_the_beginning_have_fewer_rows_for_the_same_time():
    pieces = Pieces(multiple=4, rows=(8, 32), twice=100)
    assert [pieces.of(first, 2) for first in (0, 50, 100, 300, 100_000)] == [32, 20, 16, 8, 4]
    assert [pieces.of(first, 1) for first in (0, 100, 300)] == [8, 4, 4]
    assert replace(pieces, twice=None).of(100_000, 2) == 32


def test_a_chunk_continues_whole_once_it_is_alone():
    made = in_pieces()
    commit(made, next_step(made).step, sampled_of(9), 0)
    made.cancel(Cancel(1))
    steps = []
    for _ in range(3):
        steps.append(next_step(made))
        commit(made, steps[-1].step, sampled_of(9), 0)
    assert [len(step.tokens) for step in steps] == [7, 9, 2]
    made.cancel(Cancel(2))
    made.submit(generate(3, [*range(19), 99]))
    assert next_step(made).positions == [18, 19], "both have the same chunks, whatever they were cut into"


def test_after_a_piece_of_a_prompt_all_decoding_requests_have_a_turn_whoever_owns_it():
    made = scheduler(sequences=4, depth=1, rows=4)
    for request, owner in enumerate("aab", 1):
        made.submit(msgspec.structs.replace(generate(request, [request] * (40 if owner == "b" else 1)), owner=owner))
    found = []
    for _ in range(9):
        step = next_step(made)
        found += step.requests
        commit(made, step.step, sampled_of(9), 0)
    assert found[3:] == [3, 1, 2] * 2


# ---- concurrent prompts with a common prefix ---------------------------------------------------------------------------


def test_generations_with_one_prompt_draw_their_first_tokens_from_one_row():
    made = several(range(10), range(10), range(10), sequences=3, depth=9)
    steps = [next_step(made) for _ in range(3)]
    assert made.next_step(0) is None
    assert [step.requests for step in steps] == [[1]] * 3
    assert [each.request for each in steps[-1].samples[1]] == [1, 2, 3]
    for step in steps:
        reported = made.commit(
            step.step, {request: sampled_of(20 + request) for request in (1, 2, 3) if step.samples}, 0
        )
    assert [(each.request, each.token) for each in reported if isinstance(each, Sampled)] == [(1, 21), (2, 22), (3, 23)]
    assert [(each.request, each.reused) for each in reported if isinstance(each, PromptProgress)] == [(2, 10), (3, 10)]
    following = next_step(made)
    assert following.ops == [KvCopy(0, 1, 10), KvCopy(0, 2, 10)], "whosever the next step is"
    assert [(following.requests, following.tokens, following.positions)] == [([2], [22], [10])]


def test_a_prompt_with_the_prefix_of_one_in_progress_waits_for_the_common_part():
    made = several(range(10), [*range(8), 50, 51], depth=9)
    steps = [next_step(made) for _ in range(4)]
    assert [(step.requests, step.positions, step.ops) for step in steps] == [
        ([1], [0, 1, 2, 3], []),
        ([1], [4, 5, 6, 7], []),
        ([1], [8, 9], [KvCopy(0, 1, 8)]),
        ([2], [8, 9], []),
    ]


def test_a_prompt_that_begins_like_one_that_writes_copies_it_at_once():
    made = several([1, 2, 3, 4, 5], depth=9)
    for _ in range(2):
        commit(made, next_step(made).step, sampled_of(9), 0)
    made.submit(generate(2, [1, 2, 3, 4, 6]))
    step = next_step(made)
    assert (step.requests, step.positions, step.ops) == ([2], [4], [KvCopy(0, 1, 4)])


def test_a_request_that_waits_for_another_prompt_continues_alone_when_that_is_cancelled():
    made = several(range(10), range(10), depth=9)
    assert requests(made, 2) == [1, 1]
    made.cancel(Cancel(1))
    step = next_step(made)
    assert (step.requests, step.sequences[0], step.positions) == ([2], 0, [8, 9]), "in the sequence that has it"


def test_a_copy_is_made_before_its_sequence_has_another_text():
    made = several([1, 2], [1, 2], depth=1)
    step = next_step(made)
    made.submit(msgspec.structs.replace(generate(3, [7]), owner="another"))
    made.commit(step.step, {1: SampledToken(token=2, ends=True), 2: sampled_of(8)}, 0)
    following = next_step(made)
    assert (following.requests, following.ops) == ([3], [KvCopy(0, 1, 2), KvRemove(0, 0, -1)])


def test_little_that_is_common_in_a_wide_context_is_computed_again():
    made = several(range(40), [*range(36), 50], context=36 * COPIED_CELLS, depth=99)
    assert requests(made, 4) == [2, 2, 2, 2], "the shorter one does not wait for the other"


def test_a_generation_that_reuses_nothing_waits_for_nobody():
    made = several(range(10), depth=9)
    made.submit(msgspec.structs.replace(generate(2, range(10)), reuses=False))
    assert requests(made, 4) == [1, 1, 1, 2]


def test_requests_of_earlier_epochs_with_one_prompt_resume_after_one_prefill():
    made = scheduler(sequences=2, depth=9)
    made.submit(generate(1, [1, 2], sampled=[5]))
    made.submit(generate(2, [1, 2], sampled=[6, 7]))
    steps = [next_step(made) for _ in range(4)]
    assert [(step.requests, step.tokens) for step in steps] == [([1], [1, 2]), ([2], [6]), ([1], [5]), ([2], [7])]
    assert [list(step.samples) for step in steps] == [[], [], [0], [0]]
