"""A daemon as a service: what it runs, as whom, and what it may use. Every kind of service is made from this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final, Literal

DaemonRole = Literal["join", "serve"]

NAME: Final = "primad"
"""A machine has one role, and so one service; a second one is given another name."""
DESCRIPTIONS: Final[Mapping[DaemonRole, str]] = {
    "join": "primad: lends this device to a head",
    "serve": "primad: serves a language model with the devices in sight",
}
MEMORY_MARGIN_BYTES: Final = 1 << 30
"""What a service may take beyond ``--max-ram``: that bounds what a plan uses, and the programs themselves, what is being
measured and files on their way come on top. A limit that left no room would make the plan's memory smaller than the owner
said, since a plan sees the limit of the service as this machine's memory."""
STOP_S: Final = 90
"""How long a service has to end: a worker hands over to others for up to 60 seconds."""
RESTART_S: Final = 10
MAX_STARTS: Final = 30
STARTS_WITHIN_S: Final = 3600
"""A service that was started so often within so many seconds fails for good: it is left, and its owner looks why."""
GIVE_UP_VARIABLE: Final = "PRIMAD_GIVE_UP_CODE"
"""The exit code that a daemon is to end with where another start would fail in the same way: a wrong option or a wrong line
of its configuration. Each manager has its own that it does not start a service again for."""
WATCHDOG_S: Final = 90
"""A daemon whose loop has not come round for so long hangs, and is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonService:
    """What is to run.

    ``program`` are the words before the role, ``arguments`` those behind it, ``options_variable`` names a variable of
    ``environment_file`` with more of them (systemd only). ``max_ram_bytes`` is what ``--max-ram`` says in ``arguments``,
    None for no limit. ``user`` and ``groups`` are for a service of the machine, None and nothing for one of a session.
    ``home`` and ``writable`` are what it may write to; ``log`` is the file for what it says, where no journal takes it.
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
        """The environment: that of the service, and where its home folder is."""
        return {"PRIMAD_HOME": str(self.home)} | dict(self.environment)
