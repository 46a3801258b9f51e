"""Models larger than memory: plain llama.cpp beside primad under the same limit, rounds, and a ring beside one device.

    tools/bench memory [--model FILE.gguf ... | --preset NAME ... [--folder DIR] [--keep]] [--limits SHARE ...]
                       [--quick] [--json FILE]
    tools/bench memory --rounds [--devices N] [--disk MB] [--cpus SHARE] [--streamed SHARE]
    tools/bench memory --ring [--devices N] [--disk MB] [--cpus SHARE]
    tools/bench memory --pressure [--devices N] [--memory GB] [--keep]: see ``bench_pressure.py``
    tools/bench memory --endure [prompt | neighbour] [--limits SHARE ...]: see ``bench_endure.py``

Every run is a process (or one a device) in a cgroup with that much memory, the page cache included. Plain llama.cpp maps
the model and leaves the rest to the kernel. primad is planned as ever: this machine's profile with what is free in the
cgroup, the solver's plan, a ring process that streams what the plan says. Both draw the same tokens, which is checked.
A model of ``--preset`` is written to ``--folder`` where the disk has room for it, and removed at the end.

``--rounds`` and ``--ring`` make several devices of this machine: each has a cgroup with memory, CPU time and a disk speed
of its own, and the network is loopback. Since one device computes at a time, each may have all the cores; but all disks
together are this machine's one disk, so to show where rounds help, ``--rounds`` makes the processors slow, not the disks
fast: one thread and half a processor each, and a model of many small layers, so that little of it is read ahead.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from halda import (
    KV_TYPES,
    DeviceProfile,
    Infeasible,
    Instance,
    ModelProfile,
    Plan,
    arrange,
    assignments,
    evaluate,
    instance,
    residency,
    solve,
)
from halda.streaming import RESERVE_BYTES
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.planning.question import default_workload
from primad.profiler.device import profile_device
from tools import bench_endure, bench_pressure, synthetic
from tools.lab.memory import LimitedGroup
from tools.lab.memory_runs import (
    Run,
    busy_share,
    device_in,
    plan_single_device,
    prefetch_rate,
    run_plain,
    run_ring,
)
from tools.loopback import loopback_links
from tools.synth import PRESETS

LIMITS: Final = (0.9, 0.75, 0.5, 0.3)
CONTEXT: Final = 512
ROUNDS: Final = (1, 2, 4)
ROUNDS_DISK_BYTES_PER_S: Final = 250_000_000
ROUNDS_CPUS: Final = 0.5
SOLVE_S: Final = 60.0
"""More than a daemon spends on a plan: what is shown is what the best plan does."""
QUIET: Final = 0.1
"""Share of the processors that others may use without a word about it."""

Keep = Callable[[list[dict[str, Any]]], None]
"""Keeps the rows that there are so far."""

NOT_MEASURED: Final = "not measured"
"""What a table says of bytes that the machine does not count."""

out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)


@dataclass(kw_only=True)
class Row:
    """One model under one limit; medians of all runs. What begins with ``baseline`` is of plain llama.cpp.

    ``ratio`` is the median of ``ratios``, of runs that stood side by side. ``disk_limit_share``: the time that the bytes
    read would take at the rate that the disk was measured at meanwhile, over the time that a token took. ``read_ratio`` is
    what was read over what the plan says, which should be at most 1.05. Of the experts that were picked a token
    ``hit_share`` were in memory, ``random_hit_share`` where tokens are drawn at random. ``told_bytes_per_token`` is what
    primad itself counts; ``streamed_bytes`` and ``read_ahead_bytes``, which are read ahead, are the plan's.
    ``busy_share`` is the most that others used of the processors before a run.
    """

    model: str
    model_bytes: int
    limit_share: float
    limit_bytes: int
    rows: int
    tokens_per_s: float
    baseline_tokens_per_s: float
    ratio: float
    ratios: list[float]
    bytes_read_per_token: float | None
    baseline_bytes_read_per_token: float | None
    told_bytes_per_token: float | None
    predicted_bytes_per_token: int
    read_ratio: float | None
    predicted_tokens_per_s: float
    disk_bytes_per_s: float
    disk_limit_share: float | None
    stall_ms_per_token: float | None
    hit_share: float | None
    random_hit_share: float | None
    streamed_layers: int
    resident_layers: int
    streamed_bytes: int
    read_ahead_bytes: int
    anonymous_bytes: int
    peak_bytes: int
    oom_kills: int
    swap_bytes: int
    same_tokens: bool
    busy_share: float
    runs: int


def bench_limits(
    models: Sequence[Path],
    shares: Sequence[float],
    *,
    runs: int,
    tokens: int,
    seconds: float,
    threads: int,
    keep: Keep,
) -> list[Row]:
    """Plain llama.cpp and primad in turn under each limit; prints a table."""
    profile = measured_profile(threads)
    rows = []
    for path in models:
        for share in shares:
            row = _limit(path, share, profile, runs=runs, tokens=tokens, seconds=seconds, threads=threads)
            if row is not None:
                rows.append(row)
                keep([asdict(each) for each in rows])
                show([row])
    show(rows)
    return rows


def measured_profile(threads: int) -> DeviceProfile:
    """This machine as ``primad profile`` measures it (a minute the first time)."""
    with tempfile.TemporaryDirectory(prefix="primad-bench-") as home:
        return profile_device("here", Path(home), threads, lambda what: out.print(f"measuring {what}"))


def _limit(
    path: Path, share: float, profile: DeviceProfile, *, runs: int, tokens: int, seconds: float, threads: int
) -> Row | None:
    """The figures under one limit; None, and why, where no plan exists."""
    model, size_bytes = model_profile(open_model(path)), path.stat().st_size
    limit = int(share * size_bytes)
    rates = [prefetch_rate(path)]
    with LimitedGroup(limit) as group:
        device = device_in(group, profile, "d0", rates[0])
    try:
        solution, workload = plan_single_device(device, model, CONTEXT)
    except Infeasible as exc:
        out.print(f"{path.stem} at {share:g}: no plan: {exc}")
        return None
    plain: list[Run] = []
    ours: list[Run] = []
    busy = []
    chosen: dict[str, Any] = {"threads": threads, "context": CONTEXT, "rows": workload.chunk_rows, "tokens": tokens}
    for _ in range(runs):
        busy.append(busy_share())
        with LimitedGroup(limit) as group:
            plain.append(run_plain(path, group, seconds=seconds, **chosen))
        rates.append(prefetch_rate(path))
        busy.append(busy_share())
        with LimitedGroup(limit) as group:
            ours.append(asyncio.run(run_ring(path, solution.plan, {"d0": group}, **chosen)))
    (planned,) = solution.prediction.devices
    rate, speed = statistics.median(rates), _median(ours, "tokens_per_s")
    reads = _median_read(ours)
    counters = [each for run in ours for each in run.counters]
    told = any(status.memory is not None for run in ours for status in run.statuses)
    anonymous = max(each.anonymous_bytes for each in counters)
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, plain, strict=True)]
    kept = assignments(solution.plan, model)["d0"]
    return Row(
        model=path.stem,
        model_bytes=size_bytes,
        limit_share=share,
        limit_bytes=limit,
        rows=workload.chunk_rows,
        tokens_per_s=speed,
        baseline_tokens_per_s=_median(plain, "tokens_per_s"),
        ratio=statistics.median(ratios),
        ratios=ratios,
        bytes_read_per_token=reads,
        baseline_bytes_read_per_token=_median_read(plain),
        told_bytes_per_token=_median(ours, "told_bytes_per_token") if told else None,
        predicted_bytes_per_token=planned.disk_bytes_per_token,
        read_ratio=reads / planned.disk_bytes_per_token if reads is not None and planned.streamed_bytes else None,
        predicted_tokens_per_s=solution.prediction.tokens_per_s,
        disk_bytes_per_s=rate,
        disk_limit_share=None if reads is None else reads / rate * speed,
        stall_ms_per_token=_median(ours, "stall_s_per_token") * 1e3 if told else None,
        hit_share=_median_share([run.hit_share for run in ours]),
        random_hit_share=_median_share([run.random_hit_share for run in ours]),
        streamed_layers=kept.streamed_layers,
        resident_layers=kept.resident_layers,
        streamed_bytes=planned.streamed_bytes,
        read_ahead_bytes=planned.read_ahead_bytes,
        anonymous_bytes=anonymous,
        peak_bytes=max(each.peak_bytes for each in counters),
        oom_kills=sum(each.oom_kills for each in counters),
        swap_bytes=max(each.swap_bytes for each in counters),
        same_tokens=all(_agree(one.tokens, other.tokens) for one, other in zip(plain, ours, strict=True)),
        busy_share=max(busy),
        runs=runs,
    )


def _agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether both draw the same as far as both go."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _median(runs: Sequence[Run], figure: str) -> float:
    return float(statistics.median(getattr(run, figure) for run in runs))


def _median_read(runs: Sequence[Run]) -> float | None:
    """Bytes read a token; None where the machine counted none in some run."""
    figures = [run.read_bytes_per_token for run in runs if run.read_bytes_per_token is not None]
    return statistics.median(figures) if len(figures) == len(runs) else None


def _median_share(shares: Sequence[float | None]) -> float | None:
    """None where some run had none."""
    known = [share for share in shares if share is not None]
    return statistics.median(known) if len(known) == len(shares) else None


def _mega(size: float | None) -> str:
    return NOT_MEASURED if size is None else f"{size / 1e6:.0f}"


def show(rows: Sequence[Row]) -> None:
    """Print the result."""
    table = Table("model", "limit", "plain tok/s", "primad tok/s", "ratio", "plain MB/token", "primad MB/token")
    for column in (
        "planned MB",
        "of the plan",
        "disk MB/s",
        "of disk limit",
        "stall ms",
        "experts found",
        "random",
        "streamed",
        "ahead MB",
        "rows",
        "tokens",
        "busy",
    ):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row.model,
            f"{row.limit_share:g} ({row.limit_bytes / 1e6:.0f} MB)",
            f"{row.baseline_tokens_per_s:.2f}",
            f"{row.tokens_per_s:.2f}",
            f"{row.ratio:.2f}",
            _mega(row.baseline_bytes_read_per_token),
            _mega(row.bytes_read_per_token),
            _mega(row.predicted_bytes_per_token),
            "-" if row.read_ratio is None else f"{row.read_ratio:.2f}",
            f"{row.disk_bytes_per_s / 1e6:.0f}",
            NOT_MEASURED if row.disk_limit_share is None else f"{row.disk_limit_share:.2f}",
            "-" if row.stall_ms_per_token is None else f"{row.stall_ms_per_token:.0f}",
            "-" if row.hit_share is None else f"{row.hit_share:.0%}",
            "-" if row.random_hit_share is None else f"{row.random_hit_share:.0%}",
            f"{row.streamed_layers} of {row.streamed_layers + row.resident_layers}",
            _mega(row.read_ahead_bytes),
            str(row.rows),
            "same" if row.same_tokens else "DIFFERENT",
            f"{row.busy_share:.0%}" + (" (not idle)" if row.busy_share > QUIET else ""),
        )
    out.print(table)


# ---- several devices ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class RingRow:
    """A ring of ``devices`` with ``rounds``: measured and predicted tokens a second.

    ``chosen``: the plan is the solver's own; the others are the best of even windows with that many rounds. ``factor`` is
    what the ring is faster than plain llama.cpp on one of the devices (None where that was not measured).
    """

    model: str
    devices: int
    rounds: int
    chosen: bool
    windows: list[int]
    read_ahead_bytes: list[int]
    streamed_layers: list[int]
    limit_bytes: list[int]
    disk_bytes_per_s: float | None
    tokens_per_s: float
    predicted_tokens_per_s: float
    bytes_read_per_token: float | None
    baseline_tokens_per_s: float | None
    factor: float | None
    oom_kills: int
    busy_share: float


def bench_rounds(
    path: Path,
    *,
    devices: int,
    streamed: float,
    disk_bytes_per_s: int,
    cpus: float | None,
    runs: int,
    tokens: int,
    threads: int,
) -> list[RingRow]:
    """Rings of 1, 2 and 4 rounds on devices that must stream this share of their layers, and the one that the plan picks."""
    fleet = _Fleet(path, devices, streamed, disk_bytes_per_s, cpus, measured_profile(threads), threads)
    chosen = fleet.solved()
    plans = [(plan, False) for rounds in ROUNDS if (plan := fleet.even(rounds)) is not None]
    rows = asyncio.run(_rings(fleet, [*plans, (chosen, True)], runs=runs, tokens=tokens))
    show_rings(rows)
    best = max((row for row in rows if not row.chosen), key=lambda row: row.tokens_per_s)
    out.print(f"fastest of the even ones: {best.rounds} rounds; the plan picks {chosen.rounds}")
    return rows


def bench_ring(
    path: Path,
    *,
    devices: int,
    disk_bytes_per_s: int | None,
    cpus: float | None,
    runs: int,
    tokens: int,
    seconds: float,
    threads: int,
) -> list[RingRow]:
    """A ring that together holds the model, and plain llama.cpp with what the largest of its devices has; the factor."""
    fleet = _Fleet(path, devices, 0.0, disk_bytes_per_s, cpus, measured_profile(threads), threads)
    (row,) = asyncio.run(_rings(fleet, [(fleet.solved(), True)], runs=runs, tokens=tokens))
    speeds = []
    for _ in range(runs):
        with fleet.group(max(fleet.limits)) as group:
            speeds.append(
                run_plain(
                    path, group, threads=threads, context=CONTEXT, rows=fleet.rows, tokens=tokens, seconds=seconds
                ).tokens_per_s
            )
    row.baseline_tokens_per_s = statistics.median(speeds)
    row.factor = row.tokens_per_s / row.baseline_tokens_per_s
    show_rings([row])
    return [row]


class _Fleet:
    """Devices made of this machine, with just the memory to keep all but a share of their layers, evenly cut."""

    rows: Final = 128

    def __init__(
        self,
        path: Path,
        devices: int,
        streamed: float,
        disk_bytes_per_s: int | None,
        cpus: float | None,
        profile: DeviceProfile,
        threads: int,
    ) -> None:
        self.path = path
        self.names = [f"d{i}" for i in range(devices)]
        self.model: ModelProfile = model_profile(open_model(path))
        self.disk_bytes_per_s = disk_bytes_per_s
        self.cpus = cpus
        self.threads = threads
        self._workload = default_workload(CONTEXT, self.rows, "f16")
        rate = prefetch_rate(path)
        self.rate = rate if disk_bytes_per_s is None else min(rate, float(disk_bytes_per_s))
        question = self._question([profile])
        layers = len(self.model.layers)
        held = sum(layer.size_bytes for layer in self.model.layers) + layers * max(question.kv_bytes)
        share = -(-layers // devices) / layers
        read_ahead = 2 * self.model.largest_layer_bytes + RESERVE_BYTES if streamed else 0
        each = int(share * held * (1 - streamed)) + read_ahead
        head = self.model.output_bytes + question.head_bytes(2)
        windows = [1 + (i == 0 and devices > 1) for i in range(devices)]  # of one round
        self.limits = [
            int(1.02 * (each + question.runtime_bytes(count) + (0 if i else head))) for i, count in enumerate(windows)
        ]
        self._profile = profile if cpus is None else slowed(profile, cpus / threads)

    def _question(self, devices: Sequence[DeviceProfile]) -> Instance:
        return instance(devices, loopback_links(self.names), self.model, self._workload, {})

    def group(self, limit: int) -> LimitedGroup:
        """The memory and the disk of one device."""
        folder = self.path.resolve().parent
        return LimitedGroup(limit, cpus=self.cpus, read_bytes_per_s=self.disk_bytes_per_s, folder=folder)

    @contextmanager
    def groups(self) -> Iterator[Mapping[str, LimitedGroup]]:
        """Those of all devices."""
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(self.group(limit))
                for name, limit in zip(self.names, self.limits, strict=True)
            }

    def devices(self) -> list[DeviceProfile]:
        """The profiles of all devices."""
        with self.groups() as groups:
            return [device_in(group, self._profile, name, self.rate) for name, group in groups.items()]

    def solved(self) -> Plan:
        """The solver's plan, with every device in it; says so when it is not sure that it is the best."""
        solution = solve(
            self.devices(),
            loopback_links(self.names),
            self.model,
            self._workload,
            objective="latency",
            require=frozenset(self.names),
            time_limit_s=SOLVE_S,
        )
        if not solution.proven:
            out.print(f"the solver did not end within {SOLVE_S:g} s: there may be a plan better by {solution.gap:.0%}")
        return solution.plan

    def even(self, rounds: int) -> Plan | None:
        """The best plan of so many rounds in which the workers have equal windows; None where none fits."""
        question = self._question(self.devices())
        layers, count = len(self.model.layers), len(self.names)
        found: list[tuple[float, Plan]] = []
        for head in range(1, layers // rounds + 1):
            for other in range(1, layers // rounds + 1):
                if rounds * (head + other * (count - 1)) < layers // 2:
                    continue  # nearly all would be the tail
                try:
                    plan = residency(
                        arrange(self.names, [head, *[other] * (count - 1)], rounds=rounds, model=self.model), question
                    )
                except Infeasible:
                    continue
                prediction = evaluate(plan, question)
                if not prediction.short:
                    found.append((prediction.tpot_s, plan))
        return min(found, key=lambda each: each[0])[1] if found else None

    def predicted(self, plan: Plan) -> float:
        """Tokens a second that a plan forecasts."""
        return 1 / evaluate(plan, self._question(self.devices())).tpot_s


def slowed(profile: DeviceProfile, share: float) -> DeviceProfile:
    """The profile of a device that has this share of the CPU time that ``profile`` was measured with."""
    cpu, share = profile.cpu, min(1.0, share)
    speeds = tuple(
        replace(
            speed,
            decode_bytes_per_s=speed.decode_bytes_per_s * share,
            batch_bytes_per_s=speed.batch_bytes_per_s * share,
            prefill_flop_per_s=speed.prefill_flop_per_s * share,
        )
        for speed in cpu.speeds
    )
    return replace(profile, cpu=replace(cpu, step_s=cpu.step_s / share, layer_s=cpu.layer_s / share, speeds=speeds))


async def _rings(fleet: _Fleet, plans: Sequence[tuple[Plan, bool]], *, runs: int, tokens: int) -> list[RingRow]:
    done: list[list[Run]] = [[] for _ in plans]
    busy = []
    with tempfile.TemporaryDirectory(prefix="primad-bench-", dir=fleet.path.resolve().parent) as folder:
        for _ in range(runs):
            for number, (plan, _) in enumerate(plans):
                busy.append(busy_share())
                with fleet.groups() as groups:
                    done[number].append(
                        await run_ring(
                            fleet.path,
                            plan,
                            groups,
                            threads=fleet.threads,
                            context=CONTEXT,
                            rows=fleet.rows,
                            tokens=tokens,
                            folder=Path(folder),
                        )
                    )
    return [
        RingRow(
            model=fleet.path.stem,
            devices=len(fleet.names),
            rounds=plan.rounds,
            chosen=chosen,
            windows=[len(window.layers) for window in plan.route],
            read_ahead_bytes=[plan.streaming_of(name).read_ahead_bytes for name in plan.devices],
            streamed_layers=[kept.streamed_layers for kept in assignments(plan, fleet.model).values()],
            limit_bytes=fleet.limits,
            disk_bytes_per_s=fleet.disk_bytes_per_s,
            tokens_per_s=_median(ran, "tokens_per_s"),
            predicted_tokens_per_s=fleet.predicted(plan),
            bytes_read_per_token=_median_read(ran),
            baseline_tokens_per_s=None,
            factor=None,
            oom_kills=sum(each.oom_kills for run in ran for each in run.counters),
            busy_share=max(busy),
        )
        for (plan, chosen), ran in zip(plans, done, strict=True)
    ]


def show_rings(rows: Sequence[RingRow]) -> None:
    """Print the result."""
    table = Table("model", "devices", "rounds", "windows", "streamed", "ahead MB", "tok/s", "predicted", "MB/token")
    for column in ("plain tok/s", "factor", "busy"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row.model,
            str(row.devices),
            f"{row.rounds}" + (" (the plan's)" if row.chosen else ""),
            "+".join(map(str, row.windows)),
            "/".join(map(str, row.streamed_layers)),
            "/".join(map(_mega, row.read_ahead_bytes)),
            f"{row.tokens_per_s:.2f}",
            f"{row.predicted_tokens_per_s:.2f}",
            _mega(row.bytes_read_per_token),
            "-" if row.baseline_tokens_per_s is None else f"{row.baseline_tokens_per_s:.2f}",
            "-" if row.factor is None else f"{row.factor:.1f}",
            f"{row.busy_share:.0%}" + (" (not idle)" if row.busy_share > QUIET else ""),
        )
    out.print(table)


def add_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser], threads: int) -> argparse.ArgumentParser:
    """Adds ``memory`` to the command line."""
    one = benches.add_parser("memory", help="models larger than memory, beside plain llama.cpp under the same limit")
    one.add_argument(
        "--model",
        type=Path,
        action="append",
        help="GGUF file (default: synthetic 3B and 8B; the 3B for --ring and --endure, a deep one for --rounds)",
    )
    one.add_argument(
        "--preset",
        action="append",
        choices=[name for name in PRESETS if name.endswith("q4k")],
        help="instead of --model: a synthetic model, written where it is not there and removed at the end",
    )
    one.add_argument(
        "--folder", type=Path, default=synthetic.MODELS, help="where models of --preset lie (default: .models)"
    )
    one.add_argument(
        "--limits",
        type=float,
        nargs="+",
        help="memory as a share of the model (default: 0.9 0.75 0.5 0.3; 0.75 0.5 0.3 for --endure)",
    )
    one.add_argument("--rounds", action="store_true", help="instead: rings of 1, 2 and 4 rounds that stream")
    one.add_argument(
        "--ring", action="store_true", help="instead: a ring that holds the model, beside one of its devices"
    )
    one.add_argument(
        "--pressure", action="store_true", help="instead: what a ring whose model is 1.3 x its memory takes from others"
    )
    one.add_argument(
        "--endure",
        choices=list(bench_endure.KINDS),
        nargs="?",
        const="both",
        help="instead: what must hold in a long prompt and beside a program that takes and frees memory, or one of the two",
    )
    one.add_argument("--prompt", type=int, default=8192, help="tokens of the long prompt of --endure (default: 8192)")
    one.add_argument("--neighbour", type=float, default=500, help="MB that the other program takes (default: 500)")
    one.add_argument(
        "--kv-type", choices=KV_TYPES, help="of --endure and --pressure (default: the first that fits; f16)"
    )
    one.add_argument(
        "--answers", type=Path, help="keep what the whole model answers in --endure in this file, for the next time"
    )
    one.add_argument("--memory", type=float, default=4.0, help="GB of a device in --pressure (default: 4)")
    one.add_argument("--context", type=int, help="tokens of context in --pressure (default: what is computed)")
    one.add_argument("--rows", type=int, help="rows of a step in --pressure (default: what the solver finds best)")
    one.add_argument("--keep", action="store_true", help="keep the model that --pressure or --preset wrote")
    one.add_argument("--devices", type=int, default=4, help="devices of these rings (default: 4)")
    one.add_argument(
        "--disk", type=float, help="MB/s of a device's disk (default: 250 for --rounds, no limit for --ring)"
    )
    one.add_argument("--cpus", type=float, help="CPU time of a device (default: 0.5 for --rounds, no limit for --ring)")
    one.add_argument("--streamed", type=float, default=0.5, help="share of the layers to stream in --rounds")
    one.add_argument("--runs", type=int, default=3, help="runs of each (default: 3)")
    one.add_argument("--tokens", type=int, help="tokens of a run (default: 24; 10 for --pressure, 200 for --endure)")
    one.add_argument("--seconds", type=float, default=20.0, help="time after which plain llama.cpp is stopped")
    one.add_argument("--quick", action="store_true", help="the 3B, one run, 10 tokens; prompts of 256 for --endure")
    one.add_argument("--threads", type=int, help="threads a process (default: one a core; 1 for --rounds)")
    one.add_argument("--json", help="also write the figures to this file")
    one.set_defaults(cores=threads)
    return one


