"""A plan, what each device keeps of it, and what the solver promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from halda import Assignment, ModelProfile, Plan, Prediction, assignments


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """``prediction`` is what ``plan`` promises, None when it was set by hand; ``assignments`` are those of its devices."""

    plan: Plan
    prediction: Prediction | None
    assignments: Mapping[str, Assignment]

    @classmethod
    def of(cls, plan: Plan, model: ModelProfile, prediction: Prediction | None) -> Self:
        """The promise of ``plan`` for ``model``."""
        return cls(plan=plan, prediction=prediction, assignments=assignments(plan, model))
