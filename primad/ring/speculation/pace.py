"""How sure a draft must be for a ring to compute it ahead, and whether drafting pays at all for one completion.

As in PipeInfer (Butler et al., 2024) the required confidence rises by a recovery factor where drafts fail, and falls by
a decay factor where the ring was idle although there was a draft. Both adapt: they become bolder while drafts save
time. The saving is measured: the time from token to token with drafts in flight and without. Where it is no shorter
with drafts, there are none for a while, each time for twice as long until they save time again. Other programs can
delay single tokens: a difference that may be chance is first compared with more tokens.

Each trial may cost something, also for a short completion. So the cost of trials is summed over all completions of a
ring, and another trial begins when that sum plus another such loss is a small share of all time: drafts that are always
wrong cost about ``MAX_LOST``, however slow they make a token.

The module also decides whether a step waits for a model's drafts, and what steps with its drafts gain either way.

After a rejected draft the model has nothing new yet. The next step goes without drafts, and the model has its time for
drafts of the step after it; or the step waits until there are n of them, each of which takes a while.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BEGINS_AFTER: Final = 4
"""Tokens without drafts, for comparison."""
BEGINS_AT: Final = 0.8
"""A draft that costs nothing and is at least this sure is computed as soon as the time of one token is known."""
EVIDENT: Final = 0.6
"""Share of that one token's time: drafts that take at most this much gain, whatever delayed the token."""
JUDGED_AFTER: Final = 16
"""Tokens with drafts."""
SURE_AFTER: Final = 32
"""Tokens without drafts: while fewer are known, drafts whose apparent loss may be chance are compared with more of them
before they end."""
HOPELESS_AFTER: Final = 8
"""Tokens with drafts of which none was accepted."""
HOPELESS_IDLE: Final = 2
"""Tokens for which a drafter worked without a sure enough draft, after failed trials, where no draft was accepted."""
MAX_LOST: Final = 0.025
"""Largest share of the time of all completions that unprofitable drafts may cost: less than the 3 % they may take in
all, since tokens that are late by chance make a trial lose more than the one before it."""
IDLE_COUNTS: Final = 4
"""How many tokens a token counts for if a drafter worked for it without a sure enough draft."""
ENDS_AT: Final = 5.0
"""Loss, in tokens' worth of time, at which drafts end immediately: if they lost it recently and gain nothing on
average."""
_CAPPED: Final = 4.0
"""A token that takes more than this many times as long as without drafts was also delayed by something else, unless it
happens again."""
PAUSES: Final = (16, 1024)
"""Tokens without drafts after drafting did not pay: the first time, and at most, unless the loss requires more."""
PAUSE_KEPT: Final = 64
"""The most for a completion's first pause, after others in which drafting never paid: the next may be one that
copies."""
_FADES: Final = 0.95
_CUTOFF: Final = (0.1, 0.4, 0.95)
"""Minimum, first value, maximum."""
_RECOVERY: Final = (0.005, 0.03, 0.1)
_DECAY: Final = (0.8, 0.93, 0.99)
_ADAPTS: Final = 0.98


@dataclass(slots=True)
class Losses:
    """Cost of unprofitable drafts over all completions of a ring: ``lost_s`` of ``decode_s``, the latest trial
    ``trial_s``.

    A completion's first ``pause`` is longer if drafting repeatedly failed in those before it.
    """

    decode_s: float = 0.0
    lost_s: float = 0.0
    trial_s: float = 0.0
    pause: int = PAUSES[0]

    def add(self, loss_s: float) -> None:
        """Add the extra time of a token with drafts; gains make up for losses."""
        self.lost_s = max(0.0, self.lost_s + loss_s)

    @property
    def keep_failing(self) -> bool:
        """Whether consecutive trials did not pay."""
        return self.pause >= PAUSE_KEPT

    @property
    def allow_another(self) -> bool:
        """Whether another trial may lose as much as the latest one that failed."""
        return self.lost_s + self.trial_s <= MAX_LOST * self.decode_s


@dataclass(slots=True)
class _Gaps:
    """Recent mean time from token to token, and its error."""

    sum_s: float = 0.0
    squares_s2: float = 0.0
    weight: float = 0.0
    squared_weights: float = 0.0
    count: int = 0

    def add(self, gap_s: float, counts: int) -> None:
        self.sum_s = self.sum_s * _FADES + gap_s
        self.squares_s2 = self.squares_s2 * _FADES + gap_s**2
        self.weight = self.weight * _FADES + 1
        self.squared_weights = self.squared_weights * _FADES**2 + 1
        self.count += counts

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.weight

    @property
    def error_s2(self) -> float:
        """The square of the standard error of the mean."""
        spread_s2 = max(0.0, self.squares_s2 / self.weight - self.mean_s**2)
        return spread_s2 * self.squared_weights / self.weight**2


