"""A question from its prompt to its last token on one device with less memory than its model, and what that took.

The answer to compare with is plain llama.cpp's, with the whole model in memory.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from halda import Solution, Workload
from primad.errors import PrimadError
from primad.ring.messages import Sampled, Status
from tools.lab import disk
from tools.lab.figures import out
from tools.lab.local_ring import LocalRing
from tools.lab.memory import Counters, LimitedGroup
from tools.lab.memory_runs import STEP_TIMEOUT_S, counted
from tools.lab.neighbour import Neighbour
from tools.lab.plain_child import PlainChild
from tools.lab.plain_llama import prompt_of

DEVICE: Final = "d0"
RUN_TIMEOUT_S: Final = 3600.0
SAMPLE_S: Final = 1.0
SAY_TOKENS: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt of ``prompt_tokens``, ``tokens`` behind the first of its answer, and the plan for them.

    Beside it a program takes and frees ``neighbour_bytes``, if any. ``refused`` is why there is no plan for the prompt that
    was asked for; None where this is it.
    """

    solution: Solution
    workload: Workload
    context: int
    prompt_tokens: int
    tokens: int
    neighbour_bytes: int
    refused: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What the whole model in memory draws, and how fast."""

    tokens: list[int]
    prompt_tokens_per_s: float
    tokens_per_s: float


def whole(path: Path, question: Question, *, threads: int) -> Whole:
    """What plain llama.cpp draws with the same KV cache and as many rows a step."""
    work = question.workload
    out.print(f"the whole model in memory, KV cache {work.kv_type}, {work.chunk_rows} rows a step: for comparison")
    disk.forget(path)
    with ExitStack() as stack:
        child = PlainChild(
            path,
            threads,
            "off",
            os.environ,
            context=question.context,
            rows=work.chunk_rows,
            kv_type=work.kv_type,
        )
        stack.callback(child.close)
        child.ask(prefill=1)  # reads the model
        prompt_s = child.ask(prefill=question.prompt_tokens)
        printed = child.answer(more=question.tokens)
    rate = question.tokens / printed["seconds"]
    out.print(f"prompt in {prompt_s:.1f} s, {rate:.2f} tokens/s")
    return Whole(tokens=printed["tokens"], prompt_tokens_per_s=question.prompt_tokens / prompt_s, tokens_per_s=rate)


class Ran:
    """What a run did until it ended. ``reads`` and ``times_s`` are those at each token, since the question was asked;
    ``statuses`` those before it, behind the prompt and at the end. ``counters`` were read when the ring was gone,
    ``anonymous_bytes`` at its last token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times_s: list[float] = []
        self.reads: list[int] = []
        self.statuses: list[Status] = []
        self.counters: Counters | None = None
        self.anonymous_bytes: int | None = None
        self.max_anonymous_bytes = 0
        self.max_swap_bytes = 0
        self.swap_in_bytes: int | None = None
        self.others_bytes = 0
        """What the other program takes at most, all in all."""
        self.neighbour_takes: int | None = None
        self.error: str | None = None

    def look(self, group: LimitedGroup) -> None:
        """Take the group's counters of now."""
        now = self.counters = group.counters()
        self.max_anonymous_bytes = max(self.max_anonymous_bytes, now.anonymous_bytes)
        self.max_swap_bytes = max(self.max_swap_bytes, now.swap_bytes)

    async def keep_looking(self, group: LimitedGroup) -> None:
        """Until it is cancelled."""
        while True:
            self.look(group)
            await asyncio.sleep(SAMPLE_S)

    @property
    def tokens_per_s(self) -> float | None:
        """Behind the first token."""
        return (len(self.times_s) - 1) / (self.times_s[-1] - self.times_s[0]) if len(self.times_s) > 1 else None

    def read_per_token(self, since: float, until: float) -> float | None:
        """Bytes a token between two shares of the answer; None where the machine counts none."""
        last = len(self.reads) - 1
        first, last = int(since * last), int(until * last)
        return counted((self.reads[first], self.reads[last]), last - first) if last > first else None

    def reported_per_token(self, figure: str) -> float | None:
        """By how much a step behind the prompt raised a figure of the ring process; None where nothing streams."""
        if len(self.statuses) < 3:
            return None
        behind, end = self.statuses[1], self.statuses[-1]
        if behind.memory is None or end.memory is None or end.steps == behind.steps:
            return None
        more: float = getattr(end.memory, figure) - getattr(behind.memory, figure)
        return more / (end.steps - behind.steps)

    def reported_of_prompt(self, figure: str) -> float | None:
        """By how much the prompt raised it."""
        if len(self.statuses) < 2:
            return None
        before, behind = self.statuses[0].memory, self.statuses[1].memory
        return None if before is None or behind is None else getattr(behind, figure) - getattr(before, figure)


async def endure(path: Path, question: Question, limit_bytes: int, *, threads: int) -> Ran:
    """A ring of one process, and the other program beside it, in a group with this limit."""
    ran, swapped_bytes = Ran(), psutil.swap_memory().sin
    with ExitStack() as stack:
        group = stack.enter_context(LimitedGroup(limit_bytes))
        other = None
        if question.neighbour_bytes:
            other = stack.enter_context(Neighbour(group, question.neighbour_bytes))
            ran.others_bytes = other.own_bytes + other.max_bytes
        ring = LocalRing(
            path,
            None,
            plan=question.solution.plan,
            groups={DEVICE: group},
            context=question.context,
            rows=question.workload.chunk_rows,
            kv_type=question.workload.kv_type,
            threads=threads,
            step_timeout_s=STEP_TIMEOUT_S,
        )
        watching = asyncio.create_task(ran.keep_looking(group))
        try:
            async with asyncio.timeout(RUN_TIMEOUT_S), ring:
                await _ask(ring, group, question, ran)
        except TimeoutError:
            ran.error = f"took longer than {RUN_TIMEOUT_S:g} s"
        except PrimadError as exc:
            ran.error = f"the ring ended: {exc}"
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        ran.look(group)
        if other is not None:
            try:
                ran.neighbour_takes = other.end()
            except RuntimeError as exc:
                ran.error = ran.error or str(exc)
    ran.swap_in_bytes = psutil.swap_memory().sin - swapped_bytes
    return ran


async def _ask(ring: LocalRing, group: LimitedGroup, question: Question, ran: Ran) -> None:
    reports: list[asyncio.Task[None]] = []
    ran.statuses.append(await ring.status(DEVICE))
    start, before_bytes = time.perf_counter(), group.counters().read_bytes

    def heard(event: Sampled) -> None:
        ran.tokens.append(event.token)
        ran.times_s.append(time.perf_counter() - start)
        ran.reads.append(group.counters().read_bytes - before_bytes)
        drawn = len(ran.tokens) - 1
        if not drawn:
            reports.append(asyncio.create_task(ring.report()))  # how it is behind the prompt
            out.print(f"prompt in {ran.times_s[0]:.1f} s")
        elif drawn % SAY_TOKENS == 0:
            out.print(f"{drawn} tokens, {drawn / (ran.times_s[-1] - ran.times_s[0]):.2f} tokens/s")

    prompt = prompt_of(question.prompt_tokens)
    await ring.generate(prompt, 1 + question.tokens, heard=heard, reported=ran.statuses.append)
    await asyncio.gather(*reports)
    ran.look(group)
    ran.anonymous_bytes = group.counters().anonymous_bytes
    ran.statuses.append(await ring.status(DEVICE))
