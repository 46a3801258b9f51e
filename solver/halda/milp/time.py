"""Milliseconds of a token, of the first token and between tokens, as ``evaluate.py`` counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pulp

from halda.evaluate import Objective, regular_tails
from halda.instance import Instance, Phase
from halda.milp.layouts import Layout, integer
from halda.milp.memory import StreamVariables, dot
from halda.orders import HopShare, RingOrder
from halda.picking import PickedPrompt
from halda.variables import MS, Expression, positive

TIE: Final = 1e-8
"""Tie-breaker: among plans with the same TTFT or time between tokens, the one with the lower TPOT is better."""


READ_TIE: Final = 1e-8
"""Tie-breaker, per millisecond of reading: among plans with the same time, the one that reads less is better."""


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Possible numbers of layers of ``what`` of the head, each with a binary that is 1 for the actual number."""

    what: str
    lengths: range
    picked: list[Any]


@dataclass(slots=True)
class _Chunk:
    """Milliseconds of a prompt chunk: of each member's windows without the tail, and of the tail.

    ``following`` and ``tails`` are for one of many chunks that follow each other without a pause.
    """

    windows: list[Any] = field(default_factory=list)
    following: list[Any] = field(default_factory=list)
    tail: Expression = 0
    tails: Expression = 0


