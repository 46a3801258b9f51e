"""Brute force over all plans of a small question: the answer that the integer program must give.

Independent of the solver: it has its own sums of the costs in ``instance.py`` and enumerates all splits of layers. Its
only bound: a layout whose computing alone takes longer than the best plan found is skipped. Of two options for the same
layers on a device, one that is worse in every respect is dropped, which loses nothing. Read-ahead is continuous: for
each remaining layout a small mixed-integer program finds the best. Each device has its own machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import permutations, product
from operator import le

import pulp

from halda import Instance, Objective, Plan, Streaming, Window, cost

CLOSE = 1e-9
UNIT = 1e6
"""The unit of bytes in the small program: a megabyte."""
MS = 1e3
"""The unit of time in it: milliseconds."""
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of decode or of a chunk: of all layers, of the part that never overlaps with reading, and of the tail."""

    compute_s: float
    rest_s: float
    tail_s: float
    edge_s: float
    layers_s: float
    """Seconds of the layers on the CPU."""
    spare: int
    picked: tuple[float, ...]
    """For groups of equally many experts, least picked first, the share of streamed bytes that is read."""

    def read(self, streamed: float, maximum: float) -> float:
        """The bytes read if ``streamed`` of at most ``maximum`` bytes stream."""
        left, read = max(0.0, streamed - self.spare), 0.0
        for picked in self.picked:
            of_group = min(left, maximum / len(self.picked))
            left, read = left - of_group, read + picked * of_group
        return read


@dataclass(frozen=True, slots=True)
class Part:
    """A window on a member, with a number of layers on its CPU and on each GPU: bytes, and seconds of decode and of
    a chunk, on the CPU and elsewhere."""

    cpu: int
    uses_cpu: bool
    gpus: tuple[int, ...]
    vram: tuple[int, ...]
    ram: int
    size: int
    streamable: int
    cpu_s: tuple[float, float]
    rest_s: tuple[float, float]
    ring_passes: tuple[tuple[float, int], ...]
    """For each window the seconds of a chunk and the bytes of experts in RAM."""


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One way for a device to hold its layers: ``over`` bytes do not fit; at most ``maximum`` may stream."""

    decode: Times
    chunk: Times
    output_s: float
    over: int
    maximum: int
    pool: int
    disk: float
    slows: float
    gpu: tuple[int, ...]
    """Layers of a window on each GPU."""
    tail_gpu: tuple[int, ...]
    experts_on_cpu: int
    tail_experts_on_cpu: int
    output_on_gpu: bool
    regular: bool
    """Whether there is no tail, or it has about as many layers on the CPU as each window."""
    stop_share: float
    """The share of the layers on the CPU in a stop with the tail and one window."""
    steps: tuple[tuple[float, int, int], ...]
    layers: int
    ring_passes: tuple[tuple[float, int], ...]
    """For each window and the tail, the computing seconds of a chunk and the bytes that may stream."""

    @property
    def streams(self) -> bool:
        return self.over > 0


@dataclass(frozen=True, slots=True)
class Held:
    """Costs of an option with minimum read-ahead: seconds of all windows and of reading, for decode and for a chunk."""

    read_ahead: int
    decode_s: float
    decode_read_s: float
    chunk_s: float
    chunk_read_s: float


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan without its read-ahead: members in ring order, rounds, cuts within a round and before the tail."""

    members: tuple[int, ...]
    rounds: int
    bounds: tuple[tuple[int, int], ...]
    columns: int
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Hops:
    """Seconds of all hops of a token and of a chunk, and of the busiest link."""

    one: float = 0.0
    chunk: float = 0.0
    link: float = 0.0
    chunk_link: float = 0.0


