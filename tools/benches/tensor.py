"""``tensor``: one request on devices that compute a share of every layer (``--parallel tensor``), beside one of them
alone and beside both with layers of their own. Each counts as a machine, with a host name and a core of its own.

All are what ``primad serve`` makes of the devices, asked over HTTP in turn; drafts are off, and no prompt is found in the
cache. ``prompt``: seconds to the first token of a prompt of 512. ``answer``: tokens a second of the answer to it, since a
token attends to all before it. Each plan's forecast, for such a request, stands beside what was measured.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from primad.gguf.architectures.layers import layer_count
from primad.gguf.model import open_model
from tools.benches.predict import Predicted
from tools.lab.cores import Cores, shared_cores
from tools.lab.figures import Compared
from tools.lab.harness import SMALL, Bench, Run, flag, in_thread
from tools.lab.http_servers import HttpServer
from tools.lab.local_ring import LocalRing, even_group, even_windows
from tools.lab.plain_llama import prompt_of

DEVICES: Final = 2
PROMPT_TOKENS: Final = 512
ANSWER_TOKENS: Final = 64
OPTIONS: Final = (
    *("--context", "1024", "--sequences", "1", "--extra-buffers", "off"),
    *("--prompt", str(PROMPT_TOKENS), "--answer", str(ANSWER_TOKENS)),
)
HEADS: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "one device": (1, ()),
    "tensor": (DEVICES, ("--parallel", "tensor")),
    "pipeline": (DEVICES, ()),
}
TARGETS: Final = {"two": (1.6, 1.8), "four": (2.6, 3.0), "delay": (1.4, 1.7)}
"""By what is asked for: of an answer, and of a prompt."""


def _ask(server: HttpServer, number: int) -> tuple[float, float]:
    """Tokens a second of an answer, and seconds to its first token."""
    how: dict[str, Any] = {"ignore_eos": True, "cache_prompt": False, "speculate": False}
    begin_s = time.perf_counter()
    return _found(begin_s, server.stream(prompt_of(PROMPT_TOKENS + number)[number:], ANSWER_TOKENS, **how))


def _found(begin_s: float, times: list[float]) -> tuple[float, float]:
    return (len(times) - 1) / (times[-1] - times[0]), times[0] - begin_s


def _predicted(model: Path, name: str, found: dict[str, Any], its: list[tuple[float, float]]) -> Predicted:
    """The plan's forecast beside what was measured."""
    rounds_ms = [1e3 / rate for rate, _ in its]
    return Predicted(
        model=model.stem,
        processes=HEADS[name][0],
        plan=name,
        measured_ms=statistics.median(rounds_ms),
        predicted_ms=found["tpot_ms"],
        measured_first_ms=statistics.median(first_s for _, first_s in its) * 1e3,
        predicted_first_ms=found["ttft_ms"],
        measured_rounds_ms=rounds_ms,
    )


_Turns = dict[str, list[tuple[float, float]]]


async def _served(run: Run, model: Path) -> _Turns:
    """What ``primad serve`` makes of the devices, and what it foretold."""
    heads = {
        name: await asyncio.to_thread(partial(run.head, model, count, *OPTIONS, *more, machines=True))
        for name, (count, more) in HEADS.items()
    }
    forecasts = {name: head.status()["predicted"] for name, head in heads.items()}
    turns = await run.alternate({name: in_thread(partial(_ask, head)) for name, head in heads.items()})
    for name, found in forecasts.items():
        run.add(_predicted(model, name, found, turns[name]))
    return turns


async def _rings(run: Run, model: Path, devices: int) -> _Turns:
    """What ring processes alone do, each with its share of a core, that much further apart."""
    folder, delay_s = run.folder(), run.options.delay_ms / 1e3
    plans: dict[str, dict[str, Any]] = {
        "one device": {"windows": None},
        "tensor": {"windows": None, "plan": even_group(model, devices)},
        "pipeline": {"windows": even_windows(layer_count(open_model(model)), devices)},
    }
    rings = {}
    for number, (name, how) in enumerate(plans.items()):
        names = [f"d{number}{at}" for at in range(devices)]
        cores = run.stack.enter_context(shared_cores(names, run.options.cores))
        ring = LocalRing(
            model,
            how.pop("windows"),
            **how,
            folder=folder / str(number),
            threads=1,
            context=1024,
            latency_s=delay_s,
            started=partial(_put, cores, number),
        )
        rings[name] = await run.stack.enter_async_context(ring)
    return await run.alternate({name: partial(_generate, ring) for name, ring in rings.items()})


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
    """Every system in turn."""
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
        flag("--devices", type=int, default=DEVICES, help="more than two: ring processes alone, without daemons"),
        flag("--cores", type=float, default=1.0, help="what each has of a core; below 1 likewise"),
        flag("--delay-ms", type=float, default=0.0, help="how much further apart they are each way; likewise"),
    ),
    quick={"rounds": 1},
    quick_models=(SMALL,),
)
