"""Choices settled by another plan are not searched again; a plan that must beat another does, or there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import NotBelow, evaluate, solve
from primad.planning.explain import best_plan, explain, request_of
from primad.planning.plan import search
from primad.planning.question import Question, ask
from primad.planning.request import Settled
from tests.fakes.planning import GB, device, model, wishes

DESK, LAPTOP = device("desk", ram=12 * GB), device("laptop", ram=12 * GB, rate=10e9)


def question(*devices) -> Question:
    return ask(wishes(links=("1Gbit/s,1ms",)), devices or (DESK, LAPTOP), (), model())


def test_a_plan_keeps_settled_choices():
    asked = question()
    best = best_plan(asked).solved.workload
    for rows in (512, 64):
        work = best.with_rows(rows, 512)
        settled = Settled(workload=replace(work, context_tokens=2048), prefill_offload=frozenset())
        found = search(request_of(asked, frozenset({"laptop"}), settled))
        assert found.workload == settled.workload
        assert (found.solution.prediction.chunk_rows, found.solution.prediction.step_rows) == (rows, 512)
        assert "laptop" in found.solution.plan.devices


def test_identical_devices_cost_the_same_when_they_are_left_out():
    slow = [device(name, ram=2 * GB, rate=1e9, disk=0.1e9) for name in ("one", "other")]
    left = {part.name: part for part in explain(question(DESK, *slow)).left_out}
    assert set(left) == {"one", "other"}
    assert left["one"].objective_ms == left["other"].objective_ms
    assert left["one"].slower_ms is not None


@pytest.mark.parametrize("settles", [False, True])
def test_a_plan_that_has_to_take_less_does_or_there_is_none(settles):
    work = question().workload
    best = solve([DESK, LAPTOP], [], model(), work, settles=settles)
    beaten = solve([DESK, LAPTOP], [], model(), work, settles=settles, below_s=best.objective_s * 1.01, other=best)
    assert beaten.objective_s == pytest.approx(best.objective_s)
    with pytest.raises(NotBelow):
        solve([DESK, LAPTOP], [], model(), work, settles=settles, below_s=best.quickest_s * 0.99, other=best)


def test_windows_by_hand_have_the_chunks_that_suit_their_ring():
    asked = question()
    asked = replace(asked, run=replace(asked.run, windows=(10, 9), context_tokens=4096))
    found = best_plan(asked)
    assert found.plan.devices == ("desk", "laptop")
    assert found.prediction.chunk_rows < 512 == found.prediction.step_rows
    whole = evaluate(found.plan, found.question.with_rows(512))
    assert found.objective_s < whole.objective_s(asked.run.objective, found.question.workload.answer_tokens)
