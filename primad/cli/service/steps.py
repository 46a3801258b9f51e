"""The steps to install, start, stop and remove the service, for each kind of service manager.

Steps are values: they are shown to the owner first, and ``machine.carry_out`` does them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from primad.cli.service import launchd, systemd, task_scheduler
from primad.cli.service.service import NAME, DaemonService

Manager = Literal["systemd", "launchd", "the Task Scheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFile:
    """Write ``data`` to ``path``, creating its folders; every user may read it."""

    path: Path
    data: bytes

    def __str__(self) -> str:
        return f"write {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveFile:
    """Remove ``path``."""

    path: Path

    def __str__(self) -> str:
        return f"remove {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeFolder:
    """Make the folder ``path`` for this user alone."""

    path: Path

    def __str__(self) -> str:
        return f"make the folder {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """Run ``command``; if it ``may_fail``, its failure is ignored."""

    command: tuple[str, ...]
    may_fail: bool = False

    def __str__(self) -> str:
        return f"run {shlex.join(self.command)}"


ServiceStep = WriteFile | RemoveFile | MakeFolder | RunCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of the service: its manager, for the machine (``system``) or the session of the user ``uid``.

    ``file`` is the manager's configuration file, ``log`` the service's log file if there is no journal.
    """

    manager: Manager
    system: bool
    uid: int
    file: Path
    log: Path

    @property
    def scope(self) -> str:
        """The scope of the service, for people."""
        return "the machine" if self.system else "your session"


def text_of(place: Place, service: DaemonService) -> bytes:
    """The manager's configuration of the service."""
    match place.manager:
        case "systemd":
            return systemd.unit(service).encode()
        case "launchd":
            return launchd.plist(service)
        case "the Task Scheduler":
            return task_scheduler.task(service)


def install(place: Place, service: DaemonService, *, new_user: bool, starts: bool) -> list[ServiceStep]:
    """Install or reinstall the service. ``new_user``: its user has to be created."""
    write = WriteFile(path=place.file, data=text_of(place, service))
    home = Path(service.home)
    match place.manager:
        case "systemd":
            return [
                *([_add_user(str(service.user), str(home))] if new_user else []),
                *_own_folder(service, made_by_itself=str(home) == systemd.SYSTEM_HOME),
                write,
                *([_let_go()] if place.system else []),
                _systemctl(place, "daemon-reload"),
                _systemctl(place, "enable", systemd.unit_name()),
                *([_forgive(place), _systemctl(place, "restart", systemd.unit_name())] if starts else []),
            ]
        case "launchd":
            load = RunCommand(command=("launchctl", "bootstrap", _domain(place), str(place.file)))
            unload = RunCommand(command=("launchctl", "bootout", _target(place)), may_fail=True)
            return [*_own_folder(service, made_by_itself=False), write, unload, *([load] if starts else [])]
        case "the Task Scheduler":
            create = RunCommand(command=("schtasks", "/Create", "/F", "/TN", NAME, "/XML", str(place.file)))
            return [MakeFolder(path=home), write, create, *(start(place) if starts else [])]


def _own_folder(service: DaemonService, *, made_by_itself: bool) -> list[ServiceStep]:
    """The home folder of the service, which belongs to its user."""
    if made_by_itself:
        return []
    if service.user is None:
        return [MakeFolder(path=Path(service.home))]
    return [RunCommand(command=("install", "-d", "-m", "700", "-o", service.user, str(service.home)))]


def _add_user(user: str, home: str) -> ServiceStep:
    return RunCommand(
        command=("useradd", "--system", "--user-group", "--home-dir", home, "--shell", "/usr/sbin/nologin", user)
    )


def remove(place: Place) -> list[ServiceStep]:
    """Stop the service and remove it from the manager. Its home folder is kept."""
    match place.manager:
        case "systemd":
            return [
                _systemctl(place, "disable", "--now", systemd.unit_name(), may_fail=True),
                RemoveFile(path=place.file),
                _systemctl(place, "daemon-reload"),
            ]
        case "launchd":
            return [
                RunCommand(command=("launchctl", "bootout", _target(place)), may_fail=True),
                RemoveFile(path=place.file),
            ]
        case "the Task Scheduler":
            return [
                RunCommand(command=("schtasks", "/End", "/TN", NAME), may_fail=True),
                RunCommand(command=("schtasks", "/Delete", "/F", "/TN", NAME)),
                RemoveFile(path=place.file),
            ]


