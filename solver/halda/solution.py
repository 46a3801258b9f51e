"""The answer of the solver. It stands apart from ``search.py``, so that code that only reads an answer loads no solver."""

from __future__ import annotations

from dataclasses import dataclass

from halda.evaluate import Objective, Prediction
from halda.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best plan found. ``bound_s`` is below the objective of every plan; ``proven``: no plan is better."""

    plan: Plan
    prediction: Prediction
    objective: Objective
    objective_s: float
    bound_s: float
    proven: bool

    @property
    def gap(self) -> float:
        """How far below the objective the best plan may be at most, as a share; 0 when proven."""
        return 0.0 if self.proven else max(0.0, 1 - self.bound_s / self.objective_s)
