"""``memory``: models larger than memory, plain llama.cpp compared with ``primad serve`` with the same limit.

    tools/bench memory [--model FILE.gguf ... | --preset NAME ... [--folder DIR] [--keep]] [--limits SHARE ...] [--runs N]
    tools/bench memory --ring | --pressure (``pressure.py``)

Plain llama.cpp is a process in a cgroup with that much memory, including the page cache: it maps the model and leaves
the rest to the kernel. primad gets the limit as ``--max-ram``, which its plan and its ring process keep; its daemon is
not counted. Both must sample the same tokens, which is checked. ``--ring``: devices that together hold the model,
compared with plain llama.cpp with the memory of one of them. A model of ``--preset`` is written to ``--folder`` if the
disk has room for it, and removed at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from halda import KV_TYPES
from tools import synthetic
from tools.benches import pressure
from tools.lab import LabError
from tools.lab.figures import Figure, Row
from tools.lab.harness import Bench, Run, flag, model_named, threads_flag
from tools.lab.memory_runs import MemoryRun, busy_share, file_bytes, median_of, run_plain, run_served
from tools.synth import PRESETS

LIMITS: Final = (0.9, 0.75, 0.5, 0.3)
CONTEXT: Final = 256
BESIDE_BYTES: Final = 450 << 20
"""Bytes of a device of ``--ring`` in addition to its share of the model: the output matrix, buffers, the KV cache."""


class LimitRow(Row):
    """One model on ``devices`` with one limit each; medians of all runs. Fields that begin with ``baseline`` are of
    plain llama.cpp.

    ``ratio`` is the median of ``ratios``, each of two neighbouring runs. ``read_ratio`` is the bytes read over the
    plan's, which should be at most 1.05. Of the experts that tokens used, the share ``hit_share`` was in memory.
    ``streamed`` and ``resident`` count layers; ``read_ahead_bytes`` are read ahead. ``busy_share`` is the most that
    other programs used of the processors before a run. None stands for figures that the machine does not provide.
    """

    columns = (
        "model, devices=n, limit_bytes=limit MB:MB, limit_share=limit:g, baseline_tokens_per_s=plain tok/s:.2f, "
        "tokens_per_s=primad tok/s:.2f, predicted_tokens_per_s=forecast:.2f, ratio=ratio:.2f, "
        "baseline_bytes_read_per_token=plain MB/token:MB, bytes_read_per_token=primad MB/token:MB, "
        "predicted_bytes_per_token=planned MB:MB, read_ratio=of the plan:.2f, stall_ms_per_token=stall ms:.0f, "
        "hit_share=experts found:.0%, streamed, resident, read_ahead_bytes=ahead MB:MB, tokens, busy_share=busy:.0%"
    )

    @property
    def tokens(self) -> str:
        """Whether they are the tokens of plain llama.cpp, for a table."""
        return "same" if self.same_tokens else "DIFFERENT"

    def failures(self) -> Sequence[str]:
        return () if self.same_tokens else [f"{self.model} at {self.limit_share:g}: tokens are not plain llama.cpp's"]

    @classmethod
    def figures(cls, rows: Sequence[LimitRow]) -> Iterator[Figure]:
        for row in rows:
            ring = f" on each of {row.devices} devices" if row.devices > 1 else ""
            name = f"{row.model} with {row.limit_share:g} of its memory{ring}"
            yield Figure(what=f"{name}: tokens/s, of plain llama.cpp", values=tuple(row.ratios), at_least=1.0)
            off = 100 * abs(row.tokens_per_s / row.predicted_tokens_per_s - 1)  # ms a token, as predict has it
            yield Figure(what=f"{name}: a token, predicted: % off", values=(off,), at_most=10.0)
            if row.read_ratio is not None:
                yield Figure(what=f"{name}: bytes read, of the plan's", values=(row.read_ratio,), at_most=1.05)


async def measure(run: Run, model: Path | None) -> None:
    """Run what the command line asks for."""
    if run.options.pressure:
        await pressure.measure(run, model)
        return
    assert model is not None
    size, devices = file_bytes(model), run.options.devices
    if run.options.ring:
        await _limit(run, model, round((size / devices + BESIDE_BYTES) / size, 3), [f"w{i}" for i in range(1, devices)])
        return
    for share in run.options.limits or LIMITS:
        await _limit(run, model, share, ())


async def _limit(run: Run, path: Path, share: float, workers: Sequence[str]) -> None:
    """Add the figures of one limit, of one device or of each device; report it if primad cannot serve with it."""
    limit, options = int(share * file_bytes(path)), run.options
    chosen: dict[str, Any] = {"threads": options.threads, "context": CONTEXT, "tokens": options.tokens or 24}
    plain, ours, busy = list[MemoryRun](), list[MemoryRun](), list[float]()
    for _ in range(options.rounds):
        busy.append(busy_share())
        plain.append(await asyncio.to_thread(run_plain, path, limit, seconds=options.seconds, **chosen))
        busy.append(busy_share())
        try:
            ours.append(await asyncio.to_thread(run_served, path, limit, run.homes(), workers, **chosen))
        except LabError as exc:
            run.say(f"{path.stem} at {share:g}: {exc}")
            return
    devices = ours[-1].devices
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, plain, strict=True)]
    reads, planned = median_of(ours, "read_bytes_per_token"), _planned(devices, "bytes_read_per_token")
    streams = any(each["predicted"]["streamed"] for each in devices)
    run.add(
        LimitRow(
            model=path.stem,
            devices=len(devices),
            model_bytes=file_bytes(path),
            limit_share=share,
            limit_bytes=limit,
            tokens_per_s=statistics.median(each.tokens_per_s for each in ours),
            predicted_tokens_per_s=statistics.median(each.predicted_tokens_per_s for each in ours),
            baseline_tokens_per_s=statistics.median(each.tokens_per_s for each in plain),
            ratio=statistics.median(ratios),
            ratios=ratios,
            bytes_read_per_token=reads,
            baseline_bytes_read_per_token=median_of(plain, "read_bytes_per_token"),
            predicted_bytes_per_token=planned,
            read_ratio=reads / planned if reads is not None and streams else None,
            stall_ms_per_token=1e3 * statistics.median(each.stall_s for each in ours),
            hit_share=median_of(ours, "hit_share"),
            **{key: int(_planned(devices, key)) for key in ("streamed", "resident", "read_ahead_bytes")},
            same_tokens=all(
                all(a == b for a, b in zip(one.tokens, other.tokens, strict=False))  # up to the shorter length
                for one, other in zip(plain, ours, strict=True)
            ),
            busy_share=max(busy),
            runs=options.rounds,
        )
    )


def _planned(devices: Sequence[dict[str, Any]], key: str) -> float:
    return sum(each["predicted"][key] or 0 for each in devices)


def _models(options: argparse.Namespace, stack: ExitStack) -> Sequence[Path | None]:
    """Return the models; those of ``--preset`` exist only while they are needed."""
    if options.model:
        return list(options.model)
    if options.preset:
        paths = {preset: synthetic.model_path(preset, folder=options.folder) for preset in options.preset}
        return [stack.enter_context(synthetic.borrowed(path, name, keep=options.keep)) for name, path in paths.items()]
    if options.pressure:
        return [None]  # ``pressure`` writes a model of the right size
    return list(map(model_named, ("3b-q4k",) if options.ring or options.quick else ("3b-q4k", "8b-q4k")))


BENCH: Final = Bench(
    help="models larger than memory, compared with plain llama.cpp with the same limit",
    measure=measure,
    models=_models,
    rounds=3,
    quick={"rounds": 1, "tokens": 10, "seconds": 8.0},
    flags=(
        flag("--preset", action="append", choices=[name for name in PRESETS if name.endswith("q4k")]),
        flag("--folder", type=Path, default=synthetic.MODELS, help="where models of --preset lie (default: .models)"),
        flag("--limits", type=float, nargs="+", help="memory as a share of the model"),
        flag("--ring", action="store_true", help="instead: a ring that holds the model, against one device"),
        flag("--pressure", action="store_true", help="instead: what a ring too small for its model takes from others"),
        flag("--kv-type", choices=KV_TYPES, help="KV cache type in --pressure (default: f16)"),
        flag("--memory", type=float, default=4.0, help="GB of a device in --pressure"),
        flag("--keep", action="store_true", help="keep the model that --pressure or --preset wrote"),
        flag("--devices", type=int, default=4, help="devices of --ring and --pressure"),
        flag("--tokens", type=int, help="tokens of a run (default: 24; 10 for --pressure)"),
        flag("--seconds", type=float, default=20.0, help="time after which plain llama.cpp is stopped"),
        threads_flag(),
    ),
)
