"""Where to cut a model: a shortest path over window boundaries, near the best plan in milliseconds.

Every search begins with such plans. Where layers differ they also replace the integer program of the even layout, which
knows how many layers a device should have but not which, so a real window may not fit.

The devices have a fixed order, and each window range is priced by itself: with as many layers on the GPU as fit, or
none, or as many as fit without their experts and then as many experts as fit. What exceeds the RAM streams, with the
smallest read-ahead or one with which nothing waits. The hops are divided among the devices. The cheapest chain of
windows under these prices is found exactly, and it leaves out devices that it does not need. The final read-ahead is
left to an integer program. With one round, several GPUs of a device count as one of their total size and are then
filled in turn; with more rounds only the first counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise, product
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halda.evaluate import Objective, RequestWeights, regular_tails, request_weights
from halda.instance import Instance, Member, Phase
from halda.orders import hops_around, ring_order
from halda.plan import Window, without_zeros

Floats = NDArray[np.float64]
_DISK_TRIALS: Final = 6
_READ_AHEAD_TRIALS: Final = (0.5, 1.0)
"""Shares of the read-ahead with which nothing waits, for several rounds."""
_MAX_TAILS: Final = 6
_MAX_TAILS_OF_ROUNDS: Final = 3


def good_cuts(
    instance: Instance, orders: Iterable[Sequence[int]], rounds: int, objective: Objective, required: frozenset[int]
) -> list[tuple[float, tuple[Window, ...]]]:
    """Return routes of ``rounds`` rounds through members in ``orders``, the head first, with their prices, cheapest
    first.

    Members that are not ``required`` are left out where that is cheaper.
    """
    orders, found, widest = list(orders), [], None
    for columns, tail in _shapes(instance, max(2, 1 + len(required - {0})), rounds):
        pricing = _Pricing(instance, rounds, columns, tail, request_weights(objective, instance.workload), widest)
        widest = pricing if rounds == 1 and widest is None else widest
        for order in orders:
            cut = pricing.cheapest(order, required)
            if cut is not None and sum(end > first for first, end in pairwise([0, *(each.end for each in cut[1])])) > 1:
                found.append((cut[0], _route(instance, order, rounds, columns, tail, cut[1])))
    return sorted(found, key=lambda pair: pair[0])


def _shapes(instance: Instance, devices: int, rounds: int) -> Iterator[tuple[int, int]]:
    """Yield the layers of a round and the start of the tail, the shortest tails first."""
    model = instance.model
    if rounds > model.max_rounds:
        return
    cut, missing = model.cut_multiple, model.cut_missing
    longest = (model.last_cut + missing) // (rounds * cut) * cut - missing
    for step in range(_MAX_TAILS if rounds == 1 else _MAX_TAILS_OF_ROUNDS):
        # In one round a longer tail only moves windows, so sizes far apart are tried.
        columns = longest - cut * ((1 << step) - 1 if rounds == 1 else step)
        if columns + missing < devices * cut:
            return
        yield columns, rounds * columns


def _route(
    instance: Instance, order: Sequence[int], rounds: int, columns: int, tail: int, cuts: Sequence[_Cut]
) -> tuple[Window, ...]:
    names = [instance.devices[m].device for m in order]
    windows, firsts = [], [0, *(cut.end for cut in cuts[:-1])]
    for r in range(rounds):
        for name, first, cut in zip(names, firsts, cuts, strict=True):
            at, on_gpu = r * columns, cut.on_gpu
            if cut.end > first:
                windows.append(Window(device=name, first=at + first, last=at + cut.end, **on_gpu))
    total = len(instance.model.layers)
    route = (*windows, Window(device=names[0], first=tail, last=total, **cuts[0].tail_on_gpu))
    return _spread(instance, order, route) if rounds == 1 else route


def _spread(instance: Instance, order: Sequence[int], route: Sequence[Window]) -> tuple[Window, ...]:
    """Return ``route`` with each device's GPU layers on its GPUs, filled in turn, starting with the tail's layers."""
    left: dict[str, list[int]] = {}
    for m in order:
        member, windows = instance.members[m], 1 + (m == order[0])
        output = instance.model.output_bytes * bool(m == order[0] and route[-1].gpu_layers)
        left[member.name] = [
            limit - instance.gpu_besides(member, i, windows) - output * (i == 0)
            for i, limit in enumerate(member.vram_limits)
        ]
    return tuple(reversed([_on_gpus(instance, window, left[window.device]) for window in reversed(route)]))


def _on_gpus(instance: Instance, window: Window, left: list[int]) -> Window:
    """Return ``window`` on GPUs with ``left`` free bytes each; layers that fit nowhere stay on the first."""
    counts, at = [0] * len(left), 0
    for layer in reversed(window.on_gpu):
        kind = instance.kind_of[layer]
        size = instance.size_bytes[kind] + instance.kv_bytes[kind]
        size -= instance.expert_bytes[kind] * (layer in window.experts_on_cpu)
        while at < len(left) - 1 and left[at] < size:
            at += 1
        counts[at], left[at] = counts[at] + 1, left[at] - size
    return replace(window, other_gpus=without_zeros(counts[1:]))


class _Cut(NamedTuple):
    """End of a member's window, its GPU layers and those with experts on the CPU; the same for the tail."""

    end: int
    gpu: int
    experts_on_cpu: int
    tail_gpu: int
    tail_experts_on_cpu: int

    @property
    def on_gpu(self) -> dict[str, Any]:
        """Fields of the ``Window``."""
        return {"gpu_layers": self.gpu, "cpu_experts": self.experts_on_cpu}

    @property
    def tail_on_gpu(self) -> dict[str, Any]:
        """Fields of the last ``Window``."""
        return {"gpu_layers": self.tail_gpu, "cpu_experts": self.tail_experts_on_cpu}


