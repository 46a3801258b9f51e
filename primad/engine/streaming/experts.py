"""Which experts of the layers that stream by expert stay in memory, leave it, and are read ahead: values in, values out.

The experts of all these layers share one pool of bounded bytes. An expert that the router picks has to be there; what was
picked least often leaves for it, be it one that was picked just now. So the experts used most stay, and neither a rare one
nor a prompt, whose rows together pick nearly all, drives them out for good. Of equal bytes in the pool the one worth most is
the one picked most often, since holding it saves most reads a token; that needs no regard to layers or sizes.

How often an expert is picked is estimated online: picks are counted, and earlier rows count less with every row. Before
anything was counted all experts of a layer are taken for alike. An expert of the next layer is read ahead where that is
more likely needed than not: because nearly every row picks it, because there are many rows, or because the step before
picked it and picks are seen to repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

DECAY: Final = 0.999
"""What a row's picks still count one row later: half after 700 rows."""
PRIOR_ROWS: Final = 16.0
"""Rows in which all experts were picked alike, taken for granted before anything is counted."""
REPEAT_DECAY: Final = 0.95
"""What a step says about repeated picks still counts one step later."""
LIKELY: Final = 0.5
"""An expert that is needed with no smaller probability is worth reading before it is picked."""

Picks = NDArray[np.int32]
"""The experts that each row picked, shape (rows, experts a row)."""


class ExpertUsage:
    """How often the rows of the past picked each of the ``count`` experts of one layer."""

    def __init__(self, count: int) -> None:
        self.counts: NDArray[np.float64] = np.zeros(count)
        self.rows = 0.0
        self._used = 0
        self._last: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self._repeat = 0.0

    @classmethod
    def stored(cls, counts: Sequence[float], rows: float, used: int) -> ExpertUsage:
        """What ``counts``, ``rows`` and ``used`` of another one say."""
        usage = cls(len(counts))
        usage.counts = np.array(counts, np.float64)
        usage.rows, usage._used = rows, used
        return usage

    @property
    def used(self) -> int:
        """Experts that a row picks; 0 before the first."""
        return self._used

    def expect(self, used: int) -> None:
        """A row will pick so many, as the rows of another layer did."""
        self._used = self._used or used

    def note(self, picks: Picks) -> None:
        """The rows of one step picked these."""
        rows, self._used = picks.shape
        kept = DECAY**rows
        found = np.bincount(picks.ravel(), minlength=len(self.counts))
        self.counts = self.counts * kept + found
        self.rows = self.rows * kept + rows
        now = found > 0
        before = np.count_nonzero(self._last)
        if before:
            again = np.count_nonzero(now & self._last) / before
            self._repeat = REPEAT_DECAY * self._repeat + (1 - REPEAT_DECAY) * again
        self._last = now

    def share(self) -> NDArray[np.float64]:
        """The estimated probability of each expert that a row picks it."""
        prior = PRIOR_ROWS * self._used / len(self.counts)
        return np.minimum((self.counts + prior) / (self.rows + PRIOR_ROWS), 1.0)

    def likely(self, rows: int) -> NDArray[np.float64]:
        """The estimated probability of each expert that a step of ``rows`` rows, which is the next one, needs it."""
        by_use = 1 - (1 - self.share()) ** rows
        return np.where(self._last, np.maximum(by_use, self._repeat), by_use)


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """One layer has ``count`` experts of ``bytes_each``."""

    count: int
    bytes_each: int


Expert = tuple[int, int]
"""Layer (by its place among those of the pool) and number."""


@dataclass(frozen=True, slots=True)
class Change:
    """What to give back, and then to read; both are counted as done in the pool already."""

    release: tuple[Expert, ...]
    read: tuple[Expert, ...]


