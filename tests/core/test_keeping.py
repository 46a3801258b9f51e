"""Which KV entries a ring keeps in which blocks, what it recomputes, and when it releases them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from primad.errors import RingError
from primad.kv.keys import KvBlock
from primad.kv.keys import block as block_of
from primad.ring.grouping import Batching
from primad.ring.keeping import Chain, Keeping, prompt_blocks
from primad.ring.messages import (
    Drained,
    Finished,
    Generate,
    KvBegun,
    KvCopy,
    KvForgotten,
    KvKeep,
    KvKept,
    KvLoad,
    PromptProgress,
    Sampled,
)
from primad.ring.scheduler.state import SampledToken
from tests.fakes.ring import FakeRing, generate

SMALL = ([[2, 1, 3]], 2)
ROOT = "model, type, owner"
PROMPT = [20 + number for number in range(10)]


def keeping(**options) -> FakeRing:
    """A ring that keeps chunks of 4 tokens and every 3 rows of a completion."""
    return FakeRing(*SMALL, **{"rows": 4, "keep_rows": 3, **options})


def asked(request: int = 1, prompt: Sequence[int] = PROMPT, **options) -> Generate:
    return generate(request, prompt, **{"root": ROOT, **options})


def kept(ring: FakeRing, request: int = 1) -> list[KvBlock]:
    """The blocks reported as kept for ``request``, in order."""
    return [
        each for event in ring.events if isinstance(event, KvKept) and event.request == request for each in event.blocks
    ]


def forgotten(ring: FakeRing) -> set[str]:
    return {key for event in ring.events if isinstance(event, KvForgotten) for key in event.keys}


def sampled(ring: FakeRing, request: int = 1) -> list[int]:
    return [event.token for event in ring.events if isinstance(event, Sampled) and event.request == request]


def blocks_of(
    ring: FakeRing, tokens: Sequence[int], sizes: Sequence[int], prompt: Sequence[int] = PROMPT
) -> list[KvBlock]:
    """The chain of ``prompt`` and of the following ``tokens``, computed row by row in blocks of ``sizes``."""
    chain = prompt_blocks(ring.chunking, prompt, ROOT)
    at = 0
    for size in sizes:
        ends = [chain[-1].end + row + 1 for row in range(size)]
        chain.append(block_of(ROOT, chain[-1], tokens[at : at + size], ends))
        at += size
    return chain


def whole(tokens: int = 8) -> list[int]:
    return FakeRing(*SMALL).ask(generate(1, PROMPT, tokens=tokens))[0]


def heir(ring: FakeRing, **options) -> FakeRing:
    """The next ring on the same devices."""
    return keeping(**{"kv_writers": ring.kv_writers, **options})


def test_chunks_of_a_prompt_and_some_rows_of_an_answer_at_a_time_are_blocks():
    ring = keeping()
    tokens, _ = ring.ask(asked(tokens=9))
    chain = blocks_of(ring, tokens, [3, 3])
    assert [(each.start, each.end) for each in chain] == [(0, 4), (4, 8), (8, 10), (10, 13), (13, 16)]
    assert kept(ring) == chain
    for kv_writer, layers in zip(ring.kv_writers, ring.layers, strict=True):
        assert set(kv_writer.kept) == {each.key for each in chain}
        assert all(kv_writer.holds(each.key, layers) for each in chain)


def test_blocks_of_a_step_are_kept_before_the_next_step():
    ring = keeping(depth=1)
    ring.head.submit(asked(tokens=4))
    steps = []
    while (planned := ring.scheduler.next_step(0)) is not None:
        steps.append((len(planned.tokens), [type(op).__name__ for op in planned.ops]))
        sampled_tokens = {
            each.request: SampledToken(token=9, ends=False) for _, each in ring.scheduler.wants_samples(planned.step)
        }
        ring.scheduler.commit(planned.step, sampled_tokens, 0)
    assert steps == [(4, []), (4, ["KvKeep"]), (2, ["KvKeep"]), (1, ["KvKeep"]), (1, []), (1, [])]


def test_nothing_is_kept_without_a_root_or_where_the_ring_keeps_nothing():
    for ring, root in ((keeping(), ""), (keeping(keep_rows=None), ROOT)):
        ring.ask(asked(root=root))
        assert not any(isinstance(event, KvKept | KvForgotten) for event in ring.events)
        assert not any(kv_writer.kept or kv_writer.flushes for kv_writer in ring.kv_writers)


@pytest.mark.parametrize("replays", [1, 4])
def test_rows_that_are_computed_again_make_the_blocks_that_they_made(replays):
    first, again = keeping(), keeping(batching=Batching(replays=replays))
    tokens, _ = first.ask(asked())
    again.ask(asked(sampled=tokens[:7]))
    assert kept(again) == kept(first)


@pytest.mark.parametrize("cut", [1, 4, 6, 7])
def test_a_request_resumes_after_its_kept_blocks_and_makes_the_same_blocks(cut):
    undisturbed, ring = keeping(), keeping()
    tokens, _ = undisturbed.ask(asked())
    ring.head.submit(asked())
    while len(sampled(ring)) < cut:
        assert ring.move()
    chain = kept(ring)
    after = heir(ring)
    rest, finished = after.ask(asked(sampled=tokens[:cut], blocks=chain))
    assert tokens[:cut] + rest == tokens
    assert finished.completion_tokens == 8
    assert [*chain, *kept(after)] == kept(undisturbed)
    assert [kv_writer.loaded[:1] for kv_writer in after.kv_writers] == [[chain[-1].key]] * 3
    first = chain[-1].end
    assert after.windows[2].steps == [step for step in undisturbed.windows[2].steps if step[0] >= first]
    assert not any(isinstance(event, PromptProgress) and event.reused for event in after.events)


def test_tokens_in_no_block_are_computed_in_chunks_where_rows_need_not_be_exact():
    ring, tokens = keeping(), whole(13)
    chain = blocks_of(ring, tokens, [3])
    rest, _ = (found := keeping()).ask(asked(sampled=tokens[:11], tokens=13, replays_rows=False))
    assert tokens[:11] + rest == tokens
    assert found.windows[0].steps == [
        *[(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)],
        *[(10, 11, 12, 13), (14, 15, 16, 17), (18, 19), (20,), (21,)],
    ]
    assert kept(found)[:3] == chain[:3]
    assert [(each.start, each.end) for each in kept(found)[3:]] == [(10, 14), (14, 18), (18, 20)]
    assert not {each.key for each in kept(found)[3:]} & {each.key for each in blocks_of(ring, tokens, [4, 4, 2])}


def test_a_ring_that_drains_keeps_all_that_it_computed_and_the_next_one_computes_one_row_again():
    ring, tokens = keeping(), whole(12)
    ring.head.submit(asked(tokens=12))
    while len(sampled(ring)) < 5:
        assert ring.move()
    flushes = [kv_writer.flushes for kv_writer in ring.kv_writers]
    ring.head.drain()
    while ring.move():
        pass
    assert ring.events[-1] == Drained()
    reported = sampled(ring)
    assert kept(ring)[-1].end == len(PROMPT) + len(reported) - 1
    assert kept(ring) == blocks_of(ring, tokens, [3, kept(ring)[-1].end - 13])
    assert all(kv_writer.flushes > before for kv_writer, before in zip(ring.kv_writers, flushes, strict=True))
    after = heir(ring)
    rest, _ = after.ask(asked(sampled=reported, blocks=kept(ring), tokens=12))
    assert reported + rest == tokens
    assert after.windows[0].steps[0] == (len(PROMPT) + len(reported) - 1,)
    assert kept(after)[0].before == kept(ring)[-1].key


def test_a_ring_that_drains_with_all_in_blocks_has_no_step_more():
    ring = keeping(keep_rows=1)
    ring.head.submit(asked())
    ring.head.drain()
    assert ring.scheduler.next_step(0) is None
    assert list(ring.head.news()) == [Drained()]


def test_a_cancel_drops_blocks_that_a_drain_would_keep():
    ring = FakeRing([], 3, rows=4, keep_rows=3)
    ring.head.submit(asked())
    while len(sampled(ring)) < 5:
        assert ring.move()
    ring.head.drain()
    ring.cancel(1)
    ring.run()
    assert ring.events.count(Drained()) == 1
    assert ring.kv_writers[0].flushes == 0


def test_a_new_request_has_all_but_the_last_chunk_of_a_prompt():
    ring = keeping()
    ring.ask(asked())
    chain = prompt_blocks(ring.chunking, PROMPT, ROOT)
    after = heir(ring)
    assert after.ask(asked(blocks=chain))[0] == whole()
    assert after.windows[0].steps[0] == (8, 9)
    assert [event.reused for event in after.events if isinstance(event, PromptProgress)] == [8]
    longer = [*PROMPT, 5, 6]
    other = heir(ring)
    assert other.ask(asked(prompt=longer, blocks=chain))[0] == other.model.answer(longer, 8, asked().sampling)
    assert other.windows[0].steps[0] == (8, 9, 10, 11), "the chunk of the shorter prompt ends elsewhere"


def test_blocks_of_a_prompt_that_its_sequence_has_are_not_loaded():
    ring = keeping()
    ring.ask(asked())
    ring.ask(asked(2, blocks=prompt_blocks(ring.chunking, PROMPT, ROOT)))
    assert all(kv_writer.loaded == [] for kv_writer in ring.kv_writers)


def test_a_request_that_reuses_nothing_loads_nothing():
    ring = keeping()
    ring.ask(asked())
    after = heir(ring)
    after.ask(msgspec.structs.replace(asked(blocks=kept(ring)[:2]), reuses=False))
    assert after.windows[0].steps[0] == (0, 1, 2, 3)


def test_blocks_of_other_chunks_serve_the_answer_that_made_them_and_nobody_else():
    """Another prompt would get different bits after chunks that ended elsewhere."""
    ring = keeping(rows=5)
    tokens, _ = ring.ask(asked())
    chain = kept(ring)
    after = heir(ring, sequences=2)
    after.head.submit(asked(sampled=tokens[:3], blocks=chain[:1]))
    after.head.submit(asked(2))
    after.run()
    assert tokens[:3] + sampled(after) == tokens
    assert {step for step in after.windows[0].steps if len(step) > 1} == {
        (5, 6, 7, 8),
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9),
    }
    fresh = heir(ring)
    fresh.ask(asked(blocks=chain[:1]))
    assert fresh.windows[0].steps[0] == (0, 1, 2, 3)


def test_a_chain_that_is_not_here_breaks_the_ring_by_its_name():
    ring = keeping()
    tokens, _ = ring.ask(asked())
    chain = kept(ring)
    ring.kv_writers[1].forget([chain[1].key])
    after = heir(ring)
    with pytest.raises(RingError, match=f"KV block {chain[3].key}, with layers 2 to 2 up to 13, is not here"):
        after.ask(asked(sampled=tokens[:5], blocks=chain[:4]))


def test_choices_of_one_prompt_keep_it_once_and_each_reports_it():
    ring = keeping(sequences=3)
    for request in (1, 2, 3):
        seeded = msgspec.structs.replace(asked().sampling, temperature=1.0, seed=request)
        ring.head.submit(asked(request, sampling=seeded))
    ring.run()
    chain = prompt_blocks(ring.chunking, PROMPT, ROOT)
    for request in (1, 2, 3):
        assert kept(ring, request)[:3] == chain
    assert [ring.kv_writers[1].kept.count(each.key) for each in chain] == [1, 1, 1]


def test_a_request_with_another_root_keeps_the_same_prompt_under_its_own():
    ring = keeping()
    ring.ask(asked())
    ring.ask(asked(2, root="another owner"))
    assert ring.windows[0].steps.count((0, 1, 2, 3)) == 1, "the cells are there"
    assert kept(ring, 2)[:3] == prompt_blocks(ring.chunking, PROMPT, "another owner")
    assert {each.key for each in prompt_blocks(ring.chunking, PROMPT, ROOT)} <= forgotten(ring)


def test_an_answer_is_forgotten_when_it_is_over_and_its_prompt_when_its_sequence_has_another_one():
    ring = keeping()
    tokens, _ = ring.ask(asked())
    chain = blocks_of(ring, tokens, [3, 3])
    assert forgotten(ring) == {each.key for each in chain[3:]}
    over = next(place for place, event in enumerate(ring.events) if isinstance(event, Finished))
    assert any(isinstance(event, KvForgotten) for event in ring.events[over:])
    ring.ask(asked(2, [*PROMPT[:4], 60, 61, 62], tokens=2))
    assert forgotten(ring) == {each.key for each in chain[1:]}
    assert kept(ring, 2)[:1] == chain[:1]


def test_blocks_of_a_cancelled_request_are_forgotten_once_no_window_will_keep_them():
    ring = keeping(depth=1)
    ring.head.submit(asked(tokens=20))
    while len(sampled(ring)) < 4 or not any(ring.links):
        assert ring.move()
    in_flight = [op.block.key for step in ring.head._under_way.values() for op in step.ops if isinstance(op, KvKeep)]
    assert len(in_flight) == 1
    ring.cancel(1)
    assert not {key for event in ring.head.news() if isinstance(event, KvForgotten) for key in event.keys} & set(
        in_flight
    )
    ring.run()
    assert forgotten(ring) >= set(in_flight)


def test_blocks_that_come_with_a_request_are_forgotten_with_it_though_it_never_began():
    ring = keeping()
    chain = prompt_blocks(ring.chunking, PROMPT, ROOT)
    ring.head.submit(asked(blocks=chain, tokens=8))
    ring.head.submit(asked(2, blocks=chain))
    ring.cancel(2)
    assert list(ring.head.news()) == []
    ring.cancel(1)
    assert list(ring.head.news()) == [KvForgotten(keys=[each.key for each in chain])]
    ring.head.submit(asked(3, blocks=chain, sampled=[1] * 8))
    finished, news = ring.head.news()
    assert isinstance(finished, Finished)
    assert news == KvForgotten(keys=[each.key for each in chain])


def test_a_request_with_the_prefix_of_a_loaded_prompt_copies_it_after_the_load():
    ring = keeping()
    longer = [*PROMPT, *range(30, 42)]
    ring.ask(asked(prompt=longer))
    chain = prompt_blocks(ring.chunking, longer, ROOT)
    after = heir(ring, sequences=2, context=128)
    after.head.submit(asked(prompt=longer, blocks=chain))
    after.head.submit(asked(2, [*longer[:20], 1, 2, 3]))
    step = after.scheduler.next_step(0)
    assert step is not None
    assert step.ops == [KvLoad(0, chain[4].key, 20), KvCopy(0, 1, 20)]


def test_a_sequence_is_kept_before_it_has_another_text():
    """A new sequence with the same prompt needs the block of the finished one."""
    ring, other = keeping(sequences=3, depth=1, context=128), [*range(40, 48)]
    made, is_over = ring.scheduler, False
    for each in (asked(1, other, root="", tokens=20), asked(2, tokens=1), asked(3)):
        made.submit(each)
    while not is_over:
        step = made.next_step(0)
        assert step is not None
        sampled_tokens = {each.request: SampledToken(token=9, ends=False) for _, each in made.wants_samples(step.step)}
        is_over = any(isinstance(event, Finished) for event in made.commit(step.step, sampled_tokens, 0))
    made.submit(asked(4, [*other[:4], 1, 2]))
    step = made.next_step(0)
    assert step is not None
    kept_first = KvKeep(1, prompt_blocks(ring.chunking, PROMPT, ROOT)[2])
    assert step.ops[:3] == [kept_first, KvCopy(1, 2, len(PROMPT)), KvCopy(0, 1, 4)]


def test_blocks_are_reported_in_order_where_a_step_comes_back_at_once():
    ring = FakeRing([], 3, rows=4, keep_rows=3, sequences=2, context=128)
    other = [*PROMPT[:8], 1, 2]
    ring.head.submit(asked())
    ring.head.submit(asked(2, other))
    ring.run()
    assert kept(ring, 2)[:3] == prompt_blocks(ring.chunking, other, ROOT)


def test_a_block_needed_again_before_it_was_reported_as_forgotten_is_held():
    keeping, chain, tokens = Keeping(), Chain(request=1, root=ROOT), [1, 2, 3]
    keeping.add(chain, 0, tokens, (3,))
    keeping.hand_out(7)
    key = chain.blocks[0].key
    assert keeping.news([chain]) == [KvBegun(keys=[key])]
    keeping.back(7)
    assert keeping.news([chain]) == [KvKept(request=1, blocks=chain.blocks)]
    keeping.cut(chain, ())
    keeping.add(chain, 0, tokens, (3,))
    assert not keeping.is_waiting, "it is kept again"
    keeping.cut(chain, ())
    assert keeping.news([chain]) == [KvForgotten(keys=[key])]
