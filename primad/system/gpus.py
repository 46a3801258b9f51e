"""Free memory of graphics cards, and hiding GPUs from processes.

llama.cpp reports free memory with most drivers, but with some it counts only this process's use.

llama.cpp initialises the driver of each GPU as soon as it is loaded, and a broken driver would end or hang the process.
So processes that need no GPU see none, which also saves the memory that a driver takes.
"""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path
from typing import Any, Final

_DEVICES: Final = Path("/sys/bus/pci/devices")
NO_GPU: Final = {"GGML_DISABLE_VULKAN": "1", "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
"""Environment variables with which a process sees no GPU."""


def free_vram(pci: str, devices: Path = _DEVICES) -> int | None:
    """Free bytes of the card at the PCI address ``pci`` (``0000:01:00.0``); None if there is no counter.

    NVIDIA's driver has one on Linux and Windows, AMD's on Linux. For memory that a GPU shares with the processor
    (Apple's, integrated ones) the system's memory counts.
    """
    found = _of_amd(devices / pci)
    return found if found is not None else _of_nvidia(pci)


def _of_amd(device: Path) -> int | None:
    try:
        total, used = (int((device / f"mem_info_vram_{name}").read_text()) for name in ("total", "used"))
    except (OSError, ValueError):
        return None
    return max(0, total - used)


def _of_nvidia(pci: str) -> int | None:
    nvml = _nvml()
    if nvml is None:
        return None
    with contextlib.suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci)
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
    return None


@cache
def _nvml() -> Any:
    """NVIDIA's library, initialised; None if there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def hide_gpus() -> None:
    """From now on this process sees no GPU when it loads llama.cpp; children that inherit ``os.environ`` still do."""
    for name, value in NO_GPU.items():
        os.putenv(name, value)
