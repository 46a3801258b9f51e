"""``tools/bench speculate``: what drafts win, and what they cost where they win nothing, against the same ring without.

Every way of drafting has a ring of its own, all loaded before the first run, and answers each question twice in turn:
without drafts and with them. So each figure is a ratio of neighbours. ``as served`` is what a plan for these devices and
links says; the others leave one thing out: no steps ahead of the next token (``one step``: plain synchronous speculation),
nothing skipped on its way, a confidence that does not adapt (``fixed``: nor do drafts end that win nothing). ``model`` is
as served with the same model in Q2_K that drafts as well, ``wrong model`` with one that knows nothing.

``two``: two devices with a core each. ``far``: four devices (``--windows``) whose hops take 10 ms longer (``--latency-ms``).
``streams``: one device that has memory for half of the model in Q8_0, of which several rows of a step are exact (needs
cgroups and root). There the draft model works while the ring computes, or only while a step waits for it (``no
overlap``), and steps wait for draft_tokens down to a share that adapts, or is the same for ever (``fixed``); with rows that
need not be exact its drafts are a ``chain`` or may be a ``tree``. Questions: code to edit, a story to go on with, a chat
over a text, and random tokens, of which nothing can be drafted. ``--way`` has some of the ways alone, ``--target f16`` the
model requantised first, ``--draft`` the form of it that drafts.

``differing`` asks for no speed: it counts of how many of 50 answers the text is another one where a step has up to 8 rows
whether they are exact or not, as with ``--batching fast``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from halda import LinkProfile, arrange, instance
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
from primad.profiler.processors import measure_cpu
from primad.ring.messages import Sampled
from primad.ring.speculation.drafter import MAX_ROOM, Drafting
from primad.ring.speculation.messages import DraftModel
from tools.bench_solver import device_here, links_between
from tools.bench_together import NO_DISK
from tools.lab import LabError
from tools.lab.drafted import AS_SERVED, AT_LEAST, COPIES, Differing, Drafted, DraftedCompletion, KeptCompletion
from tools.lab.local_ring import LocalRing, even_bytes, types_of
from tools.lab.memory import LimitedGroup
from tools.lab.memory_runs import device_in, plan_single_device, prefetch_rate
from tools.lab.quantised import FORMS, quantised
from tools.lab.questions import QUESTIONS, fifty
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
WAYS: Final = (AS_SERVED, "one step", "no skipping", "fixed", "model", "wrong model", "no overlap", "chain", "tree")
DIFFERING: Final = "differing"
FAST_ROWS: Final = 8
DIFFERING_S: Final = 0.01
"""So much longer a hop takes there, that the draft model gets ahead of the ring."""
AT_ONCE: Final = 4
"""Answers of single rows there, which a ring of two has all at once."""
DRAWN: Final = msgspec.structs.replace(GREEDY, temperature=1.0, seed=7)


@dataclass(frozen=True, slots=True)
class _Question:
    prompt: list[int]
    sampling: Sampling


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


def ways(served: Drafting) -> dict[str, Drafting]:
    """What is compared."""
    flat = (1.0,) * (SYNCHRONOUS + 1)
    return {
        AS_SERVED: served,
        "one step": Drafting(room=1, rows=len(flat), costs=flat),
        "no skipping": replace(served, skips=False),
        "fixed": replace(served, adapts=False),
    }


def as_served(path: Path, devices: int, latency_s: float) -> Drafting:
    """What ``serve --speculate lookup`` would do on so many machines with a core each, as this one is measured now."""
    model, names = model_profile(open_model(path)), [f"d{i}" for i in range(devices)]
    with tempfile.TemporaryDirectory(prefix="primad-speculate-") as folder:
        cpu = measure_cpu(Path(folder), 1, lambda _: None, Effort(types=types_of(model)))
    found = [replace(device_here(name, cpu, ram_read_bytes_per_s(1), NO_DISK), host=name) for name in names]
    work = replace(default_workload(CONTEXT, ROWS, "f16"), flash=True)
    plan = arrange(names, even_bytes(model, devices) or [len(model.layers)], rounds=1, model=model)
    hop = LinkProfile(source="", target="", address="", round_trip_s=0.0004 + 2 * latency_s, bytes_per_s=2e9)
    question = instance(found, links_between(names, [hop]), model, work, {}, plan.head)
    drafting = drafting_of("lookup", "exact", plan, question, batches_of("exact", plan, question, 1))
    return drafting or Drafting(room=min(devices, MAX_ROOM))


async def ask(ring: LocalRing, question: _Question, tokens: int, *, speculates: bool) -> DraftedCompletion:
    """One answer."""
    times: list[float] = []

    def heard(_: Sampled) -> None:
        times.append(time.perf_counter())

    begin_s = time.perf_counter()
    told, finished = await ring.generate(
        question.prompt, tokens, sampling=question.sampling, speculates=speculates, heard=heard
    )
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    return DraftedCompletion(
        tokens=[each.token for each in told],
        first_s=times[0] - begin_s,
        next_s=statistics.fmean(gaps),
        late_s=gaps[round(0.95 * (len(gaps) - 1))],
        drafted=finished.drafted,
        accepted=finished.accepted,
    )


def rings_of(options: argparse.Namespace) -> Iterator[tuple[str, int, float]]:
    """The cases that are asked for, each with its devices and the seconds that a hop takes longer."""
    for case in options.case:
        if case == "far":
            yield from (
                (case, devices, ms / 1e3) for devices, ms in itertools.product(options.windows, options.latency_ms)
            )
        elif case != DIFFERING:
            yield case, 2 if case == "two" else 1, 0.0


async def measure(case: str, devices: int, latency_s: float, path: Path, options: argparse.Namespace) -> list[Drafted]:
    """All ways of one case, all questions."""
    async with AsyncExitStack() as stack:
        # not in memory: what streams is read from a disk
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-speculate-", dir="/var/tmp")))
        form = options.target or ("q8_0" if case == "streams" else None)
        if form is not None:
            path = await asyncio.to_thread(quantised, path, form, folder, 2)
        if case == "streams":
            rings, name = await _streaming(stack, path, folder, options.way, options.draft)
        else:
            served = await asyncio.to_thread(as_served, path, devices, latency_s)
            rings = await _near_and_far(stack, path, served, devices, latency_s, folder, options.way, options.draft)
            name = f"two, room {served.room}"
            if case == "far":
                name = f"far, {devices} devices, {1e3 * latency_s:g} ms, room {served.room}"
        asked = questions(path)
        found = [
            Drafted(case=name, model=path.stem, way=way, question=question)
            for question in asked
            for way in rings
            if question in COPIES or way in EVERYWHERE
        ]
        for number in range(options.rounds + 1):
            for each in found:
                for speculates in (False, True) if number % 2 else (True, False):
                    answer = await ask(rings[each.way], asked[each.question], options.tokens, speculates=speculates)
                    if number:
                        (each.with_ if speculates else each.without).append(answer)
        for way, ring in rings.items():
            drafts = (await ring.status(ring.plan.head)).drafts
            for each in found:
                if each.way == way and drafts is not None and drafts.drafted:
                    each.skipped = drafts.skipped / drafts.drafted
    return found


def drafts(path: Path, folder: Path, form: str) -> dict[str, DraftModel]:
    """What drafts for the model ``path`` in which way: another ``form`` of it, and one that was never taught."""
    untaught = folder / "untaught.gguf"
    write_model(untaught, vocabulary=f"from:{path}")
    found = {"model": quantised(path, form, folder, 2), "wrong model": untaught}
    header = open_model(path)
    return {way: draft_model(each, header, context=CONTEXT, threads=1) for way, each in found.items()}


async def _near_and_far(
    stack: AsyncExitStack,
    path: Path,
    served: Drafting,
    devices: int,
    latency_s: float,
    folder: Path,
    asked: Sequence[str],
    form: str,
) -> dict[str, LocalRing]:
    model = model_profile(open_model(path))
    rings: dict[str, LocalRing] = {}
    models = await asyncio.to_thread(drafts, path, folder, form)
    compared = ways(served) | dict.fromkeys(models, served)
    for way in [each for each in asked if each in compared]:
        drafting = compared[way]
        ring = LocalRing(
            path,
            even_bytes(model, devices),
            context=CONTEXT,
            rows=ROWS,
            threads=1,
            pinned=not latency_s,
            latency_s=latency_s,
            drafting=drafting,
            draft=models.get(way),
            folder=folder,
        )
        rings[way] = await stack.enter_async_context(ring)
    return rings


async def _streaming(
    stack: AsyncExitStack, path: Path, folder: Path, asked: Sequence[str], form: str
) -> tuple[dict[str, LocalRing], str]:
    """One device with one thread: from so many cells on several threads share what is attended to in another way.

    Each way has a file and a memory of its own, in which what drafts has room beside it.
    """
    model = model_profile(open_model(path))
    cpu = measure_cpu(folder, 1, lambda _: None, Effort(types=types_of(model)))
    here = device_here("d0", cpu, ram_read_bytes_per_s(1), measure_home(folder, lambda _: None, Effort()).disk)
    rate, guessing = prefetch_rate(path), await asyncio.to_thread(drafts, path, folder, form)
    rings: dict[str, LocalRing] = {}
    name = "streams"
    for way in [each for each in STREAMING if each in asked]:
        draft = None if way == AS_SERVED else guessing["wrong model" if way == "wrong model" else "model"]
        own = path.with_name(f"{path.stem}-{len(rings)}.gguf")
        await asyncio.to_thread(shutil.copyfile, path, own)
        more = 0 if draft is None else draft.memory_bytes
        group = stack.enter_context(LimitedGroup(model.size_bytes // 2 + BESIDE_BYTES + more))
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
        rings[way] = await stack.enter_async_context(ring)
        (streamed,) = solution.prediction.devices
        name = f"streams, {streamed.streamed_bytes / model.size_bytes:.0%}, {drafting.rows} rows"
    return rings, name


async def differing(path: Path, options: argparse.Namespace) -> Differing:
    """Of how many answers the text is another one where a step has several rows, whether they are exact or not.

    Those of single rows come of a ring without long hops, several at once. An answer that ``options.kept`` has is not asked
    for again.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-speculate-")))
        if options.target is not None:
            path = await asyncio.to_thread(quantised, path, options.target, folder, 2)
        found, done = Differing(model=path.stem, rows=FAST_ROWS), _kept(options, path.stem)
        vocabulary = LlamaVocabulary(path)
        stack.callback(vocabulary.release)
        prompts = [
            vocabulary.tokenize(text, add_special=True, parse_special=True) for text in fifty()[: options.prompts]
        ]
        missing = [number for number in range(len(prompts)) if number not in done]
        if missing:
            plain, fast = await _plain_and_fast(stack, path, folder)
            for few in (missing[at : at + AT_ONCE] for at in range(0, len(missing), AT_ONCE)):
                answers = await plain.generate_all([prompts[number] for number in few], options.long_tokens)
                for number, told in zip(few, answers, strict=True):
                    on = await ask(fast, _Question(prompts[number], GREEDY), options.long_tokens, speculates=True)
                    off = [each.token for each in told]
                    done[number] = KeptCompletion(
                        model=path.stem, number=number, maximum=options.long_tokens, off=off, on=on
                    )
                    _keep(options.kept, done[number])
        for number in range(len(prompts)):
            found.count(done[number].off, done[number].on)
        return found


