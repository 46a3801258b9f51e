"""``serve``: several answers at once, in rings whose devices have a core each and on one such device alone.

In each round every ring answers 1, 2, 4 ... questions that are there together, in turn with the other rings. What all of
them write a second, what one of them waits between tokens and for its first one. A ring is what ``primad serve`` makes of
the devices, with the plan that it makes, asked over HTTP; drafts are off, which ``speculate`` measures. While there are as
many cores each device counts as a machine: a host name of its own, and one core. More are processes of one machine, which
share all cores, as plans know (``halda.load``).

``--case`` measures what must hold of several answers (``cases.py``).

``--beside``: in turn with them, on all cores, what stands for llama-server (``lab/plain_llama.py``), and llama.cpp's RPC, a
head and two servers, with the library that ``--rpc`` names (``lab/rpc_server.py``). Extra buffers are off everywhere.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.system.children.spawn import environment
from tools.benches.cases import CASES
from tools.lab.harness import CORES, SMALL, Bench, Run, flag
from tools.lab.http_servers import HttpServer, head_here
from tools.lab.plain_child import PlainChild
from tools.lab.plain_llama import PROMPT
from tools.lab.rpc_server import RpcServers
from tools.lab.served import ONE_BATCH, PRIMAD, RPC, Served

PROMPT_TOKENS: Final = 40
ANSWER_TOKENS: Final = 64
CONTEXT: Final = 256
HEAD: Final = ("--context", str(CONTEXT), "--extra-buffers", "off")
ROWS: Final = 128
RPC_SERVERS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """Tokens a second of so many answers, and what was waited for each of their tokens."""

    tokens_per_s: float
    first_s: list[float]
    next_s: list[float]


_System = Callable[[int, int], Awaitable[_Turn]]
"""Writes so many answers at once, in this round."""
_Key = tuple[str, int]
"""System, devices."""


async def measure(run: Run, model: Path) -> None:
    """Every system and number of streams in turn."""
    options = run.options
    devices = options.devices or ([1, 2, 3] if options.beside else [1, 2])
    if options.case:
        for case, count in itertools.product(options.case, devices):
            await CASES[case](run, model, count)
        return
    systems: dict[_Key, _System] = {}
    plans: dict[int, str] = {}
    for count in devices:
        server = await asyncio.to_thread(_head, run, model, count)
        plans[count] = await asyncio.to_thread(server.plan)
        systems[PRIMAD, count] = _served(server)
    if options.beside:
        systems[ONE_BATCH, 1] = _plain(run, model, None)
        if options.rpc is None:
            run.say(f'{RPC}: left out; --rpc "$(tools/setup-llama rpc)" names its library')
        else:
            systems[RPC, 1 + RPC_SERVERS] = _plain(run, model, options.rpc)
    turns = await run.alternate(
        {(*key, streams): partial(system, streams) for key, system in systems.items() for streams in options.streams}
    )
    for (system, count, streams), its in turns.items():
        run.add(
            Served(
                model=model.stem,
                system=system,
                devices=count,
                streams=streams,
                where="machines" if system == PRIMAD and count <= CORES else "all cores",
                plan=plans[count] if system == PRIMAD else "",
                tokens_per_s=[turn.tokens_per_s for turn in its],
                first_s=[each for turn in its for each in turn.first_s],
                next_s=[each for turn in its for each in turn.next_s],
            )
        )


def _head(run: Run, path: Path, count: int) -> HttpServer:
    """What ``primad serve`` makes of so many devices."""
    workers = [f"w{place}" for place in range(1, count)]
    head = [*HEAD, "--sequences", str(max(run.options.streams)), *(["--use-all"] if workers else [])]
    return run.stack.enter_context(head_here(path, run.homes(), workers, head=head, machines=count <= CORES))


def _served(server: HttpServer) -> _System:
    return lambda streams, _: asyncio.to_thread(_ask, server, streams)


def _ask(server: HttpServer, streams: int) -> _Turn:
    """Drafts are off, and no prompt is found in the cache."""
    how: dict[str, Any] = {"ignore_eos": True, "cache_prompt": False, "speculate": False}
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        asked = [pool.submit(server.stream, PROMPT[:PROMPT_TOKENS], ANSWER_TOKENS, **how) for _ in range(streams)]
        times = [each.result() for each in asked]
    return _turn(begin_s, times)


def _turn(begin_s: float, times: Sequence[Sequence[float]]) -> _Turn:
    """Where an answer ended by itself the rate is that of the tokens that there are."""
    return _Turn(
        tokens_per_s=sum(map(len, times)) / (max(each[-1] for each in times) - begin_s),
        first_s=[each[0] - begin_s for each in times],
        next_s=[b - a for each in times for a, b in itertools.pairwise(each)],
    )


def _plain(run: Run, path: Path, library: Path | None) -> _System:
    """llama.cpp alone, or with the RPC ``library`` as the head of servers that have as many layers each as it has."""
    rpc = None if library is None else run.stack.enter_context(RpcServers(library, RPC_SERVERS, CORES))
    layers, sequences = len(model_profile(open_model(path)).layers), max(run.options.streams)
    environ: Mapping[str, str] = os.environ if rpc is None else environment(os.environ, CORES, 0)
    child = PlainChild(
        path,
        CORES,
        "off",
        environ,
        context=CONTEXT * sequences,
        rows=ROWS * 4,
        sequences=sequences,
        rpc=rpc,
        gpu_layers=0 if rpc is None else layers - layers // (1 + RPC_SERVERS) + 1,  # the output matrix is one
    )
    run.stack.callback(child.close)

    async def turn(streams: int, _: int) -> _Turn:
        reported = await asyncio.to_thread(child.answer, answers=streams, of=ANSWER_TOKENS, after=PROMPT_TOKENS)
        rate = streams * ANSWER_TOKENS / reported["seconds"]
        return _Turn(tokens_per_s=rate, first_s=reported["first_s"], next_s=reported["next_s"])

    return turn


BENCH: Final = Bench(
    help="several answers at once",
    measure=measure,
    models=(SMALL, "1b-q4k"),
    quick={"rounds": 1, "streams": [1, 4]},
    quick_models=(SMALL,),
    flags=(
        flag("--devices", type=int, nargs="+", help="devices of a ring (default: 1 2; 1 2 3 with --beside)"),
        flag("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16]),
        flag(
            "--beside", action="store_true", help="also what stands for llama-server, llama.cpp's RPC, a ring of three"
        ),
        flag("--rpc", type=Path, metavar="FILE", help="llama.cpp's RPC library (tools/setup-llama builds it)"),
        flag("--case", choices=list(CASES), nargs="+", help="what must hold of several answers, in place of all"),
    ),
)
