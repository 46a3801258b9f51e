"""``tools/bench serve``: several answers at once, in rings whose devices have a core each and on one such device alone.

In each round every ring answers 1, 2, 4 ... questions that are there together, in turn with the other rings. What all of
them write a second, what one of them waits between tokens and for its first one. Devices are pinned to a core each while
there are as many cores, or have a share of a core each (``--cpus``). More share all cores as processes of one machine do in
a plan: each computes on all of them, and one step is in the ring at a time (``halda.load``).

``--beside``: in turn with them, on all cores, what stands for llama-server (``lab/plain_llama.py``), and llama.cpp's RPC, a
head and two servers, with the library that ``--rpc`` names (``lab/rpc_server.py``). Extra buffers are off everywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.ring.grouping import Batching
from primad.ring.messages import Sampled
from primad.system.children.spawn import environment
from tools.bench_together import CASES
from tools.lab.local_ring import LocalRing, even_windows
from tools.lab.memory import LimitedGroup
from tools.lab.plain_child import PlainChild
from tools.lab.plain_llama import PROMPT
from tools.lab.rpc_server import RpcServers
from tools.lab.served import ONE_BATCH, RPC, Served, key, times

PROMPT_TOKENS: Final = 40
ANSWER_TOKENS: Final = 64
CONTEXT: Final = 256
ROWS: Final = 128
LATE: Final = 0.95
"""Share of the waits between tokens that are no longer than the one that is told."""

RPC_SERVERS: Final = 2
WHOLE_BYTES: Final = 1 << 40
"""No limit of memory."""

out = Console(highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Seconds that so many answers took, and what was waited for each of their tokens."""

    seconds: float
    first_s: list[float]
    next_s: list[float]


_System = Callable[[int], Awaitable[_Run]]
"""Writes so many answers at once."""


async def bench_streams(path: Path, options: argparse.Namespace) -> list[Served]:
    """Every system and number of streams in turn, ``rounds`` times, after a run of each that does not count."""
    async with AsyncExitStack() as stack:
        systems: list[tuple[Served, _System]] = []

        def add(run: _System, **what: Any) -> None:
            for streams in options.streams:
                systems.append((Served(model=path.stem, streams=streams, **what), run))

        for devices, rows in itertools.product(options.devices, options.rows):
            ring = await _ring(stack, path, devices, rows, max(options.streams), options.cpus)
            add(ring, devices=devices, rows=rows, cpus=options.cpus)
        if options.beside:
            maximum = max(options.streams)
            add(_plain(stack, path, maximum, None), system=ONE_BATCH, devices=1, rows=maximum)
            if options.rpc is None:
                out.print(f'{RPC}: left out; --rpc "$(tools/setup-llama rpc)" names its library')
            else:
                add(_plain(stack, path, maximum, options.rpc), system=RPC, devices=1 + RPC_SERVERS, rows=maximum)
        for number in range(options.rounds + 1):
            for found, system in systems:
                run = await system(found.streams)
                if number:
                    found.tokens_per_s.append(found.streams * ANSWER_TOKENS / run.seconds)
                    found.first_s += run.first_s
                    found.next_s += run.next_s
    return [found for found, _ in systems]


async def _ring(
    stack: AsyncExitStack, path: Path, devices: int, rows: int, sequences: int, cpus: float | None
) -> _System:
    layers = len(model_profile(open_model(path)).layers)
    cores = _cores()
    share = cpus is None and devices > cores
    limits = [] if cpus is None else [stack.enter_context(LimitedGroup(WHOLE_BYTES, cpus=cpus)) for _ in range(devices)]
    ring = LocalRing(
        path,
        even_windows(layers, devices),
        context=CONTEXT,
        rows=ROWS,
        sequences=sequences,
        batching=Batching(rows=rows, steps=1 if share else devices),
        groups={f"d{i}": limit for i, limit in enumerate(limits)},
        flash=False,
        threads=cores if share else 1,
        pinned=cpus is None and not share,
        folder=Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-serve-"))),
    )
    ring = await stack.enter_async_context(ring)

    async def run(streams: int) -> _Run:
        latest: dict[int, float] = {}
        first: list[float] = []
        between: list[float] = []

        def heard(event: Sampled) -> None:
            now = time.perf_counter()
            before = latest.get(event.request)
            (first if before is None else between).append(now - (begin if before is None else before))
            latest[event.request] = now

        begin = time.perf_counter()
        told = await ring.generate_all([PROMPT[:PROMPT_TOKENS]] * streams, ANSWER_TOKENS, heard=heard)
        seconds = time.perf_counter() - begin
        # Where an answer ended by itself the time is that of as many tokens as the others have.
        return _Run(seconds=seconds * streams * ANSWER_TOKENS / sum(map(len, told)), first_s=first, next_s=between)

    return run


