"""The demo shares layers so that a reader sees why, and ends with what can be typed next."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from primad.cli.main import app
from tools import demo


@pytest.mark.parametrize(("layers", "devices"), [(30, 3), (30, 2), (32, 3), (28, 4), (4, 3)])
def test_equal_processes_get_as_many_layers_as_each_other(layers: int, devices: int) -> None:
    head, *others = demo.equal_windows(layers, devices)
    shares = [head + 1, *others]  # the head computes the last layer too
    assert sum(shares) == layers
    assert len(shares) == devices
    assert max(shares) - min(shares) < devices
    assert len(set(others)) == 1


def test_too_few_layers_are_not_shared_by_hand() -> None:
    assert demo.equal_windows(2, 3) == demo.equal_windows(3, 3) == []
    alone = argparse.Namespace(devices=1, model=demo.MODEL)
    assert demo.plan_options(alone) == ["--alone"]


def test_what_to_try_next_is_there_and_can_be_typed() -> None:
    lines = [line.strip().partition("   ")[0] for line in demo.NEXT.splitlines() if line.startswith("  ")]
    commands = [shlex.split(line) for line in lines if line and not line[0].isupper()]
    assert len(commands) >= 4
    for program, *words in commands:
        if Path(program).name == "primad":
            command = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
            command.make_context("primad", words[1:])
        elif "/" in program:
            assert (demo.ROOT / program).is_file(), program
