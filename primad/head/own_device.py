"""The head as one of the devices that plans may use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from halda import DeviceProfile
from primad.daemon.gpu_care import GpuCare
from primad.daemon.memory_watch import MemoryWatch


class OwnDevice:
    """``profile`` gives this device's profile as of now, ``memory_watch`` hears when its memory is low. ``gpu_care`` knows
    what plans may have of its GPU."""

    def __init__(self, profile: Callable[[], DeviceProfile], memory_watch: MemoryWatch, gpu_care: GpuCare) -> None:
        self._profile, self._memory_watch, self._gpu_care = profile, memory_watch, gpu_care

    async def profile(self) -> DeviceProfile:
        """Its profile as of now, with no more memory than plans may have since it was short of it."""
        profile = self._gpu_care.now(await asyncio.to_thread(self._profile))
        most = self._memory_watch.most_bytes(profile.ram_available_bytes)
        return replace(profile, ram_available_bytes=most)

    async def begin(self) -> DeviceProfile:
        """Its profile as of now, which a ring is formed with."""
        profile = await self.profile()
        self._memory_watch.begin(profile.ram_available_bytes)
        return profile

    async def press(self, needed_bytes: int) -> None:
        """It is short of so much memory: plans from now on have less of it."""
        await self._memory_watch.press(needed_bytes)
