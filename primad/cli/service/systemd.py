"""Units for systemd: one for the machine, with its own user and shut in, and one for a user's session.

What a unit of the machine may not do follows from what primad does. It needs the network (also multicast, and netlink for
the list of interfaces), the devices of GPUs, all of ``/proc/meminfo`` and of the control groups, and to write into its own
folders. So there is no ``PrivateDevices``, ``ProtectClock`` (which bars every device but one), ``ProcSubset`` or
``MemoryDenyWriteExecute`` (drivers of GPUs compile code). ``KillMode=mixed`` has the daemon alone hear that it should end:
it hands over what its ring process computes. ``OOMPolicy=continue``: a ring process that was killed is an event in the
daemon, not its end; and where memory runs out primad goes before what its owner does. ``HOME`` is the service's own folder:
the caches that lie there are its own, whoever it runs as.

Options that stand in a variable are read when the service starts, and so is the ``--max-ram`` among them: a command before
the service has systemd hold it to that (``HOLDS``). It does so as root, with ``systemctl set-property``, which acts on a
service that is being started; a unit's own figures are read before.

A user's manager has no rights to set up most of that; its unit says what it can.
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
"""Variables for the service of the machine, such as ``PRIMAD_API_KEY``, which the list of processes would show."""
GIVE_UP_CODE: Final = 78
"""``EX_CONFIG`` of ``sysexits.h``, which systemd calls CONFIG."""
HOLDS: Final = ("service", "hold")
"""The words between the program and the role of the command that sets ``MemoryMax`` from the service's options."""
HELD_FILE: Final = "/run/systemd/system.control/{unit}.d/50-MemoryMax.conf"
"""Where ``systemctl set-property --runtime`` keeps it; it counts more than what stands in any unit."""
GPU_GROUPS: Final = ("render", "video")
"""Who may use a GPU on Linux."""

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
    """The text of its unit: one for the machine where the service has a user, else one for a user's session."""
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
            # A model by name may have to be fetched first.
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
    """What ``why_it_is_left`` wants ``systemctl show`` to say."""
    return "ActiveState,Result,ExecMainStatus,StatusText"


def why_it_is_left(shown: str) -> str | None:
    """Why systemd does not start the service again by itself, from ``systemctl show``; None where it runs or will be."""
    told = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if told.get("ActiveState") != "failed":
        return None
    cure = "; 'primad service start' starts it again"
    if told.get("Result") == "start-limit-hit":
        tries = f"{MAX_STARTS} times within {STARTS_WITHIN_S // 60} minutes"
        return f"it was started {tries} and failed each time, so it is left{cure}"
    if told.get("ExecMainStatus") == str(GIVE_UP_CODE):
        said = told.get("StatusText", "").removeprefix("it failed: ")
        return f"another start would fail in the same way: {said or 'its log says why'}{cure}"
    return f"it failed, and its log says why{cure}"


def _command(service: DaemonService, *before: str) -> str:
    """Its command, with words ``before`` the role."""
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
    """``MemoryMax`` of a service that ``--max-ram`` gives so much."""
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
    """``word`` as systemd reads one word: nothing in it is a quote, a specifier (%) or, in a command, a variable ($)."""
    text = _escaped(word).replace("\\", "\\\\").replace('"', '\\"')
    if is_command:
        text = text.replace("$", "$$")
    return f'"{text}"' if not text or any(sign in text for sign in " \t'\"\\;") else text


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
