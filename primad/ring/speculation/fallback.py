"""When a model that guesses has guessed enough for the step that verifies it, where each step takes long.

A target that streams takes a pass over the disk for each step, so it pays to wait a little for guesses. LLMCad (Xu et al.,
2023) falls back to the target where the guesses are so unsure, one behind the other, that the next would hardly hold: below
``alpha``, which is halved after a step of which all held, and rises with the share of those that did not.
"""

from __future__ import annotations

from typing import Final

FIRST: Final = 0.01
_LEAST, _MOST = 0.0005, 0.5
_RISES: Final = 2.0
"""So many times after a step of which nothing held."""


class Fallback:
    """Of one answer; unless it ``adapts`` alpha stays as it is."""

    def __init__(self, *, adapts: bool = True) -> None:
        self.alpha = FIRST
        self._adapts = adapts

    def verified(self, right: int, wrong: int) -> None:
        """Of a step's guesses so many were ``right``; the ``wrong`` ones are the first that was not and all behind it."""
        assert right + wrong > 0
        if not self._adapts:
            return
        times = 0.5 if not wrong else _RISES ** (wrong / (right + wrong))
        self.alpha = min(_MOST, max(_LEAST, self.alpha * times))
