"""Units for systemd: one for the machine, sandboxed and with its own user, and one for a user's session.

The sandbox of the machine's unit allows what primad does. It needs the network (also multicast, and netlink for the
list of interfaces), the devices of GPUs, all of ``/proc/meminfo`` and of the control groups, and to write into its own
folders. So there is no ``PrivateDevices``, ``ProtectClock`` (which bars every device but one), ``ProcSubset`` or
``MemoryDenyWriteExecute`` (drivers of GPUs compile code). ``KillMode=mixed`` signals only the daemon, which hands over
before its ring process ends. ``OOMPolicy=continue``: a killed ring process is an event in the daemon, not its end; and
if memory runs out primad is killed before the owner's programs. ``HOME`` is the service's own folder, so caches there
are its own.

Options in a variable, ``--max-ram`` among them, are read when the service starts: a command before the service sets
systemd's limit (``HOLDS``). It runs as root, with ``systemctl set-property``, which affects a starting service; a
unit's own figures are read earlier.

A user's manager may not set up most of that; its unit has the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from primad.cli.service.service import (
    DESCRIPTIONS,
    GIVE_UP_VARIABLE,
    MAX_STARTS,
    MEMORY_MARGIN_BYTES,
    NAME,
    RESTART_S,
    STARTS_WITHIN_S,
    STOP_S,
    WATCHDOG_S,
    DaemonService,
)

SYSTEM_USER: Final = "primad"
SYSTEM_HOME: Final = "/var/lib/primad"
ENVIRONMENT_FILE: Final = "/etc/default/primad"
"""Variables for the service of the machine, such as ``PRIMAD_API_KEY``, which the process list would show."""
GIVE_UP_CODE: Final = 78
"""``EX_CONFIG`` of ``sysexits.h``, which systemd calls CONFIG."""
HOLDS: Final = ("service", "hold")
"""The words between the program and the role of the command that sets ``MemoryMax`` from the service's options."""
HELD_FILE: Final = "/run/systemd/system.control/{unit}.d/50-MemoryMax.conf"
"""The drop-in of ``systemctl set-property --runtime``; it overrides every unit."""
GPU_GROUPS: Final = ("render", "video")
"""Groups that may use a GPU on Linux."""

_SHUT_IN: Final = (
    "CapabilityBoundingSet=",
    "LockPersonality=yes",
    "NoNewPrivileges=yes",
    "PrivateTmp=yes",
    "ProtectControlGroups=yes",
    "ProtectHome=read-only",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "ProtectProc=invisible",
    "ProtectSystem=strict",
    "RemoveIPC=yes",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallErrorNumber=EPERM",
    "SystemCallFilter=@system-service",
    "UMask=0077",
)
_SHUT_IN_BY_A_USER: Final = (
    "LockPersonality=yes",
    "NoNewPrivileges=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "UMask=0077",
)


def unit_name(name: str = NAME) -> str:
    """The file name of the unit of the service ``name``."""
    return f"{name}.service"


def unit(service: DaemonService) -> str:
    """The text of the service's unit: for the machine if the service has a user, else for a user's session."""
    return "\n".join(
        [
            "[Unit]",
            f"Description={DESCRIPTIONS[service.role]}",
            "Documentation=man:primad(1)",
            *(["After=network-online.target", "Wants=network-online.target"] if service.user is not None else []),
            f"StartLimitIntervalSec={STARTS_WITHIN_S}",
            f"StartLimitBurst={MAX_STARTS}",
            "",
            "[Service]",
            "Type=notify",
            "NotifyAccess=main",
            *([] if service.options_variable is None else [f"ExecStartPre=-+{_command(service, *HOLDS)}"]),
            f"ExecStart={_command(service)}",
            f"WorkingDirectory=-{_escaped(str(service.home))}",
            *(f"Environment={_quoted(f'{key}={value}')}" for key, value in sorted(_variables(service).items())),
            *(
                []
                if service.environment_file is None
                else [f"EnvironmentFile=-{_escaped(str(service.environment_file))}"]
            ),
            "",
            "Restart=on-failure",
            f"RestartSec={RESTART_S}",
            f"RestartPreventExitStatus={GIVE_UP_CODE}",
            f"WatchdogSec={WATCHDOG_S}",
            # A model by name may have to be downloaded first.
            f"TimeoutStartSec={'infinity' if service.role == 'serve' else 300}",
            f"TimeoutStopSec={STOP_S}",
            "KillMode=mixed",
            "",
            *_resources(service),
            "",
            *(_rights(service) if service.user is not None else _SHUT_IN_BY_A_USER),
            "",
            "[Install]",
            f"WantedBy={'multi-user' if service.user is not None else 'default'}.target",
            "",
        ]
    )


