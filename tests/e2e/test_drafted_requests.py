"""Speculation on real processes changes no token and no log-probability, whatever happens to a worker."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from primad.engine.protocol import Sampling, packed_biases
from primad.gguf.model import open_model
from primad.planning.draft_model import draft_model
from primad.ring.grouping import Batching
from primad.ring.messages import Finished, Sampled
from primad.ring.speculation.drafter import Drafting
from primad.ring.speculation.messages import DraftModel
from tests.e2e.cluster import Head, all_joined, heading, wait_until
from tests.e2e.reference import Plain
from tests.e2e.streams import STORY, ask
from tests.e2e.test_concurrent_requests import ask_all
from tools import synth
from tools.lab.controlled import DRAWN, write_controlled
from tools.lab.local_ring import GREEDY, LocalRing

pytestmark = pytest.mark.slow

SAMPLED = msgspec.structs.replace(GREEDY, temperature=1.0, seed=11)
PENALISED = msgspec.structs.replace(
    SAMPLED, seed=5, repeat_penalty=1.1, presence_penalty=0.3, penalty_tokens=64, logit_bias=packed_biases([(28, 2.0)])
)
MIROSTAT = msgspec.structs.replace(SAMPLED, mirostat=2, mirostat_tau=4.0)
GUIDED = msgspec.structs.replace(SAMPLED, grammar='start: item (", " item)*\nitem: "a red fish" | "a blue fish"\n')
FEW_TOKENS = (28, 29, 30)
FEW_LIKELY = packed_biases([(token, 50.0) for token in FEW_TOKENS])
"""With few likely tokens the text of any model repeats itself now and then, so that some drafts are accepted."""
TEXT = "A red fish, a blue fish, a red fish and a blue fish swam in the sea. " * 6
TOKENS = 32
FEW, MORE, EARLY = 40, 400, 10
"""Tokens of a request that nothing happens to, and of one that a client has time to act in, after the first chunks."""
SHAPE = (5, 6, 3)


async def reported(
    model: Path,
    prompts: Sequence[list[int]],
    kinds: Sequence[Sampling],
    shape: Sequence[int] | None = SHAPE,
    **options: Any,
) -> tuple[list[list[Sampled]], int]:
    """Run ``prompts`` concurrently with each of ``kinds``; return the tokens, and the number of accepted drafts."""
    accepted = 0
    async with LocalRing(model, shape, context=512, threads=1, sequences=len(prompts), **options) as ring:
        found: list[list[Sampled]] = []
        for sampling in kinds:
            answers: dict[int, list[Sampled]] = {}
            for prompt in prompts:
                answers[await ring.ask(prompt, TOKENS, (), sampling, 3)] = []
            left = len(prompts)
            while left:
                event = await ring.next_event()
                if isinstance(event, Sampled):
                    answers[event.request].append(msgspec.structs.replace(event, request=0))
                elif isinstance(event, Finished):
                    left, accepted = left - 1, accepted + event.accepted
            found += answers.values()
        return found, accepted


def tokens_of(model: Path, *texts: str) -> list[list[int]]:
    plain = Plain(model)
    try:
        return [plain.tokenize(text) for text in texts]
    finally:
        plain.release()


async def check(
    model: Path, texts: Sequence[str], kinds: Sequence[Sampling], drafting: Drafting, **options: Any
) -> int:
    """Check that drafts change nothing that a ring reports; return the number of accepted drafts."""
    prompts = tokens_of(model, *texts)
    expected, none = await reported(model, prompts, kinds, **options)
    found, accepted = await reported(model, prompts, kinds, drafting=drafting, **options)
    assert found == expected
    assert none == 0
    return accepted


async def test_drafts_change_no_token_and_no_log_probability(quick_model: Path):
    """Drafts in their own steps ahead, and drafts batched with the next token where batches are exact."""
    kinds = [*(msgspec.structs.replace(each, logit_bias=FEW_LIKELY) for each in (GREEDY, SAMPLED)), GUIDED]
    prompts, batching = tokens_of(quick_model, TEXT), Batching(replays=4)
    expected, _ = await reported(quick_model, prompts, kinds, batching=batching)
    for drafting in (Drafting(room=4), Drafting(rows=4, costs=(1.0,) * 4, adapts=False)):
        found, accepted = await reported(quick_model, prompts, kinds, drafting=drafting, batching=batching)
        assert found == expected
        assert accepted > 0


@pytest.mark.parametrize(
    ("architecture", "rows"),
    [("qwen35", 4), ("granitehybrid", 1), pytest.param("nemotron_h", 4, marks=pytest.mark.matrix)],
)
async def test_states_are_rolled_back_after_drafts_and_several_are_computed_in_one_step(
    tmp_path: Path, architecture, rows
):
    """In a ring and on one device: single prompts, concurrent ones, and speculation with some accepted drafts."""
    model, prompts = tmp_path / "model.gguf", [[1 + (7 * i + each) % 90 for i in range(40 + each)] for each in range(3)]
    synth.write_model(model, architecture=architecture, layers=12)
    kinds = [msgspec.structs.replace(each, logit_bias=FEW_LIKELY) for each in (GREEDY, SAMPLED)]
    alone = [(await reported(model, [prompt], kinds, None))[0] for prompt in prompts]
    for shape in ((4, 4), None):
        together, _ = await reported(model, prompts, kinds, shape, batching=Batching(rows=3))
        assert together == [each[kind] for kind in range(len(kinds)) for each in alone]
        ahead, with_next = Drafting(room=3, adapts=False), Drafting(rows=rows, costs=(1.0,) * rows, adapts=False)
        blocks = [replace(with_next, room=3, block=min(3, rows))] * (rows > 1)
        for drafting in ([ahead, *blocks] if shape is not None else []) + [with_next] * (rows > 1):
            options = {"drafting": drafting, "batching": Batching(replays=4)}
            found, accepted = await reported(model, prompts[:1], kinds, shape, **options)
            assert found == alone[0]
            assert accepted > 0


async def test_the_own_layer_of_a_model_with_states_drafts_and_changes_nothing(tmp_path: Path):
    """The layer is right by construction, so drafts of the likeliest tokens are accepted."""
    model = tmp_path / "model.gguf"
    sampled = msgspec.structs.replace(SAMPLED, temperature=write_controlled(model, architecture="qwen35", layers=13))
    prompts, kinds = [[1 + 7 * i % 90 for i in range(90)]], [GREEDY, sampled]
    expected, _ = await reported(model, prompts, kinds, None, rows=64)
    ahead, with_next = Drafting(room=3, adapts=False), Drafting(rows=4, costs=(1.0,) * 4, adapts=False)
    blocks = replace(with_next, room=3, block=3)
    for shape, drafting in (((4, 4), ahead), ((4, 4), blocks), (None, with_next)):
        options = {"drafting": drafting, "predicts": True, "batching": Batching(replays=4)}
        found, accepted = await reported(model, prompts, kinds, shape, rows=64, **options)
        assert found == expected
        assert accepted > 0.5 * TOKENS


async def test_a_model_made_for_it_accepts_seven_drafts_in_ten_and_blocks_roll_back_anywhere(tmp_path: Path):
    """On one device each draft is judged by itself. Sampling in another token order would accept fewer drafts, which
    would falsify benchmarks. In a ring drafts are rejected in the middle of a step, with another step behind it."""
    model = tmp_path / "model.gguf"
    temperature = write_controlled(model, "qwen35", right=0.7, layers=13)
    sampling = msgspec.structs.replace(SAMPLED, temperature=temperature, **DRAWN)
    options = {"context": 512, "threads": 1, "predicts": True, "batching": Batching(replays=4)}

    async def sampled_by(shape: Sequence[int] | None, drafting: Drafting) -> tuple[list[int], Finished]:
        async with LocalRing(model, shape, drafting=drafting, **options) as ring:
            await ring.ask([1, 20, 30], 480, (), sampling)
            tokens: list[int] = []
            while not isinstance(event := await ring.next_event(), Finished):
                tokens += [event.token] if isinstance(event, Sampled) else []
            return tokens, event

    single = Drafting(rows=2, costs=(1.0, 1.0), adapts=False)
    expected, finished = await sampled_by(None, single)
    assert finished.drafted > 200
    assert finished.accepted / finished.drafted == pytest.approx(0.7, abs=0.06)
    for room, block in ((2, 2), (3, 4)):
        tokens, finished = await sampled_by((4, 4), replace(single, room=room, block=block, rows=4, costs=(1.0,) * 4))
        assert tokens == expected
        assert finished.accepted > 200


def drafter_of(model: Path) -> DraftModel:
    """Return the model as its own draft model."""
    return draft_model(model, open_model(model), context=512, threads=1)


async def test_a_draft_model_changes_nothing_and_its_death_does_no_harm(quick_model: Path):
    (prompt,) = tokens_of(quick_model, STORY)

    async def run(draft: DraftModel | None, latency_s: float) -> tuple[list[Sampled], Finished]:
        reported: list[Sampled] = []
        drafting = None if draft is None else Drafting(room=4)
        async with LocalRing(
            quick_model, SHAPE, context=512, threads=1, latency_s=latency_s, drafting=drafting, draft=draft
        ) as ring:
            head = psutil.Process(ring.processes[ring.plan.head].pid)

            def heard(event: Sampled) -> None:
                reported.append(event)
                if draft is not None and len(reported) == TOKENS:
                    (draft_tokens,) = head.children()
                    draft_tokens.kill()

            return await ring.generate(prompt, 4 * TOKENS, logprobs=3, heard=heard)

    expected, _ = await run(None, 0.0)
    found, finished = await run(drafter_of(quick_model), 0.01)
    assert found == expected
    assert (finished.reason, finished.completion_tokens) == ("length", 4 * TOKENS)


@pytest.mark.parametrize("branches", [pytest.param(0, marks=pytest.mark.matrix), 4])
async def test_steps_of_several_tokens_wait_for_a_draft_model_and_may_be_trees(quick_model: Path, branches):
    """Batches are not exact here, so the text may differ later, where two tokens are almost equally likely."""
    (prompt,) = tokens_of(quick_model, STORY)
    drafting = Drafting(rows=6, costs=(1.0,) * 6, adapts=False, branches=branches)
    async with LocalRing(
        quick_model, SHAPE, context=512, threads=1, latency_s=0.02, drafting=drafting, draft=drafter_of(quick_model)
    ) as ring:
        alone, _ = await ring.generate(prompt, TOKENS, speculates=False)
        for _ in range(200):  # nothing waits for the draft model to be loaded
            found, finished = await ring.generate(prompt, TOKENS)
            if finished.accepted:
                break
    assert [event.token for event in found[:8]] == [event.token for event in alone[:8]]
    assert (finished.reason, finished.completion_tokens) == ("length", TOKENS)
    assert finished.accepted > 0


@pytest.mark.matrix
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("room", [2, 9])
async def test_no_room_and_no_skipping_changes_anything(smollm2: Path, room, skips):
    accepted = await check(
        smollm2,
        [TEXT, f"{STORY} {TEXT}"],
        [GREEDY, SAMPLED, PENALISED, MIROSTAT, GUIDED],
        Drafting(room=room, skips=skips),
    )
    assert accepted > 0


@pytest.mark.matrix
async def test_drafts_do_not_change_the_text_of_eight_concurrent_requests(smollm2: Path):
    texts = [f"{number}. {TEXT[: 100 + 40 * number]}" for number in range(8)]
    accepted = await check(smollm2, texts, [GREEDY, SAMPLED], Drafting(room=9), batching=Batching(steps=3))
    assert accepted < 2 * len(texts) * TOKENS, "users go first: a full ring has little room, or none"


@pytest.mark.matrix
async def test_sliding_windows_are_cut_back_exactly(gemma3: Path):
    (prompt,) = tokens_of(gemma3, TEXT * 4)
    shape = (6, 6, 5)

    async def run(drafting: Drafting | None) -> tuple[list[Sampled], Finished]:
        async with LocalRing(gemma3, shape, context=1024, threads=1, drafting=drafting) as ring:
            return await ring.generate(prompt, 120, logprobs=3)

    expected, _ = await run(None)
    found, finished = await run(Drafting(room=5))
    assert found == expected
    assert finished.accepted > 0


def test_a_draft_model_runs_on_a_device_without_layers_and_on_the_head_once_that_is_lost(
    quick_model: Path, module_home
):
    cluster = f"drafter-{secrets.token_hex(6)}"
    with ExitStack() as stack:
        _, draft_device = stack.enter_context(
            all_joined([module_home(name) for name in ("computes", "drafts")], cluster)
        )
        arguments = ("--windows", "8,7", "--context", 512, "--speculate", "draft", "--draft", quick_model)
        head = stack.enter_context(
            heading(quick_model, module_home("has-text"), cluster, "--wait", 2, *arguments, "--draft-on", "drafts")
        )
        head.wait_serving()
        expected = ask(head, prompt=STORY, tokens=FEW, speculate=False).text

        def drafting_on() -> str | None:
            drafts = head.status()["drafts"]
            return None if drafts is None else drafts["model_on"]

        wait_until(lambda: drafting_on() == "drafts", "the other device drafts")

        def accepts() -> bool:
            before = head.status()["drafts"]["accepted"]
            assert ask(head, prompt=STORY, tokens=FEW).text == expected
            return bool(head.status()["drafts"]["accepted"] > before)

        wait_until(accepts, "drafts of it hold")
        longer = ask(head, prompt=STORY, tokens=MORE, speculate=False).text
        disturbed = ask(head, draft_device.kill, still=True, prompt=STORY, tokens=MORE, middle=EARLY, speculate=True)
        assert disturbed.text == longer
        wait_until(lambda: drafting_on() == "has-text", "the head drafts")
        assert ask(head, prompt=STORY, tokens=FEW).text == expected
        assert "Traceback" not in head.run.output


def test_a_models_own_layer_drafts_in_a_ring_and_alone_and_changes_nothing(module_home):
    """The layer is right by construction, so its drafts are accepted; the ring ends during a completion."""
    home, cluster = module_home("predicts"), f"predicts-{secrets.token_hex(6)}"
    model = home / "model.gguf"
    write_controlled(model)
    with ExitStack() as stack:
        (worker,) = stack.enter_context(all_joined([module_home("computes-it")], cluster))
        arguments = ("--wait", 1, "--use-all", "--context", 512, "--speculate", "mtp", "--batching", "fast")
        head = stack.enter_context(heading(model, home, cluster, *arguments))
        head.wait_serving()
        kind = {"prompt": "fish", "tokens": MORE, "middle": EARLY}
        expected = ask(head, speculate=False, **kind).text

        def asked(disturb: Callable[[], object] | None = None) -> int:
            reported = ask(head, disturb, still=True, speculate=True, **kind)
            assert (reported.text, reported.error) == (expected, None), head.run.output
            return drafted(head)

        wait_until(lambda: asked() > 0, "some are drafted: on a busy machine not of every answer")
        asked(worker.kill)
        wait_until(lambda: asked() > 0, "some are drafted alone")
        assert "Traceback" not in head.run.output


def drafted(head: Head) -> int:
    """Return the number of drafts that its ring computed."""
    drafts = httpx.get(f"{head.url}/status").json()["drafts"]
    return 0 if drafts is None else drafts["drafted"]


@pytest.mark.parametrize("streams", [1, pytest.param(8, marks=pytest.mark.matrix)])
def test_a_worker_that_is_killed_under_drafts_changes_no_text(quick_model: Path, module_home, streams):
    cluster = f"drafts-{secrets.token_hex(6)}"
    with ExitStack() as stack:
        homes = [module_home(f"w{number}-{streams}") for number in (1, 2)]
        _, second = stack.enter_context(all_joined(homes, cluster))
        arguments = ("--wait", 2, "--use-all", "--context", 1024, "--sequences", streams, "--batching", "exact")
        home = module_home(f"head-{streams}")
        head: Head = stack.enter_context(
            heading(quick_model, home, cluster, *arguments, "--speculate", "lookup", config="")
        )
        head.wait_serving()
        few: dict[str, Any] = {"logit_bias": dict.fromkeys(map(str, FEW_TOKENS), 50)}
        kinds = [few, few | {"temperature": 1.0, "seed": 7}]
        expected = [ask(head, prompt=TEXT, speculate=False, **kind).text for kind in kinds]
        assert drafted(head) == 0

        def drafts() -> bool:
            assert [ask(head, prompt=TEXT, **kind).text for kind in kinds] == expected
            return drafted(head) > 0

        wait_until(drafts, "some are drafted, in a ring that lasts")
        if streams > 1:
            alone = [reported.text for reported in ask_all(head, streams, speculate=False)]
            assert [reported.text for reported in ask_all(head, streams, second.kill, speculate=True)] == alone
        act = None if streams > 1 else second.kill
        longer = ask(head, prompt=TEXT, tokens=MORE, speculate=False, **few).text
        disturbed = ask(head, act, still=True, prompt=TEXT, tokens=MORE, middle=EARLY, speculate=True, **few)
        assert (disturbed.text, disturbed.error) == (longer, None), head.run.output
        assert "Traceback" not in head.run.output
