"""Checkpoints of sequences whose KV cache cannot be cut: which states a ring keeps, and which it evicts first."""

from __future__ import annotations

import msgspec
import pytest

from primad.ring import checkpoints
from primad.ring.messages import PromptProgress, StateKeep, StateRestore
from tests.fakes.ring import FakeRing, generate

SMALL = ([[2, 1, 3]], 2)
MESSAGE = 3
"""A token that begins a message."""


def ring_of(states: int = 4, **options) -> FakeRing:
    """Chunks of at most 16 tokens, and of 2 or more before a message."""
    return FakeRing(*SMALL, **{"rows": 16, "minimum": 2, "states": states, **options})


def message(length: int, number: int = 0) -> list[int]:
    return [MESSAGE, *(20 + (number + i) % 40 for i in range(length - 1))]


def computed(ring: FakeRing, request: int, prompt: list[int]) -> int:
    """The number of prompt rows computed for ``request``; checks the completion too."""
    before = len(ring.windows[0].steps)
    tokens, _ = ring.ask(generate(request, prompt))
    assert tokens == ring.model.answer(prompt, 8, generate(request, prompt).sampling)
    return sum(step[0] < len(prompt) for step in ring.windows[0].steps[before:] for _ in step)


def test_the_next_turn_computes_what_is_new_and_the_answer_before_it():
    ring, turn = ring_of(), message(40) + message(10, 7) + message(2)
    assert computed(ring, 1, turn) == 52
    longer = turn + ring.answer(1)[0] + message(6, 9) + message(2)
    assert computed(ring, 2, longer) == len(longer) - 50
    reused = next(event for event in ring.events if isinstance(event, PromptProgress) and event.request == 2)
    assert reused.reused == 50


def test_the_same_prompt_is_computed_once():
    ring, turn = ring_of(), message(40)
    computed(ring, 1, turn)
    assert [computed(ring, request, turn) for request in (2, 3)] == [0, 0]


def test_of_a_prompt_with_a_rewritten_last_message_only_that_message_is_computed():
    ring, history = ring_of(), message(40)
    computed(ring, 1, history + message(10, 3) + message(2))
    assert computed(ring, 2, history + message(12, 5) + message(2)) == 14


def test_a_long_prompt_is_found_again_up_to_a_change_in_its_middle(monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY_TOKENS", 32)
    ring, text = ring_of(8), message(200)
    computed(ring, 1, text)
    assert computed(ring, 2, text[:150] + message(50, 9)) == 200 - 128


@pytest.mark.parametrize("states", [1, 2, 3, 5, 9])
def test_no_more_states_are_kept_than_a_ring_has_room_for_and_each_sequence_has_its_share(states):
    ring = ring_of(states, sequences=3, depth=1)
    texts = [message(60, 11 * number) for number in range(3)]
    for request, text in enumerate(texts):
        ring.head.submit(generate(request, text))
    ring.run()
    held = [window._states for window in ring.windows]
    assert all(max(each) < states for each in held)
    assert all(each == held[0] for each in held)
    kept = {sequence for sequence, _ in held[0].values()}
    assert len(kept) == min(states, 3)
    assert computed(ring, 9, texts[max(kept)]) <= 12, "its last chunk"


def test_a_request_that_reuses_nothing_computes_its_whole_prompt_again():
    ring, text = ring_of(), message(40)
    computed(ring, 1, text)
    before = len(ring.windows[0].steps)
    ring.ask(msgspec.structs.replace(generate(2, text), reuses=False))
    assert ring.windows[0].steps[before] == tuple(range(16))


def test_without_states_cells_are_cut_and_no_operation_names_one():
    ring, operations = ring_of(0), []
    ring._send = spying(ring._send, operations)
    computed(ring, 1, message(40))
    computed(ring, 2, message(40))
    assert operations
    assert not [each for each in operations if isinstance(each, StateKeep | StateRestore)]


def spying(send, operations):
    def spied(device, step, hidden):
        operations.extend(step.ops)
        send(device, step, hidden)

    return spied
