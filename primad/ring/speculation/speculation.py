"""The speculation of one completion: its drafts in flight, in the order of their rows.

Rows of a completion come back in the order of the log, so a draft is verified once everything before it is decided.
Either the token sampled from the row before it is the draft, and the draft's own row counts, or it is another one, and
all drafts after it are discarded. Sampling sees no difference: no token is sampled from a row with a wrong history.

``Fallback`` decides when a draft model has drafted enough for the step that verifies it, where each step takes long.

A target that streams takes a pass over the disk for each step, so waiting a little for drafts pays. LLMCad (Xu et al.,
2023) falls back to the target when the drafts together are so unsure that the next one would hardly be accepted: below
``alpha``, which is halved after a step whose drafts were all accepted, and rises with the share of drafts that were
not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from primad.ring.speculation.drafter import Drafter, Drafting, DraftToken, HeldShare
from primad.ring.speculation.pace import Losses, Pace, best_wait, rate_without_waiting
from primad.ring.speculation.row_costs import RowCosts
from primad.ring.speculation.tree import TreeNode, best_tree, child, depth

WORTH_IT: Final = 1.1
"""Minimum predicted gain of steps with several rows: their cost is predicted, not measured."""
WAITS: Final = 0.5
"""Maximum wait of a step for drafts, as a share of the time of a token without drafts."""
_FIRST_SHARE: Final = (2.1, 3.0)
"""Accepted drafts and all drafts, until more is known."""
FIRST: Final = 0.01
_MIN, _MAX = 0.0005, 0.5
_RISES: Final = 2.0
"""Factor of ``alpha`` after a step without any accepted draft."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    draft_token: DraftToken
    step: int


class BeginsDrafter(Protocol):
    """Makes the drafter of a completion."""

    def __call__(self, prompt: Sequence[int]) -> Drafter:
        """Return the drafter of a completion of ``prompt``."""


