"""A GPU to compute on, or Mesa's software device, which llama.cpp skips unless it is named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from primad.engine.devices import GpuDevice
from primad.profiler.gpus import list_gpus


def _software() -> dict[str, str]:
    """Environment variables that select the software device: that of ``tools/setup-vulkan`` where Debian's is too old.

    All processes share one shader cache, including those with a cache folder of their own. Fusion is off: it cannot
    cross a window's border, which changes the last bit.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    named = {"GGML_VK_VISIBLE_DEVICES": "0", "GGML_VK_DISABLE_FUSION": "1", "MESA_SHADER_CACHE_DIR": cache}
    own = Path(sys.prefix) / "mesa" / "lvp_icd.json"
    return {**named, "VK_ICD_FILENAMES": str(own)} if own.exists() else named


def _find() -> GpuDevice | str:
    """The first GPU that llama.cpp lists, else the software device; child processes then list it too."""
    for named in ({}, _software()):
        os.environ.update(named)
        listed = list_gpus()
        if isinstance(listed, str):
            return listed
        if listed:
            return listed[0]
    return "llama.cpp sees neither a GPU nor a software device; tools/setup-vulkan brings one"


FOUND = _find()
"""Set before a test module loads llama.cpp, which lists devices only once."""


@pytest.fixture(scope="session")
def gpu() -> GpuDevice:
    """The GPU to compute on."""
    if isinstance(FOUND, str):
        pytest.skip(FOUND)
    return FOUND


@pytest.fixture(autouse=True)
def _needs_gpu(gpu: GpuDevice) -> None:
    """All tests here need a GPU."""
