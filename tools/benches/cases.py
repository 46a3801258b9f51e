"""``serve --case``: what must hold of several answers at once, each case with its figures and its bound.

``prompt``: four answers are written while a prompt of 4,000 tokens comes, and one of 50 behind it. ``keys``: one key asks
for eight answers at once, another one for one. ``streaming``: four answers at once of a model that does not fit, and one.
``turn``: the second turn of a chat with 2,000 tokens before it. ``overhead``: what scheduler and Python take of a step.

Rings are without daemons, on devices with a core each, with the batches and pieces that a plan for them has.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from halda import CpuProfile, DeviceProfile, arrange, instance
from primad.engine.protocol import GREEDY, LogitsWindow, Rows
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.gguf.windows import control_tokens
from primad.planning.batching import Batches, batches_of
from primad.planning.question import default_workload
from primad.profiler.effort import Effort
from primad.profiler.measure import measure_home, ram_read_bytes_per_s
from primad.ring.chunks import Chunking, Pieces
from primad.ring.grouping import Batching
from primad.ring.head import Head, Notify
from primad.ring.messages import Finished, Generate, Sampled, StepLimits
from primad.ring.scheduler.scheduler import Scheduler
from primad.ring.scheduler.state import SampledToken, SchedulerState
from tools.lab.figures import Figure, Row, late
from tools.lab.harness import Run
from tools.lab.here import device_here, links_between, machines_here, measured_cpu
from tools.lab.local_ring import LocalRing, even_windows
from tools.lab.memory import LimitedGroup
from tools.lab.memory_runs import device_in, plan_single_device, prefetch_rate
from tools.lab.plain_llama import prompt_of

PIECES: Final = Pieces(multiple=8, rows=(16,))
ROWS: Final = 256
"""Of a chunk."""
LONG_TOKENS: Final = 4000
SHORT_TOKENS: Final = 50
HISTORY_TOKENS: Final = 2000
STREAMING_SHARE: Final = 0.5
"""Of the model that does not fit, so much memory is there, and 350 MB."""
BESIDE_BYTES: Final = 350 << 20
OVERHEAD_STREAMS: Final = 16
_CALM_TOKENS: Final = 50
"""Of each answer, before a prompt comes and behind it."""


class CaseRow(Row):
    """What was ``found`` in a ``case``, and those of it that are ``judged``, each with its least and its most."""

    def remarks(self) -> Iterator[str]:
        told = (
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.found.items()
        )
        yield f"{self.case}, {self.model}, {self.devices} devices: {', '.join(told)}"

    @classmethod
    def figures(cls, rows: Sequence[CaseRow]) -> Iterator[Figure]:
        for row in rows:
            for name, (minimum, maximum) in row.judged.items():
                what = f"{row.model}, {row.devices} devices, case {row.case}: {name}"
                is_ratio = not name.endswith("_us") and "_us_" not in name
                values = (row.found[name],)
                yield Figure(what=what, values=values, at_least=minimum, at_most=maximum, is_ratio=is_ratio)


@dataclass
class _Told:
    """When each generation's tokens came, in seconds of ``time.perf_counter``, and which are over."""

    tokens_s: dict[int, list[float]] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)

    async def until(self, ring: LocalRing, condition: Callable[[], bool]) -> None:
        while not condition():
            match await ring.next_event():
                case Sampled() as event:
                    self.tokens_s.setdefault(event.request, []).append(time.perf_counter())
                case Finished() as event:
                    self.over.add(event.request)

    def count(self, request: int) -> int:
        return len(self.tokens_s.get(request, ()))

    def waits_s(self, requests: Sequence[int], since_s: float, until_s: float) -> list[float]:
        """Between tokens of ``requests`` that came within this time."""
        found = []
        for times in (self.tokens_s[request] for request in requests):
            found += [b - a for a, b in itertools.pairwise(times) if since_s <= b <= until_s]
        return found


def _as_served(run: Run, path: Path, devices: int, context: int, sequences: int) -> tuple[Batches, CpuProfile]:
    """The batches and pieces that ``serve`` would have, on devices with a core each as they are measured now."""
    model, names = model_profile(open_model(path)), [f"d{i}" for i in range(devices)]
    cpu = measured_cpu(run.folder(), 1, model)
    work = replace(default_workload(context, ROWS, "f16", sequences=sequences), flash=False)
    windows = even_windows(len(model.layers), devices) or [len(model.layers)]
    plan = arrange(names, windows, rounds=1, model=model)
    question = instance(machines_here(names, cpu), links_between(names), model, work, {}, plan.head)
    return batches_of("exact", plan, question, sequences), cpu


def _ring(path: Path, devices: int, **options: Any) -> LocalRing:
    layers = len(model_profile(open_model(path)).layers)
    made: dict[str, Any] = {"flash": False, "threads": 1, "rows": ROWS, **options}
    return LocalRing(path, even_windows(layers, devices), **made)


