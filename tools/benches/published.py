"""``published``: forecasts of plans compared with what others measured on such devices."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Final

from primad.planning.run_config import PARALLEL_MODES
from tools.lab.figures import ROOT
from tools.lab.harness import Bench, Run, flag
from tools.lab.pages import between
from tools.lab.published import FIGURES, NEAR, Row, by_kind, decode_ratios, prefill_ratios, read_figures, rows

PAGE: Final = ROOT / "docs" / "benchmarks" / "published.md"
BEGIN: Final = "<!-- published -->"
END: Final = "<!-- end of published -->"


async def measure(run: Run, _: None) -> None:
    """Show the forecast for each figure, and medians by kind."""
    found = await asyncio.to_thread(rows, read_figures(run.options.figures), run.options.parallel)
    run.add(*found)
    table = markdown(found)
    run.say(f"{table}\n")
    if run.options.write:
        dated = f"On {date.today().isoformat()}, by `tools/bench published --write`:"
        page = between(PAGE.read_text(encoding="utf-8"), BEGIN, END, f"\n{dated}\n\n{table}\n")
        PAGE.write_text(page, encoding="utf-8")


def markdown(found: Sequence[Row]) -> str:
    """Return the ratios by kind, as ``docs/benchmarks/published.md`` shows them."""
    lines = ["| kind | decode, plan / published | prefill |", "|---|---|---|"]
    for name, its in by_kind(found):
        lines.append(f"| {name} | {_summary(decode_ratios(its))} | {_summary(prefill_ratios(its))} |")
    return "\n".join(lines)


def _summary(ratios: Sequence[float]) -> str:
    """Return the number of ratios, their median and range, and how many are near 1."""
    if not ratios:
        return ""
    median = f"{len(ratios)}: {statistics.median(ratios):.2f}"
    if len(ratios) == 1:
        return median
    off = [abs(ratio - 1) for ratio in ratios]
    near, half = sum(each <= NEAR for each in off), statistics.median(off)
    return f"{median} ({min(ratios):.2f} to {max(ratios):.2f}); {near} within 25 %, half within {100 * half:.0f} %"


BENCH: Final = Bench(
    help="forecasts of plans compared with what others measured",
    measure=measure,
    models=None,
    rounds=None,
    all_quick=None,
    flags=(
        flag("--figures", type=Path, default=FIGURES, help="published figures (default: profiles/published.json)"),
        flag("--parallel", choices=PARALLEL_MODES, default="pipeline", help="parallelism of several devices"),
        flag("--write", action="store_true", help="also write the medians into docs/benchmarks/published.md"),
    ),
)
