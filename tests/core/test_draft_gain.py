"""What a model that guesses would win for a plan, and the memory that the plan leaves it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import Plan, residency
from primad.planning.draft_gain import SHARES, draft_gain
from primad.planning.explain import explain
from primad.planning.question import PlannedDraft, Wishes, ask
from primad.ring.drafting.drafter import Drafting
from tests.core.test_planned_drafts import ALONE, FOUR, TWO, asked
from tests.core.test_planned_drafts import drafting as drafting_for
from tests.fakes.planning import GB, device, model

SMALL = model(layers=4, layer_bytes=GB // 100)


def gain(drafting: Drafting | None, plan: Plan = FOUR, draft=SMALL):
    return draft_gain(drafting, plan, asked(*map(device, "abcd")), draft)


def test_rows_ahead_win_what_the_ring_has_room_for():
    four, two = gain(Drafting(room=4)), gain(Drafting(room=2))
    assert (four.kind, four.rows) == ("ahead", 4)
    assert four.times == pytest.approx([4 * e / (4 + e - 1) for e in (1 / (1 - share) for share in SHARES)])
    assert all(1 < less < more for less, more in zip(two.times, four.times, strict=True))


def test_a_model_that_is_no_quicker_than_the_ring_wins_nothing():
    slow = gain(Drafting(room=4), draft=model(layers=40))
    assert slow.token_s > gain(Drafting(room=4)).token_s
    assert slow.times == pytest.approx([1.0] * len(SHARES))
    assert gain(Drafting(rows=4, costs=(1, 1.1, 1.2, 1.3)), draft=model(layers=40)).times == (1.0,) * len(SHARES)


def test_rows_together_win_what_a_step_of_them_takes_less_than_single_ones():
    cheap, dear = (gain(Drafting(rows=4, costs=costs)) for costs in ((1, 1.1, 1.2, 1.3), (1, 1.9, 2.8, 3.7)))
    assert (cheap.kind, cheap.rows) == ("together", 4)
    assert all(1 <= less < more < 4 for less, more in zip(dear.times, cheap.times, strict=True))


def test_where_nothing_would_be_guessed_it_says_why():
    question = asked(device("a", ram=3 * GB, disk=0.3e9))
    layer = replace(question.model.layers[0], kv_bytes_per_token=0, state_bytes=1000)
    recurrent = replace(question, model=replace(question.model, layers=(layer,) * 20))
    plan = residency(ALONE, question)
    for asked_for, why in (
        (question, "it is not known that several rows in one step are exact here; --batching fast takes them"),
        (recurrent, f"layers of {recurrent.model.name} keep a state that cannot be cut back to the tokens that held"),
    ):
        found = draft_gain(drafting_for(plan, asked_for), plan, asked_for, SMALL)
        assert (found.kind, found.rows, found.why) == ("none", 0, why)


def test_the_gain_is_that_of_what_serve_would_do():
    question = asked(device("a"), device("b"), round_trip_s=0.4)
    drafting = drafting_for(TWO, question)
    assert drafting is not None
    assert draft_gain(drafting, TWO, question, SMALL).rows == drafting.room


def test_the_plan_leaves_the_head_room_for_the_model_that_guesses():
    devices = [device("desk", ram=4 * GB), device("laptop", ram=6 * GB)]
    question = ask(Wishes(links=("1Gbit/s,1ms",), head="desk"), devices, (), model())
    draft = PlannedDraft(path="small.gguf", model=SMALL, memory_bytes=GB)
    without, with_ = explain(question), explain(replace(question, draft=draft))
    assert without.draft is None
    assert with_.draft is not None
    assert (with_.draft.path, with_.draft.memory_bytes, with_.draft.bytes) == ("small.gguf", GB, SMALL.size_bytes)
    limits = [{part.name: part.ram_limit_bytes for part in answer.devices} for answer in (without, with_)]
    assert limits[0]["desk"] - limits[1]["desk"] == GB
    assert limits[0]["laptop"] == limits[1]["laptop"]


def test_without_a_named_head_it_is_the_best_one_that_has_the_draft():
    question = ask(Wishes(links=("1Gbit/s,1ms",)), [device("desk"), device("laptop", rate=10e9)], (), model())
    draft = PlannedDraft(path="small.gguf", model=SMALL, memory_bytes=GB)
    assert explain(replace(question, draft=draft)).head == explain(question).head
