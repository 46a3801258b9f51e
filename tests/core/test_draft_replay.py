"""The gain of prompt lookup on real texts, replayed on a simulated clock: figures that do not depend on machine load.

``replayed_answers.json`` has prompts and SmolLM2 135M (Q4_1) completions as tokens: the questions of ``tools/bench
speculate``; code in five languages to copy, comment and rename in; texts to summarise or rephrase; and an explanation.
The rings are those of the bench, and windows take the time of their weights.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from primad.ring.messages import Finished
from primad.ring.speculation.drafter import Drafting
from tests.fakes.engine import follow, history_of
from tests.fakes.ring import generate
from tests.fakes.timed_ring import TimedRing

ANSWERS: Final = json.loads((Path(__file__).parent / "replayed_answers.json").read_text(encoding="utf-8"))
CODE: Final = [name for name in ANSWERS if name.partition(" ")[2] in ("code", "copy", "comment", "rename")]
VOCABULARY: Final = 49_152
MODEL_S: Final = 0.008


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Windows with these ``shares`` of the model, on one device each; the first and the last are the head's."""

    shares: Sequence[float]
    hop_s: float
    drafting: Drafting

    def replayed(self, name: str, drafting: Drafting | None) -> tuple[float, Finished]:
        """The time of completion ``name`` from its first token, and its end."""
        prompt, answer = ANSWERS[name]["prompt"], ANSWERS[name]["answer"]
        devices = len(self.shares) - 1
        ring = TimedRing(
            devices,
            visit_s=MODEL_S,
            hop_s=self.hop_s,
            shares=self.shares,
            context=1024,
            depth=devices,
            drafting=drafting,
        )
        ring.model.vocabulary = VOCABULARY
        history = history_of(prompt)
        for token in answer:
            ring.model.script[history] = token
            history = follow(history, token)
        ring.head.submit(generate(1, prompt, tokens=len(answer)))
        took_s = ring.finish()
        assert ring.answer(1)[0] == answer
        return took_s, next(event for event in ring.events if isinstance(event, Finished))

    def times(self) -> dict[str, float]:
        """The speedup by drafts for each completion."""
        return {name: self.replayed(name, None)[0] / self.replayed(name, self.drafting)[0] for name in ANSWERS}


TWO: Final = Bench(shares=(0.161, 0.505, 0.334), hop_s=0.0003, drafting=Drafting(room=3, ring_passes=2.0))
FAR: Final = Bench(
    shares=(0.023, 0.207, 0.207, 0.230, 0.334), hop_s=0.0103, drafting=Drafting(room=16, ring_passes=15.0)
)


@pytest.mark.parametrize(
    ("bench", "code", "text", "all_code"),
    [pytest.param(TWO, 1.4, 1.95, 1.58, id="two"), pytest.param(FAR, 2.0, 9.0, 3.4, id="far")],
)
def test_prompt_lookup_gains_on_texts_that_repeat_and_costs_nothing_on_others(bench, code, text, all_code):
    times = bench.times()
    assert times["bench code"] >= code
    assert times["bench text"] >= text
    assert statistics.geometric_mean(times[name] for name in CODE) >= all_code
    assert min(times.values()) >= 1.0
