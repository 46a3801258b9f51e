"""Guesses of a smaller model, which a process of its own computes while the ring computes what it was told before.

Nobody waits for it. It works ahead of the answer as far as it gets, and says all that it has each time: whatever crossed on
the way, what it said is of use as far as the answer has gone the way that it guessed. Where it has nothing yet, the text is
looked through instead. It follows one answer at a time, the latest that began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from primad.ring.drafting.drafter import Guess, HeldShare
from primad.ring.drafting.lookup import PromptLookup
from primad.ring.drafting.messages import Drafted, DraftText, DraftTokens, TextTask

_LEVELS: Final = 10
_WEIGHT: Final = 3.0
_SURER: Final = 0.1
"""So much surer is what was looked up where it takes the place of another guess of the model."""
_SURE_ALONE: Final = 0.7
"""What was looked up takes the place of a guess that is still being computed if it is so sure."""


class ModelDrafters:
    """Makes the drafters of answers; ``tell`` gives a task to the process, ``heard`` takes what it says.

    Unless its work ``overlaps`` with the ring's, the process is told of a text only when a step waits for it.
    """

    def __init__(self, tell: Callable[[TextTask], None], *, overlaps: bool = True) -> None:
        self._tell, self._overlaps = tell, overlaps
        self._number = 0
        self._latest: ModelDrafter | None = None
        self._is_over = False
        self._shares = [HeldShare((level + 0.5) / _LEVELS * _WEIGHT, _WEIGHT) for level in range(_LEVELS)]

    def __call__(self, prompt: Sequence[int]) -> ModelDrafter:
        if self._latest is not None:
            self._latest.is_followed = False
        self._number += 1
        self._latest = ModelDrafter(prompt, self._number, self._tell, self._shares, overlaps=self._overlaps)
        self._latest.is_followed = not self._is_over
        return self._latest

    def heard(self, drafted: Drafted) -> None:
        """The process says so."""
        if drafted.number == self._number and self._latest is not None:
            self._latest.heard(drafted)

    def end(self) -> None:
        """The process is gone, or not there yet."""
        self._is_over = True
        if self._latest is not None:
            self._latest.is_followed = False

    def move(self, tell: Callable[[TextTask], None]) -> None:
        """Another process guesses from now on, and knows nothing."""
        self._tell, self._is_over = tell, False
        if self._latest is not None:
            self._latest.move(tell)


class ModelDrafter:
    """Guesses for an answer to ``prompt``, text ``number`` of the process, which computes nothing that nobody asks for.

    ``shares`` count how often guesses held of which the model was so sure.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        number: int,
        tell: Callable[[TextTask], None],
        shares: list[HeldShare],
        *,
        overlaps: bool = True,
    ) -> None:
        self._overlaps = overlaps
        self._lookup = PromptLookup(prompt)
        self._text = list(prompt)
        self._number, self._tell, self._shares = number, tell, shares
        self._told = 0
        """Of the text, to the process."""
        self._has_read = False
        self._guess_s: float | None = None
        self._guesses: list[Guess] = []
        """Behind the text, as the model said them."""
        self._others: list[list[Guess]] = []
        """What else may come in the place of each."""
        self.is_followed = True

    def heard(self, drafted: Drafted) -> None:
        """The model guesses so."""
        self._has_read, self._guess_s = True, drafted.guess_s
        behind = self._text[drafted.known :]
        if drafted.tokens[: len(behind)] == behind:
            pairs = zip(drafted.tokens, drafted.sures, strict=True)
            self._guesses = [Guess(token=token, sure=sure) for token, sure in pairs][len(behind) :]
            others = [[Guess(token=token, sure=sure) for token, sure in each] for each in drafted.others]
            self._others = others[len(behind) :]

    def move(self, tell: Callable[[TextTask], None]) -> None:
        """Another process guesses, which was told nothing."""
        self._tell, self._told, self._has_read, self.is_followed = tell, 0, False, True
        self._guesses.clear()
        self._others.clear()

    def took(self, token: int) -> None:
        self._lookup.took(token)
        self._text.append(token)
        if self._guesses:
            guess = self._guesses.pop(0)
            others = self._others.pop(0) if self._others else []
            for each in (guess, *others):
                self._share(each).count(held=each.token == token)
            if guess.token != token:
                self._guesses.clear()
                self._others.clear()

    def guess(self, drafts: Sequence[int]) -> Guess | None:
        found = self._lookup.guess(drafts)
        if not self.is_followed:
            return found
        if self._overlaps or not self._has_read:
            self._tell_text()
        depth = len(drafts)
        if depth >= len(self._guesses) or any(a.token != b for a, b in zip(self._guesses, drafts, strict=False)):
            return found if found is not None and found.sure >= _SURE_ALONE else None
        guess = self._guesses[depth]
        sure = self._share(guess).sure
        return found if found is not None and found.sure > sure + _SURER else Guess(token=guess.token, sure=sure)

    @property
    def guess_s(self) -> float | None:
        return self._guess_s

    def others(self, drafts: Sequence[int]) -> Sequence[Guess]:
        depth = len(drafts)
        if not self.is_followed or depth >= min(len(self._guesses), len(self._others)):
            return ()
        if any(a.token != b for a, b in zip(self._guesses, drafts, strict=False)):
            return ()
        found = (self._guesses[depth], *self._others[depth])  # another one may have been looked up in its place
        return [Guess(token=each.token, sure=self._share(each).sure) for each in found]

    def awaits(self, most: int, alpha: float) -> bool:
        if not (self.is_followed and self._has_read) or len(self._guesses) >= most:
            return False
        looked_up = self._lookup.guess([])
        if not self._guesses and looked_up is not None and looked_up.sure >= _SURE_ALONE:
            return False
        self._tell_text()
        return math.prod(self._share(guess).sure for guess in self._guesses) >= alpha

    @property
    def works(self) -> bool:
        return self.is_followed and self._has_read and self._told == len(self._text)

    def _tell_text(self) -> None:
        if not self._told:
            self._tell(DraftText(number=self._number, tokens=self._text.copy()))
        elif self._told < len(self._text):
            self._tell(DraftTokens(self._text[self._told :], self._told))
        self._told = len(self._text)

    def _share(self, guess: Guess) -> HeldShare:
        return self._shares[min(int(guess.sure * _LEVELS), _LEVELS - 1)]