def _kept(options: argparse.Namespace, model: str) -> dict[int, KeptCompletion]:
    """The answers of ``model`` in the file ``options.kept``, by the number of their prompt."""
    if options.kept is None or not Path(options.kept).exists():
        return {}
    every = (msgspec.json.decode(line, type=KeptCompletion) for line in Path(options.kept).read_bytes().splitlines())
    return {each.number: each for each in every if (each.model, each.maximum) == (model, options.long_tokens)}


def _keep(file: str | None, answer: KeptCompletion) -> None:
    if file is not None:
        with Path(file).open("ab") as kept:
            kept.write(msgspec.json.encode(answer) + b"\n")


async def _plain_and_fast(stack: AsyncExitStack, path: Path, folder: Path) -> tuple[LocalRing, LocalRing]:
    """A ring of two that computes single rows, and one that computes up to ``FAST_ROWS`` of drafts in a step."""
    model = await asyncio.to_thread(quantised, path, "q2_k", folder, 2)
    draft = draft_model(model, open_model(path), context=CONTEXT, threads=1)
    drafting = Drafting(rows=FAST_ROWS, costs=(1.0,) * FAST_ROWS, adapts=False)
    windows = even_bytes(model_profile(open_model(path)), 2)
    ring = partial(LocalRing, path, windows, context=CONTEXT, rows=ROWS, threads=1, folder=folder)
    plain = await stack.enter_async_context(ring(sequences=AT_ONCE))
    fast = await stack.enter_async_context(ring(latency_s=DIFFERING_S, drafting=drafting, draft=draft))
    return plain, fast


