"""Random solver questions and legal plans for them, good or bad, made only from a seeded ``random.Random``.

    rng = random.Random(7)
    question = random_instance(rng)
    plan = random_plan(rng, question)

Plans are legal in form (``evaluate`` and the ring take them); whether they fit the memory is left to chance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from halda import (
    BATCH_ROWS,
    CpuProfile,
    DeviceProfile,
    DiskProfile,
    GpuProfile,
    LayerProfile,
    LeftOut,
    Limits,
    LinkProfile,
    ModelProfile,
    Plan,
    Streaming,
    TypeSpeed,
    Window,
    Workload,
)
from halda.instance import Instance
from halda.instance import instance as ask
from halda.quantisation import bytes_per_weight
from halda.streaming import min_read_ahead_bytes

Memory = Literal["short", "about", "ample"]
TYPES = ("Q4_K", "Q6_K", "Q8_0", "F16")
MEMORIES: Sequence[Memory] = ("short", "about", "ample")
ROOM: Mapping[Memory, tuple[float, float]] = {"short": (0.25, 0.7), "about": (0.5, 1.5), "ample": (2.0, 4.0)}
"""Memory of all devices relative to the size of the model."""


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Sample between ``low`` and ``high``, with every order of magnitude equally likely."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def random_model(rng: random.Random, *, layers: int | None = None) -> ModelProfile:
    """Sample a model: 6 to 80 layers of one kind, of two or three, or dense ones before mixtures of experts."""
    count = layers if layers is not None else round(log_uniform(rng, 6, 80))
    shape = rng.choice(["uniform", "uniform", "kinds", "experts"])
    size = log_uniform(rng, 20e6, 1e9)
    kv = rng.choice([512, 2048, 4096, 16384])
    experts = rng.choice([8, 64, 128]) if shape == "experts" else 0
    dense = [_dense(rng, size, kv) for _ in range(3 if shape == "kinds" else 1)]
    if shape == "experts":
        sparse = LayerProfile(
            bytes_by_type={"Q6_K": int(size / 8), "F32": 16384},
            expert_bytes_by_type={"Q4_K": int(size)},
            kv_bytes_per_token=kv,
        )
        first = rng.randint(0, 3)
        kinds = [dense[0] if i < first else sparse for i in range(count)]
    elif shape == "kinds":
        period = rng.randint(2, 6)
        kinds = [dense[i % period % 2 if i < count // 2 else 2 * (i % period == 0)] for i in range(count)]
    else:
        kinds = dense * count
    tied = rng.random() < 0.3
    vocabulary = rng.choice([32_000, 128_256, 151_936])
    used = max(1, experts // 8)
    width = 64 * round(math.sqrt(size / bytes_per_weight("Q4_K") / rng.choice([8, 12, 16, 24])) / 64)
    output = int(vocabulary * width * bytes_per_weight("Q6_K"))
    return ModelProfile(
        name="random",
        architecture="toyarch",
        layers=tuple(kinds),
        embedding_bytes=output,
        output_bytes_by_type={"Q6_K": output},
        tied=tied,
        width=width,
        vocabulary=vocabulary,
        context_tokens=32768,
        experts=experts,
        experts_used=used,
        expert_use=_use(random.Random(size), used / experts) if experts else (),
        kv_head_width=64,
        cut_multiple=rng.choice([2, 4]) if count >= 12 and rng.random() < 0.1 else 1,
    )


def _use(rng: random.Random, mean: float) -> tuple[float, ...]:
    """Probabilities that a token picks experts of eight groups, ``mean`` on average: some much larger, or all alike.

    It has its own generator, so the caller's random sequence does not change.
    """
    if rng.random() < 0.5:
        return ()
    steepness = rng.uniform(0.1, 1.5)
    parts = [1 / (i + 1) ** steepness for i in range(8)]
    return tuple(part * mean * len(parts) / sum(parts) for part in parts)


def random_device(
    rng: random.Random, name: str, *, memory_bytes: int, gpu: bool | None = None, like: DeviceProfile | None = None
) -> DeviceProfile:
    """Sample a phone, a laptop or a workstation; with ``like``, another process on that device's machine."""
    rate = log_uniform(rng, 3e9, 60e9)
    with_gpu = gpu if gpu is not None else rng.random() < 0.5
    ram = like.ram_available_bytes if like is not None else memory_bytes
    disk = log_uniform(rng, 2e8, 7e9)
    return DeviceProfile(
        device=name,
        host=like.host if like is not None else name,
        system=rng.choice(["Linux", "Darwin", "Android"]),
        machine=rng.choice(["x86_64", "arm64"]),
        cpu=CpuProfile(
            name="a cpu",
            cores=8,
            threads=4,
            batch_threads=8,
            step_s=log_uniform(rng, 2e-5, 1e-3),
            layer_s=log_uniform(rng, 5e-6, 1e-4),
            speeds=_speeds(rng, rate, flop_per_byte=rng.uniform(8, 40)),
        ),
        ram_total_bytes=2 * ram,
        ram_available_bytes=ram,
        ram_read_bytes_per_s=1.2 * rate,
        disk=like.disk
        if like is not None
        else DiskProfile(
            prefetch_bytes_per_s=disk,
            fault_bytes_per_s=0.6 * disk,
            random_bytes_per_s=0.1 * disk,
            free_bytes=int(log_uniform(rng, 20e9, 1e12)),
        ),
        gpu=_gpu(rng, memory_bytes, rate) if with_gpu else None,
    )


