"""What it takes to install, start, stop and remove the service, step by step, for each kind of service manager.

Steps are values: they are shown to the owner before anything happens, and ``machine.carry_out`` does them.
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
    """Write ``data`` to ``path``, whose folders are made; every user may read it."""

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
    """Run ``command``; where it ``may_fail`` it does not matter whether it did anything."""

    command: tuple[str, ...]
    may_fail: bool = False

    def __str__(self) -> str:
        return f"run {shlex.join(self.command)}"


ServiceStep = WriteFile | RemoveFile | MakeFolder | RunCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the service is: with which manager, of the machine (``system``) or of the session of the user ``uid``.

    ``file`` is what the manager reads about it, ``log`` what the service says where no journal takes it.
    """

    manager: Manager
    system: bool
    uid: int
    file: Path
    log: Path

    @property
    def scope(self) -> str:
        """What it is a service of, for people."""
        return "the machine" if self.system else "your session"


def text_of(place: Place, service: DaemonService) -> bytes:
    """What the manager reads about the service."""
    match place.manager:
        case "systemd":
            return systemd.unit(service).encode()
        case "launchd":
            return launchd.plist(service)
        case "the Task Scheduler":
            return task_scheduler.task(service)


def install(place: Place, service: DaemonService, *, new_user: bool, starts: bool) -> list[ServiceStep]:
    """Install the service, or install it anew. ``new_user``: its user is not there yet."""
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
    """Stop the service and let the manager forget it. Its home folder stays."""
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
    """Start the service that is installed."""
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
    """Stop the service until it is started again, or the machine or session is."""
    match place.manager:
        case "systemd":
            return [_systemctl(place, "stop", systemd.unit_name())]
        case "launchd":
            # One that ends by itself with code 0 stays ended, and launchd still knows it.
            return [RunCommand(command=("launchctl", "kill", "SIGTERM", _target(place)))]
        case "the Task Scheduler":
            return [RunCommand(command=("schtasks", "/End", "/TN", NAME))]


def status(place: Place) -> Sequence[str]:
    """The command that shows how the service stands."""
    match place.manager:
        case "systemd":
            return [*_systemctl(place, "status", "--no-pager", "--lines=5", systemd.unit_name()).command]
        case "launchd":
            return ["launchctl", "print", _target(place)]
        case "the Task Scheduler":
            return ["schtasks", "/Query", "/V", "/FO", "LIST", "/TN", NAME]


def logs(place: Place, lines: int, *, follow: bool) -> Sequence[str]:
    """The command that shows the last ``lines`` that the service said, and with ``follow`` those that are still to come."""
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
    """The command that says why the service is left (``systemd.why_it_is_left``); None where its log alone says that."""
    if place.manager != "systemd":
        return None
    return _systemctl(place, "show", f"--property={systemd.state_properties()}", systemd.unit_name()).command


def hold(max_ram_bytes: int | None) -> ServiceStep:
    """Have systemd hold the service of the machine, which is being started, to ``--max-ram``."""
    limit = f"MemoryMax={systemd.memory_max(max_ram_bytes)}"
    return RunCommand(command=("systemctl", "set-property", "--runtime", systemd.unit_name(), limit))


def _let_go() -> ServiceStep:
    """Forget what ``hold`` set for the unit of a package: the one in its place has its own limit."""
    return RemoveFile(path=Path(systemd.HELD_FILE.format(unit=systemd.unit_name())))


def _forgive(place: Place) -> RunCommand:
    """Let a service that failed too often be started again."""
    return _systemctl(place, "reset-failed", systemd.unit_name(), may_fail=True)


def _systemctl(place: Place, *words: str, may_fail: bool = False) -> RunCommand:
    return RunCommand(command=("systemctl", *([] if place.system else ["--user"]), *words), may_fail=may_fail)


def _domain(place: Place) -> str:
    return "system" if place.system else f"gui/{place.uid}"


def _target(place: Place) -> str:
    return f"{_domain(place)}/{launchd.label()}"