def add_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser], model: Path) -> None:
    """Adds ``speculate`` to the command line."""
    one = benches.add_parser("speculate", help="what drafts win")
    one.add_argument("--model", type=Path, action="append", help=f"GGUF file (default: {model.name})")
    one.add_argument("--case", choices=[*AT_LEAST, DIFFERING], nargs="+", default=list(AT_LEAST))
    one.add_argument("--way", choices=WAYS, nargs="+", default=list(WAYS), help="what is compared (default: all)")
    one.add_argument("--windows", type=int, nargs="+", default=[4], help="of far rings, a device each (default: 4)")
    one.add_argument(
        "--latency-ms", type=float, nargs="+", default=[10.0], help="of each hop of far rings (default: 10)"
    )
    one.add_argument("--target", choices=list(FORMS), help="requantise the model first")
    one.add_argument("--draft", choices=list(FORMS), default="q2_k", help="form of the draft model")
    one.add_argument("--prompts", type=int, default=50, help="of the case differing (default: 50)")
    one.add_argument("--long-tokens", type=int, default=200, help="of its answers (default: 200)")
    one.add_argument(
        "--kept", help="file of answers of the case differing: those in it are counted, others added to it"
    )
    one.add_argument("--tokens", type=int, default=128)
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--json", help="also write the figures to this file")
