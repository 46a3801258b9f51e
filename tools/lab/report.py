"""``tools/bench all``: one bench after the other, and a report of all that they judge.

    tools/bench all [--quick] [--only BENCH ...] [--folder FOLDER] [--report]

Each bench runs by itself and writes its figures as JSON and what it prints as text to ``--folder`` (docs/benchmarks). With
``--report`` they become docs/benchmarks/report.md, with a picture of the ratios: every figure with its
spread, what is wanted of it, and what it was measured on. A bench whose figures are there already is not run again with
``--keep``. One that fails is named in the report, and the command fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from primad import __version__
from primad.errors import EngineError
from primad.profiler.processors import cpu_name
from tools.lab.served import by_round

ROOT: Final = Path(__file__).parent.parent.parent
SMALL: Final = ROOT / ".models" / "smollm2-135m-q4_1.gguf"
FOLDER: Final = ROOT / "docs" / "benchmarks"
PAGE: Final = FOLDER / "report.md"
BEGIN: Final = "<!-- the figures of tools/bench all: made by --report, replaced up to the end mark -->"
END: Final = "<!-- end of the figures of tools/bench all -->"

out = Console(highlight=False)
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One that is judged: the median of ``values``, which should be at least or at most so much, where anything is said.

    ``is_ratio``: times what stood beside it in the same run; others have their unit in ``what``.
    """

    what: str
    values: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None
    is_ratio: bool = True

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def holds(self) -> bool:
        """Whether it is as wanted."""
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    @property
    def wanted(self) -> str:
        """In words."""
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return "" if self.at_most is None else f"at most {self.at_most:g}"


def _ring(rows: Rows) -> Iterator[Figure]:
    for row in rows:
        if row["decode_ratios"]:
            minimum = 0.98 if row["processes"] == 1 else None
            name = f"{row['model']}, {row['processes']} local processes, of plain llama.cpp at its best setting"
            yield Figure(what=f"{name}: decode", values=tuple(row["decode_ratios"]), at_least=minimum)
            yield Figure(what=f"{name}: prefill", values=tuple(row["prefill_ratios"]))


def _memory(rows: Rows) -> Iterator[Figure]:
    for row in rows:
        name = f"{row['model']} with {row['limit_share']:g} of its memory"
        yield Figure(what=f"{name}: tokens/s, of plain llama.cpp", values=tuple(row["ratios"]), at_least=1.0)
        if row["read_ratio"] is not None:
            yield Figure(what=f"{name}: bytes read, of the plan's", values=(row["read_ratio"],), at_most=1.05)


def _predict(rows: Rows) -> Iterator[Figure]:
    for what, key, maximum in (("a token", "", 10.0), ("the first token", "first_", 15.0)):
        errors = [100 * abs(row[f"predicted_{key}ms"] / row[f"measured_{key}ms"] - 1) for row in rows]
        yield Figure(
            what=f"{what}, predicted: % off, {len(errors)} cases", values=tuple(errors), at_most=maximum, is_ratio=False
        )


def _solve(rows: Rows) -> Iterator[Figure]:
    wanted = {4: 1.0, 16: 5.0, 64: 15.0}
    for row in rows:
        if row["solved_s"]:
            what = f"a plan for {row['devices']} devices: s of a processor"
            yield Figure(what=what, values=tuple(row["solved_s"]), at_most=wanted.get(row["devices"]), is_ratio=False)


def _paper(rows: Rows) -> Iterator[Figure]:
    for row in rows:
        what = f"the paper's token, of ours, at the median of {row['compared']} random fleets"
        yield Figure(what=what, values=(row["median"],), at_least=1.0)


def _judged(rows: Rows) -> Iterator[Figure]:
    """Rows of benches that say themselves what is wanted of what."""
    for row in rows:
        if "at_least" in row:
            yield Figure(
                what=row["what"],
                values=(row["value"],),
                at_least=row["at_least"],
                at_most=row.get("at_most"),
                is_ratio=row.get("is_ratio", True),
            )


def _copies(rows: Rows) -> Iterator[Figure]:
    for row in rows:
        with_, without = row["tokens_per_s"]["with"], row["tokens_per_s"]["without"]
        ratios = tuple(by_round(with_, without))
        yield Figure(what="KV cells kept twice: tokens/s, of once", values=ratios, at_least=0.98)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One bench with its arguments, those of a quick run, and how its rows are read."""

    quick: tuple[str, ...]
    read: Callable[[Rows], Iterator[Figure]]
    full: tuple[str, ...] = ()


BENCHES: Final[Mapping[str, Bench]] = {
    "ring": Bench(quick=("--quick", "--model", str(SMALL)), read=_ring),
    "memory": Bench(quick=("--quick",), read=_memory),
    "api": Bench(quick=("--rounds", "3"), read=_judged),
    "serve": Bench(quick=("--rounds", "1", "--model", str(SMALL), "--streams", "1", "4"), read=_judged),
    "speculate": Bench(
        quick=("--case", "two", "streams", "--way", "as served", "--rounds", "1", "--tokens", "64"), read=_judged
    ),
    "copies": Bench(quick=("--rounds", "3"), read=_copies),
    "experts": Bench(quick=("--rounds", "1", "--experts", "2", "6"), read=_judged),
    "predict": Bench(quick=("--rounds", "1", "--model", str(SMALL)), read=_predict),
    "solve": Bench(quick=("--sizes", "2", "4", "8", "--fleets", "5"), read=_solve),
    "paper": Bench(quick=("--fleets", "50"), read=_paper),
}


def run_all(options: argparse.Namespace) -> int:
    """Run what the command line asks for, and report it."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only:
        bench, kept = BENCHES[name], folder / f"{name}.json"
        if options.keep and kept.is_file():
            continue
        kept.unlink(missing_ok=True)
        arguments = bench.quick if options.quick else bench.full
        out.print(f"{name}: {shlex.join(_without_folders(arguments)) or 'whole'} ...")
        start = time.monotonic()
        command = [sys.executable, str(ROOT / "tools" / "bench.py"), name, *arguments, "--json", str(kept)]
        environ = os.environ | {"COLUMNS": "140", "NO_COLOR": "1"}
        with (folder / f"{name}.txt").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environ, check=False).returncode
        text = folder / f"{name}.txt"
        text.write_text(text.read_text(errors="replace").replace(f"{ROOT}/", "").replace(tempfile.gettempdir(), ""))
        if kept.is_file():
            content = json.loads(kept.read_text())
            content["run"] = _facts(name, arguments)
            kept.write_text(json.dumps(content, indent=1) + "\n")
        if code or not kept.is_file():
            failed.append(name)
        out.print(
            f"{name}: {'failed, see its text' if name in failed else 'done'} after {time.monotonic() - start:.0f} s"
        )
    if options.report:
        made = report(folder, failed)
        PAGE.write_text(into_page(PAGE.read_text(), made))
        out.print("docs/benchmarks/report.md has the report")
    return int(bool(failed))


