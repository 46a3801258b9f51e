"""When a device that was short of memory may be planned for with more again: values in, values out.

A device that reported a lack (``Pressed``) is planned for with less from then on. When the owner's other programs end it
should compute more again; when they only pause it should not, for every change of plan costs seconds, or minutes where
layers must be fetched. So room counts that was there throughout for a while, the patience, and only where it makes a
difference: what was missing, and no less than a share of all memory. A lack soon after relief doubles the patience, up to
half an hour; one that comes long after it is another matter, and the patience begins anew.

Relief may come in steps, as programs end one after the other, until what a plan had before the lack is there again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

LOOK_S: Final = 2.0
"""Memory is looked at so often, and only while something was given up."""
PATIENCE_S: Final = 60.0
"""Room must have been there for so long, at least."""
MOST_PATIENCE_S: Final = 1800.0
RELAPSE_PATIENCES: Final = 10
"""A lack within so many times the patience after relief is put down to it."""
WORTH_SHARE: Final = 0.03
"""Less than this share of all memory is no reason for another plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """All that the policy remembers. Times are on the scale of ``now``; None for what was not yet.

    Plans have ``told_bytes`` of this device. After a lack they had ``goal_bytes`` before it (None without one), and are to
    have more once ``enough_bytes`` are available. Since ``since_s`` that was so, and ``lowest_bytes`` could be used.
    """

    told_bytes: int
    goal_bytes: int | None = None
    enough_bytes: int = 0
    since_s: float | None = None
    lowest_bytes: int = 0
    patience_s: float = PATIENCE_S
    relieved_s: float | None = None

    @property
    def watches(self) -> bool:
        """Whether there is anything to wait for."""
        return self.goal_bytes is not None


def begin(told_bytes: int, before: Relief | None = None) -> Relief:
    """Plans have ``told_bytes``, as measured just now. A lack that was there ``before`` may still last."""
    if before is None:
        return Relief(told_bytes=told_bytes)
    if before.goal_bytes is not None and told_bytes < before.goal_bytes:
        return replace(before, told_bytes=told_bytes)
    return Relief(told_bytes=told_bytes, patience_s=before.patience_s, relieved_s=before.relieved_s)


def lowered(told_bytes: int, *, available_bytes: int, needed_bytes: int) -> int:
    """What plans have of a device that lacks ``needed_bytes`` of ``told_bytes`` while so much is available."""
    return min(max(0, told_bytes - needed_bytes), available_bytes)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are available, those of them that the owner lets plans use, and those beside what serves now.

    The first two count what primad's own processes would give back. The next ring is loaded before they do: where memory is
    short there must be room for both.
    """

    available_bytes: int
    allowed_bytes: int
    beside_bytes: int


def press(relief: Relief, room: Room, *, needed_bytes: int, now: float) -> Relief:
    """The device lacks ``needed_bytes`` while there is ``room``, which may not be what it seems."""
    patience_s, relieved_s = relief.patience_s, relief.relieved_s
    if relieved_s is not None:
        relapsed = now - relieved_s < RELAPSE_PATIENCES * patience_s
        patience_s = min(2 * patience_s, MOST_PATIENCE_S) if relapsed else PATIENCE_S
    return Relief(
        told_bytes=lowered(relief.told_bytes, available_bytes=room.beside_bytes, needed_bytes=needed_bytes),
        goal_bytes=relief.told_bytes if relief.goal_bytes is None else relief.goal_bytes,
        enough_bytes=room.available_bytes + needed_bytes,
        patience_s=patience_s,
    )


def look(relief: Relief, room: Room, *, total_bytes: int, now: float) -> tuple[Relief, int | None]:
    """What becomes of ``relief`` when there is ``room`` at ``now``; what plans may have from now on, if that changed."""
    if relief.goal_bytes is None:
        return relief, None
    worth = int(WORTH_SHARE * total_bytes)
    if room.available_bytes < relief.enough_bytes or room.allowed_bytes < relief.told_bytes + worth:
        return replace(relief, since_s=None), None
    if relief.since_s is None:
        return replace(relief, since_s=now, lowest_bytes=room.allowed_bytes), None
    lowest = min(relief.lowest_bytes, room.allowed_bytes)
    if now - relief.since_s < relief.patience_s:
        return replace(relief, lowest_bytes=lowest), None
    goal = relief.goal_bytes if lowest + worth < relief.goal_bytes else None
    return Relief(told_bytes=lowest, goal_bytes=goal, patience_s=relief.patience_s, relieved_s=now), lowest