class Speculation:
    """The drafts of one completion in a ring with such ``losses``, where steps take ``costs``. ``drafted`` counts
    drafts handed out, ``accepted`` those accepted."""

    def __init__(
        self,
        drafter: Drafter,
        drafting: Drafting,
        known: Sequence[int] = (),
        losses: Losses | None = None,
        costs: RowCosts | None = None,
    ) -> None:
        self._drafter, self._drafting = drafter, drafting
        self._costs = RowCosts(drafting.costs) if costs is None else costs
        self._pace = Pace(adapts=drafting.adapts, losses=losses)
        self._fallback = Fallback(adapts=drafting.adapts)
        self._ahead: deque[_Ahead] = deque()
        self._is_touched = False
        self._tree: list[TreeNode] = []
        """Drafts computed with the next token; node ``_at`` is the last accepted one."""
        self._at = -1
        self._longest = self._right = 0
        """Drafts on the tree's longest path, and accepted ones."""
        self._waits_until_s: float | None = None
        self._share = HeldShare(*_FIRST_SHARE)
        """Acceptance of drafts computed with the next token, up to the first that failed."""
        self.drafted = self.accepted = 0
        self.holds = not drafting.adapts
        """Whether a draft was accepted since drafting last began: before that, speculative steps have one row."""
        for token in known:
            self._drafter.took(token)

    @property
    def drafter(self) -> Drafter:
        """The drafter of this completion."""
        return self._drafter

    @property
    def has_drafts_in_flight(self) -> bool:
        """Whether any drafts are in flight."""
        return bool(self._ahead or self._tree)

    @property
    def tokens(self) -> list[int]:
        """The consecutive drafts in flight, the next token first."""
        return [each.draft_token.token for each in self._ahead]

    @property
    def steps(self) -> set[int]:
        """The steps that have rows of its drafts."""
        return {each.step for each in self._ahead}

    def next(self, maximum: int) -> list[DraftToken]:
        """Return at most ``maximum`` drafts, after all tokens in flight, that are worth an idle place in the ring."""
        found: list[DraftToken] = []
        tokens, sure = self.tokens, self._sure
        while len(found) < maximum and not self._tree and self._pace.may_begin:
            propose = self._drafter.looked_up if self._pace.is_off else self._drafter.propose
            draft_token = propose(tokens)
            if draft_token is None or not self._pace.wants(sure := sure * draft_token.sure):
                break
            found.append(draft_token)
            tokens.append(draft_token.token)
        return found

    def waits(self, maximum: int, now: float) -> float | None:
        """The time until which the next step waits for drafts that it could compute, at most ``maximum``; None: it does
        not wait."""
        usual_s, draft_s, costs = self._pace.usual_s, self._drafter.draft_s, self._drafting.costs[: maximum + 1]
        if len(costs) <= 1 or self.has_drafts_in_flight or self._pace.is_off or not usual_s or draft_s is None:
            return None
        share, draft_token = self._share.sure, draft_s / usual_s
        maximum, rate = best_wait(costs, share, draft_token)
        without = self._drafting.rate_ahead(share)
        if self._drafting.overlaps:
            without = max(without, rate_without_waiting(costs, share, draft_token))
        if rate <= without or not self._drafter.awaits(maximum, self._fallback.alpha):
            return None
        if self._waits_until_s is None:
            self._waits_until_s = now + WAITS * usual_s
        if now >= self._waits_until_s:
            return None
        self._is_touched = True
        return self._waits_until_s

    def together(self, maximum: int) -> list[TreeNode]:
        """Return the drafts to compute with the next token in one step, at most ``maximum``: as many as save most time.

        With n consecutive drafts a step gives 1 + p1 + p1 p2 + ... tokens, and takes as long as its n + 1 rows do.
        Returns none where speculative steps ahead of the next token gain more.
        """
        costs = self._costs
        maximum = min(maximum, len(costs) - 1)
        if maximum <= 0 or self.has_drafts_in_flight or self._pace.is_off:
            return []
        first, usual_s = self._drafter.propose([]), self._counted_s
        draft = self._drafter.own_s / usual_s if usual_s else 0.0
        ahead = 1.0 if first is None else self._drafting.rate_ahead(first.sure, draft)
        minimum = max(WORTH_IT, ahead)
        return best_tree(self._drafter, costs[: maximum + 1], self._drafting.branches, minimum, draft=draft)

    @property
    def _counted_s(self) -> float | None:
        """Time of a token without drafts; None if it is not known yet, or if measured times are not used."""
        return self._pace.usual_s if self._drafting.adapts else None

    @property
    def _sure(self) -> float:
        sure = 1.0
        for each in self._ahead:
            sure *= each.draft_token.sure
        return sure

    def handed_out_tree(self, nodes: Sequence[TreeNode]) -> None:
        """Note that a step computes ``nodes`` with the next token."""
        self._tree, self._at = list(nodes), -1
        self._longest, self._right = max((depth(nodes, node) for node in range(len(nodes))), default=0), 0
        self.drafted += len(nodes)
        self._is_touched = self._is_touched or bool(nodes)

    def measured(self, step_s: float) -> None:
        """Note the time of the step with the next token, including its drafts."""
        drafts, usual_s = len(self._tree), self._counted_s
        if drafts and usual_s:
            self._costs.add(1 + drafts, (step_s - drafts * self._drafter.own_s) / usual_s)

    def handed_out(self, draft_tokens: Sequence[DraftToken], step: int) -> None:
        """Note that ``step`` computes ``draft_tokens``, after those in flight."""
        self._ahead.extend(_Ahead(draft_token, step) for draft_token in draft_tokens)
        self.drafted += len(draft_tokens)
        self._is_touched = self._is_touched or bool(draft_tokens)

    def took(self, token: int, now: float) -> bool:
        """Take ``token``, the next one of the completion. Return whether the drafts in flight still hold; if not, take
        them back."""
        held = not self._ahead or self._ahead[0].draft_token.token == token
        is_accepted = held and bool(self._ahead)
        if self._tree:
            is_accepted = held = self._took_of_tree(token)
        elif is_accepted:
            self._ahead.popleft()
        self.accepted += is_accepted
        self._waits_until_s = None
        self._pace.took(now, drafted=self._is_touched, missed=not held, worked=self._drafter.works)
        self.holds = not self._drafting.adapts or (not self._pace.is_off and (is_accepted or self.holds))
        self._drafter.took(token)
        self._is_touched = (
            is_accepted or self.has_drafts_in_flight
        )  # the next one is sampled from a draft's row, or before one
        return held

    def _took_of_tree(self, token: int) -> bool:
        """Whether ``token`` is one of the tree's drafts after the accepted ones."""
        found = child(self._tree, self._at, token)
        self._share.count(held=found is not None)
        if found is not None:
            self._at, self._right = found, self._right + 1
        if found is None or all(node.parent != found for node in self._tree):
            self._fallback.verified(self._right, max(0, self._longest - self._right))
            self._tree = []
        return found is not None

    def take_back(self) -> None:
        """Discard all drafts in flight."""
        self._ahead.clear()
        self._tree = []


class Fallback:
    """The threshold ``alpha`` of one completion; it is constant unless it ``adapts``."""

    def __init__(self, *, adapts: bool = True) -> None:
        self.alpha = FIRST
        self._adapts = adapts

    def verified(self, right: int, wrong: int) -> None:
        """Note a step with ``right`` accepted drafts; ``wrong`` counts the first that failed and all after it."""
        assert right + wrong > 0
        if not self._adapts:
            return
        times = 0.5 if not wrong else _RISES ** (wrong / (right + wrong))
        self.alpha = min(_MAX, max(_MIN, self.alpha * times))
