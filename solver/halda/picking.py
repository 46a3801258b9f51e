"""Prompts in an integer program where layers stream by expert: stop by stop, since rounds differ where layers do.

The layers of a window follow from its columns: column i of a round holds the layers i, W + i, 2 W + i ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import pulp

from halda.instance import Instance
from halda.orders import RingOrder
from halda.plan import Plan, Window
from halda.ring_passes import Hop, Stop, all_chunks
from halda.variables import MS, Expression, positive


@dataclass(frozen=True, slots=True)
class Column:
    """A place in a member's windows or in the tail: its layer kind in each round, and whether the member has it on the
    CPU, on each GPU, and there with its experts on the CPU (0, 1 or an expression)."""

    kinds: Sequence[int]
    cpu: Expression
    gpu: Sequence[Expression]
    experts_on_cpu: Sequence[Expression]

    @property
    def in_ram(self) -> Expression:
        """Whether the CPU computes any part of it."""
        return self.cpu + sum(self.experts_on_cpu)


@dataclass(frozen=True, slots=True)
class GpuStairs:
    """Where the layers of each GPU begin in a window, those of the last GPU first, and where the window ends: each
    boundary is a staircase of 0 and 1. ``wholes`` are the same, clipped to where experts are on the CPU."""

    bounds: Sequence[Sequence[Expression]]
    wholes: Sequence[Sequence[Expression]]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of each member's windows, and of the tail. ``sequence`` are the members in ring order."""

    windows: Sequence[Sequence[Column]]
    tail: Sequence[Column]
    sequence: Sequence[int]


def columns_between(kinds: Sequence[Sequence[int]], before: Sequence[Expression], stairs: GpuStairs) -> list[Column]:
    """Return the columns from boundary ``before`` to the last one of ``stairs``."""

    def between(bounds: Sequence[Sequence[Expression]], i: int) -> list[Expression]:
        return [high[i] - low[i] for low, high in reversed([*pairwise(bounds)])]

    return [
        Column(of, stairs.bounds[0][i] - first, between(stairs.bounds, i), between(stairs.wholes, i))
        for i, (of, first) in enumerate(zip(kinds, before, strict=True))
    ]


def fixed_columns(instance: Instance, plan: Plan, sequence: Sequence[int]) -> Columns:
    """Return the columns of ``plan``, whose windows are the same in each round."""

    def columns(windows: Sequence[Window]) -> list[Column]:
        first = windows[0]
        return [
            Column(
                [instance.kind_of[layer] for layer in layers],
                int(layers[0] in first.on_cpu),
                [int(layers[0] in on_gpu) for on_gpu in first.on_each_gpu],
                [int(layers[0] in on_gpu and layers[0] in first.experts_on_cpu) for on_gpu in first.on_each_gpu],
            )
            for layers in zip(*(window.layers for window in windows), strict=True)
        ]

    *windows, tail = plan.route
    of_members = [columns([each for each in windows if each.device == device.device]) for device in instance.devices]
    return Columns(of_members, columns([tail]), sequence)


