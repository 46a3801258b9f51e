"""A GPU to compute on, or the software device of Mesa, which llama.cpp skips unless it is named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from primad.engine.devices import GpuDevice
from primad.profiler.gpus import list_gpus


def _software() -> dict[str, str]:
    """What names the software device: that of ``tools/setup-vulkan`` where Debian's is too old.

    What it compiles is kept where it always is, also by processes with a cache folder of their own. Nothing is fused: at a
    window's border that cannot be done, and costs the last bit.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    named = {"GGML_VK_VISIBLE_DEVICES": "0", "GGML_VK_DISABLE_FUSION": "1", "MESA_SHADER_CACHE_DIR": cache}
    own = Path(sys.prefix) / "mesa" / "lvp_icd.json"
    return {**named, "VK_ICD_FILENAMES": str(own)} if own.exists() else named


def _find() -> GpuDevice | str:
    """The first GPU that llama.cpp sees; where it sees none, the software device, which children then see too."""
    for named in ({}, _software()):
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
