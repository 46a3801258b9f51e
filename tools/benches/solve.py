"""``solve``: processor seconds that solving takes, by number of devices. ``paper``: our plans compared with Halda's."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Final

from halda import Infeasible, Instance, solve
from primad.gguf.shapes import shape
from tools.lab.figures import Figure, Row, shown
from tools.lab.harness import Bench, Run, flag
from tools.research.beside import SEEDS, beside_published
from tools.research.random_fleets import Memory, random_instance

BETTER: Final = 1.01
SHAPE: Final = "llama3-70b-q4k"
LAYERS: Final = 80
TIME_LIMIT_S: Final = 60.0
WANTED_S: Final = {4: 1.0, 16: 5.0, 64: 15.0}
"""By number of devices."""


class Solved(Row):
    """Processor seconds for one size of fleet: for each fleet with a plan (``solved_s``), and each without
    (``infeasible_s``).

    ``gaps`` are those of plans that were not proven best.
    """

    columns = "devices, solved_s=median s:.2f"

    def cells(self) -> Mapping[str, str]:
        return {
            **super().cells(),
            "slowest\ns": shown(max(self.solved_s, default=None), ".2f"),
            "with\na plan": str(len(self.solved_s)),
            "not\nproven": str(len(self.gaps)),
            "largest\ngap": shown(max(self.gaps, default=None), ".1%"),
            "without": str(len(self.infeasible_s)),
            "slowest s\nwithout": shown(max(self.infeasible_s, default=None), ".2f"),
        }

    @classmethod
    def figures(cls, rows: Sequence[Solved]) -> Iterator[Figure]:
        for row in rows:
            if row.solved_s:
                what = f"a plan for {row.devices} devices: s of a processor"
                maximum = WANTED_S.get(row.devices)
                yield Figure(what=what, values=tuple(row.solved_s), at_most=maximum)


async def measure(run: Run, _: None) -> None:
    """Solve random fleets with a model of equal layers."""
    like = shape(SHAPE)
    model = replace(like, layers=like.layers[:1] * LAYERS)
    for count in run.options.sizes:
        row = Solved(devices=count, layers=LAYERS, solved_s=[], infeasible_s=[], gaps=[])
        for seed in range(run.options.fleets):
            rng = random.Random(seed)
            memory: Memory = rng.choice(("short", "about", "ample"))
            asked = random_instance(rng, devices=count, layers=LAYERS, memory=memory, model=model)
            _solve(_with_a_head(asked), row)
        run.add(row)


def _solve(question: Instance, row: Solved) -> None:
    what = (question.devices, list(question.links.values()), question.model, question.workload)
    start = time.process_time()
    try:
        found = solve(*what, limits=question.limits, time_limit_s=TIME_LIMIT_S)
    except Infeasible:
        row.infeasible_s.append(time.process_time() - start)
        return
    row.solved_s.append(time.process_time() - start)
    if not found.proven:
        row.gaps.append(found.gap)


def _with_a_head(question: Instance) -> Instance:
    """Give the head room for the output matrix, for which a random share of a large fleet's memory is mostly too
    small."""
    head, *others = question.devices
    more = question.model.output_bytes + question.head_bytes(2)
    return replace(question, devices=(replace(head, ram_available_bytes=head.ram_available_bytes + more), *others))


class Beside(Row):
    """Seconds per token of the paper's plans over ours, by our evaluator, on fleets where the paper's plan keeps all
    limits."""

    def remarks(self) -> Iterator[str]:
        yield (
            f"{self.compared} of {self.fleets} fleets compared; on the others the paper's plan breaks a limit. Ours is "
            f"better by more than 1 % on {self.better:.0%}. The paper's token takes {self.smallest:.6f} times as long at "
            f"the least, {self.median:.2f} at the median, {self.quarter:.2f} or more on a quarter, {self.tenth:.2f} or "
            f"more on a tenth, {self.largest:.1f} at most"
        )

    @classmethod
    def figures(cls, rows: Sequence[Beside]) -> Iterator[Figure]:
        for row in rows:
            what = f"the paper's token, of ours, at the median of {row.compared} random fleets"
            yield Figure(what=what, values=(row.median,), at_least=1.0)


async def measure_paper(run: Run, _: None) -> None:
    """Run both solvers on random fleets."""
    fleets = run.options.fleets
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        answers = await asyncio.to_thread(lambda: list(pool.map(beside_published, SEEDS[:fleets], chunksize=10)))
    ratios = sorted(ratio for ratio in answers if ratio is not None)
    cuts = statistics.quantiles(ratios, n=20)
    run.add(
        Beside(
            fleets=fleets,
            compared=len(ratios),
            better=sum(ratio > BETTER for ratio in ratios) / len(ratios),
            smallest=ratios[0],
            median=statistics.median(ratios),
            quarter=cuts[14],
            tenth=cuts[17],
            largest=ratios[-1],
        )
    )


BENCH: Final = Bench(
    help="seconds that solving takes, by number of devices",
    measure=measure,
    models=None,
    rounds=None,
    quick={"sizes": [2, 4, 8], "fleets": 5},
    flags=(
        flag("--sizes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64]),
        flag("--fleets", type=int, default=15),
    ),
)
PAPER: Final = Bench(
    help="our plans compared with the paper's on random fleets",
    measure=measure_paper,
    models=None,
    rounds=None,
    quick={"fleets": 50},
    flags=(flag("--fleets", type=int, default=500),),
)
