"""The gain of a draft model for a plan, and the memory that the plan leaves for it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from halda import Plan, residency
from primad.head.rings.status import draft_place_line
from primad.planning.corrections import NOTHING_LEARNT
from primad.planning.draft_gain import SHARES, best_gain, draft_gain, no_room
from primad.planning.explain import best_plan, explain
from primad.planning.forecast import Forecast
from primad.planning.question import PlannedDraft, Wishes, ask
from primad.planning.run_config import RunConfig
from primad.planning.table import show
from primad.ring.speculation.drafter import Drafting
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


def test_rows_in_one_step_gain_the_time_that_the_step_saves_over_single_rows():
    cheap, dear = (gain(Drafting(rows=4, costs=costs)) for costs in ((1, 1.1, 1.2, 1.3), (1, 1.9, 2.8, 3.7)))
    assert (cheap.kind, cheap.rows) == ("together", 4)
    assert all(1 <= less < more < 4 for less, more in zip(dear.times, cheap.times, strict=True))


def test_a_plan_without_drafts_gives_the_reason():
    question = asked(device("a", ram=3 * GB, disk=0.3e9))
    layer = replace(question.model.layers[0], kv_bytes_per_token=0, state_bytes=1000)
    recurrent = replace(question, model=replace(question.model, layers=(layer,) * 20))
    plan = residency(ALONE, question)
    for asked_for, why in (
        (question, "several tokens in one step are not known to be exact here; --batching fast allows them"),
        (
            recurrent,
            f"layers of {recurrent.model.name} keep a state that llama.cpp cannot roll back for 'llama'; drafts "
            "need several machines with memory to spare",
        ),
    ):
        found = draft_gain(drafting_for(plan, asked_for), plan, asked_for, SMALL)
        assert (found.kind, found.rows, found.why) == ("none", 0, why)


def test_the_gain_is_that_of_what_serve_would_do():
    question = asked(device("a"), device("b"), round_trip_s=0.4)
    drafting = drafting_for(TWO, question)
    assert drafting is not None
    assert draft_gain(drafting, TWO, question, SMALL).rows == drafting.room


def place(*devices, draft=SMALL, round_trip_s: float = 0.001, head_has_room: bool = True) -> str | None:
    question = asked(*devices, round_trip_s=round_trip_s)
    found = best_gain(Drafting(room=4), TWO, question, draft, memory_bytes=GB, head_has_room=head_has_room)
    return None if found is None else found.device


MEDIUM = model(layers=20, layer_bytes=GB // 20)


def test_the_draft_model_runs_on_an_idle_device_if_it_gains_more_there_than_on_the_head():
    a, b = device("a", ram=64 * GB), device("b", ram=64 * GB)
    assert place(a, b) == "a", "nobody else is there"
    assert place(a, b, device("c"), draft=MEDIUM) == "c"
    assert place(a, b, device("c", rate=10e9), device("d", rate=80e9), draft=MEDIUM) == "d"
    assert place(a, b, device("c", rate=2e9), draft=MEDIUM) == "a", "it is too slow"
    assert place(a, b, device("c", ram=GB // 2), draft=MEDIUM) == "a", "it has no room"
    assert place(a, b, device("c", host="b"), draft=MEDIUM) == "a", "its machine computes layers"
    assert place(a, b, device("c"), draft=MEDIUM, round_trip_s=1.0) == "a", "it is too far away"
    assert place(a, b, device("c")) == "a", "the head drafts as fast as the ring has room for"


def test_a_quicker_device_of_the_ring_drafts_if_the_plan_leaves_it_room():
    a = device("a", ram=64 * GB, rate=5e9)
    assert place(a, device("b", ram=64 * GB, rate=80e9), draft=MEDIUM) == "b"
    assert place(a, device("b", ram=int(2.5 * GB), rate=80e9), draft=MEDIUM) == "a"


def test_if_the_head_has_no_room_any_device_with_room_drafts_however_little_it_gains():
    a, b = device("a", ram=64 * GB), device("b", ram=64 * GB)
    assert place(a, b, device("c", rate=2e9), draft=MEDIUM, head_has_room=False) == "b"
    small = device("b", ram=int(2.5 * GB))
    assert place(a, small, device("c", rate=2e9), draft=MEDIUM, head_has_room=False) == "c"
    assert place(a, small, device("c", ram=GB // 2), head_has_room=False) is None


def test_drafts_of_another_device_arrive_later_by_a_round_trip():
    question = asked(device("a"), device("b"), device("c"), round_trip_s=0.05)
    own, other = (draft_gain(Drafting(room=4), TWO, question, SMALL, name) for name in ("a", "c"))
    assert other.token_s == pytest.approx(own.token_s / 2), "it has all of its processor for it"
    assert all(1 <= late < early for late, early in zip(other.times, own.times, strict=True))


def test_the_plan_shows_the_device_of_the_draft_model():
    devices = [device("desk", ram=4 * GB), device("laptop", ram=6 * GB)]
    question = ask(Wishes(links=("1Gbit/s,1ms",), head="desk"), devices, (), model())
    answer = explain(replace(question, draft=PlannedDraft(path="small.gguf", model=SMALL, memory_bytes=GB)))
    assert answer.draft is not None
    assert answer.draft.device in ("desk", "laptop")
    shown = io.StringIO()
    show(answer, Console(width=200, file=shown))
    assert f"of {answer.draft.device} and" in shown.getvalue()


def test_the_draft_line_of_a_group_names_the_device_of_the_model_and_its_partners():
    devices, run = (
        [device("desk"), device("laptop")],
        RunConfig(parallel="tensor", batching="fast", context_tokens=4096),
    )
    question = ask(Wishes(run=run, links=("1Gbit/s,0.1ms",), head="desk"), devices, (), model())
    draft = PlannedDraft(path="small.gguf", model=SMALL, memory_bytes=GB)
    answer = explain(replace(question, draft=draft, max_ranks=2))
    shown = io.StringIO()
    show(answer, Console(width=300, file=shown))
    assert "toy takes 1.00 GB of desk, which shares layers with laptop and" in " ".join(shown.getvalue().split())
    planned = best_plan(replace(question, draft=draft, max_ranks=2))
    for drafted, line in (
        (planned, "drafts on desk, which shares layers with laptop"),
        (replace(planned, draft_device=None), f"is not used: {no_room(GB)}"),
    ):
        assert draft_place_line(Forecast.of_planned(drafted, NOTHING_LEARNT), GB) == line


def test_the_plan_leaves_the_head_room_for_the_draft_model():
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


def test_a_plan_whose_head_has_no_room_places_the_draft_model_elsewhere_or_reports_the_memory_it_needs():
    both, third = [device("desk", ram=4 * GB), device("laptop", ram=4 * GB)], device("box", ram=8 * GB, rate=0.2e9)
    printed = []
    for devices in (both, [*both, third]):
        question = ask(Wishes(links=("1Gbit/s,1ms",), head="desk"), devices, (), model())
        answer = explain(replace(question, draft=PlannedDraft(path="small.gguf", model=SMALL, memory_bytes=5 * GB)))
        shown = io.StringIO()
        show(answer, Console(width=300, file=shown))
        printed.append(shown.getvalue())
    assert "toy is not used: no device has 5.00 GB of memory for it besides its layers; choose a smaller" in printed[0]
    assert "toy takes 5.00 GB of box and" in printed[1]


def test_without_a_named_head_it_is_the_best_one_that_has_the_draft():
    question = ask(Wishes(links=("1Gbit/s,1ms",)), [device("desk"), device("laptop", rate=10e9)], (), model())
    draft = PlannedDraft(path="small.gguf", model=SMALL, memory_bytes=GB)
    assert explain(replace(question, draft=draft)).head == explain(question).head
