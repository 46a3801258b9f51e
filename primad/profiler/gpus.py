"""Which GPUs llama.cpp can use, and what memory they have free now."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from halda import GpuProfile
from primad.engine.devices import GpuDevice
from primad.profiler.trials import child_trials
from primad.system.memory import memory

logger = logging.getLogger(__name__)


def list_gpus() -> Sequence[GpuDevice]:
    """The GPUs that llama.cpp can use; none where asking for them fails."""
    with child_trials(1) as trials:
        answer = trials.gpus()
    if isinstance(answer, str):
        logger.warning("GPUs cannot be listed and stay unused: %s", answer)
        return ()
    return answer


def gpu_now(gpu: GpuProfile, devices: Sequence[GpuDevice]) -> GpuProfile | None:
    """``gpu`` with the memory that is free now; None when it is not among ``devices`` any more.

    Memory that the GPU shares with the CPU is free only as far as the RAM is.
    """
    for device in devices:
        if (device.name, device.backend) == (gpu.name, gpu.backend):
            free = device.vram_available_bytes
            if device.unified_memory:
                free = min(free, memory().available_bytes)
            return replace(gpu, vram_total_bytes=device.vram_total_bytes, vram_available_bytes=free)
    return None
