"""Processes that stand back for what else runs on the machine."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)
PROC = Path("/proc")


def apply_nice(pid: int, nice: int) -> None:
    """Let process ``pid`` stand back for others: ``nice`` 0 to 19, on Windows the nearest priority class.

    Priority is only ever given up. On Linux it is each thread's own, so that all there are get it; those they start later
    inherit it, and a session that is the process's own stands back as a whole: among sessions processors are shared alike,
    whatever the priority of their threads (sched(7), autogroup). A process that has ended, or will not let us, costs a log
    line.
    """
    if nice <= 0:
        return
    try:
        process = psutil.Process(pid)
        if sys.platform == "win32":
            process.nice(psutil.IDLE_PRIORITY_CLASS if nice >= 10 else psutil.BELOW_NORMAL_PRIORITY_CLASS)
        elif int(process.nice()) < nice:
            for thread in _threads(process):
                with contextlib.suppress(ProcessLookupError):  # one that ended meanwhile
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
            if sys.platform.startswith("linux") and os.getsid(pid) == pid:
                with contextlib.suppress(FileNotFoundError):  # a kernel without such groups
                    (PROC / str(pid) / "autogroup").write_text(str(nice))
    except (psutil.Error, OSError) as exc:
        logger.warning("process %d does not stand back (nice %d): %s", pid, nice, exc)


def _threads(process: psutil.Process) -> list[int]:
    """What to set the priority of: the threads, where each has its own, else the process. Its own id comes first."""
    if not sys.platform.startswith("linux"):
        return [process.pid]
    return [process.pid, *(thread.id for thread in process.threads() if thread.id != process.pid)]
