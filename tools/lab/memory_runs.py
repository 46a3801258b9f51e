"""One run of a model in less memory than it has: plain llama.cpp or a ring of primad's, in cgroups with limits.

What a run finds of its model in the page cache would be memory that nobody counts, so every run begins with the files
forgotten, and runs are made one at a time.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil
from msgspec.structs import replace as replace_fields

from halda import DeviceProfile, Infeasible, ModelProfile, Plan, Solution, Workload, solve
from primad.engine.protocol import GREEDY
from primad.engine.streaming.pages import FileRange, Pages
from primad.planning.question import default_workload
from primad.ring.messages import Sampled, Status
from primad.system.memory import memory
from tools.lab import disk
from tools.lab.local_ring import LocalRing
from tools.lab.memory import Counters, LimitedGroup
from tools.lab.plain_child import PlainChild
from tools.lab.plain_llama import PROMPT

AFTER: Final = 40
"""Tokens of the prompt."""
WARM_TOKENS: Final = 3
"""Drawn before anything is measured: by then the page cache is what it stays."""
ROWS: Final = (512, 256, 128, 64, 32)
"""Rows of a step, in the order in which they are tried: where memory is least, the compute buffer must be small."""
STEP_TIMEOUT_S: Final = 600.0
RANDOM: Final = replace_fields(GREEDY, temperature=1000.0, seed=1)
"""All tokens are about as likely."""
_RATE_RANGES: Final = 6
_RATE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run did. ``tokens`` are those drawn while it was measured, after ``PROMPT[:AFTER]`` and what warmed it up.

    ``counters`` are those of its groups at the end, in order. ``read_bytes_per_token`` is counted by the kernel,
    ``stall_s_per_token`` and ``reported_bytes_per_token`` by primad itself (None of plain llama.cpp). Of the experts that
    steps of decode picked ``hit_share`` were in memory, and ``random_hit_share`` where tokens were drawn at random instead
    of the likeliest (None where no experts stream).
    """

    tokens: list[int]
    tokens_per_s: float
    read_bytes_per_token: float | None
    counters: list[Counters]
    stall_s_per_token: float | None
    reported_bytes_per_token: float | None
    hit_share: float | None
    random_hit_share: float | None
    statuses: list[Status]


def available(group: LimitedGroup) -> tuple[int, int]:
    """(total, available) bytes of memory for a process of the group, told as primad tells them of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".cgroup") as file:
        file.write(group.proc_cgroup())
        file.flush()
        found = memory(Path(file.name))
    return found.total_bytes, found.available_bytes


def device_in(group: LimitedGroup, profile: DeviceProfile, name: str, read_bytes_per_s: float) -> DeviceProfile:
    """``profile`` as that of a device with the memory of ``group`` and a disk of this speed."""
    total, free = available(group)
    return replace(
        profile,
        device=name,
        host=name,
        ram_total_bytes=total,
        ram_available_bytes=free,
        disk=replace(profile.disk, prefetch_bytes_per_s=read_bytes_per_s),
        gpu=None,
    )


def plan_single_device(
    device: DeviceProfile,
    model: ModelProfile,
    context: int,
) -> tuple[Solution, Workload]:
    """The solver's plan for one device, with as many rows a step as its memory allows. Raises ``Infeasible``."""
    for rows in ROWS:
        workload = default_workload(context, rows, "f16")
        try:
            return solve([device], [], model, workload), workload
        except Infeasible:
            if rows == ROWS[-1]:
                raise
    raise AssertionError


