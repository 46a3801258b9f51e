"""``tools/bench serve``: several answers at once, in rings whose devices have a core each and on one such device alone.

In each round every ring answers 1, 2, 4 ... questions that are there together, in turn with the other rings. What all of
them write a second, what one of them waits between tokens and for its first one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.ring.grouping import Batching
from primad.ring.messages import Sampled
from tools.bench_together import CASES
from tools.lab.local_ring import LocalRing, even_windows
from tools.lab.plain_llama import PROMPT

PROMPT_TOKENS: Final = 40
ANSWER_TOKENS: Final = 64
CONTEXT: Final = 256
ROWS: Final = 128
LATE: Final = 0.95
"""Share of the waits between tokens that are no longer than the one that is told."""

out = Console(highlight=False)


@dataclass
class Served:
    """One ring with steps of so many rows at most, and so many streams: what each run gave; waits of all runs, seconds."""

    model: str
    devices: int
    rows: int
    streams: int
    tokens_per_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)


async def bench_streams(
    path: Path, devices: Sequence[int], rows: Sequence[int], streams: Sequence[int], rounds: int
) -> list[Served]:
    """Every ring and number of streams in turn, ``rounds`` times, after a run of each that does not count."""
    layers = len(model_profile(open_model(path)).layers)
    found = [Served(path.stem, count, most, many) for count in devices for most in rows for many in streams]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-serve-")))
        rings = {}
        for count, most in itertools.product(devices, rows):
            ring = LocalRing(
                path,
                even_windows(layers, count),
                context=CONTEXT,
                rows=ROWS,
                sequences=max(streams),
                batching=Batching(rows=most, steps=count),
                flash=False,
                threads=1,
                folder=folder,
            )
            rings[count, most] = await stack.enter_async_context(ring)
        for number in range(rounds + 1):
            for each in found:
                await _run(rings[each.devices, each.rows], each, counts=number > 0)
    return found


async def _run(ring: LocalRing, found: Served, *, counts: bool) -> None:
    latest: dict[int, float] = {}
    first: list[float] = []
    between: list[float] = []

    def heard(event: Sampled) -> None:
        now = time.perf_counter()
        before = latest.get(event.request)
        (first if before is None else between).append(now - (begin if before is None else before))
        latest[event.request] = now

    begin = time.perf_counter()
    told = await ring.generate_all([PROMPT[:PROMPT_TOKENS]] * found.streams, ANSWER_TOKENS, heard=heard)
    if counts:
        found.tokens_per_s.append(sum(map(len, told)) / (time.perf_counter() - begin))
        found.first_s += first
        found.next_s += between


def add_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``serve`` to the command line."""
    one = benches.add_parser("serve", help="several answers at once")
    one.add_argument("--model", type=Path, action="append", help="GGUF file (default: SmolLM2 and a synthetic 1B)")
    one.add_argument("--devices", type=int, nargs="+", default=[1, 2], help="ring sizes, each device with a thread")
    one.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="rows of a step at most")
    one.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument(
        "--case", choices=list(CASES), nargs="+", help="what must hold of several answers, in place of all"
    )
    one.add_argument("--json", help="also write the figures to this file")


def show(rows: Sequence[Served]) -> list[dict[str, Any]]:
    """Print the rows beside one stream of the same ring; plain data for ``--json``."""
    table = Table(
        "model",
        "devices",
        "rows",
        "streams",
        "tokens/s",
        "of 1 stream",
        "between tokens ms",
        "95 %",
        "first token ms",
        box=SIMPLE_HEAD,
    )
    for row in rows:
        alone = next(
            each for each in rows if (each.model, each.devices, each.rows) == (row.model, row.devices, row.rows)
        )
        ratio = statistics.median(row.tokens_per_s) / statistics.median(alone.tokens_per_s)
        late_s = sorted(row.next_s)[round(LATE * (len(row.next_s) - 1))]
        table.add_row(
            row.model,
            str(row.devices),
            str(row.rows),
            str(row.streams),
            f"{statistics.median(row.tokens_per_s):.1f}",
            f"{ratio:.2f}",
            f"{1e3 * statistics.median(row.next_s):.1f}",
            f"{1e3 * late_s:.1f}",
            f"{1e3 * statistics.median(row.first_s):.0f}",
        )
    out.print(table)
    return [asdict(row) for row in rows]
