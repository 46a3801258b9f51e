"""A generation resumes in another ring as if nothing had happened; a draining ring ends in order."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primad.engine.protocol import packed_biases, sampling_seed
from primad.errors import RingError
from primad.ring.messages import Drained, Finished, Sampled
from tests.fakes.engine import VOCABULARY
from tests.fakes.ring import GREEDY, FakeRing, generate

CONTEXT = 512
WILD = msgspec.structs.replace(
    GREEDY,
    temperature=1.3,
    seed=77,
    presence_penalty=0.7,
    penalty_tokens=6,
    logit_bias=packed_biases(((3, 1.5), (9, -50.0))),
)
SMALL = ([[2, 1, 3]], 2)

rings = settings(suppress_health_check=[HealthCheck.too_slow])


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCABULARY, length).tolist()


@st.composite
def fresh_rings(draw):
    """Any ring of one to four devices; the model, and so the completion, is the same for all."""
    devices, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    sizes = st.lists(st.integers(1, 3), min_size=devices, max_size=devices)
    return FakeRing(
        draw(st.lists(sizes, min_size=rounds, max_size=rounds)) if devices > 1 else [],
        draw(st.integers(1, 3)),
        rows=draw(st.sampled_from([1, 7, 64])),
        depth=draw(st.integers(1, 5)),
        context=CONTEXT,
        seed=draw(st.integers(0, 2**32)),
    )


def sampled(ring: FakeRing, request: int) -> list[int]:
    return [event.token for event in ring.events if isinstance(event, Sampled) and event.request == request]


@rings
@given(st.data(), fresh_rings(), fresh_rings(), st.sampled_from([GREEDY, WILD]))
def test_a_generation_resumes_in_any_other_ring_wherever_it_was_cut(data, first, second, sampling):
    text = prompt(data.draw(st.integers(1, 90)), data.draw(st.integers(0, 3)))
    whole = first.model.answer(text, 12, sampling)
    first.head.submit(generate(1, text, tokens=12, sampling=sampling))
    for _ in range(data.draw(st.integers(0, 300))):
        first.move()
    reported = sampled(first, 1)
    assert reported == whole[: len(reported)]
    rest, finished = second.ask(generate(1, text, sampled=reported, tokens=12, sampling=sampling))
    assert reported + rest == whole
    assert (finished.reason, finished.prompt_tokens, finished.completion_tokens) == ("length", len(text), 12)


@pytest.mark.parametrize("cut", range(9))
@pytest.mark.parametrize("sampling", [GREEDY, WILD], ids=["greedy", "sampled"])
def test_every_window_sees_the_same_rows_in_the_same_steps(cut, sampling):
    text = prompt(30)
    undisturbed = FakeRing(*SMALL, rows=8, depth=3)
    whole, _ = undisturbed.ask(generate(1, text, sampling=sampling))
    other = FakeRing(*SMALL, rows=8, depth=3)
    rest, finished = other.ask(generate(1, text, sampled=whole[:cut], sampling=sampling))
    assert whole[:cut] + rest == whole
    assert finished.completion_tokens == len(whole) == 8
    if cut < len(whole):
        assert [window.steps for window in other.windows] == [window.steps for window in undisturbed.windows]
    else:
        assert all(window.steps == [] for window in other.windows)


@pytest.mark.parametrize("cut", [0, 3, 60, 200])
@pytest.mark.parametrize("fewer", [1, 2])
def test_more_generations_than_sequences_resume_one_after_another(cut, fewer):
    texts = {request: prompt(20 + request, request) for request in range(1, 5)}
    first, second = FakeRing(*SMALL, sequences=4), FakeRing(*SMALL, sequences=fewer)
    for request, text in texts.items():
        first.head.submit(generate(request, text, tokens=12, sampling=WILD))
    for _ in range(cut):
        first.move()
    reported = {request: sampled(first, request) for request in texts}
    for request, text in texts.items():
        second.head.submit(generate(request, text, sampled=reported[request], tokens=12, sampling=WILD))
    second.run()
    for request, text in texts.items():
        assert reported[request] + sampled(second, request) == second.model.answer(text, 12, WILD)


def test_a_generation_may_be_cut_again_and_again():
    text, reported = prompt(20), []
    whole = FakeRing(*SMALL).model.answer(text, 12, WILD)
    for pieces in (2, 3, 1):
        ring = FakeRing(*SMALL, rows=4)
        ring.head.submit(generate(1, text, sampled=reported, tokens=12, sampling=WILD))
        while len(sampled(ring, 1)) < pieces:
            assert ring.move()
        reported = reported + sampled(ring, 1)
    rest, _ = FakeRing(*SMALL).ask(generate(1, text, sampled=reported, tokens=12, sampling=WILD))
    assert reported + rest == whole


def test_replayed_tokens_do_not_wait_for_each_other():
    ring = FakeRing(*SMALL, depth=4)
    ring.head.submit(generate(1, [1, 2], sampled=[5, 6, 7]))
    for _ in range(4):
        assert ring.head.turn() is not None
    assert ring.scheduler.in_flight == 4
    assert [steps[0] for steps in ring.windows[0].steps] == [0, 2, 3, 4]


@pytest.mark.parametrize(("sampled", "tokens"), [(8, 8), (9, 8), (1, 1), (12, 1000)])
def test_an_answer_that_was_complete_ends_at_once_without_a_step(sampled, tokens):
    ring = FakeRing(*SMALL, context=32)
    more, finished = ring.ask(generate(1, prompt(20), sampled=prompt(sampled), tokens=tokens))
    assert (more, finished.reason, finished.completion_tokens) == ([], "length", sampled)
    assert (finished.prompt_s, finished.decode_s) == (0, 0)
    assert all(window.steps == [] for window in ring.windows)


def test_an_answer_that_was_complete_ends_before_those_that_run():
    ring = FakeRing(*SMALL)
    ring.head.submit(generate(1, [1, 2]))
    ring.head.submit(generate(2, [1, 2], sampled=[3] * 8))
    ring.run()
    assert [event.request for event in ring.events if isinstance(event, Finished)] == [2, 1]


def test_an_end_token_after_a_replay_ends_the_answer():
    whole = FakeRing(*SMALL).model.answer([1, 2], 8, GREEDY)
    ends = frozenset([whole[5]])
    cut = min(3, whole.index(whole[5]))
    rest, finished = FakeRing(*SMALL, ends=ends).ask(generate(1, [1, 2], sampled=whole[:cut]))
    assert whole[:cut] + rest == whole[: whole.index(whole[5])]
    assert (finished.reason, finished.completion_tokens) == ("stop", whole.index(whole[5]))


@rings
@given(st.data(), fresh_rings(), fresh_rings())
def test_a_ring_drains_and_the_next_one_resumes_without_a_lost_or_doubled_token(data, first, second):
    texts = data.draw(st.lists(st.integers(1, 60).map(prompt), min_size=1, max_size=3))
    for request, text in enumerate(texts):
        first.head.submit(generate(request, text, tokens=6, sampling=WILD))
    for _ in range(data.draw(st.integers(0, 250))):
        first.move()
    begun = first.scheduler.in_flight
    first.head.drain()
    before = len(first.events)
    while first.move():
        assert first.scheduler.in_flight <= begun, "a step was begun after the drain"
    assert first.events.count(Drained()) == 1
    assert first.events[-1] == Drained(), "something was reported after Drained"
    assert len([event for event in first.events[before:] if isinstance(event, Sampled)]) <= 1
    assert first.scheduler.in_flight == 0
    over = {event.request for event in first.events if isinstance(event, Finished)}
    for request, text in enumerate(texts):
        reported = sampled(first, request)
        if request not in over:
            second.head.submit(generate(request, text, sampled=reported, tokens=6, sampling=WILD))
    second.run()
    for request, text in enumerate(texts):
        assert sampled(first, request) + sampled(second, request) == first.model.answer(text, 6, WILD)


def test_a_quiet_ring_is_drained_at_once_and_once():
    ring = FakeRing(*SMALL)
    ring.head.drain()
    ring.head.drain()
    assert ring.head.wait_s() == 0
    assert list(ring.head.news()) == [Drained()]
    assert ring.head.turn() is None
    assert ring.head.wait_s() == float("inf")


def test_a_generation_after_a_drain_is_our_mistake():
    ring = FakeRing(*SMALL)
    ring.head.drain()
    with pytest.raises(RingError, match="request 4 was given to a ring that drains"):
        ring.head.submit(generate(4, [1]))


def test_a_cancel_while_draining_is_a_cancel():
    ring = FakeRing(*SMALL)
    ring.head.submit(generate(1, [1, 2]))
    ring.move()
    ring.head.drain()
    ring.cancel(1)
    ring.run()
    assert ring.events == [Drained()]


def test_the_seeds_of_draws_are_those_of_splitmix64():
    # The first outputs of the published generator for the state 1234567, upper halves.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [sampling_seed(1234567, index) for index in range(4)] == [value >> 32 for value in published]


@given(st.integers(0, 2**32 - 2), st.integers(0, 2**20))
def test_the_seed_of_a_draw_is_one_that_llama_cpp_takes_as_it_is(seed, index):
    assert 0 <= sampling_seed(seed, index) < 2**32 - 1


def test_draws_of_neighbouring_seeds_and_places_have_seeds_of_their_own():
    seeds = {sampling_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) > 9990
