"""A generation that resumes in another ring is bit-identical to an undisturbed one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from primad.ring.grouping import Batching
from primad.ring.messages import Sampled
from tools.lab.local_ring import GREEDY, LocalRing

pytestmark = pytest.mark.slow

COUNT = 24
ROWS = 128
PROMPT = [(7 * place + 11) % 900 + 20 for place in range(ROWS + 18)]
"""Longer than one chunk, so that chunk boundaries matter."""
SAMPLED = msgspec.structs.replace(
    GREEDY, temperature=1.1, top_p=0.95, seed=99, repeat_penalty=1.2, presence_penalty=0.3, penalty_tokens=16
)


class Rings:
    """A ring of each shape over the same model, which recomputes earlier tokens one or several at a time."""

    def __init__(self, model: Path) -> None:
        self._runner = asyncio.Runner()
        self._rings = {
            shape: LocalRing(
                model, shape, rounds=rounds, context=256, rows=ROWS, threads=1, batching=Batching(replays=replays)
            )
            for shape, rounds, replays in ((None, 1, 1), ((5, 6, 3), 1, 7), ((4, 3), 2, 3))
        }
        for ring in self._rings.values():
            self._runner.run(ring.__aenter__())

    def close(self) -> None:
        for ring in self._rings.values():
            self._runner.run(ring.__aexit__(None, None, None))
        self._runner.close()

    def answer(self, shape: object, sampling: object, replayed: list[int]) -> list[Sampled]:
        """Return what the ring of ``shape`` samples after ``replayed``, with the most likely tokens."""
        ring = self._rings[shape]
        sampled, finished = self._runner.run(
            ring.generate(PROMPT, COUNT, replayed=replayed, sampling=sampling, logprobs=20)
        )
        assert finished.completion_tokens == len(replayed) + len(sampled)
        return [msgspec.structs.replace(event, request=0) for event in sampled]

    def replace_head(self, shape: object) -> None:
        self._runner.run(self._rings[shape].replace_head())

    @property
    def shapes(self) -> list[object]:
        return list(self._rings)


@pytest.fixture(scope="module")
def rings(quick_model: Path) -> Iterator[Rings]:
    made = Rings(quick_model)
    yield made
    made.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_ring_resumes_where_another_one_ended(rings, sampling):
    whole = rings.answer(None, sampling, [])
    tokens = [event.token for event in whole]
    assert len(tokens) == COUNT
    for shape in rings.shapes:
        for cut in (1, 13, COUNT):
            assert rings.answer(shape, sampling, tokens[:cut]) == whole[cut:], (shape, cut)


def test_a_new_head_resumes_with_workers_that_kept_their_windows(rings):
    whole = rings.answer(None, SAMPLED, [])
    for shape in rings.shapes[1:]:
        rings.answer(shape, GREEDY, [])
        rings.replace_head(shape)
        assert rings.answer(shape, SAMPLED, [event.token for event in whole[:9]]) == whole[9:]
