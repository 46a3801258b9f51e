"""What several steps take that follow each other through a ring in which nothing streams, several rounds a token.

With one round a step is back before the device that it waits for has the next one, and the closed form holds (``evaluate``).
With more a device has several stops of each step, and a step may find another one there at each of them. So it is played:
whoever comes first is served first, by a machine, by a link, and by the air.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import Final

from halda import cost
from halda.evaluate import cpu_layers
from halda.instance import Instance
from halda.plan import Plan, Window

WARM_UP: Final = 4
TOKENS: Final = 8
_AIR: Final = -1


def played_period_s(plan: Plan, instance: Instance, steps: int) -> float:
    """Seconds between the ends of two of so many ``steps``, once they follow each other as they do from then on."""
    assert not plan.streaming
    stops = _stops(plan, instance)
    hops = _hops(plan, instance)
    free_s = defaultdict[object, float](float)
    ends_s: list[list[float]] = [[] for _ in range(steps)]
    # When, whose, at which stop, and whether it is on its way to it or there.
    due = [(0.0, step, 0, False) for step in range(steps)]
    heapify(due)
    while due:
        now, step, stop, leaves = heappop(due)
        device, host, seconds = stops[stop]
        if leaves:
            medium, transfer_s, delay_s = hops[device]
            free_s[medium] = max(now, free_s[medium]) + transfer_s
            heappush(due, (free_s[medium] + delay_s, step, (stop + 1) % len(stops), False))
            continue
        if stop == 0:
            ends_s[step].append(now)
            if len(ends_s[step]) > WARM_UP + TOKENS:
                continue
        free_s[host] = max(now, free_s[host]) + seconds
        heappush(due, (free_s[host], step, stop, True))
    return sum(ends[-1] - ends[WARM_UP] for ends in ends_s) / (steps * TOKENS) / steps


def _stops(plan: Plan, instance: Instance) -> list[tuple[str, str, float]]:
    """Device, machine and seconds of each stop of a token. The tail and the next token's first window are one."""
    members = {member.name: member for member in instance.members}
    hosts = {device.device: device.host for device in instance.devices}

    def seconds(window: Window) -> float:
        member, on_cpu = members[window.device], cpu_layers(window)
        output_s = member.gpu_output_s if plan.output_on_gpu else member.cpu_output_s
        return (
            member.step_s
            + (member.gpu_step_s if _uses_gpu(plan, window.device) else 0.0)
            + sum(member.decode.cpu[instance.kind_of[layer]] for layer in on_cpu)
            + sum(member.decode.gpu[instance.kind_of[layer]] for layer in window.layers[len(on_cpu) :])
            + (output_s if window is plan.route[-1] else 0.0)
        )

    stops = [
        (device, hosts[device], sum(map(seconds, windows)))
        for device, windows in groupby(plan.route, key=lambda window: window.device)
    ]
    if len(stops) > 1:
        device, host, tail_s = stops.pop()
        stops[0] = (device, host, stops[0][2] + tail_s)
    return stops


def _uses_gpu(plan: Plan, device: str) -> bool:
    return (plan.output_on_gpu and device == plan.head) or any(
        window.gpu_layers for window in plan.route if window.device == device
    )


def _hops(plan: Plan, instance: Instance) -> dict[str, tuple[object, float, float]]:
    """By the device that sends: what a hop passes, for how many seconds, and how long it is on its way behind that."""
    index = {device.device: i for i, device in enumerate(instance.devices)}
    rows, width = instance.decode_rows, instance.model.width
    hops: dict[str, tuple[object, float, float]] = {}
    for name in plan.devices:
        here, there = index[name], index[plan.after(name)]
        link = instance.link(here, there)
        transfer_s = cost.transfer_s(link, rows, width)
        medium = _AIR if instance.in_air(here, there) else (here, there)
        hops[name] = (medium, transfer_s, cost.hop_s(link, rows, width) - transfer_s)
    return hops
