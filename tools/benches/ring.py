"""``ring``: plain llama.cpp (low-level llama-cpp-python, one process) compared with rings of 1, 2, 3 and 4 local
processes.

Plain llama.cpp runs with extra buffers off and on, and with its threads waiting as by default and as in primad (each
bound to a core); decode and prefill are each compared with the best of the four. With ``--gpu`` all layers and the
output matrix of all systems are on the first GPU that llama.cpp sees. No daemon runs and nothing goes over HTTP, so
that only the cost of the ring shows: ``http`` and ``serve`` measure what clients get.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.profiler.gpus import list_gpus
from primad.system.children.spawn import environment
from tools.lab import LabError
from tools.lab.figures import Figure, Row, by_round, median
from tools.lab.harness import SMALL, Bench, Run, flag, in_thread, threads_flag
from tools.lab.here import measured_cpu
from tools.lab.local_ring import LocalRing, even_windows
from tools.lab.plain_child import PlainChild
from tools.lab.plain_llama import PROMPT

CONTEXT: Final = 1024
PREFILL_ROWS: Final = 512
DECODE_TOKENS: Final = 96
DECODE_AFTER: Final = 40


class RingRow(Row):
    """One system: rates in tokens/s, ratios to plain llama.cpp at its best, by run and their medians."""

    columns = (
        "system, processes=n, decode_tokens_per_s=decode tok/s:.1f, decode_ratio=ratio:.3f, "
        "prefill_tokens_per_s=prefill tok/s:.0f, prefill_ratio=prefill ratio:.3f, hop_median_us=hop us:.0f, "
        "hop_p99_us=p99 us:.0f, all_bytes=all MB:MB, own_bytes=own MB:MB, extra"
    )

    @property
    def all_bytes(self) -> int:
        """Bytes of all processes."""
        return sum(self.rss_bytes)

    @property
    def own_bytes(self) -> int | None:
        """Bytes that the processes share with no other; None if unknown."""
        return sum(self.private_bytes) or None

    @property
    def extra(self) -> str:
        """Number of windows with extra buffers, of all windows."""
        return f"{sum(self.extra_buffers)}/{len(self.extra_buffers)}"

    def heading(self) -> str:
        return str(self.model)

    @classmethod
    def figures(cls, rows: Sequence[RingRow]) -> Iterator[Figure]:
        for row in rows:
            if row.decode_ratios:
                minimum = 0.98 if row.processes == 1 else None
                name = f"{row.model}, {row.processes} local processes, of plain llama.cpp at its best setting"
                yield Figure(what=f"{name}: decode", values=tuple(row.decode_ratios), at_least=minimum)
                yield Figure(what=f"{name}: prefill", values=tuple(row.prefill_ratios))


_Turn = tuple[float, float]
"""Tokens/s of decode and of prefill."""


def _plain(child: PlainChild) -> Callable[[int], Awaitable[_Turn]]:
    def turn(_: int) -> _Turn:
        decode_s = child.ask(decode=DECODE_TOKENS, after=DECODE_AFTER)
        return DECODE_TOKENS / decode_s, PREFILL_ROWS / child.ask(prefill=PREFILL_ROWS)

    return in_thread(turn)


def _ring(ring: LocalRing) -> Callable[[int], Awaitable[_Turn]]:
    async def turn(_: int) -> _Turn:
        sampled, finished = await ring.generate(PROMPT[:DECODE_AFTER], DECODE_TOKENS + 1)
        decode = (len(sampled) - 1) / finished.decode_s if len(sampled) > 1 else math.nan
        return decode, PREFILL_ROWS / (await ring.generate(PROMPT, 1))[1].prompt_s

    return turn


async def measure(run: Run, model: Path) -> None:
    """Load all systems before the first run, and measure them in turn."""
    profile, folder, threads = model_profile(open_model(model)), run.folder(), run.options.threads
    gpu, layers = _first_gpu() if run.options.gpu else "", len(profile.layers)
    cpu = await asyncio.to_thread(measured_cpu, folder, threads, profile)
    settings = [
        (f"extra buffers {extra}, threads {waiting}", extra, environ)
        for extra in ("off", "on")
        for waiting, environ in (("default", os.environ), ("bound", environment(os.environ, threads, 0)))
    ]
    plain = {
        setting: PlainChild(model, threads, extra, environ, context=CONTEXT, gpu_layers=layers + 1 if gpu else 0)
        for setting, extra, environ in ([("on the GPU", "off", os.environ)] if gpu else settings)
    }
    for child in plain.values():
        run.stack.callback(child.close)
    rings: dict[int, LocalRing] = {}
    for count in run.options.devices:
        windows, own = even_windows(layers, count), folder / str(count)
        ring = LocalRing(model, windows, context=CONTEXT, threads=threads, cpu=cpu, folder=own, gpu=gpu)
        rings[count] = await run.stack.enter_async_context(ring)
    turns = await run.alternate(
        {
            **{setting: _plain(child) for setting, child in plain.items()},
            **{count: _ring(ring) for count, ring in rings.items()},
        }
    )
    decode = {name: [rate for rate, _ in its] for name, its in turns.items()}
    prefill = {name: [rate for _, rate in its] for name, its in turns.items()}
    best_decode = max(plain, key=lambda setting: median(decode[setting]) or 0)
    best_prefill = max(plain, key=lambda setting: median(prefill[setting]) or 0)
    for name in turns:
        row = RingRow(
            model=model.stem,
            system="primad",
            processes=1,
            decode_tokens_per_s=median(decode[name]),
            prefill_tokens_per_s=median(prefill[name]),
            **dict.fromkeys(("decode_ratio", "prefill_ratio", "hop_median_us", "hop_p99_us")),
            decode_ratios=[],
            prefill_ratios=[],
            private_bytes=[],
        )
        if isinstance(name, str):
            row.system, row.rss_bytes = f"plain llama.cpp, {name}", [plain[name].rss_bytes]
            row.extra_buffers = ["buffers on" in name]
        else:
            row.processes, row.extra_buffers = name, rings[name].extra_buffers
            row.decode_ratios = by_round(decode[name], decode[best_decode])
            row.prefill_ratios = by_round(prefill[name], prefill[best_prefill])
            row.decode_ratio, row.prefill_ratio = median(row.decode_ratios), median(row.prefill_ratios)
            await _add_status(row, rings[name])
        run.add(row)


async def _add_status(row: RingRow, ring: LocalRing) -> None:
    """Add what the ring's processes report of themselves."""
    statuses = [await ring.status(name) for name in ring.plan.devices]
    hops = sorted(hop for status in statuses for hop in status.hop_s)
    row.hop_median_us = median([hop * 1e6 for hop in hops])
    row.hop_p99_us = hops[len(hops) * 99 // 100] * 1e6 if hops else None
    row.rss_bytes = [status.rss_bytes for status in statuses]
    row.private_bytes = [status.private_bytes for status in statuses]


def _first_gpu() -> str:
    gpus = list_gpus()
    if isinstance(gpus, str) or not gpus:
        raise LabError(str(gpus or "llama.cpp sees no GPU; `primad doctor` says what to install"))
    return gpus[0].id


BENCH: Final = Bench(
    help="plain llama.cpp against rings of local processes",
    measure=measure,
    models=(SMALL, "1b-q4k"),
    rounds=9,
    quick={"rounds": 3},
    all_quick=("--quick", "--model", f".models/{SMALL}.gguf"),
    flags=(
        flag("--devices", type=int, nargs="+", default=[1, 2, 3, 4], help="ring sizes"),
        flag("--gpu", action="store_true", help="all layers on the first GPU that llama.cpp sees"),
        threads_flag(),
    ),
)
