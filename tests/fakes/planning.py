"""Devices for plans, with round figures."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from halda import (
    CpuProfile,
    DeviceProfile,
    DiskProfile,
    GpuProfile,
    LayerProfile,
    LinkProfile,
    ModelProfile,
    OffloadSpeed,
    TypeSpeed,
)
from primad.planning.question import Wishes
from primad.planning.run_config import RunConfig

GB = 1_000_000_000


def speed(bytes_per_s: float) -> TypeSpeed:
    """The speed of Q4_K, with ``bytes_per_s`` in decode."""
    return TypeSpeed(
        type="Q4_K",
        decode_bytes_per_s=bytes_per_s,
        batch_bytes_per_s=bytes_per_s / 2,
        prefill_flop_per_s=bytes_per_s * 20,
        extra_buffers=False,
        decode_spread=0.0,
        prefill_spread=0.0,
    )


def device(
    name: str,
    *,
    ram: int = 8 * GB,
    vram: int = 0,
    rate: float = 20e9,
    disk: float = 1e9,
    host: str | None = None,
    unified: bool = False,
) -> DeviceProfile:
    """A device that computes ``rate`` bytes of weights a second, ten times as many on its GPU if it has ``vram``."""
    gpu = GpuProfile(
        name="GPU",
        backend="CUDA",
        vram_total_bytes=vram,
        vram_available_bytes=vram,
        unified_memory=unified,
        vram_read_bytes_per_s=rate * 10,
        step_s=0.0002,
        layer_s=0.00003,
        speeds=(speed(rate * 10),),
    )
    return DeviceProfile(
        device=name,
        host=host or name,
        system="Linux",
        machine="x86_64",
        cpu=CpuProfile(
            name="CPU", cores=4, threads=4, batch_threads=4, step_s=0.0001, layer_s=0.00002, speeds=(speed(rate),)
        ),
        ram_total_bytes=max(ram, 1),
        ram_available_bytes=ram,
        ram_read_bytes_per_s=rate,
        disk=DiskProfile(
            prefetch_bytes_per_s=disk, fault_bytes_per_s=disk / 2, random_bytes_per_s=disk / 20, free_bytes=100 * GB
        ),
        gpu=gpu if vram else None,
    )


def offloading(device: DeviceProfile, *, times: float = 4.0) -> DeviceProfile:
    """``device``, whose GPU processes prompts through layers in RAM ``times`` as fast as its CPU."""
    assert device.gpu is not None
    prefill_offload = tuple(
        OffloadSpeed(
            type=speed.type,
            few_bytes_per_s=min(speed.decode_bytes_per_s / 2, times * speed.prefill_flop_per_s / 250),
            prefill_flop_per_s=times * speed.prefill_flop_per_s,
        )
        for speed in device.cpu.speeds
    )
    return replace(device, gpu=replace(device.gpu, prefill_offload=prefill_offload))


def link(source: str, target: str, *, bytes_per_s: float = 1e8, round_trip_s: float = 0.001) -> LinkProfile:
    """A measured link."""
    return LinkProfile(
        source=source, target=target, address="10.0.0.1:1", round_trip_s=round_trip_s, bytes_per_s=bytes_per_s
    )


def model(*, layers: int = 20, layer_bytes: int = GB // 4, context_tokens: int = 8192) -> ModelProfile:
    """A dense model of equal layers, all Q4_K."""
    layer = LayerProfile(bytes_by_type={"Q4_K": layer_bytes}, expert_bytes_by_type={}, kv_bytes_per_token=4096)
    return ModelProfile(
        name="toy",
        architecture="llama",
        layers=(layer,) * layers,
        embedding_bytes=GB // 5,
        output_bytes_by_type={"Q4_K": GB // 5},
        tied=False,
        width=4096,
        vocabulary=32_000,
        context_tokens=context_tokens,
        experts=0,
        experts_used=0,
        kv_head_width=64,
        cut_multiple=1,
    )


def wishes(**given: Any) -> Wishes:
    """Wishes; fields of ``RunConfig`` go into one."""
    names = {field.name for field in fields(RunConfig)}
    run = RunConfig(**{name: value for name, value in given.items() if name in names})
    return Wishes(run=run, **{name: value for name, value in given.items() if name not in names})
