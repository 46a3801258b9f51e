"""Models whose KV cache needs a state to continue: how much is recomputed, and what concurrent requests share."""

from __future__ import annotations

from itertools import pairwise

import pytest

from primad.kv import keys
from primad.ring.keeping import STATES_OF_CHAIN, prompt_blocks
from primad.ring.messages import KvForgotten, KvKept
from tests.fakes.replica import FakeReplica
from tests.fakes.ring import GREEDY, FakeRing, generate

SMALL = ([[2, 1, 3]], 2)
STATE_ROWS = 8
TOKENS = 60


def ring_of(**options) -> FakeRing:
    """Chunks of at most 16 tokens, and blocks of 2 rows of a completion."""
    fields = {"rows": 16, "states": 4, "keep_rows": 2, "state_rows": STATE_ROWS, "depth": 1, **options}
    return FakeRing(*SMALL, **fields)


def text(length: int, number: int = 0) -> list[int]:
    return [(7 * number + 3 * i + 1) % 60 for i in range(length)]


def written(ring: FakeRing, replica: FakeReplica, prompt: list[int], tokens: int, *, drains: bool = False) -> list[int]:
    """The first ``tokens`` tokens of an unfinished completion; the replica notes its blocks."""
    asked = generate(1, prompt, tokens=TOKENS, root="ann")
    replica.give(asked)
    ring.head.submit(asked)
    while ring.reported(1) < tokens:
        ring.move()
    if drains:
        ring.head.drain()
        while ring.move():
            pass
    for event in ring.events:
        if isinstance(event, KvKept | KvForgotten):
            replica.note(event, ring.kv_writers)
    return [event.token for event in ring.events if getattr(event, "token", None) is not None]


def resumed(replica: FakeReplica, left: FakeRing, prompt: list[int], sampled: list[int], **options) -> FakeRing:
    """Another ring on the devices of ``left`` that finishes the completion; checks its text."""
    ring = ring_of(kv_writers=left.kv_writers, **options)
    replica.move(ring, left.kv_writers)
    asked = generate(1, prompt, sampled=sampled, tokens=TOKENS, root="ann", blocks=replica.chains[1])
    tokens, _ = ring.ask(asked)
    assert sampled + tokens == ring.model.answer(prompt, TOKENS, GREEDY)
    return ring


def again(ring: FakeRing, known: int) -> int:
    """The number of rows among the ``known`` tokens that the first window computed."""
    return sum(position < known for step in ring.windows[0].steps for position in step)


@pytest.mark.parametrize("tokens", [1, 5, 17, 30, 50])
def test_a_request_resumes_from_its_last_state(tokens):
    replica, ring, prompt = FakeReplica(), ring_of(), text(40)
    sampled = written(ring, replica, prompt, tokens)
    assert again(resumed(replica, ring, prompt, sampled), len(prompt) + len(sampled) - 1) <= STATE_ROWS + 4


def test_a_planned_change_has_nothing_computed_again():
    replica, ring, prompt = FakeReplica(), ring_of(), text(40)
    sampled = written(ring, replica, prompt, 21, drains=True)
    assert again(resumed(replica, ring, prompt, sampled), len(prompt) + len(sampled) - 1) == 0


def test_where_the_last_state_is_lost_the_one_before_serves():
    replica, ring, prompt = FakeReplica(), ring_of(), text(40)
    sampled = written(ring, replica, prompt, 30)
    last = [each for each in replica.chains[1] if each.is_state][-1]
    ring.kv_writers[2].forget([last.key])
    assert again(resumed(replica, ring, prompt, sampled), len(prompt) + len(sampled) - 1) <= 2 * STATE_ROWS + 4


def test_the_latest_states_of_a_chain_are_kept():
    ring, prompt = ring_of(), text(40)
    written(ring, FakeReplica(), prompt, TOKENS - 1)
    forgotten = {key for event in ring.events if isinstance(event, KvForgotten) for key in event.keys}
    kept = [each for event in ring.events if isinstance(event, KvKept) for each in event.blocks]
    states = [each for each in kept if each.is_state and each.key not in forgotten]
    assert len(states) == STATES_OF_CHAIN
    assert all(each.end - before.end == STATE_ROWS for before, each in pairwise(states))


def test_a_prompt_that_devices_have_is_computed_after_its_last_state():
    first, prompt = ring_of(), text(60)
    first.ask(generate(1, prompt, root="ann"))
    chain = [
        each for cells in prompt_blocks(first.chunking, prompt, "ann") for each in (cells, keys.state_behind(cells))
    ]
    ring = ring_of(kv_writers=first.kv_writers)
    held = keys.to_go_on_from([each for each in chain if ring.kv_writers[0].holds(each.key, ring.layers[0])][:-2])
    assert [each.end for each in held if each.is_state] == [32, 48]
    longer = prompt[:50] + text(20, 5)
    tokens, _ = ring.ask(generate(2, longer, root="ann", blocks=held))
    assert tokens == ring.model.answer(longer, 8, GREEDY)
    assert again(ring, len(longer)) == len(longer) - 48


@pytest.mark.parametrize("state_rows", [None, STATE_ROWS])
def test_choices_of_one_prompt_compute_it_once(state_rows):
    ring, prompt = ring_of(sequences=4, state_rows=state_rows, keep_rows=None), text(40)
    for request in range(1, 5):
        ring.head.submit(generate(request, prompt))
    ring.run()
    assert {tuple(ring.answer(request)[0]) for request in range(1, 5)} == {tuple(ring.model.answer(prompt, 8, GREEDY))}
    assert [len(step) for step in ring.windows[0].steps if len(step) > 1] == [16, 16, 8]


@pytest.mark.parametrize("moves", [0, 10, 60])
def test_a_request_has_what_another_one_computes_of_its_beginning_now(moves):
    """Submitted before, during or after the computation of the shared prefix; afterwards from a kept state."""
    ring, first, second = ring_of(sequences=2), text(200), text(192) + text(20, 3)
    ring.head.submit(generate(1, first, root="ann"))
    for _ in range(moves):
        ring.move()
    ring.head.submit(generate(2, second, root="ann"))
    ring.run()
    for request, prompt in ((1, first), (2, second)):
        assert ring.answer(request)[0] == ring.model.answer(prompt, 8, GREEDY)
    chunks = [step for step in ring.windows[0].steps if len(step) > 1]
    assert sum(map(len, chunks)) == len(first) + len(second) - 192
