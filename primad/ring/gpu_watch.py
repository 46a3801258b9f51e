"""Looks at what a GPU has free while a ring serves: others take of it, and layers on it do not give way by themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from primad.engine.devices import own_memory_of, reserve_bytes
from primad.ring.messages import GpuLow, Open

LOOK_S: Final = 2.0
LOOKS: Final = 2
"""It is short of memory that was at so many looks, one behind the other: programs also begin with more than they keep."""


class GpuWatch:
    """A GPU that has ``free_bytes()`` of ``total_bytes`` free, with layers of a ring on it: ``look`` at it now and then.

    What plans leave to others is to stay free, as far as it was when the layers were loaded; less than half of that is
    too little.
    """

    def __init__(self, free_bytes: Callable[[], int], total_bytes: int) -> None:
        self._free_bytes = free_bytes
        self._keep_bytes = min(reserve_bytes(total_bytes), free_bytes())
        self._looked_s, self._short, self._is_told = -math.inf, 0, False

    def look(self, now: float) -> GpuLow | None:
        """What to tell at ``now`` (seconds on any scale that goes on); nothing within ``LOOK_S`` of the last look.

        A lack is told once until it is over.
        """
        if now - self._looked_s < LOOK_S:
            return None
        self._looked_s = now
        free = self._free_bytes()
        if 2 * free >= self._keep_bytes:
            self._short, self._is_told = 0, False
            return None
        self._short += 1
        if self._is_told or self._short < LOOKS:
            return None
        self._is_told = True
        return GpuLow(free_bytes=free, needed_bytes=self._keep_bytes - free)


def watch_gpu(opening: Open) -> GpuWatch | None:
    """A watch over the GPU that ``opening`` has put something on; None for none, and for one with the processor's memory."""
    if not any(window.assignment.uses_gpu for window in opening.windows):
        return None
    found = own_memory_of(opening.options.gpu)
    return None if found is None else GpuWatch(*found)
