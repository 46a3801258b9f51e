"""One planner: ``primad plan`` prints the plan that ``serve`` forms, for any options."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest

from halda import DeviceProfile, Infeasible, TypeRows
from primad.cli import main as cli
from primad.cli.run_options import DraftOptions, RunOptions, run_config
from primad.errors import ConfigError, PrimadError
from primad.gguf.shapes import shape
from primad.planning.explain import explain
from primad.planning.question import PlannedDraft, Wishes, ask
from primad.planning.run_config import DEFAULT_RUN, MAX_SEQUENCES, RunConfig
from tests.core.test_planned_sequences import PlannedHome
from tests.fakes.planning import GB, device, model, offloading

NAMES = ("desk", "lap", "nas")
LAYERS = 6
DRAFT = PlannedDraft(path="small.gguf", model=model(layers=2, layer_bytes=GB // 40), memory_bytes=GB // 2)


def some_device(chance: random.Random, name: str) -> DeviceProfile:
    vram = chance.choice([0, 0, GB, 3 * GB])
    host = chance.choice([name, name, "one machine"])
    ram = int(chance.choice([0.8, 1.2, 2, 4, 16]) * GB)
    found = device(name, ram=ram, vram=vram, rate=chance.choice([2e9, 20e9, 40e9]), host=host)
    if chance.random() < 0.5:
        exact = tuple(TypeRows(type=speed.type, rows=8, piece_rows=8) for speed in found.cpu.speeds)
        found = replace(found, cpu=replace(found.cpu, exact_rows=exact))
    return offloading(found) if vram and chance.random() < 0.5 else found


def some_run(chance: random.Random, devices: int, *, drafts: bool) -> RunConfig:
    by_hand = chance.random() < 0.15
    return RunConfig(
        objective=chance.choice(["latency", "ttft", "throughput", "balanced"]),
        use_all=not by_hand and chance.random() < 0.3,
        context_tokens=chance.choice([None, None, 1024, 8192]),
        kv_type=chance.choice(["f16", "f16", "q8_0"]),
        sequences=chance.choice([None, None, 1, 3]),
        batching=chance.choice(["auto", "exact", "fast"]),
        prompt_tokens=chance.choice([None, 256]),
        answer_tokens=chance.choice([None, 64]),
        extra_buffers=chance.choice(["auto", "on", "off"]),
        speculate="auto" if drafts else chance.choice(["auto", "lookup", "off"]),
        draft_on=chance.choice([None, *NAMES[:devices]]) if drafts else None,
        windows=(LAYERS - devices, *[1] * (devices - 1)) if by_hand else None,
    )


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(12, 24))]
)
async def test_the_plan_that_plan_prints_is_the_plan_that_serve_forms(seed, monkeypatch, tmp_path):
    chance = random.Random(seed)
    names = NAMES[: chance.choice([1, 2, 2, 3])]
    devices = [some_device(chance, name) for name in names]
    draft = DRAFT if chance.random() < 0.3 else None
    run = some_run(chance, len(devices), drafts=draft is not None)
    toy = model(layers=LAYERS)
    asked = ask(Wishes(run=run, head="desk", time_limit_s=60), devices, (), toy)
    printed = served = None
    with suppress(PrimadError, Infeasible):
        printed = explain(replace(asked, draft=draft))
    left = devices[0].ram_available_bytes - (0 if draft is None else draft.memory_bytes)
    head = devices[0] if left < 0 else replace(devices[0], ram_available_bytes=left)
    here = None if draft is None else replace(draft, head_has_room=left >= 0)
    planned_home = PlannedHome(
        monkeypatch,
        tmp_path,
        ram=0,
        profiles=[head, *devices[1:]],
        toy=toy,
        draft=here,
        **{field.name: getattr(run, field.name) for field in fields(run)},
    )
    with suppress(PrimadError, Infeasible):
        served, _ = await planned_home.plan(frozenset(names[1:]))
    assert (printed is None) == (served is None)
    if printed is None:
        return
    assert [
        (window.index, part.name, window.first, window.last, window.gpu_layers, window.cpu_experts)
        for part in printed.devices
        for window in part.windows
    ] == [
        (i, name, window.first, window.last, window.gpu_layers, window.cpu_experts)
        for name in served.plan.devices
        for i, window in served.plan.windows_of(name)
    ]
    assert [part.name for part in printed.devices if part.prefill_offload] == [
        name for name in served.plan.devices if name in served.plan.prefill_offload
    ]
    work = printed.workload
    assert (work.context_tokens, work.why_context) == (served.context_tokens, served.why_context)
    assert (work.sequences, work.why_sequences) == (served.sequences, served.why_sequences)
    assert work.flash == served.flash
    assert (printed.load is None or printed.load.is_exact) == served.is_exact
    assert printed.rounds == served.plan.rounds
    assert (printed.draft.device if printed.draft and printed.draft.kind != "none" else None) == served.draft_device
    if served.prediction is not None:
        assert printed.chunk_rows == served.prediction.chunk_rows
        assert printed.predicted.tpot_ms == served.prediction.tpot_s * 1e3
        assert printed.predicted.ttft_ms == served.prediction.ttft_s * 1e3


@pytest.mark.parametrize(
    "seed", [0, 9, 105, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(200, 230))]
)
def test_a_plan_in_which_devices_may_share_layers_is_found_or_refused_in_words(seed):
    chance = random.Random(seed)
    names, shared = NAMES[: chance.choice([2, 3, 3])], shape("llama3-8b-q4k")
    devices = [
        replace(some_device(chance, name), ram_available_bytes=int(chance.choice([3, 6, 16]) * GB)) for name in names
    ]
    run = replace(some_run(chance, len(names), drafts=False), parallel=chance.choice(["auto", "auto", "tensor"]))
    run = replace(run, windows=None, context_tokens=chance.choice([None, 1024]))
    with suppress(PrimadError, Infeasible):
        printed = explain(ask(Wishes(run=run, head="desk", time_limit_s=60), devices, (), shared))
        assert sum(window.layers for part in printed.devices for window in part.windows) >= len(shared.layers)


# ---- options ---------------------------------------------------------------------------------------------------------


def options_of(name: str) -> dict[str, Any]:
    (command,) = [each for each in cli.app.built.commands.values() if each.name == name]
    return {param.name: param for param in command.params}


def test_serve_and_plan_have_the_same_options_for_what_a_plan_depends_on():
    served, planned = options_of("serve"), options_of("plan")
    for field in (*fields(RunOptions), *fields(DraftOptions)):
        assert (served[field.name].opts, served[field.name].default) == (
            planned[field.name].opts,
            planned[field.name].default,
        )


def test_options_that_are_not_given_have_the_defaults():
    assert run_config(RunOptions(), DraftOptions()) == DEFAULT_RUN


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objective": "fast"}, "--objective fast: choose latency, ttft, throughput or balanced"),
        ({"kv_type": "q5_1"}, "--kv-type q5_1: choose f16, q8_0 or q4_0"),
        ({"sequences": str(MAX_SEQUENCES + 1)}, f"--sequences {MAX_SEQUENCES + 1}: "),
        ({"batching": "quick"}, "--batching quick: choose exact, auto or fast"),
        ({"extra_buffers": "some"}, "--extra-buffers some: choose auto, on or off"),
        ({"windows": "1,0"}, "--windows 1,0: every window needs at least one layer"),
        ({"rounds": 2}, "--rounds 2: needs --windows"),
        ({"windows": "3", "use_all": True}, "--use-all: contradicts"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_its_name(given, message):
    with pytest.raises(ConfigError) as caught:
        run_config(RunOptions(**given), DraftOptions())
    assert str(caught.value).startswith(message)
