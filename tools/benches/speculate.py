"""``speculate``: what drafts win, and what they cost where they win nothing, against the same ring without.

Every way of drafting has a ring of its own, all loaded before the first run, and answers each question twice in turn:
without drafts and with them. So each figure is a ratio of neighbours. ``as served`` is what ``primad serve`` does; the
others leave one thing out: no steps ahead of the next token (``one step``: plain synchronous speculation), nothing skipped
on its way, a confidence that does not adapt (``fixed``: nor do drafts end that win nothing). ``model`` is as served with the
same model in Q2_K that drafts as well, ``wrong model`` with one that knows nothing.

``two``: two devices that count as machines, with a core each. As served, with a model or without, they are daemons that
``primad serve`` plans for and that are asked over HTTP. ``serve`` has no option for what leaves something out: those ways,
and all of the other cases, are rings without daemons, which draft as a plan for such devices says. ``far``: four devices
(``--windows``) whose hops take 10 ms longer (``--latency-ms``).
``streams``: one device that has memory for half of the model in Q8_0, of which several rows of a step are exact (needs
cgroups and root). There the draft model works while the ring computes, or only while a step waits for it (``no
overlap``), and steps wait for draft tokens down to a share that adapts, or is the same for ever (``fixed``); with rows that
need not be exact its drafts are a ``chain`` or may be a ``tree``. Questions: code to edit, a story to go on with, a chat
over a text, and random tokens, of which nothing can be drafted. ``--way`` has some of the ways alone, ``--target f16`` the
model requantised first, ``--draft`` the form of it that drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from halda import arrange, instance
from primad.engine.protocol import GREEDY, Sampling
from primad.engine.vocabulary import LlamaVocabulary
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.planning.batching import BatchingMode, batches_of
from primad.planning.draft_model import draft_model
from primad.planning.drafting import drafting_of
from primad.planning.question import default_workload
from primad.profiler.effort import Effort
from primad.profiler.measure import measure_home, ram_read_bytes_per_s
from primad.ring.speculation.drafter import MAX_ROOM, Drafting
from primad.ring.speculation.messages import DraftModel
from tools.lab import LabError
from tools.lab.drafted import AS_SERVED, AT_LEAST, COPIES, Drafted, DraftedCompletion
from tools.lab.figures import late
from tools.lab.harness import Bench, Run, flag
from tools.lab.here import HOP, device_here, links_between, machines_here, measured_cpu
from tools.lab.http_servers import HttpServer, head_here
from tools.lab.local_ring import LocalRing, even_bytes
from tools.lab.memory import LimitedGroup
from tools.lab.memory_runs import device_in, plan_single_device, prefetch_rate
from tools.lab.quantised import FORMS, quantised
from tools.lab.questions import QUESTIONS
from tools.synth import write_model

CONTEXT: Final = 1024
ROWS: Final = 256
SYNCHRONOUS: Final = 4
"""Drafts of a step where nothing is ahead of it."""
EVERYWHERE: Final = (AS_SERVED, "model", "wrong model", "no overlap", "chain", "tree")
"""Ways that answer all questions; the others those where there is something to win."""
BESIDE_BYTES: Final = 105 << 20
"""What the process takes beside weights."""
STREAMING: Final = (AS_SERVED, "model", "no overlap", "fixed", "chain", "tree", "wrong model")
"""Ways of a ring that streams."""
SERVED: Final = (AS_SERVED, "model", "wrong model")
"""Ways that ``primad serve`` has."""
WAYS: Final = (AS_SERVED, "one step", "no skipping", "fixed", "model", "wrong model", "no overlap", "chain", "tree")
DRAWN: Final = msgspec.structs.replace(GREEDY, temperature=1.0, seed=7)


@dataclass(frozen=True, slots=True)
class _Question:
    prompt: list[int]
    sampling: Sampling


_Ask = Callable[[_Question, int, bool], Awaitable[DraftedCompletion]]
"""Answers a question in so many tokens, with drafts or without."""


@dataclass(frozen=True, slots=True)
class _System:
    """One way of drafting: how it answers, and the share of its drafts that were skipped."""

    ask: _Ask
    skipped: Callable[[], Awaitable[float]]


def questions(model: Path, words: int = 40) -> dict[str, _Question]:
    """All questions as tokens of ``model``."""
    vocabulary = LlamaVocabulary(model)
    try:
        found = {
            name: _Question(vocabulary.tokenize(text, add_special=True, parse_special=True), GREEDY)
            for name, text in QUESTIONS.items()
        }
    finally:
        vocabulary.release()
    drawn = random.Random(19).choices(range(1000, 20_000), k=words)
    return found | {"random": _Question(drawn, DRAWN)}


async def measure(run: Run, model: Path) -> None:
    """All cases that are asked for."""
    for case, devices, latency_s in _rings_of(run.options):
        await _measure_case(run, case, devices, latency_s, model)


def _rings_of(options: argparse.Namespace) -> Iterator[tuple[str, int, float]]:
    """The cases, each with its devices and the seconds that a hop takes longer."""
    for case in options.case:
        if case == "far":
            far = itertools.product(options.windows, options.latency_ms)
            yield from ((case, devices, ms / 1e3) for devices, ms in far)
        else:
            yield case, 2 if case == "two" else 1, 0.0


async def _measure_case(run: Run, case: str, devices: int, latency_s: float, path: Path) -> None:
    """All ways of one case, all questions."""
    async with run.part():
        options, folder = run.options, run.folder("/var/tmp")  # not in memory: what streams is read from a disk
        form = options.target or ("q8_0" if case == "streams" else None)
        if form is not None:
            path = await asyncio.to_thread(quantised, path, form, folder, 2)
        drafting = await asyncio.to_thread(_draft_models, path, folder, options.draft)
        if case == "streams":
            systems, name = await _streaming(run, path, folder, drafting)
        else:
            systems, name = await _near_and_far(run, path, case, devices, latency_s, drafting)
        asked = questions(path)
        found = {
            (question, way): Drafted(case=name, model=path.stem, way=way, question=question)
            for question in asked
            for way in systems
            if question in COPIES or way in EVERYWHERE
        }

        async def turn(question: str, way: str, number: int) -> None:
            row = found[question, way]
            for speculates in (False, True) if number % 2 else (True, False):
                answer = await systems[way].ask(asked[question], options.tokens, speculates)
                if number:
                    (row.with_ if speculates else row.without).append(answer)

        await run.alternate({key: partial(turn, *key) for key in found})
        for (_, way), row in found.items():
            row.skipped = await systems[way].skipped()
            run.add(row)


def _draft_models(path: Path, folder: Path, form: str) -> dict[str, Path]:
    """What drafts for the model ``path`` in which way: another ``form`` of it, and one that was never taught."""
    untaught = folder / "untaught.gguf"
    write_model(untaught, vocabulary=f"from:{path}")
    return {"model": quantised(path, form, folder, 2), "wrong model": untaught}


def _loaded(path: Path, draft: Path | None) -> DraftModel | None:
    return None if draft is None else draft_model(draft, open_model(path), context=CONTEXT, threads=1)


# ---- rings without daemons ------------------------------------------------------------------------------------------


def _alone(ring: LocalRing) -> _System:
    async def skipped() -> float:
        drafts = (await ring.status(ring.plan.head)).drafts
        return drafts.skipped / drafts.drafted if drafts is not None and drafts.drafted else 0.0

    return _System(partial(ask_ring, ring), skipped)


async def ask_ring(ring: LocalRing, question: _Question, tokens: int, speculates: bool) -> DraftedCompletion:
    """One answer."""
    times: list[float] = []
    begin_s = time.perf_counter()
    reported, finished = await ring.generate(
        question.prompt,
        tokens,
        sampling=question.sampling,
        speculates=speculates,
        heard=lambda _: times.append(time.perf_counter()),
    )
    return _completion([each.token for each in reported], times, begin_s, finished.drafted, finished.accepted)


def _completion(
    tokens: list[int], times: Sequence[float], begin_s: float, drafted: int, accepted: int
) -> DraftedCompletion:
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return DraftedCompletion(
        tokens=tokens,
        first_s=times[0] - begin_s,
        next_s=statistics.fmean(gaps),
        late_s=late(gaps),
        drafted=drafted,
        accepted=accepted,
    )


def _as_planned(path: Path, folder: Path, devices: int, latency_s: float) -> Drafting:
    """What ``serve --speculate lookup`` would do on so many machines with a core each, as this one is measured now."""
    model, names = model_profile(open_model(path)), [f"d{i}" for i in range(devices)]
    found = machines_here(names, measured_cpu(folder, 1, model))
    work = replace(default_workload(CONTEXT, ROWS, "f16"), flash=True)
    plan = arrange(names, even_bytes(model, devices) or [len(model.layers)], rounds=1, model=model)
    hop = replace(HOP, round_trip_s=HOP.round_trip_s + 2 * latency_s)
    question = instance(found, links_between(names, [hop]), model, work, {}, plan.head)
    drafting = drafting_of("lookup", "exact", plan, question, batches_of("exact", plan, question, 1))
    return drafting or Drafting(room=min(devices, MAX_ROOM))


async def _near_and_far(
    run: Run, path: Path, case: str, devices: int, latency_s: float, models: dict[str, Path]
) -> tuple[dict[str, _System], str]:
    folder, model = run.folder(), model_profile(open_model(path))
    systems: dict[str, _System] = {}
    if case == "two":
        for way in [each for each in run.options.way if each in SERVED]:
            systems[way] = await asyncio.to_thread(_head, run, path, models.get(way))
    known = ("one step", "no skipping", "fixed", *(SERVED if case == "far" else ()))
    if not (ways := [each for each in run.options.way if each in known]):
        return systems, case
    served = await asyncio.to_thread(_as_planned, path, folder, devices, latency_s)
    flat = (1.0,) * (SYNCHRONOUS + 1)
    compared = {
        "one step": Drafting(room=1, rows=len(flat), costs=flat),
        "no skipping": replace(served, skips=False),
        "fixed": replace(served, adapts=False),
    }
    for way in ways:
        ring = LocalRing(
            path,
            even_bytes(model, devices),
            context=CONTEXT,
            rows=ROWS,
            threads=1,
            pinned=not latency_s,
            latency_s=latency_s,
            drafting=compared.get(way, served),
            draft=_loaded(path, models.get(way)),
            folder=folder,
        )
        systems[way] = _alone(await run.stack.enter_async_context(ring))
    if case == "far":
        return systems, f"far, {devices} devices, {1e3 * latency_s:g} ms, room {served.room}"
    return systems, case


async def _streaming(run: Run, path: Path, folder: Path, models: dict[str, Path]) -> tuple[dict[str, _System], str]:
    """One device with one thread: from so many cells on several threads share what is attended to in another way.

    Each way has a file and a memory of its own, in which what drafts has room beside it.
    """
    model, rate = model_profile(open_model(path)), prefetch_rate(path)
    disk = measure_home(folder, lambda _: None, Effort()).disk
    here = device_here("d0", measured_cpu(folder, 1, model), ram_read_bytes_per_s(1), disk)
    systems: dict[str, _System] = {}
    name = "streams"
    for way in [each for each in STREAMING if each in run.options.way]:
        draft = None if way == AS_SERVED else _loaded(path, models.get(way, models["model"]))
        own = path.with_name(f"{path.stem}-{len(systems)}.gguf")
        await asyncio.to_thread(shutil.copyfile, path, own)
        more = 0 if draft is None else draft.memory_bytes
        group = run.stack.enter_context(LimitedGroup(model.size_bytes // 2 + BESIDE_BYTES + more))
        device = device_in(group, here, "d0", rate)
        device = replace(device, ram_available_bytes=device.ram_available_bytes - more)
        solution, work = plan_single_device(device, model, CONTEXT)
        question = instance([device], [], model, work, {})
        mode: BatchingMode = "fast" if way in ("tree", "chain") else "exact"
        drafting = drafting_of("lookup", mode, solution.plan, question, batches_of(mode, solution.plan, question, 1))
        if drafting is None:
            raise LabError(f"{path.stem}: nothing streams, or no two rows of a step are known to be exact here")
        if way != "tree":
            drafting = replace(drafting, branches=0)
        ring = LocalRing(
            own,
            None,
            plan=solution.plan,
            groups={"d0": group},
            context=CONTEXT,
            rows=work.chunk_rows,
            threads=1,
            drafting=replace(drafting, overlaps=way != "no overlap", adapts=way != "fixed"),
            draft=draft,
            step_timeout_s=600,
        )
        systems[way] = _alone(await run.stack.enter_async_context(ring))
        (streamed,) = solution.prediction.devices
        name = f"streams, {streamed.streamed_bytes / model.size_bytes:.0%}, {drafting.rows} rows"
    return systems, name


# ---- as primad serves -----------------------------------------------------------------------------------------------


def _head(run: Run, path: Path, draft: Path | None) -> _System:
    """What ``primad serve`` makes of two machines with a core each."""
    how = ["--speculate", "lookup"] if draft is None else ["--speculate", "draft", "--draft", str(draft)]
    head = ["--context", str(CONTEXT), "--use-all", "--extra-buffers", "off", *how]
    server = run.stack.enter_context(head_here(path, run.homes(), ["w1"], head=head, machines=True))

    run.say(f"two, {'no draft model' if draft is None else draft.name}: layers {server.plan()}")

    def drafts() -> tuple[int, int, int]:
        printed: dict[str, Any] = server.status()["drafts"] or {}
        return printed.get("drafted", 0), printed.get("accepted", 0), printed.get("skipped", 0)

    def ask(question: _Question, tokens: int, speculates: bool) -> DraftedCompletion:
        return _ask_head(server, drafts, question, tokens, speculates)

    async def skipped() -> float:
        drafted, _, skipped = await asyncio.to_thread(drafts)
        return skipped / drafted if drafted else 0.0

    return _System(lambda *asked: asyncio.to_thread(ask, *asked), skipped)


def _ask_head(
    server: HttpServer,
    drafts: Callable[[], tuple[int, int, int]],
    question: _Question,
    tokens: int,
    speculates: bool,
) -> DraftedCompletion:
    drawn = {"temperature": question.sampling.temperature, "seed": question.sampling.seed or 0}
    drafted, accepted, _ = drafts()
    begin_s = time.perf_counter()
    reported = server.sampled(question.prompt, tokens, speculate=speculates, cache_prompt=False, **drawn)
    after = drafts()
    times, ids = [at_s for at_s, _ in reported], [token for _, token in reported]
    return _completion(ids, times, begin_s, after[0] - drafted, after[1] - accepted)


BENCH: Final = Bench(
    help="what drafts win",
    measure=measure,
    quick={"case": ["two", "streams"], "way": [AS_SERVED], "rounds": 1, "tokens": 64},
    flags=(
        flag("--case", choices=list(AT_LEAST), nargs="+", default=list(AT_LEAST)),
        flag("--way", choices=WAYS, nargs="+", default=list(WAYS), help="what is compared (default: all)"),
        flag("--windows", type=int, nargs="+", default=[4], help="of far rings, a device each (default: 4)"),
        flag("--latency-ms", type=float, nargs="+", default=[10.0], help="of each hop of far rings (default: 10)"),
        flag("--target", choices=list(FORMS), help="requantise the model first"),
        flag("--draft", choices=list(FORMS), default="q2_k", help="form of the draft model"),
        flag("--tokens", type=int, default=128),
    ),
)
