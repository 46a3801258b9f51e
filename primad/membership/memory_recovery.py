"""Decides when plans may use more memory of a device that was low on it: values in, values out.

Plans use less of a device once it has reported that memory is low (``MemoryLow``). They should use more again when the
owner's other programs have ended, but not when those only pause: every change of plan costs seconds, or minutes if
layers must be fetched. So free memory counts only if it was there without a break for a while, the wait, and only if it
makes a difference: it must cover the shortage, and at least a share of all memory. When memory is low again soon after
a recovery, the wait doubles, up to half an hour. When that happens much later, the wait is reset.

Memory may come back in steps, as programs end one after the other, until the device has what plans used before the
shortage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

WAIT_S: Final = 60.0
"""The shortest time for which memory must have been free."""
MAX_WAIT_S: Final = 1800.0
RELAPSE_WAITS: Final = 10
"""A shortage within this many times the wait after recovery is attributed to it."""
WORTH_SHARE: Final = 0.03
"""A gain of less than this share of all memory is no reason for another plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The policy's state. Times are on the scale of ``now``; None for what has not happened.

    Plans use ``reported_bytes`` of this device. Before a shortage they used ``goal_bytes`` (None without a shortage),
    and they may use more once ``enough_bytes`` are available. That has been the case since ``since_s``, with at least
    ``lowest_bytes``.
    """

    reported_bytes: int
    goal_bytes: int | None = None
    enough_bytes: int = 0
    since_s: float | None = None
    lowest_bytes: int = 0
    wait_s: float = WAIT_S
    recovered_s: float | None = None

    @property
    def watches(self) -> bool:
        """Whether there is a recovery to wait for."""
        return self.goal_bytes is not None


def begin(reported_bytes: int, before: Recovery | None = None) -> Recovery:
    """Record that plans use ``reported_bytes``, as measured now. A shortage from ``before`` may still last."""
    if before is None:
        return Recovery(reported_bytes=reported_bytes)
    if before.goal_bytes is not None and reported_bytes < before.goal_bytes:
        return replace(before, reported_bytes=reported_bytes)
    return Recovery(reported_bytes=reported_bytes, wait_s=before.wait_s, recovered_s=before.recovered_s)


def lowered(reported_bytes: int, *, available_bytes: int, needed_bytes: int) -> int:
    """Return what plans may use of a device that lacks ``needed_bytes`` of ``reported_bytes`` while ``available_bytes``
    are free."""
    return min(max(0, reported_bytes - needed_bytes), available_bytes)


@dataclass(frozen=True, slots=True)
class Room:
    """Available bytes, the part of them that the owner allows plans to use, and the part that is free in addition to
    the serving ring.

    The first two include what primad's own processes would free. The next ring is loaded before they free it: if memory
    is short there must be room for both rings.
    """

    available_bytes: int
    allowed_bytes: int
    beside_bytes: int


def report_memory_low(recovery: Recovery, room: Room, *, needed_bytes: int, now: float) -> Recovery:
    """Record that the device lacks ``needed_bytes`` while ``room``, which may be misleading, was measured."""
    wait_s, recovered_s = recovery.wait_s, recovery.recovered_s
    if recovered_s is not None:
        relapsed = now - recovered_s < RELAPSE_WAITS * wait_s
        wait_s = min(2 * wait_s, MAX_WAIT_S) if relapsed else WAIT_S
    return Recovery(
        reported_bytes=lowered(recovery.reported_bytes, available_bytes=room.beside_bytes, needed_bytes=needed_bytes),
        goal_bytes=recovery.reported_bytes if recovery.goal_bytes is None else recovery.goal_bytes,
        enough_bytes=room.available_bytes + needed_bytes,
        wait_s=wait_s,
    )


def look(recovery: Recovery, room: Room, *, total_bytes: int, now: float) -> tuple[Recovery, int | None]:
    """Return the next state of ``recovery`` with ``room`` at ``now``, and what plans may use from now on, if that
    changed."""
    if recovery.goal_bytes is None:
        return recovery, None
    worth = int(WORTH_SHARE * total_bytes)
    if room.available_bytes < recovery.enough_bytes or room.allowed_bytes < recovery.reported_bytes + worth:
        return replace(recovery, since_s=None), None
    if recovery.since_s is None:
        return replace(recovery, since_s=now, lowest_bytes=room.allowed_bytes), None
    lowest = min(recovery.lowest_bytes, room.allowed_bytes)
    if now - recovery.since_s < recovery.wait_s:
        return replace(recovery, lowest_bytes=lowest), None
    goal = recovery.goal_bytes if lowest + worth < recovery.goal_bytes else None
    return Recovery(reported_bytes=lowest, goal_bytes=goal, wait_s=recovery.wait_s, recovered_s=now), lowest
