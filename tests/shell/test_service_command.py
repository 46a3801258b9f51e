"""``primad service`` says what it does, does what was meant, and does not start what cannot work."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from primad.cli.service import command as command_module
from primad.cli.service import machine
from primad.cli.service.machine import Account, Ran
from primad.cli.service.steps import Manager
from tests.core.test_supervisor import judged, words
from tests.fakes.model_stores import toy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the folders are those of POSIX systems")

ALICE = Account(os.getuid(), frozenset({os.getgid()}))
Primad = Callable[..., tuple[int, str, str]]


class FakeRunner:
    """Records the commands; a command that contains a word of ``fails`` fails."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fails: set[str] = set()
        self.code = 0
        self.printed = ""

    def run(self, command: Sequence[str]) -> Ran:
        self.ran.append(shlex.join(command))
        return Ran(1, "Failed to connect\nto bus") if self.fails & set(command) else Ran(0, self.printed)

    def show(self, command: Sequence[str]) -> int:
        self.ran.append(shlex.join(command))
        return self.code


@pytest.fixture(autouse=True)
def runner(monkeypatch, tmp_path) -> FakeRunner:
    """A machine with systemd and an unprivileged user; the real one is not touched."""
    made = FakeRunner()
    monkeypatch.setattr(command_module, "_runner", lambda: made)
    monkeypatch.setattr(machine, "manager", lambda: "systemd")
    monkeypatch.setattr(machine, "is_admin", lambda: False)
    monkeypatch.setattr(machine, "program", lambda: ("/usr/bin/primad",))
    monkeypatch.setattr(machine, "unreadable", lambda *_, **__: None)
    monkeypatch.setattr(machine, "account", {"alice": ALICE}.get)
    monkeypatch.setattr(machine, "gpu_groups", lambda: ("render",))
    monkeypatch.setattr(machine, "PACKAGED", (tmp_path / "usr",))
    monkeypatch.setenv("PRIMAD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    real = machine.place

    def place(kind: Manager, *, system: bool) -> machine.Place:
        found = real(kind, system=system)
        return dataclasses.replace(found, file=tmp_path / "etc" / found.file.name) if system else found

    monkeypatch.setattr(machine, "place", place)
    return made


def as_root(monkeypatch) -> None:
    monkeypatch.setattr(machine, "is_admin", lambda: True)


def values(path: Path, key: str) -> list[str]:
    return [line.partition("=")[2] for line in path.read_text().splitlines() if line.startswith(f"{key}=")]


@pytest.fixture
def unit(tmp_path) -> Path:
    return tmp_path / "config" / "systemd" / "user" / "primad.service"


def test_a_worker_becomes_a_service_of_the_session(command: Primad, runner, unit, tmp_path):
    code, out, err = command("service", "install", "join", "--max-ram", "8GB", "--nice", 5, "--pause-on-battery")
    assert code == 0
    assert out.splitlines()[:6] == [
        f"make the folder {tmp_path / 'home'}",
        f"write {unit}",
        "run systemctl --user daemon-reload",
        "run systemctl --user enable primad.service",
        "run systemctl --user reset-failed primad.service",
        "run systemctl --user restart primad.service",
    ]
    assert "primad pair --code CODE" in out
    assert "loginctl enable-linger" in err
    assert runner.ran == [line.removeprefix("run ") for line in out.splitlines()[2:6]]
    (line,) = values(unit, "ExecStart")
    options = judged(words(line), ("/usr/bin/primad",))
    assert (options["max_ram"], options["nice"], options["pause_on_battery"]) == ("8000000000B", 5, True)
    assert values(unit, "MemoryMax") == [str(8_000_000_000 + (1 << 30))]
    assert values(unit, "Environment") == ["PRIMAD_GIVE_UP_CODE=78", f"PRIMAD_HOME={tmp_path / 'home'}"]


def test_a_head_becomes_a_service_of_the_machine(command: Primad, runner, monkeypatch, tmp_path):
    as_root(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a model.gguf").touch()
    arguments = ("serve", "--model", "a model.gguf", "--kv-cache", "kv", "--device", "a:1", "--device", "b:2")
    code, out, _ = command("service", "install", "--system", *arguments)
    assert code == 0
    assert runner.ran[0].startswith("useradd --system ")
    assert runner.ran[0].endswith(" primad")
    path = tmp_path / "etc" / "primad.service"
    (line,) = values(path, "ExecStart")
    options = judged(words(line), ("/usr/bin/primad",))
    assert options["model"] == tmp_path / "a model.gguf"
    assert options["kv_cache"] == str(tmp_path / "kv")
    assert options["device"] == ["a:1", "b:2"]
    assert (values(path, "User"), values(path, "SupplementaryGroups")) == (["primad"], ["render"])
    assert f"-{tmp_path / 'kv'}" in values(path, "ReadWritePaths")
    assert "sudo primad pair --home" in out


def test_another_user_may_run_it(command: Primad, runner, monkeypatch, tmp_path):
    as_root(monkeypatch)
    assert command("service", "install", "--system", "--as", "alice", "join")[0] == 0
    assert values(tmp_path / "etc" / "primad.service", "User") == ["alice"]
    assert not any(line.startswith("useradd") for line in runner.ran)


def test_a_share_of_memory_is_that_of_the_machine_not_of_the_service(command: Primad, unit, monkeypatch, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text('max_ram = "50%"')
    assert command("service", "install", "join")[0] == 0
    (line,) = values(unit, "ExecStart")
    printed = int(judged(words(line), ("/usr/bin/primad",))["max_ram"].removesuffix("B"))
    assert values(unit, "MemoryMax") == [str(printed + (1 << 30))]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (("--max-ram", "2GB", "--nice", "5"), str(2_000_000_000 + (1 << 30))),
        ((), "infinity"),
        (("--max-ram", "50%"), "infinity"),
    ],
    ids=["bytes", "nothing", "share"],
)
def test_the_service_of_a_package_is_held_to_the_options_of_the_moment(command: Primad, runner, options, limit):
    assert command("service", "hold", "join", *options)[0] == 0
    assert runner.ran == [f"systemctl set-property --runtime primad.service MemoryMax={limit}"]


def test_the_service_of_a_package_is_held_to_its_configuration(command: Primad, runner, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text('max_ram = "1GiB"')
    assert command("service", "hold", "join")[0] == 0
    assert runner.ran == [f"systemctl set-property --runtime primad.service MemoryMax={2 << 30}"]


def test_a_model_by_name_stays_a_name(command: Primad, unit):
    assert command("service", "install", "serve", "--model", "hf:owner/repo:Q4_K_M")[0] == 0
    assert "--model hf:owner/repo:Q4_K_M" in values(unit, "ExecStart")[0]


def test_a_dry_run_shows_the_unit_and_does_nothing(command: Primad, runner, unit):
    code, out, _ = command("service", "install", "--dry-run", "join")
    assert code == 0
    assert "ExecStart=/usr/bin/primad join" in out
    assert f"would write {unit}" in out
    assert runner.ran == []
    assert not unit.exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("plan",), "plan: not a service; install join or serve"),
        (("join", "--code", "7-lamp-river"), "use 'primad pair --code'"),
        (("join", "--no-such"), "; see 'primad join --help'"),
        (("join", "--dry-run"), "--dry-run: belongs before join: 'primad service install --dry-run join'"),
        (("join", "--nice", "20"), "--nice: "),
        (("serve", "--model", "nowhere.gguf"), "--model nowhere.gguf: no such file"),
        (("serve", "--model", "hf:a/b", "--api-key", "0123456789abcdef"), "give --api-key-file"),
        (("--system", "join"), "only root may change services of the machine; run it with sudo"),
        (("--as", "alice", "join"), "add --system"),
    ],
    ids=["role", "code", "option", "place", "value", "file", "key", "root", "as"],
)
def test_an_invalid_service_is_refused_before_any_change(command: Primad, runner, unit, arguments, named):
    code, out, err = command("service", "install", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert named in err
    assert runner.ran == []
    assert not unit.exists()


def test_a_model_by_name_stays_one_in_a_session_and_is_refused_for_the_machine(
    command: Primad, unit, monkeypatch, tmp_path
):
    path = toy(tmp_path / "mine" / "small-Q4_0.gguf")
    monkeypatch.chdir(tmp_path)
    model = ("serve", "--models", "mine", "--model", "small")
    assert command("service", "install", *model)[0] == 0
    (line,) = values(unit, "ExecStart")
    assert f"--models {tmp_path / 'mine'}" in line
    assert "--model small" in line
    as_root(monkeypatch)
    assert f"give the file, {path}" in command("service", "install", "--system", *model)[2]


def test_root_has_no_session(command: Primad, monkeypatch, runner):
    as_root(monkeypatch)
    assert "give --system" in command("service", "install", "join")[2]
    assert "no such user" in command("service", "install", "--system", "--as", "bob", "join")[2]
    assert runner.ran == []


def test_a_user_who_may_not_run_primad_is_named(command: Primad, monkeypatch, runner):
    as_root(monkeypatch)
    monkeypatch.setattr(
        machine, "unreadable", lambda path, user, **_: Path("/home/alice") if user.uid is None else None
    )
    printed = command("service", "install", "--system", "join")[2]
    assert "primad may not run it because of /home/alice" in printed
    assert runner.ran == []
    assert command("service", "install", "--system", "--as", "alice", "join")[0] == 0


def test_a_manager_that_refuses_is_one_clear_error(command: Primad, runner):
    runner.fails = {"daemon-reload"}
    code, _, err = command("service", "install", "join")
    assert code == 2
    assert err == "primad: error: cannot run systemctl --user daemon-reload: Failed to connect to bus\n"


def test_the_service_is_started_stopped_looked_at_and_removed(command: Primad, runner, unit, tmp_path):
    command("service", "install", "--no-start", "join")
    assert not any("restart" in line for line in runner.ran)
    runner.ran.clear()
    assert command("service", "start")[0] == 0
    assert command("service", "stop")[0] == 0
    runner.code, runner.printed = (
        3,
        "ActiveState=failed\nResult=exit-code\nExecMainStatus=78\nStatusText=it failed: --nice: no",
    )
    code, _, err = command("service", "status")
    assert (code, err) == (
        3,
        "another start would fail in the same way: --nice: no; 'primad service start' starts it again\n",
    )
    runner.code = 0
    assert command("service", "logs", "--follow", "-n", 7)[0] == 0
    assert command("service", "remove", "--dry-run")[0] == 0
    assert unit.exists()
    assert command("service", "remove")[0] == 0
    assert not unit.exists()
    assert (tmp_path / "home").is_dir()
    assert runner.ran == [
        "systemctl --user reset-failed primad.service",
        "systemctl --user start primad.service",
        "systemctl --user stop primad.service",
        "systemctl --user status --no-pager --lines=5 primad.service",
        "systemctl --user show --property=ActiveState,Result,ExecMainStatus,StatusText primad.service",
        "journalctl --no-pager --lines=7 --follow --user --user-unit primad.service",
        "systemctl --user disable --now primad.service",
        "systemctl --user daemon-reload",
    ]


def test_the_exit_code_of_a_daemon_shows_whether_a_restart_can_help(command: Primad, monkeypatch, tmp_path):
    def codes() -> list[int]:
        wrong = command("join", "--no-such"), command("join", "--nice", "99")
        return [*(each[0] for each in wrong), command("serve", "--model", tmp_path / "not there yet.gguf")[0]]

    assert codes() == [2, 2, 2]
    monkeypatch.setenv("PRIMAD_GIVE_UP_CODE", "78")
    assert codes() == [78, 78, 2]


def test_without_a_service_the_error_names_the_command_that_installs_one(command: Primad):
    for verb in ("remove", "start", "stop", "status", "logs"):
        code, _, err = command("service", verb)
        assert (code, "'primad service install join' installs one" in err) == (2, True)


def test_the_service_of_a_package_is_found_and_left_to_the_package(command: Primad, runner, monkeypatch, tmp_path):
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr" / "primad.service").touch()
    assert command("service", "status")[0] == 0
    assert runner.ran == ["systemctl status --no-pager --lines=5 primad.service"]
    assert "run it with sudo" in command("service", "stop")[2]
    as_root(monkeypatch)
    assert command("service", "stop")[0] == 0
    assert "belongs to a package" in command("service", "remove")[2]


def test_launchd_gets_a_property_list(command: Primad, runner, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "manager", lambda: "launchd")
    path = tmp_path / "Library" / "LaunchAgents" / "org.primad.primad.plist"
    target = f"gui/{os.getuid()}"
    runner.fails = {"bootout"}  # it was not loaded before
    home = tmp_path / "another home"
    assert command("service", "install", "join", "--home", home)[0] == 0
    assert runner.ran == [
        f"launchctl bootout {target}/org.primad.primad",
        f"launchctl bootstrap {target} {path}",
    ]
    runner.ran.clear()
    runner.code = 113
    assert command("service", "status")[0] == 113  # launchd's exit code for an unknown service
    runner.code = 0
    assert command("service", "stop")[0] == 0
    assert command("service", "remove")[0] == 0
    assert runner.ran == [
        f"launchctl print {target}/org.primad.primad",
        f"tail -n 5 '{home / 'primad.log'}'",
        f"launchctl kill SIGTERM {target}/org.primad.primad",
        f"launchctl bootout {target}/org.primad.primad",
    ]
    assert not path.exists()


def test_the_task_scheduler_gets_a_task(command: Primad, runner, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "manager", lambda: "the Task Scheduler")
    home = tmp_path / "another home"
    assert command("service", "install", "join", "--home", home)[0] == 0
    assert [line.split()[:2] for line in runner.ran] == [["schtasks", "/Create"], ["schtasks", "/Run"]]
    path = Path(shlex.split(runner.ran[0])[-1])
    assert "primad join" in path.read_text(encoding="utf-16")
    task = machine.place("the Task Scheduler", system=False)
    assert machine.installed(task).log == home / "primad.log"
    path.write_text("<Task>")
    assert machine.installed(task) == task


def test_mode_bits_decide_who_can_read_a_file(monkeypatch, tmp_path):
    monkeypatch.undo()
    stranger = Account(os.getuid() + 4711, frozenset())
    passwd = Path("/etc/passwd")  # readable by all, executable by none
    assert machine.unreadable(passwd, stranger) is None
    assert machine.unreadable(passwd, stranger, runs=True) == passwd
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    assert machine.unreadable(closed / "model.gguf", stranger) in (closed, *closed.parents)
    assert machine.unreadable(closed, ALICE) is None
