"""``tensor``: one request on devices that compute a share of every layer (``--parallel tensor``), compared with one
device, and with both devices when each has layers of its own. Each device counts as a machine, with its own host name
and core.

All systems are served by ``primad serve`` and get requests over HTTP in turn; drafts are off, and no prompt is in the
cache. With more devices, less than a core each, or longer links, only ring processes run, with forecasts of even shares
on such devices. ``prompt``: seconds to the first token of a prompt of 512 tokens. ``answer``: tokens/s of the
completion that follows it, since each token attends to all before it. Each plan's forecast for such a request is shown
next to the measurement.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from halda import CpuProfile, ModelProfile, Plan, Prediction, arrange, evaluate, instance
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.planning.question import default_workload
from tools.benches.predict import Predicted
from tools.lab.cores import Cores, shared_cores
from tools.lab.figures import Compared
from tools.lab.harness import SMALL, Bench, Run, flag, in_thread
from tools.lab.here import links_between, machines_here, measured_cpu
from tools.lab.http_servers import HttpServer
from tools.lab.local_ring import LocalRing, even_group, even_windows
from tools.lab.plain_llama import prompt_of

DEVICES: Final = 2
PROMPT_TOKENS: Final = 512
ANSWER_TOKENS: Final = 64
CONTEXT: Final = 1024
OPTIONS: Final = (
    *("--context", str(CONTEXT), "--sequences", "1", "--extra-buffers", "off"),
    *("--prompt", str(PROMPT_TOKENS), "--answer", str(ANSWER_TOKENS)),
)
HEADS: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "one device": (1, ()),
    "tensor": (DEVICES, ("--parallel", "tensor")),
    "pipeline": (DEVICES, ()),
}
TARGETS: Final = {"two": (1.6, 1.8), "four": (2.6, 3.0), "delay": (1.4, 1.7)}
"""Targets by what is measured: for a completion, and for a prompt."""


def _ask(server: HttpServer, number: int) -> tuple[float, float]:
    """Return the tokens/s of a completion, and the seconds to its first token."""
    how: dict[str, Any] = {"ignore_eos": True, "cache_prompt": False, "speculate": False}
    begin_s = time.perf_counter()
    return _found(begin_s, server.stream(prompt_of(PROMPT_TOKENS + number)[number:], ANSWER_TOKENS, **how))


def _found(begin_s: float, times: list[float]) -> tuple[float, float]:
    return (len(times) - 1) / (times[-1] - times[0]), times[0] - begin_s


def _predicted(
    model: Path, name: str, devices: int, forecast_ms: tuple[float, float], its: list[tuple[float, float]]
) -> Predicted:
    """Return the plan's forecast of TPOT and TTFT next to the measured values."""
    rounds_ms = [1e3 / rate for rate, _ in its]
    return Predicted(
        model=model.stem,
        processes=devices,
        plan=name,
        measured_ms=statistics.median(rounds_ms),
        predicted_ms=forecast_ms[0],
        measured_first_ms=statistics.median(first_s for _, first_s in its) * 1e3,
        predicted_first_ms=forecast_ms[1],
        measured_rounds_ms=rounds_ms,
    )


_Turns = dict[str, list[tuple[float, float]]]


async def _served(run: Run, model: Path) -> _Turns:
    """Measure ``primad serve`` on the devices, and add its forecasts."""
    heads = {
        name: await asyncio.to_thread(partial(run.head, model, count, *OPTIONS, *more, machines=True))
        for name, (count, more) in HEADS.items()
    }
    forecasts = {name: head.status()["predicted"] for name, head in heads.items()}
    turns = await run.alternate({name: in_thread(partial(_ask, head)) for name, head in heads.items()})
    for name, found in forecasts.items():
        run.add(_predicted(model, name, HEADS[name][0], (found["tpot_ms"], found["ttft_ms"]), turns[name]))
    return turns


