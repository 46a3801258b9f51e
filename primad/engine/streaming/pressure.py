"""How much of this device's memory its ring process keeps, and when it gives some back: values in, values out.

The owner's programs come first. What they allocate has to come from somewhere, and what hurts them, and us, is where the
kernel takes it: from their pages, from ours that are needed within the second, or from swap. Our weights are clean pages
of files. They are no pressure by themselves, since the kernel may drop them for nothing; but those that it drops come
back by page faults, a quarter as fast as they are read ahead, and it chooses those that were used longest ago, which in a
scan that goes round are the ones that are needed next. So the ring process gives back first, whole layers of its choice.

**Room** is what others can still allocate before the kernel has to take what we hold: memory that is free or file cache,
less what we hold or are to hold of files. It says at once, within one token, that somebody took memory:

* Room below 0: what we want to hold does not fit any more. Shrink by as many layers as it takes to have ``reserve`` again.
* Room enough (``TIGHT_SHARE`` of all memory): whatever goes on on this machine, it is not for want of what we hold. A
  cgroup that thrashes in its own limit shows in the machine's figures, and idle pages that the kernel took back show as
  evicted; neither makes this device slower for it.
* Between, room misleads: file pages of the owner's programs count as free, though they are in use. There symptoms decide:
  tasks that waited for memory (PSI), pages that came back from swap, our layers that went missing, our page faults.

Where the system judges for itself (macOS, Windows) it is believed in any case.

It grows back one layer at a time, and only into room that was there throughout for ``wait_s``: a program that takes and
frees memory again and again keeps it. Memory that this process gave back itself a moment ago is nobody's yet, and needs
wait only after pressure. Pressure soon after we grew doubles the wait, a long calm halves it.

When nothing is left to shrink and pressure stays, the head is asked for another plan (``Replan``), not again for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

Level = Literal["calm", "some", "high"]

INTERVAL_S: Final = 0.1
"""Readings are taken no more often. A token of a model that streams takes longer, and a program that takes memory as fast
as it can takes some 200 MB in that time, which the kernel finds among our clean pages without our help."""
WINDOW_S: Final = 1.0
"""Over so long symptoms are counted: that is many tokens or a slow one, and short beside ``REPLAN_AFTER_S``."""
RESERVE_SHARE: Final = 0.01
MIN_RESERVE_BYTES: Final = 16 << 20
MAX_RESERVE_BYTES: Final = 256 << 20
"""What is left free when layers are given back or taken again: the kernel's own needs grow with the machine (it begins to
reclaim at about 1 % free), but no token allocates more than this."""
TIGHT_SHARE: Final = 0.05
"""With more room than this share of all memory symptoms have other causes. The programs of a desktop have file pages in use
of about that size."""
SOME_STALL: Final = 0.10
"""So much of the time some task waited for memory. Android's low memory killer ends programs at 0.07 to 0.2 of a second;
a machine at rest is far below 0.01."""
HIGH_STALL: Final = 0.40
FULL_STALL: Final = 0.10
"""So much of the time no task could go on for want of memory: that is felt by everybody."""
SWAPPED_IN_BYTES_PER_S: Final = 1 << 20
"""Pages that came back from swap were needed; single ones, of programs that wake up, are no pressure."""
HIGH_SWAPPED_IN_BYTES_PER_S: Final = 16 << 20
MAJOR_FAULTS_PER_S: Final = 300.0
"""Each is a read of its own, of about 0.3 ms from a good disk: a tenth of the time, as with ``SOME_STALL``."""
LINGER_S: Final = 5.0
"""A level is shown for so long after its last symptom."""
WAIT_S: Final = 5.0
"""Room must have been there for so long, at least, to be grown into."""
MAX_WAIT_S: Final = 300.0
GROW_EVERY_S: Final = 1.0
"""Between two layers, so that symptoms of the first are seen before the second."""
RELAPSE_S: Final = 30.0
"""Pressure this soon after we grew (or within twice the wait) is put down to it."""
CALM_WAITS: Final = 4
"""After calm of so many times the wait it is halved."""
REPLAN_AFTER_S: Final = 5.0
"""A burst is over by then; another plan costs seconds, or minutes where layers must be fetched."""
REPLAN_AGAIN_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds for which some, and for which all, tasks waited for memory since the kernel began to count (PSI)."""

    some_s: float
    full_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the system says of memory at a moment; None for what it does not say.

    ``total_bytes`` and ``available_bytes`` are those of the machine or the tightest cgroup. What is available includes all
    clean file pages, those that are in use among them, where ``counts_mapped``; else pages that a process has mapped and
    used are not in it. ``stalls`` (of the machine, of our cgroup), ``swapped_in_bytes`` and ``major_faults`` (of this
    process) count from any start. ``verdict`` is the system's own.
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

    ``held_bytes`` is what it holds, or is to hold, of weights in pages that the kernel may take: resident layers and those
    read ahead, without locked ones. ``layer_bytes`` (more than 0) is what one layer more or less makes of a difference, at
    most. So many layers are ``shrinkable`` and ``growable``; the next of these takes ``returned_bytes`` of what this process
    gave back a moment ago and counts on, 0 if it takes others. ``evicted_bytes`` went missing since the last time.
    """

    held_bytes: int
    layer_bytes: int
    shrinkable: int
    growable: int
    returned_bytes: int
    evicted_bytes: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Go on as it is."""


