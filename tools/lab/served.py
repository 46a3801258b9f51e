"""What ``tools/bench serve`` found of each system, and the ratios that are wanted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

PRIMAD: Final = "primad"
ONE_BATCH: Final = "llama.cpp, one batch"
"""All answers in one process and one step, as llama-server has them."""
RPC: Final = "llama.cpp, RPC"


@dataclass(kw_only=True)
class Served:
    """A system of so many devices with steps of so many rows at most, and so many streams: what each run gave; waits of all
    runs, seconds. ``cpus`` is what a device has of a core's time, None for all of it."""

    model: str
    system: str = PRIMAD
    devices: int
    rows: int
    streams: int
    cpus: float | None = None
    tokens_per_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)


def key(row: Served) -> tuple[str, str, int, int]:
    """What tells its system from others."""
    return row.model, row.system, row.devices, row.rows


def times(row: Served, other: Served) -> float:
    """How many times the tokens of ``other``: the median of runs of the same round."""
    return statistics.median(by_round(row.tokens_per_s, other.tokens_per_s))


def by_round(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """``ours`` of ``theirs``, each of runs that stood side by side."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def wanted(rows: Sequence[Served]) -> list[dict[str, Any]]:
    """Ratios that should be ``at_least`` so much (None: no bound), of those systems that were run."""
    found = []
    for row in (row for row in rows if row.system == PRIMAD):
        what = f"{row.model}: ring of {row.devices}, {row.rows} rows, {row.streams} streams, of"
        for system, minimum in ((ONE_BATCH, 0.9), (RPC, 1.5)) if (row.devices, row.streams) == (3, 4) else ():
            for other in (each for each in rows if (each.model, each.system, each.streams) == (row.model, system, 4)):
                found.append({"what": f"{what} {system}", "value": times(row, other), "at_least": minimum})
        alone = next((each for each in rows if key(each) == (row.model, PRIMAD, 1, row.rows)), None)
        if alone is None or alone.streams > 1 or not row.streams >= row.devices > 1:
            continue
        if row.devices == 2 or row.cpus is not None:  # others share cores
            what = f"{what} {row.devices} x one device with one"
            bound = 0.9 if row.devices == 2 else None
            found.append({"what": what, "value": times(row, alone) / row.devices, "at_least": bound})
    return found
