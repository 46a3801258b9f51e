"""``hybrids``: what a model with recurrent layers, which keep a state, gives, served by ``primad serve`` over HTTP.

The model is written here: ``--architecture``, random weights, a layer for multi-token prediction (MTP). One device has
all cores; several devices count as machines with a core each while there are enough cores, otherwise they share all
cores. ``--case``:

- ``turn``: TTFT of the second turn of a chat with 2,000 tokens before it, and of that turn repeated, over the first
  turn's.
- ``pause``: a worker of a ring of three is killed late in a response, or early: the longest wait for a token from then
  on. Each time the ring is new.
- ``mtp``: tokens/s with drafts by the model's own layer, over those of a head with ``--speculate off``: for a model
  built so that the share ``--right`` of drafts is accepted (``lab/controlled.py``), and for one with random weights.
  With ``--quantisation f32 --batching fast`` a step takes as long as reading its weights, whether it has one token or
  three, as with quantised weights on processors with more cores. Batches of F32 are not exact, so the text may differ.
  If batches of other types take proportionally longer, the plan has no drafts by itself (``serve`` reports that), and
  nothing is gained or lost.
- ``four``: total tokens/s of four concurrent requests, over those of one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from primad.gguf.constants import GGUFValueType
from primad.gguf.header import array_value, scalar_value
from primad.planning.batching import BATCHING_MODES
from tools.benches.cases import chat
from tools.lab import LabError
from tools.lab.controlled import DRAWN, write_controlled
from tools.lab.figures import Compared
from tools.lab.harness import CORES, Bench, Run, flag, in_thread
from tools.lab.http_servers import HttpServer
from tools.synth import write_model

BEGINS: Final = 1
"""The token with which a message begins in these models."""
CONTEXT: Final = 4096
AFTER: Final = 60
"""Tokens after a worker was killed."""
STREAMS: Final = 4
SPECULATE: Final = ("off", "mtp")
PLAIN: Final[dict[str, Any]] = {"speculate": False, "ignore_eos": True}
TURN: Final = 0.2
"""Maximum TTFT, over the first turn's."""
PAUSE: Final = 1.5
"""Maximum pause late in a response, over the pause early in it."""
FASTER: Final = {1: 1.3, 2: 1.6}
"""Minimum tokens/s over those without drafts, if the share ``RIGHT`` of drafts is accepted, by number of devices."""
RIGHT: Final = 0.7
SAME: Final = 0.97
"""The same with drafts that are rejected."""


def _add(run: Run, case: str, what: str, found: Sequence[float], beside: Sequence[float], **more: Any) -> None:
    run.add(Compared(model=run.options.architecture, case=case, what=what, found=found, beside=beside, **more))


async def measure(run: Run, _: None) -> None:
    """Run each case by itself."""
    for case in run.options.case:
        for devices in [3] if case == "pause" else run.options.devices:
            async with run.part():
                await CASES[case](run, devices)


