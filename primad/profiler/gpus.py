"""Which GPUs llama.cpp can use, and their free memory now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from halda import GpuProfile
from primad.engine.devices import GpuDevice, reserve_bytes
from primad.errors import ConfigError
from primad.profiler.trials import child_trials
from primad.system.memory import memory

_LIST_TIMEOUT_S: Final = 30.0
"""A driver that takes longer to list its GPUs counts as hung."""


def list_gpus() -> Sequence[GpuDevice] | str:
    """The GPUs that llama.cpp can use, or a text that says why they cannot be listed."""
    with child_trials(1, timeout_s=_LIST_TIMEOUT_S, gpu=True) as trials:
        return trials.gpus()


def choose_gpus(gpus: Sequence[GpuProfile], wanted: str | None) -> tuple[GpuProfile, ...]:
    """The GPUs to use, the fastest first: all, or those ``wanted`` (llama.cpp's names, or parts of their own names,
    with commas; "off": none). A GPU that two backends show is used by the faster one. Raises ``ConfigError`` if a name
    matches none.
    """
    ordered = sorted(gpus, key=lambda gpu: -gpu.vram_read_bytes_per_s)
    once = {gpu.pci or gpu.id: gpu for gpu in reversed(ordered)}
    found = [gpu for gpu in ordered if once[gpu.pci or gpu.id] is gpu]
    if wanted is None:
        return tuple(found)
    if wanted.casefold() == "off":
        return ()
    names = [name.strip().casefold() for name in wanted.split(",")]
    matches = [[gpu for gpu in found if name == gpu.id.casefold()] for name in names]
    matches = [
        here or [gpu for gpu in found if name and name in gpu.name.casefold()]
        for name, here in zip(names, matches, strict=True)
    ]
    if all(matches):
        return tuple(gpu for gpu in found if any(gpu in here for here in matches))
    known = ", ".join(f"{gpu.id} ({gpu.name})" for gpu in gpus) or "none that can be used"
    raise ConfigError(f"--gpu {wanted}: this device has no such GPU; it has {known}; 'off' takes none")


def gpu_now(gpu: GpuProfile, devices: Sequence[GpuDevice] | str) -> GpuProfile | None:
    """``gpu`` with the memory that plans may use of it now; None when it is not among ``devices`` any more.

    Memory shared with the CPU is free only as far as the RAM is. Some dedicated GPU memory is left to other programs.
    """
    for device in () if isinstance(devices, str) else devices:
        if (device.id, device.name, device.backend) == (gpu.id, gpu.name, gpu.backend):
            free = device.vram_available_bytes
            if device.unified_memory:
                free = min(free, memory().available_bytes)
            else:
                free = max(0, free - reserve_bytes(device.vram_total_bytes))
            return replace(gpu, vram_total_bytes=device.vram_total_bytes, vram_available_bytes=free)
    return None
