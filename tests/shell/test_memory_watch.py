"""After a memory shortage, free memory is sampled until there is room again, up to the owner's limit."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from primad.daemon import memory_watch as memory_watch
from primad.daemon.memory_watch import MemoryWatch, ram_room
from primad.settings.limits import NO_LIMITS, OwnerLimits
from primad.system.memory import Memory

GIB = 1 << 30
PATIENCE_S = 180
SEVERAL = 4
"""This many samples, including the one of the shortage, show that sampling repeats."""


class Machine:
    """A device of 16 GiB whose clock advances ten seconds at each reading."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.available, self.looks, self.now = 8 * GIB, 0, 0
        self.reports: asyncio.Queue[int] = asyncio.Queue()
        self.resident_bytes = 0
        self.looked = threading.Event()
        monkeypatch.setattr(memory_watch, "children", lambda: [7])
        monkeypatch.setattr(memory_watch, "held_bytes", lambda pids: self.resident_bytes if pids == [7] else 0)
        monkeypatch.setattr(memory_watch, "memory", self.memory)
        monkeypatch.setattr(memory_watch, "time", SimpleNamespace(monotonic=self.clock))

    def memory(self, ours: list[int]) -> Memory:
        assert ours == [7]
        self.looks += 1
        if self.looks >= SEVERAL:
            self.looked.set()
        return Memory(16 * GIB, self.available)

    def clock(self) -> int:
        self.now += 10
        return self.now

    async def watch(self, limits: OwnerLimits = NO_LIMITS) -> tuple[MemoryWatch, asyncio.Task[None]]:
        made = MemoryWatch(partial(ram_room, limits), self.reports.put, look_every_s=0.001)
        made.begin(limits.ram_bytes(8 * GIB, 16 * GIB))
        return made, asyncio.create_task(made.run())


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


async def test_freed_memory_is_reported_once_and_then_no_longer_sampled(machine):
    async with asyncio.timeout(PATIENCE_S):
        watch, task = await machine.watch()
        await asyncio.sleep(0.05)
        assert machine.looks == 0, "nothing is missing"
        machine.available = 2 * GIB
        assert watch.max_bytes(GIB * 9) == 9 * GIB
        machine.resident_bytes = GIB // 2
        assert await watch.report_memory_low(GIB) == 2 * GIB - GIB // 2
        assert (watch.max_bytes(GIB), watch.max_bytes(9 * GIB)) == (GIB, 2 * GIB - GIB // 2)
        assert await asyncio.to_thread(machine.looked.wait, PATIENCE_S)
        assert machine.reports.empty()
        machine.available = 9 * GIB
        assert await machine.reports.get() == 9 * GIB
        assert watch.max_bytes(9 * GIB) == 9 * GIB
        looks = machine.looks
        await asyncio.sleep(0.05)
        assert machine.looks <= looks + 1
        task.cancel()


async def test_reported_memory_respects_the_owners_limit(machine):
    async with asyncio.timeout(PATIENCE_S):
        watch, task = await machine.watch(OwnerLimits(ram=4 * GIB, vram=None, disk_bytes=None))
        assert await watch.report_memory_low(GIB) == 4 * GIB
        machine.available = 16 * GIB
        assert await machine.reports.get() == 4 * GIB
        task.cancel()


async def test_memory_is_not_sampled_once_the_plan_has_all_of_it_again(machine):
    async with asyncio.timeout(PATIENCE_S):
        watch, task = await machine.watch()
        machine.available = 2 * GIB
        await watch.report_memory_low(GIB)
        watch.begin(8 * GIB)
        await asyncio.sleep(0.02)
        looks = machine.looks
        machine.available = 16 * GIB
        await asyncio.sleep(0.05)
        assert machine.looks <= looks + 1
        assert machine.reports.empty()
        task.cancel()
