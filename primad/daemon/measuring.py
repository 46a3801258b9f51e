"""Measures this device while its daemon runs: in a few seconds before anything is computed, and better when it is
idle."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import psutil

from halda import DeviceProfile
from primad.daemon.reporter import Reporter
from primad.errors import NotNowError
from primad.profiler.device import is_disturbed, is_profiled, profile_device, unused_gpus
from primad.profiler.effort import QUICK, Effort
from primad.profiler.process import MeasureRequest, Measuring, Unmeasured
from primad.settings.config import Config
from primad.system.children.child import begin_piped
from primad.system.children.spawn import how_it_ended
from primad.system.children.stop_flag import StopFlag
from primad.system.memory import memory
from primad.system.tasks import to_its_end

LOOK_S: Final = 10.0
QUIET_LOOKS: Final = 6
"""A machine that was idle at this number of consecutive looks is idle."""
QUIET_SHARE: Final = 0.15
"""Maximum share of the processor that its programs may use meanwhile."""
ROOM_BYTES: Final = 1 << 30
"""Memory that must be free: trials take some hundred megabytes for a while."""
WAKE_S: Final = 0.5
_RING: Final = "primad.ring.process"


class OwnProfile:
    """The profile of the device on which a daemon runs. ``describe`` gets what is being measured, the owner sees
    progress."""

    def __init__(self, config: Config, reporter: Reporter, describe: Callable[[str], None] = lambda _: None) -> None:
        self._config, self._reporter, self._describe = config, reporter, describe

    @property
    def is_known(self) -> bool:
        """Whether it was measured before."""
        return is_profiled(self._config.home, self._config.threads, QUICK)

    def now(self, name: str) -> DeviceProfile:
        """Return the current profile, under ``name``; whatever takes time to measure was measured before."""
        config = self._config
        return profile_device(name, config.home, config.threads, lambda _: None, limits=config.limits, effort=QUICK)

    async def measure(self) -> None:
        """Measure this device unless it was before. Raises ``ConfigError`` if it cannot be."""
        if self.is_known:
            return
        self._describe("measuring this device")
        with measuring(self._config, self._reporter, QUICK) as shown:

            def advance(what: str) -> None:
                self._describe(f"measuring this device: {what}")
                shown(what)

            await self._ask(QUICK, advance)

    async def refine(self) -> bool:
        """Measure with all effort once this machine is idle, unless that was done; computing takes precedence.

        Returns whether there are better figures now.
        """
        if is_profiled(self._config.home, self._config.threads, Effort()):
            return False
        while not is_profiled(self._config.home, self._config.threads, Effort()):
            await _idle()
            asking = asyncio.create_task(self._ask(Effort(), lambda _: None))
            computed_s = ring_cpu_s()
            try:
                while not asking.done() and ring_cpu_s() <= computed_s:
                    await asyncio.wait([asking], timeout=WAKE_S)
            finally:
                asking.cancel()
                await asyncio.wait([asking])
            if not asking.cancelled() and asking.exception() is not None:
                return False  # the earlier figures stay in use
        return True

    async def _ask(self, effort: Effort, advance: Callable[[str], None]) -> None:
        """Measure in a child process, which ends with this task."""
        config, loop = self._config, asyncio.get_running_loop()
        request = MeasureRequest(
            name=config.name, home=str(config.home), threads=config.threads, is_quick=effort.is_quick
        )
        stop = StopFlag(subprocess.Popen.terminate)

        def ask() -> None:
            with begin_piped(
                "primad.profiler.process", dict(os.environ)
            ) as child:  # GPUs are hidden from this process only
                assert child.stdin is not None
                assert child.stdout is not None
                stop.watch(child)
                with contextlib.suppress(OSError):  # it has ended already
                    child.stdin.write(msgspec.json.encode(request))
                    child.stdin.close()
                for line in child.stdout:
                    message = msgspec.json.decode(line, type=Measuring | Unmeasured)
                    if isinstance(message, Unmeasured):
                        raise NotNowError(message.reason)
                    loop.call_soon_threadsafe(advance, message.what)
            if child.returncode:
                raise NotNowError(f"measuring this device {how_it_ended(child.returncode)}; run 'primad doctor'")

        await to_its_end(asyncio.to_thread(ask), stop.set)


@contextlib.contextmanager
def measuring(config: Config, reporter: Reporter, effort: Effort) -> Iterator[Callable[[str], None]]:
    """Yield a function to call at each step of measuring, which shows progress; at the end report what disturbed it."""
    steps = itertools.count()

    def advance(_: str) -> None:
        reporter.progress(config.name, "profile", min(next(steps), effort.steps), effort.steps)

    try:
        yield advance
        reporter.progress(config.name, "profile", effort.steps, effort.steps)
    finally:
        reporter.resolve()
    if is_disturbed(config.home, config.threads):
        reporter.report_line(
            f"{config.name}: other programs ran while this device was measured, so its figures may be too low; it is "
            "measured again once it is idle and 'primad join' or 'primad serve' runs, or by 'primad profile --remeasure'"
        )
    for gpu in unused_gpus(config.home, config.threads):
        reporter.report_line(str(gpu))


async def _idle() -> None:
    """Wait until this machine is nearly idle, and the ring process of this daemon idle."""
    quiet, computed_s = 0, ring_cpu_s()
    psutil.cpu_percent()
    while quiet < QUIET_LOOKS:
        await asyncio.sleep(LOOK_S)
        now_s = ring_cpu_s()
        is_quiet = psutil.cpu_percent() <= 100 * QUIET_SHARE and now_s - computed_s <= 0.01 * LOOK_S
        has_room = memory().available_bytes >= ROOM_BYTES
        quiet, computed_s = (quiet + 1 if is_quiet and has_room else 0), now_s


def ring_cpu_s() -> float:
    """CPU seconds that the ring processes of this daemon have used so far."""
    used_s = 0.0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if _RING in child.cmdline():
                times = child.cpu_times()
                used_s += times.user + times.system
    return used_s
