"""Notice that a process was stopped (SIGSTOP, a debugger), which it cannot report itself."""

from __future__ import annotations

import asyncio
from typing import Final

import psutil

LOOK_S: Final = 1.0
LOOKS: Final = 3
"""A process found stopped this often in a row is not about to continue."""


async def wait_stopped(pid: int) -> None:
    """Wait until process ``pid`` was stopped for a while. No system reports that, so it is polled."""
    stopped = 0
    while stopped < LOOKS:
        await asyncio.sleep(LOOK_S)
        stopped = stopped + 1 if is_stopped(pid) else 0


def is_stopped(pid: int) -> bool:
    """Whether process ``pid`` was stopped by a signal or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except (psutil.Error, ValueError):
        return False
