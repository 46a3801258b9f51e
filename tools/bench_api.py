"""``tools/bench api``: what HTTP costs beside the ring that it serves.

A head serves a model alone, and a ring process of the same model runs by itself; both are loaded before the first run and
take turns. Both attend without flash attention, as ``serve`` does where nothing streams: with it a short prompt of SmolLM2
takes 5 to 11 ms less and a token 4 to 9 %, which is no cost of HTTP. What is said of a token is the processor time of
everything of the head but its ring process. The client here reads lines and nothing more; on a machine of its own it would
cost the head nothing at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from primad.api.answering.backend import TextModel
from primad.api.dialects.openai.schema import ChatRequest, parse
from primad.api.dialects.openai.tool_use import chat_text
from primad.engine.protocol import GREEDY
from primad.gguf.model import open_model
from primad.head.model.tokenizer import ModelVocabulary
from primad.head.model.vocabulary import chat_template_of
from primad.ring.messages import Sampled
from tools.demo import PRIMAD
from tools.lab.http_servers import HttpServer, head_here
from tools.lab.local_ring import LocalRing
from tools.lab.plain_llama import PROMPT
from tools.lab.served import by_round

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

out = Console(highlight=False)


@dataclass
class ApiFigures:
    """Run by run: seconds a token, to the first one, and of the processor a token (which systems count in 10 ms: a mean)."""

    ring_token_s: list[float] = field(default_factory=list)
    ring_first_s: list[float] = field(default_factory=list)
    http_token_s: list[float] = field(default_factory=list)
    http_first_s: list[float] = field(default_factory=list)
    cpu_token_s: list[float] = field(default_factory=list)
    masked_token_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)

    def rows(self) -> list[tuple[str, float, str, str, float]]:
        """What is judged: its name, the figure, its unit, and what it should be: at least, at most or below so much."""

        def median(values: list[float]) -> float:
            return statistics.median(values)

        masks = median(by_round(self.masked_token_s, self.http_token_s)) - 1
        return [
            (
                "processor outside the ring process",
                statistics.mean(self.cpu_token_s) * 1e3,
                "ms a token",
                "at most",
                0.4,
            ),
            (
                "streaming through HTTP",
                median(by_round(self.ring_token_s, self.http_token_s)),
                "of the ring alone",
                "at least",
                0.97,
            ),
            (
                "first token through HTTP",
                (median(self.http_first_s) - median(self.ring_first_s)) * 1e3,
                "ms more than the ring alone",
                "at most",
                5,
            ),
            ("a mask of a schema with 50 fields", masks * 100, "% of a token", "below", 3),
            (
                f"a request of {REQUEST_BYTES >> 10} KB",
                median(self.request_s) * 1e3,
                "ms to parse and template",
                "below",
                5,
            ),
        ]


def measure(model: Path, rounds: int, threads: int) -> ApiFigures:
    """All figures of ``model``, in so many rounds after one to warm up. Raises ``LabError``."""
    found = ApiFigures(request_s=time_requests(model))
    with tempfile.TemporaryDirectory(prefix="primad-api-") as name:
        profile = ["profile", "--home", str(Path(name) / "head")]
        subprocess.run([PRIMAD, *profile], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        serving = ("--threads", str(threads), "--extra-buffers", "off", "--context", "1024")
        with head_here(model, Path(name), head=serving) as head:
            asyncio.run(_alternate(model, head, found, rounds, threads))
    return found


class _Clock:
    """When tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def hear(self, _: Sampled) -> None:
        self.times.append(time.perf_counter())


def _stream(head: HttpServer, **more: Any) -> tuple[float, float]:
    """Seconds to the first token, and between tokens."""
    begin = time.perf_counter()
    times = head.stream(PROMPT[:PROMPT_TOKENS], TOKENS, cache_prompt=False, **more)  # as the ring alone
    return times[0] - begin, (times[-1] - times[0]) / (len(times) - 1)


async def _alternate(model: Path, head: HttpServer, found: ApiFigures, rounds: int, threads: int) -> None:
    sampling = msgspec.structs.replace(GREEDY, ignore_eos=True)
    async with LocalRing(model, None, context=1024, threads=threads, flash=False) as ring:
        for number in range(rounds + 1):
            clock = _Clock()
            begin = time.perf_counter()
            sampled, _ = await ring.generate(PROMPT[:PROMPT_TOKENS], TOKENS, sampling=sampling, heard=clock.hear)
            times = clock.times
            cpu_s = head.cpu_s()
            http_first_s, http_token_s = await asyncio.to_thread(_stream, head, ignore_eos=True)
            cpu_s = head.cpu_s() - cpu_s
            _, masked_token_s = await asyncio.to_thread(_stream, head, json_schema=SCHEMA)
            if not number:
                continue
            found.ring_first_s.append(times[0] - begin)
            found.ring_token_s.append((times[-1] - times[0]) / (len(sampled) - 1))
            found.http_first_s.append(http_first_s)
            found.http_token_s.append(http_token_s)
            found.cpu_token_s.append(cpu_s / TOKENS)
            found.masked_token_s.append(masked_token_s)


def time_requests(model: Path) -> list[float]:
    """Seconds in which a chat of ``REQUEST_BYTES`` becomes the text of a prompt."""
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


def add_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser], model: Path) -> None:
    """Adds ``api`` to the command line."""
    one = benches.add_parser("api", help="what HTTP costs beside the ring that it serves")
    one.add_argument("--model", type=Path, default=model, help="GGUF file")
    one.add_argument("--rounds", type=int, default=7)
    one.add_argument("--threads", type=int, default=2)
    one.add_argument("--json", help="also write the figures to this file")


def show(figures: ApiFigures) -> list[dict[str, Any]]:
    """Print what is judged; plain data for ``--json``, each figure with what is wanted of it."""
    rows = [asdict(figures)]
    for name, value, unit, side, bound in figures.rows():
        out.print(f"{name:<38} {value:7.3f} {unit} ({side} {bound:g})")
        minimum = side == "at least"
        wanted = {"at_least": bound if minimum else None, "at_most": None if minimum else bound}
        rows.append({"what": f"{name}: {unit}", "value": value, "is_ratio": minimum} | wanted)
    return rows
