"""Tasks for Windows' Task Scheduler: at the start of the machine, or when the user logs on.

A Windows service has to respond to service control, which a console program does not. A task starts at boot, restarts
on failure and has no time limit. ``cmd`` redirects its output to a file.
"""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

from primad.cli.service.service import DESCRIPTIONS, GIVE_UP_VARIABLE, MAX_STARTS, DaemonService

NAMESPACE: Final = "http://schemas.microsoft.com/windows/2004/02/mit/task"
LOCAL_SERVICE: Final = "S-1-5-19"
"""The account of a task of the machine, with only a user's rights."""


def task(service: DaemonService) -> bytes:
    """The task as XML in UTF-16, as ``schtasks /Create /XML`` takes it."""
    root = ET.Element("Task", version="1.2", xmlns=NAMESPACE)
    _fill(ET.SubElement(root, "RegistrationInfo"), Description=DESCRIPTIONS[service.role])
    trigger = ET.SubElement(ET.SubElement(root, "Triggers"), "LogonTrigger" if service.user is None else "BootTrigger")
    _fill(trigger, Enabled="true")
    principal = ET.SubElement(ET.SubElement(root, "Principals"), "Principal", id="Author")
    if service.user is None:
        _fill(principal, LogonType="InteractiveToken", RunLevel="LeastPrivilege")
    else:
        _fill(principal, UserId=service.user, RunLevel="LeastPrivilege")
    settings = ET.SubElement(root, "Settings")
    _fill(
        settings,
        MultipleInstancesPolicy="IgnoreNew",
        DisallowStartIfOnBatteries="false",
        StopIfGoingOnBatteries="false",
        StartWhenAvailable="true",
    )
    _fill(ET.SubElement(settings, "RestartOnFailure"), Interval="PT1M", Count=str(MAX_STARTS))
    _fill(settings, ExecutionTimeLimit="PT0S", Priority="6")
    execute = ET.SubElement(ET.SubElement(root, "Actions", Context="Author"), "Exec")
    _fill(execute, Command="cmd.exe", Arguments=_arguments(service), WorkingDirectory=str(service.home))
    return bytes(ET.tostring(root, encoding="utf-16", xml_declaration=True))


def home_of(data: bytes) -> Path:
    """The home folder of the service whose task is ``data``. Raises ``ValueError`` or ``KeyError`` for other files."""
    try:
        found = ET.fromstring(data).findtext(f".//{{{NAMESPACE}}}WorkingDirectory")
    except ET.ParseError as exc:
        raise ValueError(str(exc)) from exc
    if found is None:
        raise KeyError("WorkingDirectory")
    return Path(found)


def _arguments(service: DaemonService) -> str:
    """The arguments of ``cmd``, which removes only the outermost quotes."""
    variables_of_task = service.variables | {GIVE_UP_VARIABLE: "0"}
    variables = " & ".join(f'set "{key}={value}"' for key, value in sorted(variables_of_task.items()))
    command = subprocess.list2cmdline(service.command)
    log = "" if service.log is None else f' >> "{service.log}" 2>&1'
    return f'/d /s /c "{variables} & {command}{log}"'


def _fill(parent: ET.Element, **texts: str) -> None:
    for tag, text in texts.items():
        ET.SubElement(parent, tag).text = text