@dataclass(frozen=True, slots=True)
class Shrink:
    """Let ``layers`` more stream, now."""

    layers: int


@dataclass(frozen=True, slots=True)
class Grow:
    """Let one more layer stay."""


@dataclass(frozen=True, slots=True)
class Replan:
    """Nothing is left to shrink: this device needs ``needed_bytes`` (more than 0) that only another plan can give back."""

    needed_bytes: int


Action = Hold | Shrink | Grow | Replan


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """What came about in a window, a second: shares of time, bytes, faults."""

    some: float = 0.0
    full: float = 0.0
    swapped_in_bytes: float = 0.0
    evicted_bytes: float = 0.0
    major_faults: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureState:
    """All that the policy remembers. Times are on the scale of ``now``; None for what was not yet.

    A window of symptoms began at ``window_s`` with ``first`` and lost ``evicted_bytes`` so far; ``symptoms`` are those of
    the last whole one. ``pressed_s`` is the last moment with pressure, ``stuck_s`` the first of those in a row with nothing
    left to shrink. ``lowest_bytes`` is the least that was available since ``lowest_since_s``, ``before_bytes`` in the time
    of ``wait_s`` or more before that.
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
    """The state at the first reading."""
    return PressureState(
        window_s=now,
        first=reading,
        wait_since_s=now,
        lowest_bytes=reading.available_bytes,
        lowest_since_s=now,
    )


def reserve_bytes(total_bytes: int) -> int:
    """What is to be left free of so much memory."""
    return min(max(int(total_bytes * RESERVE_SHARE), MIN_RESERVE_BYTES), MAX_RESERVE_BYTES)


def room_bytes(reading: Reading, holding: Holding) -> int:
    """What others can allocate before the kernel has to take what we hold; negative when it must already."""
    return reading.available_bytes - (holding.held_bytes if reading.counts_mapped else 0)


def decide(state: PressureState, reading: Reading, holding: Holding, now: float) -> tuple[PressureState, Action]:
    """What becomes of ``state`` by ``reading`` at ``now``, and what is to be done; it counts as done."""
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
    """The level of pressure as of now."""
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
    """The symptoms of a window that is over."""
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
    """The least that was available, over the wait that is over and over the one that runs."""
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
    # What was counted until now was before this: the next judgement by symptoms is a window away.
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
    # Where what we hold is not in what is available, nor is it in the least of it: it was the same before.
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

    ``read`` takes a reading (``readings.Sources.read``); tests give their own.
    """

    def __init__(self, read: Callable[[], Reading], *, interval_s: float = INTERVAL_S) -> None:
        self._read, self._interval_s = read, interval_s
        self._state: PressureState | None = None
        self._read_s = -math.inf
        self._evicted_bytes = 0

    @property
    def level(self) -> Level:
        """The level to show: the last one with symptoms, for ``LINGER_S`` after them."""
        return "calm" if self._state is None else self._state.level

    def sample(self, now: float, holding: Holding) -> Action:
        """What to do at ``now`` (seconds, any monotonic scale). Call it at layer boundaries and, idle, about once a second.

        It costs nothing within ``INTERVAL_S`` of the last reading. ``Shrink`` is for now, at the next layer boundary;
        ``Grow`` for the next layer that streams, which then stays instead of being released; ``Replan`` goes to the daemon
        as ``ring.messages.ProcessMemoryLow``. The action counts as carried out: the next call gives the holding after it.
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