def prefetch_rate(path: Path) -> float:
    """Bytes a second that the engine's own call reads of a file, nothing of it being in memory before or after."""
    disk.forget(path)
    size = path.stat().st_size
    length = min(_RATE_BYTES, size // _RATE_RANGES)
    places = [FileRange(str(path), size * i // _RATE_RANGES, length) for i in range(_RATE_RANGES)]
    rates = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        for place in places:
            pages = Pages([place])
            pages.find()
            pages.in_groups()
            start = time.perf_counter()
            pages.read()
            rates.append(place.size / (time.perf_counter() - start))
            pages.release()
            pages.close()
    return statistics.median(rates)


def file_bytes(path: Path) -> int:
    """The size of a model."""
    return path.stat().st_size


def busy_share() -> float:
    """Share of the processors that others use right now."""
    return psutil.cpu_percent(interval=0.5) / 100


def median_of(runs: Sequence[Run], figure: str) -> float | None:
    """The median of a figure of all runs; None where some run has none."""
    known = [value for run in runs if (value := getattr(run, figure)) is not None]
    return float(statistics.median(known)) if len(known) == len(runs) else None


def run_plain(
    model: Path, group: LimitedGroup, *, threads: int, context: int, rows: int, tokens: int, seconds: float
) -> Run:
    """Plain llama.cpp, the model mapped: at most ``tokens`` tokens, or as many as ``seconds`` allow, two at least."""
    disk.forget(model)
    with ExitStack() as stack:
        child = PlainChild(model, threads, "off", os.environ, context=context, rows=rows)
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
    return Run(
        tokens=answer,
        tokens_per_s=drawn / spent,
        read_bytes_per_token=counted((before.read_bytes, after.read_bytes), drawn),
        counters=[after],
        stall_s_per_token=None,
        reported_bytes_per_token=None,
        hit_share=None,
        random_hit_share=None,
        statuses=[],
    )


async def run_ring(
    model: Path,
    plan: Plan,
    groups: Mapping[str, LimitedGroup],
    *,
    threads: int,
    context: int,
    rows: int,
    tokens: int,
    folder: Path | None = None,
) -> Run:
    """A ring of processes, one a group."""
    ring = LocalRing(
        model,
        None,
        plan=plan,
        groups=groups,
        context=context,
        rows=rows,
        threads=threads,
        folder=folder,
        step_timeout_s=STEP_TIMEOUT_S,
    )
    async with ring:
        prompt = PROMPT[:AFTER]
        await ring.generate(prompt, WARM_TOKENS + 1)
        first = await _statuses(ring)
        await ring.generate(prompt, 1)
        second = await _statuses(ring)
        reads: list[int] = []
        times: list[float] = []

        def heard(_: Sampled) -> None:
            times.append(time.perf_counter())
            if len(times) in (1 + WARM_TOKENS, 1 + WARM_TOKENS + tokens):
                reads.append(_reads(groups))

        sampled, _ = await ring.generate(prompt, 1 + WARM_TOKENS + tokens, heard=heard)
        third = await _statuses(ring)
        counters = [group.counters() for group in groups.values()]
        fourth = third
        if _reported(third).picked:
            await ring.generate(prompt, 1 + WARM_TOKENS + tokens, sampling=RANDOM)
            fourth = await _statuses(ring)
    if len(sampled) < 1 + WARM_TOKENS + tokens:
        raise RuntimeError(f"the model ended its answer after {len(sampled)} tokens; choose another prompt")
    reported = [_reported(statuses) for statuses in (first, second, third)]
    extra = WARM_TOKENS + tokens  # what the third question has more than the second: steps of decode alone
    return Run(
        tokens=[event.token for event in sampled],
        tokens_per_s=tokens / (times[-1] - times[WARM_TOKENS]),
        read_bytes_per_token=counted(reads, tokens),
        counters=counters,
        stall_s_per_token=_more([each.stall_s for each in reported], extra),
        reported_bytes_per_token=_more([each.read_bytes for each in reported], extra),
        hit_share=_hit_share(reported[0], reported[1], reported[1], reported[2]),
        random_hit_share=_hit_share(reported[0], reported[1], reported[2], _reported(fourth)),
        statuses=third,
    )


async def _statuses(ring: LocalRing) -> list[Status]:
    return [await ring.status(name) for name in ring.plan.devices]


def counted(reads: Sequence[int], tokens: int) -> float | None:
    """Bytes a token between the first and the last count of a group. None where the machine counts nothing: 0 is no figure
    of a process that has read its weights."""
    return (reads[-1] - reads[0]) / tokens if reads[-1] else None


def _reads(groups: Mapping[str, LimitedGroup]) -> int:
    return sum(group.counters().read_bytes for group in groups.values())


@dataclass(frozen=True, slots=True)
class _Told:
    """What all processes of a ring told about their memory, added up."""

    stall_s: float
    read_bytes: int
    picked: int
    found: int


def _reported(statuses: Sequence[Status]) -> _Told:
    memories = [status.memory for status in statuses if status.memory is not None]
    return _Told(
        sum(each.stall_s for each in memories),
        sum(each.read_bytes for each in memories),
        sum(each.experts_picked for each in memories),
        sum(each.experts_found for each in memories),
    )


def _hit_share(before: _Told, prompted: _Told, begin: _Told, end: _Told) -> float | None:
    """The share of the experts picked in steps of decode that were in memory, None where there were none.

    Between the first two figures lies a question with its prompt, between the last two the same prompt and an answer.
    """
    picked = (end.picked - begin.picked) - (prompted.picked - before.picked)
    found = (end.found - begin.found) - (prompted.found - before.found)
    return min(1.0, max(0.0, found / picked)) if picked > 0 else None


def _more(figures: Sequence[float], steps: int) -> float:
    """What a step of decode adds: a question and its prompt lie between the first two figures, the same and ``steps`` more
    between the last two."""
    first, second, third = figures
    return max(0.0, (third - second) - (second - first)) / steps
