"""A grammar whose mask is late delays only its own request: sequences without a mask are held back and lose no token.

In rings with an odd seed masks are late at random, so the properties of ``test_ring.py``, ``test_speculation.py`` and
``test_draft_trees.py`` hold for them too.
"""

from __future__ import annotations

import threading
from math import inf

import msgspec
import pytest

from primad.engine import masks
from primad.engine.masks import GrammarMask, Words
from primad.errors import GrammarError
from primad.ring.grouping import Batching
from primad.ring.head import MASKS_LOOK_S
from primad.ring.messages import Drained, Sampled
from primad.ring.speculation.drafter import Drafting
from tests.core.test_masks import ByteTokens
from tests.core.test_speculation import knowing
from tests.fakes.ring import GREEDY, FakeRing, generate

LATE = msgspec.structs.replace(GREEDY, seed=1)
NEVER = 10**9
SHAPES = (([], 3, Batching(rows=3)), ([[1, 1, 1]], 1, Batching()), ([[1, 2], [1, 1]], 1, Batching(rows=2, steps=2)))


def ring_of(rounds, tail, batching, looks: int = NEVER, **options) -> FakeRing:
    """A ring in which masks of requests sampled as ``LATE`` are ready at look number ``looks``."""
    ring = FakeRing(rounds, tail, sequences=3, batching=batching, **options)
    ring.model.late = lambda sampling: looks if sampling.seed else 0
    return ring


def run_to_the_end(ring: FakeRing, *requests: int) -> None:
    for _ in range(2000):
        ring.move()
    for request in requests:
        assert len(ring.answer(request)[0]) == 8


@pytest.mark.parametrize("shape", SHAPES)
def test_others_continue_while_a_mask_is_late(shape):
    ring = ring_of(*shape)
    for request, sampling in ((1, LATE), (2, GREEDY), (3, GREEDY)):
        ring.head.submit(generate(request, [5, request], sampling=sampling))
    run_to_the_end(ring, 2, 3)
    assert ring.reported(1) == 0
    assert ring.head.wait_s() == MASKS_LOOK_S, "it is looked for it"
    ring.cancel(1)
    ring.run()
    assert ring.head.wait_s() == inf


@pytest.mark.parametrize("shape", SHAPES)
def test_a_late_token_is_sampled_from_its_own_logits(shape):
    def reported(looks: int) -> list[Sampled]:
        ring = ring_of(*shape, looks)
        for request, sampling in ((1, LATE), (2, GREEDY), (3, LATE)):
            ring.head.submit(generate(request, [5, request], sampling=sampling, logprobs=2))
        ring.run()
        return sorted((event for event in ring.events if isinstance(event, Sampled)), key=lambda each: each.request)

    assert reported(50) == reported(0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_that_is_held_back_resumes_in_the_next_ring(shape):
    ring = ring_of(*shape, 50)
    ring.head.submit(generate(1, [5, 6], sampling=LATE))
    while not ring.reported(1):
        ring.move()
    ring.model.late = lambda _: NEVER
    for _ in range(100):
        ring.move()
    ring.head.drain()
    while ring.move():
        pass
    assert ring.events[-1] == Drained(), "nothing is reported after it"
    reported = [event.token for event in ring.events if isinstance(event, Sampled)]
    following = ring_of(*shape, 50)
    assert reported + following.ask(generate(1, [5, 6], sampled=reported, sampling=LATE))[0] == ring.model.answer(
        [5, 6], 8, GREEDY
    )


def test_drafts_hold_although_each_mask_is_there_only_when_it_is_waited_for():
    """As after drafts in one step, where each token's mask is begun when the token before it is sampled."""

    def accepted(looks: int) -> int:
        drafting = Drafting(rows=4, costs=(1.0,) * 4, branches=0, adapts=False)
        ring = FakeRing([], 1, drafting=drafting, drafter=knowing(GREEDY, 1.0))
        ring.model.late = lambda _: looks
        return ring.ask(generate(1, [1, 2]))[1].accepted

    assert accepted(2) == accepted(0) > 0


class SlowWords(ByteTokens):
    """Loads once ``may_load`` is set."""

    def __init__(self, may_load: threading.Event) -> None:
        may_load.wait()


def test_a_mask_reports_whether_it_is_ready_and_times_out(monkeypatch):
    may_load = threading.Event()
    mask = GrammarMask(Words(lambda: SlowWords(may_load)), 'start: "a"', [])
    assert not mask.is_ready(0.0)
    may_load.set()
    while not mask.is_ready(0.1):
        pass
    assert mask.allowed().ids.tolist() == [ord("a")]
    mask.release()
    monkeypatch.setattr(masks, "MASK_TIMEOUT_S", 0.0)
    may_load.clear()
    mask = GrammarMask(Words(lambda: SlowWords(may_load)), 'start: "a"', [])
    assert mask.is_ready(0.0)
    with pytest.raises(GrammarError, match="no token within"):
        mask.allowed()
    may_load.set()
    mask.release()