def _add(
    run: Run,
    case: str,
    path: Path,
    devices: int,
    found: Mapping[str, Any],
    **judged: tuple[float | None, float | None],
) -> None:
    run.add(CaseRow(case=case, model=path.stem, devices=devices, found=dict(found), judged=judged))


async def long_prompt(run: Run, path: Path, devices: int) -> None:
    """A prompt of 4,000 tokens over four answers, and one of 50 behind it."""
    context, sequences = LONG_TOKENS + 96, 6
    batches, cpu = _as_served(run, path, devices, context, sequences)
    how = {"batching": batches.batching, "pieces": batches.pieces, "cpu": cpu}
    async with _ring(path, devices, context=context, sequences=sequences, **how) as ring:
        told = _Told()
        writing = [await ring.ask(prompt_of(20 + i)[i:], LONG_TOKENS) for i in range(4)]
        await told.until(ring, lambda: min(map(told.count, writing)) >= 10)
        calm_s = time.perf_counter()
        await told.until(ring, lambda: min(map(told.count, writing)) >= 10 + _CALM_TOKENS)
        begin_s = time.perf_counter()
        long = await ring.ask(prompt_of(LONG_TOKENS), 1)
        short = await ring.ask(prompt_of(SHORT_TOKENS + 7)[7:], 1)
        await told.until(ring, lambda: {long, short} <= told.over)
        end_s = told.tokens_s[long][0]
        longer = {request: told.count(request) + _CALM_TOKENS for request in writing}
        await told.until(ring, lambda: all(told.count(request) >= minimum for request, minimum in longer.items()))
    spans = (calm_s, begin_s), (end_s, time.perf_counter()), (begin_s, end_s)
    before, after, beside = (late(told.waits_s(writing, *span)) for span in spans)
    calm = max(before, after)  # answers grow while the prompt is computed, and each of their tokens takes longer
    found = {
        "rows": batches.batching.rows,
        "pieces": batches.pieces.rows if batches.pieces else None,
        "late_before_ms": 1e3 * before,
        "late_beside_ms": 1e3 * beside,
        "late_after_ms": 1e3 * after,
        "times": beside / calm,
        "short_first_ms": 1e3 * (told.tokens_s[short][0] - begin_s),
        "long_first_ms": 1e3 * (end_s - begin_s),
    }
    _add(run, "prompt", path, devices, found, times=(None, 2.0))


async def keys(run: Run, path: Path, devices: int) -> None:
    """A key with eight answers against one with one, in steps of one row each: half of the tokens would be fair."""
    async with _ring(path, devices, context=512, sequences=9, batching=Batching(steps=devices)) as ring:
        told = _Told()
        many = [await ring.ask(prompt_of(20 + i)[i:], 400, owner="many") for i in range(8)]
        one = await ring.ask(prompt_of(40)[9:], 400, owner="one")
        await told.until(ring, lambda: told.count(one) >= 20)
        begin = Counter({request: told.count(request) for request in (*many, one)})
        await told.until(ring, lambda: told.count(one) >= 220)
        got = {request: told.count(request) - begin[request] for request in (*many, one)}
    found = {"tokens": got, "of_fair_share": got[one] / (sum(got.values()) / 2)}
    _add(run, "keys", path, devices, found, of_fair_share=(0.8, None))


