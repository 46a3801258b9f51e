"""Any ring gives the tokens and the logits of plain llama.cpp on the whole model, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest

from halda import Plan, arrange
from primad.engine.protocol import EngineOptions
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.ring.chunks import Pieces
from primad.ring.grouping import Batching
from primad.ring.messages import Sampled
from tests.e2e.reference import CONTEXT, THREADS, TOP, Continuation, Plain
from tests.shell.test_cut_exact import Route
from tools.lab.local_ring import LocalRing
from tools.synth import FEW_TOKENS, write_model

pytestmark = pytest.mark.slow

TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_text() * 5
TOKENS = 16
CHUNKS = {"quick": 128, "sliding": 64, "smollm2": 128, "gemma3": 512, "gemma3 for short": 512}
PROMPTS = {
    "quick": (1, 40, 160),
    "sliding": (1, 40, 100),
    "smollm2": (1, 40, 160),
    "gemma3": (1, 40, 560),
    "gemma3 for short": (1, 40),
}
"""Prompt lengths in tokens: one, part of a chunk, more than a chunk, and with sliding windows more than a window.

``quick`` has half of SmolLM2's layers and ``sliding`` all of Gemma 3's, both with SmolLM2's first tokens and a small
part of the computation.
"""

RINGS = {
    "quick": [
        (None, 1),
        ((3, 4), 2),
        ((5, 6, 3), 1),
        ((2, 2, 1), 3),  # no layer is left for the tail, so the head's last window gives it one
        ((1, 3, 2, 1), 2),
    ],
    "sliding": [
        ((7, 9), 1),
        ((1, 5), 3),  # the head's last window becomes the tail, so the worker has two windows in a row
        ((1, 2, 1, 1), 3),
        ((3, 1, 4), 2),
    ],
}
"""Layers per round of each device, and rounds: every combination of device count and rounds, on one of the models."""
MORE_RINGS = {
    "smollm2": [
        *((None, 1), ((5, 8), 2), ((10, 12, 7), 1), ((3, 4, 3), 3), ((2, 5, 3, 4), 2)),
        *(((3, 19), 1), ((2, 7), 3), ((3, 1, 9), 2), ((1, 2, 20, 5), 1), ((1, 4, 2, 2), 3)),
    ],
    "gemma3": [
        *((None, 1), ((7, 9), 1), ((1, 5), 3), ((1, 2, 1, 1), 3), ((3, 1, 4), 2)),
        *(((2, 6), 2), ((2, 5, 10), 1), ((1, 2, 6, 8), 1), ((1, 3, 1), 3), ((1, 2, 2, 3), 2)),
    ],
}
"""The same on the real models, only in ``tools/test --full``."""


def rings() -> Iterator[object]:
    for which, marks in ((RINGS, ()), (MORE_RINGS, pytest.mark.matrix)):
        for model, shapes in which.items():
            for windows, rounds in shapes:
                name = "-".join(map(str, windows or ["whole"]))
                yield pytest.param(model, windows, rounds, id=f"{model} {name} in {rounds}", marks=marks)


@dataclass(frozen=True)
class Truth:
    """The results of plain llama.cpp for one model."""

    path: Path
    chunk: int
    prompts: dict[int, list[int]]
    answers: dict[int, Continuation]


@pytest.fixture(scope="module")
def sliding(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Gemma 3's layers, but narrow, with random weights, sliding windows of 64 and a smaller vocabulary."""
    path = tmp_path_factory.mktemp("sliding") / "sliding.gguf"
    write_model(
        path, architecture="gemma3", layers=18, sliding_window=64, vocabulary=f"from:{smollm2}", tokens=FEW_TOKENS
    )
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def truths(quick_model: Path, sliding: Path, smollm2: Path, gemma3: Path) -> Callable[..., Truth]:
    """Returns the truth about a model by name, with flash attention or without; computed on first use."""
    paths = {"quick": quick_model, "sliding": sliding, "smollm2": smollm2, "gemma3": gemma3}
    paths["gemma3 for short"] = gemma3
    return cache(lambda model, flash=True: truth(paths[model], CHUNKS[model], PROMPTS[model], flash=flash))


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder for layer files, shared by the tests of this module."""
    folder = tmp_path_factory.mktemp("layers")
    yield folder
    shutil.rmtree(folder)


def truth(path: Path, chunk: int, counts: tuple[int, ...], **options) -> Truth:
    plain = Plain(path, chunk=chunk, **options)
    text = plain.tokenize(TEXT)
    prompts = {count: text[:count] for count in counts}
    answers = {count: plain.continue_(prompt, TOKENS) for count, prompt in prompts.items()}
    plain.release()
    assert all(len(answer.tokens) == TOKENS for answer in answers.values()), "choose a text that does not end"
    return Truth(path, chunk, prompts, answers)


def ring_of(expected: Truth, windows, rounds: int, layers: Path, **options) -> LocalRing:
    """Return a ring of the model of ``expected``, with layer files in ``layers``."""
    return LocalRing(
        expected.path,
        windows,
        rounds=rounds,
        context=CONTEXT,
        rows=expected.chunk,
        folder=layers / expected.path.stem,
        **{"threads": THREADS, **options},
    )


@pytest.mark.parametrize(("model", "windows", "rounds"), list(rings()))
async def test_a_ring_gives_the_tokens_and_logprobs_of_plain_llama(truths, layers, model, windows, rounds):
    expected = truths(model)
    async with ring_of(expected, windows, rounds, layers) as ring:
        for count, prompt in expected.prompts.items():
            with_logprobs = count == max(expected.prompts)
            sampled, finished = await ring.generate(prompt, TOKENS, logprobs=TOP if with_logprobs else None)
            assert [event.token for event in sampled] == expected.answers[count].tokens, f"prompt of {count}"
            assert (finished.reason, finished.prompt_tokens, finished.completion_tokens) == (
                "length",
                count,
                TOKENS,
            )
            for step, event in enumerate(sampled if with_logprobs else ()):
                answer = expected.answers[count]
                best = [answer.logprob(step, token) for token in answer.best[step]]
                assert [logprob for _, logprob in event.top] == pytest.approx(best, abs=1e-9)
                for token, logprob in ((event.token, event.logprob), *event.top):
                    assert logprob == pytest.approx(answer.logprob(step, token), abs=1e-9)


@pytest.mark.parametrize(
    ("model", "windows", "rounds"),
    [
        ("quick", (3, 4), 2),
        ("sliding", (2, 6), 2),
        pytest.param("smollm2", (5, 8), 2, marks=pytest.mark.matrix),
        pytest.param("gemma3", (2, 6), 2, marks=pytest.mark.matrix),
    ],
)
async def test_a_common_prefix_of_prompts_is_computed_once_with_the_same_bits(truths, layers, model, windows, rounds):
    """Two prompts share a whole chunk, which also exceeds sliding windows; another completion comes in between."""
    expected = truths(model)
    whole = expected.prompts[max(expected.prompts)]
    other = whole[: expected.chunk + 20] + whole[30:50]
    async with ring_of(expected, windows, rounds, layers) as ring:
        alone, _ = await ring.generate(other, TOKENS, logprobs=TOP)
        await ring.generate(whole, TOKENS)
        shared, _ = await ring.generate(other, TOKENS, logprobs=TOP, reuses=True)
        again, finished = await ring.generate(other, TOKENS, logprobs=TOP, reuses=True)
        rows = [(await ring.status(ring.plan.head)).rows]
        for prompt in (other, [*other, other[0]]):
            await ring.generate(prompt, 1, reuses=True)
            rows.append((await ring.status(ring.plan.head)).rows)
    assert shared == [msgspec.structs.replace(event, request=3) for event in alone]
    assert again == [msgspec.structs.replace(event, request=4) for event in alone]
    assert finished.prompt_tokens == len(other)
    longer = (rounds + 1) * (len(other) + 1 - expected.chunk)  # counted once in each of the head's windows
    assert [rows[1] - rows[0], rows[2] - rows[1]] == [0, longer]


@pytest.mark.parametrize(
    ("which", "windows", "rounds", "chunk"),
    [
        ("sliding", None, 1, 64),
        ("sliding", (2, 6), 2, 64),
        pytest.param("real", (2, 6), 2, CHUNKS["gemma3"], marks=pytest.mark.matrix),
    ],
)
async def test_a_small_window_cache_gives_the_tokens_of_plain_llama_with_its_own(
    gemma3, sliding, tmp_path, which, windows, rounds, chunk
):
    """After the cache has wrapped around, after going back to a kept state, and in a ring that resumes a request."""
    model = sliding if which == "sliding" else gemma3
    expected = truth(model, chunk, (2 * chunk + 60,), swa_full=False)
    (whole,), (answer,) = expected.prompts.values(), expected.answers.values()
    other = whole[: 2 * expected.chunk + 20] + whole[30:50]
    async with ring_of(expected, windows, rounds, tmp_path, small_windows=True) as ring:
        alone, _ = await ring.generate(other, TOKENS, logprobs=TOP)
        sampled, _ = await ring.generate(whole, TOKENS, logprobs=0)
        rows = [(await ring.status(ring.plan.head)).rows]
        for _ in range(2):
            shared, _ = await ring.generate(other, TOKENS, logprobs=TOP, reuses=True)
            assert printed(shared) == printed(alone)
            rows.append((await ring.status(ring.plan.head)).rows)
        if windows is not None:
            await ring.replace_head()
            rest, _ = await ring.generate(whole, TOKENS, replayed=answer.tokens[:6], logprobs=0)
            assert [event.token for event in rest] == answer.tokens[6:]
    assert [event.token for event in sampled] == answer.tokens
    assert [event.logprob for event in sampled] == pytest.approx(
        [answer.logprob(step, token) for step, token in enumerate(answer.tokens)], abs=1e-9
    )
    visits = 1 if windows is None else rounds + 1
    assert [rows[1] - rows[0], rows[2] - rows[1]] == [visits * (40 + TOKENS - 1), visits * (TOKENS - 1)]


@pytest.mark.parametrize(
    ("model", "windows", "rounds", "batching", "pieces"),
    [
        pytest.param("smollm2", (5, 8), 2, Batching(), None, marks=pytest.mark.matrix),
        ("quick", (3, 4), 2, Batching(rows=3, steps=2), Pieces(multiple=4, rows=(4, 12))),
        ("quick", None, 1, Batching(rows=4), None),
        pytest.param("smollm2", None, 1, Batching(rows=4), None, marks=pytest.mark.matrix),
        pytest.param(
            "smollm2",
            (5, 8),
            2,
            Batching(rows=3, steps=2),
            Pieces(multiple=4, rows=(4, 12)),
            marks=pytest.mark.matrix,
        ),
        pytest.param("gemma3", (7, 9), 1, Batching(), Pieces(multiple=8, rows=(16, 8)), marks=pytest.mark.matrix),
        pytest.param("gemma3", (7, 9), 1, Batching(rows=3, steps=2), None, marks=pytest.mark.matrix),
        ("sliding", (7, 9), 1, Batching(rows=4, pads=True), Pieces(multiple=8, rows=(8,))),
        pytest.param(
            "gemma3", (7, 9), 1, Batching(rows=4, pads=True), Pieces(multiple=8, rows=(8,)), marks=pytest.mark.matrix
        ),
    ],
)
async def test_concurrent_requests_each_give_the_tokens_of_plain_llama_alone(
    truths, layers, model, windows, rounds, batching, pieces
):
    """There are more requests than sequences, with prompts of one token, part of a chunk, and more than a chunk.

    All begin alike and each prompt occurs twice, so that shared prefixes are copied. Without flash attention chunks are
    split into pieces.
    """
    flash = pieces is None
    expected = truths(model) if flash else truths(model, flash=False)
    asked = [*expected.prompts, *reversed(expected.prompts)]
    several = {"sequences": 4, "batching": batching, "pieces": pieces, "flash": flash}
    async with ring_of(expected, windows, rounds, layers, **several) as ring:
        prompts = [expected.prompts[count] for count in asked]
        reported = await ring.generate_all(prompts, TOKENS, logprobs=0, reuses=True)
    for count, sampled in zip(asked, reported, strict=True):
        answer = expected.answers[count]
        assert [event.token for event in sampled] == answer.tokens, f"prompt of {count}"
        for step, event in enumerate(sampled):
            assert event.logprob == pytest.approx(answer.logprob(step, event.token), abs=1e-9)


@pytest.mark.parametrize(
    ("model", "windows", "counts", "threads", "tokens"),
    [
        ("quick", None, (40, 160), 2, 6),
        pytest.param("smollm2", None, (40, 160), 2, 6, marks=pytest.mark.matrix),
        *(
            pytest.param(model, windows, (40, 300, 1500), threads, TOKENS, marks=pytest.mark.matrix)
            for model, windows in (("smollm2", (10, 12)), ("gemma3", (7, 9)))
            for threads in (1, 2)
        ),
    ],
)
async def test_sixteen_concurrent_requests_each_give_the_tokens_of_a_single_one(
    truths, layers, model, windows, counts, threads, tokens
):
    """Batches, pieces and copies are those of a ring on this CPU without flash attention."""
    expected = truths(model, flash=False)
    plain = Plain(expected.path)
    text = plain.tokenize(TEXT)
    plain.release()
    different = [text[10 * number :][: counts[number % len(counts)]] for number in range(6)]
    prompts = [different[number % 6] for number in range(16)]
    several = {"sequences": 16, "batching": Batching(rows=4, steps=2), "pieces": Pieces(multiple=8, rows=(16, 8))}

    async def run():
        async with ring_of(expected, windows, 1, layers, flash=False, threads=threads, **several) as ring:
            alone = [(await ring.generate(prompt, tokens, logprobs=1))[0] for prompt in different]
            together = await ring.generate_all(prompts, tokens, logprobs=1, reuses=True)
        for number, sampled in enumerate(together):
            assert printed(sampled) == printed(alone[number % 6]), f"prompt {number}"

    await run()


def printed(sampled: Iterable[Sampled]) -> list[Sampled]:
    """Return the sampled tokens without the number of their request."""
    return [msgspec.structs.replace(event, request=0) for event in sampled]


def route_of(
    expected: Truth, windows: tuple[int, ...], rounds: int, folder: Path, *, extra_buffers: bool = False
) -> Route:
    """Return all windows of a plan, in this process."""
    plan = planned(expected.path, windows, rounds)
    options = EngineOptions(
        context=CONTEXT,
        sequences=1,
        rows=expected.chunk,
        threads=THREADS,
        batch_threads=THREADS,
        kv_type="f16",
        lock=False,
    )
    cuts = [0, *(window.last for window in plan.route)]
    return Route(open_model(expected.path), cuts, folder, options, extra_buffers=extra_buffers)


def chunked_logits(route: Route, tokens: list[int], chunk: int) -> np.ndarray:
    """Return the logits after the prompt ``tokens``, with the ring's chunks."""
    for start in range(0, len(tokens), chunk):
        logits = route.logits(tokens[start : start + chunk], start)
    return logits