def with_more_gpus(rng: random.Random, device: DeviceProfile) -> DeviceProfile:
    """Return ``device`` with one or two more GPUs, if it has any: like its first or not, discrete or integrated."""
    if device.gpu is None:
        return device
    more = []
    for number in range(1, 1 + rng.choice([1, 1, 1, 2])):
        like = device.gpu if rng.random() < 0.4 else None
        gpu = like or _gpu(rng, device.ram_available_bytes, device.ram_read_bytes_per_s)
        more.append(replace(gpu, id=f"GPU{number}", context_bytes=rng.choice([0, 1 << 20, 400 << 20])))
    return device.with_gpus((device.gpu, *more))


def random_links(rng: random.Random, devices: Sequence[DeviceProfile], *, missing: float = 0.0) -> list[LinkProfile]:
    """Sample links between all devices, fast on one machine; each is unmeasured with probability ``missing``."""
    links = []
    for source in devices:
        for target in devices:
            if source is target or rng.random() < missing:
                continue
            near = source.host == target.host
            links.append(
                LinkProfile(
                    source=source.device,
                    target=target.device,
                    address="10.0.0.1",
                    round_trip_s=log_uniform(rng, 3e-5, 1e-4) if near else log_uniform(rng, 2e-4, 2e-2),
                    bytes_per_s=log_uniform(rng, 1e9, 1e10) if near else log_uniform(rng, 5e6, 1.2e9),
                )
            )
    return links


