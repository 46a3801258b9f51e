"""``speculate``: the gain of draft tokens, and their cost if they gain nothing, compared with the same ring without
drafts.

Every drafter has its own ring. All rings are loaded before the first run, and run each question twice in a row: without
drafts and with them. So each figure is a ratio of neighbouring runs. ``as served`` uses prompt lookup; ``model`` drafts
with the same model in another quantisation as well (``--draft``), ``wrong model`` with an untrained one.

``two``: ``primad serve`` on two devices that count as machines, with a core each, over HTTP; ``streams``: on one device
that may have half of the model in memory, in Q8_0, of which steps of several tokens are exact. ``far``: a ring without
daemons, which drafts as a plan for such devices says: four devices whose hops take 10 ms longer. Questions: code to
edit, stories to continue (one per round), a chat about a text, and random tokens, all equally likely, for which nothing
can be drafted. ``--way`` selects drafters.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import llama_cpp as llama
import msgspec

from halda import arrange, instance
from primad.engine.protocol import GREEDY, Sampling
from primad.engine.vocabulary import LlamaVocabulary
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.planning.batching import batches_of
from primad.planning.draft_model import draft_model
from primad.planning.drafting import drafting_of
from primad.planning.question import DEFAULT_ANSWER_TOKENS, default_workload
from primad.ring.speculation.drafter import MAX_ROOM, Drafting
from primad.ring.speculation.messages import DraftModel
from tools.lab import LabError
from tools.lab.drafted import (
    AS_SERVED,
    COPIES,
    DEVICES,
    QUESTIONS,
    RANDOM,
    USUAL,
    DraftedCompletion,
    compared,
    samplers,
)
from tools.lab.figures import late
from tools.lab.harness import Bench, Run, flag
from tools.lab.here import links_between, machines_here, measured_cpu
from tools.lab.http_servers import HttpServer
from tools.lab.local_ring import LocalRing, even_bytes
from tools.lab.memory_runs import file_bytes
from tools.synth import write_model

CONTEXT: Final = 1024
ROWS: Final = 256
FAR_S: Final = 0.01
"""Additional time of a hop in far rings."""
FORMS: Final = {
    "f16": llama.LLAMA_FTYPE_MOSTLY_F16,
    "q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_1": llama.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q2_k": llama.LLAMA_FTYPE_MOSTLY_Q2_K,
}
BESIDE_BYTES: Final = 130 << 20
"""What the process takes in addition to half of the weights, if it streams the rest."""
DRAFTING_BYTES: Final = 40 << 20
"""What a process that drafts takes in addition to its model."""
WAYS: Final = (AS_SERVED, "model", "wrong model")


@dataclass(frozen=True, slots=True)
class _Question:
    prompt: list[int]
    sampling: Sampling


_Ask = Callable[[_Question, int, bool], Awaitable[DraftedCompletion]]
"""Runs a question for a number of tokens, with drafts or without."""


@dataclass(frozen=True, slots=True)
class _System:
    """One way of drafting: how it runs a question, and the share of its drafts that were skipped."""

    ask: _Ask
    skipped: Callable[[], Awaitable[float]]


_Drafts = Mapping[str, Path | None]
"""The draft model, by way of drafting."""
_Systems = tuple[dict[str, _System], str]
"""The systems by way of drafting, and the name of the case with its conditions."""


def questions(model: Path) -> dict[str, list[_Question]]:
    """Return all questions as tokens of ``model``, by round."""
    vocabulary = LlamaVocabulary(model)
    try:
        found = {
            name: [
                _Question(
                    vocabulary.tokenize(text, add_special=True, parse_special=True),
                    GREEDY if name in COPIES else msgspec.structs.replace(USUAL, seed=number),
                )
                for number, text in enumerate(texts)
            ]
            for name, texts in QUESTIONS.items()
        }
    finally:
        vocabulary.release()
    drawn = random.Random(19).choices(range(1000, 20_000), k=40)
    return found | {"random": [_Question(drawn, RANDOM)]}


async def measure(run: Run, model: Path) -> None:
    """Measure all cases that are asked for."""
    for case in run.options.case:
        async with run.part():
            await _measure_case(run, case, model)


async def _measure_case(run: Run, case: str, path: Path) -> None:
    """Measure all ways of one case with all questions."""
    options, folder = run.options, run.folder("/var/tmp")  # not in memory: streamed layers must be read from a disk
    if case == "streams":
        path = await asyncio.to_thread(_quantised, path, "q8_0", folder, 2)
    drafting = await asyncio.to_thread(_draft_models, path, folder, options.draft)
    systems, name = await CASES[case](run, path, folder, {way: drafting.get(way) for way in options.way})
    asked = questions(path)
    found: dict[tuple[str, str], tuple[list[DraftedCompletion], list[DraftedCompletion]]] = {
        (question, way): ([], []) for question in asked for way in systems
    }

    async def turn(question: str, way: str, number: int) -> None:
        here = asked[question][number % len(asked[question])]
        for speculates in (False, True) if number % 2 else (True, False):
            answer = await systems[way].ask(here, options.tokens, speculates)
            if number:
                found[question, way][speculates].append(answer)

    await run.alternate({key: partial(turn, *key) for key in found})
    for (question, way), (without, drafted) in found.items():
        run.add(*compared(path.stem, name, question, way, without, drafted, await systems[way].skipped()))


def _draft_models(path: Path, folder: Path, form: str) -> dict[str, Path]:
    """Return the draft models for the model ``path``, by way: another ``form`` of it, and an untrained one."""
    untaught = folder / "untaught.gguf"
    write_model(untaught, vocabulary=f"from:{path}")
    return {"model": _quantised(path, form, folder, 2), "wrong model": untaught}


def _quantised(model: Path, form: str, folder: Path, threads: int) -> Path:
    """Write ``model`` in one of the ``FORMS``, made by llama.cpp's quantiser, to a file in ``folder``. Raises
    ``LabError``."""
    target = folder / f"{model.stem}-as-{form}.gguf"
    params = llama.llama_model_quantize_default_params()
    params.allow_requantize, params.nthread, params.ftype = True, threads, FORMS[form]
    if llama.llama_model_quantize(str(model).encode(), str(target).encode(), params):
        raise LabError(f"{model}: llama.cpp cannot make {form} of it")
    return target


def _loaded(path: Path, draft: Path | None) -> DraftModel | None:
    return None if draft is None else draft_model(draft, open_model(path), context=CONTEXT, threads=1)


# ---- a ring without daemons -----------------------------------------------------------------------------------------


def _alone(ring: LocalRing) -> _System:
    async def skipped() -> float:
        drafts = (await ring.status(ring.plan.head)).drafts
        return drafts.skipped / drafts.drafted if drafts is not None and drafts.drafted else 0.0

    return _System(partial(ask_ring, ring), skipped)


async def ask_ring(ring: LocalRing, question: _Question, tokens: int, speculates: bool) -> DraftedCompletion:
    """Run one question."""
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


async def _far(run: Run, path: Path, folder: Path, drafts: _Drafts) -> _Systems:
    """Return machines with a core each, which draft as ``serve`` would on them, by current measurements of this
    machine."""
    model, count = model_profile(open_model(path)), DEVICES["far"]
    names, windows = [f"d{i}" for i in range(count)], even_bytes(model, count) or ()
    found = machines_here(names, await asyncio.to_thread(measured_cpu, folder, 1, model))
    work = replace(default_workload(CONTEXT, ROWS, "f16"), flash=True)
    plan = arrange(names, windows, rounds=1, model=model)
    question = instance(found, links_between(names, FAR_S), model, work, {}, plan.head)
    served = drafting_of("lookup", "exact", plan, question, batches_of("exact", plan, question, 1))
    drafting = served or Drafting(room=min(count, MAX_ROOM))
    systems = {}
    for way, draft in drafts.items():
        ring = LocalRing(
            path,
            windows,
            context=CONTEXT,
            rows=ROWS,
            threads=1,
            latency_s=FAR_S,
            drafting=drafting,
            draft=_loaded(path, draft),
            folder=folder,
        )
        systems[way] = _alone(await run.stack.enter_async_context(ring))
    return systems, f"far, {1e3 * FAR_S:g} ms, room {drafting.room}"


# ---- as primad serves -----------------------------------------------------------------------------------------------


async def _two(run: Run, path: Path, _: Path, drafts: _Drafts) -> _Systems:
    """Return two machines with a core each."""
    return {way: await asyncio.to_thread(_head, run, path, draft, 2, ()) for way, draft in drafts.items()}, "two"


async def _streams(run: Run, path: Path, _: Path, drafts: _Drafts) -> _Systems:
    """Return one device that has memory for half of the model, and for its drafter.

    It has one thread: with several threads the KV cache is divided between them from a certain length on, which changes
    the attention's results.
    """
    systems = {}
    for way, draft in drafts.items():
        loaded = _loaded(path, draft)
        limit = file_bytes(path) // 2 + BESIDE_BYTES + (0 if loaded is None else loaded.memory_bytes + DRAFTING_BYTES)
        every = ("--threads", "1", "--max-ram", f"{limit}B")
        systems[way] = await asyncio.to_thread(_head, run, path, draft, 1, every)
    return systems, "streams"


def _head(run: Run, path: Path, draft: Path | None, devices: int, every: Sequence[str]) -> _System:
    """Return ``primad serve`` on these devices; several of them count as machines."""
    how = ["--speculate", "lookup"] if draft is None else ["--speculate", "draft", "--draft", str(draft)]
    head = ("--context", str(CONTEXT), "--extra-buffers", "off", *how)
    server = run.head(path, devices, *head, every=every, machines=devices > 1)
    streamed = sum(device["predicted"]["streamed"] for device in server.status()["devices"])
    run.say(f"{'no draft model' if draft is None else draft.name}: layers {server.plan()}, {streamed} of them streamed")

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
    drafted, accepted, _ = drafts()
    begin_s = time.perf_counter()
    how = {"speculate": speculates, "cache_prompt": False, **samplers(question.sampling)}
    reported = server.sampled(question.prompt, tokens, **how)
    after = drafts()
    times, ids = [at_s for at_s, _ in reported], [token for _, token in reported]
    return _completion(ids, times, begin_s, after[0] - drafted, after[1] - accepted)


CASES: Final[Mapping[str, Callable[[Run, Path, Path, _Drafts], Awaitable[_Systems]]]] = {
    "two": _two,
    "streams": _streams,
    "far": _far,
}
BENCH: Final = Bench(
    help="the gain of draft tokens",
    measure=measure,
    quick={"case": ["two", "streams"], "way": [AS_SERVED], "rounds": 1, "tokens": 64},
    flags=(
        flag("--case", choices=list(CASES), nargs="+", default=list(CASES)),
        flag("--way", choices=WAYS, nargs="+", default=list(WAYS), help="drafters (default: all)"),
        flag("--draft", choices=list(FORMS), default="q2_k", help="form of the draft model"),
        flag("--tokens", type=int, default=DEFAULT_ANSWER_TOKENS, help="tokens of a completion (default: as in plans)"),
    ),
)
