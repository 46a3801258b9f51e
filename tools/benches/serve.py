"""``serve``: several answers at once, in rings whose devices have a core each and on one such device alone.

In each round every ring answers 1, 2, 4 ... questions that are there together, in turn with the other rings. What all of
them write a second, what one of them waits between tokens and for its first one. A ring is what ``primad serve`` makes of
the devices, with the plan that it makes, asked over HTTP; drafts are off, which ``speculate`` measures. While there are as
many cores each device counts as a machine: a host name of its own, and one core. More are processes of one machine, which
share all cores, as plans know (``halda.load``).

``--case`` measures what must hold of several answers (``cases.py``). ``http`` has llama-server beside primad.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from tools.benches.cases import CASES
from tools.lab.harness import CORES, SMALL, Bench, Run, flag, in_thread
from tools.lab.http_servers import HttpServer
from tools.lab.plain_llama import PROMPT
from tools.lab.served import PRIMAD, Served

PROMPT_TOKENS: Final = 40
ANSWER_TOKENS: Final = 64
CONTEXT: Final = 256
HEAD: Final = ("--context", str(CONTEXT), "--extra-buffers", "off")


async def measure(run: Run, model: Path) -> None:
    """Every ring and number of streams in turn."""
    options = run.options
    if options.case:
        for case, count in itertools.product(options.case, options.devices):
            async with run.part():
                await CASES[case](run, model, count)
        return
    heads = {count: await asyncio.to_thread(_head, run, model, count) for count in options.devices}
    turns = await run.alternate(
        {
            (count, streams): in_thread(partial(_ask, head, streams))
            for count, head in heads.items()
            for streams in options.streams
        }
    )
    for (count, streams), its in turns.items():
        rates, first_s, next_s = zip(*its, strict=True)
        run.add(
            Served(
                model=model.stem,
                system=PRIMAD,
                devices=count,
                streams=streams,
                where="machines" if count <= CORES else "all cores",
                plan=heads[count].plan(),
                tokens_per_s=list(rates),
                first_s=[each for its in first_s for each in its],
                next_s=[each for its in next_s for each in its],
            )
        )


def _head(run: Run, path: Path, count: int) -> HttpServer:
    return run.head(path, count, *HEAD, "--sequences", str(max(run.options.streams)), machines=count <= CORES)


def _ask(head: HttpServer, streams: int, _: int) -> tuple[float, list[float], list[float]]:
    """Tokens a second of so many answers, seconds to the first of each and to each of the others.

    Drafts are off, and no prompt is found in the cache. Where an answer ended by itself the rate is that of its tokens.
    """
    how: dict[str, Any] = {"ignore_eos": True, "cache_prompt": False, "speculate": False}
    begin_s = time.perf_counter()
    times = head.together([PROMPT[:PROMPT_TOKENS]] * streams, ANSWER_TOKENS, **how)
    rate = sum(map(len, times)) / (max(each[-1] for each in times) - begin_s)
    waits = [b - a for each in times for a, b in itertools.pairwise(each)]
    return rate, [each[0] - begin_s for each in times], waits


BENCH: Final = Bench(
    help="several answers at once",
    measure=measure,
    models=(SMALL, "1b-q4k"),
    quick={"rounds": 1, "streams": [1, 4]},
    quick_models=(SMALL,),
    flags=(
        flag("--devices", type=int, nargs="+", default=[1, 2], help="devices of a ring"),
        flag("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16]),
        flag("--case", choices=list(CASES), nargs="+", help="what must hold of several answers, in place of all"),
    ),
)