def steps(route: Route, expected: Truth, count: int) -> Iterator[np.ndarray]:
    """Yield the route's logits for each step after the prompt of ``count`` tokens; inputs are the expected tokens."""
    prompt, answer = expected.prompts[count], expected.answers[count]
    for window in route.windows:
        window.kv_remove(0, 0, -1)
    yield chunked_logits(route, prompt, expected.chunk)
    for number, token in enumerate(answer.tokens[:-1]):
        yield route.logits([token], len(prompt) + number)


def largest_difference(route: Route, expected: Truth, count: int) -> float:
    """Return the largest absolute difference of a logit in any step."""
    pairs = zip(steps(route, expected, count), expected.answers[count].logits, strict=True)
    return max(float(np.abs(got - wanted).max()) for got, wanted in pairs)


@pytest.mark.parametrize(
    ("model", "windows", "rounds"),
    [
        ("smollm2", (10, 12, 7), 1),
        ("quick", (1, 1, 1, 1), 3),
        ("sliding", (2, 5, 10), 1),
        ("gemma3 for short", (1, 5), 3),
        pytest.param("gemma3", (1, 5), 3, marks=pytest.mark.matrix),
        pytest.param("smollm2", (1, 4, 2, 2), 3, marks=pytest.mark.matrix),
        pytest.param("gemma3", (2, 5, 10), 1, marks=pytest.mark.matrix),
    ],
)
def test_windows_give_the_logits_of_the_whole_model_bit_for_bit(truths, tmp_path, model, windows, rounds):
    expected = truths(model)
    route = route_of(expected, windows, rounds, tmp_path)
    for count in expected.prompts:
        assert largest_difference(route, expected, count) == 0.0, f"prompt of {count}"
    route.release()
    shutil.rmtree(tmp_path)


