"""The answer of the solver. It stands apart from ``search.py``, so that code that only reads an answer loads no solver."""

from __future__ import annotations

from dataclasses import dataclass

from halda.evaluate import Objective, Prediction
from halda.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """What a quicker plan would have taken, for which the objective is so many seconds longer."""

    what: str
    objective_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The plan to take. ``bound_s`` is below the objective of every plan; ``proven``: none is quicker than the best found.

    What is taken may be slower than that by ``given_up_s``, since it fills the ring or asks less of some devices
    (``given_up``).
    """

    plan: Plan
    prediction: Prediction
    objective: Objective
    objective_s: float
    bound_s: float
    proven: bool
    given_up_s: float = 0.0
    given_up: tuple[GivenUp, ...] = ()

    @property
    def quickest_s(self) -> float:
        """The objective of the quickest plan found."""
        return self.objective_s - self.given_up_s

    @property
    def gap(self) -> float:
        """How far below the objective the best plan may be at most, as a share; 0 when proven."""
        return 0.0 if self.proven else max(0.0, 1 - self.bound_s / self.quickest_s)