def _variables(service: DaemonService) -> dict[str, str]:
    own = {GIVE_UP_VARIABLE: str(GIVE_UP_CODE)}
    return service.variables | (own if service.user is None else own | {"HOME": str(service.home)})


def state_properties() -> str:
    """The properties of ``systemctl show`` for ``why_it_is_left``."""
    return "ActiveState,Result,ExecMainStatus,StatusText"


def why_it_is_left(shown: str) -> str | None:
    """Why systemd does not restart the service, from ``systemctl show``; None if it runs or will."""
    properties = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if properties.get("ActiveState") != "failed":
        return None
    cure = "; 'primad service start' starts it again"
    if properties.get("Result") == "start-limit-hit":
        tries = f"{MAX_STARTS} times within {STARTS_WITHIN_S // 60} minutes"
        return f"it was started {tries} and failed each time, so it was given up{cure}"
    if properties.get("ExecMainStatus") == str(GIVE_UP_CODE):
        status_text = properties.get("StatusText", "").removeprefix("it failed: ")
        return f"another start would fail in the same way: {status_text or 'its log says why'}{cure}"
    return f"it failed, and its log says why{cure}"


def _command(service: DaemonService, *before: str) -> str:
    """The service's command, with words ``before`` the role."""
    words = [_quoted(word, is_command=True) for word in (*service.program, *before, service.role, *service.arguments)]
    return " ".join([*words, *([] if service.options_variable is None else [f"${service.options_variable}"])])


def _resources(service: DaemonService) -> Iterable[str]:
    yield "OOMPolicy=continue"
    yield "OOMScoreAdjust=500"
    yield "TasksMax=4096"
    if service.max_ram_bytes is not None:
        yield f"MemoryMax={memory_max(service.max_ram_bytes)}"
    if service.user is not None:
        yield "LimitNOFILE=65536"
        yield "LimitMEMLOCK=infinity"


def memory_max(max_ram_bytes: int | None) -> str:
    """``MemoryMax`` of a service with this ``--max-ram``."""
    return "infinity" if max_ram_bytes is None else str(max_ram_bytes + MEMORY_MARGIN_BYTES)


def _rights(service: DaemonService) -> Iterable[str]:
    yield f"User={service.user}"
    if service.groups:
        yield f"SupplementaryGroups={' '.join(service.groups)}"
    if str(service.home) == SYSTEM_HOME:
        yield "StateDirectory=primad"
        yield "StateDirectoryMode=0700"
    writable = [path for path in (service.home, *service.writable) if str(path) != SYSTEM_HOME]
    for path in writable:
        yield f"ReadWritePaths={_quoted(f'-{path}')}"
    yield from _SHUT_IN


def _quoted(word: str, *, is_command: bool = False) -> str:
    """``word`` quoted for systemd as one word, without quotes, specifiers (%) or, in a command, variables ($)."""
    text = _escaped(word).replace("\\", "\\\\").replace('"', '\\"')
    if is_command:
        text = text.replace("$", "$$")
    return f'"{text}"' if not text or any(sign in text for sign in " \t'\"\\;") else text


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
