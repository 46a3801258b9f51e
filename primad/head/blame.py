"""What ends a ring, and which device is to blame for it."""

from __future__ import annotations

from typing import Final

from halda import Plan
from primad.errors import ClusterError, LoadAgainError, PrimadError

UNREACHED: Final = "route"
"""The fault of a device to which no way leads from the head, though it was found."""
AGAIN: Final = "again"
"""That of one that has other room than it loaded for: it is none."""


class DeviceLostError(ClusterError):
    """``device`` does not answer any more, or works for another head."""

    def __init__(self, message: str, device: str) -> None:
        super().__init__(message)
        self.device = device


class ParticipationError(ClusterError):
    """The participation of ``device`` failed; ``fault`` is what it was doing (``messages.Fault``, or one of these)."""

    def __init__(self, message: str, device: str, fault: str) -> None:
        super().__init__(message)
        self.device = device
        self.fault = fault


def loads_again(error: PrimadError) -> bool:
    """Whether nothing is wrong with the ring that ``error`` ended but that a device has other room than it loaded for."""
    return isinstance(error, LoadAgainError) or (isinstance(error, ParticipationError) and error.fault == AGAIN)


def blamed(error: PrimadError, plan: Plan, *, forming: bool = False) -> tuple[str | None, bool]:
    """Which worker of ``plan`` is to blame for ``error`` that ended its ring, None for none, and whether that will last.

    The head cannot be left out. A worker that does not reach it while the ring is ``forming`` can.
    """
    if isinstance(error, DeviceLostError):
        return error.device, False
    if not isinstance(error, ParticipationError) or error.fault == AGAIN:
        return None, False
    device: str | None = error.device
    if error.fault == "next":
        following = plan.after(error.device)
        nobody = error.device if forming else None
        device = following if following != plan.head else nobody
    return device, error.fault in ("disk", UNREACHED)
