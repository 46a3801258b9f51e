"""Definitions for systemd, launchd and the Task Scheduler: they can be read back and match the owner's settings."""

from __future__ import annotations

import dataclasses
import plistlib
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.cli.main import app
from primad.cli.service import launchd, systemd, task_scheduler
from primad.cli.service.service import GIVE_UP_VARIABLE, MEMORY_MARGIN_BYTES, DaemonService
from primad.settings.quantities import parse_bytes

WORKER = DaemonService(
    role="join",
    program=("/usr/bin/primad",),
    arguments=("--max-ram", "8000000000B", "--nice", "10"),
    home=PurePosixPath("/home/alice/primad home"),
    max_ram_bytes=8_000_000_000,
)
HEAD = dataclasses.replace(
    WORKER,
    role="serve",
    program=("/opt/pri mad/bin/python", "-m", "primad"),
    arguments=("--model", "/srv/models/50% of $HOME; \"it's\\n.gguf", "--alias", "a,b", "--wait", "2"),
    home=PurePosixPath(systemd.SYSTEM_HOME),
    user="primad",
    groups=("render",),
    writable=(PurePosixPath("/srv/kv"),),
    environment={"LANG": "C.UTF-8"},
    environment_file=PurePosixPath(systemd.ENVIRONMENT_FILE),
    max_ram_bytes=None,
)
each_service = pytest.mark.parametrize("service", [WORKER, HEAD], ids=["worker", "head"])
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1)


def unit(service: DaemonService) -> dict[str, list[str]]:
    """The values of each key of the service's unit."""
    found: dict[str, list[str]] = {}
    for line in systemd.unit(service).splitlines():
        if line and not line.startswith("["):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def words(line: str) -> list[str]:
    """How systemd splits a command: quotes as in a shell, without remaining specifiers and variables."""
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]


def judged(command: tuple[str, ...] | list[str], program: tuple[str, ...]) -> dict[str, Any]:
    """The options as primad's own command line parses them."""
    assert tuple(command[: len(program)]) == program
    role, *arguments = command[len(program) :]
    group: Any = app.built
    return dict(group.commands[role].make_context(role, list(arguments)).params)


@each_service
def test_a_unit_starts_the_command_that_was_meant(service: DaemonService) -> None:
    (line,) = unit(service)["ExecStart"]
    assert tuple(words(line)) == service.command
    assert judged(words(line), service.program) == judged(service.command, service.program)


@given(argument=WORDS)
def test_no_argument_means_anything_to_systemd(argument: str) -> None:
    (line,) = unit(dataclasses.replace(WORKER, arguments=(argument,)))["ExecStart"]
    assert words(line)[-1] == argument
    assert "%" not in line.replace("%%", "")
    assert "$" not in line.replace("$$", "")


@pytest.mark.parametrize("ram", ["8GB", "512MiB"])
def test_the_limit_of_memory_leaves_room_for_what_max_ram_does_not_count(ram: str) -> None:
    limited = dataclasses.replace(WORKER, max_ram_bytes=parse_bytes(ram, "--max-ram"))
    assert unit(limited)["MemoryMax"] == [str(parse_bytes(ram, "--max-ram") + MEMORY_MARGIN_BYTES)]
    assert "MemoryMax" not in unit(dataclasses.replace(WORKER, max_ram_bytes=None))


def test_a_unit_whose_options_stand_in_a_variable_is_held_to_them_before_it_starts() -> None:
    reported = unit(dataclasses.replace(HEAD, arguments=(), options_variable="PRIMAD_OPTIONS"))
    (before,), (line,) = reported["ExecStartPre"], reported["ExecStart"]
    assert before.startswith("-+")  # as root, and if it fails the service reports why
    assert before[2:].replace(" service hold", "") == line
    assert line.endswith(" serve $PRIMAD_OPTIONS")
    assert "ExecStartPre" not in unit(HEAD)


def test_a_unit_of_the_machine_is_shut_in_and_may_write_to_its_own_folders_only() -> None:
    reported = unit(HEAD)
    assert reported["User"] == ["primad"]
    assert reported["NoNewPrivileges"] == ["yes"]
    assert reported["ProtectSystem"] == ["strict"]
    assert reported["StateDirectory"] == ["primad"]
    assert reported["Environment"] == [
        "HOME=/var/lib/primad",
        "LANG=C.UTF-8",
        "PRIMAD_GIVE_UP_CODE=78",
        "PRIMAD_HOME=/var/lib/primad",
    ]
    assert reported["ReadWritePaths"] == ["-/srv/kv"]
    assert reported["CapabilityBoundingSet"] == [""]


def test_a_unit_of_a_session_asks_for_nothing_that_only_root_can_give() -> None:
    reported = unit(WORKER)
    assert not {"User", "ProtectSystem", "CapabilityBoundingSet", "LimitMEMLOCK"} & set(reported)
    assert reported["NoNewPrivileges"] == ["yes"]
    assert reported["WantedBy"] == ["default.target"]


