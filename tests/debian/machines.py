"""Fresh Debian machines: containers that run systemd, each on a device of a lab and its network.

A machine's disk is an overlay on one root folder made by debootstrap, so it is ready in seconds and leaves nothing
behind.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.homelab.running import Running
from tools.lab import DeviceSpec, Fleet, Homelab
from tools.lab import missing as missing_for_a_lab
from tools.lab.device import Device

PATIENCE_S = 600.0
"""Enough to install a package, measure a device or boot on a busy machine."""
NEEDED = ("adduser", "ca-certificates", "dbus", "libgomp1", "libstdc++6", "python3", "systemd", "systemd-sysv")
"""What the package and a system with systemd depend on; the machines reach no mirror."""
TOOLS = {"debootstrap": "debootstrap", "systemd-nspawn": "systemd-container", "dpkg-deb": "dpkg"}
ENVIRONMENT = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8")
PLAIN = ("DEBIAN_FRONTEND=noninteractive", "COLUMNS=200")


def missing() -> str | None:
    """Why such machines cannot run here, in one line, or None."""
    if (reason := missing_for_a_lab()) is not None:
        return reason
    if not Path("/etc/debian_version").is_file():
        return "requires Debian"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"requires {', '.join(lacking)}; install it (apt install {' '.join(TOOLS[tool] for tool in lacking)})"
    return None


def new_root(folder: Path) -> Path:
    """A Debian 12 root with these packages from debootstrap's mirror, or the folder named by PRIMAD_DEBIAN_ROOT."""
    if given := os.environ.get("PRIMAD_DEBIAN_ROOT"):
        return Path(given)
    root = folder / "root"
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(NEEDED)}", "bookworm", str(root)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    return root


class Machine:
    """A running machine; the test's ``shared`` folder is mounted read-only at ``/shared``."""

    def __init__(self, device: Device, root: Path, folder: Path, shared: Path) -> None:
        self.name = device.name
        self._device = device
        self._running: list[Running] = []
        upper, work, merged = (folder / name for name in ("upper", "work", "merged"))
        for path in (upper, work, merged):
            path.mkdir(parents=True)
        (upper / "etc").mkdir()
        (upper / "etc" / "hostname").write_text(f"{device.name}\n")
        (upper / "etc" / "machine-id").write_text(f"{secrets.token_hex(16)}\n")
        layers = f"lowerdir={root},upperdir={upper},workdir={work}"
        mounted = device.run(["mount", "-t", "overlay", "overlay", "-o", layers, merged])
        assert mounted.returncode == 0, mounted.stderr
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.settimeout(PATIENCE_S)
            notified.bind(str(folder / "notify"))
            init = Running(
                device,
                *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot", "--notify-ready=yes"),
                *(f"--machine={device.name}", f"--directory={merged}"),
                f"--bind-ro={shared}:/shared",
                NOTIFY_SOCKET=str(folder / "notify"),
            )
            self._running.append(init)
            self._leader = self._started(notified)

    def _started(self, notified: socket.socket) -> int:
        """Wait until the machine has booted; returns the process id of its init."""
        leader = 0
        while True:
            for line in notified.recv(4096).decode().splitlines():
                key, _, value = line.partition("=")
                if key == "X_NSPAWN_LEADER_PID":
                    leader = int(value)
                if (key, value) == ("READY", "1") and leader:
                    return leader

    def argv(self, *argv: object) -> list[str]:
        """The command line that runs ``argv`` as root on the machine."""
        inside = ["nsenter", "--target", str(self._leader), "--all", "env", "-i", *ENVIRONMENT, *PLAIN]
        return [*inside, *map(str, argv)]

    def run(self, *argv: object, code: int = 0) -> str:
        """The command's output; it must exit with ``code``."""
        ended = subprocess.run(
            self.argv(*argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert ended.returncode == code, (
            f"{self.name}: {argv}: {ended.returncode}\n{ended.stdout}{ended.stderr}{self.log()}"
        )
        return ended.stdout

    def start(self, *argv: object) -> Running:
        """Start a command that runs in the background until the machine ends."""
        started = Running(self._device, *self.argv(*argv))
        self._running.append(started)
        return started

    def log(self) -> str:
        """The last lines of the journal."""
        argv = self.argv("journalctl", "--no-pager", "--lines", "40")
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout

    def off(self) -> None:
        """Power it off. A shutdown stops all processes for a moment, which would stop ``nsenter`` for good."""
        for each in self._running[1:]:
            each.end()
        subprocess.run(self.argv("systemctl", "poweroff"), capture_output=True, check=False)
        self._running[0].wait_end(PATIENCE_S)

    def end(self) -> None:
        """End the machine and the commands that run on it."""
        for each in self._running:
            each.end()


@contextmanager
def machines(names: tuple[str, ...], root: Path, folder: Path, shared: Path) -> Iterator[dict[str, Machine]]:
    """Machines on one network, by name; they and their processes are gone afterwards."""
    started: dict[str, Machine] = {}
    try:
        with Homelab(Fleet(tuple(DeviceSpec(name=name) for name in names))) as lab:
            for name in names:
                started[name] = Machine(lab.device(name), root, folder / name, shared)
            yield started
            for machine in started.values():
                machine.off()
    finally:
        for machine in started.values():
            machine.end()