def planned(path: Path, windows: tuple[int, ...], rounds: int) -> Plan:
    names = [f"d{number}" for number in range(len(windows))]
    return arrange(names, windows, rounds=rounds, model=model_profile(open_model(path)))


def test_extra_buffers_change_little_and_the_same_in_a_ring(truths, tmp_path):
    """Repacked or AMX weights change the arithmetic, in plain llama.cpp as in a ring.

    First both are compared with the same setting: on x86 with AVX-512 they are equal; the bound allows for builds that
    put the tail's output matrix, which has another name there, into another kind of buffer. Then the setting is judged
    by its effect on the distribution: on Gemma 3 the mean divergence was 0.001 to 0.027 nat, and 61 to 64 of 64 choices
    were equal; a wrong kernel gives several nat and hardly any equal choice.
    """
    plain = truths("gemma3 for short")
    extra = truth(plain.path, plain.chunk, (40,), extra_buffers=True)
    route = route_of(plain, (2, 5, 10), 1, tmp_path, extra_buffers=True)
    assert largest_difference(route, extra, 40) <= 1.0
    divergence, agreed = judge(route, plain, 40)
    assert divergence < 0.2
    assert agreed >= 0.8 * TOKENS
    route.release()
    shutil.rmtree(tmp_path)


def judge(route: Route, expected: Truth, count: int) -> tuple[float, int]:
    """Return the mean Kullback-Leibler divergence in nat from the expected logits, and the number of equal choices."""
    divergences, agreed, answer = [], 0, expected.answers[count]
    for step, got in enumerate(steps(route, expected, count)):
        wanted = log_softmax(answer.logits[step])
        divergences.append(float((np.exp(wanted) * (wanted - log_softmax(got))).sum()))
        agreed += int(got.argmax()) == answer.tokens[step]
    return float(np.mean(divergences)), agreed


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    return exact - np.logaddexp.reduce(exact)
