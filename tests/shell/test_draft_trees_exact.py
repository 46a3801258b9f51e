"""Draft trees in llama.cpp itself: branches share the cells of one sequence, and the text is as without them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from halda.assignment import in_memory
from primad.engine.llama.windows import WholeModel
from primad.engine.protocol import EngineOptions, Rows, WindowSource
from primad.engine.vocabulary import LlamaVocabulary
from primad.ring.head import Head, Notify
from primad.ring.messages import Sampled, StepLimits
from primad.ring.scheduler.scheduler import Scheduler
from primad.ring.scheduler.state import SchedulerState
from primad.ring.speculation.drafter import Drafting, DraftToken
from tests.fakes.drafter import Nothing
from tests.fakes.ring import chunks_of, generate

pytestmark = pytest.mark.slow

LAYERS, CONTEXT, TOKENS, BRANCHES = 30, 256, 40, 3
TEXT = "The ferry leaves the northern pier at half past six. Say this again."


def options(branches: int) -> EngineOptions:
    return EngineOptions(
        context=CONTEXT,
        sequences=1,
        rows=64,
        threads=1,
        batch_threads=1,
        kv_type="f16",
        lock=False,
        branches=branches,
    )


def opened(path: Path, branches: int) -> tuple[WholeModel, list[int]]:
    """The model with ``branches``, and the text as tokens."""
    vocabulary = LlamaVocabulary(path)
    size, text = vocabulary.size, vocabulary.tokenize(TEXT, add_special=True, parse_special=True)
    vocabulary.release()
    assignment = in_memory(0, LAYERS, output="cpu")
    source = WindowSource(window=0, metadata=str(path), layers=(), assignment=assignment, extra_buffers=False)
    return WholeModel(source, options(branches), frozenset(), vocabulary=size), text


def rows(tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]) -> Rows:
    return Rows(
        content=np.array(tokens, np.int32), positions=positions, sequences=sequences, outputs=[True] * len(tokens)
    )


def check_alike(found: np.ndarray, expected: np.ndarray) -> None:
    """Cells in another order are summed in another order, which a quantised model amplifies."""
    assert found.argmax() == expected.argmax()
    assert np.corrcoef(found, expected)[0, 1] > 0.999


def test_a_token_of_a_branch_has_the_logits_of_a_single_one(smollm2: Path):
    model, text = opened(smollm2, BRANCHES)
    try:
        end = len(text)

        def single_logits(*tokens: int) -> np.ndarray:
            model.forward(rows(tokens, range(end, end + len(tokens)), [[0]] * len(tokens)))
            found = model.logits(len(tokens) - 1).copy()
            model.kv_remove(0, end, -1)
            return found

        model.forward(rows(text, range(end), [[0]] * end))
        first, second = single_logits(28, 260, 411), single_logits(28, 339)
        model.kv_copy(0, 1, end)
        model.forward(rows([28, 260, 339, 411], [end, end + 1, end + 1, end + 2], [[0, 1], [0], [1], [0]]))
        for found, expected in ((model.logits(3), first), (model.logits(2), second)):
            check_alike(found, expected)
        model.kv_copy(1, 0, end + 2)  # the branch was accepted
        model.kv_remove(1, 0, -1)
        model.forward(rows([411], [end + 2], [[0]]))
        behind = model.logits(0).copy()
        model.kv_remove(0, end, -1)
        check_alike(behind, single_logits(28, 339, 411))
    finally:
        model.release()


class Known(Nothing):
    """Knows the text: its first draft is right at two of three places, its second elsewhere."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer, self._accepted = answer, 0

    def took(self, token: int) -> None:
        self._accepted += 1

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        at = self._accepted + len(drafts)
        if at >= len(self._answer):
            return None
        return DraftToken(token=self._answer[at] if at % 3 else 1, sure=0.6)

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        at = self._accepted + len(drafts)
        return [DraftToken(token=self._answer[at], sure=0.3)] if at < len(self._answer) else []


def answer(path: Path, known: Sequence[int] | None) -> tuple[list[int], int, int]:
    """The text with drafts of ``known``, its number of steps, and how often a branch was accepted."""
    model, text = opened(path, BRANCHES)
    drafting = None if known is None else Drafting(rows=8, costs=(1.0,) * 8, branches=BRANCHES, adapts=False)
    limits = StepLimits(
        ring=1, epoch=1, windows=frozenset(), width=576, rows=64, context=CONTEXT, sequences=1 + BRANCHES
    )
    scheduler = Scheduler(
        SchedulerState(
            context=CONTEXT, chunking=chunks_of(64), depth=1, drafting=drafting, drafter=lambda _: Known(known or ())
        )
    )
    merges: list[int] = []
    copy = model.kv_copy

    def copied(source: int, target: int, end: int) -> None:
        merges.extend([source] if target == 0 else [])
        copy(source, target, end)

    model.kv_copy = copied  # type: ignore[method-assign]
    head = Head(
        windows={},
        tail=model,
        route=1,
        limits=limits,
        scheduler=scheduler,
        step_timeout_s=600,
        clock=time.monotonic,
    )
    reported: list[int] = []
    steps = 0
    try:
        head.submit(generate(1, text, tokens=TOKENS))
        while (outcome := head.turn()) is not None:
            assert isinstance(outcome, Notify)
            steps += bool(outcome.rows)
            reported += [event.token for event in outcome.events if isinstance(event, Sampled)]
    finally:
        model.release()
    return reported, steps, len(merges)


def test_the_text_is_that_without_trees_and_branches_become_part_of_it(smollm2: Path):
    expected, steps, _ = answer(smollm2, None)
    found, fewer, merges = answer(smollm2, expected)
    assert found == expected
    assert merges > 3
    assert fewer < steps / 2
