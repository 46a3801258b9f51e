"""The demo shares layers visibly, and ends with commands to try next."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from primad.cli.main import app
from tools import synth
from tools.lab.demo_plan import NEXT, plan_options

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("layers", "windows"), [(30, "9,10,10"), (7, "2,2,2"), (4, "1,1,1"), (3, None)])
def test_equal_processes_get_as_many_layers_as_each_other(layers: int, windows: str | None, tmp_path: Path) -> None:
    """The head also has the last layer. If there are too few layers, the plan decides but uses all devices."""
    path = tmp_path / "model.gguf"
    synth.write_model(path, layers=layers)
    shared = ["--use-all"] if windows is None else ["--windows", windows, "--rounds", "1"]
    assert plan_options(path, 3) == shared
    assert plan_options(path, 1) == []


def test_the_commands_to_try_next_exist_and_can_be_typed() -> None:
    lines = [line.strip().partition("   ")[0] for line in NEXT.splitlines() if line.startswith("  ") and line[2] != " "]
    commands = [shlex.split(line) for line in lines]
    assert len(commands) >= 4
    for program, *words in commands:
        if Path(program).name == "primad":
            command = app.built.commands[words[0]]
            command.make_context("primad", words[1:])
        else:
            assert (ROOT / program).is_file(), program
