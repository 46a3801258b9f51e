"""Decides which experts stay in memory, are evicted, or are read ahead, for layers that stream by expert: values in,
values out.

The experts of all these layers share one pool of bounded bytes. A picked expert must be in memory; the one picked least
often is evicted for it, even if it was picked a moment ago. So the most used experts stay, and neither a rare one nor a
prompt, whose tokens together pick nearly all, displaces them for good. Per byte of the pool, the expert picked most
often is worth most, since holding it saves most reads a token; neither layer nor size matters.

How often an expert is picked is estimated online: picks are counted, and earlier tokens count less with every token.
Before anything was counted, all experts of a layer count as equal. An expert of the next layer is read ahead if it is
more likely needed than not: because nearly every token picks it, because there are many tokens, or because the step
before picked it and picks tend to repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

DECAY: Final = 0.999
"""Weight of a token's picks one token later: half after 700 tokens."""
PRIOR_ROWS: Final = 16.0
"""Tokens of an assumed history in which all experts were picked equally."""
REPEAT_DECAY: Final = 0.95
"""Weight of a step's share of repeated picks one step later."""
LIKELY: Final = 0.5
"""An expert that is needed with at least this probability is worth reading before it is picked."""

Picks = NDArray[np.int32]
"""The experts that each token picked, shape (rows, experts a token)."""


class ExpertUsage:
    """How often past tokens picked each of the ``count`` experts of one layer."""

    def __init__(self, count: int) -> None:
        self.counts: NDArray[np.float64] = np.zeros(count)
        self.rows = 0.0
        self._used = 0
        self._last: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self._repeat = 0.0

    @classmethod
    def stored(cls, counts: Sequence[float], rows: float, used: int) -> ExpertUsage:
        """Return usage with these stored ``counts``, ``rows`` and ``used``."""
        usage = cls(len(counts))
        usage.counts = np.array(counts, np.float64)
        usage.rows, usage._used = rows, used
        return usage

    @property
    def used(self) -> int:
        """Number of experts that a token picks; 0 before the first."""
        return self._used

    def expect(self, used: int) -> None:
        """Assume that a token picks ``used`` experts, as in another layer."""
        self._used = self._used or used

    def note(self, picks: Picks) -> None:
        """Count the ``picks`` of one step."""
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
        """Return for each expert the estimated probability that a token picks it."""
        prior = PRIOR_ROWS * self._used / len(self.counts)
        return np.minimum((self.counts + prior) / (self.rows + PRIOR_ROWS), 1.0)

    def likely(self, rows: int) -> NDArray[np.float64]:
        """Return for each expert the estimated probability that the next step, of ``rows`` tokens, needs it."""
        by_use = 1 - (1 - self.share()) ** rows
        return np.where(self._last, np.maximum(by_use, self._repeat), by_use)


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """One layer has ``count`` experts of ``bytes_each``."""

    count: int
    bytes_each: int


Expert = tuple[int, int]
"""Layer (its index in the pool) and number of the expert."""


@dataclass(frozen=True, slots=True)
class Change:
    """Experts to release, and then experts to read; the pool already counts both as done."""

    release: tuple[Expert, ...]
    read: tuple[Expert, ...]


class Pool:
    """The experts of ``layers`` within ``capacity`` bytes.

    It holds more only where one step of one layer picks more than that, and only until the next layer's picks.
    ``usages`` are the layers' known usages before the first step.
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
        """Experts that steps picked so far."""
        self.found = 0
        """Those of them that were held, or being read, when they were picked."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the held experts."""
        return self._held_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts."""
        return int(self._sizes.sum())

    def held(self, layer: int) -> NDArray[np.bool_]:
        """Return for each expert of ``layer`` whether it is held; a view."""
        return self._held[self._starts[layer] : self._starts[layer + 1]]

    def fill(self, max_bytes: int | None = None) -> tuple[Expert, ...]:
        """Return absent experts to read into free room, the most likely first, of at most ``max_bytes`` or one expert.

        Equally likely ones of different layers alternate. Room for less than the largest expert is left for picked
        ones.
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
        """Count the picks of the router of ``layer`` for the tokens of a step; return the change."""
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
        """Finish the layer that picked last, with no other directly after it; return what to release."""
        self._needed[:] = False
        return self._named(self._make_room(0))

    def ahead(self, layer: int, rows: int, max_bytes: int) -> Change:
        """Return what to read of ``layer`` before its router picks for ``rows`` tokens: the likeliest, of at most
        ``max_bytes``.

        They replace experts that a token picks with lower probability, never those that a step needs now.
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
        """Drop ``experts`` that the system evicted."""
        start = int(self._starts[layer])
        self._drop([start + expert for expert in experts if self._held[start + expert]])

    def unless_picked(self, layer: int, expert: int) -> bool:
        """Drop an expert that was to be read ahead, unless a step needs it now. Returns whether it was dropped."""
        each = int(self._starts[layer]) + expert
        if not self._held[each] or self._needed[each]:
            return False
        self._drop([each])
        return True

    def resize(self, capacity: int) -> tuple[Expert, ...]:
        """Hold at most ``capacity`` bytes from now on; return what to release."""
        self.capacity = capacity
        return self._named(self._make_room(0))

    def _victims(self, excess: int) -> list[int]:
        """Return experts whose eviction frees ``excess`` bytes, the least used first; all candidates if that is not
        enough."""
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
        """Drop the least used experts until ``size`` more bytes fit, or only those that the step needs are left."""
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
