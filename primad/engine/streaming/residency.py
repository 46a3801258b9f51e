"""Which of a device's layers stay in memory, which stream, and what is to be held when: values in, values out.

A *unit* is one layer of a window, or the output matrix. Units stand in the order in which a step visits them, the windows of
all rounds one behind the other; a token visits each once, so the order is a circle. Of each unit a *part* streams, all of
it, some or nothing; the rest stays. The parts pass through ``read_ahead_bytes``: at each place of the circle the next
parts that fit together are wanted, and of the part behind them the beginning, up to the last place where a unit may be
parted; each is released when its unit was computed and is not among them, and the loader fills up what is wanted,
nearest first. That the loader may run ahead by bytes and not by whole rounds makes the same rule good for any number of
rounds: while other devices compute, it fills for this device's next window.

A part is read at most once a lap of the circle, and nothing is read twice before it was used; a lap therefore reads no more
than the parts together, which are the overflow, rounded up to the next place where a unit may be parted, and what is read
ahead. If all parts fit into ``read_ahead_bytes``, nothing is released and nothing is read; where all but some of one
do, only that is read again.

The same share of each layer streams (``Spread``): between two parts resident weights are computed while the disk works,
and the part of a layer is a small buffer where a whole one is a large one, which leaves more room for what stays. Two parts
need not fit: the one that is computed must, and beside it as much of the next one as the disk reads meanwhile. (Measured in
the same memory on 6 layers of 60 MB, most of which stream: room for 1.5 parts gave 4.4 tokens/s, for 1.2 parts 4.8, and for
one, which left the most to stay, 5.1. With 16 and 28 layers it made no difference.)
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

LARGE: Final = 1.5
"""A unit so many times the median is large."""
_STEPS: Final = 1 << 14
"""Shares of the layers, and then of the large units, that are tried."""


@dataclass(frozen=True)
class Residency:
    """``sizes`` are bytes of the units in visiting order; ``parts`` are the bytes of each that stream, from and to.

    At most ``read_ahead_bytes`` of what streams is held, or one part where that is larger. Where layers stream by expert,
    their experts are no part of the units but share a pool of ``pool_bytes``; ``layer_pool_bytes`` are those of one layer,
    the least that a pool holds. Both are 0 without. Reading may stop at the ``cuts`` of a unit, bytes within it in ascending
    order; without any a part is read as a whole.
    """

    sizes: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    read_ahead_bytes: int
    pool_bytes: int = 0
    layer_pool_bytes: int = 0
    cuts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.parts) == len(self.sizes)
        assert all(0 <= begin <= end <= size for (begin, end), size in zip(self.parts, self.sizes, strict=True))
        assert self.read_ahead_bytes >= 0
        assert len(self.cuts) in (0, len(self.sizes))

    @classmethod
    def whole(cls, sizes: Sequence[int], streamed: Collection[int], read_ahead_bytes: int) -> Residency:
        """Units that stream as a whole, those in ``streamed``."""
        assert all(0 <= unit < len(sizes) for unit in streamed)
        parts = tuple((0, size if unit in streamed else 0) for unit, size in enumerate(sizes))
        return cls(tuple(sizes), parts, read_ahead_bytes)

    @cached_property
    def part_sizes(self) -> tuple[int, ...]:
        """Bytes of each unit that stream."""
        return tuple(end - begin for begin, end in self.parts)

    @cached_property
    def streamed(self) -> frozenset[int]:
        """The units of which something streams."""
        return frozenset(unit for unit, size in enumerate(self.part_sizes) if size)

    @property
    def resident(self) -> tuple[int, ...]:
        """The units that stay as a whole, in visiting order."""
        return tuple(unit for unit in range(len(self.sizes)) if unit not in self.streamed)

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay."""
        return sum(self.sizes) - self.streamed_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes that stream."""
        return sum(self.part_sizes)

    @property
    def held_bytes(self) -> int:
        """The most that is in memory at a time."""
        return self.resident_bytes + min(self.streamed_bytes, self.room_bytes) + self.pool_bytes

    @cached_property
    def streams(self) -> bool:
        """Whether a lap reads anything."""
        return self.streamed_bytes > self.room_bytes

    @property
    def room_bytes(self) -> int:
        """What is held at most of what streams."""
        return max(self.read_ahead_bytes, max(self.part_sizes, default=0))

    @property
    def read_bytes(self) -> int:
        """Bytes that a lap reads when every unit is visited once, in order."""
        if not self.streams:
            return 0
        more = self.streamed_bytes - self.read_ahead_bytes
        return sum(size - self._beginning(unit, size - more) for unit, size in enumerate(self.part_sizes))

    def wanted(self, position: int) -> dict[int, int]:
        """How much to hold of which parts, from their beginnings, while a step stands at unit ``position``.

        The one that is needed first is in front, all of it; only the last one may be wanted in part.
        """
        count, room = len(self.sizes), self.read_ahead_bytes
        found: dict[int, int] = {}
        for unit in ((position + i) % count for i in range(count)):
            size = self.part_sizes[unit]
            if not size:
                continue
            if found and size > room:
                if beginning := self._beginning(unit, room):
                    found[unit] = beginning
                break
            found[unit] = size
            room -= size
        return found

    def _beginning(self, unit: int, room: int) -> int:
        """How much of a part, which is larger, to hold in so much room."""
        if room <= 0 or not self.cuts:
            return 0
        begin, cuts = self.parts[unit][0], self.cuts[unit]
        place = bisect.bisect_right(cuts, begin + room)
        return max(0, cuts[place - 1] - begin) if place else 0


@dataclass(frozen=True, slots=True)
class Spread:
    """Units of ``sizes`` that may be parted at ``cuts``, bytes within each in ascending order.

    ``read_ahead_bytes`` are held of what streams, or the largest part where that is more.
    ``in_groups``: what lies before the first cut of a unit and behind its last one stays in any case, as the system gives it
    back only with what is beside it; else all of a unit may stream.
    """

    sizes: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    read_ahead_bytes: int
    in_groups: bool = False

    def keeping(self, resident_bytes: int) -> Residency:
        """The most that stays of at most ``resident_bytes``; all streams where not even that little can.

        The same share of each layer streams, as near as the cuts allow; units much larger than the others (an output
        matrix) only when all layers do, since each would take as much room to pass through.
        """
        return self._first(lambda found: found.resident_bytes <= resident_bytes)

    def within(self, held_bytes: int) -> Residency:
        """The most that stays where ``held_bytes`` may be held in all; all streams where that is not enough."""
        return self._first(lambda found: found.held_bytes <= held_bytes)

    def _first(self, fits: Callable[[Residency], bool]) -> Residency:
        whole = self._at(0)
        if fits(whole):
            return whole
        return self._at(bisect.bisect_left(range(2 * _STEPS), True, 1, key=lambda step: fits(self._at(step))))

    def _at(self, step: int) -> Residency:
        """All with a share of ``step`` of ``_STEPS``, those beyond 1 of the large units."""
        ordinary = LARGE * statistics.median(self.sizes)
        shares = min(step, _STEPS) / _STEPS, max(step - _STEPS, 0) / _STEPS
        parts: list[tuple[int, int]] = []
        due = [0.0, 0.0]
        for size, cuts in zip(self.sizes, self.cuts, strict=True):
            is_large = size > ordinary
            due[is_large] += shares[is_large] * size
            maximum = (cuts[0], cuts[-1]) if self.in_groups and len(cuts) > 1 else (0, size)
            part = maximum if shares[is_large] == 1 else _part(maximum, cuts, due[is_large])
            parts.append(part)
            due[is_large] -= part[1] - part[0]
        return Residency(self.sizes, tuple(parts), self.read_ahead_bytes, cuts=self.cuts)


def _part(maximum: tuple[int, int], cuts: Sequence[int], due: float) -> tuple[int, int]:
    """The part of a unit that is nearest to ``due`` bytes: up to its last cut, so that what is behind shares no page."""
    options = [(0, 0), maximum]
    if len(cuts) > 1:
        place = bisect.bisect_left(cuts, cuts[-1] - due, 0, len(cuts) - 1)
        options += [(cuts[i], cuts[-1]) for i in (place - 1, place) if 0 <= i < len(cuts) - 1]
    return min(options, key=lambda option: abs(option[1] - option[0] - due))


def ladder(base: Residency, spread: Spread | None) -> tuple[Residency, ...]:
    """``base`` and what streams instead under more and more pressure, down to nothing resident.

    Every level holds less than the one before it, by about a layer. Without ``spread`` units stream as a whole: first a pool
    of experts gives back a layer's bytes at a time; then one more unit streams, taken from the middle of the longest run of
    resident ones, or as many more as it takes until less is held.
    """
    levels, now = [base], base
    if spread is not None:
        held, layer = base.held_bytes, int(statistics.median(base.sizes))
        while now.resident_bytes and held > 0:  # of some spreads a little stays in any case
            held -= max(layer, 1)
            now = spread.within(held)
            if now.held_bytes < levels[-1].held_bytes:
                levels.append(now)
        return tuple(levels)
    while now.pool_bytes > now.layer_pool_bytes:
        now = replace(now, pool_bytes=max(now.pool_bytes - now.layer_pool_bytes, now.layer_pool_bytes))
        levels.append(now)
    while now.resident:
        unit = _next_to_stream(now)
        now = replace(now, parts=(*now.parts[:unit], (0, now.sizes[unit]), *now.parts[unit + 1 :]))
        now = replace(now, read_ahead_bytes=max(base.read_ahead_bytes, two_slots(now.part_sizes)))
        if now.held_bytes < levels[-1].held_bytes:
            levels.append(now)
    return tuple(levels)


def by_expert(sizes: Sequence[int], experts: Mapping[int, int], held_bytes: int) -> Residency:
    """What is held of units that stream by expert, of ``experts`` bytes each, where ``held_bytes`` may be held in all.

    The experts of all such units share one pool: the ones used most of each layer stay, which saves more than all those of
    some layers. What is left of the units stays resident, as far as the pool then holds the experts of one layer, which a
    prompt needs at a time.
    """
    layer = max(experts.values())
    levels = ladder(Residency.whole([size - experts.get(unit, 0) for unit, size in enumerate(sizes)], (), 0), None)
    room = [held_bytes - level.held_bytes for level in levels]
    level, pool = next(
        ((level, left) for level, left in zip(levels, room, strict=True) if left >= layer), (levels[-1], layer)
    )
    return replace(level, pool_bytes=min(pool, sum(experts.values())), layer_pool_bytes=layer)


def two_slots(parts: Sequence[int]) -> int:
    """Bytes to hold ahead so that the next part of so many bytes can be read while one is computed."""
    found = [size for size in parts if size]
    return max((sum(pair) for pair in pairwise([*found, *found[:1]])), default=0) if len(found) > 1 else sum(found)


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
