"""``published``: what plans forecast beside what others measured on such devices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Final

from tools.lab.figures import ROOT
from tools.lab.harness import Bench, Run, flag
from tools.lab.pages import between
from tools.lab.published import FIGURES, Row, by_kind, decode_ratios, prefill_ratios, read_figures, rows, summary

PAGE: Final = ROOT / "docs" / "benchmarks" / "published.md"
BEGIN: Final = "<!-- published -->"
END: Final = "<!-- end of published -->"


async def measure(run: Run, _: None) -> None:
    """The forecast of each figure, and medians by kind."""
    found = await asyncio.to_thread(rows, read_figures(run.options.figures))
    run.add(*found)
    table = markdown(found)
    run.say(f"{table}\n")
    if run.options.write:
        dated = f"On {date.today().isoformat()}, by `tools/bench published --write`:"
        page = between(PAGE.read_text(encoding="utf-8"), BEGIN, END, f"\n{dated}\n\n{table}\n")
        PAGE.write_text(page, encoding="utf-8")


def markdown(found: Sequence[Row]) -> str:
    """Ratios by kind, as ``docs/benchmarks/published.md`` shows them."""
    lines = ["| kind | decode, plan / published | prefill |", "|---|---|---|"]
    for name, its in by_kind(found):
        lines.append(f"| {name} | {_summary(decode_ratios(its))} | {_summary(prefill_ratios(its))} |")
    return "\n".join(lines)


def _summary(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    its = summary(ratios)
    if its.count == 1:
        return f"1: {its.median:.2f}"
    spread = f"{its.median:.2f} ({its.minimum:.2f} to {its.maximum:.2f})"
    return f"{its.count}: {spread}; {its.near} within 25 %, half within {its.error:.0%}"


BENCH: Final = Bench(
    help="what plans forecast beside what others measured",
    measure=measure,
    models=None,
    rounds=None,
    all_quick=None,
    flags=(
        flag("--figures", type=Path, default=FIGURES, help="published figures (default: profiles/published.json)"),
        flag("--write", action="store_true", help="also write the medians into docs/benchmarks/published.md"),
    ),
)
