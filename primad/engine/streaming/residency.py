"""Decides which of a device's layers stay in memory, which stream, and what is held when: values in, values out.

A *unit* is one layer of a window, or the output matrix. Units are in the order in which a step visits them, the windows
of all rounds one after the other; a token visits each once, so the order is a circle. Of each unit a *part* streams:
all of it, some or nothing; the rest stays. The parts pass through ``read_ahead_bytes``: at each position of the circle
the next parts that fit together are wanted, and of the part after them the beginning, up to the last place where the
unit may be divided. A part is released when its unit was computed and it is not wanted; the loader reads what is
wanted, nearest first. Since the loader reads ahead by bytes and not by whole rounds, the same rule suits any number of
rounds: while other devices compute, it reads for this device's next window.

A part is read at most once in a pass around the circle, and not again before it was used. A pass therefore reads no
more than all parts together, which are the overflow, rounded up to the next place where a unit may be divided, and the
read-ahead. If all parts fit into ``read_ahead_bytes``, nothing is released or read; if all but some bytes of one do,
only these are read again.

The same share of each layer streams (``Spread``): between two parts, resident weights are computed while the disk
works, and a part of a layer needs a smaller buffer than a whole one, which leaves more room for what stays. Two parts
need not fit: the one that is computed must, and as much of the next one as the disk reads meanwhile. (Measured in the
same memory on 6 layers of 60 MB, most of which stream: room for 1.5 parts gave 4.4 tokens/s, for 1.2 parts 4.8, and for
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
"""A unit of more than this multiple of the median size is large."""
_STEPS: Final = 1 << 14
"""Number of shares tried for the layers, and then for the large units."""


@dataclass(frozen=True)
class Residency:
    """``sizes`` are bytes of the units in visiting order; ``parts`` are the byte ranges of each that stream.

    At most ``read_ahead_bytes`` of streamed bytes are held, or the largest part if that is more. Experts of layers that
    stream by expert are not part of the units but share a pool of ``pool_bytes``; ``layer_pool_bytes`` are those of one
    layer, the minimum of a pool. Without such layers both are 0. Reading may stop at the ``cuts`` of a unit, offsets in
    ascending order; without cuts a part is read as a whole.
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
        """Return a residency where the units in ``streamed`` stream as a whole."""
        assert all(0 <= unit < len(sizes) for unit in streamed)
        parts = tuple((0, size if unit in streamed else 0) for unit, size in enumerate(sizes))
        return cls(tuple(sizes), parts, read_ahead_bytes)

    @cached_property
    def part_sizes(self) -> tuple[int, ...]:
        """Bytes of each unit that stream."""
        return tuple(end - begin for begin, end in self.parts)

    @cached_property
    def streamed(self) -> frozenset[int]:
        """The units that stream at least partly."""
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
        """The most that is in memory at any time."""
        return self.resident_bytes + min(self.streamed_bytes, self.room_bytes) + self.pool_bytes

    @cached_property
    def streams(self) -> bool:
        """Whether a pass reads anything."""
        return self.streamed_bytes > self.room_bytes

    @property
    def room_bytes(self) -> int:
        """The most that is held of what streams."""
        return max(self.read_ahead_bytes, max(self.part_sizes, default=0))

    @property
    def read_bytes(self) -> int:
        """Bytes that a pass reads when every unit is visited once, in order."""
        if not self.streams:
            return 0
        more = self.streamed_bytes - self.read_ahead_bytes
        return sum(size - self._beginning(unit, size - more) for unit, size in enumerate(self.part_sizes))

    def wanted(self, position: int) -> dict[int, int]:
        """Return how much to hold of which parts, from their beginnings, while a step is at unit ``position``.

        They are in the order of need. The first is wanted as a whole; only the last may be wanted in part.
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
        """Return how much of a part that is larger than ``room`` to hold in it."""
        if room <= 0 or not self.cuts:
            return 0
        begin, cuts = self.parts[unit][0], self.cuts[unit]
        place = bisect.bisect_right(cuts, begin + room)
        return max(0, cuts[place - 1] - begin) if place else 0


@dataclass(frozen=True, slots=True)
class Spread:
    """Units of ``sizes`` that may be divided at ``cuts``, offsets within each in ascending order.

    ``read_ahead_bytes`` are held of what streams, or the largest part if that is more. With ``in_groups``, what is
    before the first cut of a unit and after its last one always stays, as the system releases it only together with its
    neighbours; else all of a unit may stream.
    """

    sizes: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    read_ahead_bytes: int
    in_groups: bool = False

    def keeping(self, resident_bytes: int) -> Residency:
        """Return the residency that keeps the most, of at most ``resident_bytes``; all streams where that is not
        possible.

        The same share of each layer streams, as near as the cuts allow. Units much larger than the others (an output
        matrix) stream only when all layers do, since each would need as much room to pass through.
        """
        return self._first(lambda found: found.resident_bytes <= resident_bytes)

    def within(self, held_bytes: int) -> Residency:
        """Return the residency that keeps the most with ``held_bytes`` in all; all streams where that is not enough."""
        return self._first(lambda found: found.held_bytes <= held_bytes)

    def _first(self, fits: Callable[[Residency], bool]) -> Residency:
        whole = self._at(0)
        if fits(whole):
            return whole
        return self._at(bisect.bisect_left(range(2 * _STEPS), True, 1, key=lambda step: fits(self._at(step))))

    def _at(self, step: int) -> Residency:
        """Return all units with a share of ``step`` of ``_STEPS``; beyond 1 it applies to the large units."""
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
    """Return the part of a unit nearest to ``due`` bytes: up to its last cut, so that what follows shares no page."""
    options = [(0, 0), maximum]
    if len(cuts) > 1:
        place = bisect.bisect_left(cuts, cuts[-1] - due, 0, len(cuts) - 1)
        options += [(cuts[i], cuts[-1]) for i in (place - 1, place) if 0 <= i < len(cuts) - 1]
    return min(options, key=lambda option: abs(option[1] - option[0] - due))


def ladder(base: Residency, spread: Spread | None) -> tuple[Residency, ...]:
    """Return ``base`` and the residencies for more and more pressure, down to nothing resident.

    Every level holds less than the one before it, by about a layer. Without ``spread`` units stream as a whole: first a
    pool of experts shrinks by a layer's bytes at a time; then one more unit streams, from the middle of the longest run
    of resident ones, or as many more as it takes until less is held.
    """
    levels, now = [base], base
    if spread is not None:
        held, layer = base.held_bytes, int(statistics.median(base.sizes))
        while now.resident_bytes and held > 0:  # with some spreads a little always stays
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
    """Return what is held of units that stream by expert, with ``experts`` bytes each, in ``held_bytes`` in all.

    The experts of all such units share one pool: each layer's most used ones stay, which saves more than all those of
    some layers. The rest of the units stays resident, as far as the pool can still hold the experts of one layer, which
    prefill needs together.
    """
    layer = max(experts.values())
    levels = ladder(Residency.whole([size - experts.get(unit, 0) for unit, size in enumerate(sizes)], (), 0), None)
    room = [held_bytes - level.held_bytes for level in levels]
    level, pool = next(
        ((level, left) for level, left in zip(levels, room, strict=True) if left >= layer), (levels[-1], layer)
    )
    return replace(level, pool_bytes=min(pool, sum(experts.values())), layer_pool_bytes=layer)


def two_slots(parts: Sequence[int]) -> int:
    """Return the read-ahead that lets the next of ``parts`` be read while one is computed."""
    found = [size for size in parts if size]
    return max((sum(pair) for pair in pairwise([*found, *found[:1]])), default=0) if len(found) > 1 else sum(found)


def _next_to_stream(residency: Residency) -> int:
    """Return the resident unit in the middle (by bytes) of the longest run of resident ones of the circle.

    Units much larger than the others (an output matrix) come last: each would need as much room to pass through.
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
