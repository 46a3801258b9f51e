"""What plans may have of this device's GPU, which others use too.

It gave less memory than it had free: plans from now on have no more of it than it gave. Its driver ended the ring process:
once may be chance, twice leaves it out, and the device goes on with its processor. Or other programs need its memory while
a ring serves: layers on it cannot give way one by one, so the ring process ends at once, and another one loads what there is
room for; when there is more again for a while (``membership/memory_recovery.py``) plans know.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
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
"""How a ring process ends that llama.cpp or a driver ends. One that was killed or stopped tells nothing of a GPU."""


LoadAgain = Callable[[str], None]
"""Ends a ring process for this reason; its windows are loaded again."""


class GpuCare:
    """The owner lets plans use of the GPU what ``limits`` say. ``attend`` it, and ``run`` it beside everything else."""

    def __init__(self, limits: OwnerLimits, *, look_every_s: float = Timings().gpu_look_every_s) -> None:
        self._limits = limits
        self._max_share = 1.0
        self._failures = 0
        self._may_offload = True
        self._held_bytes: dict[int, int] = {}
        self._load_again: dict[int, LoadAgain] = {}
        self._cramped: dict[int, LoadAgain] = {}
        self._watch = MemoryWatch(self._measure, self._on_recovered, look_every_s=look_every_s)

    def attend(
        self,
        profile: Callable[[], DeviceProfile],
        *,
        report_line: ReportLine,
        changed: Callable[[], None],
        recovered: Callable[[], Awaitable[None]],
    ) -> None:
        """``profile`` gives the device's profile as of now (and takes a second).

        ``changed`` is called, and ``report_line`` tells the owner, when plans are to have less of the GPU;
        ``recovered`` when they may have more again.
        """
        self._profile, self._report_line, self._changed, self._recovered = profile, report_line, changed, recovered

    async def run(self) -> None:
        """Look for room after there was none, until cancelled."""
        await self._watch.run()

    @property
    def is_cramped(self) -> bool:
        """Whether a ring process has less on the GPU than was planned, since another one of ours has it."""
        return bool(self._cramped)

    def loaded(self, number: int, event: GpuLoaded, again: LoadAgain) -> None:
        """The ring process of load ``number`` has put on the GPU what found room there."""
        is_alone = not self._held_bytes
        self._held_bytes[number] = event.held_bytes
        if event.layers or not (event.planned or event.why):  # it computes layers there, or helps with prompts
            self._load_again[number] = again
        if event.layers == event.planned:
            if event.why:
                self._without_offload(event.why, is_alone=is_alone)
            return
        if not is_alone:  # the ring before this one had the room
            self._cramped[number] = again
            return
        rest = f"{event.layers} of {event.planned}" if event.layers else f"none of {event.planned}"
        self._report_line(
            f"the GPU has too little memory left: {rest} planned layers are on it, the processor computes the others "
            f"({event.why}); --max-vram says what plans may have of it"
        )
        self._max_share *= event.layers / event.planned
        self._changed()

    def _without_offload(self, why: str, *, is_alone: bool) -> None:
        self._report_line(
            f"the GPU has too little memory left to help with prompts, the processor computes them ({why})"
        )
        if is_alone:
            self._may_offload = False
            self._changed()

    def released(self, number: int) -> None:
        """The ring process of load ``number`` is no more."""
        self._load_again.pop(number, None)
        self._cramped.pop(number, None)
        if self._held_bytes.pop(number, None) is None:
            return
        if len(self._held_bytes) == 1 and self._cramped:
            _, load_again = self._cramped.popitem()
            load_again("the GPU has room for the layers that did not fit beside those of the ring before")

    def low(self, number: int, event: GpuLow) -> None:
        """Other programs need memory of the GPU, of which the ring process of load ``number`` holds some: it lets go."""
        again = self._load_again.get(number)
        if again is None:
            return
        room = event.free_bytes + sum(self._held_bytes.values())
        self._watch.note_memory_low(Room(room, room, room), event.needed_bytes)
        self._changed()
        again(
            f"other programs need memory of the GPU, {event.needed_bytes >> 20} MiB more than is free; its layers are "
            "loaded again, fewer of them there"
        )

    def failed(self, error: PrimadError) -> None:
        """A ring process with something on the GPU ended with ``error``."""
        if not _ITS_FAULT.search(str(error)):
            return
        self._failures += 1
        if self._failures == MAX_FAILURES:
            self._report_line(
                f"the GPU stays unused until primad is started again: {error}; 'primad doctor' looks at it, --gpu off "
                "leaves it out for good"
            )
            self._changed()

    def now(self, profile: DeviceProfile) -> DeviceProfile:
        """``profile`` as of now with what plans may have of the GPU, and will have.

        What ring processes of ours hold of it counts as free: a new plan takes their place.
        """
        gpu = profile.gpu
        if gpu is not None and not gpu.unified_memory:
            free = self._watch.max_bytes(self._allowed_bytes(gpu))
            self._watch.begin(free)
            profile = replace(profile, gpu=replace(gpu, vram_available_bytes=free))
        return self.bounded(profile)

    def _allowed_bytes(self, gpu: GpuProfile) -> int:
        room = min(gpu.vram_total_bytes, gpu.vram_available_bytes + sum(self._held_bytes.values()))
        return self._limits.vram_bytes(room, gpu.vram_total_bytes)

    def _measure(self) -> tuple[Room, int]:
        gpu = self._profile().gpu
        if gpu is None:
            return Room(0, 0, 0), 0
        room = self._allowed_bytes(gpu)
        return Room(room, room, room), gpu.vram_total_bytes

    async def _on_recovered(self, _: int) -> None:
        await self._recovered()

    def bounded(self, profile: DeviceProfile) -> DeviceProfile:
        """``profile`` with no more of the GPU than it is trusted with."""
        gpu = profile.gpu
        if gpu is not None and not gpu.unified_memory:
            gpu = replace(gpu, vram_available_bytes=self._watch.max_bytes(gpu.vram_available_bytes))
        if gpu is not None and not self._may_offload:
            gpu = replace(gpu, prefill_offload=())
        profile = replace(profile, gpu=gpu)
        if gpu is None or (self._max_share == 1.0 and self._failures < MAX_FAILURES):
            return profile
        if not self._max_share or self._failures >= MAX_FAILURES:
            return replace(profile, gpu=None)
        maximum = int(gpu.vram_total_bytes * self._max_share)
        return replace(
            profile,
            gpu=replace(gpu, vram_total_bytes=maximum, vram_available_bytes=min(gpu.vram_available_bytes, maximum)),
        )
