"""The result of the solver. It is separate from ``search.py``, so that code that only reads a result does not load the
solver."""

from __future__ import annotations

from dataclasses import dataclass

from halda.evaluate import Objective, Prediction
from halda.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """A requirement of a faster plan that this one avoids, and the seconds by which that lengthens the objective."""

    what: str
    objective_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The chosen plan. ``bound_s`` is a lower bound of the objective of every plan; ``proven``: no plan beats the best
    found.

    The chosen plan may be slower than the best by ``given_up_s``, since it fills the ring better or requires less of
    some devices (``given_up``).
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
        """Objective of the fastest plan found."""
        return self.objective_s - self.given_up_s

    @property
    def gap(self) -> float:
        """Largest share by which the best plan may be below the objective; 0 when proven."""
        return 0.0 if self.proven else max(0.0, 1 - self.bound_s / self.quickest_s)
