"""Without ``--context`` a plan has as much as agents need, unless that costs streaming or half of the speed; then it says so."""

from __future__ import annotations

import pytest

from halda import DeviceProfile
from primad.gguf.shapes import shape
from primad.planning import explain as explain_module
from primad.planning.default_context import AGENT_CONTEXT_TOKENS, SMALL_CONTEXT_TOKENS, too_small_for
from primad.planning.describe import DescribedPlan
from primad.planning.explain import best_plan, explain
from primad.planning.fit import fit_all
from primad.planning.question import Question, Wishes, ask
from primad.planning.table import render
from primad.planning.whatif import change
from primad.profiler.fleets import read_fleet
from tests.core.test_planned_sequences import House
from tests.fakes.planning import GB, device, model

STREAMS = "16384 would have layers read from a disk for every token; --context sets it"
SMALL_GPU = device("desk", ram=64 * GB, vram=int(7.5 * GB))


def question(*devices: DeviceProfile, trained: int = 1 << 15, **wishes: object) -> Question:
    return ask(Wishes(objective="latency", **wishes), devices, (), model(context_tokens=trained))


@pytest.fixture
def solves(monkeypatch) -> list[int]:
    """The context of each plan that was solved for."""
    asked, solve = list[int](), explain_module.solve

    def counted(devices, links, model, work, **more):
        asked.append(work.context_tokens)
        return solve(devices, links, model, work, **more)

    monkeypatch.setattr(explain_module, "solve", counted)
    return asked


@pytest.mark.parametrize(
    ("asked", "tokens", "why", "solved"),
    [
        pytest.param(question(device("desk", ram=64 * GB)), 1 << 15, "all that", [4096], id="has room"),
        pytest.param(
            question(device("desk", ram=64 * GB), trained=8192), 8192, "all that", [4096], id="model has less"
        ),
        pytest.param(question(device("desk", ram=64 * GB), context=512), 512, "", [512], id="asked for"),
        pytest.param(
            question(device("desk", ram=int(7 * GB))), 1 << 14, "32768 would", [4096], id="takes what is free"
        ),
        pytest.param(question(device("desk", ram=6 * GB)), 4096, STREAMS, [4096], id="would stream"),
        pytest.param(question(device("desk", ram=4 * GB)), 1 << 14, "32768 would", [4096, 16384], id="streams anyway"),
        pytest.param(question(SMALL_GPU, sequences=2), 1 << 14, "", [4096, 16384], id="fewer layers on the GPU"),
        pytest.param(question(SMALL_GPU, sequences=4), 4096, "16384 would make", [4096, 16384], id="half as fast"),
    ],
)
def test_the_default_is_what_agents_need_unless_it_costs_streaming_or_half_of_the_speed(
    solves, asked, tokens, why, solved
):
    found = best_plan(asked)
    assert (found.instance.workload.context_tokens, solves) == (tokens, solved)
    assert found.why_context.startswith(why)
    assert not found.prediction.short
    if tokens < 8192:
        return
    small = best_plan(question(*asked.devices, sequences=asked.workload.sequences, context=SMALL_CONTEXT_TOKENS))
    assert bool(found.plan.streaming) <= bool(small.plan.streaming)
    assert found.prediction.tpot_s <= 2 * small.prediction.tpot_s
