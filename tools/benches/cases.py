"""``serve --case``: requirements on concurrent requests, each case with its figures and its limit.

``prompt``: four requests decode while a prompt of 4,000 tokens arrives, and one of 50 tokens after it. ``turn``: the
second turn of a chat with 2,000 tokens before it. ``first``: the first token of a prompt of 512 tokens, over its time
on one device. These run on devices that count as machines with a core each. ``streaming``: four concurrent requests,
and one, for a model of which half streams, on one device. All use ``primad serve`` over HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from primad.gguf.model import open_model
from primad.gguf.windows import control_tokens
from tools.lab import LabError
from tools.lab.figures import Compared, late
from tools.lab.harness import Run, in_thread
from tools.lab.http_servers import HttpServer
from tools.lab.memory_runs import file_bytes
from tools.lab.plain_llama import prompt_of

LONG_TOKENS: Final = 4000
SHORT_TOKENS: Final = 50
HISTORY_TOKENS: Final = 2000
PROMPT_TOKENS: Final = 512
STREAMING_SHARE: Final = 0.5
"""Share of the model that does not fit for which there is memory, in addition to ``BESIDE_BYTES``."""
BESIDE_BYTES: Final = 350 << 20
STREAMED_TOKENS: Final = 32
_CALM_TOKENS: Final = 50
"""Tokens of each request, before a prompt comes and after it."""


def _head(run: Run, path: Path, devices: int, context: int, sequences: int) -> HttpServer:
    """Start ``primad serve`` on this number of devices, which count as machines with a core each."""
    return run.head(path, devices, "--context", str(context), "--sequences", str(sequences), machines=True)


def _add(run: Run, case: str, path: Path, devices: int, what: str, **more: Any) -> None:
    run.add(Compared(case=case, model=path.stem, devices=devices, what=what, **more))


async def long_prompt(run: Run, path: Path, devices: int) -> None:
    """Send a prompt of 4,000 tokens during four requests, and one of 50 after it."""
    found = await asyncio.to_thread(_long_prompt, _head(run, path, devices, LONG_TOKENS + 96, 6))
    _add(
        run, "prompt", path, devices, "95 % of waits for a token beside a long prompt, of without", at_most=2.0, **found
    )


def _long_prompt(server: HttpServer) -> dict[str, Any]:
    times, leaves = [list[float]() for _ in range(4)], threading.Event()
    how: dict[str, Any] = {"ignore_eos": True, "speculate": False}
    with ThreadPoolExecutor(6) as pool:
        try:
            writing = [
                pool.submit(server.stream, prompt_of(20 + i)[i:], LONG_TOKENS, its, leaves, **how)
                for i, its in enumerate(times)
            ]

            def more(tokens: int) -> float:
                """Wait until each request has generated ``tokens`` more; return the time."""
                wanted = [len(its) + tokens for its in times]
                while any(len(its) < each for its, each in zip(times, wanted, strict=True)):
                    for each in writing:
                        if each.done():
                            raise LabError(f"a response ended after {len(each.result())} tokens")
                    time.sleep(0.01)
                return time.perf_counter()

            calm_s, begin_s = more(10), more(_CALM_TOKENS)
            long = pool.submit(server.stream, prompt_of(LONG_TOKENS), 1, **how)
            short = pool.submit(server.stream, prompt_of(SHORT_TOKENS + 7)[7:], 1, **how)
            end_s, short_s = long.result()[0], short.result()[0]
            after_s = more(_CALM_TOKENS)
        finally:
            leaves.set()
    spans = (calm_s, begin_s), (end_s, after_s), (begin_s, end_s)
    before, after, beside = (
        late([b - a for its in times for a, b in itertools.pairwise(its) if since_s <= b <= until_s])
        for since_s, until_s in spans
    )
    calm = max(before, after)  # completions grow while the prompt is computed, which makes their tokens slower
    note = f"TTFT of the prompt of {SHORT_TOKENS} {short_s - begin_s:.2f} s, of the long one {end_s - begin_s:.2f} s"
    return {"found": [beside], "beside": [calm], "note": note}


async def second_turn(run: Run, path: Path, devices: int) -> None:
    """Measure the TTFT of a chat's second turn over the first turn's."""
    begins = min(control_tokens(open_model(path)))
    server = _head(run, path, devices, 4096, 1)

    def prompt(tokens: int, number: int) -> list[int]:
        return [begins, *prompt_of(tokens + number)[number + 1 :]]

    turns = await run.alternate({"chat": in_thread(partial(chat, server, prompt))})
    first, second, _ = zip(*turns["chat"], strict=True)
    _add(run, "turn", path, devices, "TTFT of the second turn, of the first", found=second, beside=first, at_most=0.2)


def chat(server: HttpServer, prompt: Callable[[int, int], list[int]], number: int) -> list[float]:
    """Return the TTFT of the first turn of a chat, of 2,000 tokens, of its second turn, and of that turn repeated."""
    asked = [token for i in range(HISTORY_TOKENS // 100) for token in prompt(100, 20 * number + i)]
    first_s = []
    for more in (prompt(30, number), [], []):
        begin_s = time.perf_counter()
        found = server.sampled(asked, 32, speculate=False, ignore_eos=True)
        first_s.append(found[0][0] - begin_s)
        asked = [*asked, *(token for _, token in found), *more] if more else asked
    return first_s


async def first_token(run: Run, path: Path, devices: int) -> None:
    """Measure the first token of a prompt of 512 tokens on ``devices`` devices, and on one, in turn."""
    if devices == 1:
        return
    how: dict[str, Any] = {"cache_prompt": False, "speculate": False}
    heads = {count: _head(run, path, count, 1024, 1) for count in (1, devices)}

    def ask(server: HttpServer, _: int) -> float:
        begin_s = time.perf_counter()
        [at_s] = server.stream(prompt_of(PROMPT_TOKENS), 1, **how)
        return at_s - begin_s

    turns = await run.alternate({count: in_thread(partial(ask, server)) for count, server in heads.items()})
    what = f"TTFT of {PROMPT_TOKENS} tokens, of that on one device"
    more = {"found": turns[devices], "beside": turns[1], "note": f"layers {heads[devices].plan()}"}
    _add(run, "first", path, devices, what, at_most=0.6, **more)


async def streaming(run: Run, path: Path, devices: int) -> None:
    """Run four concurrent requests and one, for a model with half of its memory, on one device with all cores."""
    limit = int(STREAMING_SHARE * file_bytes(path)) + BESIDE_BYTES
    every = ("--threads", "2", "--max-ram", f"{limit}B")
    server = run.head(path, 1, "--context", "256", "--sequences", "4", every=every)
    (one_tokens, one_bytes), (four_tokens, four_bytes) = [
        await asyncio.to_thread(_streamed, server, streams) for streams in (1, 4)
    ]
    if not one_bytes:
        raise LabError(f"{path.stem}: nothing streams with {limit / 1e6:.0f} MB; choose a larger --model")
    of = "of four requests, of one"
    _add(run, "streaming", path, 1, f"tokens/s {of}", found=[four_tokens], beside=[one_tokens], at_least=3.0)
    _add(run, "streaming", path, 1, f"bytes read a token {of}", found=[four_bytes], beside=[one_bytes], at_most=0.3)


def _streamed(server: HttpServer, streams: int) -> tuple[float, float]:
    """Return the tokens/s of all ``streams``, and the bytes read per token; their prompts are in the cache."""
    how: dict[str, Any] = {"ignore_eos": True, "speculate": False}
    prompts = [prompt_of(20 + i)[i:] for i in range(streams)]
    server.together(prompts, 4, **how)
    before, begin_s = server.read_bytes(), time.perf_counter()
    times = server.together(prompts, STREAMED_TOKENS, **how)
    tokens = sum(map(len, times))
    return tokens / (max(each[-1] for each in times) - begin_s), (server.read_bytes() - before) / tokens


CASES: Final[Mapping[str, Callable[[Run, Path, int], Awaitable[None]]]] = {
    "prompt": long_prompt,
    "turn": second_turn,
    "first": first_token,
    "streaming": streaming,
}
