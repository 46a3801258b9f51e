"""Scratch memory returns to the system after large steps, and its old content is never read again."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from primad.engine.streaming import scratch
from primad.engine.streaming.pages import _present
from primad.gguf.header import read_header
from primad.ring.loading import share_scratch
from tests.shell.test_cut_exact import EVERY_KIND, PROMPT, Route, cuts_of, spoil, synth, whole_logits
from tests.shell.test_streams_exact import model, streaming

pytestmark = pytest.mark.slow

REAL = scratch.discard


class Discards:
    """Records the ranges that are given back, and spoils them."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, start: int, size: int) -> None:
        self.ranges.append((start, size))
        spoil(start, size)


SOME = {"llama", "gpt-oss", "deepseek2", "qwen35", "mamba2", "rwkv6"}


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in SOME else pytest.mark.matrix) for name in EVERY_KIND]
)
def test_logits_are_the_same_whatever_stands_in_scratch_memory_between_steps(architecture, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture)
    header = read_header(path)
    monkeypatch.setattr(scratch, "discard", lambda *_: None)
    chunks, expected = whole_logits(header)
    discards = Discards()
    monkeypatch.setattr(scratch, "discard", discards)
    assert all(np.array_equal(*pair) for pair in zip(expected, whole_logits(header)[1], strict=True))
    assert len(discards.ranges) == 1, "after the prompt, with the first step that is not large"
    route, position = Route(header, cuts_of(header)[1], tmp_path), 0
    for tokens, logits in zip(chunks, expected, strict=True):
        assert np.array_equal(route.logits(tokens, position), logits), f"position {position}"
        position += len(tokens)
    route.release()
    assert len(discards.ranges) == 3, "each of two windows"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system is not asked which pages are in memory")
def test_the_pages_leave_memory(tmp_path, monkeypatch):
    kept: list[tuple[int, int]] = []

    def discard(start: int, size: int) -> None:
        first, last = -(-start // 4096) * 4096, (start + size) // 4096 * 4096
        assert _present(first, last - first).any()
        REAL(start, size)
        kept.append((int(_present(first, last - first).sum()), last - first))

    monkeypatch.setattr(scratch, "discard", discard)
    with streaming(model(tmp_path, "llama"), [0, 3, 6], tmp_path, streamed=0) as made:
        share_scratch(made.windows)
        made.logits(PROMPT[:64], 0)
    assert [left for left, _ in kept] == [0, 0], "each of two windows gives back at once"
    assert min(size for _, size in kept) > 512 << 10


def test_steps_of_few_tokens_release_nothing(tmp_path, monkeypatch):
    discards = Discards()
    monkeypatch.setattr(scratch, "discard", discards)
    with streaming(model(tmp_path, "llama"), [0, 3, 6], tmp_path, streamed=0) as made:
        made.logits(PROMPT[: scratch.LARGE_ROWS], 0)
        made.logits([5], scratch.LARGE_ROWS)
    assert discards.ranges == []


def test_one_window_gives_back_when_its_prompt_is_read(tmp_path, monkeypatch):
    discards = Discards()
    monkeypatch.setattr(scratch, "discard", discards)
    with streaming(model(tmp_path, "llama"), [0, 6], tmp_path, streamed=0) as made:
        made.logits(PROMPT[:64], 0)
        assert discards.ranges == [], "the next chunk would need it again"
        made.logits([5], 64)
        assert len(discards.ranges) == 1
        made.logits([6], 65)
        assert len(discards.ranges) == 1
