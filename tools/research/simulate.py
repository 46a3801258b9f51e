"""A ring played event by event: it checks the closed form of ``evaluate.py`` and fleets larger than anyone here owns.

A window computes layer by layer, CPU layers first; one of which a part streams as soon as that is in memory, and lets it go
when it is computed. The loader reads in the order of use whatever finds room, bytes of the next part too, over windows and
tokens. A hop is the transfer, which occupies the link, and half the round trip. Of a layer that streams by expert what is
picked is read when its turn has come, and it is computed then. Devices on one machine wait for each other's layers and
reads. Steps are served in the order of their arrival; several sequences follow each other, each reads for itself. No formula
is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from halda import cost
from halda.instance import Instance, Member, Phase
from halda.plan import Plan, Window
from tools.research._events import Fixture, Interval, Segment, SimulatedRing, Tally, Visit

__all__ = ["DeviceUse", "Interval", "Simulation", "simulate", "simulate_prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What one device does for a token, on average. Seconds, layers, bytes.

    ``link_s`` is what its outgoing link is occupied, ``hop_s`` what its messages are on the way in all.
    """

    device: str
    compute_s: float
    stall_s: float
    disk_s: float
    link_s: float
    hop_s: float
    layers: float
    disk_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """``tpot_s`` between tokens of one sequence, ``tokens_per_s`` of all together, in the steady state.

    ``timeline`` holds what all devices did while one token was made, in order of start; its time begins at 0.
    """

    tpot_s: float
    tokens_per_s: float
    devices: tuple[DeviceUse, ...]
    timeline: tuple[Interval, ...]


