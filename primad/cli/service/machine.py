"""The service on this machine: its manager, permissions, and execution of steps."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from primad.cli.service import launchd, systemd, task_scheduler
from primad.cli.service.steps import MakeFolder, Manager, Place, RemoveFile, RunCommand, ServiceStep, WriteFile
from primad.errors import ConfigError, PrimadError, printable
from primad.settings.config import default_home

PACKAGED: Final = (Path("/usr/lib/systemd/system"), Path("/lib/systemd/system"))
"""Where packages of the system put units."""
_PROGRAMS: Final[dict[Manager, str]] = {
    "systemd": "systemctl",
    "launchd": "launchctl",
    "the Task Scheduler": "schtasks",
}


class ServiceError(PrimadError):
    """The service manager refused or failed."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A command's exit code and output."""

    code: int
    output: str


class Runner(Protocol):
    """Runs commands of the service manager."""

    def run(self, command: Sequence[str]) -> Ran:
        """Run it to its end. Raises ``OSError`` when it cannot be run."""

    def show(self, command: Sequence[str]) -> int:
        """Run it on this terminal and return its exit code. Raises ``OSError`` when it cannot be run."""


class Commands:
    """Runs real commands."""

    def run(self, command: Sequence[str]) -> Ran:
        """Run it to its end, with a timeout."""
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        output = (done.stderr or done.stdout).decode(errors="replace").strip()
        return Ran(done.returncode, output)

    def show(self, command: Sequence[str]) -> int:
        """Run it on this terminal."""
        return subprocess.run(command, check=False).returncode


def manager() -> Manager:
    """The service manager of this machine. Raises ``ConfigError`` if there is no known one."""
    found: Manager = "the Task Scheduler" if sys.platform == "win32" else "systemd"
    if sys.platform == "darwin":
        found = "launchd"
    if sys.platform == "linux" and not Path("/run/systemd/system").is_dir():
        raise ConfigError(
            "systemd does not run here; 'primad service install --dry-run' shows the command for the program that "
            "starts services here"
        )
    if shutil.which(_PROGRAMS[found]) is None:
        raise ConfigError(f"{_PROGRAMS[found]}: is missing, which controls {found}; install it")
    return found


def is_admin() -> bool:
    """Whether this process may install services of the machine."""
    if sys.platform == "win32":
        import ctypes

        return bool(ctypes.windll.shell32.IsUserAnAdmin())
    return os.geteuid() == 0


def _uid() -> int:
    if sys.platform == "win32":
        return 0
    return os.getuid()


def place(kind: Manager, *, system: bool) -> Place:
    """The place of the service of the machine, or of this user's session, for the manager ``kind``."""
    home = default_home()
    uid = _uid()
    match kind:
        case "systemd":
            config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
            folder = Path("/etc/systemd/system") if system else config / "systemd" / "user"
            file, log = folder / systemd.unit_name(), home / "primad.log"
        case "launchd":
            folder = Path(launchd.SYSTEM_FOLDER) if system else Path.home() / launchd.USER_FOLDER
            file, log = folder / f"{launchd.label()}.plist", system_home(kind) if system else home
            log = log / "primad.log"
        case "the Task Scheduler":
            folder = system_home(kind) if system else home
            file, log = folder / "service.xml", folder / "primad.log"
    return Place(manager=kind, system=system, uid=uid, file=file, log=log)


def installed(where: Place) -> Place:
    """``where`` with the log of the installed service, whose home folder may not be the default one."""
    if where.manager == "systemd":
        return where
    read = launchd.home_of if where.manager == "launchd" else task_scheduler.home_of
    try:
        return replace(where, log=read(where.file.read_bytes()) / where.log.name)
    except (OSError, ValueError, KeyError):  # not a file of ours
        return where


def system_home(kind: Manager) -> Path:
    """The home folder of a service of the machine."""
    match kind:
        case "systemd":
            return Path(systemd.SYSTEM_HOME)
        case "launchd":
            return Path("/usr/local/var/primad")
        case "the Task Scheduler":
            return Path(os.environ.get("PROGRAMDATA") or "C:/ProgramData") / "primad"


def default_user(kind: Manager) -> str:
    """The default user of a service of the machine. Raises ``ConfigError`` if there is none."""
    match kind:
        case "systemd":
            return systemd.SYSTEM_USER
        case "launchd":
            user = os.environ.get("SUDO_USER", "")
            if user in ("", "root"):
                raise ConfigError("--system: needs a user; give one with --as")
            return user
        case "the Task Scheduler":
            return task_scheduler.LOCAL_SERVICE


@dataclass(frozen=True, slots=True)
class Account:
    """A user's id and group ids; None for a user that does not exist yet, with the rights of others."""

    uid: int | None
    gids: frozenset[int]


def account(user: str) -> Account | None:
    """The user; None when there is none of that name."""
    if sys.platform == "win32":
        return None
    import pwd

    try:
        found = pwd.getpwnam(user)
    except KeyError:
        return None
    return Account(found.pw_uid, frozenset(os.getgrouplist(user, found.pw_gid)))


def gpu_groups() -> tuple[str, ...]:
    """The groups of this machine whose members may use a GPU."""
    if sys.platform != "linux":
        return ()
    import grp

    return tuple(group for group in systemd.GPU_GROUPS if any(each.gr_name == group for each in grp.getgrall()))


def unreadable(path: Path, who: Account, *, runs: bool = False) -> Path | None:
    """The file or folder on the way to ``path`` that keeps ``who`` from reading (``runs``: running) it, or None.

    Only mode bits are checked; an access control list may allow more.
    """
    if sys.platform == "win32" or who.uid == 0:
        return None
    wanted = path.absolute()
    for each in (*reversed(wanted.parents), wanted):
        need = 0o1 if each != wanted or runs else 0o4
        try:
            found = each.stat()
        except OSError:
            return each
        shift = 6 if found.st_uid == who.uid else 3 if found.st_gid in who.gids else 0
        if not stat.S_IMODE(found.st_mode) >> shift & need:
            return each
    return None


def program() -> tuple[str, ...]:
    """The command that starts this primad from anywhere."""
    called = Path(sys.argv[0])
    if called.stem == "primad":
        found = called if called.parent != Path() else Path(shutil.which(called.name) or called)
        if found.is_file():
            return (str(found.absolute()),)
    return (sys.executable, "-m", "primad")


def carry_out(steps: Sequence[ServiceStep], runner: Runner) -> None:
    """Do the steps in turn. Raises ``ServiceError`` at the first that fails."""
    for step in steps:
        try:
            _do(step, runner)
        except OSError as exc:
            raise ServiceError(f"cannot {step}: {exc.strerror or exc}") from exc


def _do(step: ServiceStep, runner: Runner) -> None:
    match step:
        case WriteFile(path=path, data=data):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            if sys.platform != "win32":
                path.chmod(0o644)
        case RemoveFile(path=path):
            path.unlink(missing_ok=True)
        case MakeFolder(path=path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        case RunCommand(command=command, may_fail=may_fail):
            ran = runner.run(command)
            if ran.code != 0 and not may_fail:
                output = printable(" ".join(ran.output.split()), 400)
                raise ServiceError(f"cannot {step}: {output or f'it ended with code {ran.code}'}")