@dataclass(slots=True)
class _Trial:
    """Tokens with drafts since drafting last began: how many drafts were accepted or rejected, how often a drafter
    worked without a draft, and the time lost in all and recently."""

    held: int = 0
    missed: int = 0
    idle: int = 0
    lost_s: float = 0.0
    late_s: float = 0.0
    beyond_s: float | None = None

    def loss_s(self, gap_s: float, usual_s: float) -> float:
        """The loss to count for a token that took ``gap_s`` and takes ``usual_s`` without drafts."""
        beyond_s = gap_s - _CAPPED * usual_s
        if beyond_s <= 0:
            return gap_s - usual_s
        earlier_s, self.beyond_s = self.beyond_s, 0.0 if self.beyond_s is not None else beyond_s
        return (_CAPPED - 1) * usual_s if earlier_s is None else gap_s - usual_s + earlier_s


class Pace:
    """Paces the drafts of one completion; unless it ``adapts`` the required confidence is constant, and drafting does
    not end. Time is passed in, in seconds on any scale. ``losses`` are those of all completions."""

    def __init__(self, *, adapts: bool = True, losses: Losses | None = None) -> None:
        self._adapts = adapts
        self._losses = losses or Losses()
        self._cutoff, self._recovery, self._decay = _CUTOFF[1], _RECOVERY[1], _DECAY[1]
        self._with, self._without = _Gaps(), _Gaps()
        self._trial = _Trial()
        self._last_s: float | None = None
        self._off, self._pause = BEGINS_AFTER, self._losses.pause
        self._was_refused = False
        self._is_new = True

    @property
    def may_begin(self) -> bool:
        """Whether drafting is on, or may begin with a draft that is sure enough."""
        return not self._off or (self._is_new and bool(self._without.count) and self._losses.allow_another)

    @property
    def is_off(self) -> bool:
        """Whether drafting is off for now."""
        return self._off > 0

    @property
    def usual_s(self) -> float | None:
        """Time of a token without drafts; None if it is not known yet."""
        return self._without.mean_s if self._without.count else None

    def wants(self, sure: float) -> bool:
        """Whether a draft that is accepted, with all before it, in the share ``sure`` of cases is worth an idle place
        in the ring."""
        if self._off:
            if sure < BEGINS_AT or not self.may_begin:
                return False
            self._off, self._is_new = 0, False
        if sure >= self._cutoff:
            return True
        self._was_refused = True
        return False

    def took(self, now: float, *, drafted: bool, missed: bool, worked: bool = False) -> None:
        """Note a token: ``drafted`` if drafts were in flight, ``missed`` if it was not the first of them.

        If a drafter ``worked`` without a draft in flight, that is judged sooner.
        """
        if self._last_s is not None:
            self._count(now - self._last_s, drafted=drafted, missed=missed, worked=worked)
        self._last_s = now
        if not self._adapts:
            pass
        elif missed:
            self._cutoff = min(_CUTOFF[2], self._cutoff + self._recovery)
        elif self._was_refused:
            self._cutoff = max(_CUTOFF[0], self._cutoff * self._decay)
        self._was_refused = False
        if self._off:
            self._off -= not drafted
            if self._adapts and not self._off and not self._losses.allow_another:
                self._off = 1
        elif self._adapts and (drafted or worked):
            self._judge()

    def _count(self, gap_s: float, *, drafted: bool, missed: bool, worked: bool) -> None:
        self._losses.decode_s += gap_s
        if not (drafted or worked):
            self._without.add(gap_s, 1)
            return
        self._with.add(gap_s, 1 if drafted else IDLE_COUNTS)
        if not self._without.count:
            return
        usual_s, trial = self._without.mean_s, self._trial
        loss_s = trial.loss_s(gap_s, usual_s)
        self._losses.add(loss_s)
        trial.lost_s += loss_s
        trial.late_s = max(0.0, trial.late_s + loss_s)
        trial.missed += drafted and missed
        trial.held += drafted and not missed
        trial.idle += not drafted

    def _judge(self) -> None:
        if not self._without.count:
            return
        is_idle = self._losses.keep_failing and self._trial.idle >= HOPELESS_IDLE
        is_hopeless = not self._trial.held and (is_idle or self._trial.missed >= HOPELESS_AFTER)
        wins = self._trial.held > 0 and self._with.mean_s < self._without.mean_s  # no accepted draft: a gain is chance
        if is_hopeless or (self._trial.late_s > ENDS_AT * self._without.mean_s and not wins):
            self._end()
        elif self._with.count < JUDGED_AFTER:
            return
        elif (few := BEGINS_AFTER - 1 - self._without.count) > 0 and self._with.mean_s > EVIDENT * self._without.mean_s:
            self._off = few
        elif wins:
            self._recovery = max(_RECOVERY[0], self._recovery * _ADAPTS)
            self._decay = max(_DECAY[0], self._decay * _ADAPTS)
            if self._trial.lost_s < -ENDS_AT * self._without.mean_s:
                self._pause = self._losses.pause = PAUSES[0]
        elif self._trial.held and self._may_win and self._without.count < SURE_AFTER:
            self._off = BEGINS_AFTER
        else:
            self._end()

    @property
    def _may_win(self) -> bool:
        """Whether drafts may save time although the means say otherwise: the means are off by this much in one case of
        six."""
        gained_s = self._without.mean_s - self._with.mean_s
        return gained_s > -math.sqrt(self._with.error_s2 + self._without.error_s2)

    def _end(self) -> None:
        """End drafting, which did not pay."""
        self._recovery = min(_RECOVERY[2], self._recovery / _ADAPTS)
        self._decay = min(_DECAY[2], self._decay / _ADAPTS)
        self._off, self._pause = self._pause, min(2 * self._pause, PAUSES[1])
        self._losses.trial_s, self._losses.pause = max(0.0, self._trial.lost_s), min(self._pause, PAUSE_KEPT)
        self._with, self._trial, self._is_new = _Gaps(), _Trial(), False


