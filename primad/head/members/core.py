"""The context that all parts of a head share, the errors that end a ring, and fault attribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import zmq.asyncio

from halda import Plan
from primad.daemon.node import Node
from primad.daemon.reporter import Reporter
from primad.errors import (
    AlteredStepError,
    ClusterError,
    DiskError,
    LoadAgainError,
    PrimadError,
    RingError,
    SenderError,
)
from primad.head.model.options import ServeOptions
from primad.membership import types
from primad.ring.messages import SENDER

UNREACHED: Final = "route"
"""The fault of a device that is unreachable from the head although it was discovered."""
AGAIN: Final = "again"
"""The "fault" of a device that has more or less memory than it loaded for, which is not its fault."""
SENT: Final = "sender"
"""The fault that a device reports if the device before it in the ring caused the failure."""


class Core(Protocol):
    """Receives events and decides on actions, which other code carries out."""

    def post(self, event: types.Event) -> None:
        """Post an event."""

    def describe(self, what: str) -> None:
        """Set the line about the state for the health check while nothing is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadContext:
    """What all parts of a head share: its device, its options, its sockets, the membership core, its owner's screen."""

    node: Node
    options: ServeOptions
    sockets: zmq.asyncio.Context
    core: Core
    reporter: Reporter


class DeviceLostError(ClusterError):
    """``device`` does not respond any more, or works for another head."""

    def __init__(self, message: str, device: str) -> None:
        super().__init__(message)
        self.device = device


class StageError(ClusterError):
    """The stage of ``device`` failed; ``fault`` is its activity at that time (``messages.Fault``, or one of the above).

    With ``between``, the link between two devices of a group may have failed, not one of the devices.
    """

    def __init__(self, message: str, device: str, fault: str, between: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.device = device
        self.fault = fault
        self.between = between


class RankLostError(StageError):
    """As ``error``, but according to the device another device of its group, ``rank``, is at fault."""

    def __init__(self, error: StageError, rank: str) -> None:
        super().__init__(str(error), error.device, error.fault, between=(error.device, rank))
        self.rank = rank


class StuckStepError(RingError):
    """A step is overdue. One of the ``parties`` has it, or a connection of theirs lost it."""

    def __init__(self, message: str, parties: Sequence[str]) -> None:
        super().__init__(message)
        self.parties = tuple(parties)


def workers_of(plan: Plan) -> list[str]:
    """Return the workers of ``plan`` that steps visit, in the order of the route."""
    found = [plan.after(plan.head)]
    while found[-1] != plan.head:
        found.append(plan.after(found[-1]))
    return found[:-1]


def attributed(error: PrimadError, plan: Plan, epoch: int) -> types.RingFailed:
    """Attribute ``error``, which ended ring ``epoch`` of ``plan``, to a device. The head is trusted, and never at
    fault.

    A worker that fails by itself is at fault, but the device before it may have caused the failure.
    """
    reason, workers = str(error), workers_of(plan)
    failed, nobody = partial(types.RingFailed, epoch), partial(types.RingFailed, epoch, None)

    def among(*devices: str) -> tuple[str, ...]:
        return tuple(device for device in devices if device in plan.devices[1:])

    match error:
        case DeviceLostError(device=device):
            return failed(device, reason)
        case StuckStepError(parties=parties):
            return nobody(reason, parties=among(*parties))
        case AlteredStepError():
            return nobody(reason, parties=plan.devices[1:])
        case SenderError():
            return nobody(reason.replace(SENDER, workers[-1]), parties=(workers[-1],))
        case LoadAgainError():
            return nobody(reason, again=True)
        case DiskError():  # on the head
            return nobody(reason, lasting=True)
        case StageError(device=device, fault=fault) if fault == AGAIN:
            return nobody(reason, parties=among(device), again=True)
        case StageError(between=between, device=device) if between:
            return failed(device, reason, between=between)
        case StageError(device=device, fault=fault) if device not in plan.places:  # in a group; no step goes to it
            return failed(device, reason, lasting=fault in ("disk", UNREACHED))
        case StageError(device=device, fault=fault):
            around = [plan.head, *workers, plan.head]
            before, after = (around[workers.index(device) + step] if device in workers else device for step in (0, 2))
            if fault == "next" and device == plan.head:
                return failed(workers[0], reason)
            if fault == "next":
                return nobody(reason, parties=among(after, device))
            if fault == SENT:
                accusation = reason.removeprefix(f"{device}: ").replace(SENDER, before)
                return nobody(f"{accusation}, as {device} says", parties=among(before, device))
            parties = among(device, before) if fault == "ring" and before in workers else ()
            return failed(device, reason, parties=parties, lasting=fault in ("disk", UNREACHED))
        case _:
            return nobody(reason)