def _shape(options: argparse.Namespace) -> dict[str, Any]:
    """Return widths and proportions of heads, states and feed-forward as in Qwen 3.5 9B."""
    width, name = options.width, options.architecture
    keys = {
        "nextn_predict_layers": 1,
        "feed_forward_length": 3 * width,
        "attention.head_count": width // 256,
        "attention.head_count_kv": max(1, width // 1024),
        "attention.key_length": 256,
        "attention.value_length": 256,
        "rope.dimension_count": 64,
        "ssm.inner_size": width,
        "ssm.state_size": 128,
        "ssm.time_step_rank": width // 128,
        "ssm.group_count": width // 256,
    }
    values = {f"{name}.{key}": scalar_value(GGUFValueType.UINT32, count) for key, count in keys.items()}
    sections = array_value(GGUFValueType.INT32, [11, 11, 10, 0])
    values[f"{name}.rope.dimension_sections"] = sections
    return {"layers": options.layers + 1, "width": width, "quantisation": options.quantisation, "values": values}


def _model(run: Run, *, is_right: bool = False) -> tuple[Path, float]:
    """Write a model whose drafts are right in the given share, or a random one; return it with the temperature to
    use."""
    name = run.options.architecture
    path, shape = run.folder() / f"{name}.gguf", _shape(run.options)
    if is_right:
        return path, write_controlled(path, name, right=run.options.right, **shape)
    write_model(path, architecture=name, **shape)
    return path, 1.0


def _head(run: Run, model: Path, devices: int, *options: str, pids: list[int] | None = None) -> HttpServer:
    machines, started = 1 < devices <= CORES, ([] if pids is None else pids).append
    served = ("--context", str(CONTEXT), "--extra-buffers", "off", *options)
    return run.head(model, devices, *served, machines=machines, started=started)


def _prompt(tokens: int, number: int) -> list[int]:
    """Return a prompt that differs for each ``number``, from the second token on."""
    return [BEGINS, *((37 * i + 11 * number) % 300 + 10 for i in range(tokens - 1))]


def _rate(found: Sequence[tuple[float, int]]) -> float:
    return (len(found) - 1) / (found[-1][0] - found[0][0])


async def turn(run: Run, devices: int) -> None:
    """Run one chat after the other, of two turns, with the second turn repeated."""
    server = _head(run, _model(run)[0], devices, "--sequences", "1")

    turns = await run.alternate({"chat": in_thread(partial(chat, server, _prompt))})
    first, second, again = zip(*turns["chat"], strict=True)
    for what, found in (("TTFT of the second turn", second), ("TTFT of it asked again", again)):
        _add(run, "turn", what, found, first, devices=devices, at_most=TURN)


async def pause(run: Run, devices: int) -> None:
    """Kill the last of the workers."""
    model, lengths = _model(run)[0], run.options.lengths
    texts = {length: list[list[int]]() for length in lengths}
    again = {length: list[int]() for length in lengths}

    async def killed(length: int, number: int) -> float:
        if not number:
            return 0.0  # each ring is new, so there is no warm-up round
        pids: list[int] = []
        async with run.part():
            server = _head(run, model, devices, "--sequences", "1", pids=pids)
            pause_s = await asyncio.to_thread(_pause, server, pids[-2], length, texts[length])
            again[length].append((server.status()["kv"] or {}).get("computed_again_tokens", length))
            return pause_s

    found = await run.alternate({length: partial(killed, length) for length in lengths})
    shortest = min(len(its[0]) for its in texts.values())
    is_same = len({tuple(text[:shortest]) for its in texts.values() for text in its}) == 1
    what = f"s of pause at {lengths[-1]} tokens, of that at {lengths[0]}"
    note = f"tokens computed again {' and '.join(str(each) for each in again.values())}"
    early, late = found.values()
    _add(run, "pause", what, late, early, devices=devices, at_most=PAUSE, is_same=is_same, note=note)


def _pause(server: HttpServer, worker: int, length: int, texts: list[list[int]]) -> float:
    found: list[tuple[float, int]] = []
    asking = threading.Thread(target=server.sampled, args=(_prompt(20, 0), length + AFTER, found), kwargs=PLAIN)
    asking.start()
    while len(found) < length and asking.is_alive():
        time.sleep(0.002)
    os.kill(worker, signal.SIGKILL)
    asking.join()
    if len(found) < length + AFTER:
        raise LabError(f"a response ended after {len(found)} tokens")
    texts.append([token for _, token in found])
    return max(b - a for (a, _), (b, _) in itertools.pairwise(found[length - 1 :]))


async def mtp(run: Run, devices: int) -> None:
    """Measure both models."""
    for is_right in (True, False):
        async with run.part():
            await _drafted(run, devices, is_right)


async def _drafted(run: Run, devices: int, is_right: bool) -> None:
    """Run heads with drafts and without in turn."""
    options, (model, temperature) = run.options, _model(run, is_right=is_right)
    every = ("--sequences", "1", "--batching", options.batching, "--speculate")
    heads = {kind: _head(run, model, devices, *every, kind) for kind in SPECULATE}

    def ask(head: HttpServer, number: int) -> list[tuple[float, int]]:
        how = {"temperature": temperature, "seed": 1 + number, "ignore_eos": True, **DRAWN}
        return head.sampled(_prompt(40, number), options.tokens, **how)

    turns = await run.alternate({kind: in_thread(partial(ask, head)) for kind, head in heads.items()})
    (off_s, off), (on_s, on) = (
        (list(map(_rate, its)), [[token for _, token in found] for found in its]) for its in turns.values()
    )
    drafts, plans = heads["mtp"].status()["drafts"], " and ".join(head.plan() for head in heads.values())
    held = "no drafts"
    if drafts is not None:
        judged = drafts["accepted"] + drafts["missed"]
        held = f"{drafts['accepted']} of {judged} drafts held, {drafts['drafted'] - judged} more behind wrong ones"
    note = f"layers {plans}, {held}"
    faster = FASTER.get(devices) if options.right == RIGHT else None
    what, at_least = (f"{10 * options.right:g} of 10 right", faster) if is_right else ("random", SAME)
    more = {"devices": devices, "at_least": at_least, "is_same": off == on, "note": note}
    _add(run, "mtp", f"tokens/s with MTP, {what}", on_s, off_s, **more)


async def four(run: Run, devices: int) -> None:
    """Run four requests and one in turn."""
    server = _head(run, _model(run)[0], devices, "--sequences", str(STREAMS))

    def ask(streams: int, number: int) -> float:
        def one(place: int) -> list[tuple[float, int]]:
            return server.sampled(
                _prompt(40, STREAMS * number + place), run.options.tokens, cache_prompt=False, **PLAIN
            )

        with ThreadPoolExecutor(streams) as pool:
            found = list(pool.map(one, range(streams)))
        took_s = max(its[-1][0] for its in found) - min(its[0][0] for its in found)
        return sum(map(len, found)) / took_s

    turns = await run.alternate({streams: in_thread(partial(ask, streams)) for streams in (1, STREAMS)})
    what, note = "tokens/s of four requests, of one", f"layers {server.plan()}"
    _add(run, "four", what, turns[STREAMS], turns[1], devices=devices, note=note)


CASES: Final[Mapping[str, Callable[[Run, int], Awaitable[None]]]] = {
    "turn": turn,
    "pause": pause,
    "mtp": mtp,
    "four": four,
}

BENCH: Final = Bench(
    help="models whose layers partly keep a state",
    measure=measure,
    models=None,
    rounds=3,
    quick={"rounds": 1, "tokens": 96, "lengths": [100, 400]},
    flags=(
        flag("--case", choices=list(CASES), nargs="+", default=list(CASES)),
        flag("--architecture", choices=("qwen35", "qwen35moe"), default="qwen35"),
        flag("--layers", type=int, default=16, help="layers without the one for multi-token prediction"),
        flag("--width", type=int, default=1024, help="a multiple of 256"),
        flag("--quantisation", choices=("q8_0", "f16", "bf16", "f32"), default="q8_0"),
        flag("--devices", type=int, nargs="+", default=[1, 2], help="devices of all cases except pause, which has 3"),
        flag("--lengths", type=int, nargs=2, default=[100, 4000], help="tokens of a response before a worker dies"),
        flag("--tokens", type=int, default=192, help="tokens of a response with drafts, or with other requests"),
        flag("--right", type=float, default=RIGHT, help="share of accepted drafts of the model built for that"),
        flag("--batching", choices=BATCHING_MODES, default="auto", help="batching of heads with drafts and without"),
    ),
)
