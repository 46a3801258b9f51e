"""The ranking of models, and which are marked as best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from primad.cli.encoders import encoder_of_model_shape
from primad.cli.fit import next_commands
from primad.gguf.projectors import BESIDE_BYTES, SEE
from primad.gguf.shapes import popular_shapes, read_shape, shape
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


def test_well_known_models_that_see_say_so_and_their_encoders_take_memory_of_the_head():
    desk = planning.device("desk", ram=4 * GB)
    asked = ask(planning.wishes(context_tokens=4096, time_limit_s=0.3), [desk], [], shape("gemma3-4b-q4k"))
    encoder = encoder_of_model_shape("gemma3-4b-q4k")
    seeing = replace(asked, encoder=encoder)
    plain, found = fit_all([("plain", asked), ("gemma", seeing)], processes=1).models
    if plain.sees:
        plain, found = found, plain
    assert (plain.sees, found.sees, found.hears) == (False, True, False)
    assert (plain.runs, found.runs) == ("memory", "disk")
    assert encoder is not None
    assert encoder.memory_bytes > 848e6 + BESIDE_BYTES


def test_every_well_known_model_of_an_architecture_that_sees_has_an_encoder():
    popular = {name: read_shape(name) for name in popular_shapes()}
    assert not [name for name, each in popular.items() if each.architecture in SEE and each.encoder is None]
    assert encoder_of_model_shape("qwen3-8b") is encoder_of_model_shape("nobody-8b") is None


def test_the_fastest_device_is_head_where_another_has_more_memory():
    roomy, fast = planning.device("roomy", ram=64 * GB), planning.device("fast", ram=16 * GB, vram=12 * GB)
    asked_for = planning.wishes(objective="latency", time_limit_s=0.3)
    answer = fit_all([("toy", ask(asked_for, [roomy, fast], [], planning.model()))], processes=1)
    assert answer.models[0].devices[0] == "fast"
