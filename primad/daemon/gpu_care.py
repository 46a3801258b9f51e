"""What this device's GPU is not trusted with any more, since this daemon started.

A GPU gave less memory than it had free, since others use it too: plans from now on have no more of it than it gave. Or its
driver ended the ring process: once may be chance, twice leaves the GPU out, and the device goes on with its processor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from halda import DeviceProfile
from primad.daemon.reporter import Say
from primad.errors import PrimadError
from primad.ring.messages import GpuLoaded
from primad.settings.limits import OwnerLimits

MOST_FAILURES: Final = 2
_ITS_FAULT: Final = re.compile(r"SIG(ABRT|SEGV|ILL|FPE)|ended with code|llama\.cpp (failed|cannot)")
"""How a ring process ends that llama.cpp or a driver ends. One that was killed or stopped tells nothing of a GPU."""


class GpuCare:
    """``changed`` is called, and ``say`` tells the owner, when plans are to have less of the GPU."""

    def __init__(self) -> None:
        self._most_share = 1.0
        self._failures = 0
        self._may_help = True
        self._held_bytes: dict[int, int] = {}
        self.changed: Callable[[], None] = lambda: None
        self.say: Say = lambda _: None

    def loaded(self, number: int, event: GpuLoaded) -> None:
        """The ring process of load ``number`` has put on the GPU what found room there."""
        is_alone = not self._held_bytes
        self._held_bytes[number] = event.held_bytes
        if event.layers == event.planned:
            if event.why:
                self._without_help(event.why, is_alone=is_alone)
            return
        rest = f"{event.layers} of {event.planned}" if event.layers else f"none of {event.planned}"
        self.say(
            f"the GPU has too little memory left: {rest} planned layers are on it, the processor computes the others "
            f"({event.why}); --max-vram says what plans may have of it"
        )
        if is_alone:  # else it was the ring before this one that had the room
            self._most_share *= event.layers / event.planned
            self.changed()

    def _without_help(self, why: str, *, is_alone: bool) -> None:
        self.say(f"the GPU has too little memory left to help with prompts, the processor computes them ({why})")
        if is_alone:
            self._may_help = False
            self.changed()

    def released(self, number: int) -> None:
        """The ring process of load ``number`` is no more."""
        self._held_bytes.pop(number, None)

    def failed(self, error: PrimadError) -> None:
        """A ring process with something on the GPU ended with ``error``."""
        if not _ITS_FAULT.search(str(error)):
            return
        self._failures += 1
        if self._failures == MOST_FAILURES:
            self.say(
                f"the GPU stays unused until primad is started again: {error}; 'primad doctor' looks at it, --gpu off "
                "leaves it out for good"
            )
            self.changed()

    def now(self, profile: DeviceProfile, limits: OwnerLimits) -> DeviceProfile:
        """``profile`` as of now with what plans may have of the GPU.

        What ring processes of ours hold of it counts as free: a new plan takes their place.
        """
        gpu, held = profile.gpu, sum(self._held_bytes.values())
        if gpu is not None and held and not gpu.unified_memory:
            free = limits.vram_bytes(min(gpu.vram_total_bytes, gpu.vram_available_bytes + held), gpu.vram_total_bytes)
            profile = replace(profile, gpu=replace(gpu, vram_available_bytes=free))
        return self.bounded(profile)

    def bounded(self, profile: DeviceProfile) -> DeviceProfile:
        """``profile`` with no more of the GPU than it is trusted with."""
        gpu = profile.gpu
        if gpu is not None and not self._may_help:
            gpu = replace(gpu, helped=())
            profile = replace(profile, gpu=gpu)
        if gpu is None or (self._most_share == 1.0 and self._failures < MOST_FAILURES):
            return profile
        if not self._most_share or self._failures >= MOST_FAILURES:
            return replace(profile, gpu=None)
        most = int(gpu.vram_total_bytes * self._most_share)
        return replace(
            profile,
            gpu=replace(gpu, vram_total_bytes=most, vram_available_bytes=min(gpu.vram_available_bytes, most)),
        )
