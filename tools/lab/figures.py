"""Results of a bench: measured rows, the figures judged from them, tables, and the file of both.

The file has the same form for every bench: ``bench``, the ``machine`` and the ``run`` that it was measured by,
``figures`` and ``rows``. A figure's name is its ``what``, by which the figures of two files are compared.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Self

import msgspec
import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from primad import __version__
from primad.profiler.processors import cpu_name
from tools.lab.names import LabError

ROOT: Final = Path(__file__).parent.parent.parent

out = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A judged figure: the median of ``values``, which should be at least or at most the given value, if any.

    Unless it is a ratio its unit is in ``what``.
    """

    what: str
    values: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None

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
        """The wanted value in words."""
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return "" if self.at_most is None else f"at most {self.at_most:g}"


class Row(SimpleNamespace):
    """One row of a bench's results: plain data from its constructor; a dataclass where field names are worth it.

    ``columns`` are those that a table shows, each ``field=header:format``; the format is Python's, or ``MB`` or ``ms``,
    and a list of numbers is shown by its median. A row without columns is in no table.
    """

    columns: ClassVar[str] = ""

    def heading(self) -> str:
        """Return the heading; rows with the same heading share a table."""
        return ""

    def cells(self) -> Mapping[str, str]:
        """Return the table's cells by column."""
        found = {}
        for column in filter(None, (each.strip() for each in self.columns.split(","))):
            name, _, rest = column.partition("=")
            header, _, form = rest.partition(":")
            found[(header or name).replace(" ", "\n")] = shown(getattr(self, name), form)
        return found

    def remarks(self) -> Iterable[str]:
        """Return lines below the table."""
        return ()

    def failures(self) -> Sequence[str]:
        """Return conditions of every run that do not hold: the command fails because of them."""
        return ()

    @classmethod
    def figures(cls, rows: Sequence[Self]) -> Iterable[Figure]:
        """Return the figures judged from all rows of this kind."""
        return ()


@dataclass(kw_only=True)
class Compared(Row):
    """The results ``found`` per run and the results ``beside`` in the same rounds, for comparison: their ratio should
    be ``at_least`` or ``at_most`` the given value. ``is_same``: all texts that must be equal are."""

    columns: ClassVar[str] = "case, devices, what, beside=beside it:.4g, found=measured:.4g"

    model: str
    case: str
    devices: int
    what: str
    found: Sequence[float]
    beside: Sequence[float]
    at_least: float | None = None
    at_most: float | None = None
    is_same: bool = True
    note: str = ""

    def heading(self) -> str:
        return self.model

    def remarks(self) -> Iterable[str]:
        return [f"{self.case}, {self.devices} devices, {self.what}: {self.note}"] if self.note else []

    def failures(self) -> Sequence[str]:
        return () if self.is_same else [f"{self.case}, {self.devices} devices, {self.what}: the text DIFFERS"]

    @classmethod
    def figures(cls, rows: Sequence[Self]) -> Iterable[Figure]:
        for row in rows:
            yield Figure(
                what=f"{row.model}, {row.case}, {row.devices} devices: {row.what}",
                values=tuple(by_round(row.found, row.beside)),
                at_least=row.at_least,
                at_most=row.at_most,
            )


def by_round(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return ``ours`` divided by ``theirs``, run by run."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def median(values: Sequence[float]) -> float | None:
    """Return the median; None without values."""
    return statistics.median(values) if values else None


def late(values: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return sorted(values)[round(0.95 * (len(values) - 1))]


def shown(value: Any, form: str) -> str:
    """Return ``value`` in a format of ``Row.columns``."""
    if isinstance(value, list | tuple):
        if form == "+":
            return "+".join(map(str, value))
        value = statistics.median(value) if value else None
    if value is None:
        return "-"
    if form in ("MB", "ms"):
        return format(value / 1e6, ".0f") if form == "MB" else format(value * 1e3, ".0f")
    return format(value, form)


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """Return the figures of rows of all kinds."""
    kinds: dict[type[Row], list[Row]] = {}
    for row in rows:
        kinds.setdefault(type(row), []).append(row)
    return [figure for kind, its in kinds.items() for figure in kind.figures(its)]


def show(rows: Sequence[Row]) -> None:
    """Print one table per heading; its columns are those of its rows."""
    for (_, heading), group in itertools.groupby(rows, lambda row: (type(row), row.heading())):
        lines = [(row, dict(row.cells())) for row in group]
        table = Table(
            title=heading or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
        )
        columns = list(
            dict.fromkeys(column for _, cells in lines for column, cell in cells.items() if cell not in ("", "-"))
        )
        for place, column in enumerate(columns):
            table.add_column(column, justify="right" if place else "left", no_wrap=True)
        for _, cells in lines:
            table.add_row(*(cells.get(column, "") for column in columns))
        if columns:
            out.print(table)
        for row, _ in lines:
            for line in (*row.remarks(), *row.failures()):
                out.print(line)


def show_figures(figures: Sequence[Figure]) -> None:
    """Print the figures."""
    for each in figures:
        spread = f" ({min(each.values):.3g} to {max(each.values):.3g})" if len(each.values) > 1 else ""
        wanted = f" (wanted: {each.wanted}{'' if each.holds else ', MISSED'})" if each.wanted else ""
        out.print(f"{each.what}: {each.value:.3g}{spread}{wanted}")


def machine() -> dict[str, Any]:
    """Return facts about the machine, and whether it is idle before the run."""
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "ram_bytes": psutil.virtual_memory().total,
        "busy_share_before": psutil.cpu_percent(interval=2.0) / 100,
    }


def run_facts(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the command and its commit."""

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "primad", "solver", "tools")
    return {
        "command": shlex.join(("./tools/bench", *(each.removeprefix(f"{ROOT}/") for each in arguments))),
        "day": time.strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "--short", "HEAD") + (" with changes" if changed else ""),
        "primad": __version__,
        "llama_cpp": version("llama-cpp-python"),
        "python": platform.python_version(),
        "system": platform.system(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
    }


def write_file(path: Path, bench: str, facts: Mapping[str, Any], run: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write all results to a file."""
    content = {
        "bench": bench,
        "machine": facts,
        "run": run,
        "figures": [{**asdict(each), "value": each.value} for each in figures_of(rows)],
        "rows": [msgspec.to_builtins(vars(row), str_keys=True) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def read_figures(content: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of such a file."""
    return [
        Figure(what=each["what"], values=tuple(each["values"]), at_least=each["at_least"], at_most=each["at_most"])
        for each in content["figures"]
    ]


def read_file(path: Path) -> dict[str, Any]:
    """Read a file of ``write_file``. Raises ``LabError``."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        read_figures(content)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise LabError(f"{path}: is no file that tools/bench --json wrote: {exc}") from exc
    return content


def show_against(content: Mapping[str, Any], figures: Sequence[Figure]) -> None:
    """Print each figure next to the figure of the same name in an earlier file."""
    before = {each.what: each for each in read_figures(content)}
    out.print(f"against {content['run']['day']}, commit {content['run']['commit']}:")
    for each in figures:
        if (old := before.pop(each.what, None)) is not None:
            change = f" ({each.value / old.value - 1:+.1%})" if old.value else ""
            out.print(f"{each.what}: {old.value:.3g}, now {each.value:.3g}{change}")
        else:
            out.print(f"{each.what}: new")
    for what in before:
        out.print(f"{what}: not measured now")
