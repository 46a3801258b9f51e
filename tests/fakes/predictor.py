"""A strict fake of a model's multi-token prediction layers: its drafts are right for a share of texts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from primad.engine.protocol import Hidden, LogitsRow
from primad.errors import EngineError
from tests.fakes.engine import FakeLogitsWindow, FakeModel, follow

_BITS, _PARTS = 20, 4


class FakePredictor:
    """Right in the ``share`` of cases, with confidence to match. A state stands for the whole text up to its token.

    With a share of None it returns the model's logits. Call number ``fails_at`` fails. ``calls`` counts drafts,
    ``begun`` fresh starts, and ``held`` the known tokens.
    """

    def __init__(self, share: float | None, *, cells: int = 4096, fails_at: int | None = None) -> None:
        self.share, self.cells, self.fails_at = share, cells, fails_at
        self.calls = self.begun = 0
        self._keeps = False
        self._texts: list[tuple[int, int]] = []
        """For each known token the digest and length of the text up to it."""

    def follow(self, model: FakeModel, window: FakeLogitsWindow) -> None:
        """Use ``window``, the tail of ``model``."""
        self._model, self._window = model, window

    @property
    def held(self) -> int:
        return len(self._texts)

    def state(self, row: int) -> Hidden:
        assert not self._keeps
        assert row in self._window.wanted, f"row {row} of the last step left no state"
        return _encoded(self._window.history(row))

    def keep_all(self, *, keeps: bool) -> None:
        self._keeps = keeps

    def states(self, rows: int) -> Hidden:
        assert self._keeps
        assert not self._window.wanted, "logits were computed otherwise than without drafts"
        return np.stack([_encoded(self._window.history(row)) for row in range(rows)])

    def read(self, tokens: Sequence[int], states: Sequence[Hidden] | Hidden, first: int) -> None:
        assert len(tokens) == len(states) > 0
        assert first <= len(self._texts), f"position {first} leaves a gap"
        del self._texts[first:]
        self.begun += not first
        for token, state in zip(tokens, states, strict=True):
            text, length = _decoded(state)
            before = self._texts[-1] if self._texts else (0, 0)
            assert before == (text, length) or before[1] < length, f"a state after {length} tokens is of another text"
            self._texts.append((follow(text, token), length + 1))
        assert len(self._texts) <= self.cells, "it has no room for all rows"

    def predict(self, tokens: Sequence[int], states: Sequence[Hidden] | Hidden, first: int) -> tuple[LogitsRow, Hidden]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise EngineError("llama.cpp failed")
        self.read(tokens, states, first)
        text = self._texts[-1][0]
        if self.share is None:
            return self._model.scores(text), _encoded(self._texts[-1])
        right, chance = int(self._model.scores(text).argmax()), random.Random(text)
        token = right if chance.random() < self.share else (right + 1) % self._model.vocabulary
        logits = np.zeros(self._model.vocabulary, np.float32)
        sure = min(max(self.share, 0.05), 0.95)
        logits[token] = math.log(sure / (1 - sure) * (self._model.vocabulary - 1))
        return logits, _encoded(self._texts[-1])


def _encoded(known: tuple[int, int]) -> Hidden:
    text, length = known
    return np.array([length, *(text >> _BITS * part & (1 << _BITS) - 1 for part in range(_PARTS))], np.float32)


def _decoded(state: Hidden) -> tuple[int, int]:
    length, *parts = (int(each) for each in state)
    return sum(part << _BITS * place for place, part in enumerate(parts)), length
