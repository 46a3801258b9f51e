"""GPUs that a process does not see.

llama.cpp wakes the driver of each GPU as soon as it is loaded, and one that is broken would end or stop its process. So who
does not need a GPU does not see it, and also spares the memory that a driver takes.
"""

from __future__ import annotations

import os
from typing import Final

NO_GPU: Final = {"GGML_DISABLE_VULKAN": "1", "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
"""What a process has in its environment for that."""


def hide_gpus() -> None:
    """From now on this process sees none when it loads llama.cpp; children that are given ``os.environ`` do."""
    for name, value in NO_GPU.items():
        os.putenv(name, value)
