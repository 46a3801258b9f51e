"""Decides what plans may use of this device's GPUs, which other programs use too.

- A GPU gave less memory than it had free: later plans use no more of it than that.
- A driver ended the ring process: once may be chance, twice leaves GPUs out. Nothing tells which of several GPUs it
  was, so the first is tried without the others, then the others without the first, and at last the device uses its
  processor only.
- Other programs need memory of a GPU while a ring serves: layers cannot be moved off it one by one, so the ring process
  ends immediately, and another one loads the layers that fit. When there is more memory again for a while
  (``membership/memory_recovery.py``), plans use it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Final

from halda import DeviceProfile, GpuProfile
from primad.daemon.memory_watch import MemoryWatch
from primad.daemon.reporter import ReportLine
from primad.errors import PrimadError
from primad.membership.memory_recovery import Room
from primad.ring.messages import GpuLoaded, GpuLow
from primad.settings.limits import OwnerLimits
from primad.settings.timings import Timings

MAX_FAILURES: Final = 2
_ITS_FAULT: Final = re.compile(r"SIG(ABRT|SEGV|ILL|FPE)|ended with code|llama\.cpp (failed|cannot)")
"""How a ring process ends that llama.cpp or a driver ends. One that was killed or stopped says nothing about a GPU."""


LoadAgain = Callable[[str], None]
"""Ends a ring process for the given reason; its windows are loaded again."""


class GpuCare:
    """Limits what plans use of GPUs, within the owner's ``limits``. Call ``attend`` first, and run ``run`` alongside
    everything else."""

    def __init__(self, limits: OwnerLimits, *, look_every_s: float = Timings().gpu_look_every_s) -> None:
        self._limits = limits
        self._max_share = 1.0
        self._failures = 0
        self._may_offload = True
        self._held: dict[int, GpuLoaded] = {}
        self._load_again: dict[int, LoadAgain] = {}
        self._cramped: dict[int, LoadAgain] = {}
        self._look_every_s = look_every_s
        self._ids: tuple[str, ...] = ()
        self._latest: dict[str, GpuProfile] = {}
        self._watches: dict[str, MemoryWatch] = {}
        self._running: asyncio.TaskGroup | None = None

    def attend(
        self,
        profile: Callable[[], DeviceProfile],
        *,
        report_line: ReportLine,
        changed: Callable[[], None],
        recovered: Callable[[], Awaitable[None]],
    ) -> None:
        """Set the callbacks; ``profile`` returns the device's current profile (and takes a second).

        ``changed`` is called, and ``report_line`` tells the owner, when plans may use less of the GPU; ``recovered``
        when they may use more again.
        """
        self._profile, self._report_line, self._changed, self._recovered = profile, report_line, changed, recovered

    async def run(self) -> None:
        """Look for free memory after a shortage, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._running = group
            for watch in self._watches.values():
                group.create_task(watch.run())
            try:
                await asyncio.Event().wait()
            finally:
                self._running = None

    def _watch_of(self, gpu: str) -> MemoryWatch:
        if gpu not in self._watches:
            measure = partial(self._measure, gpu)
            watch = MemoryWatch(measure, self._on_recovered, look_every_s=self._look_every_s)
            self._watches[gpu] = watch
            if self._running is not None:
                self._running.create_task(watch.run())
        return self._watches[gpu]

    @property
    def is_cramped(self) -> bool:
        """Whether a ring process has less on the GPU than planned because another one of this daemon holds the
        memory."""
        return bool(self._cramped)

    def loaded(self, number: int, event: GpuLoaded, again: LoadAgain) -> None:
        """Record what the ring process of load ``number`` has put on the GPU."""
        is_alone = not self._held
        self._held[number] = event
        if event.layers or not (event.planned or event.why):  # it computes layers there, or helps with prompts
            self._load_again[number] = again
        if event.layers == event.planned:
            if event.why:
                self._without_offload(event.why, is_alone=is_alone)
            return
        if not is_alone:  # the previous ring had the memory
            self._cramped[number] = again
            return
        rest = f"{event.layers} of {event.planned}" if event.layers else f"none of {event.planned}"
        self._report_line(
            f"the GPU has too little memory left: {rest} planned layers are on it, the CPU computes the others "
            f"({event.why}); --max-vram sets how much of it plans may use"
        )
        self._max_share *= event.layers / event.planned
        self._changed()

    def _without_offload(self, why: str, *, is_alone: bool) -> None:
        self._report_line(f"the GPU has too little memory left to help with prompts, the CPU computes them ({why})")
        if is_alone:
            self._may_offload = False
            self._changed()

    def released(self, number: int) -> None:
        """The ring process of load ``number`` has ended."""
        self._load_again.pop(number, None)
        self._cramped.pop(number, None)
        if self._held.pop(number, None) is None:
            return
        if len(self._held) == 1 and self._cramped:
            _, load_again = self._cramped.popitem()
            load_again("the GPU has room for the layers that did not fit next to those of the previous ring")

    def low(self, number: int, event: GpuLow) -> None:
        """Handle a shortage: other programs need memory of a GPU, of which the ring process of load ``number`` holds
        some."""
        again = self._load_again.get(number)
        if again is None:
            return
        gpu = event.other or self._first
        room = event.free_bytes + self._held_of(gpu)
        self._watch_of(gpu).note_memory_low(Room(room, room, room), event.needed_bytes)
        self._changed()
        again(
            f"other programs need memory of the GPU, {event.needed_bytes >> 20} MiB more than is free; its layers are "
            "loaded again, fewer of them there"
        )

    def failed(self, error: PrimadError) -> None:
        """Record that a ring process that used a GPU ended with ``error``."""
        if not _ITS_FAULT.search(str(error)):
            return
        before, self._failures = self._trusted(self._ids), self._failures + 1
        left = self._trusted(self._ids)
        if self._failures >= MAX_FAILURES and left != before:
            used = f"of the GPUs only {' and '.join(left)} {'is' if len(left) == 1 else 'are'} used"
            what = used if left else "the GPU stays unused"
            self._report_line(
                f"{what} until primad is started again: {error}; 'primad doctor' looks at it, --gpu off leaves it out for "
                "good"
            )
            self._changed()

    def _trusted(self, ids: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of the GPUs ``ids`` that plans may use after the failures so far."""
        if self._failures < MAX_FAILURES:
            return ids
        ways = [ids[:1], ids[1:]] if len(ids) > 1 else []
        return [*ways, ()][min(self._failures - MAX_FAILURES, len(ways))]

    def now(self, profile: DeviceProfile) -> DeviceProfile:
        """Return ``profile`` with what plans may use of the GPUs, and remember it.

        Memory that ring processes of this daemon hold counts as free: a new plan replaces them.
        """
        self._ids = tuple(gpu.id for gpu in profile.gpus)
        gpus = list(profile.gpus)
        for i, (gpu, allowed) in enumerate(zip(profile.gpus, self._allowed_bytes(profile), strict=True)):
            if not gpu.unified_memory:
                watch = self._watch_of(gpu.id)
                free = watch.max_bytes(allowed)
                watch.begin(free)
                gpus[i] = replace(gpu, vram_available_bytes=free)
        self._latest = {gpu.id: gpu for gpu in gpus}
        return self.bounded(profile.with_gpus(gpus))

    @property
    def _first(self) -> str:
        """The first GPU that plans may use; ring processes name it ""."""
        return next(iter(self._trusted(self._ids)), "")

    def _held_of(self, gpu: str) -> int:
        """Return the bytes that ring processes of this daemon hold of ``gpu``."""
        return sum(
            each.held_bytes if gpu == self._first else each.others_held.get(gpu, 0) for each in self._held.values()
        )

    def _allowed_bytes(self, profile: DeviceProfile) -> list[int]:
        """Return what the owner lets plans use of each GPU, including what this daemon holds."""
        sizes = [
            (min(gpu.vram_total_bytes, gpu.vram_available_bytes + self._held_of(gpu.id)), gpu.vram_total_bytes)
            for gpu in profile.gpus
        ]
        return self._limits.vram_of_each(sizes)

    def _measure(self, gpu: str) -> tuple[Room, int]:
        profile = self._profile()
        for each, room in zip(profile.gpus, self._allowed_bytes(profile), strict=True):
            if each.id == gpu:
                return Room(room, room, room), each.vram_total_bytes
        return Room(0, 0, 0), 0

    async def _on_recovered(self, _: int) -> None:
        await self._recovered()

    def bounded(self, profile: DeviceProfile) -> DeviceProfile:
        """Return ``profile`` limited to what is trusted of its GPUs; a trusted GPU that it lacks is added again."""
        self._ids = self._ids or tuple(gpu.id for gpu in profile.gpus)
        known, gpus = self._latest | {gpu.id: gpu for gpu in profile.gpus}, []
        for gpu in (known[each] for each in self._trusted(self._ids) if each in known):
            if not self._max_share:
                continue
            total, free = gpu.vram_total_bytes, gpu.vram_available_bytes
            if not gpu.unified_memory and gpu.id in self._watches:
                free = self._watches[gpu.id].max_bytes(free)
            if self._max_share < 1.0:
                total = int(total * self._max_share)
            found = replace(gpu, vram_total_bytes=total, vram_available_bytes=min(free, total))
            gpus.append(found if self._may_offload else replace(found, prefill_offload=()))
        return profile.with_gpus(gpus)
