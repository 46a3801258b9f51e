"""Which windows use llama.cpp's extra buffers (AMX, repacked weights): what the devices' profiles say, where memory allows.

On some builds they crash (LLAMA issue 20824: GCC before 12.4 on a CPU with AMX), on some machines they make decode faster
and prefill slower, for some types they change nothing. A device's profile was measured with its build of llama.cpp, in
processes where a crash is an answer; it says for each type whether a typical exchange is faster with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from halda import CpuProfile, DeviceProfile, ModelProfile, WindowAssignment
from primad.head.promise import Promise

MEMORY_SHARE: Final = 0.4
"""Extra buffers copy weights: only where the copies on a machine take at most this share of what plans may use there."""


def choose_extra_buffers(
    promise: Promise, profiles: Mapping[str, DeviceProfile], model: ModelProfile, wish: str
) -> dict[str, list[bool]]:
    """For each window of each device of the plan whether it uses extra buffers; ``wish`` is auto, on or off.

    ``profiles`` are those of the devices, as of now and within their owners' limits. A window that streams has no copies.
    """
    if wish != "auto":
        return {
            name: [wish == "on" and not window.streamed_bytes for window in assignment.windows]
            for name, assignment in promise.assignments.items()
        }
    chosen, copied_bytes = {}, Counter[str]()
    for name, assignment in promise.assignments.items():
        profile = profiles[name]
        chosen[name] = [
            not window.streamed_bytes and is_faster(window, model, profile.cpu) for window in assignment.windows
        ]
        for window, extra in zip(assignment.windows, chosen[name], strict=True):
            copied_bytes[profile.host] += extra * (window.layer_bytes + window.output_bytes)
    for name, profile in profiles.items():
        if copied_bytes[profile.host] > MEMORY_SHARE * profile.ram_available_bytes:
            chosen[name] = [False] * len(chosen[name])
    return chosen


def is_faster(window: WindowAssignment, model: ModelProfile, cpu: CpuProfile) -> bool:
    """Whether most weights that ``cpu`` computes of ``window`` are of types that it computes faster with extra buffers."""
    faster = {speed.type for speed in cpu.speeds if speed.extra_buffers}
    weights = Counter[str](model.output_bytes_by_type if window.output == "cpu" else {})
    for layer in model.layers[window.first : window.last - window.gpu_layers]:
        weights.update(layer.bytes_by_type)
        weights.update(layer.expert_bytes_by_type)
    return 2 * sum(weights[kind] for kind in faster) > weights.total()