@dataclass(slots=True)
class Tally:
    """``accepted`` of the ``drafted`` rows were the next token, ``missed`` were wrong after accepted ones, which makes all
    rows after them useless, and ``skipped`` were not computed to the end.

    ``ring_pass_s`` is the time in flight, summed over the rows of all tokens; ``decode_s`` is how long completions
    waited for them.
    """

    drafted: int = 0
    accepted: int = 0
    missed: int = 0
    skipped: int = 0
    ring_pass_s: float = 0.0
    decode_s: float = 0.0

    def count(self, ring_pass_s: float, gap_s: float) -> None:
        """Count a token whose row took ``ring_pass_s`` and which came ``gap_s`` after the previous token."""
        self.ring_pass_s += ring_pass_s
        self.decode_s += gap_s

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of a completion per ring pass of one row: 1 without drafts."""
        return self.ring_pass_s / self.decode_s if self.decode_s > 0 else 1.0


def tokens_of(draft_tokens: int, share: float) -> float:
    """Expected tokens of a step with ``draft_tokens`` drafts, each accepted after the others in the ``share`` of
    cases."""
    return sum(share**depth for depth in range(draft_tokens + 1))


def rate_without_waiting(costs: Sequence[float], share: float, draft_token: float) -> float:
    """Tokens per time of a one-row step, if a step without drafts follows each failure.

    A step of n rows takes ``costs[n - 1]``, and each draft the ``draft_token`` share of a one-row step: there are as
    many drafts as fit in its time.
    """
    maximum = len(costs) - 1 if draft_token <= 0 else min(len(costs) - 1, int(1 / draft_token))
    return max([1.0, *(_rate(costs, share, draft_tokens, 1.0, 1.0) for draft_tokens in range(1, maximum + 1))])


def best_wait(costs: Sequence[float], share: float, draft_token: float) -> tuple[int, float]:
    """The number of drafts worth waiting for after a failure, and the tokens per time of a one-row step that result."""
    rates = [_rate(costs, share, draft_tokens, draft_tokens * draft_token, 0.0) for draft_tokens in range(len(costs))]
    best = max(range(len(rates)), key=rates.__getitem__)
    return best, rates[best]


def _rate(costs: Sequence[float], share: float, draft_tokens: int, after_failure: float, tokens_then: float) -> float:
    fails = 1 - share**draft_tokens
    took = costs[draft_tokens] / costs[0] + fails * after_failure
    return (tokens_of(draft_tokens, share) + fails * tokens_then) / took