def simulate(
    plan: Plan,
    instance: Instance,
    *,
    tokens: int,
    sequences: int = 1,
    jitter: float = 0.0,
    seed: int = 0,
    timeline: bool = False,
) -> Simulation:
    """Decode ``tokens`` tokens of each of ``sequences`` sequences after a warm-up of half as many, at least 3.

    A step of ``instance.decode_rows`` rows counts as a token. ``jitter`` (0 to 1) is the share of half the round trip that
    is random: exponentially distributed, the mean kept.
    """
    assert tokens >= 1
    instance = instance.offloading(plan)
    meter = _Meter(sequences, max(3, tokens // 2), tokens, timeline)
    meter.ring = SimulatedRing(
        _stops(plan, instance, decode=True),
        _fixtures(plan, instance, rows=instance.decode_rows),
        sequences=sequences,
        cyclic=True,
        filled=False,
        jitter=jitter,
        seed=seed,
        through=meter.through,
    )
    meter.ring.run(meter.more)
    return meter.result(plan.devices)


def simulate_prefill(plan: Plan, instance: Instance, *, jitter: float = 0.0, seed: int = 0) -> float:
    """Seconds from a typical prompt to its first token, the ring idle and all that is read ahead in memory before.

    All chunks enter at once; each reads anew what streams. Only the last one passes the output matrix.
    """
    instance = instance.offloading(plan)
    last = 0.0
    through = 0

    def count(_: int) -> None:
        nonlocal last, through
        last, through = ring.now, through + 1

    head = instance.members[0]
    ring = SimulatedRing(
        _stops(plan, instance, decode=False),
        _fixtures(plan, instance, rows=head.prefill.rows),
        sequences=instance.chunks,
        cyclic=False,
        filled=True,
        jitter=jitter,
        seed=seed,
        through=count,
    )
    ring.run(lambda: through < instance.chunks)
    return last + (head.gpu_output_s if plan.output_on_gpu else head.cpu_output_s)


class _Meter:
    """Says when the steady state begins and when enough is measured."""

    ring: SimulatedRing

    def __init__(self, sequences: int, warm_up: int, tokens: int, timeline: bool) -> None:
        self._warm_up = warm_up
        self._tokens = tokens
        self._timeline = timeline
        self._done = [0] * sequences
        self._since = [0.0] * sequences
        self._until = [0.0] * sequences
        self._missing = sequences
        self._before: list[Tally] = []
        self._after: list[Tally] = []
        self._traced: list[Interval] = []
        self._trace_since = 0.0

    def more(self) -> bool:
        """Whether a sequence lacks tokens."""
        return self._missing > 0

    def through(self, sequence: int) -> None:
        """Take note of a token of ``sequence``. The sums are taken between tokens of the first one."""
        self._done[sequence] += 1
        done = self._done[sequence]
        if done == self._warm_up:
            self._since[sequence] = self.ring.now
        if done == self._warm_up + self._tokens:
            self._until[sequence] = self.ring.now
            self._missing -= 1
        if sequence == 0:
            self._mark(done - self._warm_up)

    def _mark(self, measured: int) -> None:
        if measured == 0:
            self._before = self.ring.tallies
        if measured == self._tokens - 1 and self._timeline:
            self.ring.trace = []
            self._trace_since = self.ring.now
        if measured == self._tokens:
            self._after = self.ring.tallies
            if self.ring.trace is not None:
                self._traced = [*self.ring.trace, *self.ring.unfinished()]
                self.ring.trace = None

    def result(self, devices: Sequence[str]) -> Simulation:
        """What was measured."""
        sequences = len(self._done)
        spans = [until - since for since, until in zip(self._since, self._until, strict=True)]
        tpot_s = sum(spans) / sequences / self._tokens
        uses = zip(devices, self._before, self._after, strict=True)
        return Simulation(
            tpot_s=tpot_s,
            tokens_per_s=sequences / tpot_s,
            devices=tuple(_use(device, before, after, sequences * self._tokens) for device, before, after in uses),
            timeline=_clip(self._traced, self._trace_since, self._until[0]),
        )


def _use(device: str, before: Tally, after: Tally, tokens: int) -> DeviceUse:
    return DeviceUse(
        device=device,
        compute_s=(after.compute_s - before.compute_s) / tokens,
        stall_s=(after.stall_s - before.stall_s) / tokens,
        disk_s=(after.disk_s - before.disk_s) / tokens,
        link_s=(after.link_s - before.link_s) / tokens,
        hop_s=(after.hop_s - before.hop_s) / tokens,
        layers=(after.layers - before.layers) / tokens,
        disk_bytes=(after.disk_bytes - before.disk_bytes) / tokens,
    )


def _clip(intervals: Sequence[Interval], since: float, until: float) -> tuple[Interval, ...]:
    """What lies between ``since`` and ``until``, with ``since`` as zero."""
    clipped = [
        replace(interval, start_s=max(interval.start_s, since) - since, end_s=min(interval.end_s, until) - since)
        for interval in intervals
        if interval.start_s < until and interval.end_s > since
    ]
    return tuple(sorted(clipped, key=lambda interval: (interval.start_s, interval.end_s, interval.device)))


def _stops(plan: Plan, instance: Instance, *, decode: bool) -> list[Visit]:
    """The route as stops: in decode the tail window and the next token's first windows are one."""
    members = {member.name: member for member in instance.members}
    stations = {name: i for i, name in enumerate(plan.devices)}
    uses_gpu = {
        (window.device, gpu) for window in plan.route for gpu, layers in enumerate(window.on_each_gpu) if len(layers)
    }
    if plan.output_on_gpu:
        uses_gpu.add((plan.head, 0))
    uses_cpu = {window.device for window in plan.route if len(window.in_ram)}
    stops = []
    for device, windows in groupby(plan.route, key=lambda window: window.device):
        pieces: list[Segment] = []
        for window in windows:
            member, last = members[device], window is plan.route[-1]
            phase = member.decode if decode else member.prefill
            gpu_step_s = sum(seconds for gpu, seconds in enumerate(phase.gpu_steps_s) if (device, gpu) in uses_gpu)
            cpu_step_s = member.step_s if device in uses_cpu else 0.0
            output_s = member.gpu_output_s if plan.output_on_gpu else member.cpu_output_s
            tail_s = output_s if last and decode else 0.0
            pieces.extend(_pieces(window, plan, instance, phase, cpu_step_s, gpu_step_s + tail_s))
            pieces[-1] = replace(pieces[-1], ends=last)
        stops.append(Visit(stations[device], tuple(pieces), 0))
    if decode and len(stops) > 1:
        tail, first = stops.pop(), stops[0]
        stops[0] = Visit(first.station, tail.pieces + first.pieces, len(tail.pieces))
    return stops


def _pieces(
    window: Window, plan: Plan, instance: Instance, phase: Phase, step_s: float, more_s: float
) -> list[Segment]:
    """A window in pieces: ``step_s`` before the layers of which the CPU computes something, ``more_s`` with those behind."""
    name = window.device
    all_layers = [layer for _, each in plan.windows_of(name) for layer in each.in_ram]
    maximum = sum(instance.streamable[instance.kind_of[layer]] for layer in all_layers)
    share = phase.read_bytes(plan.streaming_of(name).streamed_bytes, maximum) / max(maximum, 1)
    kinds, pieces = len(instance.kinds), list[Segment]()
    at = {layer: i * kinds + instance.kind_of[layer] for i, here in enumerate(window.on_each_gpu) for layer in here}
    layers: list[int] = []
    seconds = step_s
    for layer in window.in_ram:
        kind = instance.kind_of[layer]
        size = share * instance.streamable[kind]
        layer_s = phase.gpu[at[layer]] + phase.experts_on_cpu[at[layer]] if layer in at else phase.cpu[kind]
        if size:
            if seconds or layers:
                pieces.append(Segment(tuple(layers), seconds, 0.0, False, 0.0))
            read_ahead, picked = (0.0, size) if instance.by_expert else (size, 0.0)
            pieces.append(Segment((layer,), layer_s, read_ahead, False, picked))
            layers, seconds = [], 0.0
        else:
            layers.append(layer)
            seconds += layer_s
    on_gpu = window.on_gpu[window.cpu_experts :]
    seconds += sum(phase.gpu[at[layer]] for layer in on_gpu) + more_s
    if seconds or layers or on_gpu:
        pieces.append(Segment((*layers, *on_gpu), seconds, 0.0, False, 0.0))
    return pieces


def _fixtures(plan: Plan, instance: Instance, *, rows: float) -> list[Fixture]:
    index = {device.device: i for i, device in enumerate(instance.devices)}
    hosts = {i: number for number, host in enumerate(instance.hosts) for i in host}
    fixtures = []
    for name in plan.devices:
        member: Member = instance.members[index[name]]
        here, there = index[name], index[plan.after(name)]
        link = instance.link(here, there)
        transfer_s = cost.transfer_s(link, rows, instance.model.hop_values)
        fixtures.append(
            Fixture(
                device=name,
                host=hosts[index[name]],
                read_ahead_bytes=plan.streaming_of(name).read_ahead_bytes,
                disk_bytes_per_s=member.disk_bytes_per_s,
                slowed_share=member.slows_s_per_byte * member.disk_bytes_per_s,
                in_air=instance.in_air(here, there),
                transfer_s=transfer_s,
                delay_s=cost.hop_s(link, rows, instance.model.hop_values) - transfer_s,
            )
        )
    return fixtures