@dataclass(frozen=True, slots=True)
class PickedPrompt:
    """Time of a prompt in an integer program: whether each member takes part, the cost of its windows besides layers,
    and its reading per chunk, in milliseconds; the ring orders and which of them is picked."""

    problem: Any
    instance: Instance
    columns: Columns
    rounds: int
    used: Sequence[Expression]
    step_ms: Sequence[Expression]
    read_ms: Sequence[Expression]
    orders: Sequence[RingOrder]
    picked: Sequence[Expression]

    def takes(self) -> Expression:
        """Return the milliseconds of all chunks, as ``evaluate`` counts them."""
        stops, tails = list[list[Expression]](), list[Expression]()
        for m, windows in enumerate(self.columns.windows):
            *ring_passes, tail = self._stops(m, windows, self.columns.tail if m == 0 else [])
            stops.append(ring_passes)
            tails.append(tail)
        ring_passes = [
            [Stop(stops[m][r], self._of_machine(m, r, stops)) for m in self.columns.sequence]
            for r in range(self.rounds)
        ]
        numbers = count()

        def largest(*times: Expression) -> Expression:
            name = f"prompt_{next(numbers)}"
            found = positive(self.problem, name)
            for i, time in enumerate(times):
                self.problem.addConstraint(found >= time, f"{name} is not before {i}")
            return found

        return all_chunks(ring_passes, self._hops(), tails[0], self.instance.chunks, largest)

    def _stops(self, m: int, windows: Sequence[Column], tail: Sequence[Column]) -> list[Expression]:
        """Return the milliseconds of each window of ``m``, and finally of its tail.

        The same share of each layer is read. That is a product where it is undecided whether a column is the member's.
        """
        member = self.instance.members[m]
        phase, unit_ms = member.prefill, MS / member.disk_bytes_per_s
        share = positive(self.problem, f"share_{m}")
        reads: list[Expression] = []
        found: list[list[Expression]] = [[self.step_ms[m]] for _ in range(self.rounds + 1)]
        for place, column in enumerate([*windows, *tail]):
            stops = range(self.rounds) if place < len(windows) else [self.rounds]
            part = self._part(f"{m}_{place}", share, column)
            for r, kind in zip(stops, column.kinds, strict=True):
                read = part * (self.instance.streamable[kind] * unit_ms)
                found[r] += [column.cpu * (phase.cpu[kind] * MS), read]
                for gpu, (on_gpu, experts) in enumerate(zip(column.gpu, column.experts_on_cpu, strict=True)):
                    at = gpu * len(self.instance.kinds) + kind
                    found[r] += [on_gpu * (phase.gpu[at] * MS), experts * (phase.experts_on_cpu[at] * MS)]
                reads.append(read)
        self.problem.addConstraint(pulp.lpSum(reads) == self.read_ms[m], f"what {m} reads for a prompt")
        return [pulp.lpSum(terms) for terms in found]

    def _part(self, name: str, share: Any, column: Column) -> Expression:
        """Return ``share`` of a layer where it is read: for experts on the CPU."""
        in_ram = column.in_ram
        if isinstance(in_ram, int) or not any(self.instance.streamable[kind] for kind in column.kinds):
            return share * in_ram if isinstance(in_ram, int) else 0 * share
        part = positive(self.problem, f"part_{name}")
        self.problem.addConstraint(part <= in_ram, f"{name} is read where it is computed")
        self.problem.addConstraint(part <= share, f"{name} is read as far as the others")
        self.problem.addConstraint(part >= share + in_ram - 1, f"{name} is read as the others")
        return part

    def _of_machine(self, m: int, r: int, stops: Sequence[Sequence[Expression]]) -> Expression:
        """Return the computing time of ``m``'s machine in round ``r``; negative if ``m`` takes no part."""
        host = next(here for here in self.instance.processors if m in here)
        if len(host) == 1:
            return stops[m][r]
        maximum = MS * sum(self._max_s(other) for other in host)
        busy = positive(self.problem, f"machine_{m}_{r}")
        self.problem.addConstraint(
            busy >= pulp.lpSum(stops[other][r] for other in host) - maximum * (1 - self.used[m]),
            f"{m} busy {r}",
        )
        return busy

    def _max_s(self, m: int) -> float:
        """Return an upper bound of the seconds of any window of ``m``."""
        member, instance = self.instance.members[m], self.instance
        phase = member.prefill
        on_gpu = [one + max(0.0, more) for one, more in zip(phase.gpu, phase.experts_on_cpu, strict=True)]
        layers = sum(
            max(phase.cpu[kind], *on_gpu[kind :: len(instance.kinds)])
            + instance.streamable[kind] / member.disk_bytes_per_s
            for kind in instance.kind_of
        )
        return layers + member.step_s + sum(phase.gpu_steps_s)

    def _hops(self) -> list[Hop]:
        """Return the hop after each member; zero for one that takes no part."""
        takes = {m: pulp.LpAffineExpression() for m in self.columns.sequence}
        occupied = {m: pulp.LpAffineExpression() for m in self.columns.sequence}
        for z, order in zip(self.picked, self.orders, strict=True):
            ring = order.members
            pairs = zip(ring, [*ring[1:], ring[0]], self.instance.chunk_links_s(ring), strict=True)
            for a, b, occupied_s in pairs:
                takes[a] += z * (self.instance.chunk_hops_s[a][b] * MS)
                occupied[a] += z * (occupied_s * MS)
        return [Hop(takes[m], occupied[m]) for m in self.columns.sequence]
