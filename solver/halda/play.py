"""Simulate several steps that follow each other through a ring with several rounds per token and no streaming.

With one round, a step returns before the device it waits for has the next one, and the closed form holds
(``evaluate``). With more rounds a device has several stops per step, and a step may find another one at any of them. So
it is simulated: a machine, a link and the shared air each serve first come, first served.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import Final

from halda import cost
from halda.evaluate import route_s
from halda.instance import Instance
from halda.plan import Plan

WARM_UP: Final = 4
TOKENS: Final = 8
_AIR: Final = -1


def simulated_period_s(plan: Plan, instance: Instance, steps: int) -> float:
    """Return seconds between the ends of two of ``steps`` concurrent steps in steady state."""
    assert not plan.streaming
    stops = _stops(plan, instance)
    hops = hops_of(plan, instance)
    free_s = defaultdict[object, float](float)
    ends_s: list[list[float]] = [[] for _ in range(steps)]
    # Time, step, stop, and whether the step leaves the stop (or arrives at it).
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


def _stops(plan: Plan, instance: Instance) -> list[tuple[str, tuple[int, ...], float]]:
    """Return device, machine and seconds of each stop of a token. The tail and the next token's first window are one
    stop."""
    hosts = {instance.devices[m].device: here for here in instance.processors for m in here}
    windows = zip(plan.route, route_s(plan, instance), strict=True)
    stops = [
        (device, hosts[device], sum(seconds for _, seconds in group))
        for device, group in groupby(windows, key=lambda each: each[0].device)
    ]
    if len(stops) > 1:
        device, host, tail_s = stops.pop()
        stops[0] = (device, host, stops[0][2] + tail_s)
    return stops


def hops_of(plan: Plan, instance: Instance) -> dict[str, tuple[object, float, float]]:
    """Return for each sending device: the medium of its hop, seconds that it occupies the medium, and seconds of delay
    after that."""
    index = {device.device: i for i, device in enumerate(instance.devices)}
    rows, width = instance.decode_rows, instance.model.hop_values
    hops: dict[str, tuple[object, float, float]] = {}
    for name in plan.devices:
        here, there = index[name], index[plan.after(name)]
        link = instance.link(here, there)
        transfer_s = cost.transfer_s(link, rows, width)
        medium = _AIR if instance.in_air(here, there) else (here, there)
        hops[name] = (medium, transfer_s, cost.hop_s(link, rows, width) - transfer_s)
    return hops