def start(place: Place) -> list[ServiceStep]:
    """Start the installed service."""
    match place.manager:
        case "systemd":
            return [_forgive(place), _systemctl(place, "start", systemd.unit_name())]
        case "launchd":
            return [
                RunCommand(command=("launchctl", "bootstrap", _domain(place), str(place.file)), may_fail=True),
                RunCommand(command=("launchctl", "kickstart", _target(place))),
            ]
        case "the Task Scheduler":
            return [RunCommand(command=("schtasks", "/Run", "/TN", NAME))]


def stop(place: Place) -> list[ServiceStep]:
    """Stop the service until it, the machine or the session is started again."""
    match place.manager:
        case "systemd":
            return [_systemctl(place, "stop", systemd.unit_name())]
        case "launchd":
            # A service that exits with code 0 is not restarted, but stays loaded in launchd.
            return [RunCommand(command=("launchctl", "kill", "SIGTERM", _target(place)))]
        case "the Task Scheduler":
            return [RunCommand(command=("schtasks", "/End", "/TN", NAME))]


def status(place: Place) -> Sequence[str]:
    """The command that shows the service's state."""
    match place.manager:
        case "systemd":
            return [*_systemctl(place, "status", "--no-pager", "--lines=5", systemd.unit_name()).command]
        case "launchd":
            return ["launchctl", "print", _target(place)]
        case "the Task Scheduler":
            return ["schtasks", "/Query", "/V", "/FO", "LIST", "/TN", NAME]


def logs(place: Place, lines: int, *, follow: bool) -> Sequence[str]:
    """The command that shows the last ``lines`` of the service's log, and with ``follow`` new ones."""
    match place.manager:
        case "systemd":
            of = ["--unit"] if place.system else ["--user", "--user-unit"]
            unit, more = systemd.unit_name(), ["--follow"] if follow else []
            return ["journalctl", "--no-pager", f"--lines={lines}", *more, *of, unit]
        case "launchd":
            return ["tail", "-n", str(lines), *(["-f"] if follow else []), str(place.log)]
        case "the Task Scheduler":
            wait = " -Wait" if follow else ""
            path = str(place.log).replace("'", "''")
            return ["powershell", "-NoProfile", "-Command", f"Get-Content -LiteralPath '{path}' -Tail {lines}{wait}"]


def state(place: Place) -> Sequence[str] | None:
    """The command that says why the service was given up (``systemd.why_it_is_left``); None if only its log says
    that."""
    if place.manager != "systemd":
        return None
    return _systemctl(place, "show", f"--property={systemd.state_properties()}", systemd.unit_name()).command


def hold(max_ram_bytes: int | None) -> ServiceStep:
    """Have systemd limit the starting service of the machine to ``--max-ram``."""
    limit = f"MemoryMax={systemd.memory_max(max_ram_bytes)}"
    return RunCommand(command=("systemctl", "set-property", "--runtime", systemd.unit_name(), limit))


def _let_go() -> ServiceStep:
    """Reset what ``hold`` set for a package's unit: the one in its place has its own limit."""
    return RemoveFile(path=Path(systemd.HELD_FILE.format(unit=systemd.unit_name())))


def _forgive(place: Place) -> RunCommand:
    """Allow a service that failed too often to start again."""
    return _systemctl(place, "reset-failed", systemd.unit_name(), may_fail=True)


def _systemctl(place: Place, *words: str, may_fail: bool = False) -> RunCommand:
    return RunCommand(command=("systemctl", *([] if place.system else ["--user"]), *words), may_fail=may_fail)


def _domain(place: Place) -> str:
    return "system" if place.system else f"gui/{place.uid}"


def _target(place: Place) -> str:
    return f"{_domain(place)}/{launchd.label()}"
