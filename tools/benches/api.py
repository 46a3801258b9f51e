"""``api``: the cost of HTTP compared with the ring that it serves.

A head serves a model on one device, and a ring process of the same model runs by itself; both are loaded before the
first run and take turns. Both compute without flash attention, as ``serve`` does if nothing streams: with it a short
prompt of SmolLM2 takes 5 to 11 ms less and a token 4 to 9 % less, which is no cost of HTTP. The cost per token is the
processor time of all the head's processes but its ring process. The client here reads lines and nothing more; on its
own machine it would cost the head nothing at all.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from primad.api.answering.backend import TextModel
from primad.api.dialects.openai.schema import ChatRequest, parse
from primad.api.dialects.openai.tool_use import chat_text
from primad.engine.protocol import GREEDY
from primad.gguf.model import open_model
from primad.head.model.tokenizer import ModelVocabulary
from primad.head.model.vocabulary import chat_template_of
from tools.lab.figures import Figure, Row, by_round
from tools.lab.harness import Bench, Run, threads_flag
from tools.lab.local_ring import LocalRing
from tools.lab.plain_llama import PROMPT

PROMPT_TOKENS: Final = 40
TOKENS: Final = 256
REQUEST_BYTES: Final = 32 << 10
TURNS: Final = 20
PARSED: Final = 40
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        f"field_{number}": {"type": ("string", "integer", "boolean", "number")[number % 4]} for number in range(50)
    },
    "required": [f"field_{number}" for number in range(50)],
    "additionalProperties": False,
}


class ApiRow(Row):
    """By run: seconds per token, to the first token, and of processor per token (systems count in steps of 10 ms: a
    mean)."""

    @classmethod
    def figures(cls, rows: Sequence[ApiRow]) -> Iterator[Figure]:
        for row in rows:
            cpu_ms = statistics.mean(row.cpu_token_s) * 1e3
            first_ms = (statistics.median(row.http_first_s) - statistics.median(row.ring_first_s)) * 1e3
            masks = tuple(100 * (ratio - 1) for ratio in by_round(row.masked_token_s, row.http_token_s))
            requests = tuple(seconds * 1e3 for seconds in row.request_s)
            streams = tuple(by_round(row.ring_token_s, row.http_token_s))
            yield _figure("processor outside the ring process: ms a token", (cpu_ms,), 0.4)
            yield Figure(what="streaming through HTTP: of the ring alone", values=streams, at_least=0.97)
            yield _figure("first token through HTTP: ms more than the ring alone", (first_ms,), 5)
            yield _figure("a mask of a schema with 50 fields: % of a token", masks, 3)
            yield _figure(f"a request of {REQUEST_BYTES >> 10} KB: ms to parse and template", requests, 5)


def _figure(what: str, values: tuple[float, ...], maximum: float) -> Figure:
    return Figure(what=what, values=values, at_most=maximum)


async def measure(run: Run, model: Path) -> None:
    """Measure three systems: the ring alone, HTTP, and HTTP with a schema."""
    requests, threads = time_requests(model), run.options.threads
    head = run.head(model, 1, "--threads", str(threads), "--extra-buffers", "off", "--context", "1024")
    ring = LocalRing(model, None, context=1024, threads=threads, flash=False)
    await run.stack.enter_async_context(ring)
    sampling = msgspec.structs.replace(GREEDY, ignore_eos=True)

    async def alone(_: int) -> tuple[float, float, float]:
        times: list[float] = []
        begin = time.perf_counter()
        await ring.generate(
            PROMPT[:PROMPT_TOKENS], TOKENS, sampling=sampling, heard=lambda _: times.append(time.perf_counter())
        )
        return times[0] - begin, (times[-1] - times[0]) / (len(times) - 1), 0.0

    def ask(**more: Any) -> tuple[float, float, float]:
        cpu_s, begin = head.cpu_s(), time.perf_counter()
        times = head.stream(PROMPT[:PROMPT_TOKENS], TOKENS, cache_prompt=False, **more)  # like the ring alone
        return times[0] - begin, (times[-1] - times[0]) / (len(times) - 1), (head.cpu_s() - cpu_s) / TOKENS

    turns = await run.alternate(
        {
            "ring": alone,
            "http": lambda _: asyncio.to_thread(ask, ignore_eos=True),
            "masked": lambda _: asyncio.to_thread(ask, json_schema=SCHEMA),
        }
    )
    first_s, token_s, cpu_s = (
        {name: [turn[place] for turn in its] for name, its in turns.items()} for place in range(3)
    )
    run.add(
        ApiRow(
            ring_token_s=token_s["ring"],
            ring_first_s=first_s["ring"],
            http_token_s=token_s["http"],
            http_first_s=first_s["http"],
            cpu_token_s=cpu_s["http"],
            masked_token_s=token_s["masked"],
            request_s=requests,
        )
    )


def time_requests(model: Path) -> list[float]:
    """Return the seconds in which a chat of ``REQUEST_BYTES`` becomes the text of a prompt."""
    vocabulary = ModelVocabulary(str(model), chat_template_of(open_model(model)))
    served = TextModel(id="model", created=0, context_tokens=1 << 16, vocabulary=vocabulary)
    text = "the quick brown fox jumps over the lazy dog, " * (REQUEST_BYTES // TURNS // 45)
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number in range(TURNS - 1)]
    body = json.dumps({"messages": messages}).encode()
    taken = []
    for _ in range(PARSED):
        begin = time.perf_counter()
        chat_text(parse(ChatRequest, body), served, now=datetime.now().astimezone())
        taken.append(time.perf_counter() - begin)
    return taken


BENCH: Final = Bench(
    help="the cost of HTTP compared with the ring that it serves",
    measure=measure,
    rounds=7,
    quick={"rounds": 3},
    flags=(threads_flag(2),),
)
