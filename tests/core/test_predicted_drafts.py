"""Drafts by a model's own multi-token prediction layers: the text is unchanged; they save time or cost little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from primad.engine.protocol import Sampling
from primad.ring.grouping import Batching
from primad.ring.messages import Finished, KvKept
from primad.ring.speculation.branches import likely
from primad.ring.speculation.drafter import Drafting
from tests.core.test_draft_costs import seconds, undrafted
from tests.core.test_speculation import knowing
from tests.fakes.predictor import FakePredictor
from tests.fakes.ring import GREEDY, FakeRing, generate
from tests.fakes.timed_ring import TimedRing

TOKENS = 120
AT_ONCE = Drafting(rows=4, costs=(1.0, 1.05, 1.1, 1.15), adapts=False)
AHEAD = Drafting(room=4, adapts=False)
BLOCKS = replace(AT_ONCE, room=3, block=3)
ALONE, RING = (), ((2, 1),)


def finished(ring: FakeRing, *prompts: list[int], sampling: Sampling = GREEDY) -> list[Finished]:
    """The ends of the requests of ``prompts``; checks that each text is the same as without drafts."""
    for request, prompt in enumerate(prompts):
        ring.head.submit(generate(request, prompt, tokens=TOKENS, sampling=sampling))
    ring.run()
    for request, prompt in enumerate(prompts):
        assert ring.answer(request)[0] == ring.model.answer(prompt, TOKENS, sampling)
    return [event for event in ring.events if isinstance(event, Finished)]


def ring_with(predictor: FakePredictor, rounds: Any, drafting: Drafting, **options: Any) -> FakeRing:
    return FakeRing(rounds, 2, drafting=drafting, predictor=predictor, batching=Batching(replays=8), **options)


MODES = [(ALONE, AT_ONCE), (RING, AT_ONCE), (RING, AHEAD), (RING, BLOCKS)]


@pytest.mark.parametrize(("rounds", "drafting"), MODES, ids=["alone", "ring", "ahead", "blocks"])
def test_drafts_hold_as_often_as_the_layers_are_right_so_each_token_had_its_own_state(rounds, drafting):
    """Without the state of the previous token a draft of the fake is right once in 64 times."""
    (end,) = finished(ring_with(FakePredictor(1.0), rounds, drafting), [9, 8, 7])
    assert end.accepted >= 0.95 * end.drafted > 0.5 * TOKENS


def test_layers_draft_no_token_that_no_step_computes():
    predictor = FakePredictor(1.0)
    (end,) = finished(ring_with(predictor, ALONE, AT_ONCE), [9, 8, 7])
    assert end.drafted <= predictor.calls <= end.drafted + 3


@pytest.mark.parametrize("room", [2, 3, 4])
def test_drafts_after_a_wrong_one_count_neither_as_right_nor_as_wrong(room):
    """Each draft that is verified is accepted as often as the layers are right, however many follow it."""
    ring = ring_with(FakePredictor(0.7), RING, replace(AHEAD, room=room))
    (end,) = finished(ring, [9, 8, 7])
    tally = ring.scheduler.tally
    judged = tally.accepted + tally.missed
    assert (end.accepted, end.drafted) == (tally.accepted, tally.drafted)
    assert abs(tally.accepted / judged - 0.7) < 0.12
    assert tally.drafted == judged if room == 2 else tally.drafted > judged


@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("states", [0, 2])
@pytest.mark.parametrize(("rounds", "drafting"), MODES, ids=["alone", "ring", "ahead", "blocks"])
def test_the_text_stays_what_it_is_however_often_they_hold_also_where_masks_are_late(
    rounds, drafting, states, share, seed
):
    finished(ring_with(FakePredictor(share), rounds, drafting, seed=seed, states=states), [9, 8, 7])


@pytest.mark.parametrize(("share", "rows"), [(0.0, 1), (1.0, 3)])
def test_until_a_draft_held_no_step_has_several_rows(share, rows):
    """Drafts that are always wrong cost a short request little."""
    ring = TimedRing(2, context=256, depth=2, drafting=replace(BLOCKS, adapts=True), drafter=knowing(GREEDY, share))
    ring.head.submit(generate(0, [9, 8, 7], tokens=TOKENS // 2))
    ring.finish()
    assert ring.scheduler.tally.drafted > 5
    assert max(map(len, ring.windows[-1].steps[1:])) == rows


@pytest.mark.parametrize("keep_rows", [1, 3])
@pytest.mark.parametrize("states", [{}, {"states": 2, "state_rows": 4}], ids=["cells", "states"])
def test_cells_are_kept_though_blocks_of_drafts_may_roll_back_before_them(states, keep_rows):
    ring = ring_with(FakePredictor(0.7), RING, BLOCKS, keep_rows=keep_rows, **states)
    ring.head.submit(generate(0, [9, 8, 7], tokens=TOKENS, root="owner"))
    ring.run()
    assert ring.answer(0)[0] == ring.model.answer([9, 8, 7], TOKENS, GREEDY)
    kept = max(block.end for event in ring.events if isinstance(event, KvKept) for block in event.blocks)
    assert kept >= TOKENS - 2 * keep_rows


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("rounds", "drafting"), MODES, ids=["alone", "ring", "ahead", "blocks"])
def test_drafts_are_sampled_as_tokens_are_so_right_ones_are_accepted_at_any_temperature(rounds, drafting, temperature):
    sampling = msgspec.structs.replace(GREEDY, temperature=temperature, seed=5)
    (end,) = finished(ring_with(FakePredictor(None), rounds, drafting), [9, 8, 7], sampling=sampling)
    assert end.accepted >= 0.95 * end.drafted > 0.5 * TOKENS


@pytest.mark.parametrize("rounds", [ALONE, RING], ids=["alone", "ring"])
def test_the_latest_of_several_requests_is_drafted_for_and_no_text_changes(rounds):
    ring = ring_with(FakePredictor(0.7), rounds, AT_ONCE, sequences=3)
    finished(ring, [1, 2, 3], [4, 5, 6], [7, 8, 9])


@pytest.mark.parametrize("rounds", [ALONE, RING], ids=["alone", "ring"])
def test_all_chunks_of_a_prompt_but_the_last_are_read(rounds):
    """The layers also know the whole completion."""
    predictor = FakePredictor(1.0)
    ring = ring_with(predictor, rounds, AT_ONCE, rows=16)
    (end,) = finished(ring, [token % 64 for token in range(2, 60)])
    assert predictor.begun == 1
    assert 48 + TOKENS - 10 <= predictor.held <= 48 + TOKENS
    assert end.accepted >= 0.95 * end.drafted


def test_a_token_without_a_close_alternative_has_no_other_draft():
    logits = np.zeros(64, np.float32)
    logits[[5, 9]] = 40, 39
    assert [each.token for each in likely(logits)] == [5, 9]
    assert sum(each.sure for each in likely(logits)) == pytest.approx(1)


def test_layers_without_room_for_the_text_start_again():
    predictor = FakePredictor(1.0, cells=24)
    (end,) = finished(ring_with(predictor, ALONE, AT_ONCE), [9, 8, 7])
    assert predictor.begun > 3
    assert end.accepted > 0.3 * TOKENS


def test_layers_that_fail_draft_no_more_and_the_request_continues():
    predictor = FakePredictor(1.0, fails_at=9)
    finished(ring_with(predictor, RING, AT_ONCE), [9, 8, 7])
    assert predictor.calls == 9


def test_a_request_resumed_from_an_earlier_ring_is_drafted_from_its_first_state():
    ring = ring_with(FakePredictor(1.0), RING, AT_ONCE)
    answer = ring.model.answer([9, 8, 7], TOKENS, GREEDY)
    ring.head.submit(generate(0, [9, 8, 7], sampled=answer[:30], tokens=TOKENS))
    ring.run()
    assert ring.answer(0)[0] == answer[30:]
    assert ring.scheduler.tally.accepted > 20


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("predicts_s", [0.0005, 0.003, 0.01])
@pytest.mark.parametrize(
    ("devices", "drafting"), [(1, AT_ONCE), (2, AHEAD), (2, BLOCKS)], ids=["alone", "ring", "blocks"]
)
def test_layers_that_are_mostly_wrong_cost_little_however_long_they_take(devices, drafting, predicts_s, share):
    options = {"costs": drafting.costs, "batching": Batching(replays=8)}
    drafting = replace(drafting, adapts=True)
    drafts = {"predictor": FakePredictor(share), "predicts_s": predicts_s, "drafting": drafting}
    assert seconds(devices, **drafts, **options) <= 1.03 * undrafted(devices, **options)


@pytest.mark.parametrize(("devices", "hop_s", "minimum"), [(1, 0.0, 1.3), (2, 0.002, 1.6)], ids=["alone", "ring"])
def test_layers_that_are_right_seven_times_in_ten_win(devices, hop_s, minimum):
    """A visit takes 10 ms, a draft 0.5 ms, and each further row of a step 15 % of a visit."""
    costs = tuple(1 + 0.15 * more for more in range(8))
    options = {"costs": costs, "batching": Batching(replays=8), "hop_s": hop_s}
    drafting = Drafting(rows=8, costs=costs, room=devices + 1 if devices > 1 else 1, ring_passes=float(devices))
    drafts = {"predictor": FakePredictor(0.7), "predicts_s": 0.0005, "drafting": drafting}
    assert seconds(devices, **options) >= minimum * seconds(devices, **drafts, **options)


@pytest.mark.parametrize(("more", "minimum"), [(0.1, 1.65), (0.2, 1.55)])
def test_blocks_that_follow_each_other_win_more_than_single_rows_and_than_rows_with_the_next_token(more, minimum):
    """A draft takes 6 % of a token; each alternative alone gains a factor of 1.4. About 66 % of drafts are accepted."""
    costs = tuple(1 + more * rows for rows in range(4))
    options = {"costs": costs, "batching": Batching(replays=8), "hop_s": 0.0005, "shares": (0.5, 1.0, 0.5)}
    drafting = Drafting(room=2, rows=4, costs=costs, ring_passes=2.0)
    without = seconds(2, **options)

    def times(drafting: Drafting) -> float:
        return without / seconds(2, predictor=FakePredictor(0.7), predicts_s=0.0012, drafting=drafting, **options)

    single, together, blocks = map(
        times, (replace(drafting, rows=1, costs=(1.0,)), drafting, replace(drafting, block=2))
    )
    assert blocks >= max(minimum, 1.05 * single, 1.05 * together)
