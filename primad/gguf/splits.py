"""How many heads, values and tokens each rank of a tensor-parallel group has, by weights and in units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

MAX_RANKS: Final = 16
"""Devices of a group."""


def split(count: int, weights: Sequence[int]) -> list[int] | None:
    """Units for each rank, at least one, with the largest share by weight as small as possible; None for too few units."""
    return None if count < len(weights) else [*_split(count, tuple(weights))]


@lru_cache
def _split(count: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    shares = [1] * len(weights)  # layers and ranks ask for the same
    for _ in range(count - len(weights)):
        rank = min(range(len(weights)), key=lambda each: ((shares[each] + 1) / weights[each], each))
        shares[rank] += 1
    return tuple(shares)


def ranges_of(extent: int, unit: int, weights: Sequence[int], offset: int = 0) -> list[range] | None:
    """``extent`` items from ``offset`` on, cut between units; the last unit may be smaller."""
    shares = split(-(-extent // unit), weights)
    if shares is None:
        return None
    ends = [min(sum(shares[: rank + 1]) * unit, extent) for rank in range(len(shares))]
    return [range(offset + begin, offset + end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def keys_of(heads: range, group: int) -> range | None:
    """The heads of keys of ``heads``, one for each ``group``: of whole groups, or of a part of one. None for others."""
    if heads.start % group == heads.stop % group == 0:
        return range(heads.start // group, heads.stop // group)
    first = heads.start // group
    return range(first, first + 1) if (heads.stop - 1) // group == first else None


def cut_heads(heads: int, keys: Sequence[int], unit: int, weights: Sequence[int]) -> list[range] | None:
    """The heads of each rank, cut at multiples of ``unit``; layers may have other ``keys``, and all are cut alike. None
    where ranks are too many."""
    for each in keys:
        found = _cut_heads(heads, each, unit, weights)
        if found is not None and all(keys_of(own, heads // other) is not None for own in found for other in keys):
            return found
    return None


def _cut_heads(heads: int, keys: int, unit: int, weights: Sequence[int]) -> list[range] | None:
    group = heads // keys
    by_group = ranges_of(heads, math.lcm(group, unit), weights)
    if by_group is not None:
        return by_group
    if keys > len(weights) or group % unit:
        return None
    found: list[range] = []
    for key in range(keys):
        own = weights[key * len(weights) // keys : (key + 1) * len(weights) // keys]
        parts = ranges_of(group, unit, own, key * group)
        if parts is None:
            return None
        found += parts
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareUnits:
    """What the layers of a model are cut by: most have ``heads``, with ``keys`` KV heads, cut at multiples of
    ``head_unit``, and a network of ``values``, cut at multiples of ``value_unit``. Without ``heads`` each rank has all
    of the attention."""

    heads: int
    keys: tuple[int, ...]
    head_unit: int
    values: int
    value_unit: int

    def shares(self, weights: Sequence[int]) -> list[tuple[float, float]] | None:
        """Each rank's real share of attention and of the network; None if there are too many ranks."""
        values = ranges_of(self.values, self.value_unit, weights)
        heads = cut_heads(self.heads, self.keys, self.head_unit, weights) if self.heads else [range(0)] * len(weights)
        if heads is None or values is None:
            return None
        of_attention = [len(own) / self.heads if self.heads else 1.0 for own in heads]
        return [(share, len(part) / self.values) for share, part in zip(of_attention, values, strict=True)]
