"""Property lists for macOS' launchd: an agent of a user's session, or a daemon of the machine.

launchd has no watchdog and no memory limit; only ``--max-ram`` limits memory. It restarts a failed service without end,
``_THROTTLE_S`` after the last start, unless it exited with success: so a service that would fail again in the same way
exits with success. It throttles services of type ``Standard``, while a user waits for a response.
"""

from __future__ import annotations

import plistlib
from pathlib import Path, PurePosixPath
from typing import Any, Final
from xml.parsers.expat import ExpatError

from primad.cli.service.service import GIVE_UP_VARIABLE, NAME, STOP_S, DaemonService

SYSTEM_FOLDER: Final = PurePosixPath("/Library/LaunchDaemons")
USER_FOLDER: Final = PurePosixPath("Library/LaunchAgents")
"""In the user's home."""
_THROTTLE_S: Final = 60


def label(name: str = NAME) -> str:
    """launchd's label of the service ``name``."""
    return f"org.primad.{name}"


def plist(service: DaemonService) -> bytes:
    """The service's property list as XML."""
    content: dict[str, Any] = {
        "Label": label(service.name),
        "ProgramArguments": list(service.command),
        "EnvironmentVariables": service.variables | {GIVE_UP_VARIABLE: "0"},
        "WorkingDirectory": str(service.home),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _THROTTLE_S,
        "ExitTimeOut": STOP_S,
        "ProcessType": "Interactive",
        "Umask": 0o077,
        "SoftResourceLimits": {"NumberOfFiles": 8192},
    }
    if service.log is not None:
        content |= {"StandardOutPath": str(service.log), "StandardErrorPath": str(service.log)}
    if service.user is not None:
        content["UserName"] = service.user
    return plistlib.dumps(content, sort_keys=True)


def home_of(data: bytes) -> Path:
    """The home folder of the service whose property list is ``data``. Raises ``ValueError`` or ``KeyError`` for other
    files."""
    try:
        return Path(plistlib.loads(data)["WorkingDirectory"])
    except ExpatError as exc:
        raise ValueError(str(exc)) from exc
