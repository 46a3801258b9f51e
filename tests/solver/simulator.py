"""An event simulator of a ring, which checks the closed form of ``evaluate.py``, also for fleets larger than anyone
here owns.

A window computes layer by layer, CPU layers first; a partly streamed layer starts once it is in memory, and is released
when it is computed. The loader reads in the order of use whatever fits, also parts of the next layer, across windows
and tokens. A hop is the transfer, which occupies the link, and half the round trip. For a layer that streams by expert,
the picked experts are read when its turn comes, before it is computed. Devices on one machine wait for each other's
layers and reads. Steps are served in order of arrival; several sequences follow each other, and each reads for itself.
No formula is used here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import groupby

from halda import cost
from halda.instance import Instance, Member, Phase
from halda.plan import Plan, Window
from tests.solver.simulator_events import Fixture, Segment, SimulatedRing, Tally, Visit


@dataclass(slots=True, kw_only=True)
class DeviceUse(Tally):
    """A device's work for a token, on average."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """``tpot_s`` between tokens of one sequence, ``tokens_per_s`` of all together, in the steady state."""

    tpot_s: float
    tokens_per_s: float
    devices: tuple[DeviceUse, ...]


def simulate(plan: Plan, instance: Instance, *, tokens: int, sequences: int = 1) -> Simulation:
    """Decode ``tokens`` tokens of each of ``sequences`` sequences after a warm-up of half as many, at least 3.

    A step of ``instance.decode_rows`` rows counts as a token. Sums are taken between tokens of the first sequence.
    """
    assert tokens >= 1
    instance, warm_up = instance.offloading(plan), max(3, tokens // 2)
    times: list[list[float]] = [[] for _ in range(sequences)]
    sums: list[list[Tally]] = []

    def through(sequence: int) -> None:
        times[sequence].append(ring.now)
        if sequence == 0 and len(times[0]) in (warm_up, warm_up + tokens):
            sums.append(ring.tallies)

    ring = SimulatedRing(
        _stops(plan, instance, decode=True),
        _fixtures(plan, instance, rows=instance.decode_rows),
        sequences=sequences,
        cyclic=True,
        filled=False,
        through=through,
    )
    ring.run(lambda: min(map(len, times)) < warm_up + tokens)
    tpot_s = sum(its[warm_up + tokens - 1] - its[warm_up - 1] for its in times) / sequences / tokens
    return Simulation(
        tpot_s=tpot_s,
        tokens_per_s=sequences / tpot_s,
        devices=tuple(
            _use(device, before, after, sequences * tokens)
            for device, before, after in zip(plan.devices, *sums, strict=True)
        ),
    )


def simulate_prefill(plan: Plan, instance: Instance) -> float:
    """Seconds from a typical prompt to its first token, with an idle ring and all read-ahead in memory.

    All chunks enter at once; each reads streamed layers again. Only the last one passes the output matrix.
    """
    instance = instance.offloading(plan)
    head, times = instance.members[0], list[float]()
    ring = SimulatedRing(
        _stops(plan, instance, decode=False),
        _fixtures(plan, instance, rows=head.prefill.rows),
        sequences=instance.chunks,
        cyclic=False,
        filled=True,
        through=lambda _: times.append(ring.now),
    )
    ring.run(lambda: len(times) < instance.chunks)
    return times[-1] + (head.gpu_output_s if plan.output_on_gpu else head.cpu_output_s)


def _use(device: str, before: Tally, after: Tally, tokens: int) -> DeviceUse:
    sums = {each.name: getattr(after, each.name) - getattr(before, each.name) for each in fields(Tally)}
    return DeviceUse(device=device, **{name: total / tokens for name, total in sums.items()})


def _stops(plan: Plan, instance: Instance, *, decode: bool) -> list[Visit]:
    """The route as stops; in decode the tail window and the next token's first windows are one stop."""
    members = {member.name: member for member in instance.members}
    nodes = {name: i for i, name in enumerate(plan.devices)}
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
        stops.append(Visit(nodes[device], tuple(pieces), 0))
    if decode and len(stops) > 1:
        tail, first = stops.pop(), stops[0]
        stops[0] = Visit(first.node, tail.pieces + first.pieces, len(tail.pieces))
    return stops


def _pieces(
    window: Window, plan: Plan, instance: Instance, phase: Phase, step_s: float, more_s: float
) -> list[Segment]:
    """A window in pieces: ``step_s`` before the layers computed by the CPU, ``more_s`` with those after them."""
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
