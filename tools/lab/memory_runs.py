"""One run of a model in less memory than it has: plain llama.cpp in a cgroup, or ``primad serve --max-ram``.

Pages of the model that are already in the page cache would be uncounted memory. So every run begins by dropping the
files from it, and runs do not overlap.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from tools.lab import LabError, disk
from tools.lab.http_servers import head_here
from tools.lab.memory import Counters, LimitedGroup
from tools.lab.plain_child import PlainChild
from tools.lab.plain_llama import PROMPT

AFTER: Final = 40
"""Tokens of the prompt."""
WARM_TOKENS: Final = 3
"""Tokens sampled before the measurement: by then the page cache is in its steady state."""
DAEMON_BYTES: Final = 1 << 30
"""Additional memory of a daemon: ``--max-ram`` is the limit of its ring process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """Result of one run. ``tokens`` are those sampled during the measurement, after ``PROMPT[:AFTER]``.

    ``read_bytes_per_token`` is counted by the kernel (None if it does not count). ``devices`` is what primad reports
    about its devices at the end, ``stall_s`` the time that a token waited for a disk, ``hit_share`` the share of picked
    experts that were in memory (None where no experts stream).
    """

    tokens: list[int]
    tokens_per_s: float
    read_bytes_per_token: float | None
    predicted_tokens_per_s: float = 0.0
    devices: Sequence[dict[str, Any]] = ()
    stall_s: float = 0.0
    hit_share: float | None = None


def file_bytes(path: Path) -> int:
    """Return the size of a model."""
    return path.stat().st_size


def busy_share() -> float:
    """Return the share of the processors that others currently use."""
    return psutil.cpu_percent(interval=0.5) / 100


def median_of(runs: Sequence[MemoryRun], figure: str) -> float | None:
    """Return the median of a figure over all runs; None if some run has none."""
    known = [value for run in runs if (value := getattr(run, figure)) is not None]
    return float(statistics.median(known)) if len(known) == len(runs) else None


def run_plain(model: Path, limit: int, *, threads: int, context: int, tokens: int, seconds: float) -> MemoryRun:
    """Run plain llama.cpp, the model mapped: at most ``tokens`` tokens, or as many as ``seconds`` allow, at least
    two."""
    disk.forget(model)
    with LimitedGroup(limit) as group, ExitStack() as stack:
        child = PlainChild(model, threads, "off", os.environ, context=context, rows=AFTER)
        stack.callback(child.close)
        group.add(child.pid)
        child.ask(prefill=AFTER)
        child.ask(more=WARM_TOKENS)
        before, spent, drawn = group.counters(), 0.0, 0
        answer: list[int] = []
        while drawn < tokens and (drawn < 2 or spent < seconds):
            printed = child.answer(more=1)
            spent, drawn, answer = spent + printed["seconds"], drawn + 1, printed["tokens"]
        after = group.counters()
    return MemoryRun(
        tokens=answer,
        tokens_per_s=drawn / spent,
        read_bytes_per_token=_counted(before, after, drawn),
    )


def run_served(
    model: Path, limit: int, homes: Path, workers: Sequence[str] = (), *, threads: int, context: int, tokens: int
) -> MemoryRun:
    """Run ``primad serve`` on machines with this limit each; one computes at a time, so each has all cores."""
    disk.forget(model)
    every = ("--max-ram", f"{limit}B", "--threads", str(threads))
    head = ["--context", str(context), "--sequences", "1", "--extra-buffers", "off", "--speculate", "off"]
    head += ["--prompt", str(AFTER), *(["--use-all"] if workers else [])]
    count = 1 + len(workers)
    with (
        LimitedGroup(count * (limit + DAEMON_BYTES)) as group,
        head_here(
            model, homes, workers, every=every, head=head, machines=bool(workers), bound=False, started=group.add
        ) as server,
    ):
        server.sampled(PROMPT[:AFTER], WARM_TOKENS)
        begin, before = server.status()["devices"], group.counters()
        sampled = server.sampled(PROMPT[:AFTER], tokens + 1)  # the first one costs no step: the prompt is in the cache
        after, status = group.counters(), server.status()
        devices = status["devices"]
    if len(sampled) <= tokens:
        raise LabError(f"the model ended its response after {len(sampled)} tokens; choose another")
    stalled, picked, found = (
        _sum(devices, key) - _sum(begin, key) for key in ("stall_s", "experts_picked", "experts_found")
    )
    return MemoryRun(
        tokens=[token for _, token in sampled],
        tokens_per_s=tokens / (sampled[-1][0] - sampled[0][0]),
        read_bytes_per_token=_counted(before, after, tokens),
        predicted_tokens_per_s=status["predicted"]["tokens_per_s"],
        devices=devices,
        stall_s=stalled / tokens,
        hit_share=found / picked if picked else None,
    )


def _sum(devices: Sequence[dict[str, Any]], key: str) -> float:
    return sum(each["memory"][key] or 0 for each in devices)


def _counted(before: Counters, after: Counters, tokens: int) -> float | None:
    """Return bytes per token; None if the machine does not count: 0 is impossible for a process that has read its
    weights."""
    return (after.read_bytes - before.read_bytes) / tokens if after.read_bytes else None