async def _rings(run: Run, model: Path, devices: int) -> _Turns:
    """Measure ring processes without daemons, each with its share of a core and longer links, and add their
    forecasts."""
    folder, delay_s = run.folder(), run.options.delay_ms / 1e3
    profile, names = model_profile(open_model(model)), [f"d{at}" for at in range(devices)]
    plans = {
        "one device": arrange(names[:1], [len(profile.layers)], rounds=1, model=profile),
        "tensor": even_group(model, devices),
        "pipeline": arrange(names, even_windows(len(profile.layers), devices) or [], rounds=1, model=profile),
    }
    cpu = await asyncio.to_thread(_measured, folder, run.options.cores, profile)
    rings = {}
    for number, (name, plan) in enumerate(plans.items()):
        cores = run.stack.enter_context(shared_cores([f"d{number}{at}" for at in range(devices)], run.options.cores))
        ring = LocalRing(
            model,
            None,
            plan=plan,
            folder=folder / str(number),
            threads=1,
            context=CONTEXT,
            latency_s=delay_s,
            started=partial(_put, cores, number),
        )
        rings[name] = await run.stack.enter_async_context(ring)
    turns = await run.alternate({name: partial(_generate, ring) for name, ring in rings.items()})
    for name, plan in plans.items():
        found = _foretold(plan, names, cpu, profile, delay_s)
        run.add(_predicted(model, name, len(plan.devices), (1e3 * found.tpot_s, 1e3 * found.ttft_s), turns[name]))
    return turns


def _measured(folder: Path, share: float, model: ModelProfile) -> CpuProfile:
    """Return what a thread with ``share`` of a core computes."""
    with shared_cores(["m"], share) as cores, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        cores.add("m", process.submit(os.getpid).result())
        return process.submit(measured_cpu, folder, 1, model).result()


def _foretold(plan: Plan, names: list[str], cpu: CpuProfile, model: ModelProfile, delay_s: float) -> Prediction:
    work = default_workload(CONTEXT, PROMPT_TOKENS, "f16", prompt_tokens=PROMPT_TOKENS, answer_tokens=ANSWER_TOKENS)
    links = links_between(names, delay_s)
    return evaluate(plan, instance(machines_here(names, cpu), links, model, work, {}, names[0]))


def _put(cores: Cores, number: int, device: str, pid: int) -> None:
    cores.add(f"d{number}{device[1:]}", pid)


async def _generate(ring: LocalRing, number: int) -> tuple[float, float]:
    """As ``_ask``, without HTTP."""
    times, begin_s = list[float](), time.perf_counter()
    await ring.generate(
        prompt_of(PROMPT_TOKENS + number)[number:], ANSWER_TOKENS, heard=lambda _: times.append(time.perf_counter())
    )
    return _found(begin_s, times)


async def measure(run: Run, model: Path) -> None:
    """Measure every system in turn."""
    options = run.options
    devices, is_alone = options.devices, options.devices > DEVICES or options.cores < 1 or options.delay_ms > 0
    turns = await (_rings(run, model, devices) if is_alone else _served(run, model))
    targets = TARGETS["delay" if options.delay_ms else "four" if devices > DEVICES else "two"]
    rates, prompts = ({name: [each[at] for each in its] for name, its in turns.items()} for at in (0, 1))
    for beside in ("one device", "pipeline"):
        is_target = beside == "one device"
        run.add(
            Compared(
                case="answer",
                model=model.stem,
                devices=devices,
                what=f"tokens/s, of {beside}",
                found=rates["tensor"],
                beside=rates[beside],
                at_least=targets[0] if is_target else None,
            )
        )
        run.add(
            Compared(
                case="prompt",
                model=model.stem,
                devices=devices,
                what=f"seconds of {beside}, of tensor's",
                found=prompts[beside],
                beside=prompts["tensor"],
                at_least=targets[1] if is_target else None,
            )
        )


BENCH: Final = Bench(
    help="one request on devices that share every layer",
    measure=measure,
    models=(SMALL, "1b-q4k"),
    flags=(
        flag("--devices", type=int, default=DEVICES, help="more than two: ring processes without daemons"),
        flag("--cores", type=float, default=1.0, help="share of a core per device; below 1 likewise"),
        flag("--delay-ms", type=float, default=0.0, help="additional link delay each way; likewise"),
    ),
    quick={"rounds": 1},
    quick_models=(SMALL,),
)
