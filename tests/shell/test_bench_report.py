"""The report has every figure that a bench judges, what is wanted of it, and what falls short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primad.errors import EngineError
from tools.lab.report import BEGIN, END, PAGE, into_page, report

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


def write(folder: Path, bench: str, rows: list[dict[str, object]], busy: float = 0.0) -> None:
    content = {"bench": bench, "machine": {"busy_share_before": busy}, "rows": rows, "run": RUN}
    (folder / f"{bench}.json").write_text(json.dumps(content))


def ring_row(processes: int, *ratios: float) -> dict[str, object]:
    return {
        "model": "tiny",
        "processes": processes,
        "decode_ratios": list(ratios),
        "prefill_ratios": [1.0] if ratios else [],
    }


def test_a_figure_has_its_spread_and_what_falls_short_is_bold(tmp_path):
    write(tmp_path, "ring", [ring_row(1), ring_row(1, 0.9, 0.8, 1.1), ring_row(2, 0.7)])
    write(tmp_path, "solve", [{"devices": 4, "solved_s": [0.5, 2.0, 0.6]}, {"devices": 64, "solved_s": []}], busy=0.5)
    write(
        tmp_path,
        "speculate",
        [{"case": "far"}, {"what": "far: tokens/s", "value": 2.5, "at_least": 2.0, "at_most": None}],
    )
    write(tmp_path, "serve", [{"what": "ring of three", "value": 0.7, "at_least": 0.9}])
    made = report(tmp_path, ["memory"])
    assert (
        "| tiny, 1 local processes, of plain llama.cpp at its best setting: decode | **0.9** | 0.8 | 1.1 | at least 0.98 |"
        in made
    )
    assert "of plain llama.cpp at its best setting: decode | 0.7 | 0.7 | 0.7 |  |" in made
    assert "| a plan for 4 devices: s of a processor | 0.6 | 0.5 | 2 | at most 1 |" in made
    assert "| far: tokens/s | 2.5 | 2.5 | 2.5 | at least 2 |" in made
    assert "| ring of three | **0.7** | 0.7 | 0.7 | at least 0.9 |" in made
    assert "2026-11-26, commit abc1234" in made
    assert "the machine was 50% busy before" in made
    assert made.endswith("Failed: memory.")
    assert "<svg" in (tmp_path / "ratios.svg").read_text()


def test_the_report_takes_the_place_of_the_last_one():
    once = into_page(f"before\n{BEGIN}\nold\n{END}\nafter\n", "new")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert into_page(once, "newer") == once.replace("new", "newer")
    assert into_page(PAGE.read_text(), "x").count(BEGIN) == 1
    with pytest.raises(EngineError, match=r"has no marks"):
        into_page("nothing here", "new")
