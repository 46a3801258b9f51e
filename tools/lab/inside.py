"""The two steps of a lab that need their own process: making namespaces, and entering them.

    inside.py hold SETTINGS              make namespaces and stay until killed; print 'ready' or a one-line error
    inside.py enter SETTINGS COMMAND...  enter those of a holder and exec COMMAND: same process id, so signals reach it

Both first join the lab's cgroups, so that nothing outlives the lab unseen. Run with ``python -I -S``, therefore
standard library only; ``SETTINGS`` is JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_FLAGS = {"mnt": 0x00020000, "uts": 0x04000000, "net": 0x40000000}
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _join(groups: list[str]) -> None:
    for procs in groups:
        Path(procs).write_text(str(os.getpid()), encoding="ascii")


def hold(settings: dict[str, Any]) -> None:
    """Make the namespaces, prepare them, report that and stay."""
    _join(settings["groups"])
    _check(_libc.unshare(sum(_FLAGS[kind] for kind in settings["namespaces"])), "unshare")
    if "uts" in settings["namespaces"]:
        socket.sethostname(settings["hostname"])
    for key, value in settings["sysctls"].items():
        path = Path("/proc/sys", key)
        if path.exists():
            path.write_text(value, encoding="ascii")
    for command in settings["commands"]:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode != 0:
            raise OSError(0, f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    for folder in settings["folders"]:
        Path(folder).mkdir(parents=True, exist_ok=True)


def enter(settings: dict[str, Any]) -> None:
    """Enter the namespaces of process ``settings["holder"]``."""
    _join(settings["groups"])
    handles = [(os.open(f"/proc/{settings['holder']}/ns/{kind}", os.O_RDONLY), kind) for kind in settings["namespaces"]]
    for handle, kind in handles:
        _check(_libc.setns(handle, _FLAGS[kind]), f"setns {kind}")
        os.close(handle)
    if settings["folder"] is not None:
        os.chdir(settings["folder"])


def main() -> None:
    action, settings = sys.argv[1], json.loads(sys.argv[2])
    try:
        if action == "enter":
            enter(settings)
            os.execvp(sys.argv[3], sys.argv[3:])
        hold(settings)
    except (OSError, subprocess.TimeoutExpired) as exc:
        text = str(exc)
        if isinstance(exc, OSError) and exc.strerror:
            text = exc.strerror + (f": {exc.filename}" if exc.filename else "")
        if action == "enter":
            print(f"homelab: error: {sys.argv[3]}: {text}", file=sys.stderr)
            sys.exit(127)
        print(text, flush=True)
        sys.exit(1)
    print("ready", flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