@each_service
def test_a_daemon_that_fails_or_hangs_is_started_again(service: DaemonService) -> None:
    reported = unit(service)
    assert (reported["Type"], reported["Restart"], reported["KillMode"]) == (["notify"], ["on-failure"], ["mixed"])
    assert int(reported["WatchdogSec"][0]) > 0
    assert int(reported["TimeoutStopSec"][0]) > 60  # the time of a worker's handover


@each_service
def test_a_daemon_that_fails_for_good_is_left(service: DaemonService) -> None:
    reported = unit(service)
    assert reported["RestartPreventExitStatus"] == [str(systemd.GIVE_UP_CODE)]
    assert f"{GIVE_UP_VARIABLE}={systemd.GIVE_UP_CODE}" in reported["Environment"]
    assert int(reported["StartLimitBurst"][0]) * int(reported["RestartSec"][0]) < int(
        reported["StartLimitIntervalSec"][0]
    )
    assert plistlib.loads(launchd.plist(service))["EnvironmentVariables"][GIVE_UP_VARIABLE] == "0"
    assert f'set "{GIVE_UP_VARIABLE}=0"'.encode("utf-16-le") in task_scheduler.task(service)


@pytest.mark.parametrize(
    ("state", "printed"),
    [
        ("ActiveState=active\nResult=success\nExecMainStatus=0\nStatusText=serves", None),
        ("ActiveState=activating\nResult=exit-code\nExecMainStatus=2\nStatusText=", None),
        (
            "ActiveState=failed\nResult=exit-code\nExecMainStatus=78\nStatusText=it failed: a=b",
            ": a=b; 'primad service start'",
        ),
        ("ActiveState=failed\nResult=exit-code\nExecMainStatus=78\nStatusText=", "its log says why"),
        (
            "ActiveState=failed\nResult=start-limit-hit\nExecMainStatus=2\nStatusText=",
            "started 30 times within 60 minutes",
        ),
        ("ActiveState=failed\nResult=oom-kill\nExecMainStatus=9\nStatusText=", "its log says why"),
        ("", None),
    ],
    ids=["runs", "starts-again", "for-good", "no-text", "too-often", "killed", "nothing"],
)
def test_the_reason_why_a_service_is_left_stopped_is_shown(state: str, printed: str | None) -> None:
    why = systemd.why_it_is_left(state)
    assert why is None if printed is None else printed in str(why)


@each_service
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_finds_nothing_wrong(service: DaemonService, tmp_path: Path) -> None:
    path = tmp_path / systemd.unit_name()
    here = dataclasses.replace(service, program=(sys.executable, "-m", "primad"))
    path.write_text(systemd.unit(here), encoding="utf-8")
    scope = "--system" if service.user is not None else "--user"
    printed = subprocess.run(
        ["systemd-analyze", "verify", scope, "--man=no", "--recursive-errors=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert (printed.returncode, printed.stderr) == (0, "")


@each_service
def test_a_property_list_starts_the_command_that_was_meant(service: DaemonService) -> None:
    reported = plistlib.loads(launchd.plist(dataclasses.replace(service, log=PurePosixPath("/tmp/primad.log"))))
    assert tuple(reported["ProgramArguments"]) == service.command
    assert reported["Label"] == "org.primad.primad"
    assert reported["EnvironmentVariables"]["PRIMAD_HOME"] == str(service.home)
    assert reported["KeepAlive"] == {"SuccessfulExit": False}  # a service that its owner stopped stays stopped
    assert reported.get("UserName") == service.user
    assert reported["StandardErrorPath"] == "/tmp/primad.log"


@pytest.mark.parametrize(
    ("user", "trigger"),
    [(None, "LogonTrigger"), (task_scheduler.LOCAL_SERVICE, "BootTrigger")],
    ids=["user", "machine"],
)
def test_a_task_starts_the_command_that_was_meant(user: str | None, trigger: str) -> None:
    service = DaemonService(
        role="join",
        program=(r"C:\Users\Al & Bo\primad.exe",),
        arguments=("--name", "desk"),
        home=PureWindowsPath(r"C:\Users\Al & Bo\primad"),
        log=PureWindowsPath(r"C:\Users\Al & Bo\primad\primad.log"),
        user=user,
    )
    data = task_scheduler.task(service)
    assert data[:2] in (b"\xff\xfe", b"\xfe\xff")  # schtasks wants UTF-16
    root = ET.fromstring(data)
    name = "{" + task_scheduler.NAMESPACE + "}"
    assert root.find(f"{name}Triggers/{name}{trigger}") is not None
    assert root.findtext(f"{name}Principals/{name}Principal/{name}UserId") == user
    assert root.findtext(f"{name}Settings/{name}ExecutionTimeLimit") == "PT0S"
    assert root.findtext(f"{name}Actions/{name}Exec/{name}Command") == "cmd.exe"
    arguments = root.findtext(f"{name}Actions/{name}Exec/{name}Arguments")
    assert arguments == (
        r'/d /s /c "set "PRIMAD_GIVE_UP_CODE=0" & set "PRIMAD_HOME=C:\Users\Al & Bo\primad" & '
        r'"C:\Users\Al & Bo\primad.exe" join --name desk'
        r' >> "C:\Users\Al & Bo\primad\primad.log" 2>&1"'
    )