async def second_turn(run: Run, path: Path, devices: int) -> None:
    """What the first token of a chat's second turn takes, of what that of the first took."""
    begins = min(control_tokens(open_model(path)))
    history: list[int] = []
    while len(history) < HISTORY_TOKENS:
        history += [begins, *prompt_of(99 + len(history) // 100)]
    first_s = []
    async with _ring(path, devices, context=4096, min_rows=64, pieces=PIECES) as ring:
        await ring.generate(prompt_of(300), 2)
        for _ in range(2):
            begin_s, first = time.perf_counter(), list[float]()

            def heard(_: Sampled, first: list[float] = first) -> None:
                first.append(time.perf_counter())

            sampled, _ = await ring.generate(history, 32, reuses=True, heard=heard)
            first_s.append(first[0] - begin_s)
            history = [*history, *(event.token for event in sampled), begins, *prompt_of(30)]
    found = {"first_ms": 1e3 * first_s[0], "second_ms": 1e3 * first_s[1], "times": first_s[1] / first_s[0]}
    _add(run, "turn", path, devices, found, times=(None, 0.2))


async def streaming(run: Run, path: Path, devices: int) -> None:
    """Four answers at once against one, of a model with half of its memory, on one device with all cores."""
    model, threads = model_profile(open_model(path)), 2
    folder = run.folder("/var/tmp")
    cpu, disk = measured_cpu(folder, threads, model), measure_home(folder, lambda _: None, Effort()).disk
    here = device_here("d0", cpu, ram_read_bytes_per_s(threads), disk)
    figures: dict[int, tuple[float, float]] = {}
    for streams in (1, 4):
        with LimitedGroup(_limit_bytes(path)) as group:
            figures[streams] = await _streamed(path, group, here, streams, threads)
    (one_tokens, one_bytes), (four_tokens, four_bytes) = figures[1], figures[4]
    found = {
        "tokens_per_s": [one_tokens, four_tokens],
        "bytes_per_token": [one_bytes, four_bytes],
        "tokens_times": four_tokens / one_tokens,
        "bytes_times": four_bytes / one_bytes,
    }
    _add(run, "streaming", path, devices, found, tokens_times=(3.0, None), bytes_times=(None, 0.3))


def _limit_bytes(path: Path) -> int:
    return int(STREAMING_SHARE * path.stat().st_size) + BESIDE_BYTES


async def _streamed(
    path: Path, group: LimitedGroup, here: DeviceProfile, streams: int, threads: int
) -> tuple[float, float]:
    """Tokens a second of all ``streams``, and bytes that the kernel read for a token."""
    model = model_profile(open_model(path))
    solution, work = plan_single_device(device_in(group, here, "d0", prefetch_rate(path)), model, 256 * streams)
    ring = LocalRing(
        path,
        None,
        plan=solution.plan,
        groups={"d0": group},
        context=256,
        rows=work.chunk_rows,
        sequences=streams,
        batching=Batching(rows=streams, pads=streams > 1),
        threads=threads,
        step_timeout_s=600,
    )
    async with ring:
        told = _Told()
        asked = [await ring.ask(prompt_of(20 + i)[i:], 40) for i in range(streams)]
        await told.until(ring, lambda: min(map(told.count, asked)) >= 4)
        begin_s, before, tokens = time.perf_counter(), group.counters().read_bytes, sum(map(told.count, asked))
        await told.until(ring, lambda: min(map(told.count, asked)) >= 32)
        took_s, tokens = time.perf_counter() - begin_s, sum(map(told.count, asked)) - tokens
        return tokens / took_s, (group.counters().read_bytes - before) / tokens


async def overhead(run: Run, path: Path, devices: int) -> None:
    """Microseconds of a step at 16 streams: of the scheduler, and of the head with a model that computes nothing."""
    found: dict[str, float] = {}
    for rows in (1, 4):
        found[f"scheduler_us_{rows}_rows"] = statistics.median(_scheduler_s(rows) for _ in range(5)) * 1e6
        found[f"head_us_{rows}_rows"] = statistics.median(_head_s(rows) for _ in range(5)) * 1e6
    _add(run, "overhead", path, devices, found, **dict.fromkeys(found, (None, 100.0)))


def _asked(tokens: int) -> list[Generate]:
    return [
        Generate(request=i, prompt=[i] * 20, sampled=[], max_tokens=tokens, sampling=GREEDY, logprobs=None)
        for i in range(OVERHEAD_STREAMS)
    ]


def _scheduler(rows: int) -> Scheduler:
    return Scheduler(
        SchedulerState(
            context=4096,
            chunking=Chunking(rows=512, minimum=64, begins=lambda _: False),
            depth=4,
            sequences=OVERHEAD_STREAMS,
            batching=Batching(rows=rows, steps=2),
        )
    )


def _scheduler_s(rows: int) -> float:
    scheduler, steps = _scheduler(rows), 0
    for generate in _asked(200):
        scheduler.submit(generate)
    draw = SampledToken(token=5, ends=False)
    begin_s = time.perf_counter()
    while (step := scheduler.next_step(begin_s)) is not None:
        scheduler.commit(step.step, {each.request: draw for _, each in scheduler.wants_samples(step.step)}, begin_s)
        steps += 1
    return (time.perf_counter() - begin_s) / steps


class _Nothing:
    """A whole model that computes nothing and samples one token."""

    mirostat_mu: float | None = None

    def forward(self, rows: Rows) -> None: ...

    def logits(self, row: int) -> Any:
        return np.zeros(1, np.float32)

    def sampler(self, *_: object) -> _Nothing:
        return self

    def is_ready(self, wait_s: float) -> bool:
        return True

    def sample(self, row: int, kept: Any = None) -> int:
        return 5

    def is_end(self, token: int) -> bool:
        return False

    def kv_remove(self, sequence: int, start: int, end: int) -> None: ...

    def kv_copy(self, source: int, target: int, end: int) -> None: ...

    def release(self) -> None: ...


def _head_s(rows: int) -> float:
    head = Head(
        windows={},
        tail=cast(LogitsWindow, _Nothing()),  # of what it computes nothing is kept
        route=1,
        limits=StepLimits(
            ring=1, epoch=1, windows=frozenset((0,)), width=1, rows=512, context=4096, sequences=OVERHEAD_STREAMS
        ),
        scheduler=_scheduler(rows),
        step_timeout_s=60.0,
        clock=time.perf_counter,
    )
    for generate in _asked(200):
        head.submit(generate)
    begin_s, steps = time.perf_counter(), 0
    while isinstance(head.turn(), Notify):
        steps += 1
    return (time.perf_counter() - begin_s) / steps


CASES: Final[Mapping[str, Callable[[Run, Path, int], Awaitable[None]]]] = {
    "prompt": long_prompt,
    "keys": keys,
    "turn": second_turn,
    "streaming": streaming,
    "overhead": overhead,
}
