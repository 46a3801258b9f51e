"""``predict``: is the forecast right? Forecast against measured milliseconds a token and to the first one.

With all memory: what ``primad serve`` makes of 1 to 4 processes of this machine, of which all have layers. Each forecast is
that of the plan that serves, before anything was learned of how far off it is; they share one machine, so its cores and its
disk, which the plan knows. All are loaded before the first round, and take turns.

With less memory than the model has (``--limited``): all processes together may hold a share of it (``--limits``) and what a
process needs besides.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from primad.gguf.model import open_model
from tools.lab import LabError
from tools.lab.figures import Figure, Row
from tools.lab.harness import SMALL, Bench, Run, flag, in_thread, model_named, threads_flag
from tools.lab.http_servers import HttpServer, head_here
from tools.lab.plain_llama import PROMPT

CONTEXT: Final = 1024
PROMPT_TOKENS: Final = 40
ANSWER_TOKENS: Final = 96
LIMITED_ANSWER_TOKENS: Final = 16
PROCESS_BYTES: Final = 256 << 20
"""What each process may hold besides its share of the model."""


class Predicted(Row):
    """One ring: milliseconds a token and to the first one. ``limit_share``: memory of all processes, of the model's size;
    None where nothing limits it."""

    columns = (
        "model, limit_share=limit:g, processes=n, plan, measured_ms=ms:.1f, fastest_ms=from:.1f, slowest_ms=to:.1f, "
        "predicted_ms=predicted:.1f, error=error:+.1%, measured_first_ms=first:.0f, predicted_first_ms=predicted first:.0f, "
        "first_error=first error:+.1%"
    )

    @property
    def fastest_ms(self) -> float:
        """Of the rounds."""
        return min(self.measured_rounds_ms, default=0.0)

    @property
    def slowest_ms(self) -> float:
        """Of the rounds."""
        return max(self.measured_rounds_ms, default=0.0)

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return float(self.predicted_ms / self.measured_ms - 1)

    @property
    def first_error(self) -> float:
        """The same of the first token."""
        return float(self.predicted_first_ms / self.measured_first_ms - 1)

    @classmethod
    def figures(cls, rows: Sequence[Predicted]) -> Iterator[Figure]:
        for what, errors, maximum in (
            ("a token", [row.error for row in rows], 10.0),
            ("the first token", [row.first_error for row in rows], 15.0),
        ):
            off = tuple(100 * abs(error) for error in errors)
            yield Figure(what=f"{what}, predicted: % off, {len(off)} cases", values=off, at_most=maximum)


async def measure(run: Run, model: Path) -> None:
    """With all memory, or the model of ``--limited`` with less."""
    if model != run.options.limited:
        await _turns(run, model, None, run.options.processes, ANSWER_TOKENS)
        return
    for count in run.options.processes:
        for share in run.options.limits:
            async with run.part():
                try:
                    await _turns(run, model, share, [count], LIMITED_ANSWER_TOKENS)
                except LabError as exc:
                    run.say(f"{model.stem} at {share:g} in {count}: {exc}")


async def _turns(run: Run, path: Path, share: float | None, counts: Sequence[int], tokens: int) -> None:
    """Rings of so many processes."""
    heads, forecasts = dict[int, HttpServer](), dict[int, tuple[dict[str, Any], str]]()
    for count in counts:
        heads[count] = head = await asyncio.to_thread(_head, run, path, share, count, tokens)
        forecasts[count] = head.status()["predicted"], head.plan()

    def system(head: HttpServer) -> Callable[[int], Awaitable[tuple[float, float]]]:
        return in_thread(lambda _: _ask(head, tokens))

    turns = await run.alternate({count: system(head) for count, head in heads.items()})
    for count, its in turns.items():
        decode_s, first_s = zip(*its, strict=True)
        predicted, plan = forecasts[count]
        run.add(
            Predicted(
                model=path.stem,
                processes=count,
                plan=plan,
                limit_share=share,
                measured_ms=statistics.median(decode_s) * 1e3,
                predicted_ms=predicted["tpot_ms"],
                measured_first_ms=statistics.median(first_s) * 1e3,
                predicted_first_ms=predicted["ttft_ms"],
                measured_rounds_ms=[seconds * 1e3 for seconds in decode_s],
            )
        )


def _head(run: Run, path: Path, share: float | None, count: int, tokens: int) -> HttpServer:
    workers = [f"w{place}" for place in range(1, count)]
    every = ["--threads", str(run.options.threads)]
    if share is not None:
        every += ["--max-ram", f"{int(share * path.stat().st_size) + count * PROCESS_BYTES}B"]  # of the machine
    head = ["--context", str(CONTEXT), "--sequences", "1", "--speculate", "off", "--prompt", str(PROMPT_TOKENS)]
    head += ["--answer", str(tokens), *(["--use-all"] if workers else [])]
    return run.stack.enter_context(head_here(path, run.homes(), workers, every=every, head=head))


def _ask(head: HttpServer, tokens: int) -> tuple[float, float]:
    """Seconds of a token and to the first one."""
    begin_s = time.perf_counter()
    times = head.stream(PROMPT[:PROMPT_TOKENS], tokens + 1, ignore_eos=True, cache_prompt=False)
    return (times[-1] - times[0]) / (len(times) - 1), times[0] - begin_s


def _models(options: argparse.Namespace, _: ExitStack) -> list[Path]:
    """What is no model is said before minutes were measured."""
    models = list(options.model or [])
    if not models and options.limited is None:
        if options.quick:
            return [model_named(SMALL)]
        models = list(map(model_named, (SMALL, "gemma3-270m-q4_k_m", "1b-q4k")))
        options.limited = model_named("3b-q4k")
    models += [] if options.limited is None else [options.limited]
    for path in models:
        open_model(path)
    return models


BENCH: Final = Bench(
    help="predicted against measured milliseconds a token",
    measure=measure,
    models=_models,
    rounds=2,
    quick={"rounds": 1},
    flags=(
        flag("--limited", type=Path, help="GGUF file with little memory (default: a synthetic 3B without --model)"),
        flag("--limits", type=float, nargs="+", default=[0.9, 0.7, 0.5], help="memory, of the size of that"),
        flag("--processes", type=int, nargs="+", default=[1, 2, 3, 4]),
        threads_flag(2),
    ),
)
