"""Lower the priority of processes in favour of the machine's other programs."""

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
    """Lower the priority of process ``pid``: ``nice`` 0 to 19, on Windows the nearest priority class.

    Priority is only ever lowered. On Linux each thread has its own, so all current threads get it, and threads that they
    start later inherit it. If the process leads a session, the whole session gets it: processors are shared equally among
    sessions, whatever the priority of their threads (sched(7), autogroup). If the process has ended or permission is
    denied, log a line.
    """
    if nice <= 0:
        return
    try:
        process = psutil.Process(pid)
        if sys.platform == "win32":
            process.nice(psutil.IDLE_PRIORITY_CLASS if nice >= 10 else psutil.BELOW_NORMAL_PRIORITY_CLASS)
        elif int(process.nice()) < nice:
            for thread in _threads(process):
                with contextlib.suppress(ProcessLookupError):  # the thread ended meanwhile
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
            if sys.platform.startswith("linux") and os.getsid(pid) == pid:
                with contextlib.suppress(FileNotFoundError):  # a kernel without autogroups
                    (PROC / str(pid) / "autogroup").write_text(str(nice))
    except (psutil.Error, OSError) as exc:
        logger.warning("process %d does not stand back (nice %d): %s", pid, nice, exc)


def _threads(process: psutil.Process) -> list[int]:
    """The ids to set the priority of: the threads, if each has its own priority, else the process. Its own id is first."""
    if not sys.platform.startswith("linux"):
        return [process.pid]
    return [process.pid, *(thread.id for thread in process.threads() if thread.id != process.pid)]
