"""``tools/bench published``: what plans forecast beside what others measured on such devices."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Final

from rich.console import Console

from tools.lab.published import FIGURES, Row, Summary, read_figures, rows, summary

PAGE: Final = Path(__file__).parent.parent / "docs" / "benchmarks" / "published.md"
BEGIN: Final = "<!-- published -->"
END: Final = "<!-- end of published -->"
_COLUMNS: Final = "{:<26} {:<17} {:>8} {:>8} {:>6}  {:>8} {:>8} {:>6}  {}"


def measure(options: argparse.Namespace, out: Console) -> list[Row]:
    """Print the forecast of each figure beside it, and medians by kind."""
    found = rows(read_figures(options.figures))
    out.print(_COLUMNS.format("", "", "decode", "plan", "ratio", "prefill", "plan", "ratio", ""), soft_wrap=True)
    for row in found:
        decode = row.decode_tok_s, row.decode_planned_tok_s if row.decode_tok_s else None, row.decode_ratio
        prefill = row.prefill_tok_s, row.prefill_planned_tok_s if row.prefill_tok_s else None, row.prefill_ratio
        shown = map(_shown, (*decode, *prefill))
        out.print(_COLUMNS.format(row.id, row.kind, *shown, row.note), soft_wrap=True, markup=False)
    table = markdown(found)
    out.print(f"\n{table}", soft_wrap=True, markup=False)
    if options.write:
        write(table, PAGE)
    return found


def write(table: str, page: Path) -> None:
    """Put ``table`` with today's date between the marks of ``page``."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{page} lacks {BEGIN} or {END}"
    dated = f"On {date.today().isoformat()}, by `tools/bench published --write`:"
    page.write_text(f"{before}{begin}\n{dated}\n\n{table}\n{end}{after}", encoding="utf-8")


def _shown(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.4g}"


def markdown(found: Sequence[Row]) -> str:
    """Ratios by kind, as ``docs/benchmarks/published.md`` shows them."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in found:
        kinds[row.kind].append(row)
    lines = ["| kind | decode, plan / published | prefill |", "|---|---|---|"]
    parts = [("single devices, all", [row for row in found if row.is_single]), *sorted(kinds.items())]
    for name, its in parts:
        decode = [row.decode_ratio for row in its if row.decode_ratio is not None]
        prefill = [row.prefill_ratio for row in its if row.prefill_ratio is not None]
        lines.append(f"| {name} | {_said(decode)} | {_said(prefill)} |")
    return "\n".join(lines)


def _said(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    its: Summary = summary(ratios)
    if its.count == 1:
        return f"1: {its.median:.2f}"
    spread = f"{its.median:.2f} ({its.minimum:.2f} to {its.maximum:.2f})"
    return f"{its.count}: {spread}; {its.near} within 25 %, half within {its.error:.0%}"


def add_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds ``published`` to the command line."""
    one = benches.add_parser("published", help="what plans forecast beside what others measured")
    one.add_argument(
        "--figures", type=Path, default=FIGURES, help="published figures (default: profiles/published.json)"
    )
    one.add_argument("--write", action="store_true", help="also write the medians into docs/benchmarks/published.md")
    one.add_argument("--json", help="also write the figures to this file")
    return one
