"""The report has every figure that a bench judges, its target, and what falls short."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tools.lab.figures import Figure
from tools.lab.names import LabError
from tools.lab.pages import between
from tools.lab.report import BEGIN, END, PAGE, report

RUN = {
    "command": "./tools/bench ring",
    "day": "2026-11-26",
    "commit": "abc1234",
    "primad": "0.1.0",
    "llama_cpp": "0.3.36",
    "python": "3.11.7",
    "system": "Linux",
    "cpu": "A processor",
    "cores": 2,
}


def write(folder: Path, bench: str, *figures: Figure, busy: float = 0.0) -> None:
    judged = [dataclasses.asdict(each) | {"value": each.value} for each in figures]
    content = {"bench": bench, "machine": {"busy_share_before": busy}, "run": RUN, "figures": judged, "rows": []}
    (folder / f"{bench}.json").write_text(json.dumps(content))


def test_a_figure_has_its_spread_and_is_bold_if_it_falls_short(tmp_path):
    write(
        tmp_path,
        "ring",
        Figure(what="one process: decode", values=(0.9, 0.8, 1.1), at_least=0.98),
        Figure(what="two processes: decode", values=(0.7,)),
    )
    solved = Figure(what="a plan for 4 devices: s of a processor", values=(0.5, 2.0, 0.6), at_most=1.0)
    write(tmp_path, "solve", solved, busy=0.5)
    made = report(tmp_path, ["ring", "memory", "solve"], ["memory"])
    assert "| one process: decode | **0.9** | 0.8 | 1.1 | at least 0.98 |" in made
    assert "| two processes: decode | 0.7 | 0.7 | 0.7 |  |" in made
    assert "| a plan for 4 devices: s of a processor | 0.6 | 0.5 | 2 | at most 1 |" in made
    assert "2026-11-26, commit abc1234" in made
    assert "the machine was 50% busy before" in made
    assert made.endswith("Failed: memory.")


def test_new_text_replaces_the_text_between_the_marks():
    once = between(f"before\n{BEGIN}\nold\n{END}\nafter\n", BEGIN, END, "\n\nnew\n\n")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert between(once, BEGIN, END, "\n\nnewer\n\n") == once.replace("new", "newer")
    assert between(PAGE.read_text(), BEGIN, END, "x").count(BEGIN) == 1
    with pytest.raises(LabError, match=r"has no marks"):
        between("nothing here", BEGIN, END, "new")
