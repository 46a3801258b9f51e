"""Checks this device's memory after it was low, until plans may use more again.

``membership/memory_recovery.py`` decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from primad.membership import memory_recovery as recovery
from primad.settings.limits import OwnerLimits
from primad.settings.timings import Timings
from primad.system.memory import children, held_bytes, memory

OnRecovered = Callable[[int], Awaitable[None]]
"""Called with the bytes that plans may use from now on."""
FindRoom = Callable[[], tuple[recovery.Room, int]]
"""Returns the memory that is free now, and the total bytes of that memory. Called in a thread."""


class MemoryWatch:
    """Calls ``memory_recovered`` when ``measure`` finds memory free again. Run ``run`` alongside everything else."""

    def __init__(
        self,
        measure: FindRoom,
        memory_recovered: OnRecovered,
        *,
        look_every_s: float = Timings().memory_look_every_s,
    ) -> None:
        self._look_every_s = look_every_s
        self._measure, self._memory_recovered = measure, memory_recovered
        self._state: recovery.Recovery | None = None
        self._memory_low = asyncio.Event()

    def begin(self, reported_bytes: int) -> None:
        """Record that plans use ``reported_bytes`` of this device, as measured now."""
        self._state = recovery.begin(reported_bytes, self._state)
        if not self._state.watches:
            self._memory_low.clear()

    def max_bytes(self, available_bytes: int) -> int:
        """Return what plans may use of ``available_bytes``: no more than was reported since the device was short of
        memory."""
        if self._state is None or not self._state.watches:
            return available_bytes
        return min(available_bytes, self._state.reported_bytes)

    async def report_memory_low(self, needed_bytes: int) -> int:
        """Record that the device lacks ``needed_bytes``; return what is free besides the serving ring, within the
        owner's limits."""
        room, _ = await asyncio.to_thread(self._measure)
        self.note_memory_low(room, needed_bytes)
        return room.beside_bytes

    def note_memory_low(self, room: recovery.Room, needed_bytes: int) -> None:
        """As ``report_memory_low``, with a known ``room``."""
        if self._state is not None:
            self._state = recovery.report_memory_low(self._state, room, needed_bytes=needed_bytes, now=time.monotonic())
            self._memory_low.set()

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await self._memory_low.wait()
            await asyncio.sleep(self._look_every_s)
            room, total_bytes = await asyncio.to_thread(self._measure)
            if self._state is None or not self._state.watches:  # ``begin`` was called meanwhile
                continue
            self._state, reported_bytes = recovery.look(
                self._state, room, total_bytes=total_bytes, now=time.monotonic()
            )
            if not self._state.watches:
                self._memory_low.clear()
            if reported_bytes is not None:
                await self._memory_recovered(reported_bytes)


def ram_room(limits: OwnerLimits) -> tuple[recovery.Room, int]:
    """Return the memory that is free on this device within ``limits``, and its total memory."""
    ours = children()
    now = memory(ours=ours)
    total, available = now.total_bytes, now.available_bytes
    beside = max(0, available - held_bytes(ours))
    return recovery.Room(available, limits.ram_bytes(available, total), limits.ram_bytes(beside, total)), total
