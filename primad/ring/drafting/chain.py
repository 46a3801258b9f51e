"""What a model that guesses has of a text: its tokens, the guesses behind them, and so many of both computed.

It works ahead as long as nobody says more, and what it guessed stays where the text goes on like that.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from primad.engine.protocol import LogitsWindow, Rows
from primad.ring.drafting.drafter import MOST_ROOM, Guess
from primad.ring.drafting.messages import Drafted
from primad.ring.drafting.tree import OPENS_AT

LIKELY: Final = 3
"""Tokens of one place that are told, those that are not likely left out."""
PART_ROWS: Final = 64
"""Rows of a prompt that are computed before what came meanwhile is looked at."""


class DraftChain:
    """Guesses ``most`` tokens with ``window``, the whole of a model, whose only sequence has room for ``context``."""

    def __init__(self, window: LogitsWindow, *, context: int, most: int = MOST_ROOM) -> None:
        self._window, self._context, self._most = window, context, most
        self._number = 0
        self._text: list[int] = []
        self._guesses: list[Guess] = []
        self._others: list[list[Guess]] = []
        self._computed: list[int] = []

    def begin(self, number: int, tokens: list[int]) -> None:
        """From now on it is about text ``number``."""
        self._number, self._text, self._guesses, self._others = number, list(tokens), [], []
        pairs = zip(self._computed, tokens, strict=False)
        self._cut(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def took(self, token: int) -> None:
        """``token`` is the next one of the text."""
        self._text.append(token)
        if self._guesses and self._guesses[0].token == token:
            del self._guesses[0], self._others[0]
        else:
            self._guesses.clear()
            self._others.clear()
            self._cut(len(self._text) - 1)

    @property
    def known(self) -> int:
        """So many tokens of the text are known."""
        return len(self._text)

    def _cut(self, cells: int) -> None:
        if cells < len(self._computed):
            self._window.kv_remove(0, cells, -1)
            del self._computed[cells:]

    @property
    def has_work(self) -> bool:
        """Whether ``work`` has something to compute."""
        tokens = len(self._text) + len(self._guesses)
        return 0 < tokens < self._context and len(self._guesses) < self._most

    def work(self) -> Drafted | None:
        """Compute some rows; what is guessed behind the text, once there is one guess more."""
        tokens = [*self._text, *(guess.token for guess in self._guesses)]
        if len(self._computed) == len(tokens):  # its last row is computed, and its logits are not there any more
            self._cut(len(tokens) - 1)
        first = len(self._computed)
        part = tokens[first : first + PART_ROWS]
        rows = len(part)
        is_last = first + rows == len(tokens)
        self._window.forward(
            Rows(
                content=np.array(part, np.int32),
                positions=range(first, first + rows),
                sequences=[[0]] * rows,
                outputs=[is_last and row == rows - 1 for row in range(rows)],
            )
        )
        self._computed += part
        if not is_last:
            return None
        guess, *others = _likely(self._window.logits(rows - 1))
        self._guesses.append(guess)
        self._others.append([each for each in others if each.sure >= OPENS_AT])
        return Drafted(
            number=self._number,
            known=len(self._text),
            tokens=[guess.token for guess in self._guesses],
            sures=[guess.sure for guess in self._guesses],
            others=[[(each.token, each.sure) for each in others] for others in self._others],
        )


def _likely(logits: NDArray[np.float32]) -> list[Guess]:
    """The most likely tokens, the first one first."""
    found = np.argpartition(-logits, LIKELY - 1)[:LIKELY]
    found = found[np.argsort(-logits[found], kind="stable")]
    total = np.exp(logits - logits[found[0]], dtype=np.float64).sum()
    return [Guess(token=int(i), sure=float(np.exp(float(logits[i] - logits[found[0]])) / total)) for i in found]
