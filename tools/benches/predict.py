"""``predict``: is the cost model right? Predicted against measured milliseconds a token and to the first one.

With all memory: rings of 1 to 4 local processes. In each round the device is profiled (the types that the model has), then
every ring decodes; profiles and rings take turns, since this machine may change its speed from minute to minute. Prediction
from the medians of the profiles against the medians of the measurements.

With less memory than the model has (``--limited``): all processes of a ring together may hold a share of the model
(``--limits``) and what a process needs besides. They share one machine, so its cores and its disk, which the plan knows.
The plan is the solver's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from halda import (
    CpuProfile,
    DeviceProfile,
    Infeasible,
    Limits,
    LinkProfile,
    ModelProfile,
    Prediction,
    Solution,
    TypeSpeed,
    Workload,
    evaluate,
    instance,
    solve,
)
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.profiler.effort import Effort
from primad.profiler.measure import measure_home, ram_read_bytes_per_s
from primad.system.process_start import measuring
from tools.lab import LabError
from tools.lab.figures import Figure, Row
from tools.lab.harness import SMALL, Bench, Run, flag, model_named, threads_flag
from tools.lab.here import device_here, links_between, loopback, measured_cpu
from tools.lab.local_ring import LocalRing, even_windows
from tools.lab.memory import LimitedGroup
from tools.lab.memory_runs import ROWS, STEP_TIMEOUT_S, available, file_bytes
from tools.lab.plain_llama import PROMPT

CONTEXT: Final = 1024
PROMPT_TOKENS: Final = 40
ANSWER_TOKENS: Final = 96
LIMITED_ANSWER_TOKENS: Final = 16
WARM_TOKENS: Final = 3
PROCESS_BYTES: Final = 256 << 20
"""What each process may hold besides its share of the model."""
SOLVE_S: Final = 10.0
_CPU_FIGURES: Final = ("step_s", "layer_s", "token_s", "value_s", "wake_s", "row_s", "attention_s")


class Predicted(Row):
    """One ring: milliseconds a token and to the first one. ``limit_share``: memory of all processes, of the model's size;
    None where nothing limits it."""

    columns = (
        "model, limit_share=limit:g, processes=n, measured_ms=ms:.1f, fastest_ms=from:.1f, slowest_ms=to:.1f, "
        "predicted_ms=predicted:.1f, error=error:+.1%, measured_first_ms=first:.0f, predicted_first_ms=predicted first:.0f, "
        "first_error=first error:+.1%"
    )

    @property
    def fastest_ms(self) -> float:
        """Of the rounds."""
        return min(self.measured_rounds_ms, default=0.0)

    @property
    def slowest_ms(self) -> float:
        """Of the rounds."""
        return max(self.measured_rounds_ms, default=0.0)

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return float(self.predicted_ms / self.measured_ms - 1)

    @property
    def first_error(self) -> float:
        """The same of the first token."""
        return float(self.predicted_first_ms / self.measured_first_ms - 1)

    @classmethod
    def figures(cls, rows: Sequence[Predicted]) -> Iterator[Figure]:
        for what, errors, maximum in (
            ("a token", [row.error for row in rows], 10.0),
            ("the first token", [row.first_error for row in rows], 15.0),
        ):
            off = tuple(100 * abs(error) for error in errors)
            what = f"{what}, predicted: % off, {len(off)} cases"
            yield Figure(what=what, values=off, at_most=maximum)


def _row(
    model: str, processes: int, share: float | None, found: Prediction, taken: Sequence[tuple[float, float]]
) -> Predicted:
    """What was ``found`` beside the seconds of a token and to the first one, by run."""
    decode_s, first_s = zip(*taken, strict=True)
    return Predicted(
        model=model,
        processes=processes,
        limit_share=share,
        measured_ms=statistics.median(decode_s) * 1e3,
        predicted_ms=found.tpot_s * 1e3,
        measured_first_ms=statistics.median(first_s) * 1e3,
        predicted_first_ms=found.ttft_s * 1e3,
        measured_rounds_ms=[seconds * 1e3 for seconds in decode_s],
    )


async def measure(run: Run, model: Path) -> None:
    """With all memory, or the model of ``--limited`` with less."""
    if model != run.options.limited:
        await _measure_whole(run, model)
        return
    try:
        await _measure_limited(run, model)
    except LabError as exc:
        run.say(f"tools/bench predict: error: {exc}")


async def _ask(ring: LocalRing, tokens: int) -> tuple[float, float]:
    """Seconds of a token and to the first one."""
    sampled, finished = await ring.generate(PROMPT[:PROMPT_TOKENS], tokens + 1)
    return finished.decode_s / (len(sampled) - 1), finished.prompt_s


async def _measure_whole(run: Run, path: Path) -> None:
    model, threads, folder = model_profile(open_model(path)), run.options.threads, run.folder()
    profiles = [await asyncio.to_thread(measured_cpu, folder, threads, model)]
    rates, links = list[float](), list[LinkProfile]()
    rings: dict[int, LocalRing] = {}
    for count in run.options.processes:
        windows, own = even_windows(len(model.layers), count), folder / str(count)
        ring = LocalRing(path, windows, context=CONTEXT, threads=threads, cpu=profiles[0], folder=own)
        rings[count] = await run.stack.enter_async_context(ring)

    async def profile(turn: int) -> None:
        with measuring():
            if turn > 1:
                profiles.append(await asyncio.to_thread(measured_cpu, folder, threads, model))
            if turn:
                rates.append(await asyncio.to_thread(ram_read_bytes_per_s, threads))
        if turn:
            links.append(await loopback())

    taken: dict[int, list[tuple[float, float]]] = {count: [] for count in rings}
    for turn in range(run.options.rounds + 1):  # the first warms up
        await profile(turn)
        for count, ring in rings.items():
            found = await _ask(ring, ANSWER_TOKENS if turn else 7)
            taken[count] += [found] if turn else []
    cpu, rate = _median_cpu(profiles), statistics.median(rates)
    for count, ring in rings.items():
        names = [f"d{i}" for i in range(count)]
        devices = [device_here(name, cpu, rate) for name in names]
        question = instance(devices, links_between(names, links), model, _work(ANSWER_TOKENS, 512), {})
        run.add(_row(path.stem, count, None, evaluate(ring.plan, question), taken[count]))


def _median_cpu(profiles: Sequence[CpuProfile]) -> CpuProfile:
    def speed(kind: str) -> TypeSpeed:
        found = [speed for profile in profiles for speed in profile.speeds if speed.type == kind]
        rates = ("decode_bytes_per_s", "batch_bytes_per_s", "prefill_flop_per_s")
        return replace(found[0], **{rate: statistics.median(getattr(each, rate) for each in found) for rate in rates})

    return replace(
        profiles[0],
        **{name: statistics.median(getattr(profile, name) for profile in profiles) for name in _CPU_FIGURES},
        speeds=tuple(speed(speeds.type) for speeds in profiles[0].speeds),
    )


def _work(answer_tokens: int, rows: int) -> Workload:
    return Workload(
        context_tokens=CONTEXT,
        kv_type="f16",
        sequences=1,
        prompt_tokens=PROMPT_TOKENS,
        answer_tokens=answer_tokens,
        chunk_rows=rows,
    )


async def _measure_limited(run: Run, path: Path) -> None:
    """Each case is measured and predicted. Raises ``LabError`` where there are no cgroups."""
    model, options = model_profile(open_model(path)), run.options
    with measuring():
        # What streams has no extra buffers, and the rings here have none at all.
        cpu = measured_cpu(run.folder(), options.threads, model).with_extra_buffers(())
        rate = ram_read_bytes_per_s(options.threads)
    links, folder = [await loopback()], run.folder(os.environ.get("TMPDIR", "/var/tmp"))
    for count in options.processes:
        for share in options.limits:
            limit = int(share * file_bytes(path) / count) + PROCESS_BYTES
            names = [f"d{i}" for i in range(count)]
            with ExitStack() as stack:
                groups = {each: stack.enter_context(LimitedGroup(limit)) for each in names}
                limits = {each: Limits(ram_bytes=available(group)[1]) for each, group in groups.items()}
                disk = measure_home(folder, lambda _: None, Effort()).disk
                devices = [device_here(each, cpu, rate, disk) for each in names]
                found = _solved(devices, links_between(names, links), model, limits)
                if isinstance(found, str):
                    run.say(f"{path.stem} at {share:g} in {count}: no plan: {found}")
                    continue
                ring = LocalRing(
                    path,
                    None,
                    plan=found.plan,
                    groups={each: groups[each] for each in found.plan.devices},
                    context=CONTEXT,
                    rows=found.prediction.chunk_rows,
                    threads=options.threads,
                    folder=folder / str(count),
                    step_timeout_s=STEP_TIMEOUT_S,
                )
                async with ring:
                    await ring.generate(PROMPT[:PROMPT_TOKENS], WARM_TOKENS)
                    taken = [await _ask(ring, LIMITED_ANSWER_TOKENS) for _ in range(options.rounds)]
            row = _row(path.stem, count, share, found.prediction, taken)
            run.add(row)
            run.say(f"{path.stem} at {share:g} in {count}: {row.error:+.1%}, first {row.first_error:+.1%}")


def _solved(
    devices: Sequence[DeviceProfile], links: Sequence[LinkProfile], model: ModelProfile, limits: Mapping[str, Limits]
) -> Solution | str:
    """The plan with as many rows a step as memory allows; why there is none."""
    for rows in ROWS:
        work = _work(LIMITED_ANSWER_TOKENS, rows)
        try:
            return solve(devices, links, model, work, limits=limits, heads=["d0"], time_limit_s=SOLVE_S)
        except Infeasible as exc:
            why = str(exc)
    return why


def _models(options: argparse.Namespace, _: ExitStack) -> list[Path]:
    """What is no model is said before minutes were measured."""
    models = list(options.model or [])
    if not models and options.limited is None:
        if options.quick:
            return [model_named(SMALL)]
        models = list(map(model_named, (SMALL, "gemma3-270m-q4_k_m", "1b-q4k")))
        options.limited = model_named("3b-q4k")
    models += [] if options.limited is None else [options.limited]
    for path in models:
        open_model(path)
    return models


BENCH: Final = Bench(
    help="predicted against measured milliseconds a token",
    measure=measure,
    models=_models,
    rounds=2,
    quick={"rounds": 1},
    flags=(
        flag("--limited", type=Path, help="GGUF file with little memory (default: a synthetic 3B without --model)"),
        flag("--limits", type=float, nargs="+", default=[0.9, 0.7, 0.5], help="memory, of the size of that"),
        flag("--processes", type=int, nargs="+", default=[1, 2, 3, 4]),
        threads_flag(2),
    ),
)
