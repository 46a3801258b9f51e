"""``serve``: concurrent requests, in rings whose devices have a core each and on one such device.

In each round every ring gets 1, 2, 4 ... concurrent requests, in turn with the other rings. Measured are the tokens/s
of all requests together, and for one request the time between tokens and to the first token. A ring is ``primad serve``
on the devices, with the plan that it makes, over HTTP; drafts are off, as ``speculate`` measures them. While there are
enough cores each device counts as a machine, with its own host name and one core. More devices are processes of one
machine that share all cores, as plans know (``halda.load``).

``--case`` measures requirements on concurrent requests (``cases.py``). ``http`` compares primad with llama-server.
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
    """Measure every ring and number of streams in turn."""
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
    """Return the tokens/s of ``streams`` requests, the seconds to the first token of each, and the seconds between
    tokens.

    Drafts are off, and no prompt is in the cache. If a response ended by itself its tokens count until then.
    """
    how: dict[str, Any] = {"ignore_eos": True, "cache_prompt": False, "speculate": False}
    begin_s = time.perf_counter()
    times = head.together([PROMPT[:PROMPT_TOKENS]] * streams, ANSWER_TOKENS, **how)
    rate = sum(map(len, times)) / (max(each[-1] for each in times) - begin_s)
    waits = [b - a for each in times for a, b in itertools.pairwise(each)]
    return rate, [each[0] - begin_s for each in times], waits


BENCH: Final = Bench(
    help="concurrent requests",
    measure=measure,
    models=(SMALL, "1b-q4k"),
    quick={"rounds": 1, "streams": [1, 4]},
    quick_models=(SMALL,),
    flags=(
        flag("--devices", type=int, nargs="+", default=[1, 2], help="devices of a ring"),
        flag("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16]),
        flag("--case", choices=list(CASES), nargs="+", help="requirements on concurrent requests, instead of all"),
    ),
)
