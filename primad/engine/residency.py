"""Which of a device's layers stay in memory, which stream, and what is to be held when: values in, values out.

A *unit* is one layer of a window, or the output matrix: the grain of residency. Units stand in the order in which a step
visits them, the windows of all rounds one behind the other; a token visits each once, so the order is a circle. Resident
units are always held. The streamed ones pass through ``ahead_bytes``: at each place of the circle the next streamed units
that fit together are wanted, each is released when it was computed and is not among them, and the loader fills up what is
wanted, nearest first. That the loader may run ahead by bytes and not by whole rounds makes the same rule good for any
number of rounds: while other devices compute, it fills for this device's next window.

A unit is read at most once a lap of the circle, and none is read twice before it was used; a lap therefore reads no more
than the streamed units together, which are the overflow, rounded up to whole units, and the slots. If all streamed units
fit into ``ahead_bytes``, nothing is released and nothing is read.

Streamed units are spread evenly, so that between two of them resident ones are computed while the disk works.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

LARGE: Final = 1.5
"""A unit so many times the median is large."""


@dataclass(frozen=True, slots=True)
class Residency:
    """``sizes`` are bytes of the units in visiting order; ``streamed`` are indices of those that stream.

    At most ``ahead_bytes`` of streamed units are held, or one unit where that is larger. Where layers stream by expert,
    their experts are no part of the units but share a pool of ``pool_bytes``; ``layer_pool_bytes`` are those of one layer,
    the least that a pool holds. Both are 0 without.
    """

    sizes: tuple[int, ...]
    streamed: frozenset[int]
    ahead_bytes: int
    pool_bytes: int = 0
    layer_pool_bytes: int = 0

    def __post_init__(self) -> None:
        assert all(0 <= unit < len(self.sizes) for unit in self.streamed)
        assert self.ahead_bytes >= 0

    @property
    def resident(self) -> tuple[int, ...]:
        """The resident units in visiting order."""
        return tuple(unit for unit in range(len(self.sizes)) if unit not in self.streamed)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the resident units."""
        return sum(self.sizes[unit] for unit in self.resident)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the streamed units."""
        return sum(self.sizes[unit] for unit in self.streamed)

    @property
    def held_bytes(self) -> int:
        """The most that is in memory at a time."""
        return self.resident_bytes + min(self.streamed_bytes, self._room_bytes) + self.pool_bytes

    @property
    def streams(self) -> bool:
        """Whether a lap reads anything."""
        return self.streamed_bytes > self._room_bytes

    @property
    def _room_bytes(self) -> int:
        return max(self.ahead_bytes, max((self.sizes[unit] for unit in self.streamed), default=0))

    @property
    def read_bytes(self) -> int:
        """Bytes that a lap reads when every unit is visited once, in order."""
        return self.streamed_bytes if self.streams else 0

    def wanted(self, position: int) -> tuple[int, ...]:
        """The streamed units to hold while a step stands at unit ``position``, the one that is needed first in front."""
        count = len(self.sizes)
        chosen: list[int] = []
        held = 0
        for unit in ((position + i) % count for i in range(count)):
            if unit not in self.streamed:
                continue
            if chosen and held + self.sizes[unit] > self.ahead_bytes:
                break
            chosen.append(unit)
            held += self.sizes[unit]
        return tuple(chosen)


def ladder(base: Residency) -> tuple[Residency, ...]:
    """``base`` and what streams instead under more and more pressure, down to nothing resident.

    Every rung holds less than the one before it. First a pool of experts gives back a layer's bytes at a time; then one more
    unit streams, taken from the middle of the longest run of resident ones, or as many more as it takes until less is held.
    """
    rungs, now = [base], base
    while now.pool_bytes > now.layer_pool_bytes:
        now = replace(now, pool_bytes=max(now.pool_bytes - now.layer_pool_bytes, now.layer_pool_bytes))
        rungs.append(now)
    while now.resident:
        now = replace(now, streamed=now.streamed | {_next_to_stream(now)})
        now = replace(now, ahead_bytes=max(base.ahead_bytes, two_slots(now.sizes, now.streamed)))
        if now.held_bytes < rungs[-1].held_bytes:
            rungs.append(now)
    return tuple(rungs)


def by_expert(whole: Residency, experts: Mapping[int, int]) -> Residency | None:
    """What ``whole`` becomes where units stream by expert, of ``experts`` bytes each; None where that is of no use.

    No more is held than before. The experts of all such units share one pool, also of those that would be resident: the ones
    used most of each layer stay, which saves more than all those of some layers. What is left of the units stays resident,
    as far as the pool then holds the experts of one layer, which a prompt needs at a time.
    """
    if not whole.streams or not whole.streamed & experts.keys():
        return None
    layer = max(experts.values())
    sizes = tuple(size - experts.get(unit, 0) for unit, size in enumerate(whole.sizes))
    streamed = whole.streamed - experts.keys()
    rungs = ladder(Residency(sizes, streamed, two_slots(sizes, streamed)))
    room = [whole.held_bytes - rung.held_bytes for rung in rungs]
    rung, pool = next(
        ((rung, left) for rung, left in zip(rungs, room, strict=True) if left >= layer), (rungs[-1], layer)
    )
    return replace(rung, pool_bytes=min(pool, sum(experts.values())), layer_pool_bytes=layer)


def two_slots(sizes: Sequence[int], streamed: Collection[int]) -> int:
    """Bytes to hold ahead so that the next unit can be read while one is computed."""
    largest = sorted((sizes[unit] for unit in streamed), reverse=True)[:2]
    return sum(largest)


def ahead_bytes(sizes: Sequence[int], streamed: Collection[int], layers: Collection[int], slots: int) -> int:
    """Bytes that ``slots`` buffers of the size of the largest streamed one of ``layers`` hold.

    An output matrix that streams and is larger than that takes the place of one of two.
    """
    largest = max((sizes[unit] for unit in streamed if unit in layers), default=0)
    return max(slots * largest, two_slots(sizes, streamed)) if streamed else 0


def _next_to_stream(residency: Residency) -> int:
    """The resident unit in the middle (by bytes) of the longest run of resident ones of the circle.

    Units much larger than the others (an output matrix) come last: each would take as much room to pass through.
    """
    sizes, count = residency.sizes, len(residency.sizes)
    ordinary = LARGE * statistics.median(sizes)
    candidates = [unit for unit in residency.resident if sizes[unit] <= ordinary] or residency.resident
    first = min(residency.streamed, default=0)
    runs: list[list[int]] = [[]]
    for unit in ((first + i) % count for i in range(count)):
        if unit in candidates:
            runs[-1].append(unit)
        elif unit in residency.streamed:
            runs.append([])
    run = max(runs, key=lambda run: sum(sizes[unit] for unit in run))
    total, before = sum(sizes[unit] for unit in run), 0
    for unit in run:
        before += sizes[unit]
        if 2 * before >= total:
            break
    return unit
