"""A plan, what each device keeps of it, and what the solver promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from halda import Assignment, ModelProfile, Plan, Prediction, assignments
from primad.head.corrections import NOTHING_LEARNT, Corrections


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """``prediction`` is what ``plan`` promises, None when it was set by hand; ``assignments`` are those of its devices.

    Both were made with what was learnt until then, ``corrections``.
    """

    plan: Plan
    prediction: Prediction | None
    assignments: Mapping[str, Assignment]
    corrections: Corrections = NOTHING_LEARNT

    @classmethod
    def of(
        cls,
        plan: Plan,
        model: ModelProfile,
        prediction: Prediction | None,
        corrections: Corrections = NOTHING_LEARNT,
    ) -> Self:
        """The promise of ``plan`` for ``model``."""
        kept = assignments(plan, model)
        return cls(plan=plan, prediction=prediction, assignments=kept, corrections=corrections)