class ProgramTime:
    """Milliseconds of a token, of the first token and between tokens, as ``evaluate.py`` counts them."""

    def __init__(
        self,
        problem: Any,
        instance: Instance,
        layout: Layout,
        uses: tuple[Sequence[Expression], Sequence[Sequence[Expression]]],
        output_on_gpu: Any,
        streams: StreamVariables,
    ) -> None:
        self._problem = problem
        self._instance = instance
        self._layout = layout
        self._uses_cpu, self._uses_gpu = uses
        self._output_on_gpu = output_on_gpu
        self._streams = streams
        self._unit = instance.largest_layer_bytes
        self._total = sum(layer.size_bytes for layer in instance.model.layers) / self._unit
        self._decode = [member.decode for member in instance.members]
        self._prefill = [member.prefill for member in instance.members]
        self._first_ms: Expression = 0
        self._other_ms: Expression = 0
        self._lengths: tuple[_Lengths, _Lengths] | None = None
        self._reads: dict[str, Any] = {}

    def objective(self, objective: Objective) -> Expression:
        work = self._instance.workload
        match objective:
            case "latency":
                return self._token()
            case "ttft":
                return self._first_token() + TIE * self._token()
            case "throughput":
                return self._period()
            case "balanced":
                return self._first_token() + work.answer_tokens * self._token()

    def reading(self) -> Expression:
        """Return the milliseconds that all disks read for a token."""
        return pulp.lpSum(self._disks(self._decode))

    def _token(self) -> Expression:
        problem, token = self._problem, positive(self._problem, "token")
        windows = self._decode_ms = self._token_windows()
        hops = self._hops(lambda order: order.hops_s, lambda share: share.hops_s)
        passing = pulp.lpSum(windows) + hops
        problem += token >= passing, "a token passes all windows and hops"
        if self._has_long_stop:
            rounds = self._layout.rounds
            ring_passes = (rounds - 1) * (passing - self._first_ms) + self._other_ms
            for m in range(1, len(windows)):
                late = (self._size(m, self._decode[m]) - self._streams.read_ahead[m]) * self._unit_ms(m)
                waiting = late - (ring_passes + windows[m]) * (1 / rounds)
                problem += token >= passing + waiting, f"the disk of {m} reads between its stops"
        for i, disk in enumerate(self._disks(self._decode)):
            problem += token >= disk, f"a token waits for disk {i}"
        return token

    def _first_token(self) -> Expression:
        """Return TTFT as ``evaluate`` counts it; a lower bound where the layout is less precise."""
        problem, chunks, rounds = self._problem, self._instance.chunks, self._layout.rounds
        prompt, chunk = positive(problem, "prompt"), self._chunk()
        hops = self._hops(lambda order: order.chunk_hops_s, lambda share: share.chunk_hops_s)
        link = self._hops(lambda order: order.chunk_link_s, lambda _: 0.0)
        passing = pulp.lpSum(chunk.windows) + hops
        problem += prompt >= passing + chunk.tail, "a chunk passes all windows and hops"
        if self._has_uneven_stops:
            self._uneven_stops(prompt, chunk, passing, hops, link)
            return prompt + self._output()
        problem += prompt >= chunks * link, "a link is busy"
        ring_passes, last = positive(problem, "ring_passes"), positive(problem, "last_ring_pass")
        problem += ring_passes >= passing * (1 / rounds), "ring passes of one chunk"
        problem += ring_passes >= link * (chunks / rounds), "ring passes over the busiest link"
        problem += last >= (chunks - 1) * chunk.tails, "chunks in the tail"
        problem += last >= link * ((chunks - 1) / rounds), "chunks on a link"
        for i, here in enumerate(self._instance.disks):
            problem += prompt >= pulp.lpSum(self._first_read(m, chunks, 1) for m in here), f"disk {i} is busy"
        for i, host in enumerate(self._instance.processors):
            first, busy = (pulp.lpSum(each[m] for m in host) for each in (chunk.windows, chunk.following))
            problem += prompt >= chunks * (busy + chunk.tails * (0 in host)), f"machine {i} is busy"
            problem += ring_passes >= busy * (chunks / rounds), f"ring passes of machine {i}"
            stop = first * (1 / rounds)
            problem += last >= busy * (chunks / rounds) - stop, f"chunks at machine {i}"
            for m in host:
                if m and not self._instance.by_expert:
                    _, rest = self._computing(m, self._prefill[m])
                    train = rest * (chunks / rounds) + self._first_read(m, chunks, rounds)
                    problem += ring_passes >= train, f"ring passes of the disk of {m}"
                    problem += last >= train - stop, f"chunks at the disk of {m}"
        if not self._layout.loose:
            ring_pass = passing * (1 / rounds)
            problem += prompt >= (rounds - 1) * ring_passes + ring_pass + chunk.tail + last, "chunks follow each other"
            if not self._instance.by_expert:
                for m, window in enumerate(chunk.windows):
                    around = ring_pass - window * (1 / rounds) + chunk.tail if m else 0
                    self._read_all(m, prompt, around, chunks)
        return prompt + self._output()

    @property
    def _picks_one_by_one(self) -> bool:
        """Whether chunks of a prompt follow each other through layers that stream by expert."""
        instance, layout = self._instance, self._layout
        return instance.by_expert and instance.chunks > 1 and not layout.loose and layout.tail is not None

    @property
    def _has_uneven_stops(self) -> bool:
        """Whether such stops may differ from round to round."""
        differ = len(self._instance.kinds) > 1 or self._layout.columns is not None
        return self._picks_one_by_one and differ

    def _uneven_stops(
        self, prompt: Any, chunk: _Chunk, passing: Expression, hops: Expression, link: Expression
    ) -> None:
        """Constrain ``prompt`` as ``ring_passes.py`` computes it; to a lower bound if a window's layers are unknown."""
        problem, layout, chunks, rounds = self._problem, self._layout, self._instance.chunks, self._layout.rounds
        if layout.columns is not None:
            prompt_of = PickedPrompt(
                problem=problem,
                instance=self._instance,
                columns=layout.columns,
                rounds=rounds,
                used=layout.used,
                step_ms=[self._steps(m, self._prefill[m], 1) for m in range(len(layout.used))],
                read_ms=[self._read(m, phase) for m, phase in enumerate(self._prefill)],
                orders=layout.orders,
                picked=layout.picked,
            )
            problem += prompt >= prompt_of.takes(), "chunks follow each other"
            return
        last, following, minimum = positive(problem, "last_chunk"), chunks - 1, self._min_stops()
        problem += prompt >= passing + chunk.tail + last, "chunks follow each other"
        problem += last >= following * chunk.tail, "chunks in the tail"
        problem += last >= link * (following / rounds), "chunks on a link"
        problem += prompt >= link * chunks + (hops - link) * (1 / rounds) + chunk.tail, "all chunks pass a link"
        for i, host in enumerate(self._instance.processors):
            of_tail, busy = int(0 in host), positive(problem, f"busy_{i}")
            problem += (
                busy >= pulp.lpSum(chunk.windows[m] for m in host) + of_tail * chunk.tail,
                f"stops at machine {i}",
            )
            problem += last >= busy * (following / (rounds + of_tail)), f"chunks at machine {i}"
            if of_tail:
                windows = busy - chunk.tail - self._max_of_tail()
                problem += last >= windows * (following / rounds), "chunks in the head's windows"
            around = (
                pulp.lpSum(stop for m, stop in enumerate(minimum) if m not in host) + hops * (1 / rounds) + chunk.tail
            )
            problem += prompt >= busy * chunks + (1 - of_tail) * around, f"machine {i} is busy with a prompt"

    def _max_of_tail(self) -> Expression:
        """Return an upper bound of what the head's tail reads for a chunk."""
        largest = max(self._instance.streamable) / self._unit
        return self._layout.tail_in_ram * (largest * self._unit_ms(0))

    def _min_stops(self) -> list[Expression]:
        """Return a lower bound of the time of each member's window, whichever layers it has."""
        found, minimum = self._layout.variables, []
        for m, (phase, w, n, a) in enumerate(zip(self._prefill, found["w"], found["n"], found["a"], strict=True)):
            layers = (w - pulp.lpSum(n)) * min(phase.cpu)
            for gpu, (on_gpu, experts) in enumerate(zip(n, a, strict=True)):
                of_gpu = slice(gpu * len(phase.cpu), (gpu + 1) * len(phase.cpu))
                layers += on_gpu * min(phase.gpu[of_gpu]) + experts * min(phase.experts_on_cpu[of_gpu])
            minimum.append(layers * MS + self._steps(m, phase, 1))
        return minimum

    def _read_all(self, m: int, prompt: Any, around: Expression, chunks: int) -> None:
        """Count that ``m`` reads, between the beginning of its first stop and the end of its last one, all that was not
        in memory."""
        phase = self._prefill[m]
        edge = self._streams.streams[m] * (phase.edge_s * MS)
        self._problem += prompt >= around + edge + self._first_read(m, chunks, 1), f"all chunks are read by {m}"
        computing, _ = self._computing(m, phase)
        layers = chunks * pulp.lpSum(self._layout.cpu[m]) + 1
        for i, waiting in enumerate(self._within(m, chunks * self._streams.bytes[m], layers, chunks)):
            self._problem += prompt >= around + chunks * computing + waiting, f"all chunks are read by {m} and wait {i}"

    def _first_read(self, m: int, chunks: int, rounds: int) -> Expression:
        """Return the milliseconds of reading of one of ``rounds`` stops for all chunks of a prompt that begins."""
        return self._read(m, self._prefill[m]) * (chunks / rounds) - self._streams.read_ahead[m] * self._unit_ms(m)

    def _tail(self, name: str, phase: Phase) -> Expression:
        """Return the milliseconds of computing the tail. If its layers are unknown, the most favourable ones count."""
        if self._layout.tail is None:
            return 0
        found, minimum, maximum = self._steps(0, phase, 1), [], []
        for counts, seconds in zip(self._layout.tail, (phase.cpu, phase.gpu, phase.experts_on_cpu), strict=True):
            if len(counts) == len(seconds):
                found += dot(counts, [s * MS for s in seconds])
            else:
                kinds = len(seconds) // len(counts)
                of_each = [seconds[first : first + kinds] for first in range(0, len(seconds), kinds)]
                minimum.append(dot(counts, [min(each) * MS for each in of_each]))
                maximum.append(dot(counts, [max(each) * MS for each in of_each]))
        if not minimum:
            return found
        unknown = positive(self._problem, f"{name}_tail_ms")
        self._problem += unknown >= pulp.lpSum(minimum), f"{name}: a tail takes as long as its layers"
        self._problem += unknown <= pulp.lpSum(maximum), f"{name}: a tail takes no longer"
        return found + unknown

    def _period(self) -> Expression:
        period = positive(self._problem, "period")
        self._problem += period * self._instance.workload.sequences >= self._token(), "sequences take turns"
        for i, host in enumerate(self._instance.processors):
            self._problem += period >= pulp.lpSum(self._decode_ms[m] for m in host), f"machine {i} is busy with tokens"
        for i, disk in enumerate(self._disks(self._decode)):
            self._problem += period >= disk, f"disk {i} is busy with tokens"
        link = self._hops(lambda order: order.link_s, lambda _: 0.0)
        self._problem += period >= link, "a link is busy with tokens"
        return period

    def _token_windows(self) -> list[Any]:
        """V_m: return the milliseconds of each member's windows for a token, computing or waiting for the disk."""
        windows = []
        for m, phase in enumerate(self._decode):
            window = positive(self._problem, f"decode_ms_{m}")
            windows.append(window)
            layers, rest = self._computing(m, phase)
            if m == 0 and self._has_long_stop:
                self._head_stops(phase, layers + rest, rest)
                self._problem += window >= self._first_ms + self._other_ms, "stops of the head"
                continue
            output = 0 if m else self._output()
            sure = self._sure_rest(m, phase, rest, output)
            computing, size = layers + rest + output, self._size(m, phase)
            self._stops("decode", m, phase, window, computing, sure, size, self._layout.rounds)
        return windows

    def _chunk(self) -> _Chunk:
        """Return the milliseconds of all windows for a prompt chunk."""
        rounds, tail, found = self._layout.rounds, self._tail("chunk", self._prefill[0]), _Chunk()
        for m, phase in enumerate(self._prefill):
            layers, rest = self._computing(m, phase)
            count, size = pulp.lpSum(self._layout.cpu[m]), self._size(m, phase)
            computing, sure = layers + rest - (0 if m else tail), self._sure_rest(m, phase, rest, 0)
            if m == 0 and self._has_long_stop:
                assert self._layout.tail is not None
                of_window, of_tail = self._head_parts("chunk", size)
                in_tail = pulp.lpSum(self._layout.tail[0])
                found.tail, found.tails = self._follow("tail", 0, tail, 0, of_tail, in_tail, 1)
                window, following = self._follow(
                    "windows", m, computing, sure, rounds * of_window, count - in_tail, rounds
                )
            else:
                window, following = self._follow("chunk", m, computing, sure - (0 if m else tail), size, count, rounds)
                if m == 0:
                    found.tail = found.tails = tail
            if m == 0 and self._picks_one_by_one and not self._has_uneven_stops:
                of_window, of_tail = self._head_parts("chunk", self._read(0, phase) * (1 / self._unit_ms(0)))
                window = following = computing + of_window * (rounds * self._unit_ms(0))
                found.tail = found.tails = tail + of_tail * self._unit_ms(0)
            found.windows.append(window)
            found.following.append(following)
        return found

    def _follow(
        self,
        name: str,
        m: int,
        computing: Expression,
        sure: Expression,
        size: Expression,
        layers: Expression,
        stops: int,
    ) -> tuple[Any, Any]:
        """Return the milliseconds of ``stops`` stops of a chunk, and of one of many chunks that follow each other
        without a pause.

        Where fewer than two of their parts are read ahead, a chunk's CPU ``layers`` wait for each other.
        """
        problem, chunks, phase = self._problem, self._instance.chunks, self._prefill[m]
        window = positive(problem, f"{name}_ms_{m}")
        minimum = self._stops(name, m, phase, window, computing, sure, size, stops)
        if self._layout.loose or self._instance.by_expert:
            return window, window
        following, passes = window, [(1, window)]
        if chunks > 1:
            following = positive(problem, f"{name}_following_ms_{m}")
            problem += following >= window, f"{name}: no chunk at {m} is quicker than the first"
            passes.append((chunks, following))
        for many, each in passes:
            for i, waiting in enumerate(self._within(m, size, layers + stops / many)):
                for j, computed in enumerate(minimum):
                    problem += each >= computed + waiting, f"{name}: {m} waits within windows {i} {j} of {many}"
        return window, following

    def _within(self, m: int, size: Expression, layers: Expression, passes: int = 1) -> list[Expression]:
        """Return lower bounds of the milliseconds that ``layers``, of which ``size`` is read, wait for each other."""
        unit_ms = self._unit_ms(m)
        max_ms = 2 * passes * self._total * unit_ms
        return [
            (2 * size - read_ahead * layers) * unit_ms - (1 - is_min) * max_ms
            for is_min, read_ahead in self._streams.steps[m]
        ]

    def _stops(
        self,
        name: str,
        m: int,
        phase: Phase,
        stop: Any,
        computing: Expression,
        sure: Expression,
        size: Expression,
        stops: int,
    ) -> list[Expression]:
        """Constrain ``stop`` to milliseconds of ``stops`` stops that compute, or read ``size`` in addition to what is
        ``sure``.

        Returns their minimum computing times: without reading, and slowed down by reading.
        """
        problem, member, unit_ms = self._problem, self._instance.members[m], self._unit_ms(m)
        problem += stop >= computing, f"{name}: {m} computes"
        if self._instance.by_expert:
            for i, read in enumerate(self._picked(m, phase, size)):
                problem += stop >= computing + read * unit_ms, f"{name}: {m} reads what is picked {i}"
            return [computing]
        late, minimum = size - stops * self._streams.read_ahead[m], [computing]
        if member.slows_s_per_byte and not (member.has_own_host and self._layout.loose):
            slowed = (late if member.has_own_host else size) * (member.slows_s_per_byte * self._unit * MS)
            minimum.append(computing + slowed)
            problem += stop >= minimum[-1], f"{name}: {m} reads and computes"
        if not self._layout.loose:
            waits = integer(problem, f"{name}_waits_{m}", 0, 1)
            edges = waits * (stops * phase.edge_s * MS)
            problem += late <= waits * self._total, f"{name}: {m} has no edges if it does not wait"
            problem += stop >= sure + edges + late * unit_ms, f"{name}: {m} waits for its disk"
        return minimum

    @property
    def _has_long_stop(self) -> bool:
        """Whether the head's stop with the tail is distinguished from its others."""
        return self._layout.rounds > 1 and not (self._layout.loose or self._instance.by_expert)

    def _head_stops(self, phase: Phase, all_ms: Expression, rest: Expression) -> None:
        """Add the head's stop with the tail and a window, and all its others."""
        problem, rounds, output = self._problem, self._layout.rounds, self._output()
        others, tail = rounds - 1, self._tail("token", phase)
        first = self._first_ms = positive(problem, "head_first_ms")
        other = self._other_ms = positive(problem, "head_other_ms")
        window = (all_ms - tail) * (1 / rounds)
        sure = self._sure_rest(0, phase, rest, output) * (1 / rounds)
        problem += first >= tail + output + other * (1 / others), "the head computes its tail and a window"
        of_window, of_tail = self._head_parts("token", self._streams.decode[0])
        self._stops("other", 0, phase, other, others * window, others * sure, others * of_window, others)
        self._stops("first", 0, phase, first, tail + output + window, sure, of_tail + of_window, 1)

    def _head_parts(self, name: str, size: Expression) -> tuple[Expression, Expression]:
        """Return what streams of a window of the head and of its tail, in units of memory: the same of each layer,
        ``size`` in total.

        These are products of window lengths and the streamed part of a layer; so there is a binary for each length.
        """
        if self._lengths is None:
            layout, window = self._layout, self._layout.window_in_ram
            assert window is not None
            total, in_tail = len(self._instance.model.layers), layout.tail_in_ram
            minimum, maximum = regular_tails(layout.rounds)
            longest, longer = (total - minimum) // (layout.rounds + 1), in_tail - window
            if self._instance.by_expert:  # any tail will do
                minimum, maximum, longest, longer = 0, total, total // layout.rounds, in_tail
            self._lengths = (
                self._of_length("window", range(longest + 1), window),
                self._of_length("tail", range(minimum, maximum + 1), longer),
            )
        (part, of_window), (same, more) = (self._parts(name, lengths) for lengths in self._lengths)
        of_tail = more if self._instance.by_expert else of_window + more
        self._problem += part == same, f"{name}: as much of each layer of the head streams"
        self._problem += self._layout.rounds * of_window + of_tail == size, f"{name}: how much of the head streams"
        return of_window, of_tail

    def _of_length(self, what: str, lengths: range, length: Expression) -> _Lengths:
        """Return binaries for ``length``, which is one of ``lengths`` if the head streams."""
        problem, streams, total = self._problem, self._streams.streams[0], len(self._instance.model.layers)
        picked = [integer(problem, f"head_{what}_{i}", 0, 1) for i in range(len(lengths))]
        problem += pulp.lpSum(picked) == streams, f"a {what} of the head that streams has a length"
        missed = length - pulp.lpSum(n * is_it for n, is_it in zip(lengths, picked, strict=True))
        problem += missed <= total * (1 - streams), f"the {what} of the head is no longer"
        problem += -missed <= total * (1 - streams), f"the {what} of the head is no shorter"
        return _Lengths(what, lengths, picked)

    def _parts(self, name: str, lengths: _Lengths) -> tuple[Expression, Expression]:
        """Return the streamed part of a layer of the head, and its product with the picked length."""
        problem, largest = self._problem, max(self._instance.streamable) / self._unit
        parts = [positive(problem, f"{name}_{lengths.what}_part_{i}") for i in range(len(lengths.picked))]
        for i, (is_it, part) in enumerate(zip(lengths.picked, parts, strict=True)):
            problem += part <= largest * is_it, f"{name}: part of a layer of the head with {lengths.what} {i}"
        return pulp.lpSum(parts), pulp.lpSum(n * part for n, part in zip(lengths.lengths, parts, strict=True))

    def _computing(self, m: int, phase: Phase) -> tuple[Expression, Expression]:
        """Return the milliseconds of computing: the CPU layers, and the rest without the output matrix."""
        rest = dot(self._layout.gpu[m], [s * MS for s in phase.gpu]) + self._steps(m, phase, self._layout.windows[m])
        rest += dot(self._layout.experts_on_cpu[m], [s * MS for s in phase.experts_on_cpu])
        return dot(self._layout.cpu[m], [s * MS for s in phase.cpu]), rest

    def _size(self, m: int, phase: Phase) -> Expression:
        """Return what streams of ``m``, in units of memory; negative if there is room for more."""
        return self._streams.bytes[m] - self._streams.streams[m] * (phase.spare_bytes / self._unit)

    def _read(self, m: int, phase: Phase) -> Expression:
        """Return the milliseconds in which ``m`` reads what a pass needs of what streams."""
        streamed = self._streams.decode[m] if phase.spare_bytes else self._streams.bytes[m]
        picked = self._picked(m, phase, streamed)
        if len(picked) == 1:
            return picked[0] * self._unit_ms(m)
        name = f"read_ms_{m}_{phase.rows}_{phase.spare_bytes}"
        if name not in self._reads:
            self._reads[name] = positive(self._problem, name)
            for i, size in enumerate(picked):
                self._problem += self._reads[name] >= size * self._unit_ms(m), f"{name} {i}"
        return self._reads[name]

    def _picked(self, m: int, phase: Phase, streamed: Expression) -> list[Expression]:
        """Return lower bounds of what ``m`` reads of ``streamed``, in units of memory."""
        streamable = dot(self._layout.in_ram(m), [size / self._unit for size in self._instance.streamable])
        return [streamed * line.of_streamed + streamable * line.of_streamable for line in phase.read_lines]

    def _unit_ms(self, m: int) -> float:
        """Return the milliseconds in which ``m`` reads a unit of memory."""
        return self._unit / self._instance.members[m].disk_bytes_per_s * MS

    def _disks(self, phases: Sequence[Phase]) -> list[Expression]:
        """Return the milliseconds that each disk reads."""
        reads = [self._read(m, phase) for m, phase in enumerate(phases)]
        return [pulp.lpSum(reads[m] for m in here) for here in self._instance.disks]

    def _steps(self, m: int, phase: Phase, windows: float) -> Expression:
        """Return the cost of ``windows`` windows besides their layers."""
        per_window = self._uses_cpu[m] * (self._instance.members[m].step_s * MS)
        for uses, seconds in zip(self._uses_gpu[m], phase.gpu_steps_s, strict=False):
            per_window += uses * (seconds * MS)
        return windows * per_window

    def _sure_rest(self, m: int, phase: Phase, rest: Expression, output: Expression) -> Expression:
        """Return what certainly adds to reading: all computing but the CPU layers, in a ring without the tail."""
        if m:
            return rest
        if len(self._instance.devices) == 1:
            return rest + output
        return rest - self._layout.tail_on_gpu * (max(phase.gpu) * MS) - self._steps(0, phase, 1)

    def _output(self) -> Expression:
        """Return the milliseconds of the output matrix on the head."""
        head = self._instance.members[0]
        return head.cpu_output_s * MS + self._output_on_gpu * ((head.gpu_output_s - head.cpu_output_s) * MS)

    def _hops(self, of_order: Callable[[RingOrder], float], of_share: Callable[[HopShare], float]) -> Expression:
        """Return the milliseconds of k rounds of the picked ring, or of the shares of participating members."""
        layout = self._layout
        scale = layout.rounds * MS
        return pulp.lpSum(
            z * (scale * of_order(order)) for z, order in zip(layout.picked, layout.orders, strict=True)
        ) + (
            pulp.lpSum(
                used * (scale * of_share(share)) for used, share in zip(layout.used, layout.shares, strict=False)
            )
        )
