"""Which models are shown first, and which are marked."""

from __future__ import annotations

from typing import Any

from primad.cli.fit import next_commands
from primad.planning.fit import BEST, SCHEMA, Fit, FitResult, fit_all, ranked
from primad.planning.question import ask
from tests.fakes import planning
from tests.fakes.planning import GB


def fit(name: str, size: int, tokens_per_s: float = 0.0, **more: Any) -> Fit:
    runs = more.pop("runs", "memory" if tokens_per_s else "no")
    return Fit(name=name, model=name, bytes=size, runs=runs, why="", tokens_per_s=tokens_per_s, **more)


def test_the_largest_that_write_fast_enough_come_first_and_are_marked():
    models = [fit(f"m{size}", size, 40 / size) for size in range(1, 8)]
    found = ranked([*models, fit("slow", 10, 0.5, runs="disk"), fit("huge", 30), fit("large", 20)])
    assert [each.name for each in found[:7]] == ["m7", "m6", "m5", "m4", "m3", "m2", "m1"]
    assert [each.name for each in found[7:]] == ["slow", "large", "huge"]
    assert [each.name for each in found if each.is_best] == ["m7", "m6", "m5"]
    assert len([each for each in found if each.is_best]) == BEST


def test_nothing_is_marked_where_all_are_too_slow():
    found = ranked([fit("b", 2, 1.0), fit("a", 1, 4.9), fit("c", 3)])
    assert [each.name for each in found] == ["a", "b", "c"]
    assert not any(each.is_best for each in found)


def answer(*fits: Fit) -> FitResult:
    return FitResult(schema=SCHEMA, devices=["desk"], models=ranked(fits), help="")


def test_the_best_rows_end_with_the_commands_to_type_the_best_one_last():
    models = [fit(f"m{size}", size, 40 / size, hub="hf:a/b" if size != 6 else "") for size in range(1, 8)]
    assert next_commands(answer(*models))[1:] == [
        "  primad serve --model hf:a/b",
        "  primad plan --model-shape m6",
        "  primad serve --model hf:a/b",
    ]
    assert next_commands(answer(fit("slow", 9, 0.5, runs="disk", hub="hf:a/b")))[1:] == [
        "  primad serve --model hf:a/b"
    ]
    assert next_commands(answer(fit("huge", 30))) == []


def test_the_fastest_device_is_head_where_another_has_more_memory():
    roomy, fast = planning.device("roomy", ram=64 * GB), planning.device("fast", ram=16 * GB, vram=12 * GB)
    asked_for = planning.wishes(objective="latency", time_limit_s=0.3)
    answer = fit_all([("toy", ask(asked_for, [roomy, fast], [], planning.model()))], processes=1)
    assert answer.models[0].devices[0] == "fast"