def bench(options: argparse.Namespace, models: Sequence[Path], keep: Keep) -> list[dict[str, Any]]:
    """What the command line asks for; plain data for ``--json``, which ``keep`` is given as it comes."""
    runs, tokens, seconds = (1, 10, 8.0) if options.quick else (options.runs, options.tokens or 24, options.seconds)
    threads = options.threads or options.cores
    if options.pressure:
        return bench_pressure.bench(
            models[0] if models else None,
            devices=options.devices,
            memory_bytes=int(options.memory * 1e9),
            context=options.context,
            rows=options.rows,
            kv_type=options.kv_type or "f16",
            tokens=options.tokens or 10,
            threads=threads,
            keep=options.keep,
            profile=lambda: measured_profile(threads),
        )
    if options.endure:
        return bench_endure.bench(
            models,
            options.limits or bench_endure.LIMITS,
            bench_endure.KINDS[options.endure],
            prompt_tokens=256 if options.quick else options.prompt,
            tokens=options.tokens or (10 if options.quick else bench_endure.TOKENS),
            neighbour_bytes=int(options.neighbour * 1e6),
            kv_types=(options.kv_type,) if options.kv_type else KV_TYPES,
            threads=threads,
            profile=measured_profile(threads),
            answers=options.answers,
            keep=keep,
        )
    disk = None if options.disk is None else int(options.disk * 1e6)
    rows: list[Row] | list[RingRow]
    if options.rounds:
        rows = bench_rounds(
            models[0],
            devices=options.devices,
            streamed=options.streamed,
            disk_bytes_per_s=disk or ROUNDS_DISK_BYTES_PER_S,
            cpus=options.cpus or ROUNDS_CPUS,
            runs=runs,
            tokens=tokens,
            threads=options.threads or 1,
        )
    elif options.ring:
        rows = bench_ring(
            models[0],
            devices=options.devices,
            disk_bytes_per_s=disk,
            cpus=options.cpus,
            runs=runs,
            tokens=tokens,
            seconds=seconds,
            threads=threads,
        )
    else:
        limits = options.limits or LIMITS
        rows = bench_limits(models, limits, runs=runs, tokens=tokens, seconds=seconds, threads=threads, keep=keep)
    return [asdict(row) for row in rows]
