"""Prompt lookup: tokens that followed the last tokens earlier, in the prompt or the completion, may follow again.

A completion that quotes, edits or sums up its prompt repeats whole sentences, and needs no model to draft (Saxena,
"Prompt Lookup Decoding", 2023). How sure a draft is depends on the length of the match: for each length, accepted
drafts are counted. They are counted at every token, whether its draft was computed or not: so a drafter that becomes
wrong is found out at no cost, and so is one that becomes right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from primad.ring.speculation.drafter import DraftToken, HeldShare

SIZES: Final = (3, 2, 1)
"""Lengths of token runs to search for, longest first. Drafts after a single token are computed only once they are often
accepted."""
LONGEST: Final = 8
"""Longer matches are not surer."""
MAX_TOKENS: Final = 32_768
"""Number of tokens at the end of a prompt that are searched: they are indexed once, after the first token."""
_FIRST_SURE: Final = (0.2, 0.2, 0.5, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95)
"""Acceptance by length of the match, until more is known: measured in 15 completions about code and texts."""
_WEIGHT: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Match:
    """The next token may be the one at ``place``; the ``length`` tokens before it are the same."""

    place: int
    length: int


class PromptLookup:
    """Drafts from ``prompt`` and its completion."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt[-MAX_TOKENS:])
        self._indexed = 0
        self._places: dict[tuple[int, ...], int] = {}
        """By run of tokens: the place after its latest occurrence."""
        self._matches: list[_Match | None] = []
        """The match for the token after the text, and after each further draft."""
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
        """Return the match after ``depth`` of the ``drafts``; a match continues after each draft taken from it."""
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
        """Index the runs before each new token."""
        text = self._text
        for place in range(max(self._indexed, min(SIZES)), len(text)):
            for size in SIZES:
                if place >= size:
                    self._places[tuple(text[place - size : place])] = place
        self._indexed = len(text)

    def _at(self, place: int, drafts: Sequence[int]) -> int:
        """Return the token at ``place`` of the text followed by ``drafts``."""
        return self._text[place] if place < len(self._text) else drafts[place - len(self._text)]


def _longer(match: _Match) -> _Match:
    return _Match(match.place + 1, min(match.length + 1, LONGEST))
