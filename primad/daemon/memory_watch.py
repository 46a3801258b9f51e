"""Looks at this device's memory after it was low, until plans may have more again.

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
"""Hears how many bytes plans may use from now on."""
FindRoom = Callable[[], tuple[recovery.Room, int]]
"""What there is room for now, and all bytes of that memory. Called in a thread."""


class MemoryWatch:
    """``memory_recovered`` hears of room that is there again, as ``measure`` finds it. ``run`` it beside everything else."""

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
        """Plans have so much of this device, as measured just now."""
        self._state = recovery.begin(reported_bytes, self._state)
        if not self._state.watches:
            self._memory_low.clear()

    def max_bytes(self, available_bytes: int) -> int:
        """What plans may have of what is available: no more than was told since the device was short of memory."""
        if self._state is None or not self._state.watches:
            return available_bytes
        return min(available_bytes, self._state.reported_bytes)

    async def report_memory_low(self, needed_bytes: int) -> int:
        """The device lacks so much; what there is room for beside what serves now, within what the owner allows."""
        room, _ = await asyncio.to_thread(self._measure)
        self.note_memory_low(room, needed_bytes)
        return room.beside_bytes

    def note_memory_low(self, room: recovery.Room, needed_bytes: int) -> None:
        """As ``report_memory_low``, where it is known what there is room for."""
        if self._state is not None:
            self._state = recovery.report_memory_low(self._state, room, needed_bytes=needed_bytes, now=time.monotonic())
            self._memory_low.set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._memory_low.wait()
            await asyncio.sleep(self._look_every_s)
            room, total_bytes = await asyncio.to_thread(self._measure)
            if self._state is None or not self._state.watches:  # somebody began anew meanwhile
                continue
            self._state, reported_bytes = recovery.look(
                self._state, room, total_bytes=total_bytes, now=time.monotonic()
            )
            if not self._state.watches:
                self._memory_low.clear()
            if reported_bytes is not None:
                await self._memory_recovered(reported_bytes)


def ram_room(limits: OwnerLimits) -> tuple[recovery.Room, int]:
    """What there is room for on this device within ``limits``, and all of its memory."""
    ours = children()
    now = memory(ours=ours)
    total, available = now.total_bytes, now.available_bytes
    beside = max(0, available - held_bytes(ours))
    return recovery.Room(available, limits.ram_bytes(available, total), limits.ram_bytes(beside, total)), total
