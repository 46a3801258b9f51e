"""What all benches share: turns, options, exit codes and result files."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import pytest

from tools.lab import figures, harness
from tools.lab.figures import Compared, Figure, Row, read_file
from tools.lab.harness import Bench, Run, add_bench, execute, flag
from tools.lab.names import LabError


@dataclass(kw_only=True)
class Turns(Row):
    system: str
    rounds: list[int]
    failed: bool = False

    def cells(self):
        return {"system": self.system, "rounds": str(self.rounds)}

    def failures(self):
        return ["nothing holds"] if self.failed else []

    @classmethod
    def figures(cls, rows):
        for row in rows:
            yield Figure(what=row.system, values=tuple(row.rounds), at_most=1.5)


async def measure(run: Run, model: None) -> None:
    order: list[tuple[str, int]] = []

    async def turn(number: int, system: str) -> int:
        order.append((system, number))
        return number

    found = await run.alternate({system: lambda number, system=system: turn(number, system) for system in "ab"})
    assert order == [(system, number) for number in range(run.options.rounds + 1) for system in "ab"]
    for system, rounds in found.items():
        run.add(Turns(system=system, rounds=rounds, failed=run.options.fails))
    if run.options.ends:
        raise LabError("no cgroups")


BENCH = Bench(
    help="turns",
    measure=measure,
    models=None,
    quick={"rounds": 1},
    flags=(flag("--fails", action="store_true"), flag("--ends", action="store_true")),
)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(figures, "machine", lambda: {"busy_share_before": 0.0})
    monkeypatch.setattr(figures, "run_facts", lambda _: {"day": "2026-11-28", "commit": "abc1234"})


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers(dest="bench"), "turns", BENCH)
    return parser.parse_args(["turns", *words])


def test_systems_take_turns_and_the_first_round_does_not_count(tmp_path, capsys):
    saved = tmp_path / "turns.json"
    assert execute("turns", BENCH, options("--rounds", "2", "--json", str(saved))) == 0
    content = read_file(saved)
    assert [row["rounds"] for row in content["rows"]] == [[1, 2], [1, 2]]
    assert content["figures"][0] == {
        "what": "a",
        "values": [1, 2],
        "at_least": None,
        "at_most": 1.5,
        "value": 1.5,
    }
    assert "a: 1.5 (1 to 2) (wanted: at most 1.5)" in capsys.readouterr().out


def test_the_command_fails_for_a_failed_row_and_for_an_early_end_and_saves_the_rows_so_far(tmp_path, capsys):
    saved = tmp_path / "turns.json"
    assert execute("turns", BENCH, options("--rounds", "1", "--fails")) == 1
    assert execute("turns", BENCH, options("--rounds", "1", "--ends", "--json", str(saved))) == 1
    assert len(json.loads(saved.read_text())["rows"]) == 2
    assert "tools/bench turns: error: no cgroups" in capsys.readouterr().err


def test_figures_are_shown_next_to_saved_ones_of_the_same_name(tmp_path, capsys):
    saved = tmp_path / "turns.json"
    execute("turns", BENCH, options("--rounds", "1", "--json", str(saved)))
    execute("turns", BENCH, options("--rounds", "2", "--against", str(saved)))
    assert "a: 1, now 1.5 (+50.0%)" in capsys.readouterr().out
    saved.write_text("{}")
    with pytest.raises(LabError, match=r"turns\.json: is no file that tools/bench --json wrote"):
        execute("turns", BENCH, options("--against", str(saved)))


async def test_resources_of_a_part_end_with_it_and_the_others_stay(tmp_path):
    its = Run("turns", BENCH, options())
    async with its.stack:
        whole = its.folder(tmp_path)
        async with its.part():
            part = its.folder(tmp_path)
            assert part.is_dir()
        assert not part.exists()
        assert whole.is_dir()


def test_a_synthetic_model_is_called_by_its_preset(monkeypatch):
    monkeypatch.setattr(harness.synthetic, "write", lambda path, preset: path)
    names = [harness.model_named(name).name for name in ("1b-q4k", harness.SMALL)]
    assert names == ["synthetic-1b-q4_k.gguf", f"{harness.SMALL}.gguf"]


def test_a_table_shows_the_columns_of_a_row_by_their_format():
    class Sizes(Row):
        columns = "name, held_bytes=held MB:MB, first_s=first ms:ms, rates=tok/s:.1f, windows=windows:+, lag=behind:.0f"

    row = Sizes(name="desk", held_bytes=12_300_000, first_s=0.25, rates=[9.0, 7.0, 8.0], windows=[9, 21], lag=None)
    assert row.cells() == {
        "name": "desk",
        "held\nMB": "12",
        "first\nms": "250",
        "tok/s": "8.0",
        "windows": "9+21",
        "behind": "-",
    }


def test_a_comparison_is_judged_by_the_ratios_of_its_runs_and_fails_if_texts_differ():
    row = Compared(
        model="m", case="mtp", devices=2, what="tokens/s", found=[5.0, 30.0], beside=[10.0, 20.0], at_least=1.6
    )
    assert list(Compared.figures([row])) == [
        Figure(what="m, mtp, 2 devices: tokens/s", values=(0.5, 1.5), at_least=1.6, at_most=None)
    ]
    assert not row.failures()
    row.is_same = False
    assert row.failures() == ["mtp, 2 devices, tokens/s: the text DIFFERS"]
