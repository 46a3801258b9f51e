"""Ring orders: the order in which participating devices pass on hidden states.

Up to ``EXACT_DEVICES`` devices every order of every subset is examined, and those that no other order of the same
subset beats in every respect are kept; the integer program chooses among them, so device selection and order are exact
together. Above that one order of all devices is taken, by nearest neighbour and 2-opt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Final, NamedTuple

from halda.evaluate import Objective
from halda.instance import Instance

EXACT_DEVICES: Final = 8


@dataclass(frozen=True, slots=True)
class RingOrder:
    """The members of a ring in order, the head (0) first; seconds of one round.

    ``hops_s`` and ``chunk_hops_s`` are the sums of all hops with one token and with a chunk; ``link_s`` and
    ``chunk_link_s`` are the seconds that the busiest link, or the air, is occupied.
    """

    members: tuple[int, ...]
    hops_s: float
    chunk_hops_s: float
    link_s: float
    chunk_link_s: float


def _costs(order: RingOrder, objective: Objective, chunks: int) -> tuple[float, ...]:
    """Return the costs of an order that matter to ``objective``; occupied links matter only with several chunks."""
    busy = (order.chunk_link_s,) if chunks > 1 else ()
    match objective:
        case "latency":
            return (order.hops_s,)
        case "throughput":
            return (order.hops_s, order.link_s)
        case "ttft":
            return (order.chunk_hops_s, *busy)
        case "balanced":
            return (order.hops_s, order.chunk_hops_s, *busy)


class HopShare(NamedTuple):
    """A member's share of a round's hops: seconds with one token and with a chunk."""

    hops_s: float
    chunk_hops_s: float


def ring_order(instance: Instance, members: Sequence[int]) -> RingOrder:
    """Return the costs of the ring ``members``; a ring of only the head has no hop."""
    pairs = list(zip(members, [*members[1:], members[0]], strict=True)) if len(members) > 1 else []
    link_s = instance.occupied_s(members)
    return RingOrder(
        members=tuple(members),
        hops_s=sum(instance.hops_s[a][b] for a, b in pairs),
        chunk_hops_s=sum(instance.chunk_hops_s[a][b] for a, b in pairs),
        link_s=link_s,
        chunk_link_s=link_s * instance.members[0].prefill.rows,
    )


def exact_orders(instance: Instance, objective: Objective) -> list[RingOrder]:
    """Return every order of at least two devices that no other order of the same devices beats for ``objective``."""
    others = range(1, len(instance.devices))
    alike = _links_are_alike(instance)
    found = []
    for count in range(1, len(instance.devices)):
        for subset in combinations(others, count):
            choices = [subset] if alike else permutations(subset)
            found += _undominated(
                [ring_order(instance, (0, *choice)) for choice in choices], objective, instance.chunks
            )
    return found


def induced_orders(instance: Instance, sequence: Sequence[int]) -> list[RingOrder]:
    """Return every subset of at least two devices in the order of ``sequence``, which begins with the head."""
    return [
        ring_order(instance, (0, *subset))
        for count in range(1, len(sequence))
        for subset in combinations(sequence[1:], count)
    ]


def device_sequences(instance: Instance) -> list[tuple[int, ...]]:
    """Return all orders of all devices, the head first, sorted by the sum of hops."""
    others = range(1, len(instance.devices))
    sequences = [(0, *order) for order in permutations(others)]
    return sorted(sequences, key=lambda sequence: ring_order(instance, sequence).hops_s)


def good_order(instance: Instance, members: Sequence[int]) -> RingOrder:
    """Return a short ring through ``members``: nearest neighbour from the head, then 2-opt until it gets no shorter."""
    left, tour = set(members) - {0}, [0]
    while left:
        nearest = min(sorted(left), key=lambda member: instance.hops_s[tour[-1]][member])
        tour.append(nearest)
        left.remove(nearest)
    best = ring_order(instance, tour)
    if _links_are_alike(instance):
        return best
    improved = True
    while improved:
        improved = False
        for i, j in combinations(range(1, len(tour)), 2):
            turned = ring_order(instance, [*tour[:i], *reversed(tour[i : j + 1]), *tour[j + 1 :]])
            if turned.hops_s < best.hops_s * (1 - 1e-12):
                best, tour, improved = turned, list(turned.members), True
    return best


def min_hops(instance: Instance) -> list[HopShare]:
    """Return a lower bound of each member's share in the hops of any ring: half of its best hops in and out (decode,
    chunk)."""
    members = range(len(instance.devices))
    return [
        HopShare(
            *((min(hop[m]) + min(hop[o][m] for o in members)) / 2 for hop in (instance.hops_s, instance.chunk_hops_s))
        )
        for m in members
    ]


def hops_around(instance: Instance, ring: RingOrder) -> list[HopShare]:
    """Return each member's share in the hops of ``ring``: half of its hops in and out, or the cost of adding it.

    A ring of only the head has no hops.
    """
    tour = ring.members
    pairs = list(zip(tour, [*tour[1:], tour[0]], strict=True))
    shares = []
    for m in range(len(instance.devices)):
        share = []
        for hop in (instance.hops_s, instance.chunk_hops_s):
            if m in tour:
                share.append(sum(hop[a][b] for a, b in pairs if m in (a, b) and a != b) / 2)
            else:
                share.append(max(0.0, min(hop[a][m] + hop[m][b] - (hop[a][b] if a != b else 0.0) for a, b in pairs)))
        shares.append(HopShare(*share))
    return shares


def _links_are_alike(instance: Instance) -> bool:
    members = range(len(instance.devices))
    pairs = [(a, b) for a in members for b in members if a != b]
    return len({(instance.hops_s[a][b], instance.transfers_s[a][b], instance.in_air(a, b)) for a, b in pairs}) <= 1


def _undominated(orders: Sequence[RingOrder], objective: Objective, chunks: int) -> list[RingOrder]:
    kept: list[tuple[tuple[float, ...], RingOrder]] = []
    priced = ((_costs(order, objective, chunks), order) for order in orders)
    for costs, order in sorted(priced, key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, costs, strict=True)) for other, _ in kept):
            kept.append((costs, order))
    return [order for _, order in kept]
