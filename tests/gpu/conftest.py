"""A GPU to compute on, or the software device of Mesa, which llama.cpp skips unless it is named."""

from __future__ import annotations

import os

import pytest

from primad.engine.devices import GpuDevice
from primad.profiler.gpus import list_gpus

_SOFTWARE = {"GGML_VK_VISIBLE_DEVICES": "0", "GGML_VK_DISABLE_FUSION": "1"}
"""Llvmpipe 15 crashes in the shader that llama.cpp fuses the routers of experts into."""


def _find() -> GpuDevice | str:
    """The first GPU that llama.cpp sees; where it sees none, the software device, which children then see too."""
    for named in ({}, _SOFTWARE):
        os.environ.update(named)
        listed = list_gpus()
        if isinstance(listed, str):
            return listed
        if listed:
            return listed[0]
    return "llama.cpp sees neither a GPU nor a software device; tools/setup-vulkan brings one"


FOUND = _find()
"""Before a test module loads llama.cpp, which looks for devices once."""


@pytest.fixture(scope="session")
def gpu() -> GpuDevice:
    """What there is to compute on."""
    if isinstance(FOUND, str):
        pytest.skip(FOUND)
    return FOUND


@pytest.fixture(autouse=True)
def _needs_gpu(gpu: GpuDevice) -> None:
    """Every test here does."""