@dataclass(frozen=True, slots=True)
class _Priced:
    """For each first column i and end j of one member: price, disk seconds, GPU layers and those with experts on the
    CPU, of the window and of the tail."""

    price: Floats
    disk_s: Floats
    gpu: Any
    experts_on_cpu: Any
    tail_gpu: Any
    tail_experts_on_cpu: Any

    def first(self, columns: int) -> _Priced:
        """Return the same for ``columns`` columns."""
        if len(self.price) == columns + 1:
            return self
        return _Priced(*(getattr(self, name)[: columns + 1, : columns + 1] for name in self.__slots__))

    def cut(self, first: int, end: int) -> _Cut:
        """Return the window from ``first`` to ``end``."""
        found = (
            int(each[first, end]) for each in (self.gpu, self.experts_on_cpu, self.tail_gpu, self.tail_experts_on_cpu)
        )
        return _Cut(end, *found)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Several GPUs as one: bytes used besides layers and free bytes, the share in RAM, and each GPU's share."""

    besides: int
    free: float
    in_ram: float
    shares: Floats
    kinds: int

    def of(self, seconds: Sequence[float]) -> Floats:
        """Return the average seconds of a layer of each kind."""
        each = np.array(seconds).reshape(-1, self.kinds)[: len(self.shares)]
        mean: Floats = self.shares @ each
        return mean


class _Need(NamedTuple):
    """Needs of windows: seconds of the CPU layers and of the rest, bytes that do not fit, bytes that may stream, CPU
    layers."""

    compute: Floats
    rest: Floats
    overflow: Floats
    streamable: Floats
    layers: Any


