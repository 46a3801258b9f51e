"""``tools/bench all``: all benches in turn, and a report of their figures.

    tools/bench all [--quick] [--only BENCH ...] [--folder FOLDER] [--report]

Each bench runs by itself and writes its figures as JSON and its output as text to ``--folder`` (docs/benchmarks). With
``--report`` they become docs/benchmarks/report.md: every figure with its spread, its target, and the machine on which
it was measured. With ``--keep``, benches with existing figures are not run again. A failing bench is named in the
report, and the command fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tools.lab.figures import ROOT, Figure, out, read_figures
from tools.lab.harness import Bench
from tools.lab.pages import between

FOLDER: Final = ROOT / "docs" / "benchmarks"
PAGE: Final = FOLDER / "report.md"
BEGIN: Final = "<!-- the figures of tools/bench all: made by --report, replaced up to the end mark -->"
END: Final = "<!-- end of the figures of tools/bench all -->"


def add_all(benches: argparse._SubParsersAction[argparse.ArgumentParser], known: Mapping[str, Bench]) -> None:
    """Add ``all`` to the command line."""
    names = [name for name, bench in known.items() if bench.all_quick is not None]
    one = benches.add_parser("all", help="one bench after the other, and a report")
    one.add_argument("--quick", action="store_true", help="few runs of small models (minutes, not hours)")
    one.add_argument("--only", choices=names, nargs="+", default=names)
    one.add_argument("--folder", type=Path, default=FOLDER, help="for figures and texts (default: docs/benchmarks)")
    one.add_argument("--keep", action="store_true", help="figures that are there already are not measured again")
    one.add_argument("--report", action="store_true", help="write docs/benchmarks/report.md")


def run_all(options: argparse.Namespace, benches: Mapping[str, Bench]) -> int:
    """Run the benches that the command line requests, and report them."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only:
        kept, text = folder / f"{name}.json", folder / f"{name}.txt"
        if options.keep and kept.is_file():
            continue
        kept.unlink(missing_ok=True)
        arguments = (benches[name].all_quick or ()) if options.quick else ()
        out.print(f"{name}: {shlex.join(arguments) or 'whole'} ...")
        start = time.monotonic()
        command = [sys.executable, str(ROOT / "tools" / "bench.py"), name, *arguments, "--json", str(kept)]
        environ = os.environ | {"COLUMNS": "140", "NO_COLOR": "1"}
        with text.open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=ROOT, check=False)
        text.write_text(text.read_text(errors="replace").replace(f"{ROOT}/", "").replace(tempfile.gettempdir(), ""))
        if done.returncode or not kept.is_file():
            failed.append(name)
        how = "failed, see its text" if name in failed else "done"
        out.print(f"{name}: {how} after {time.monotonic() - start:.0f} s")
    if options.report:
        made = report(folder, benches, failed)
        PAGE.write_text(between(PAGE.read_text(), BEGIN, END, f"\n\n{made}\n\n"))
        out.print("docs/benchmarks/report.md has the report")
    return int(bool(failed))


def report(folder: Path, names: Iterable[str], failed: Sequence[str]) -> str:
    """Return the report of the figures in ``folder``, in Markdown."""
    lines = list[str]()
    for name in names:
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        content = json.loads(path.read_text())
        run, figures = content["run"], read_figures(content)
        lines += [f"### `{run['command']}`", ""]
        busy = content["machine"].get("busy_share_before", 0.0)
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
    return "\n".join(lines).rstrip()


def _line(figure: Figure) -> str:
    shown = f"{figure.value:.3g}"
    value = shown if figure.holds else f"**{shown}**"
    return f"| {figure.what} | {value} | {min(figure.values):.3g} | {max(figure.values):.3g} | {figure.wanted} |"
