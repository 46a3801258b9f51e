"""Whether a step waits for a model's guesses, and what steps with its guesses win either way.

Behind a guess that failed the model has nothing to say yet. The next step goes without guesses, and the model has its time
for those of the step after it; or the step waits until there are n of them, which each take a while.
"""

from __future__ import annotations

from collections.abc import Sequence


def tokens_of(guesses: int, share: float) -> float:
    """What a step with so many guesses gives, each of which holds behind the others in the ``share`` of cases."""
    return sum(share**depth for depth in range(guesses + 1))


def rate_without_waiting(costs: Sequence[float], share: float, guess: float) -> float:
    """Tokens in the time of a step of one row, where a step without guesses comes behind one that failed.

    A step of n rows takes ``costs[n - 1]``, and a ``guess`` so much of a step of one row: there are as many as it has time
    for.
    """
    most = len(costs) - 1 if guess <= 0 else min(len(costs) - 1, int(1 / guess))
    return max([1.0, *(_rate(costs, share, guesses, 1.0, 1.0) for guesses in range(1, most + 1))])


def best_wait(costs: Sequence[float], share: float, guess: float) -> tuple[int, float]:
    """For how many guesses it is best to wait behind one that failed, and the tokens that come then in such a time."""
    rates = [_rate(costs, share, guesses, guesses * guess, 0.0) for guesses in range(len(costs))]
    best = max(range(len(rates)), key=rates.__getitem__)
    return best, rates[best]


def _rate(costs: Sequence[float], share: float, guesses: int, after_failure: float, tokens_then: float) -> float:
    fails = 1 - share**guesses
    took = costs[guesses] / costs[0] + fails * after_failure
    return (tokens_of(guesses, share) + fails * tokens_then) / took