class Brute:
    """The best plan by exhaustive search."""

    def __init__(self, instance: Instance, objective: Objective) -> None:
        self._instance, self._objective = instance, objective
        self._options = cache(self._find_options)
        self._parts = cache(self._find_part)
        self._windows = cache(self._find_windows)
        self._steps = cache(self._find_steps)
        self._hops = cache(self._find_hops)
        self._costs = cache(self._find_costs)
        model = instance.model
        self._sizes = [layer.size_bytes for layer in model.layers]
        self._reserve = min(16 << 20, 2 * max(self._sizes))
        self._kv = [instance.kv_bytes[kind] for kind in instance.kind_of]
        self._checkpoints = [instance.checkpoint_bytes[kind] for kind in instance.kind_of]
        self._experts = [layer.expert_bytes for layer in model.layers]
        self._by_expert = any(self._experts)
        self._held_bytes = [size + kv for size, kv in zip(self._sizes, self._kv, strict=True)]
        uses = model.expert_use or [model.experts_used / model.experts] if self._by_expert else [1.0]
        self._uses = sorted(uses)
        self._buffer = cost.compute_buffer_bytes(model, instance.workload)
        self._window = cost.window_bytes(model, instance.workload)
        self._copied = max(max(math.ceil(size / 2), kv) for size, kv in zip(self._sizes, self._kv, strict=True))
        self._besides = cost.RUNTIME_BYTES + cost.hidden_bytes(model, instance.workload) + self._buffer

    def best(self) -> tuple[float, Plan] | None:
        """The smallest objective in seconds and its plan; None if nothing fits."""
        found: tuple[float, Layout, list[float]] | None = None
        layouts = [(self._floor(layout), i, False, layout) for i, layout in enumerate(self._layouts())]
        heapify(layouts)
        while layouts:
            minimum, i, is_priced, layout = heappop(layouts)
            if math.isinf(minimum) or (found is not None and minimum >= found[0] * (1 - CLOSE)):
                break
            if not is_priced:
                heappush(layouts, (self._bound(layout), i, True, layout))
                continue
            answer = self._settled(layout)
            if answer is not None and (found is None or answer[0] < found[0]):
                found = (answer[0], layout, answer[1])
        return None if found is None else (found[0], self._plan(found[1], found[2]))

    def _layouts(self) -> Iterator[Layout]:
        total = len(self._instance.model.layers)
        maximum = total - self._instance.model.tail_layers
        for option in self._options(0, (), (0, total), 1):
            yield Layout((0,), 1, ((0, 0),), 0, (option,))
        for members in self._rings():
            for rounds in range(1, maximum // len(members) + 1):
                for columns in range(len(members), maximum // rounds + 1):
                    yield from self._ring(members, rounds, columns)

    def _rings(self) -> Iterator[tuple[int, ...]]:
        others = range(1, len(self._instance.devices))
        for count in range(1, len(others) + 1):
            for order in permutations(others, count):
                yield (0, *order)

    def _ring(self, members: tuple[int, ...], rounds: int, columns: int) -> Iterator[Layout]:
        """All layouts that give ``members`` the ``columns`` layers of a round; the head also has the tail."""
        model = self._instance.model
        multiple, offset, total = model.cut_multiple, model.cut_offset, len(model.layers)
        for ends in self._ends(len(members), columns):
            if any((r * columns + end) % multiple != offset for r in range(rounds) for end in ends):
                continue
            bounds = tuple(zip((0, *ends), ends, strict=False))
            choices = []
            for place, (member, (a, b)) in enumerate(zip(members, bounds, strict=True)):
                ranges = tuple((r * columns + a, r * columns + b) for r in range(rounds))
                tail = (rounds * columns, total) if place == 0 else None
                choices.append(self._options(member, ranges, tail, len(members)))
            for options in product(*choices):
                yield Layout(members, rounds, bounds, columns, options)

    @staticmethod
    def _ends(count: int, columns: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (columns,)
            return
        for first in range(1, columns - count + 2):
            for rest in Brute._ends(count - 1, columns - first):
                yield (first, *(first + end for end in rest))

    def _find_options(
        self, m: int, ranges: tuple[tuple[int, int], ...], tail: tuple[int, int] | None, ring: int
    ) -> list[Option]:
        """The options of member ``m`` for these layers, without those that are worse in every respect."""
        member = self._instance.members[m]
        width = ranges[0][1] - ranges[0][0] if ranges else 0
        tail_width = tail[1] - tail[0] if tail else 0
        found = []
        kept = int(self._instance.model.beside_values > 0 and ring > 1)
        if ranges and (ranges[0][0] or len(ranges) > 1):
            width -= kept
        tail_width -= kept if tail else 0
        splits = [self._splits_of(m, ranges, width), self._splits_of(m, (tail,) if tail else (), tail_width)]
        for of_window, of_tail in product(*splits):
            outputs = (True,) if any(of_tail[0]) else (False, True) if tail and member.has_gpu else (False,)
            for output_on_gpu in outputs:
                option = self._option(m, ranges, tail, ring, of_window, of_tail, output_on_gpu)
                if option is not None and self._min_read_ahead(option) is not None:
                    found.append(option)
        kept: list[tuple[tuple[float, ...], Option]] = []
        for figures, option in sorted(((self._figures(option), option) for option in found), key=lambda each: each[0]):
            if not any(all(map(le, other, figures)) for other, _ in kept):
                kept.append((figures, option))
        return [option for _, option in kept]

    def _splits_of(self, m: int, ranges: tuple[tuple[int, int], ...], width: int) -> list[tuple[tuple[int, ...], int]]:
        """The possible numbers of layers on each GPU, and of those whose experts are on the CPU, as far as these
        layers alone fit into the GPUs."""
        limits = self._instance.members[m].vram_limits
        return [
            (gpus, experts_on_cpu)
            for gpus in _splits(width, len(limits))
            for experts_on_cpu in self._experts_on_cpu(sum(gpus))
            if not ranges or all(map(le, self._windows(m, ranges, gpus, experts_on_cpu).vram, limits))
        ]

    def _experts_on_cpu(self, on_gpu: int) -> range:
        """The possible numbers of layers on a GPU with experts on the CPU."""
        if not self._by_expert or self._instance.experts == "gpu":
            return range(1)
        return range(on_gpu if self._instance.experts == "cpu" else 0, on_gpu + 1)

    def _figures(self, option: Option) -> tuple[float, ...]:
        """Figures that are better if smaller, for the objective; those that must be equal appear with both signs."""
        found = [option.output_s, float(max(option.over, 0))]
        if self._objective != "ttft":
            found += [option.decode.compute_s] + [option.decode.rest_s] * (not self._by_expert)
            found += [option.decode.tail_s, -option.decode.tail_s]
        if self._objective in ("ttft", "balanced"):
            found += [option.chunk.compute_s] + [option.chunk.rest_s, option.chunk.layers_s] * (not self._by_expert)
            found += [option.chunk.tail_s, -option.chunk.tail_s]
        found.append(-float(option.maximum) if option.streams else -math.inf)
        if self._by_expert and self._objective in ("ttft", "balanced"):
            found += [figure for seconds, size in option.ring_passes for figure in (seconds, size, -size)]
        if not self._by_expert:
            found += [option.stop_share, -option.stop_share] if option.streams else [-math.inf, -math.inf]
            found.append(-float(option.layers) if option.streams else -math.inf)
        return tuple(found)

    def _option(
        self,
        m: int,
        ranges: tuple[tuple[int, int], ...],
        tail: tuple[int, int] | None,
        ring: int,
        of_window: tuple[tuple[int, ...], int],
        of_tail: tuple[tuple[int, ...], int],
        output_on_gpu: bool,
    ) -> Option | None:
        """``of_window`` and ``of_tail``: layers on each GPU, and the number of those with experts on the CPU."""
        instance, member = self._instance, self._instance.members[m]
        parts = [self._windows(m, ranges, *of_window)] if ranges else []
        parts += [self._parts(m, *tail, *of_tail)] if tail else []
        windows = len(ranges) + (tail is not None)
        output = instance.model.output_bytes if tail else 0
        on_cpu = sum(part.cpu for part in parts)
        uses_gpus = [
            any(part.gpus[gpu] for part in parts) or (output_on_gpu and gpu == 0) for gpu in range(member.gpu_count)
        ]
        vrams, offloads = [], member.offloads_prefill
        for gpu, uses in enumerate(uses_gpus):
            vram = sum(part.vram[gpu] for part in parts) + (output if output_on_gpu and gpu == 0 else 0)
            is_offloading = offloads and gpu == member.offloading_gpu
            if uses or is_offloading:
                context = member.profile.gpus[gpu].context_bytes or cost.GPU_RUNTIME_BYTES
                vram += context + windows * (self._buffer + (self._copied if is_offloading else 0))
            if is_offloading and not output_on_gpu:
                vram += max(0, output - self._copied)
            vrams.append(vram)
        if any(vram > limit for vram, limit in zip(vrams, member.vram_limits, strict=True)):
            return None
        if ring > 1 and sum(part.size for part in parts) > member.disk_limit:
            return None
        ram = sum(part.ram for part in parts) + self._besides + windows * self._window
        ram += (instance.head_bytes(windows) if tail else 0) + (0 if output_on_gpu else output)
        over = ram + sum(member.in_ram(vrams)) - member.ram_limit
        if offloads and over > 0:
            return None  # streamed layers would travel twice
        maximum = sum(part.streamable for part in parts)
        pool = max(self._experts) if self._by_expert else 0
        output_s = (member.gpu_output_s if output_on_gpu else member.cpu_output_s) if tail else 0.0
        both, steps_s = [], []
        for i, (phase, out, spare) in enumerate(((member.decode, output_s, self._buffer), (member.prefill, 0.0, 0))):
            step_s = member.step_s * any(part.uses_cpu for part in parts)
            step_s += sum(seconds for seconds, uses in zip(phase.gpu_steps_s, uses_gpus, strict=True) if uses)
            steps_s.append(step_s)
            cpu_s = sum(part.cpu_s[i] for part in parts)
            rest = sum(part.rest_s[i] for part in parts) + out + windows * step_s
            compute, tail_s = rest + cpu_s, 0.0
            if tail and ring > 1:
                tail_s = parts[-1].cpu_s[i] + parts[-1].rest_s[i] + step_s
                rest -= out + step_s + sum(of_tail[0]) * max(phase.gpu)
            picked = tuple(1 - (1 - use) ** phase.rows for use in self._uses)
            both.append(Times(compute, rest, tail_s, 2 * min(phase.cpu), cpu_s, spare, picked))
        disk, slows = member.disk_bytes_per_s, member.profile.disk.slows_s_per_byte
        window, k = ranges[0][1] - sum(of_window[0]) - ranges[0][0] if ranges else 0, len(ranges)
        tail_cpu = parts[-1].cpu if tail else 0
        longer = tail_cpu - window
        regular = not tail or k < 2 or self._by_expert or -(k // 2) <= longer <= -(-k // 2)
        stop_share = (tail_cpu + window) / max(1, on_cpu)
        steps = self._steps(m)
        ring_passes = tuple((seconds + steps_s[1], size) for part in parts for seconds, size in part.ring_passes)
        return Option(
            *both,
            output_s,
            over,
            maximum,
            pool,
            disk,
            slows,
            of_window[0],
            of_tail[0],
            of_window[1],
            of_tail[1],
            output_on_gpu,
            regular,
            stop_share,
            steps,
            on_cpu,
            ring_passes,
        )

    def _find_part(self, m: int, first: int, last: int, gpus: tuple[int, ...], experts_on_cpu: int) -> Part:
        on_cpu, on_gpus, expert_layers = _placed(first, last, gpus, experts_on_cpu)
        member, kinds = self._instance.members[m], self._instance.kind_of
        held, experts, count = self._held_bytes, self._experts, len(self._instance.kinds)
        seconds = []
        for phase in (member.decode, member.prefill):
            rest = 0.0
            for gpu, layers in enumerate(on_gpus):
                rest += sum(phase.gpu[gpu * count + kinds[i]] for i in layers)
                rest += sum(phase.experts_on_cpu[gpu * count + kinds[i]] for i in expert_layers if i in layers)
            seconds.append((sum(phase.cpu[kinds[i]] for i in on_cpu), rest))
        in_ram = sum(experts[i] for i in expert_layers)
        of_cpu = sum(experts[i] for i in on_cpu)
        return Part(
            cpu=len(on_cpu),
            uses_cpu=bool(on_cpu or expert_layers),
            gpus=gpus,
            vram=tuple(sum(held[i] - experts[i] * (i in expert_layers) for i in layers) for layers in on_gpus),
            ram=sum(held[i] for i in on_cpu) + in_ram + sum(self._checkpoints[first:last]),
            size=sum(self._sizes[first:last]),
            streamable=of_cpu + in_ram if self._by_expert else sum(self._sizes[i] for i in on_cpu),
            cpu_s=(seconds[0][0], seconds[1][0]),
            rest_s=(seconds[0][1], seconds[1][1]),
            ring_passes=((sum(seconds[1]), of_cpu + in_ram),),
        )

    def _find_windows(
        self, m: int, ranges: tuple[tuple[int, int], ...], gpus: tuple[int, ...], experts_on_cpu: int
    ) -> Part:
        """The windows of all rounds as one."""
        parts = [self._parts(m, first, last, gpus, experts_on_cpu) for first, last in ranges]
        return Part(
            cpu=sum(part.cpu for part in parts),
            uses_cpu=any(part.uses_cpu for part in parts),
            gpus=gpus,
            vram=tuple(map(sum, zip(*(part.vram for part in parts), strict=True))),
            ram=sum(part.ram for part in parts),
            size=sum(part.size for part in parts),
            streamable=sum(part.streamable for part in parts),
            cpu_s=(sum(part.cpu_s[0] for part in parts), sum(part.cpu_s[1] for part in parts)),
            rest_s=(sum(part.rest_s[0] for part in parts), sum(part.rest_s[1] for part in parts)),
            ring_passes=tuple(ring_pass for part in parts for ring_pass in part.ring_passes),
        )

    def _find_steps(self, m: int) -> tuple[tuple[float, int, int], ...]:
        """Shares that may stream, each with its read-ahead: a part and what is read meanwhile; two parts."""
        if self._by_expert:
            return ((1.0, 0, 0),)
        member, largest = self._instance.members[m], max(self._sizes)
        read = max(member.decode.cpu) * member.disk_bytes_per_s
        minimum = min(16 << 20, 2 * largest)
        held = [max(minimum, math.ceil(x * largest + min(x * largest, read))) for x in SHARES]
        return tuple((x, a, max(a, math.ceil(2 * x * largest))) for x, a in zip(SHARES, held, strict=True))

    def _find_hops(self, members: tuple[int, ...], rounds: int) -> Hops:
        instance = self._instance
        if len(members) == 1:
            return Hops()
        hops = chunk_hops = link = chunk_link = air = chunk_air = 0.0
        rows = instance.members[0].prefill.rows
        for a, b in zip(members, (*members[1:], members[0]), strict=True):
            measured = instance.link(a, b)
            one = instance.model.hop_values * 4 / measured.bytes_per_s
            late = measured.round_trip_s / 2 + 0.185 * measured.late_s
            hops += rounds * (late + one)
            chunk_hops += rounds * (late + rows * one)
            ends = instance.devices[a], instance.devices[b]
            if ends[0].host != ends[1].host and any(end.wireless for end in ends):
                air, chunk_air = air + rounds * one, chunk_air + rounds * rows * one
            link, chunk_link = max(link, rounds * one), max(chunk_link, rounds * rows * one)
        link, chunk_link = max(link, air), max(chunk_link, chunk_air)
        return Hops(hops, chunk_hops, link, chunk_link)

    def _min_read_ahead(self, option: Option) -> int | None:
        """The minimum read-ahead; None if it does not fit."""
        if not option.streams:
            return 0
        if not option.regular:
            return None
        for share, read_ahead, _ in option.steps:
            streamed = option.over + self._reserve + read_ahead
            if streamed <= share * option.maximum and streamed <= option.maximum - option.pool:
                return read_ahead
        return None

    def _find_costs(self, option: Option, k: int, waits: bool) -> Held | None:
        read_ahead = self._min_read_ahead(option)
        if read_ahead is None:
            return None
        streamed = option.over + self._reserve + read_ahead if option.streams else 0
        both = []
        for times in (option.decode, option.chunk):
            read = times.read(streamed, option.maximum)
            window = times.compute_s
            if self._by_expert:
                window += read / option.disk
            elif waits and read > k * read_ahead:
                window += option.slows * (read - k * read_ahead)
                window = max(window, times.rest_s + k * times.edge_s + (read - k * read_ahead) / option.disk)
            both += [window, read / option.disk]
        return Held(read_ahead, *both)

    def _floor(self, layout: Layout) -> float:
        """A quick lower bound: all windows and hops one after the other."""
        hops = self._hops(layout.members, layout.rounds)
        token_s, first_s = hops.one, hops.chunk
        for option in layout.options:
            costs = self._costs(option, layout.rounds, layout.rounds == 1)
            if costs is None:
                return math.inf
            token_s += costs.decode_s
            first_s += costs.chunk_s + option.output_s
        return self._value(token_s, first_s, token_s / self._instance.workload.sequences) * (1 - CLOSE)

    def _bound(self, layout: Layout) -> float:
        return self._priced(layout, waits=layout.rounds == 1)

    def _priced(self, layout: Layout, *, waits: bool) -> float:
        """The objective of ``layout`` with minimum read-ahead; without ``waits`` a lower bound for any read-ahead."""
        hops, k, n = self._hops(layout.members, layout.rounds), layout.rounds, self._instance.chunks
        token_s, read_s, busy_s = hops.one, 0.0, hops.link
        tail, windows, trains, reading = layout.options[0].chunk.tail_s, [], [], 0.0
        for i, option in enumerate(layout.options):
            costs = self._costs(option, k, waits)
            if costs is None:
                return math.inf
            read_ahead, read = costs.read_ahead, costs.chunk_read_s
            token_s, read_s = token_s + costs.decode_s, max(read_s, costs.decode_read_s)
            busy_s = max(busy_s, costs.decode_s)
            windows.append(costs.chunk_s)
            stop = (windows[-1] - tail * (i == 0)) / k
            trains.append((n * stop, stop))
            if option.streams:
                reading = max(reading, n * read - read_ahead / option.disk)
                if waits and i and not self._by_expert:
                    late = n * option.chunk.rest_s / k + n * read / k - read_ahead / option.disk
                    trains.append((late, stop))
        once = sum(windows) + hops.chunk
        ring_pass = (once - tail) / k
        round_time = max(ring_pass, n * hops.chunk_link / k, *(train for train, _ in trains))
        last = max((n - 1) * max(tail, hops.chunk_link / k), *(train - stop for train, stop in trains))
        first = max((k - 1) * round_time + ring_pass + tail + last, n * windows[0], reading)
        if self._by_expert and len(layout.members) > 1:
            first = self._picked_s(layout, n)
        token_s = max(token_s, read_s)
        period = max(token_s / self._instance.workload.sequences, busy_s, read_s)
        return self._value(token_s, first + sum(option.output_s for option in layout.options), period)

    def _picked_s(self, layout: Layout, n: int) -> float:
        """The time until all ``n`` chunks are through if nothing is read ahead; each device has its own machine.

        A device begins a round when the first chunk has arrived and its previous round is done. From then on chunks are
        spaced by the slowest stop or link, or by all hops that share the air.
        """
        instance, members = self._instance, layout.members
        rows, ends = instance.members[0].prefill.rows, [*members[1:], members[0]]
        links = [instance.link(a, b) for a, b in zip(members, ends, strict=True)]
        sends = [rows * instance.model.hop_values * 4 / link.bytes_per_s for link in links]
        takes = [send + link.round_trip_s / 2 + 0.185 * link.late_s for send, link in zip(sends, links, strict=True)]
        wireless = [
            instance.devices[a].wireless or instance.devices[b].wireless for a, b in zip(members, ends, strict=True)
        ]
        air = sum(send for send, is_in in zip(sends, wireless, strict=True) if is_in)
        sends = [air if is_in else send for send, is_in in zip(sends, wireless, strict=True)]
        stops = []
        for option in layout.options:
            streamed = option.over + self._reserve if option.streams else 0
            a_byte = option.chunk.read(streamed, option.maximum) / max(1, option.maximum) / option.disk
            stops.append([seconds + size * a_byte for seconds, size in option.ring_passes])
        free, sent, first, last = [0.0] * len(members), [0.0] * len(members), 0.0, 0.0
        for at in range(layout.rounds * len(members) + 1):
            r, i = divmod(at, len(members))
            stop = stops[i][r]
            first = max(first, free[i]) + stop
            last = max(last + stop, first + (n - 1) * stop)
            free[i] = last
            if r < layout.rounds:
                first = max(first, sent[i])
                last = max(last, first + (n - 1) * sends[i])
                sent[i] = last + sends[i]
                first, last = first + takes[i], last + takes[i]
        return last

    def _value(self, token: float, first: float, period: float) -> float:
        match self._objective:
            case "latency":
                return token
            case "ttft":
                return first
            case "throughput":
                return period
            case "balanced":
                return first + self._instance.workload.answer_tokens * token

    def _settled(self, layout: Layout) -> tuple[float, list[float]] | None:
        """The objective of ``layout`` with the best read-ahead, in bytes per device; None if nothing fits."""
        no_prompt = layout.rounds == 1 and self._objective in ("latency", "throughput")
        if no_prompt or self._by_expert or not any(option.streams for option in layout.options):
            # Read-ahead saves nothing here, so the minimum is best.
            return self._priced(layout, waits=True), [
                float(self._min_read_ahead(option) or 0) for option in layout.options
            ]
        problem = pulp.LpProblem("ahead", pulp.LpMinimize)
        hops, k, n = self._hops(layout.members, layout.rounds), layout.rounds, self._instance.chunks
        names = ("token", "first", "period", "round", "last")
        token, first, period, round_time, last = (problem.add_variable(name, 0) for name in names)
        held = [self._held(problem, i, option) for i, option in enumerate(layout.options)]
        ms = [UNIT / option.disk * MS for option in layout.options]
        slows = [option.slows * UNIT * MS for option in layout.options]
        decode = [
            problem.add_variable("decode_0", 0)
            if i == 0 and k > 1
            else self._waits(problem, f"decode_{i}", option.decode, k, held[i], ms[i], slows[i])
            for i, option in enumerate(layout.options)
        ]
        # Of the head without its tail, which is separate: for a single chunk, and for one in a train of chunks.
        chunk, busy = (
            [problem.add_variable(f"{name}_{i}", 0) for i in range(len(layout.options))] for name in ("chunk", "busy")
        )
        link, tail, busy_tail = hops.chunk_link * MS, *[layout.options[0].chunk.tail_s * MS] * 2
        for i, option in enumerate(layout.options):
            of_windows, *of_tail = self._chunk_stops(option, k, i == 0)
            pairs = [(chunk[i], busy[i], of_windows)]
            if of_tail and held[i] is not None:
                tail, busy_tail = problem.add_variable("tail", 0), problem.add_variable("busy_tail", 0)
                pairs.append((tail, busy_tail, *of_tail))
            for each, following, part in pairs:
                self._chunk_waits(problem, each, following, option, part, held[i], n, ms[i], slows[i])
        ring_pass = (pulp.lpSum(chunk) + hops.chunk * MS) * (1 / k)
        once = k * ring_pass + tail
        if k > 1:
            short = self._head_stops(problem, layout.options[0], k, held[0], ms[0], slows[0], decode[0])
        passing = pulp.lpSum(decode) + hops.one * MS
        problem += token >= passing
        for i, option in enumerate(layout.options):
            if i and k > 1 and held[i] is not None:
                # Reading of missing bytes overlaps with k - 1 rounds without the tail and with this device's stop.
                read = held[i][0] - option.decode.spare / UNIT - held[i][1]
                rounds = (passing - decode[0]) * (1 / k) + short
                problem += token - passing >= read * ms[i] - (k - 1) * rounds - decode[i] * (1 / k)
        problem += period * self._instance.workload.sequences >= token
        problem += period >= hops.link * MS
        problem += round_time >= ring_pass
        problem += round_time >= n * link / k
        problem += last >= (n - 1) * busy_tail
        problem += last >= (n - 1) * link / k
        problem += first >= once
        problem += first >= n * (busy[0] + busy_tail)
        problem += first >= (k - 1) * round_time + ring_pass + tail + last
        for i, option in enumerate(layout.options):
            stop, train = chunk[i] * (1 / k), busy[i] * (n / k)
            problem += round_time >= train
            problem += last >= train - stop
            problem += period >= decode[i]
            if held[i] is None:
                continue
            streamed, read_ahead, in_decode, exact, is_wide = held[i]
            problem += token >= in_decode * ms[i]
            problem += period >= in_decode * ms[i]
            read = streamed * ms[i]
            problem += first >= n * read - read_ahead * ms[i]
            if i:
                train = read * (n / k) - read_ahead * ms[i] + n * option.chunk.rest_s * MS / k
                problem += round_time >= train
                problem += last >= train - stop
            around = ring_pass - stop + tail if i else 0
            problem += first >= around + option.chunk.edge_s * MS + n * read - read_ahead * ms[i]
            within = 2 * n * read - (n * option.layers + 1) * exact * ms[i] - 1e7 * is_wide
            problem += first >= around + n * option.chunk.layers_s * MS + within
        output = sum(option.output_s for option in layout.options) * MS
        problem += self._value(token, first + output, period)
        tight = {"mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9}
        problem.solve(pulp.HiGHS(msg=False, gapRel=1e-10, gapAbs=1e-9, threads=1, **tight))
        if problem.sol_status != pulp.LpSolutionOptimal:
            return None
        return float(pulp.value(problem.objective)) / MS, [0.0 if h is None else pulp.value(h[1]) * UNIT for h in held]

    def _waits(
        self, problem: pulp.LpProblem, name: str, times: Times, k: int, held: tuple | None, ms: float, slows: float
    ) -> object:
        """Milliseconds of all windows of a device."""
        window = problem.add_variable(name, 0)
        if held is None:
            problem += window >= times.compute_s * MS
        else:
            waits = problem.add_variable(f"{name}_waits", 0, 1, pulp.LpInteger)
            late = held[0] - times.spare / UNIT - k * held[1]
            problem += late <= 1e6 * waits
            problem += window >= times.compute_s * MS
            problem += window >= times.compute_s * MS + late * slows
            problem += window >= (times.rest_s + k * times.edge_s * waits) * MS + late * ms
        return window

    def _chunk_stops(self, option: Option, k: int, is_head: bool) -> list[tuple[int, float, float, float, float]]:
        """Groups of a chunk's stops: count, seconds, seconds that never overlap with reading, layers, share read.

        First all windows (without the head's tail), then the head's tail if it is separate.
        """
        times = option.chunk
        windows, rest = times.compute_s - times.tail_s, times.rest_s
        if not is_head or k == 1:
            return [(k, windows, rest - times.tail_s, option.layers, 1.0)]
        window_share = (1 - option.stop_share) / (k - 1)
        tail_share = option.stop_share - window_share
        in_tail = round(tail_share * option.layers)
        return [
            (k, windows, rest, option.layers - in_tail, 1 - tail_share),
            (1, times.tail_s, 0.0, in_tail, tail_share),
        ]

    def _chunk_waits(
        self,
        problem: pulp.LpProblem,
        each: object,
        following: object,
        option: Option,
        part: tuple[int, float, float, float, float],
        held: tuple | None,
        n: int,
        ms: float,
        slows: float,
    ) -> None:
        """Bound the time of these stops from below, for a single chunk and for one in a train of ``n``."""
        stops, compute_s, rest_s, layers, share = part
        problem += following >= each
        problem += each >= compute_s * MS
        if held is None:
            return
        streamed, read_ahead, _, exact, is_wide = held
        size = streamed * share
        late = size - stops * read_ahead
        waits = problem.add_variable(f"{following.name}_waits", 0, 1, pulp.LpInteger)
        problem += late <= 1e6 * waits
        problem += each >= compute_s * MS + late * slows
        problem += each >= (rest_s + stops * option.chunk.edge_s * waits) * MS + late * ms
        for window, count in ((each, 1), (following, n)):
            within = (2 * size - exact * (layers + stops / count)) * ms - 1e7 * is_wide
            problem += window >= compute_s * MS + within
            problem += window >= compute_s * MS + within + late * slows

    def _head_stops(
        self, problem: pulp.LpProblem, head: Option, k: int, held: tuple | None, ms: float, slows: float, both: object
    ) -> object:
        """Milliseconds of a head stop without the tail; ``both`` is at least the sum of these and the one with it."""
        times = head.decode
        window = (times.compute_s - head.output_s - times.tail_s) / k * MS
        besides = (times.tail_s + head.output_s) * MS
        short, long = problem.add_variable("short_stop", 0), problem.add_variable("long_stop", 0)
        problem += both >= (k - 1) * short + long
        problem += short >= window
        problem += long >= short + besides
        if held is None:
            return short
        read = held[0] - times.spare / UNIT
        shares = (1 - head.stop_share) / (k - 1), head.stop_share
        for name, stop, computing, share in (
            ("short", short, window, shares[0]),
            ("long", long, window + besides, shares[1]),
        ):
            size = read * share
            waits = problem.add_variable(f"{name}_waits", 0, 1, pulp.LpInteger)
            late = size - held[1]
            problem += late <= 1e6 * waits
            problem += stop >= computing + late * slows
            problem += stop >= (times.rest_s / k + times.edge_s * waits) * MS + late * ms
        return short

    def _held(self, problem: pulp.LpProblem, i: int, option: Option) -> tuple | None:
        """In megabytes: bytes streamed, read ahead, streamed in decode; the chosen read-ahead, whether it is
        exceeded."""
        if not option.streams:
            return None
        read_ahead, in_decode = (problem.add_variable(f"{name}_{i}", 0) for name in ("ahead", "decode"))
        streamed = read_ahead + (option.over + self._reserve) / UNIT
        # For each step: the read-ahead that it needs, or that a later one needs, or at least two parts.
        choices = [
            (share, other, other is None and wide)
            for j, (share, minimum, wide) in enumerate(option.steps)
            for other in (*(needed for _, needed, _ in option.steps[j:]), None)
        ]
        picked = [problem.add_variable(f"step_{i}_{j}", 0, 1, pulp.LpInteger) for j in range(len(choices))]
        problem += pulp.lpSum(picked) == 1
        minimum = pulp.lpSum(
            z * ((wide if a is None else a) / UNIT) for z, (_, a, wide) in zip(picked, choices, strict=True)
        )
        is_wide = pulp.lpSum(z for z, (_, a, _) in zip(picked, choices, strict=True) if a is None)
        problem += read_ahead >= minimum
        problem += read_ahead <= minimum + 1e6 * is_wide
        maximum = pulp.lpSum(
            z * (share * option.maximum / UNIT) for z, (share, _, _) in zip(picked, choices, strict=True)
        )
        problem += streamed <= maximum
        problem += streamed <= (option.maximum - option.pool) / UNIT
        if self._by_expert:
            problem += read_ahead == 0
        problem += in_decode >= streamed - option.decode.spare / UNIT
        exact = pulp.lpSum(z * (a / UNIT) for z, (_, a, _) in zip(picked, choices, strict=True) if a is not None)
        return streamed, read_ahead, in_decode, exact, is_wide

    def _plan(self, layout: Layout, held: Sequence[float]) -> Plan:
        names = [self._instance.devices[m].device for m in layout.members]
        total, first, route = len(self._instance.model.layers), layout.rounds * layout.columns, []
        for r in range(layout.rounds if len(names) > 1 else 0):
            for name, (a, b), option in zip(names, layout.bounds, layout.options, strict=True):
                at = r * layout.columns
                route.append(
                    Window(device=name, first=at + a, last=at + b, **_on_gpus(option.gpu, option.experts_on_cpu))
                )
        route.append(
            Window(
                device=names[0],
                first=first,
                last=total,
                **_on_gpus(layout.options[0].tail_gpu, layout.options[0].tail_experts_on_cpu),
            )
        )
        streaming = tuple(
            Streaming(
                device=name,
                streamed_bytes=option.over + self._reserve + round(read_ahead),
                read_ahead_bytes=round(read_ahead),
            )
            for name, option, read_ahead in zip(names, layout.options, held, strict=True)
            if option.streams
        )
        plan = Plan(
            rounds=layout.rounds,
            route=tuple(route),
            output_on_gpu=layout.options[0].output_on_gpu,
            streaming=streaming,
            left_out=(),
        )
        return plan.with_offload(self._instance.prefill_offload)


def _splits(count: int, gpus: int) -> Iterator[tuple[int, ...]]:
    """All ways to put at most ``count`` layers on the GPUs."""
    return (split for split in product(*[range(count + 1)] * gpus) if sum(split) <= count)


def _on_gpus(split: tuple[int, ...], experts_on_cpu: int) -> dict[str, object]:
    others = split[1:] if any(split[1:]) else ()
    return {"gpu_layers": sum(split), "cpu_experts": experts_on_cpu, "other_gpus": others}


def _placed(first: int, last: int, split: tuple[int, ...], experts_on_cpu: int) -> tuple[range, list[range], range]:
    """The layers of a window on the CPU and on each GPU (the first has the last), and those with experts on the CPU."""
    on_gpus, end = [], last
    for count in split:
        on_gpus.append(range(end - count, end))
        end -= count
    return range(first, end), on_gpus, range(end, end + experts_on_cpu)
