"""Drafts of the model itself, whose file has layers for multi-token prediction (MTP).

These layers take a token and the state that it was sampled from, and predict the next token. So they cost one layer and
the output matrix, but no other model. The states come back with each token; after the last of them the layers draft
from their own states: the deeper, the less often such drafts are accepted. The layers follow one completion at a time,
the newest; others use prompt lookup.

The layers have read the earlier tokens whose states came back: all chunks of a prompt but the last, whose last layer is
computed for one row only, since the completion's first token would otherwise have other last bits. Tokens that they
have not read are treated as absent: their own positions count only the tokens they know.

Each sampled token has its own seed. So a draft is sampled from the layers' distribution with the seed that will sample
the token from the model's: where both distributions are alike the draft is accepted, and not only as often as the
likeliest token is sampled.

The head computes them between its own windows. Their time is part of the time of a token, which decides whether they
pay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from primad.engine.protocol import Hidden, LogitsRow, Predictor
from primad.errors import EngineError
from primad.ring.speculation.branches import likely
from primad.ring.speculation.drafter import MAX_ROOM, DraftToken, HeldShare
from primad.ring.speculation.lookup import PromptLookup

logger = logging.getLogger(__name__)

Peeks = Callable[[LogitsRow, int], int | None]
"""``Sampler.peek`` (``engine/protocol.py``)."""

CHAIN: Final = 4
"""Consecutive drafts computed from the layers' own states before states of the model are used again."""
MIN_SHARE: Final = 0.15
"""Nothing is drafted after drafts that are all accepted in a smaller share of cases: it would take longer than it
gains."""
MAX_STATES: Final = 128
"""States of tokens that are kept until something is drafted after them."""
_LEVELS: Final = 10
_DEPTHS: Final = 3
_WEIGHT: Final = 3.0
_UNLIKELY: Final = 0.05
_TIMED: Final = 0.2
"""Weight of the latest draft in the mean time of a draft."""
_SURER: Final = 0.1
"""How much surer a looked-up token must be to replace another draft."""
_SURE_ALONE: Final = 0.9
"""How sure a looked-up token must be to replace a draft that is not computed yet."""


@dataclass(frozen=True, slots=True)
class _Predicted:
    """Tokens that may follow a place: the draft first, then the likeliest; ``depth`` states before it were drafted too.

    For a sampled draft, the likeliest token tells how sure it is: the more likely that token, the less is left for
    others.
    """

    tokens: tuple[DraftToken, ...]
    state: Hidden
    depth: int
    is_drawn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """How often drafts were accepted, by depth and by how sure the layers were: for likely tokens, and for sampled
    ones."""

    likely: list[list[HeldShare]]
    drawn: list[list[HeldShare]]