def _cores() -> int:
    return psutil.cpu_count(logical=False) or 1


def _plain(stack: AsyncExitStack, path: Path, sequences: int, library: Path | None) -> _System:
    """llama.cpp alone, or with the RPC ``library`` as the head of servers that have as many layers each as it has."""
    cores = _cores()
    rpc = None if library is None else stack.enter_context(RpcServers(library, RPC_SERVERS, cores))
    layers = len(model_profile(open_model(path)).layers)
    child = PlainChild(
        path,
        cores,
        "off",
        os.environ if rpc is None else environment(os.environ, cores, 0),
        context=CONTEXT * sequences,
        rows=ROWS * 4,
        sequences=sequences,
        rpc=rpc,
        gpu_layers=0 if rpc is None else layers - layers // (1 + RPC_SERVERS) + 1,  # the output matrix is one
    )
    stack.callback(child.close)

    async def run(streams: int) -> _Run:
        told = await asyncio.to_thread(child.answer, answers=streams, of=ANSWER_TOKENS, after=PROMPT_TOKENS)
        return _Run(seconds=told["seconds"], first_s=told["first_s"], next_s=told["next_s"])

    return run


def add_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``serve`` to the command line."""
    one = benches.add_parser("serve", help="several answers at once")
    one.add_argument("--model", type=Path, action="append", help="GGUF file (default: SmolLM2 and a synthetic 1B)")
    one.add_argument("--devices", type=int, nargs="+", help="ring sizes, each device with a thread (default: 1 2)")
    one.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="rows of a step at most")
    one.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--cpus", type=float, help="of a core's time each device has so much (needs cgroups and root)")
    one.add_argument(
        "--beside", action="store_true", help="also what stands for llama-server, llama.cpp's RPC, and a ring of three"
    )
    one.add_argument("--rpc", type=Path, metavar="FILE", help="llama.cpp's RPC library (tools/setup-llama builds it)")
    one.add_argument(
        "--case", choices=list(CASES), nargs="+", help="what must hold of several answers, in place of all"
    )
    one.add_argument("--json", help="also write the figures to this file")


def title(options: argparse.Namespace) -> str:
    """What the figures are of."""
    cores = _cores()
    if options.cpus is not None:
        return f"devices limited to {options.cpus:g} of a core's time each, on {cores} cores"
    shared = [str(count) for count in options.devices if count > cores]
    return "devices with a core each" + (f"; rings of {', '.join(shared)} share {cores} cores" if shared else "")


def show(rows: Sequence[Served], title: str) -> None:
    """Print the rows beside one stream of the same system: a table a model, which a terminal of 80 columns holds."""
    for model in dict.fromkeys(row.model for row in rows):
        of_model = [row for row in rows if row.model == model]
        out.print(_table(of_model, f"{model}: {title}"))


def _table(rows: Sequence[Served], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("system", no_wrap=True)
    for column in (
        "n",
        "rows",
        "streams",
        "all\ntok/s",
        "of one\nstream",
        "next token\nms (95 %)",
        "first\nms",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        alone = next(each for each in rows if key(each) == key(row))
        late_s = sorted(row.next_s)[round(LATE * (len(row.next_s) - 1))]
        table.add_row(
            row.system,
            str(row.devices),
            str(row.rows),
            str(row.streams),
            f"{statistics.median(row.tokens_per_s):.1f}",
            f"{times(row, alone):.2f}",
            f"{1e3 * statistics.median(row.next_s):.0f} ({1e3 * late_s:.0f})",
            f"{1e3 * statistics.median(row.first_s):.0f}",
        )
    return table


def show_wanted(ratios: Sequence[Mapping[str, Any]]) -> None:
    """Print what ``wanted`` found."""
    for each in ratios:
        minimum = "" if each["at_least"] is None else f" (wanted: at least {each['at_least']:g})"
        out.print(f"{each['what']}: {each['value']:.2f}{minimum}")


def plain_data(rows: Sequence[Served], ratios: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For ``--json``."""
    return [*map(asdict, rows), *map(dict, ratios)]
