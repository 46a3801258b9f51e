"""A plan, and what the solver promises of it."""

from __future__ import annotations

from dataclasses import dataclass

from halda import Plan, Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """``prediction`` is what ``plan`` promises, None when it was set by hand."""

    plan: Plan
    prediction: Prediction | None

    def room_bytes(self, device: str) -> int:
        """Bytes of a device's memory that the plan leaves."""
        devices = self.prediction.devices if self.prediction is not None else ()
        return sum(each.room_bytes for each in devices if each.device == device)
