"""``predict``: compares the forecast with measured milliseconds per token and to the first token.

With all memory: ``primad serve`` on 1 to 4 processes of this machine, all of which have layers. Each forecast is that
of the serving plan, before it is corrected by measurements; the processes share one machine with its cores and its
disk, which the plan knows. All rings are loaded before the first round, and take turns.

``memory`` has the forecast of a device with less memory than the model.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from tools.lab.figures import Figure, Row
from tools.lab.harness import SMALL, Bench, Run, flag, in_thread, threads_flag
from tools.lab.http_servers import HttpServer
from tools.lab.plain_llama import PROMPT

CONTEXT: Final = 1024
PROMPT_TOKENS: Final = 40
ANSWER_TOKENS: Final = 96


class Predicted(Row):
    """One ring: milliseconds per token and to the first token."""

    columns = (
        "model, processes=n, plan, measured_ms=ms:.1f, fastest_ms=from:.1f, slowest_ms=to:.1f, "
        "predicted_ms=predicted:.1f, error=error:+.1%, measured_first_ms=first:.0f, predicted_first_ms=predicted first:.0f, "
        "first_error=first error:+.1%"
    )

    @property
    def fastest_ms(self) -> float:
        """Of the fastest round."""
        return min(self.measured_rounds_ms, default=0.0)

    @property
    def slowest_ms(self) -> float:
        """Of the slowest round."""
        return max(self.measured_rounds_ms, default=0.0)

    @property
    def error(self) -> float:
        """Predicted over measured time, minus 1."""
        return float(self.predicted_ms / self.measured_ms - 1)

    @property
    def first_error(self) -> float:
        """The same for the first token."""
        return float(self.predicted_first_ms / self.measured_first_ms - 1)

    @classmethod
    def figures(cls, rows: Sequence[Predicted]) -> Iterator[Figure]:
        for what, errors, maximum in (
            ("a token", [row.error for row in rows], 10.0),
            ("the first token", [row.first_error for row in rows], 15.0),
        ):
            off = tuple(100 * abs(error) for error in errors)
            yield Figure(what=f"{what}, predicted: % off, {len(off)} cases", values=off, at_most=maximum)


async def measure(run: Run, path: Path) -> None:
    """Measure rings of each number of processes."""
    head = ["--context", str(CONTEXT), "--sequences", "1", "--speculate", "off", "--prompt", str(PROMPT_TOKENS)]
    head += ["--answer", str(ANSWER_TOKENS)]
    every = ("--threads", str(run.options.threads))
    heads, forecasts = dict[int, HttpServer](), dict[int, tuple[dict[str, Any], str]]()
    for count in run.options.processes:
        heads[count] = server = await asyncio.to_thread(run.head, path, count, *head, every=every)
        forecasts[count] = server.status()["predicted"], server.plan()
    turns = await run.alternate({count: in_thread(partial(_ask, server)) for count, server in heads.items()})
    for count, its in turns.items():
        decode_s, first_s = zip(*its, strict=True)
        predicted, plan = forecasts[count]
        run.add(
            Predicted(
                model=path.stem,
                processes=count,
                plan=plan,
                measured_ms=statistics.median(decode_s) * 1e3,
                predicted_ms=predicted["tpot_ms"],
                measured_first_ms=statistics.median(first_s) * 1e3,
                predicted_first_ms=predicted["ttft_ms"],
                measured_rounds_ms=[seconds * 1e3 for seconds in decode_s],
            )
        )


def _ask(head: HttpServer, _: int) -> tuple[float, float]:
    """Return the seconds per token, and to the first token."""
    begin_s = time.perf_counter()
    times = head.stream(PROMPT[:PROMPT_TOKENS], ANSWER_TOKENS + 1, ignore_eos=True, cache_prompt=False)
    return (times[-1] - times[0]) / (len(times) - 1), times[0] - begin_s


BENCH: Final = Bench(
    help="predicted and measured milliseconds per token",
    measure=measure,
    models=(SMALL, "gemma3-270m-q4_k_m", "1b-q4k"),
    rounds=2,
    quick={"rounds": 1},
    quick_models=(SMALL,),
    flags=(
        flag("--processes", type=int, nargs="+", default=[1, 2, 3, 4]),
        threads_flag(2),
    ),
)
