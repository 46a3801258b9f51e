"""Loads with less on the GPU where it has no room, and watches its free memory while a ring serves.

Other programs take GPU memory while a ring serves, and layers on the GPU do not give way by themselves.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from halda import WindowAssignment
from primad.engine.devices import own_memory_of, reserve_bytes
from primad.engine.protocol import WindowSource
from primad.engine.streaming.units import WindowUnits, units_of_model, units_of_window
from primad.errors import EngineError
from primad.gguf.header import Header
from primad.gguf.model import open_model
from primad.ring.messages import GpuLoaded, GpuLow, Open

logger = logging.getLogger(__name__)

_Loaded = TypeVar("_Loaded")
_LOST: Final = re.compile(r"device ?lost", re.IGNORECASE)
"""What backends report of a GPU that is gone, which is not a lack of memory."""
LOOK_S: Final = 2.0
LOOKS: Final = 2
"""Number of consecutive checks with too little memory until the GPU is short: programs also start with more than they
keep."""


def load_what_fits(
    opening: Open,
    load: Callable[[Open], _Loaded],
    notify: Callable[[GpuLoaded], None],
    free_bytes: Callable[[str], int],
) -> _Loaded:
    """Return what ``load`` makes of ``opening``, or of one with less on the GPU if llama.cpp cannot load it: first
    without prefill offload, then with fewer layers.

    ``notify`` gets the number of layers, if the GPU was to be used, and by how much ``free_bytes`` of each GPU (by
    llama.cpp's name) has shrunk since. Raises the ``EngineError`` of a load without a GPU, or of one whose driver has
    lost its device.
    """
    planned, asked, why = _on_gpu(opening), opening, ""
    if not _uses_gpu(opening):
        return load(opening)
    free = {gpu: free_bytes(gpu) for gpu in gpus_of(opening)}
    while True:
        try:
            loaded = load(asked)
        except EngineError as exc:
            if not _uses_gpu(asked) or _LOST.search(str(exc)):
                raise
            why = why or str(exc)
            logger.warning("%s; trying with less on the GPU", exc)
            asked = without_offload(asked) if _offloads_prefill(asked) else fewer_on_gpu(asked)
            continue
        held = {gpu: max(0, before - free_bytes(gpu)) for gpu, before in free.items()}
        first = held.pop(opening.options.gpu, 0)
        notify(GpuLoaded(layers=_on_gpu(asked), planned=planned, held_bytes=first, why=why, others_held=held))
        return loaded


def gpus_of(opening: Open) -> list[str]:
    """llama.cpp's names for the GPUs that anything of ``opening`` is on, only GPUs that the device has."""
    options = opening.options
    names, found = (options.gpu, *options.other_gpus), list[str]()
    for assignment in (window.assignment for window in opening.windows):
        used = [name for name, count in zip(names, assignment.on_each_gpu, strict=False) if count]
        used += [options.gpu] * (assignment.output == "gpu")
        used += [options.offloading_gpu or options.gpu] * assignment.prefill_offload
        found += used
    return [name for name in names if name in found]


def without_offload(opening: Open) -> Open:
    """``opening`` with prefill of all layers in RAM on the CPU."""
    windows = [
        msgspec.structs.replace(window, assignment=replace(window.assignment, prefill_offload=False))
        for window in opening.windows
    ]
    return msgspec.structs.replace(opening, windows=windows)


def _offloads_prefill(opening: Open) -> bool:
    return any(window.assignment.prefill_offload for window in opening.windows)


def _uses_gpu(opening: Open) -> bool:
    return any(window.assignment.uses_gpu for window in opening.windows)


def fewer_on_gpu(opening: Open) -> Open:
    """``opening`` with three quarters of each window's GPU layers, at least one less; an output matrix leaves last.

    Shares of layers leave the GPU altogether: a part of a sum that was copied to another memory would remain a part.
    """
    has_file = opening.head is not None and opening.route == 1 and opening.group is None
    whole = open_model(Path(opening.head.model)) if opening.head is not None and has_file else None
    kept = 0.0 if opening.group is not None else 0.75
    windows = [
        msgspec.structs.replace(window, assignment=_fewer(window, whole, kept))
        if window.assignment.uses_gpu
        else window
        for window in opening.windows
    ]
    return msgspec.structs.replace(opening, windows=windows)


def _on_gpu(opening: Open) -> int:
    return sum(_count(window.assignment) for window in opening.windows)


def _count(assignment: WindowAssignment) -> int:
    """Layers on the GPU; an output matrix counts as one, as in llama.cpp."""
    return assignment.gpu_layers + (assignment.output == "gpu")


def _fewer(source: WindowSource, whole: Header | None, kept: float) -> WindowAssignment:
    def units(assignment: WindowAssignment) -> WindowUnits:
        asked = msgspec.structs.replace(source, assignment=assignment)
        return units_of_window(asked) if whole is None else units_of_model(whole, asked)

    before = source.assignment
    left = int(_count(before) * kept)
    output = "cpu" if before.output == "gpu" and not left else before.output
    layers = max(0, left - (output == "gpu"))
    others = tuple(count * layers // max(1, before.gpu_layers) for count in before.other_gpus)
    experts = min(before.cpu_experts, layers)
    fewer = replace(before, gpu_layers=layers, cpu_experts=experts, output=output, other_gpus=others)
    now = units(fewer)
    moved = _size(now) - _size(units(before))
    matrix = sum(part.size for part in now.output) if output != before.output else 0
    return replace(
        fewer,
        layer_bytes=before.layer_bytes + moved,
        output_bytes=before.output_bytes + matrix,
        resident_bytes=before.resident_bytes + moved + matrix,
    )


def _size(units: WindowUnits) -> int:
    return sum(part.size for layer in units.layers for part in layer)


class GpuWatch:
    """Watches a GPU with layers of a ring, of whose ``total_bytes`` ``free_bytes()`` are free.

    The reserve that plans leave to other programs is to stay free, as far as it was free when the layers were loaded;
    less than half of it is too little. ``other`` names the GPU if it is not the device's first.
    """

    def __init__(self, free_bytes: Callable[[], int], total_bytes: int, other: str = "") -> None:
        self._free_bytes, self._other = free_bytes, other
        self._keep_bytes = min(reserve_bytes(total_bytes), free_bytes())
        self._looked_s, self._short, self._is_reported = -math.inf, 0, False

    def look(self, now: float) -> GpuLow | None:
        """Return what to report at ``now`` (seconds on any increasing scale); None within ``LOOK_S`` of the last check.

        A lack is reported once until it is over.
        """
        if now - self._looked_s < LOOK_S:
            return None
        self._looked_s = now
        free = self._free_bytes()
        if 2 * free >= self._keep_bytes:
            self._short, self._is_reported = 0, False
            return None
        self._short += 1
        if self._is_reported or self._short < LOOKS:
            return None
        self._is_reported = True
        return GpuLow(free_bytes=free, needed_bytes=self._keep_bytes - free, other=self._other)


def watch_gpus(opening: Open) -> list[GpuWatch]:
    """A watch over each GPU that ``opening`` put something on, except those that share the CPU's memory."""
    found = {gpu: own_memory_of(gpu) for gpu in gpus_of(opening)}
    first = opening.options.gpu
    return [GpuWatch(*memory, "" if gpu == first else gpu) for gpu, memory in found.items() if memory is not None]