class Pool:
    """The experts of ``layers`` within ``capacity`` bytes.

    More is held only where one step of one layer picks more than that, and only until the next layer's picks. ``usages`` say
    what is known of each layer's experts before the first step.
    """

    def __init__(self, layers: Sequence[LayerExperts], capacity: int, usages: Sequence[ExpertUsage]) -> None:
        assert len(layers) == len(usages)
        assert all(len(usage.counts) == layer.count for usage, layer in zip(usages, layers, strict=True))
        self.layers = tuple(layers)
        self.usages = tuple(usages)
        self.capacity = capacity
        counts = [layer.count for layer in layers]
        self._starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self._sizes = np.repeat([layer.bytes_each for layer in layers], counts).astype(np.int64)
        sizes = [layer.bytes_each for layer in layers]
        self._smallest, self._largest = min(sizes), max(sizes)
        self._shares = np.concatenate([usage.share() for usage in usages])
        self._held = np.zeros(len(self._sizes), np.bool_)
        self._needed = np.zeros(len(self._sizes), np.bool_)
        self._early = np.zeros(len(self._sizes), np.bool_)
        self._held_bytes = 0
        self.picked = 0
        """Experts that steps picked until now."""
        self.found = 0
        """Those of them that were held, or on their way, when they were picked."""

    @property
    def held_bytes(self) -> int:
        """Bytes of what is held."""
        return self._held_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts."""
        return int(self._sizes.sum())

    def held(self, layer: int) -> NDArray[np.bool_]:
        """For each expert of ``layer`` whether it is held; a view."""
        return self._held[self._starts[layer] : self._starts[layer + 1]]

    def fill(self, max_bytes: int | None = None) -> tuple[Expert, ...]:
        """Absent experts to read into what room is left, the likeliest first; together at most ``max_bytes`` or one.

        Among equals those of all layers take turns. Room for less than the largest expert is left to those that are picked.
        """
        room = self.capacity - self._held_bytes
        absent = np.flatnonzero(~self._held)
        if room < self._largest or not len(absent):
            return ()
        layer = np.searchsorted(self._starts, absent, side="right") - 1
        order = absent[np.lexsort((layer, absent - self._starts[layer], -self._shares[absent]))]
        chosen: list[int] = []
        for each in order:
            size = int(self._sizes[each])
            if size > room or (chosen and max_bytes is not None and size > max_bytes):
                break
            chosen.append(int(each))
            room -= size
            max_bytes = None if max_bytes is None else max_bytes - size
        self._hold(chosen)
        return self._named(chosen)

    def pick(self, layer: int, picks: Picks) -> Change:
        """The router of ``layer`` picked these for the rows of a step."""
        start = int(self._starts[layer])
        if not self.usages[layer].used:
            for usage in self.usages:
                usage.expect(picks.shape[1])
        self.usages[layer].note(picks)
        self._shares[start : int(self._starts[layer + 1])] = self.usages[layer].share()
        needed = start + np.unique(picks).astype(np.int64)
        self._early[start : int(self._starts[layer + 1])] = False
        self._needed[:] = False
        self._needed[needed] = True
        missing = needed[~self._held[needed]]
        self.picked += len(needed)
        self.found += len(needed) - len(missing)
        released = self._make_room(int(self._sizes[missing].sum()))
        self._hold(missing)
        return Change(self._named(released), self._named(missing))

    def depart(self) -> tuple[Expert, ...]:
        """The layer that picked last was computed, and none follows it at once; what to give back."""
        self._needed[:] = False
        return self._named(self._make_room(0))

    def ahead(self, layer: int, rows: int, max_bytes: int) -> Change:
        """What to read of ``layer`` before its router picks for ``rows`` rows: the likeliest of at most ``max_bytes``.

        It takes the place of experts that are less likely to be picked by a row, never of those that a step needs now.
        """
        start = int(self._starts[layer])
        likely = self.usages[layer].likely(rows)
        found = np.flatnonzero((likely >= LIKELY) & ~self.held(layer))
        size = self.layers[layer].bytes_each
        found = found[np.argsort(-likely[found], kind="stable")][: max_bytes // size]
        if not len(found):
            return Change((), ())
        room = self.capacity - self._held_bytes
        victims = iter(self._victims(len(found) * size - room))
        released: list[int] = []
        chosen: list[int] = []
        for expert in found:
            leaving: list[int] = []
            while room < size and (victim := next(victims, None)) is not None:
                if self._shares[victim] >= likely[expert]:
                    break
                leaving.append(victim)
                room += int(self._sizes[victim])
            if room < size:
                break
            released += leaving
            chosen.append(start + int(expert))
            room -= size
        self._drop(released)
        self._hold(chosen)
        self._early[chosen] = True
        return Change(self._named(released), self._named(chosen))

    def lost(self, layer: int, experts: Iterable[int]) -> None:
        """These are not in memory any more: the system took them."""
        start = int(self._starts[layer])
        self._drop([start + expert for expert in experts if self._held[start + expert]])

    def unless_picked(self, layer: int, expert: int) -> bool:
        """Drop an expert that was to be read ahead, but not one that a step needs now; whether it was dropped."""
        each = int(self._starts[layer]) + expert
        if not self._held[each] or self._needed[each]:
            return False
        self._drop([each])
        return True

    def resize(self, capacity: int) -> tuple[Expert, ...]:
        """Hold at most ``capacity`` bytes from now on; what to give back for it."""
        self.capacity = capacity
        return self._named(self._make_room(0))

    def _victims(self, excess: int) -> list[int]:
        """What may leave so that ``excess`` bytes do, the least used first; all that may where that is not enough."""
        if excess <= 0:
            return []
        free = np.flatnonzero(self._held & ~self._needed & ~self._early)
        shares = self._shares[free]
        count = excess // self._smallest + 1
        if count < len(free):
            lowest = np.argpartition(shares, count)[:count]
            free, shares = free[lowest], shares[lowest]
        return [int(each) for each in free[np.argsort(shares, kind="stable")]]

    def _make_room(self, size: int) -> list[int]:
        """Drop the least used until ``size`` bytes more fit, or only what the step needs is left."""
        excess = self._held_bytes + size - self.capacity
        if excess <= 0:
            return []
        released: list[int] = []
        read_ahead = np.flatnonzero(self._held & self._early & ~self._needed)
        for victim in chain(self._victims(excess), map(int, read_ahead)):
            if excess <= 0:
                break
            released.append(victim)
            excess -= int(self._sizes[victim])
        self._drop(released)
        return released

    def _hold(self, each: Sequence[int] | NDArray[np.int64]) -> None:
        if len(each):
            self._held[each] = True
            self._held_bytes += int(self._sizes[each].sum())

    def _drop(self, each: Sequence[int]) -> None:
        if len(each):
            self._held[each] = False
            self._early[each] = False
            self._held_bytes -= int(self._sizes[each].sum())

    def _named(self, each: Sequence[int] | NDArray[np.int64]) -> tuple[Expert, ...]:
        if not len(each):
            return ()
        layers = np.searchsorted(self._starts, each, side="right") - 1
        numbers = np.asarray(each) - self._starts[layers]
        return tuple((int(layer), int(number)) for layer, number in zip(layers, numbers, strict=True))