class _OwnTime:
    """Recent time of a draft by the ``clock``, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.mean_s = 0.0

    def add(self, took_s: float) -> None:
        """Add the time of one draft."""
        self.mean_s += (took_s - self.mean_s) * (_TIMED if self.mean_s else 1.0)


class PredictedDrafters:
    """Makes the drafters of completions, which draft with a ``predictor``. The ``clock`` gives seconds on any scale."""

    def __init__(self, predictor: Predictor, clock: Callable[[], float]) -> None:
        self._predictor, self._time = predictor, _OwnTime(clock)
        self._latest: PredictedDrafter | None = None
        first = [(level + 0.5) / _LEVELS for level in range(_LEVELS)]
        self._shares = _Shares(
            likely=[[HeldShare(sure * _WEIGHT, _WEIGHT) for sure in first] for _ in range(_DEPTHS)],
            drawn=[[HeldShare((1 + sure) / 2 * _WEIGHT, _WEIGHT) for sure in first] for _ in range(_DEPTHS)],
        )

    def __call__(self, prompt: Sequence[int]) -> PredictedDrafter:
        if self._latest is not None:
            self._latest.is_followed = False
        self._latest = PredictedDrafter(prompt, self._predictor, self._shares, self._time)
        return self._latest


class PredictedDrafter:
    """Drafts for a completion of ``prompt``. ``shares`` count how often they were accepted, ``time`` is what they
    take."""

    def __init__(self, prompt: Sequence[int], predictor: Predictor, shares: _Shares, time: _OwnTime) -> None:
        self._lookup = PromptLookup(prompt)
        self._text, self._prompt = list(prompt), len(prompt)
        self._peek: Peeks = lambda logits, index: None
        self._predictor, self._shares, self._time = predictor, shares, time
        self._states: dict[int, Hidden] = {}
        """By position, states of tokens of the text that the layers have not read yet."""
        self._read = self._end = 0
        """Number of tokens computed with the model's own states, and the position up to which the text was read."""
        self._found: list[_Predicted] = []
        """What may follow the text, and each draft of ``_path`` after it."""
        self._path: list[int] = []
        self._has_worked = False
        self.is_followed = True

    def drawn_from(self, position: int, state: Hidden, peek: Peeks) -> None:
        """Take ``state`` of the token at ``position``, from which the next token is sampled. Drafts are sampled by
        ``peek``."""
        if self.is_followed:
            self._peek = peek
            self._states[position] = state
            if len(self._states) > MAX_STATES:
                del self._states[next(iter(self._states))]

    def read(self, first: int, states: Hidden) -> None:
        """Take ``states`` of the tokens of a prompt, or of an earlier ring's completion, from position ``first`` on."""
        tokens = self._text[first + 1 : first + 1 + len(states)]
        if not self.is_followed or first + 1 < self._end or not tokens:
            return
        self._path, self._found = [], []
        try:
            self._predictor.read(tokens, states[: len(tokens)], self._place(len(tokens)))
        except EngineError as exc:
            self._fail(exc)
            return
        self._read, self._end = self._read + len(tokens), first + 1 + len(tokens)

    def _place(self, count: int) -> int:
        """The place of ``count`` more tokens, with room for drafts after them."""
        if self._read + count > self._predictor.cells - MAX_ROOM:
            self._read = 0
        return self._read

    def _fail(self, error: EngineError) -> None:
        logger.warning("the model's own layers stop drafting for this request: %s", error)
        self.is_followed = False

    def took(self, token: int) -> None:
        self._lookup.took(token)
        self._text.append(token)
        self._has_worked = False
        if self._found:
            self._count(self._found[0], token)
        if self._path and self._path[0] == token:
            del self._path[0], self._found[0]
        else:
            self._path, self._found = [], []

    def _count(self, found: _Predicted, token: int) -> None:
        first = found.tokens[0]
        self._share(first, found).count(held=first.token == token)

    @property
    def works(self) -> bool:
        return self._has_worked

    @property
    def draft_s(self) -> float | None:
        return None

    @property
    def own_s(self) -> float:
        return self._time.mean_s if self.is_followed else 0.0

    def awaits(self, maximum: int, alpha: float) -> bool:
        return False

    def looked_up(self, drafts: Sequence[int]) -> DraftToken | None:
        return self._lookup.propose(drafts)

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        looked_up = self._lookup.propose(drafts)
        if not self.is_followed or (looked_up is not None and looked_up.sure >= _SURE_ALONE):
            return looked_up
        try:
            found = self._behind(drafts)
        except EngineError as exc:
            self._fail(exc)
            found = None
        if found is None:
            return looked_up
        sure = self._share(found.tokens[0], found).sure
        if looked_up is not None and looked_up.sure > sure + _SURER:
            return looked_up
        return DraftToken(token=found.tokens[0].token, sure=sure)

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        if not self.is_followed or len(self._found) <= len(drafts) or self._path[: len(drafts)] != list(drafts):
            return []
        found = self._found[len(drafts)]  # a looked-up token may have replaced the first
        return [DraftToken(token=each.token, sure=self._share(each, found).sure) for each in found.tokens]

    def _behind(self, drafts: Sequence[int]) -> _Predicted | None:
        """Return what may follow ``drafts``, computing it if needed; None if nothing is known of the text, or they are
        unsure."""
        count = len(drafts)
        same = next((i for i, (a, b) in enumerate(zip(self._path, drafts, strict=False)) if a != b), None)
        same = min(len(self._path), count) if same is None else same
        if same < count:
            del self._path[same:], self._found[same + 1 :]
        is_late = bool(self._found) and (self._found[0].depth > 0 if not count else self._depth(count) > CHAIN)
        if (not self._found or is_late) and not self._compute_text():
            return None
        share = 1.0
        for place, token in enumerate(drafts):
            before = self._found[place]
            share *= self._sure_of(before, token)
            if len(self._found) > place + 1:
                continue
            if share < MIN_SHARE or place >= MAX_ROOM:
                return None
            found = self._compute([token], [before.state], self._read + place, before.depth + 1, place + 1)
            self._found.append(found)
            self._path.append(token)
        return self._found[count]

    def _depth(self, count: int) -> int:
        """The depth of what follows ``count`` drafts, if it is computed from what there is."""
        return self._found[-1].depth + count - (len(self._found) - 1)

    def _compute_text(self) -> bool:
        """Compute the end of the text with the model's own states; return whether these are there."""
        end = len(self._text)
        first = end
        while first > max(self._end, 1) and first - 2 in self._states:
            first -= 1
        if first == end:
            return bool(self._found)
        states = [self._states[position - 1] for position in range(first, end)]
        self._path, self._found = [], [self._compute(self._text[first:end], states, self._place(end - first), 0, 0)]
        self._states = {position: state for position, state in self._states.items() if position >= end - 1}
        self._read, self._end = self._read + end - first, end
        return True

    def _compute(
        self, tokens: Sequence[int], states: Sequence[Hidden], first: int, depth: int, drafts: int
    ) -> _Predicted:
        """Compute what follows ``tokens``, of which ``drafts`` are drafts after the text."""
        self._has_worked, began_s = True, self._time.clock()
        logits, state = self._predictor.predict(tokens, states, first)
        found = likely(logits)
        drawn = self._peek(logits, len(self._text) - self._prompt + drafts)
        self._time.add(self._time.clock() - began_s)
        if drawn is None:
            return _Predicted(tuple(found), state, depth, is_drawn=False)
        others = (each for each in found if each.token != drawn)
        return _Predicted((DraftToken(token=drawn, sure=found[0].sure), *others), state, depth, is_drawn=True)

    def _sure_of(self, found: _Predicted, token: int) -> float:
        """How often ``token`` is what follows there."""
        each = next((each for each in found.tokens if each.token == token), None)
        return _UNLIKELY if each is None else self._share(each, found).sure

    def _share(self, draft_token: DraftToken, found: _Predicted) -> HeldShare:
        is_drawn = found.is_drawn and draft_token is found.tokens[0]
        shares = self._shares.drawn if is_drawn else self._shares.likely
        return shares[min(found.depth, _DEPTHS - 1)][min(int(draft_token.sure * _LEVELS), _LEVELS - 1)]