def report(folder: Path, failed: Sequence[str]) -> str:
    """The report of the figures in ``folder``, in Markdown; draws the picture of the ratios beside them."""
    lines, ratios = [], []
    for name, bench in BENCHES.items():
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        content = json.loads(path.read_text())
        run, machine = content["run"], content["machine"]
        figures = list(bench.read(content["rows"]))
        ratios += [each for each in figures if each.is_ratio]
        lines += [f"### `{run['command']}`", ""]
        busy = machine.get("busy_share_before", 0.0)
        beside = f"; the machine was {busy:.0%} busy before" if busy > 0.1 else ""
        lines += [
            f"{run['day']}, commit {run['commit']}, primad {run['primad']}, llama-cpp-python {run['llama_cpp']}, Python "
            f"{run['python']}, {run['system']}, {run['cpu']} with {run['cores']} cores{beside}. "
            f"[Figures]({name}.json), [what it printed]({name}.txt).",
            "",
            "| figure | median | from | to | wanted |",
            "|---|---|---|---|---|",
        ]
        lines += [_line(figure) for figure in figures]
        lines += [""]
    if failed:
        lines += [f"Failed: {', '.join(failed)}.", ""]
    if ratios:
        draw(ratios, folder / "ratios.svg")
        lines = ["![Each ratio and what is wanted of it](ratios.svg)", "", *lines]
    return "\n".join(lines).rstrip()


def into_page(page: str, made: str) -> str:
    """``page`` with the report in its place, which marks show."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    if not rest or not tail:
        raise EngineError("docs/benchmarks/report.md: has no marks for the report")
    return f"{head}{BEGIN}\n\n{made}\n\n{END}{tail}"


def draw(figures: Sequence[Figure], path: Path) -> None:
    """A bar a ratio from its least to its most run, a dot at the median, and a mark at what is wanted."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure as Picture

    rcParams["svg.hashsalt"] = "primad"
    picture = Picture(figsize=(11, 0.8 + 0.26 * len(figures)), layout="constrained")
    axes = picture.subplots()
    for place, each in enumerate(reversed(figures)):
        colour = "tab:green" if each.holds else "tab:red"
        axes.plot([min(each.values), max(each.values)], [place, place], color=colour, linewidth=4, alpha=0.4)
        axes.plot(each.value, place, "o", color=colour)
        bound = each.at_least if each.at_least is not None else each.at_most
        if bound is not None:
            axes.plot(bound, place, "|", color="black", markersize=12)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(figures)), [each.what for each in reversed(figures)], fontsize=7)
    axes.set_title("Ratios to what stood beside in the same run; | is wanted", fontsize=9)
    picture.savefig(path, metadata={"Date": None})


def _line(figure: Figure) -> str:
    shown = f"{figure.value:.3g}"
    value = shown if figure.holds else f"**{shown}**"
    return f"| {figure.what} | {value} | {min(figure.values):.3g} | {max(figure.values):.3g} | {figure.wanted} |"


def _facts(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = (
        " with changes"
        if git("status", "--porcelain", "--untracked-files=no", "--", "primad", "solver", "tools")
        else ""
    )
    return {
        "command": shlex.join(("./tools/bench", name, *_without_folders(arguments))),
        "day": time.strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "--short", "HEAD") + changed,
        "primad": __version__,
        "llama_cpp": version("llama-cpp-python"),
        "python": platform.python_version(),
        "system": platform.system(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
    }


def _without_folders(arguments: Sequence[str]) -> list[str]:
    return [each.removeprefix(f"{ROOT}/") for each in arguments]


def add_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``all`` to the command line."""
    one = benches.add_parser("all", help="one bench after the other, and a report")
    one.add_argument("--quick", action="store_true", help="few runs of small models (minutes, not hours)")
    one.add_argument("--only", choices=list(BENCHES), nargs="+", default=list(BENCHES))
    one.add_argument("--folder", type=Path, default=FOLDER, help="for figures and texts (default: docs/benchmarks)")
    one.add_argument(
        "--keep", action="store_true", help="figures that are in the folder already are not measured again"
    )
    one.add_argument("--report", action="store_true", help="write docs/benchmarks/report.md")
    one.set_defaults(run=run_all)
