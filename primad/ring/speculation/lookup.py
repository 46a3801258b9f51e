"""Prompt lookup: what followed the last tokens where they stood before, in the prompt or in the answer, may follow again.

An answer that quotes, edits or sums up its prompt repeats it by the sentence, and costs no model to draft (Saxena, "Prompt
Lookup Decoding", 2023). How sure a draft is depends on how long the match is, and for each length it is counted how often
such drafts held. That is counted at every token, whether its draft was computed ahead or not: a drafter that is wrong is
found out for nothing, and one that becomes right as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from primad.ring.speculation.drafter import DraftToken, HeldShare

SIZES: Final = (3, 2, 1)
"""Tokens that are looked for, the longer run first. Drafts behind a single one are not computed until such held often."""
LONGEST: Final = 8
"""Longer matches are no surer."""
MAX_TOKENS: Final = 32_768
"""So much of a prompt is looked through, its end: it is gone through once, behind the first token."""
_FIRST_SURE: Final = (0.2, 0.2, 0.5, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95)
"""By the length of the match, until more is known: how often drafts held in 15 answers about code and texts."""
_WEIGHT: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Match:
    """The next token may be that at ``place``, before which ``length`` tokens are the same."""

    place: int
    length: int


class PromptLookup:
    """Drafts from ``prompt`` and the answer to it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt[-MAX_TOKENS:])
        self._indexed = 0
        self._places: dict[tuple[int, ...], int] = {}
        """Where the latest of each run of tokens ends: the place behind it."""
        self._matches: list[_Match | None] = []
        """What was drafted from behind the text, and behind each draft after it."""
        self._shares = [HeldShare(sure * _WEIGHT, _WEIGHT) for sure in _FIRST_SURE]

    def took(self, token: int) -> None:
        match = self._match(0, ())
        held = match is not None and self._text[match.place] == token
        if match is not None:
            self._shares[match.length].count(held=held)
        self._text.append(token)
        if not held or match is None:
            self._matches.clear()
            return
        del self._matches[0]
        if not self._matches:
            self._matches.append(_longer(match))

    @property
    def works(self) -> bool:
        return False

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        return ()

    @property
    def draft_s(self) -> float | None:
        return None

    @property
    def own_s(self) -> float:
        return 0.0

    def awaits(self, maximum: int, alpha: float) -> bool:
        return False

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        match = self._match(len(drafts), drafts)
        if match is None:
            return None
        return DraftToken(token=self._at(match.place, drafts), sure=self._shares[match.length].sure)

    def looked_up(self, drafts: Sequence[int]) -> DraftToken | None:
        return self.propose(drafts)

    def _match(self, depth: int, drafts: Sequence[int]) -> _Match | None:
        """What follows ``depth`` of the ``drafts``; a match goes on behind what was drafted from it."""
        while len(self._matches) <= depth:
            before = self._matches[-1] if self._matches else None
            if before is not None and self._at(before.place, drafts) == drafts[len(self._matches) - 1]:
                self._matches.append(_longer(before))
            else:
                self._matches.append(self._find(drafts[: len(self._matches)]))
        return self._matches[depth]

    def _find(self, drafts: Sequence[int]) -> _Match | None:
        self._index()
        text = self._text
        for size in SIZES:
            tail = (*text[-size:], *drafts)[-size:]
            place = self._places.get(tail) if len(tail) == size else None
            if place is not None:
                tail = (*text[-LONGEST:], *drafts)[-LONGEST:]
                maximum = min(place, len(tail))
                length = next((n for n in range(size, maximum) if text[place - n - 1] != tail[-n - 1]), maximum)
                return _Match(place, length)
        return None

    def _index(self) -> None:
        """Note the runs before each token that is new."""
        text = self._text
        for place in range(max(self._indexed, min(SIZES)), len(text)):
            for size in SIZES:
                if place >= size:
                    self._places[tuple(text[place - size : place])] = place
        self._indexed = len(text)

    def _at(self, place: int, drafts: Sequence[int]) -> int:
        """The token at ``place`` of the text with ``drafts`` behind it."""
        return self._text[place] if place < len(self._text) else drafts[place - len(self._text)]


def _longer(match: _Match) -> _Match:
    return _Match(match.place + 1, min(match.length + 1, LONGEST))
