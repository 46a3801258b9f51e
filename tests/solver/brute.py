"""Every plan of a small question, tried: the answer that the integer program must give.

Written apart from the solver: its own sums from the costs of ``instance.py``, no integer program, no bounds. Devices are
added to the ring one by one; of two ways to give them the same layers, one that is worse in every respect that the
objective looks at is dropped, which loses nothing. Each device has a machine of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product
from operator import le, mul
from typing import NamedTuple, TypeVar

from halda import Instance, Objective, Plan, Streaming, Window, cost
from halda.evaluate import spread
from halda.instance import MIN_SLOTS

Figures = tuple[float, ...]
Item = TypeVar("Item")


class Option(NamedTuple):
    """One way for a device to hold its layers: seconds of decode, prefill, output and disk (for a token and for a chunk of a
    prompt, which reads whole layers where a token reads some experts); GPU layers, streamed, slots.

    The output matrix streams only in a question that allows it.
    """

    decode_s: float
    prefill_s: float
    output_s: float
    disk_s: float
    chunk_disk_s: float
    gpu: int
    tail_gpu: int
    output_on_gpu: bool
    streamed: tuple[int, ...]
    streams_output: bool
    slots: int


class Partial(NamedTuple):
    """The devices so far: figures that add up or are the largest, and how it was done."""

    decode_s: float
    prefill_s: float
    output_s: float
    decode_max_s: float
    prefill_max_s: float
    disk_s: float
    chunk_disk_s: float
    options: tuple[Option, ...]

    def plus(self, option: Option) -> Partial:
        return Partial(
            self.decode_s + option.decode_s,
            self.prefill_s + option.prefill_s,
            self.output_s + option.output_s,
            max(self.decode_max_s, option.decode_s),
            max(self.prefill_max_s, option.prefill_s),
            max(self.disk_s, option.disk_s),
            max(self.chunk_disk_s, option.chunk_disk_s),
            (*self.options, option),
        )


NOTHING = Partial(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ())


def undominated(found: list[tuple[Figures, Item]]) -> list[Item]:
    """Those that no other matches or beats in every figure."""
    kept: list[tuple[Figures, Item]] = []
    for figures, item in sorted(found, key=lambda pair: pair[0]):
        if not any(all(map(le, other, figures)) for other, _ in kept):
            kept.append((figures, item))
    return [item for _, item in kept]


class Brute:
    """The best plan by trying all."""

    def __init__(self, instance: Instance, objective: Objective) -> None:
        self._instance = instance
        self._objective = objective
        self._options = cache(self._find_options)
        self._sizes = [layer.size_bytes for layer in instance.model.layers]
        self._kv = [instance.kv_bytes[kind] for kind in instance.kind_of]
        self._buffer = cost.compute_buffer_bytes(instance.model, instance.workload)
        self._window = cost.window_bytes(instance.model, instance.workload)
        self._besides = cost.RUNTIME_BYTES + cost.hidden_bytes(instance.model, instance.workload) + self._buffer
        model = instance.model
        self._kind_sizes = [kind.size_bytes for kind in instance.kinds]
        experts = [sum(kind.expert_bytes_by_type.values()) for kind in instance.kinds]
        self._picked = [-(-size * model.experts_used // model.experts) if size else 0 for size in experts]
        self._dense = [0 if size else whole for size, whole in zip(experts, self._kind_sizes, strict=True)]
        self._any_experts = any(experts)
        self._least_dense = min(filter(None, self._dense), default=0)

    def best(self) -> tuple[float, Plan] | None:
        """The smallest objective in seconds and its plan; None when nothing fits."""
        found: tuple[float, Plan] | None = None
        for value, plan in self._plans():
            if found is None or value < found[0]:
                found = (value, plan())
        return found

    def _plans(self) -> Iterator[tuple[float, object]]:
        instance, total = self._instance, len(self._instance.model.layers)
        cut = instance.model.cut_multiple
        for option in self._options(0, (), (0, total), 1):
            part = NOTHING.plus(option)
            yield self._value(part, (0,), 1), lambda part=part: self._plan(part, (0,), 1, ((0, 0), (0, total)), total)
        for members in self._rings():
            for rounds in range(1, (total - 1) // (cut * len(members)) + 1):
                for columns in range(cut * len(members), (total - 1) // rounds + 1, cut):
                    yield from self._ring(members, rounds, columns)

    def _rings(self) -> Iterator[tuple[int, ...]]:
        others = range(1, len(self._instance.devices))
        for count in range(1, len(others) + 1):
            for order in permutations(others, count):
                yield (0, *order)

    def _ring(self, members: Sequence[int], rounds: int, columns: int) -> Iterator[tuple[float, object]]:
        """All ways to give ``members`` the ``columns`` layers of a round; the head also has the tail."""
        cut, total = self._instance.model.cut_multiple, len(self._instance.model.layers)
        tail = (rounds * columns, total)
        fronts: dict[tuple[int, ...], list[Partial]] = {}
        for end in range(cut, columns - cut * (len(members) - 1) + 1, cut):
            ranges = tuple((r * columns, r * columns + end) for r in range(rounds))
            fronts[(end,)] = [NOTHING.plus(option) for option in self._options(0, ranges, tail, len(members))]
        for place, member in enumerate(members[1:], 1):
            left = len(members) - 1 - place
            longer: dict[tuple[int, ...], list[Partial]] = {}
            for ends, front in fronts.items():
                stops = [columns] if not left else range(ends[-1] + cut, columns - cut * left + 1, cut)
                for end in stops:
                    ranges = tuple((r * columns + ends[-1], r * columns + end) for r in range(rounds))
                    options = self._options(member, ranges, None, len(members))
                    parts = [part.plus(option) for part in front for option in options]
                    longer[(*ends, end)] = self._undominated(parts)
            fronts = longer
        for ends, front in fronts.items():
            for part in front:
                value = self._value(part, members, rounds)
                bounds = tuple(zip((0, *ends), ends, strict=False))
                yield (
                    value,
                    lambda part=part, bounds=bounds: self._plan(part, members, rounds, bounds, tail[0], columns),
                )

    def _find_options(
        self, m: int, ranges: tuple[tuple[int, int], ...], tail: tuple[int, int] | None, ring: int
    ) -> list[Option]:
        """What of it fits into the memory of member ``m``, without what is worse in every respect."""
        member = self._instance.members[m]
        width = ranges[0][1] - ranges[0][0] if ranges else 0
        tail_width = tail[1] - tail[0] if tail else 0
        found = []
        for gpu, tail_gpu in product(
            range(width + 1 if member.has_gpu else 1), range(tail_width + 1 if member.has_gpu else 1)
        ):
            for output_on_gpu in (True,) if tail_gpu else (False, True) if tail and member.has_gpu else (False,):
                on_cpu = [layer for a, b in ranges for layer in range(a, b - gpu)]
                on_gpu = [layer for a, b in ranges for layer in range(b - gpu, b)]
                if tail:
                    on_cpu += range(tail[0], tail[1] - tail_gpu)
                    on_gpu += range(tail[1] - tail_gpu, tail[1])
                windows = len(ranges) + bool(tail)
                found += self._fitting(m, on_cpu, on_gpu, windows, bool(tail), output_on_gpu, gpu, tail_gpu, ring)
        return undominated([((o.decode_s, o.prefill_s, o.output_s, o.disk_s, o.chunk_disk_s), o) for o in found])

    def _fitting(
        self,
        m: int,
        on_cpu: list[int],
        on_gpu: list[int],
        windows: int,
        is_head: bool,
        output_on_gpu: bool,
        gpu: int,
        tail_gpu: int,
        ring: int,
    ) -> Iterator[Option]:
        instance, member, sizes, kv = self._instance, self._instance.members[m], self._sizes, self._kv
        output = instance.model.output_bytes if is_head else 0
        vram = sum(sizes[i] + kv[i] for i in on_gpu) + (output if output_on_gpu else 0)
        if on_gpu or output_on_gpu:
            vram += cost.GPU_RUNTIME_BYTES + windows * self._buffer  # each stays there
        if vram > member.vram_limit:
            return
        fixed = sum(sizes[i] + kv[i] for i in on_cpu) + self._besides + windows * self._window
        fixed += (instance.head_bytes(windows) if is_head else 0) + (0 if output_on_gpu else output)
        fixed += vram if member.shares_memory else 0
        if ring > 1 and sum(sizes[i] for i in (*on_cpu, *on_gpu)) > member.disk_limit:
            return
        gpu_step_s = member.gpu_step_s if on_gpu or output_on_gpu else 0
        output_s = (member.gpu_output_s if output_on_gpu else member.cpu_output_s) if is_head else 0.0
        slot_bytes, disk_bytes_per_s, rounds = instance.slot_bytes, member.disk_bytes_per_s, max(1, windows - is_head)
        kind_sizes, picked, dense = self._kind_sizes, self._picked, self._dense
        read_s = min(kind_sizes) / disk_bytes_per_s
        phases = []  # seconds that computing takes, and those that go by beside reading
        for phase, out in ((member.decode, output_s), (member.prefill, 0.0)):
            rest = sum(phase.gpu[instance.kind_of[i]] for i in on_gpu) + out
            rest += windows * (member.step_s + gpu_step_s)
            compute = rest + sum(phase.cpu[instance.kind_of[i]] for i in on_cpu)
            if is_head and ring > 1:
                rest -= out + member.step_s + gpu_step_s + tail_gpu * max(phase.gpu)
            layer_s = min(phase.cpu)
            by_expert = phase is member.decode and self._any_experts
            phases.append((compute, rest + (0 if by_expert else rounds * (layer_s + min(layer_s, read_s)))))
        of_kind = [sum(instance.kind_of[i] == kind for i in on_cpu) for kind in range(len(instance.kinds))]
        ways = product(*(range(most + 1) for most in of_kind))
        may_stream_output = instance.output_streams and is_head and not output_on_gpu
        for counts, streams_output in product(ways, (False, True) if may_stream_output else (False,)):
            layers = sum(counts)
            if streams_output and not layers:
                continue
            streamed = sum(map(mul, counts, kind_sizes)) + (output if streams_output else 0)
            for slots in range(MIN_SLOTS, layers + 1) if layers else (0,):
                held = slots * slot_bytes
                if streams_output:
                    held = max(held, output + slot_bytes, 2 * slot_bytes)
                if fixed - streamed + held > member.ram_limit:
                    break
                ahead = rounds * (slots * slot_bytes + (max(0, output - slot_bytes) if streams_output else 0))
                unread = max((streamed - ahead) / disk_bytes_per_s, (layers - rounds * slots) * read_s)
                prefill_s = max(phases[1][0], phases[1][1] + unread) if slots else phases[1][0]
                # A token waits for the experts of each streamed layer, and reads ahead what has none.
                read_then = sum(map(mul, counts, picked)) / disk_bytes_per_s
                read_before = sum(map(mul, counts, dense)) + (output if streams_output else 0)
                few = sum(count for count, size in zip(counts, dense, strict=True) if size) - rounds * slots
                unread = max((read_before - ahead) / disk_bytes_per_s, few * self._least_dense / disk_bytes_per_s)
                hidden = output_s if streams_output and ring == 1 else 0  # it is computed while layers are read
                decode_s = (max(phases[0][0], phases[0][1] + unread - hidden) if slots else phases[0][0]) + read_then
                yield Option(
                    decode_s=decode_s,
                    prefill_s=prefill_s,
                    output_s=output_s,
                    disk_s=read_before / disk_bytes_per_s + read_then,
                    chunk_disk_s=streamed / disk_bytes_per_s,
                    gpu=gpu,
                    tail_gpu=tail_gpu,
                    output_on_gpu=output_on_gpu,
                    streamed=tuple(counts),
                    streams_output=streams_output,
                    slots=slots,
                )

    def _figures(self, part: Partial) -> Figures:
        match self._objective:
            case "latency":
                return (part.decode_s, part.disk_s)
            case "ttft":
                return (part.prefill_s, part.output_s, part.prefill_max_s, part.chunk_disk_s)
            case "throughput":
                return (part.decode_s, part.decode_max_s, part.disk_s)
            case "balanced":
                disks = (part.disk_s, part.chunk_disk_s)
                return (part.decode_s, part.prefill_s, part.output_s, part.prefill_max_s, *disks)

    def _undominated(self, parts: list[Partial]) -> list[Partial]:
        return undominated([(self._figures(part), part) for part in parts])

    def _value(self, part: Partial, members: Sequence[int], rounds: int) -> float:
        instance = self._instance
        hops = chunk_hops = link = chunk_link = air = chunk_air = 0.0
        if len(members) > 1:
            rows = instance.members[0].prefill.rows
            for a, b in zip(members, (*members[1:], members[0]), strict=True):
                way = instance.link(a, b)
                one = instance.model.width * 4 / way.bytes_per_s
                late = way.round_trip_s / 2 + 0.185 * way.late_s
                hops += rounds * (late + one)
                chunk_hops += rounds * (late + rows * one)
                ends = instance.devices[a], instance.devices[b]
                if ends[0].host != ends[1].host and any(end.wireless for end in ends):
                    air, chunk_air = air + rounds * one, chunk_air + rounds * rows * one
                link, chunk_link = max(link, rounds * one), max(chunk_link, rounds * rows * one)
            link, chunk_link = max(link, air), max(chunk_link, chunk_air)
        token = max(part.decode_s + hops, part.disk_s)
        first = max(part.prefill_s + chunk_hops, part.chunk_disk_s)
        first += (instance.chunks - 1) * max(part.prefill_max_s, part.chunk_disk_s, chunk_link) + part.output_s
        match self._objective:
            case "latency":
                return token
            case "ttft":
                return first
            case "throughput":
                return max(token / instance.workload.sequences, part.decode_max_s, part.disk_s, link)
            case "balanced":
                return first + instance.workload.answer_tokens * token

    def _plan(
        self,
        part: Partial,
        members: Sequence[int],
        rounds: int,
        bounds: Sequence[tuple[int, int]],
        tail: int,
        columns: int = 0,
    ) -> Plan:
        instance, total = self._instance, len(self._instance.model.layers)
        names = [instance.devices[m].device for m in members]
        route = (
            [
                Window(device=name, first=r * columns + a, last=r * columns + b, gpu_layers=option.gpu)
                for r in range(rounds)
                for name, (a, b), option in zip(names, bounds, part.options, strict=True)
            ]
            if len(members) > 1
            else []
        )
        first = tail if route else 0
        route.append(Window(device=names[0], first=first, last=total, gpu_layers=part.options[0].tail_gpu))
        streaming = []
        for name, option in zip(names, part.options, strict=True):
            if option.slots:
                chosen: list[int] = []
                on_cpu = [
                    layer
                    for window in route
                    if window.device == name
                    for layer in range(window.first, window.last - window.gpu_layers)
                ]
                for kind, count in enumerate(option.streamed):
                    chosen += spread([layer for layer in on_cpu if instance.kind_of[layer] == kind], count)
                chosen += [total] * option.streams_output
                streaming.append(Streaming(device=name, layers=tuple(sorted(chosen)), slots=option.slots))
        return Plan(
            rounds=rounds,
            route=tuple(route),
            output_on_gpu=part.options[0].output_on_gpu,
            streaming=tuple(streaming),
            left_out=(),
        )
