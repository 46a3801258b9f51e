"""Decides how much memory this device's ring process keeps, and when it releases some: values in, values out.

The owner's programs come first. What they allocate must come from somewhere, and it hurts them, and us, if the kernel
takes it from their pages, from ours that are needed within the second, or from swap. Our weights are clean pages of
files. They are no pressure by themselves, since the kernel can drop them at no cost. But dropped ones come back by page
faults, a quarter as fast as by read-ahead, and the kernel drops the least recently used, which in a cyclic scan are
those needed next. So the ring process releases memory first, in whole layers of its choice.

**Room** is what others can still allocate before the kernel must take what we hold: memory that is free or file cache,
minus the file pages that we hold or are to hold. It shows within one token that another program took memory:

* Room below 0: what we want to hold no longer fits. Shrink by as many layers as it takes to have ``reserve`` again.
* Enough room (``TIGHT_SHARE`` of all memory): whatever happens on this machine, our memory is not the cause. A cgroup
  that thrashes in its own limit shows in the machine's figures, and idle pages that the kernel took show as evicted;
  neither makes this device slower.
* In between, room is misleading: file pages of the owner's programs count as free, though they are in use. There
  symptoms decide: tasks that waited for memory (PSI), pages read back from swap, our layers that went missing, our page
  faults.

A verdict of the system itself (macOS, Windows) is always followed.

It grows back one layer at a time, and only into room that was there throughout ``wait_s``: a program that repeatedly
takes and frees memory keeps it. Memory that this process itself released recently is still unused, and waits only after
pressure. Pressure soon after growing doubles the wait, a long calm halves it.

When nothing is left to shrink and pressure stays, the head is asked for another plan (``Replan``), and not again for a
while.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

Level = Literal["calm", "some", "high"]

INTERVAL_S: Final = 0.1
"""Minimum time between readings. A token of a model that streams takes longer, and a program that allocates as fast as
it can takes about 200 MB in that time, which the kernel finds among our clean pages without our help."""
WINDOW_S: Final = 1.0
"""Time over which symptoms are counted: many tokens or a slow one, and short next to ``REPLAN_AFTER_S``."""
RESERVE_SHARE: Final = 0.01
MIN_RESERVE_BYTES: Final = 16 << 20
MAX_RESERVE_BYTES: Final = 256 << 20
"""Limits of the memory left free when layers are released or taken again: the kernel's own needs grow with the machine
(it begins to reclaim at about 1 % free), but no token allocates more than this."""
TIGHT_SHARE: Final = 0.05
"""With more room than this share of all memory, symptoms have other causes. A desktop's programs use file pages of
about that size."""
SOME_STALL: Final = 0.10
"""Share of the time in which some task waited for memory. Android's low memory killer ends programs at 0.07 to 0.2 of a
second; a machine at rest is far below 0.01."""
HIGH_STALL: Final = 0.40
FULL_STALL: Final = 0.10
"""Share of the time in which all tasks waited for memory: every program feels that."""
SWAPPED_IN_BYTES_PER_S: Final = 1 << 20
"""Pages read back from swap were needed; single ones, of programs that wake up, are no pressure."""
HIGH_SWAPPED_IN_BYTES_PER_S: Final = 16 << 20
MAJOR_FAULTS_PER_S: Final = 300.0
"""Each is a separate read of about 0.3 ms from a good disk: a tenth of the time, as with ``SOME_STALL``."""
LINGER_S: Final = 5.0
"""Time for which a level is shown after its last symptom."""
WAIT_S: Final = 5.0
"""Minimum time for which room must have been there before it is used."""
MAX_WAIT_S: Final = 300.0
GROW_EVERY_S: Final = 1.0
"""Time between two layers, so that symptoms of the first show before the second."""
RELAPSE_S: Final = 30.0
"""Pressure this soon after growing (or within twice the wait) is attributed to it."""
CALM_WAITS: Final = 4
"""The wait is halved after a calm of this many waits."""
REPLAN_AFTER_S: Final = 5.0
"""A burst is over by then; another plan costs seconds, or minutes where layers must be fetched."""
REPLAN_AGAIN_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds for which some, and for which all, tasks waited for memory, as counted by the kernel (PSI)."""

    some_s: float
    full_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The system's memory figures at a moment; None for those that it does not report.

    ``total_bytes`` and ``available_bytes`` are the machine's or the tightest cgroup's. With ``counts_mapped``,
    available memory includes all clean file pages, even those in use; else it excludes pages that a process has mapped
    and used. ``stalls`` (of the machine, of our cgroup), ``swapped_in_bytes`` and ``major_faults`` (of this process)
    are running totals. ``verdict`` is the system's own.
    """

    total_bytes: int
    available_bytes: int
    counts_mapped: bool
    stalls: tuple[Stall | None, ...]
    swapped_in_bytes: int | None
    major_faults: int | None
    verdict: Level | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What the ring process holds.

    ``held_bytes`` are weights, held or to be held, in pages that the kernel may take: resident layers and read-ahead,
    without locked ones. ``layer_bytes`` (more than 0) is the most that one layer more or less changes. ``shrinkable``
    and ``growable`` are numbers of layers; the next growable one takes ``returned_bytes`` of memory that this process
    released recently, 0 if it takes other memory. ``evicted_bytes`` went missing since the last time.
    """

    held_bytes: int
    layer_bytes: int
    shrinkable: int
    growable: int
    returned_bytes: int
    evicted_bytes: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Change nothing."""


@dataclass(frozen=True, slots=True)
class Shrink:
    """Stream ``layers`` more layers, now."""

    layers: int


@dataclass(frozen=True, slots=True)
class Grow:
    """Keep one more layer resident."""


@dataclass(frozen=True, slots=True)
class Replan:
    """Ask for another plan: nothing is left to shrink, and only that can free ``needed_bytes`` (more than 0)."""

    needed_bytes: int


Action = Hold | Shrink | Grow | Replan


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """Symptoms of a window, per second: shares of time, bytes, faults."""

    some: float = 0.0
    full: float = 0.0
    swapped_in_bytes: float = 0.0
    evicted_bytes: float = 0.0
    major_faults: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureState:
    """All that the policy remembers. Times are on the scale of ``now``; None for what has not happened.

    A window of symptoms began at ``window_s`` with the reading ``first``, and ``evicted_bytes`` went missing since;
    ``symptoms`` are those of the last complete window. ``pressed_s`` is the last time with pressure, ``stuck_s`` the
    first of the current run without anything left to shrink. ``lowest_bytes`` is the least that was available since
    ``lowest_since_s``, ``before_bytes`` the least in the period of ``wait_s`` or more before that.
    """

    level: Level = "calm"
    window_s: float
    first: Reading
    evicted_bytes: int = 0
    symptoms: Symptoms = Symptoms()
    pressed_s: float | None = None
    stuck_s: float | None = None
    asked_s: float | None = None
    grown_s: float | None = None
    wait_s: float = WAIT_S
    wait_since_s: float
    lowest_bytes: int
    lowest_since_s: float
    before_bytes: int | None = None


def begin(reading: Reading, now: float) -> PressureState:
    """Return the state at the first reading."""
    return PressureState(
        window_s=now,
        first=reading,
        wait_since_s=now,
        lowest_bytes=reading.available_bytes,
        lowest_since_s=now,
    )


def reserve_bytes(total_bytes: int) -> int:
    """Return how much of ``total_bytes`` of memory is to be left free."""
    return min(max(int(total_bytes * RESERVE_SHARE), MIN_RESERVE_BYTES), MAX_RESERVE_BYTES)


def room_bytes(reading: Reading, holding: Holding) -> int:
    """Return what others can allocate before the kernel must take what we hold; negative when it already must."""
    return reading.available_bytes - (holding.held_bytes if reading.counts_mapped else 0)


def decide(state: PressureState, reading: Reading, holding: Holding, now: float) -> tuple[PressureState, Action]:
    """Return the state after ``reading`` at ``now``, and the action, which counts as carried out."""
    assert holding.layer_bytes > 0
    state = _count(state, reading, holding, now)
    state = _remember(state, reading, now)
    level = judge(state.symptoms, reading, holding)
    if level == "calm":
        return _calm(state, reading, holding, now)
    relapse_s = max(RELAPSE_S, 2 * state.wait_s)
    if state.grown_s is not None and now - state.grown_s < relapse_s:
        wait_s = min(2 * state.wait_s, MAX_WAIT_S)
        state = replace(state, grown_s=None, wait_s=wait_s)
    state = replace(state, level=level, pressed_s=now, wait_since_s=now)
    if holding.shrinkable > 0:
        return _shrink(state, level, reading, holding, now)
    return _ask(state, reading, holding, now)


def judge(symptoms: Symptoms, reading: Reading, holding: Holding) -> Level:
    """Return the current level of pressure."""
    room = room_bytes(reading, holding)
    if reading.verdict == "high" or room < -holding.layer_bytes:
        return "high"
    is_tight = room < max(reading.total_bytes * TIGHT_SHARE, holding.layer_bytes)
    if is_tight and _is_high(symptoms):
        return "high"
    if reading.verdict == "some" or room < 0 or (is_tight and _is_some(symptoms, holding)):
        return "some"
    return "calm"


def _is_high(symptoms: Symptoms) -> bool:
    return (
        symptoms.full >= FULL_STALL
        or symptoms.some >= HIGH_STALL
        or symptoms.swapped_in_bytes >= HIGH_SWAPPED_IN_BYTES_PER_S
    )


def _is_some(symptoms: Symptoms, holding: Holding) -> bool:
    return (
        symptoms.some >= SOME_STALL
        or symptoms.swapped_in_bytes >= SWAPPED_IN_BYTES_PER_S
        or symptoms.major_faults >= MAJOR_FAULTS_PER_S
        # Less than a layer a second costs less than a layer that streams.
        or symptoms.evicted_bytes >= holding.layer_bytes
    )


def _count(state: PressureState, reading: Reading, holding: Holding, now: float) -> PressureState:
    """Compute the symptoms when a window is over."""
    evicted = state.evicted_bytes + holding.evicted_bytes
    seconds = now - state.window_s
    if seconds < WINDOW_S:
        return replace(state, evicted_bytes=evicted)
    first = state.first
    stalls = [
        (after.some_s - before.some_s, after.full_s - before.full_s)
        for before, after in zip(first.stalls, reading.stalls, strict=False)
        if before is not None and after is not None
    ]
    symptoms = Symptoms(
        some=max((some for some, _ in stalls), default=0.0) / seconds,
        full=max((full for _, full in stalls), default=0.0) / seconds,
        swapped_in_bytes=_gain(first.swapped_in_bytes, reading.swapped_in_bytes) / seconds,
        major_faults=_gain(first.major_faults, reading.major_faults) / seconds,
        evicted_bytes=evicted / seconds,
    )
    return replace(state, symptoms=symptoms, window_s=now, first=reading, evicted_bytes=0)


def _gain(before: int | None, after: int | None) -> int:
    return 0 if before is None or after is None else max(0, after - before)


def _remember(state: PressureState, reading: Reading, now: float) -> PressureState:
    """Track the least available memory, over the last complete wait and over the current one."""
    if now - state.lowest_since_s >= state.wait_s:
        lowest, available = min(state.lowest_bytes, reading.available_bytes), reading.available_bytes
        return replace(state, before_bytes=lowest, lowest_bytes=available, lowest_since_s=now)
    return replace(state, lowest_bytes=min(state.lowest_bytes, reading.available_bytes))


def _shrink(
    state: PressureState, level: Level, reading: Reading, holding: Holding, now: float
) -> tuple[PressureState, Action]:
    missing = reserve_bytes(reading.total_bytes) - room_bytes(reading, holding)
    layers = 1
    if room_bytes(reading, holding) < 0:
        layers = math.ceil(missing / holding.layer_bytes)
    elif level == "high":
        layers = max(1, holding.shrinkable // 4)
    # What was counted so far was before this: the next decision by symptoms comes after a whole window.
    state = replace(state, symptoms=Symptoms(), window_s=now, first=reading, evicted_bytes=0, stuck_s=None)
    return state, Shrink(min(layers, holding.shrinkable))


def _ask(state: PressureState, reading: Reading, holding: Holding, now: float) -> tuple[PressureState, Action]:
    if state.stuck_s is None:
        return replace(state, stuck_s=now), Hold()
    asked = state.asked_s is not None and now - state.asked_s < REPLAN_AGAIN_S
    if asked or now - state.stuck_s < REPLAN_AFTER_S:
        return state, Hold()
    missing = reserve_bytes(reading.total_bytes) - room_bytes(reading, holding)
    return replace(state, asked_s=now), Replan(max(missing, holding.layer_bytes))


def _calm(state: PressureState, reading: Reading, holding: Holding, now: float) -> tuple[PressureState, Action]:
    state = replace(state, stuck_s=None)
    if state.pressed_s is None or now - state.pressed_s >= LINGER_S:
        state = replace(state, level="calm")
    if state.wait_s > WAIT_S and now - state.wait_since_s >= CALM_WAITS * state.wait_s:
        state = replace(state, wait_s=max(state.wait_s / 2, WAIT_S), wait_since_s=now)
    if holding.growable == 0:
        return state, Hold()
    if holding.returned_bytes:
        fits = room_bytes(reading, holding) >= holding.returned_bytes + reserve_bytes(reading.total_bytes)
        return state, Grow() if fits and _is_rested(state, now) else Hold()
    if not _may_grow(state, now):
        return state, Hold()
    assert state.before_bytes is not None
    # Where available memory excludes what we hold, so does its minimum: we held the same then.
    lowest = replace(reading, available_bytes=min(state.before_bytes, state.lowest_bytes))
    if room_bytes(lowest, holding) < holding.layer_bytes + reserve_bytes(reading.total_bytes):
        return state, Hold()
    return replace(state, grown_s=now), Grow()


def _may_grow(state: PressureState, now: float) -> bool:
    settled = state.grown_s is None or now - state.grown_s >= GROW_EVERY_S
    return _is_rested(state, now) and settled and state.before_bytes is not None


def _is_rested(state: PressureState, now: float) -> bool:
    return state.pressed_s is None or now - state.pressed_s >= state.wait_s


class PressureWatch:
    """The one entry point of the engine's loader thread.

    ``read`` takes a reading (``readings.Sources.read``); tests pass their own.
    """

    def __init__(self, read: Callable[[], Reading], *, interval_s: float = INTERVAL_S) -> None:
        self._read, self._interval_s = read, interval_s
        self._state: PressureState | None = None
        self._read_s = -math.inf
        self._evicted_bytes = 0

    @property
    def level(self) -> Level:
        """The level to show: that of the last symptoms, for ``LINGER_S`` after them."""
        return "calm" if self._state is None else self._state.level

    def sample(self, now: float, holding: Holding) -> Action:
        """Decide what to do at ``now`` (seconds, any monotonic scale). Call it at layer boundaries and, idle, once a
        second.

        Within ``INTERVAL_S`` of the last reading it costs nothing. ``Shrink`` applies now, at the next layer boundary;
        ``Grow`` to the next layer that streams, which then stays instead of being released; ``Replan`` goes to the
        daemon as ``ring.messages.ProcessMemoryLow``. The action counts as carried out: the next call passes the holding
        after it.
        """
        self._evicted_bytes += holding.evicted_bytes
        if now - self._read_s < self._interval_s:
            return Hold()
        self._read_s = now
        reading = self._read()
        if self._state is None:
            self._state = begin(reading, now)
        holding, self._evicted_bytes = replace(holding, evicted_bytes=self._evicted_bytes), 0
        self._state, action = decide(self._state, reading, holding, now)
        return action