def random_workload(rng: random.Random) -> Workload:
    """Sample a chat, a long document, or several users."""
    context = rng.choice([512, 2048, 4096, 8192])
    return Workload(
        context_tokens=context,
        kv_type="f16",
        sequences=rng.choice([1, 1, 1, 2, 4]),
        prompt_tokens=rng.randint(1, context // 2),
        answer_tokens=rng.randint(1, context // 2),
        chunk_rows=rng.choice([64, 256, 512]),
    )


def random_instance(
    rng: random.Random,
    *,
    devices: int | None = None,
    layers: int | None = None,
    memory: Memory | None = None,
    shared_hosts: bool = True,
    workload: Workload | None = None,
    model: ModelProfile | None = None,
) -> Instance:
    """Sample a fleet of 2 to 8 devices (or ``devices``), the head first, with a model that fits its memory more or
    less."""
    model = model or random_model(rng, layers=layers)
    count = devices if devices is not None else rng.randint(2, 8)
    kind: Memory = memory if memory is not None else rng.choice(MEMORIES)
    room = rng.uniform(*ROOM[kind]) * model.size_bytes
    weights = [log_uniform(rng, 1, 8) for _ in range(count)]
    fleet: list[DeviceProfile] = []
    for i, weight in enumerate(weights):
        neighbour = rng.choice(fleet) if fleet and shared_hosts and rng.random() < 0.15 else None
        share = int(room * weight / sum(weights)) + (400 << 20)
        fleet.append(random_device(rng, f"d{i}", memory_bytes=share, like=neighbour))
    limits = {
        device.device: Limits(ram_bytes=int(device.ram_available_bytes * rng.uniform(0.5, 1.2)))
        for device in fleet
        if rng.random() < 0.15
    }
    links = random_links(rng, fleet, missing=rng.choice([0.0, 0.0, 0.2]))
    return ask(fleet, links, model, workload or random_workload(rng), limits)


def random_plan(rng: random.Random, question: Instance, *, rounds: int | None = None, streams: float = 0.6) -> Plan:
    """Sample a legal plan: the head first and last, equal windows in every round, then the tail.

    Some devices are left out, the others follow the head in any order; each streams with probability ``streams``, any
    part of its layers with any legal part of that read ahead.
    """
    route, k = _route(rng, question, rounds)
    names = list(dict.fromkeys(window.device for window in route))
    head = question.members[0]
    streaming = []
    for name in names:
        layers = [layer for window in route if window.device == name for layer in window.in_ram]
        maximum = sum(question.streamable[question.kind_of[layer]] for layer in layers)
        streamed = round(rng.uniform(0.02, 1) * (maximum - question.pool_bytes))
        member = next(member for member in question.members if member.name == name)
        minimum = min_read_ahead_bytes(member.read_ahead_steps, streamed, maximum)
        if rng.random() < streams and streamed > minimum:
            read_ahead = (
                0 if question.by_expert else round(rng.choice([minimum, rng.uniform(minimum, streamed), streamed]))
            )
            streaming.append(Streaming(device=name, streamed_bytes=streamed, read_ahead_bytes=read_ahead))
    left_out = [device.device for device in question.devices if device.device not in names]
    return Plan(
        rounds=k,
        route=tuple(route),
        output_on_gpu=route[-1].gpu_layers > 0 or (head.has_gpu and rng.random() < 0.2),
        streaming=tuple(streaming),
        left_out=tuple(LeftOut(device=name, reason="chance") for name in left_out),
    )


def _route(rng: random.Random, question: Instance, rounds: int | None) -> tuple[list[Window], int]:
    """Sample windows and rounds. Sizes are multiples of the model's ``cut_multiple``; the tail has the remaining
    layers."""
    total, multiple = len(question.model.layers), question.model.cut_multiple
    blocks = question.model.last_cut // multiple
    k = rounds if rounds is not None else rng.choice([1, 1, 2, 3, 4])
    k = max(1, min(k, blocks // 2))
    maximum = min(len(question.devices), blocks // k)
    count = maximum if rng.random() < 0.4 else rng.randint(min(2, maximum), maximum)
    if count < 2 or rng.random() < 0.05:
        return [_window(rng, question, 0, 0, total, None)], 1
    order = [0, *rng.sample(range(1, len(question.devices)), count - 1)]
    spare = blocks // k - count
    used = spare if rng.random() < 0.7 else rng.randint(0, spare)
    sizes = [1] * count
    for i in rng.choices(range(count), weights=[rng.random() + 0.01 for _ in range(count)], k=used):
        sizes[i] += 1
    on_gpu = [rng.randint(0, size * multiple) if rng.random() < 0.8 else 0 for size in sizes]
    windows, first = [], 0
    for _ in range(k):
        for member, size, gpu in zip(order, sizes, on_gpu, strict=True):
            windows.append(_window(rng, question, member, first, first + size * multiple, gpu))
            first += size * multiple
    windows.append(_window(rng, question, 0, first, total, None))
    return windows, k


def _window(rng: random.Random, question: Instance, member: int, first: int, last: int, gpu: int | None) -> Window:
    wanted = gpu if gpu is not None else rng.choice([0, last - first, rng.randint(0, last - first)])
    found = question.members[member]
    on_gpus = wanted if found.has_gpu else 0
    others, left = [], on_gpus
    for _ in found.profile.other_gpus:
        others.append(rng.randint(0, left))
        left -= others[-1]
    return Window(device=found.name, first=first, last=last, gpu_layers=on_gpus, other_gpus=tuple(others))


def _dense(rng: random.Random, size: float, kv: int) -> LayerProfile:
    kind, more = rng.sample(TYPES[:3], 2)
    whole = size * rng.uniform(0.7, 1.4)
    part = rng.uniform(0, 0.4)
    return LayerProfile(
        bytes_by_type={kind: int(whole * (1 - part)), more: int(whole * part), "F32": 16384},
        expert_bytes_by_type={},
        kv_bytes_per_token=kv,
    )


def _speeds(rng: random.Random, rate: float, flop_per_byte: float) -> tuple[TypeSpeed, ...]:
    """For each type about ``rate`` bytes per second in decode, ``flop_per_byte`` times that many FLOP/s in prefill."""
    speeds = []
    for kind in TYPES:
        decode = rate * rng.uniform(0.5, 1.0)
        speeds.append(
            TypeSpeed(
                type=kind,
                decode_bytes_per_s=decode,
                batch_bytes_per_s=decode / rng.uniform(1, BATCH_ROWS / 2),
                prefill_flop_per_s=flop_per_byte * rate * rng.uniform(0.7, 1.3),
                extra_buffers=False,
                decode_spread=0.0,
                prefill_spread=0.0,
            )
        )
    return tuple(speeds)


def _gpu(rng: random.Random, memory_bytes: int, cpu_rate: float) -> GpuProfile:
    unified = rng.random() < 0.3
    rate = cpu_rate * (rng.uniform(1, 3) if unified else log_uniform(rng, 3, 30))
    vram = int(memory_bytes * (0.75 if unified else rng.uniform(0.3, 1.5)))
    return GpuProfile(
        name="a gpu",
        backend=rng.choice(["cuda", "metal", "vulkan"]),
        vram_total_bytes=2 * vram,
        vram_available_bytes=vram,
        unified_memory=unified,
        vram_read_bytes_per_s=rate,
        step_s=log_uniform(rng, 3e-5, 5e-4),
        layer_s=log_uniform(rng, 2e-6, 5e-5),
        speeds=_speeds(rng, rate, flop_per_byte=rng.uniform(50, 200)),
    )
