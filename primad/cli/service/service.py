"""A daemon as a service: its command, user and limits. Every kind of service is made from this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final, Literal

DaemonRole = Literal["join", "serve"]

NAME: Final = "primad"
"""A machine has one role, so one service; a second one needs another name."""
DESCRIPTIONS: Final[Mapping[DaemonRole, str]] = {
    "join": "primad: computes on this device for a head",
    "serve": "primad: serves a language model on paired devices",
}
MEMORY_MARGIN_BYTES: Final = 1 << 30
"""Memory of a service beyond ``--max-ram``, which only limits plans: programs, measurements and transfers come on top.
A tighter limit would shrink the plan's memory below the owner's value, since a plan sees the service's limit as the
machine's memory."""
STOP_S: Final = 90
"""Time for a service to end: a worker hands over to others for up to 60 seconds."""
RESTART_S: Final = 10
MAX_STARTS: Final = 30
STARTS_WITHIN_S: Final = 3600
"""A service that was started this often within this many seconds is given up."""
GIVE_UP_VARIABLE: Final = "PRIMAD_GIVE_UP_CODE"
"""The daemon's exit code if another start would fail in the same way, because of a wrong option or line of its
configuration. Each manager has its own code for "do not restart"."""
WATCHDOG_S: Final = 90
"""A daemon whose loop does not run for this long hangs, and is restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonService:
    """The service to run.

    ``program`` are the words before the role, ``arguments`` those after it; ``options_variable`` names a variable of
    ``environment_file`` with more arguments (systemd only). ``max_ram_bytes`` is ``--max-ram`` of ``arguments``, None
    for no limit. ``user`` and ``groups`` are for a service of the machine, None and empty for one of a session.
    ``home`` and ``writable`` are the folders it may write to; ``log`` is its log file if there is no journal.
    """

    role: DaemonRole
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    home: PurePath
    name: str = NAME
    user: str | None = None
    groups: tuple[str, ...] = ()
    max_ram_bytes: int | None = None
    writable: tuple[PurePath, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_file: PurePath | None = None
    options_variable: str | None = None
    log: PurePath | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command."""
        return (*self.program, self.role, *self.arguments)

    @property
    def variables(self) -> dict[str, str]:
        """The service's environment, including its home folder."""
        return {"PRIMAD_HOME": str(self.home)} | dict(self.environment)
