"""``tensor``: one request on two devices that compute a share of every layer (``--parallel tensor``), beside one of them
alone and beside both with layers of their own. Each counts as a machine, with a host name and a core of its own.

All are what ``primad serve`` makes of the devices, asked over HTTP in turn; drafts are off, and no prompt is found in the
cache. ``answer``: tokens a second. ``prompt``: seconds to the first token of a prompt of 512. Each plan's forecast stands
beside what was measured.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from tools.benches.predict import Predicted
from tools.lab.figures import Compared
from tools.lab.harness import SMALL, Bench, Run, in_thread
from tools.lab.http_servers import HttpServer
from tools.lab.plain_llama import prompt_of

DEVICES: Final = 2
PROMPT_TOKENS: Final = 512
SHORT_TOKENS: Final = 16
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
MIN_ANSWER: Final = 1.6
MIN_PROMPT: Final = 1.8


def _ask(server: HttpServer, number: int) -> tuple[float, float]:
    """Tokens a second of an answer, and seconds to the first token of a prompt."""
    how: dict[str, Any] = {"ignore_eos": True, "cache_prompt": False, "speculate": False}
    times = server.stream(prompt_of(SHORT_TOKENS + number)[number:], ANSWER_TOKENS, **how)
    begin_s = time.perf_counter()
    [first_s] = server.stream(prompt_of(PROMPT_TOKENS + number)[number:], 1, **how)
    return (len(times) - 1) / (times[-1] - times[0]), first_s - begin_s


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


async def measure(run: Run, model: Path) -> None:
    """Every system in turn."""
    heads = {
        name: await asyncio.to_thread(partial(run.head, model, count, *OPTIONS, *more, machines=True))
        for name, (count, more) in HEADS.items()
    }
    forecasts = {name: head.status()["predicted"] for name, head in heads.items()}
    turns = await run.alternate({name: in_thread(partial(_ask, head)) for name, head in heads.items()})
    rates, prompts = ({name: [each[at] for each in its] for name, its in turns.items()} for at in (0, 1))
    for name, found in forecasts.items():
        run.add(_predicted(model, name, found, turns[name]))
    for beside in ("one device", "pipeline"):
        is_target = beside == "one device"
        run.add(
            Compared(
                case="answer",
                model=model.stem,
                devices=DEVICES,
                what=f"tokens/s, of {beside}",
                found=rates["tensor"],
                beside=rates[beside],
                at_least=MIN_ANSWER if is_target else None,
            )
        )
        run.add(
            Compared(
                case="prompt",
                model=model.stem,
                devices=DEVICES,
                what=f"seconds of {beside}, of tensor's",
                found=prompts[beside],
                beside=prompts["tensor"],
                at_least=MIN_PROMPT if is_target else None,
            )
        )


BENCH: Final = Bench(
    help="one request on devices that share every layer",
    measure=measure,
    models=(SMALL, "1b-q4k"),
    quick={"rounds": 1},
    quick_models=(SMALL,),
)
