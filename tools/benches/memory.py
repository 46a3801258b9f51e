"""``memory``: models larger than memory, plain llama.cpp beside primad under the same limit.

    tools/bench memory [--model FILE.gguf ... | --preset NAME ... [--folder DIR] [--keep]] [--limits SHARE ...] [--runs N]
    tools/bench memory --rounds | --ring: ``streaming_rings.py``; --pressure: ``pressure.py``

Every run is a process (or one a device) in a cgroup with that much memory, the page cache included. Plain llama.cpp maps
the model and leaves the rest to the kernel. primad is planned as ever: this machine's profile with what is free in the
cgroup, the solver's plan, a ring process that streams what the plan says. Both draw the same tokens, which is checked.
A model of ``--preset`` is written to ``--folder`` where the disk has room for it, and removed at the end.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from halda import KV_TYPES, DeviceProfile, Infeasible, assignments
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from tools import synthetic
from tools.benches import pressure, streaming_rings
from tools.lab.figures import Figure, Row
from tools.lab.harness import CORES, Bench, flag, model_named, threads_flag
from tools.lab.harness import Run as Command
from tools.lab.here import measured_profile
from tools.lab.memory import LimitedGroup
from tools.lab.memory_runs import (
    Run,
    busy_share,
    device_in,
    file_bytes,
    median_of,
    plan_single_device,
    prefetch_rate,
    run_plain,
    run_ring,
)
from tools.synth import PRESETS

LIMITS: Final = (0.9, 0.75, 0.5, 0.3)
CONTEXT: Final = 512
ROUNDS: Final = -1
"""``--rounds`` without a number: rings of several rounds."""


class LimitRow(Row):
    """One model under one limit; medians of all runs. What begins with ``baseline`` is of plain llama.cpp.

    ``ratio`` is the median of ``ratios``, of runs that stood side by side. ``disk_limit_share``: the time that the bytes
    read would take at the rate that the disk was measured at meanwhile, over the time that a token took. ``read_ratio`` is
    what was read over what the plan says, which should be at most 1.05. Of the experts that were picked a token
    ``hit_share`` were in memory, ``random_hit_share`` where tokens are drawn at random. ``reported_bytes_per_token`` is what
    primad itself counts; ``streamed_bytes`` and ``read_ahead_bytes``, which are read ahead, are the plan's.
    ``busy_share`` is the most that others used of the processors before a run. None is what the machine does not count.
    """

    columns = (
        "model, limit_share=limit:g, limit_bytes=limit MB:MB, baseline_tokens_per_s=plain tok/s:.2f, "
        "tokens_per_s=primad tok/s:.2f, ratio=ratio:.2f, baseline_bytes_read_per_token=plain MB/token:MB, "
        "bytes_read_per_token=primad MB/token:MB, predicted_bytes_per_token=planned MB:MB, read_ratio=of the plan:.2f, "
        "disk_bytes_per_s=disk MB/s:MB, disk_limit_share=of disk limit:.2f, stall_ms_per_token=stall ms:.0f, "
        "hit_share=experts found:.0%, random_hit_share=random:.0%, streamed_layers=streamed, resident_layers=resident, "
        "read_ahead_bytes=ahead MB:MB, rows, tokens, busy_share=busy:.0%"
    )

    @property
    def tokens(self) -> str:
        """Whether they are those of plain llama.cpp, for a table."""
        return "same" if self.same_tokens else "DIFFERENT"

    def failures(self) -> Sequence[str]:
        held = {"tokens are plain llama.cpp's": self.same_tokens, "nobody is killed": not self.oom_kills}
        held["nothing is swapped"] = not self.swap_bytes
        return [f"{self.model} at {self.limit_share:g}: not so: {what}" for what, holds in held.items() if not holds]

    @classmethod
    def figures(cls, rows: Sequence[LimitRow]) -> Iterator[Figure]:
        for row in rows:
            name = f"{row.model} with {row.limit_share:g} of its memory"
            yield Figure(what=f"{name}: tokens/s, of plain llama.cpp", values=tuple(row.ratios), at_least=1.0)
            if row.read_ratio is not None:
                yield Figure(what=f"{name}: bytes read, of the plan's", values=(row.read_ratio,), at_most=1.05)


async def measure(run: Command, model: Path | None) -> None:
    """What the command line asks for."""
    options = run.options
    if options.pressure:
        await pressure.measure(run, model)
        return
    assert model is not None
    profile = measured_profile(run.folder(), options.threads)
    if options.streams:
        await streaming_rings.measure_rounds(run, model, profile)
    elif options.ring:
        await streaming_rings.measure_ring(run, model, profile)
    else:
        for share in options.limits or LIMITS:
            await _limit(run, model, share, profile)


async def _limit(run: Command, path: Path, share: float, profile: DeviceProfile) -> None:
    """The figures under one limit; says why where no plan exists."""
    model, limit = model_profile(open_model(path)), int(share * file_bytes(path))
    rates, busy = [prefetch_rate(path)], list[float]()
    with LimitedGroup(limit) as group:
        device = device_in(group, profile, "d0", rates[0])
    try:
        solution, workload = plan_single_device(device, model, CONTEXT)
    except Infeasible as exc:
        run.say(f"{path.stem} at {share:g}: no plan: {exc}")
        return
    chosen: dict[str, Any] = {"threads": run.options.threads, "context": CONTEXT, "rows": workload.chunk_rows}
    chosen["tokens"] = run.options.tokens or 24
    plain, ours = list[Run](), list[Run]()
    for _ in range(run.options.rounds):
        busy.append(busy_share())
        with LimitedGroup(limit) as group:
            plain.append(run_plain(path, group, seconds=run.options.seconds, **chosen))
        rates.append(prefetch_rate(path))
        busy.append(busy_share())
        with LimitedGroup(limit) as group:
            ours.append(await run_ring(path, solution.plan, {"d0": group}, **chosen))
    (planned,) = solution.prediction.devices
    rate, speed = statistics.median(rates), statistics.median(each.tokens_per_s for each in ours)
    reads, stall_s = median_of(ours, "read_bytes_per_token"), median_of(ours, "stall_s_per_token")
    counters = [each for each_run in ours for each in each_run.counters]
    reported = any(status.memory is not None for each_run in ours for status in each_run.statuses)
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, plain, strict=True)]
    kept = assignments(solution.plan, model)["d0"]
    run.add(
        LimitRow(
            model=path.stem,
            model_bytes=file_bytes(path),
            limit_share=share,
            limit_bytes=limit,
            rows=workload.chunk_rows,
            tokens_per_s=speed,
            baseline_tokens_per_s=statistics.median(each.tokens_per_s for each in plain),
            ratio=statistics.median(ratios),
            ratios=ratios,
            bytes_read_per_token=reads,
            baseline_bytes_read_per_token=median_of(plain, "read_bytes_per_token"),
            reported_bytes_per_token=median_of(ours, "reported_bytes_per_token") if reported else None,
            predicted_bytes_per_token=planned.disk_bytes_per_token,
            read_ratio=reads / planned.disk_bytes_per_token if reads is not None and planned.streamed_bytes else None,
            predicted_tokens_per_s=solution.prediction.tokens_per_s,
            disk_bytes_per_s=rate,
            disk_limit_share=None if reads is None else reads / rate * speed,
            stall_ms_per_token=stall_s * 1e3 if reported and stall_s is not None else None,
            hit_share=median_of(ours, "hit_share"),
            random_hit_share=median_of(ours, "random_hit_share"),
            streamed_layers=kept.streamed_layers,
            resident_layers=kept.resident_layers,
            streamed_bytes=planned.streamed_bytes,
            read_ahead_bytes=planned.read_ahead_bytes,
            anonymous_bytes=max(each.anonymous_bytes for each in counters),
            peak_bytes=max(each.peak_bytes for each in counters),
            oom_kills=sum(each.oom_kills for each in counters),
            swap_bytes=max(each.swap_bytes for each in counters),
            same_tokens=all(
                all(a == b for a, b in zip(one.tokens, other.tokens, strict=False))  # as far as both go
                for one, other in zip(plain, ours, strict=True)
            ),
            busy_share=max(busy),
            runs=run.options.rounds,
        )
    )


def _models(options: argparse.Namespace, stack: ExitStack) -> Sequence[Path | None]:
    """Those of ``--preset`` only for as long as they are needed."""
    options.streams = options.rounds == ROUNDS
    options.rounds = options.counted if options.rounds in (None, ROUNDS) else options.rounds
    options.threads = options.threads or (1 if options.streams else CORES)
    if options.model:
        return list(options.model)
    if options.preset:
        paths = {preset: synthetic.model_path(preset, folder=options.folder) for preset in options.preset}
        return [stack.enter_context(synthetic.borrowed(path, name, keep=options.keep)) for name, path in paths.items()]
    if options.pressure:
        return [None]  # made to measure
    if options.streams:
        return [model_named("deep-q4k")]
    if options.ring or options.quick:
        return [model_named("3b-q4k")]
    return list(map(model_named, ("3b-q4k", "8b-q4k")))


BENCH: Final = Bench(
    help="models larger than memory, beside plain llama.cpp under the same limit",
    measure=measure,
    models=_models,
    rounds=None,
    quick={"counted": 1, "tokens": 10, "seconds": 8.0},
    flags=(
        flag("--preset", action="append", choices=[name for name in PRESETS if name.endswith("q4k")]),
        flag("--folder", type=Path, default=synthetic.MODELS, help="where models of --preset lie (default: .models)"),
        flag("--limits", type=float, nargs="+", help="memory as a share of the model"),
        flag(
            "--rounds",
            type=int,
            nargs="?",
            const=ROUNDS,
            help="instead: rings of 1, 2 and 4 rounds that stream; with a number the same as --runs",
        ),
        flag("--ring", action="store_true", help="instead: a ring that holds the model, beside one of its devices"),
        flag("--pressure", action="store_true", help="instead: what a ring too small for its model takes from others"),
        flag("--kv-type", choices=KV_TYPES, help="of --pressure (default: f16)"),
        flag("--memory", type=float, default=4.0, help="GB of a device in --pressure"),
        flag("--context", type=int, help="tokens of context in --pressure (default: what is computed)"),
        flag("--rows", type=int, help="rows of a step in --pressure (default: what the solver finds best)"),
        flag("--keep", action="store_true", help="keep the model that --pressure or --preset wrote"),
        flag("--devices", type=int, default=4, help="devices of these rings"),
        flag("--disk", type=float, help="MB/s of a device's disk (default: 250 for --rounds, no limit for --ring)"),
        flag("--cpus", type=float, help="CPU time of a device (default: 0.5 for --rounds, no limit for --ring)"),
        flag("--streamed", type=float, default=0.5, help="share of the layers to stream in --rounds"),
        flag("--runs", type=int, dest="counted", default=3, help="runs of each"),
        flag("--tokens", type=int, help="tokens of a run (default: 24; 10 for --pressure)"),
        flag("--seconds", type=float, default=20.0, help="time after which plain llama.cpp is stopped"),
        threads_flag(None),
    ),
)
