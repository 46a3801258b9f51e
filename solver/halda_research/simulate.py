"""A ring played event by event: it checks the closed form of ``evaluate.py`` and fleets larger than anyone here owns.

A window computes layer by layer, CPU layers first: a streamed one as soon as it is in a slot, which it frees when it is
computed. The loader reads in the order of use, whenever a slot is free, over windows and tokens. A hop is the transfer,
which occupies the link, and half the round trip. A layer that streams by expert is read when its turn has come, and computed
then. Devices on one machine wait for each other's layers and reads. Steps are
served in the order of their arrival; several sequences follow each other, each reads for itself. No formula is used here.

Where the closed form of a token coincides, for one sequence without jitter:

- nothing is streamed but by expert, and the loaders share no disk, whatever else (exact to rounding), or
- layers are of one size, every device that streams has as many streamed layers at each of its stops (windows between two
  hops; the tail and the next first window are one), the loaders share no disk, and
  - its slots hold all of its streamed layers (exact), or
  - what is computed at a stop up to the first streamed layer and behind the last one takes little of the token, and so
    does the tail, which makes the stops' distances uneven (3 % off at most where both together take up to 4 % of it).

Elsewhere the closed form is a lower bound. Of 729 random plans that stream from disks of their own, 44 cost over 5 % more,
33 % at most; of 35 with a shared disk 2, 30 % at most. The reasons (1 to 3 explain four of five such plans, 4 the others):

1. A slot is free only when the first streamed layer of the stop is computed, and what is behind the last one (GPU layers
   above all) cannot begin before it: a stop that lacks slots takes both and the reading between, not the larger one.
2. Slots are filled once a stop: a stop with fewer streamed layers than slots leaves credit that others cannot use. The
   tail and the next first window have no pause between them; a head whose CPU layers are all in its tail fills once.
3. Slots hold layers, not bytes: small layers in large slots leave more to read than ``slots * slot_bytes`` says.
4. Behind a long tail a loader with few slots is idle while they are full, and late in the short rounds.

With several sequences and nothing streamed the closed form is exact for one round. In more rounds steps keep their order,
and a tail makes one stop of the head longer than the others: of 300 plans (2 to 16 sequences) 59 cost over 5 % more, 46 %
at most. The chunks of a prompt follow each other window by window, not pass by pass: with nothing streamed a prompt costs
up to 46 % less than the closed form says (20 % less for k = 1) or up to 16 % more. Slots that were filled before it came
count for nothing there: a prompt of one chunk may take a fifth of the reading that is foreseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from halda import cost
from halda.evaluate import cpu_layers, unit_bytes
from halda.instance import Instance, Member, Phase
from halda.plan import Plan, Window
from halda_research._events import Fixture, Interval, Segment, SimulatedRing, Tally, Visit

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

    ``jitter`` (0 to 1) is the share of half the round trip that is random: exponentially distributed, the mean kept.
    """
    assert tokens >= 1
    meter = _Meter(sequences, max(3, tokens // 2), tokens, timeline)
    meter.ring = SimulatedRing(
        _stops(plan, instance, decode=True),
        _fixtures(plan, instance, rows=1),
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
    """Seconds from a typical prompt to its first token, the ring idle and the slots full before.

    All chunks enter at once; each reads the streamed layers anew. Only the last one passes the output matrix.
    """
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
    uses_gpu = {window.device for window in plan.route if window.gpu_layers}
    if plan.output_on_gpu:
        uses_gpu.add(plan.head)
    stops = []
    for device, windows in groupby(plan.route, key=lambda window: window.device):
        pieces: list[Segment] = []
        for window in windows:
            member, last = members[device], window is plan.route[-1]
            phase = member.decode if decode else member.prefill
            gpu_step_s = member.gpu_step_s if device in uses_gpu else 0.0
            output_s = member.gpu_output_s if plan.output_on_gpu else member.cpu_output_s
            tail_s = output_s if last and decode else 0.0
            streams_output = last and plan.streams_output
            more_s = gpu_step_s + (0.0 if streams_output else tail_s)
            pieces.extend(_pieces(window, plan, instance, phase, member.step_s, more_s))
            if streams_output:
                pieces.append(Segment((plan.layer_count,), tail_s, True, False, 0))
            pieces[-1] = replace(pieces[-1], ends=last)
        stops.append(Visit(stations[device], tuple(pieces), 0))
    if decode and len(stops) > 1:
        tail, first = stops.pop(), stops[0]
        stops[0] = Visit(first.station, tail.pieces + first.pieces, len(tail.pieces))
    return stops


def _pieces(
    window: Window, plan: Plan, instance: Instance, phase: Phase, step_s: float, more_s: float
) -> list[Segment]:
    """A window in pieces: ``step_s`` before its CPU layers, ``more_s`` with the GPU layers behind them."""
    streamed = set(plan.streaming_of(window.device).layers)
    pieces: list[Segment] = []
    layers: list[int] = []
    seconds = step_s
    for layer in cpu_layers(window):
        kind = instance.kind_of[layer]
        layer_s, picked = phase.cpu[kind], phase.picked[kind]
        if layer in streamed:
            if seconds or layers:
                pieces.append(Segment(tuple(layers), seconds, False, False, 0))
            pieces.append(Segment((layer,), layer_s, not picked, False, picked))
            layers, seconds = [], 0.0
        else:
            layers.append(layer)
            seconds += layer_s
    on_gpu = window.layers[len(cpu_layers(window)) :]
    seconds += sum(phase.gpu[instance.kind_of[layer]] for layer in on_gpu) + more_s
    if seconds or layers or on_gpu:
        pieces.append(Segment((*layers, *on_gpu), seconds, False, False, 0))
    return pieces


def _fixtures(plan: Plan, instance: Instance, *, rows: float) -> list[Fixture]:
    index = {device.device: i for i, device in enumerate(instance.devices)}
    hosts = {i: number for number, host in enumerate(instance.hosts) for i in host}
    unit_sizes = [unit_bytes(instance.model, unit) for unit in range(plan.layer_count + 1)]
    fixtures = []
    for name in plan.devices:
        member: Member = instance.members[index[name]]
        slots = plan.streaming_of(name).slots
        here, there = index[name], index[plan.after(name)]
        link = instance.link(here, there)
        transfer_s = cost.transfer_s(link, rows, instance.model.width)
        fixtures.append(
            Fixture(
                device=name,
                host=hosts[index[name]],
                slots=slots,
                unit_slots=[min(max(1, slots - 1), -(-size // instance.slot_bytes)) for size in unit_sizes],
                unit_bytes=unit_sizes,
                disk_bytes_per_s=member.disk_bytes_per_s,
                in_air=instance.in_air(here, there),
                transfer_s=transfer_s,
                delay_s=cost.hop_s(link, rows, instance.model.width) - transfer_s,
            )
        )
    return fixtures
