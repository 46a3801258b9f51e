"""One device of a lab that is up: its processes, and faults to inject.

Its processes are isolated from those of other devices: host name, machine id, MAC, network, ``/sys/class/net``, home
and cache folders are its own. Process ids, ``/tmp`` and the rest of the file system are the machine's, so that one
checkout and one model serve all devices. A process id is the same inside and outside.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from tools.lab import disk
from tools.lab.cgroups import Cgroups, end
from tools.lab.names import LabError, root
from tools.lab.network import Cable

INSIDE: Final = Path(__file__).with_name("inside.py")
_PASSED: Final = ("PATH", "LANG", "LC_ALL", "TERM", "TZ", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE")
_PATIENCE_S: Final = 30.0

Which = Literal["all", "ring", "daemon"]


def inside(action: str, settings: Mapping[str, Any], command: Sequence[str] = ()) -> list[str]:
    """Return the command line that runs ``inside.py``."""
    return [sys.executable, "-I", "-S", str(INSIDE), action, json.dumps(settings), *command]


class Device:
    """A device; ``home`` is its home folder as the device sees it, ``outside`` the same folder as this process sees
    it."""

    def __init__(self, lab: str, cable: Cable, cgroups: Cgroups) -> None:
        self.spec = cable.spec
        self.name = cable.spec.name
        self.ip = cable.ip
        self.ip6 = cable.ip6
        self.lab = lab
        self.home = root(lab) / self.name / "home"
        self.outside = Path(f"/proc/{cable.holder}/root{self.home}")
        self._holder = cable.holder
        self._cgroups = cgroups

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of its processes: its own folders, nothing of the user's primad."""
        home = str(self.home)
        kept = {key: os.environ[key] for key in _PASSED if key in os.environ}
        folders = {
            "HOME": home,
            "PRIMAD_HOME": f"{home}/primad",
            "PRIMAD_LOCAL_TRUST": f"{home}/local-trust",
            "XDG_CACHE_HOME": f"{home}/cache",
            "XDG_CONFIG_HOME": f"{home}/config",
            "XDG_DATA_HOME": f"{home}/data",
            "XDG_RUNTIME_DIR": f"{home}/runtime",
            "XDG_STATE_HOME": f"{home}/state",
            "TMPDIR": f"{home}/tmp",
        }
        return kept | folders | {"HOMELAB": self.lab, "HOMELAB_DEVICE": self.name} | dict(more or {})

    def command(self, argv: Sequence[str | Path], folder: Path | None = None) -> list[str]:
        """Return the command line that runs ``argv`` on the device, in ``folder`` or its home; needs
        ``environment``."""
        settings = {
            "groups": [str(path) for path in self._cgroups.procs(self.name)],
            "holder": self._holder,
            "namespaces": ["net", "uts", "mnt"],
            "folder": str(folder or self.home),
        }
        return inside("enter", settings, [str(argument) for argument in argv])

    def popen(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start ``argv`` on the device; ``options`` are those of ``subprocess.Popen``, signals reach ``argv`` itself."""
        return subprocess.Popen(self.command(argv, cwd), env=self.environment(env), **options)

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` on the device to its end, output as text. Raises ``subprocess.TimeoutExpired``."""
        options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL} | options
        command, environment = self.command(argv, cwd), self.environment(env)
        return subprocess.run(command, env=environment, timeout=timeout_s, check=False, **options)

    def pids(self) -> set[int]:
        """Its processes."""
        return self._cgroups.pids(self.name)

    def memory_bytes(self) -> int | None:
        """Return the memory of its processes, page cache included."""
        return self._cgroups.memory_bytes(self.name)

    def oom_kills(self) -> int:
        """Return how many of its processes were killed for lack of memory."""
        return self._cgroups.oom_kills(self.name)

    def kill(self, which: Which = "all", number: int = signal.SIGKILL) -> set[int]:
        """Kill -9 its processes, or its primad ring processes or daemons only. Return the killed ones.

        The kernel stays up, so others see connections end; see ``Homelab.power_off``. Another ``number`` (SIGABRT, say)
        goes to rings and daemons only. Raises ``LabError`` if there is none to kill.
        """
        if which == "all":
            pids = self.pids()
            self._cgroups.kill(self.name)
            return pids
        pids = {pid for pid in self.pids() if role(pid) == which}
        if not pids:
            raise LabError(f"{self.name}: no {which} process runs there; see homelab status")
        end(pids, time.monotonic() + _PATIENCE_S, number)
        return pids

    def freeze(self) -> None:
        """SIGSTOP all its processes; returns when every one has stopped."""
        deadline = time.monotonic() + _PATIENCE_S
        while moving := {pid for pid in self.pids() if state(pid) not in "TtZX"}:
            for pid in moving:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            if time.monotonic() >= deadline:
                raise LabError(f"{self.name}: processes {sorted(moving)} do not stop")
            time.sleep(0.001)

    def thaw(self) -> None:
        """SIGCONT all its processes."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def frozen(self) -> bool:
        """Whether it has processes and all are stopped."""
        pids = self.pids()
        return bool(pids) and all(state(pid) in "TtZX" for pid in pids)

    def slow(self, cpus: float) -> None:
        """Limit it to this much CPU time per second from now on."""
        if not 0.01 <= cpus < 1e6:
            raise LabError(f"{self.name}: {cpus:g} CPUs; give a number from 0.01 on")
        self._cgroups.limit_cpu(self.name, cpus)

    def fill_disk(self) -> int:
        """Fill the disk of its home. Return the bytes used. Raises ``LabError`` if it has no disk of its own."""
        if self.spec.disk_bytes is None:
            raise LabError(f"{self.name}: has no disk of its own to fill; give it disk_bytes in the fleet")
        return disk.fill(self.outside)

    def free_disk(self) -> None:
        """Undo ``fill_disk``."""
        disk.free(self.outside)


def state(pid: int) -> str:
    """Return the kernel's letter for a process's state; ``X`` if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return text.rpartition(")")[2].split()[0]


def role(pid: int) -> str:
    """Return ``ring`` or ``daemon`` for a process of primad, otherwise its command's name."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    if "primad.ring.process" in words:
        return "ring"
    if {"serve", "join"} & set(words) and any(
        Path(word).name == "primad" or word == "primad.cli.main" for word in words[:4]
    ):
        return "daemon"
    return Path(words[0]).name
