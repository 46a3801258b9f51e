"""What of one answer is computed ahead of its tokens: guesses on their way, in the order in which their rows stand.

The rows of an answer come back in the order of the log, so a guess is judged when everything before it is decided: the
token that is drawn from the row before it either is the one that was guessed, and its own row goes on, or it is not, and
nothing of what is ahead is of any use. Sampling sees no difference: no token is drawn from a row whose history did not hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from primad.ring.drafting.drafter import Drafter, Drafting, Guess, HeldShare
from primad.ring.drafting.fallback import Fallback
from primad.ring.drafting.pace import Losses, Pace
from primad.ring.drafting.waiting import best_wait, rate_without_waiting

WORTH_IT: Final = 1.1
"""Steps of several rows must promise so much: what they cost is predicted, not measured."""
WAITS: Final = 0.5
"""Of the time of a token without drafts a step waits at most for guesses."""
_FIRST_SHARE: Final = (2.1, 3.0)
"""Guesses that held, and all, until more is known."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    guess: Guess
    step: int


class BeginsDrafter(Protocol):
    """Makes the drafter of an answer."""

    def __call__(self, prompt: Sequence[int]) -> Drafter:
        """The drafter of an answer to ``prompt``."""


class Speculation:
    """The guesses of one answer in a ring with such ``losses``. ``drafted`` of them were handed out, ``accepted`` held."""

    def __init__(
        self, drafter: Drafter, drafting: Drafting, known: Sequence[int] = (), losses: Losses | None = None
    ) -> None:
        self._drafter, self._drafting = drafter, drafting
        self._pace = Pace(adapts=drafting.adapts, losses=losses)
        self._fallback = Fallback(adapts=drafting.adapts)
        self._ahead: deque[_Ahead] = deque()
        self._is_touched = False
        self._together = 0
        """Guesses of the latest step of several rows."""
        self._right = 0
        """Of these held."""
        self._waits_until_s: float | None = None
        self._share = HeldShare(*_FIRST_SHARE)
        """Of guesses that were computed with the next token, up to the first that failed."""
        self.drafted = self.accepted = 0
        for token in known:
            self._drafter.took(token)

    @property
    def tokens(self) -> list[int]:
        """What is on its way, the next token first."""
        return [each.guess.token for each in self._ahead]

    @property
    def steps(self) -> set[int]:
        """The steps that have rows of it."""
        return {each.step for each in self._ahead}

    def next(self) -> Guess | None:
        """A guess behind all that is on its way that is worth an idle place of the ring."""
        if self._pace.is_off:
            return None
        guess = self._drafter.guess(self.tokens)
        return guess if guess is not None and self._pace.wants(self._sure * guess.sure) else None

    def waits(self, most: int, now: float) -> float | None:
        """Until when the next step waits for guesses that it could compute, ``most`` at most; None: no longer."""
        usual_s, guess_s, costs = self._pace.usual_s, self._drafter.guess_s, self._drafting.costs[: most + 1]
        if len(costs) <= 1 or self._ahead or self._pace.is_off or not usual_s or guess_s is None:
            return None
        share, guess = self._share.sure, guess_s / usual_s
        most, rate = best_wait(costs, share, guess)
        if rate <= rate_without_waiting(costs, share, guess) or not self._drafter.awaits(most, self._fallback.alpha):
            return None
        if self._waits_until_s is None:
            self._waits_until_s = now + WAITS * usual_s
        if now >= self._waits_until_s:
            return None
        self._is_touched = True
        return self._waits_until_s

    def together(self, most: int) -> list[Guess]:
        """Guesses that are computed with the next token in one step, ``most`` at most: as many as win most time.

        n of them make 1 + p1 + p1 p2 + ... tokens of a step, which takes as long as its n + 1 rows do.
        """
        costs = self._drafting.costs
        most = min(most, len(costs) - 1)
        if most <= 0 or self._ahead or self._pace.is_off:
            return []
        found: list[Guess] = []
        sure, expected = 1.0, 1.0
        best, best_rate = 0, WORTH_IT
        while len(found) < most:
            guess = self._drafter.guess([each.token for each in found])
            if guess is None:
                break
            found.append(guess)
            sure *= guess.sure
            expected += sure
            rate = expected * costs[0] / costs[len(found)]
            if rate > best_rate:
                best, best_rate = len(found), rate
        return found[:best]

    @property
    def _sure(self) -> float:
        sure = 1.0
        for each in self._ahead:
            sure *= each.guess.sure
        return sure

    def handed_out(self, guesses: Sequence[Guess], step: int, *, together: bool = False) -> None:
        """``step`` has a row for each of ``guesses``, behind what is on its way, or ``together`` with the next token."""
        if together:
            self._together, self._right = len(guesses), 0
        self._ahead.extend(_Ahead(guess, step) for guess in guesses)
        self.drafted += len(guesses)
        self._is_touched = self._is_touched or bool(guesses)

    def took(self, token: int, now: float) -> bool:
        """``token`` is the next one of the answer; whether what is on its way holds. If not it is to be taken back."""
        held = not self._ahead or self._ahead[0].guess.token == token
        was_together = bool(self._together and self._ahead)
        is_accepted = held and bool(self._ahead)
        if is_accepted:
            self._ahead.popleft()
            self.accepted += 1
            self._right += 1
        if self._together and not (held and self._ahead):
            self._fallback.verified(self._right, self._together - self._right)
            self._together = 0
        if was_together:
            self._share.count(held=held)
        self._waits_until_s = None
        self._pace.took(now, drafted=self._is_touched, missed=not held, worked=self._drafter.works)
        self._drafter.took(token)
        self._is_touched = is_accepted or bool(self._ahead)  # the next one is drawn from a draft's row, or before one
        return held

    def take_back(self) -> None:
        """Nothing of what is on its way counts."""
        self._ahead.clear()
