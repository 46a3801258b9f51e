"""Questions small enough for brute force: 2 to 4 devices, 6 to 16 layers, tight memory, GPUs, owners' limits."""

from __future__ import annotations

import random
from dataclasses import replace

from halda import DiskProfile, Instance, Objective, Solution, Workload, solve
from tools.research.random_fleets import log_uniform, random_instance

SHAPES = [(2, 6), (2, 8), (2, 10), (2, 13), (2, 16), (3, 6), (3, 7), (3, 8), (3, 10), (3, 12), (4, 6), (4, 8), (4, 9)]


def small_instance(rng: random.Random) -> tuple[Instance, Objective]:
    """A question and its objective. Half of them have links and disks so fast that several rounds may pay."""
    devices, layers = rng.choice(SHAPES) if rng.random() < 0.98 else (4, 12)
    context = rng.choice([256, 1024, 4096])
    work = Workload(
        context_tokens=context,
        kv_type="f16",
        sequences=rng.choice([1, 1, 2, 4]),
        prompt_tokens=rng.randint(1, context // 2),
        answer_tokens=rng.randint(1, context // 2),
        chunk_rows=rng.choice([64, 256, 512]),
    )
    while True:
        memory = rng.choice(["short", "about", "about", "ample"])
        question = random_instance(
            rng, devices=devices, layers=layers, memory=memory, shared_hosts=False, workload=work
        )
        if len(question.kinds) <= (2 if layers <= 10 else 1):
            break
    head, *others = question.devices
    extra = question.model.output_bytes + question.head_bytes(2)  # otherwise most heads would be too small
    fleet = (replace(head, ram_available_bytes=head.ram_available_bytes + extra), *others)
    links = dict(question.links)
    if rng.random() < 0.5:
        for pair, link in links.items():
            fast = {"round_trip_s": log_uniform(rng, 1e-6, 1e-4), "bytes_per_s": log_uniform(rng, 1e9, 1e10)}
            links[pair] = replace(link, **fast)
        fleet = tuple(
            replace(device, disk=replace(device.disk, prefetch_bytes_per_s=log_uniform(rng, 2e9, 2e10)))
            for device in fleet
        )
    objective: Objective = rng.choice(["latency", "latency", "ttft", "throughput", "balanced"])
    own = random.Random(question.workload.prompt_tokens)  # keeps later draws from ``rng`` as they are
    if own.random() < 0.5:
        fleet = tuple(replace(device, disk=slowing(device.disk, own.uniform(0, 0.5))) for device in fleet)
    return Instance(fleet, links, question.model, question.workload, question.limits), objective


def slowing(disk: DiskProfile, share: float) -> DiskProfile:
    """``disk``, whose reads slow computing by this share."""
    return replace(disk, slows_s_per_byte=share / disk.prefetch_bytes_per_s)


def solved(question: Instance, objective: Objective, **options: object) -> Solution:
    """The solver's answer, with enough time to prove it."""
    limit_s = options.pop("time_limit_s", 600.0)
    return solve(
        question.devices,
        list(question.links.values()),
        question.model,
        question.workload,
        objective=objective,
        limits=question.limits,
        time_limit_s=limit_s,
        experts=question.experts,
        **options,
    )
