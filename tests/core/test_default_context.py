"""Without ``--context`` a plan has the context that agents need, unless that costs streaming or half of the speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from halda import DeviceProfile, search
from primad.gguf.shapes import shape
from primad.planning.default_context import SMALL_CONTEXT_TOKENS, too_small_for
from primad.planning.explain import best_plan, explain
from primad.planning.fit import _fit
from primad.planning.question import Question, ask
from primad.planning.table import render
from primad.planning.whatif import change
from primad.profiler.fleets import read_fleet
from tests.core.test_planned_sequences import PlannedHome
from tests.fakes.planning import GB, device, model, wishes

STREAMS = "16384 would have layers read from a disk for every token; --context sets it"
SMALL_GPU = device("desk", ram=64 * GB, vram=int(7.5 * GB))


def question(*devices: DeviceProfile, trained: int = 1 << 15, **changes: Any) -> Question:
    return ask(wishes(**{"objective": "latency", "sequences": 1} | changes), devices, (), model(context_tokens=trained))


@pytest.fixture
def solves(monkeypatch) -> list[int]:
    """The context of each plan that was solved."""
    asked, solve = list[int](), search.solve

    def counted(devices, links, model, work, **more):
        asked.append(work.context_tokens)
        return solve(devices, links, model, work, **more)

    monkeypatch.setattr(search, "solve", counted)
    return asked


@pytest.mark.parametrize(
    ("asked", "tokens", "why", "solved"),
    [
        pytest.param(question(device("desk", ram=64 * GB)), 1 << 15, "all that", [16384], id="has room"),
        pytest.param(question(device("desk", ram=64 * GB), trained=8192), 8192, "all", [8192], id="model has less"),
        pytest.param(question(device("desk", ram=64 * GB), context_tokens=512), 512, "", [512], id="asked for"),
        pytest.param(question(device("desk", ram=7 * GB)), 16384, "32768 would", [16384], id="takes what is free"),
        pytest.param(question(device("desk", ram=6 * GB)), 4096, STREAMS, [4096], id="would stream"),
        pytest.param(question(device("desk", ram=4 * GB)), 16384, "32768 would", [16384], id="streams anyway"),
        pytest.param(question(SMALL_GPU, sequences=2), 16384, "3", [16384, 4096], id="fewer layers on the GPU"),
        pytest.param(
            question(SMALL_GPU, sequences=4), 4096, "16384 would make", [16384, 4096, 4096], id="half as fast"
        ),
    ],
)
def test_the_default_is_what_agents_need_unless_it_costs_streaming_or_half_of_the_speed(
    solves, asked, tokens, why, solved
):
    found = best_plan(asked)
    assert (found.question.workload.context_tokens, solves) == (tokens, solved)
    assert found.why_context.startswith(why)
    assert not found.prediction.short
    small = best_plan(replace(asked, run=replace(asked.run, context_tokens=min(tokens, 4096))))
    assert bool(found.plan.streaming) == bool(small.plan.streaming)
    assert found.prediction.tpot_s <= 2 * small.prediction.tpot_s


@pytest.mark.parametrize(
    "name", ["qwen3-1.7b", "qwen3-8b", "mistral-nemo-12b", "gpt-oss-20b", "glm4.5-air", "llama3-8b"]
)
def test_all_models_that_a_home_runs_have_the_context_that_agents_need(name):
    fleet, profile = read_fleet("mixed-home"), shape(f"{name}-q4k")
    asked_for = wishes(objective="latency", time_limit_s=0.5, head=fleet.devices[0].device)
    assert _fit((name, ask(asked_for, fleet.devices, fleet.links, profile))).context_tokens >= min(
        16384, profile.context_tokens
    )


@pytest.mark.parametrize("ram", [64 * GB, 7 * GB, 6 * GB, 4 * GB])
async def test_serve_plan_fit_and_what_if_choose_the_same(monkeypatch, tmp_path, ram):
    planned_home = PlannedHome(monkeypatch, tmp_path, ram=ram, trained=16384, objective="latency", sequences=1)
    served, _ = await planned_home.plan()
    assert (await planned_home.plan(served=served))[0].context_tokens == served.context_tokens
    asked = question(device("desk", ram=ram), trained=16384)
    other = change(question(device("desk", ram=GB), trained=16384), [f"ram:desk={ram}B"], lambda _: ())
    planned = explain(asked)
    assert planned.workload.context_tokens == explain(other, ["more"], asked).workload.context_tokens
    assert (planned.workload.context_tokens, planned.workload.why_context) == (
        served.context_tokens,
        served.why_context,
    )
    assert _fit(("toy", asked)).context_tokens == served.context_tokens
    windows = PlannedHome(
        monkeypatch, tmp_path, ram=ram, trained=16384, objective="latency", windows=(19,), sequences=1
    )
    assert (await windows.plan())[0].context_tokens == served.context_tokens


async def test_a_context_that_was_small_grows_when_devices_come_that_have_room(monkeypatch, tmp_path):
    planned_home = PlannedHome(monkeypatch, tmp_path, ram=6 * GB, laptop=64 * GB, trained=16384, sequences=1)
    alone, _ = await planned_home.plan()
    both, _ = await planned_home.plan(frozenset({"lap"}), alone)
    assert (alone.context_tokens, both.context_tokens) == (SMALL_CONTEXT_TOKENS, 16384)
    asked = PlannedHome(
        monkeypatch, tmp_path, ram=6 * GB, laptop=64 * GB, trained=16384, sequences=1, context_tokens=4096
    )
    assert (await asked.plan(frozenset({"lap"}), alone))[0].context_tokens == 4096


@pytest.mark.parametrize(
    ("context", "trained", "printed"),
    [
        (32768, 32768, ""),
        (16384, 32768, "Claude Code (20,000 tokens) does not fit: type --context 32768"),
        (16384, 24576, "Claude Code (20,000 tokens) does not fit: type --context 24576"),
        (8192, 8192, "Claude Code (20,000 tokens) does not fit: the model was trained with 8192 tokens"),
        (
            4096,
            8192,
            "Codex (6,415 tokens) and Open WebUI with tools (6,640 tokens) do not fit: type --context 8192; "
            "Claude Code (20,000 tokens) does not fit: the model was trained with 8192 tokens",
        ),
        (
            4096,
            131072,
            "Codex (6,415 tokens), Open WebUI with tools (6,640 tokens) and Claude Code (20,000 tokens) do not fit: "
            "type --context 32768",
        ),
    ],
)
def test_clients_that_do_not_fit_are_named_with_what_they_need_and_what_to_type(context, trained, printed):
    assert too_small_for(context, model(context_tokens=trained)) == printed


def test_plan_names_clients_that_do_not_fit_unless_the_context_was_set():
    def shown(asked: Question) -> str:
        console = Console(width=160)
        with console.capture() as captured:
            console.print(render(explain(asked), 160))
        return captured.get()

    desk = device("desk", ram=6 * GB)
    assert "type --context 32768" in shown(question(desk))
    assert "do not fit" not in shown(question(desk, context_tokens=4096))