class _Pricing:
    """Prices of windows for rounds of ``columns`` layers and a tail from layer ``tail`` on.

    In one round, the prices for fewer columns are the first ones of the ``widest``.
    """

    def __init__(
        self,
        instance: Instance,
        rounds: int,
        columns: int,
        tail: int,
        weights: RequestWeights,
        widest: _Pricing | None = None,
    ) -> None:
        self._widest = widest or self
        self._instance = instance
        self._rounds = rounds
        self._columns = columns
        self._weights = weights
        kinds = np.array(instance.kind_of)
        by_column = kinds[: rounds * columns].reshape(rounds, columns)
        self._sizes = np.array([kind.size_bytes for kind in instance.kinds], np.float64)
        self._held = self._sizes + np.array(instance.kv_bytes, np.float64)
        self._checkpoints = np.array(instance.checkpoint_bytes, np.float64)
        self._by_column, self._tail = by_column, kinds[tail:]
        self._streamable = np.array(instance.streamable, np.float64)
        self._experts = np.array(instance.expert_bytes, np.float64)
        self._at = np.arange(columns + 1)
        is_cut_point = np.isin(self._at, [0, *instance.model.cut_points])
        self._allowed = is_cut_point[:, None] & is_cut_point[None, :] & (self._at[:, None] <= self._at[None, :])
        self._priced: dict[tuple[int, int], _Priced] = {}

    def cheapest(self, order: Sequence[int], required: frozenset[int]) -> tuple[float, list[_Cut]] | None:
        """Return the cheapest chain for the members ``order``, with its price.

        A member that is left out ends where the previous one does.
        """
        hops = hops_around(self._instance, ring_order(self._instance, order))
        priced = []
        for m in order:
            member = self._beside(m, order)
            hop_s = self._weights.decode * hops[m].hops_s + self._weights.prefill * hops[m].chunk_hops_s
            price = member.price + self._rounds * hop_s
            np.fill_diagonal(price, math.inf if m == 0 or m in required else 0.0)
            priced.append(replace(member, price=price))
        best = self._chain(priced, math.inf)
        if best is None or not self._weights.decode:
            return best
        # A disk may take longer than all windows together: find the least time in which both are done.
        low, high = best[0], max(best[0], self._slowest_disk(priced, best[1]) * self._weights.decode)
        for _ in range(_DISK_TRIALS if high > low * 1.001 else 0):
            middle = (low + high) / 2
            found = self._chain(priced, middle / self._weights.decode)
            if found is None or found[0] > middle:
                low = middle
            else:
                best, high = found, middle
        return high, best[1]

    def _beside(self, m: int, order: Sequence[int]) -> _Priced:
        """Return the prices of member ``m``, with an equal share of the memory if others of ``order`` are on its
        machine.

        The head's prices depend on the tail; other members with the same figures cost the same.
        """
        here = next(host for host in self._instance.hosts if m in host)
        count = sum(other in order for other in here)
        if m == 0:
            if (m, count) not in self._priced:
                self._priced[m, count] = self._shared(m, count)
            return self._priced[m, count]
        name, prices, widest = self._instance.members[m].name, self._instance.prices, self._widest
        key = self._weights, self._rounds, widest._columns, self._instance.costing_as[name], count
        if key not in prices:
            prices[key] = widest._shared(m, count)
        priced: _Priced = prices[key]
        return priced.first(self._columns)

    def _shared(self, m: int, count: int) -> _Priced:
        """Return the prices of member ``m`` with a machine's memory divided by ``count``."""
        member = self._instance.members[m]
        vram = tuple(limit // count for limit in member.vram_limits)
        share = replace(member, ram_limit=member.ram_limit // count, vram_limits=vram)
        priced = self._member(share, is_head=m == 0)
        np.fill_diagonal(priced.disk_s, 0.0)
        return priced

    def _chain(self, priced: Sequence[_Priced], disk_s: float) -> tuple[float, list[_Cut]] | None:
        costs = np.full(self._columns + 1, math.inf)
        costs[0] = 0.0
        came = []
        for member in priced:
            step = np.where(self._allowed & (member.disk_s <= disk_s), member.price, math.inf)
            total = costs[:, None] + step
            came.append(total.argmin(axis=0))
            costs = total.min(axis=0)
        if not math.isfinite(costs[-1]):
            return None
        cuts, at = [], self._columns
        for member, froms in zip(reversed(priced), reversed(came), strict=True):
            first = int(froms[at])
            cuts.append(member.cut(first, at))
            at = first
        return float(costs[-1]), cuts[::-1]

    def _slowest_disk(self, priced: Sequence[_Priced], cuts: Sequence[_Cut]) -> float:
        firsts = [0, *(cut.end for cut in cuts[:-1])]
        return max(
            float(member.disk_s[first, cut.end]) for member, first, cut in zip(priced, firsts, cuts, strict=True)
        )

    def _member(self, member: Member, *, is_head: bool) -> _Priced:
        """Return the cheapest way to hold each range: the GPU as full as possible or unused; the tail on it or not."""
        ways = [self._way(member, is_head=is_head, gpus=0, tail_on_gpu=False, parts=False)]
        counts = {1, member.gpu_count} if self._rounds == 1 else {1}
        place = self._instance.experts if self._instance.by_expert else "gpu"
        for parts in {"auto": (False, True), "cpu": (True,), "gpu": (False,)}[place] if member.has_gpu else ():
            for tail_on_gpu, gpus in product((False, True) if is_head else (False,), sorted(counts)):
                ways.append(self._way(member, is_head=is_head, gpus=gpus, tail_on_gpu=tail_on_gpu, parts=parts))
        best = np.stack([way.price for way in ways]).argmin(axis=0)
        return _Priced(*(np.choose(best, [getattr(way, name) for way in ways]) for name in _Priced.__slots__))

    def _way(self, member: Member, *, is_head: bool, gpus: int, tail_on_gpu: bool, parts: bool) -> _Priced:
        instance, model = self._instance, self._instance.model
        tail = self._tail if is_head else self._tail[:0]
        tail_gpu = len(tail) if tail_on_gpu else 0
        windows = self._rounds + is_head
        offloads = member.offloads_prefill
        experts = self._experts if parts else 0 * self._experts
        pool = self._pool(member, windows, gpus, output_copy=is_head and not tail_on_gpu)
        besides, vram = pool.besides, pool.free - max(0, gpus - 1) * float((self._held - experts).max())
        of_tail = self._held[tail].sum() - experts[tail].sum() if tail_on_gpu else 0.0
        if tail_on_gpu:
            vram -= model.output_bytes + float(of_tail)
        size = self._columns + 1
        nowhere = _Priced(*(np.full((size, size), value) for value in (math.inf, 0.0, 0, 0, 0, 0)))
        if (gpus or offloads) and vram < 0:
            return nowhere
        starts = self._gpu_starts(vram, self._held - experts) if gpus else self._at
        start = np.maximum(self._at[:, None], starts[None, :])
        start = np.minimum(start, self._at[None, :])
        gpu = self._at[None, :] - start
        whole = self._whole_from(start, vram, experts) if gpus and parts else start
        experts_on_cpu, tail_experts_on_cpu = whole - start, tail_gpu if parts else 0
        uses_gpu = (gpu > 0) | tail_on_gpu
        uses_cpu = (
            (start > self._at[:, None]) | (experts_on_cpu > 0) | (len(tail) > tail_gpu) | (tail_experts_on_cpu > 0)
        )
        fixed = instance.runtime_bytes(windows)
        fixed += (instance.head_bytes(windows) + (0 if tail_on_gpu else model.output_bytes)) * is_head
        in_ram = self._sum(experts, start, whole) + (experts[tail].sum() if tail_on_gpu else 0)
        on_cpu = (
            self._sum(self._held, self._at[:, None], start) + (0 if tail_on_gpu else self._held[tail].sum()) + in_ram
        )
        on_cpu = (
            on_cpu + self._sum(self._checkpoints, self._at[:, None], self._at[None, :]) + self._checkpoints[tail].sum()
        )
        in_vram = self._sum(self._held, start, self._at[None, :]) - self._sum(experts, start, whole)
        in_vram = in_vram + besides * (uses_gpu | offloads)
        if tail_on_gpu:
            in_vram = in_vram + model.output_bytes + of_tail
        overflow = fixed + on_cpu + in_vram * pool.in_ram - member.ram_limit
        streamable = self._sum(self._streamable, self._at[:, None], start) + in_ram
        streamable = streamable + (0 if tail_on_gpu else self._streamable[tail].sum())
        price, disk_s = np.zeros((size, size)), np.zeros((size, size))
        for weight, phase, output in (
            (self._weights.decode, member.decode, True),
            (self._weights.prefill, member.prefill, False),
        ):
            if weight:
                on_gpu_s, experts_s = pool.of(phase.gpu), pool.of(phase.experts_on_cpu)
                rest = self._sum(on_gpu_s, start, self._at[None, :])
                rest = rest + self._sum(experts_s, start, whole)
                rest = rest + windows * (member.step_s * uses_cpu + sum(phase.gpu_steps_s[:gpus]) * uses_gpu)
                compute = self._sum(np.array(phase.cpu), self._at[:, None], start)
                if is_head:
                    tail_s = (on_gpu_s if tail_on_gpu else np.array(phase.cpu))[tail].sum()
                    rest = rest + (member.gpu_output_s if tail_on_gpu else member.cpu_output_s) * output
                    compute = compute + tail_s + experts_s[tail].sum() * bool(tail_experts_on_cpu)
                may = streamable
                if is_head and self._rounds > 1 and not instance.by_expert:
                    lowest, highest = regular_tails(self._rounds)
                    longer = len(tail) - tail_gpu - (start - self._at[:, None])
                    may = np.where((lowest <= longer) & (longer <= highest), streamable, 0.0)
                layers = start - self._at[:, None] + (len(tail) - tail_gpu)
                seconds, reading_s = self._streamed(member, phase, _Need(compute, rest, overflow, may, layers))
                price = price + weight * seconds
                disk_s = reading_s if output else disk_s
        return _Priced(
            price,
            disk_s,
            gpu,
            experts_on_cpu,
            *(np.full((size, size), count) for count in (tail_gpu, tail_experts_on_cpu)),
        )

    def _pool(self, member: Member, windows: int, gpus: int, *, output_copy: bool) -> _Pool:
        """Return the first ``gpus`` GPUs of ``member``, and the one that offloads prefill, as one."""
        instance, kinds = self._instance, len(self._instance.kinds)
        used = [i for i in range(member.gpu_count) if i < gpus or i == member.offloading_gpu]
        taken = [instance.gpu_besides(member, i, windows) for i in used]
        taken = [
            size + instance.output_copy_bytes * (output_copy and i == member.offloading_gpu)
            for i, size in zip(used, taken, strict=True)
        ]
        free = [float(member.vram_limits[i] - size) for i, size in zip(used, taken, strict=True)]
        of_layers = [size for i, size in zip(used, free, strict=True) if i < gpus]
        shares = np.array([max(size, 0.0) for size in of_layers] or [1.0])
        shares = shares / shares.sum() if shares.sum() else np.full(len(shares), 1 / len(shares))
        unified = [member.profile.gpus[i].unified_memory for i in used[: len(shares)]]
        in_ram = float(sum(share for share, is_it in zip(shares, unified, strict=False) if is_it))
        return _Pool(sum(taken), sum(of_layers) if min(free, default=0.0) >= 0 else -1.0, in_ram, shares, kinds)

    def _streamed(self, member: Member, phase: Phase, need: _Need) -> tuple[Floats, Floats]:
        """Return the seconds of windows and disk when ``overflow`` bytes do not fit; infinite if streaming does not
        help."""
        seconds, disk_s = need.compute + need.rest, np.zeros(need.compute.shape)
        short = (need.overflow > 0) & self._allowed
        seconds[need.overflow > 0] = math.inf
        if short.any() and not member.offloads_prefill:
            found = _Need(*(_at(short, each) for each in need))
            seconds[short], disk_s[short] = self._read(member, phase, found)
        return seconds, disk_s

    def _read(self, member: Member, phase: Phase, need: _Need) -> tuple[Floats, Floats]:
        """Return the same for windows that do not fit."""
        compute, rest, overflow, streamable, layers = need
        instance, k, rate = self._instance, self._rounds, member.disk_bytes_per_s
        over, highest = overflow + instance.reserve_bytes, streamable - instance.pool_bytes
        ways: list[Any] = []
        for step in member.read_ahead_steps:
            ways.append((step, step.read_ahead_bytes))
            if k > 1 and not instance.by_expert:
                ways += [(step, np.maximum(step.wide_bytes, part * over / (k - 1))) for part in _READ_AHEAD_TRIALS]
            elif not instance.by_expert:
                ways.append((step, step.wide_bytes))
        # All ways are in one array: there are few ranges, and numpy's overhead exceeds the computing.
        share = np.array([[step.share] for step, _ in ways])
        read_ahead = np.empty((len(ways), len(over)))
        for row, (_, way) in zip(read_ahead, ways, strict=True):
            row[:] = way
        streamed = over + read_ahead
        left = np.maximum(streamed - phase.spare_bytes, 0)
        read = reduce(
            np.maximum, (line.of_streamed * left + line.of_streamable * streamable for line in phase.read_lines)
        )
        waiting = read - k * read_ahead
        if instance.by_expert:
            seconds = compute + rest + read / rate
        else:
            meanwhile = np.maximum(waiting, 0) if member.has_own_host else read
            slowed = compute + rest + member.slows_s_per_byte * meanwhile
            if phase is member.prefill:
                slowed = slowed + np.maximum(2 * read - (layers + k / instance.chunks) * read_ahead, 0) / rate
            waits = rest + k * phase.edge_s + waiting / rate
            seconds = np.where(waiting > 0, np.maximum(slowed, waits), slowed)
        seconds = np.where(streamed <= np.minimum(share * streamable, highest), seconds, math.inf)
        cheapest = seconds.argmin(axis=0)[None]
        best_s, disk_s = (np.take_along_axis(each, cheapest, 0)[0] for each in (seconds, read / rate))
        return best_s, np.where(np.isfinite(best_s), disk_s, 0.0)

    def _gpu_starts(self, vram: float, held: Floats) -> Any:
        """Return for each end j the first column from which all columns to j, of size ``held``, fit into ``vram``
        bytes."""
        sums = self._sum(held, np.zeros(1, int), self._at)
        return np.searchsorted(sums, sums - vram, side="left")

    def _whole_from(self, start: Any, vram: float, experts: Floats) -> Any:
        """Return for each end j the first column from which experts fit too, next to the rest of the layers from
        ``start`` on."""
        ends = self._at[None, :]
        if self._instance.experts == "cpu":
            return np.broadcast_to(ends, start.shape)
        sums = self._sum(experts, np.zeros(1, int), self._at)
        left = vram - self._sum(self._held - experts, start, ends)
        return np.clip(np.searchsorted(sums, sums[None, :] - left, side="left"), start, np.maximum(start, ends))

    def _sum(self, values: Floats, first: Any, end: Any) -> Floats:
        """Return the sum of ``values`` by kind over all layers of the columns from ``first`` to ``end``."""
        sums = np.concatenate([[0.0], np.cumsum(values[self._by_column].sum(axis=0))])
        difference: Floats = sums[end] - sums[first]
        return difference


def _at(short: NDArray[np.bool_], values: Any) -> Any:
    """Return the ``values`` where ``short`` is true; most have its shape."""
    return (values if np.shape(values) == short.shape else np.broadcast_to(values, short.shape))[short]
