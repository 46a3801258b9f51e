"""The doctor on this machine: on loopback, with homes of its own, and with checks that fail or hang."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from primad.cli.doctor import doctor
from primad.doctor import gpus, machine, network, storage
from primad.doctor.examine import CHECKS, Subject, examine
from primad.doctor.findings import finding, in_thread, output_of
from primad.doctor.firewall import gather_firewall, judge_firewall, needed
from primad.doctor.peers import KnownTrust
from primad.doctor.reach import gather_reached, targets
from primad.errors import ClusterError
from primad.network.discovery import Discovery
from primad.trust.identity import new_identity
from tests.figures import note

HOST = "127.0.0.1"
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def _own_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMAD_LOCAL_TRUST", str(tmp_path / "local-trust"))


def subject(home: Path, *, cluster: str = "home", trusts=lambda key: False) -> Subject:
    return Subject(
        home=home,
        host=HOST,
        interface=None,
        cluster=cluster,
        control_port=None,
        http_port=8080,
        devices=(),
        threads=None,
        own_key="",
        trust=KnownTrust(trusts=trusts),
    )


def run(*arguments: str):
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, [*arguments, "--host", HOST])


# -- the command


@pytest.mark.slow
def test_this_machine_is_examined(tmp_path):
    started = time.monotonic()
    result = run("--home", str(tmp_path / "home"), "--json")
    note("examined", time.monotonic() - started)
    found = json.loads(result.stdout)
    assert {
        "system",
        "llama.cpp",
        "pictures",
        "memory",
        "disk",
        "identity",
        "clock",
        "ports",
        "firewall",
        "multicast",
        "versions",
    } <= {entry["check"] for entry in found}
    assert all(entry["level"] in ("ok", "note", "warning", "error") for entry in found)
    assert all(entry["next"] for entry in found if entry["level"] in ("warning", "error"))
    assert result.exit_code == any(entry["level"] == "error" for entry in found)
    assert not (tmp_path / "home").exists()  # examining changes nothing


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in set(CHECKS) - set(names):
        monkeypatch.delitem(CHECKS, name)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes")
def test_an_identity_that_others_can_read_is_an_error_with_the_command_that_fixes_it(tmp_path, monkeypatch):
    only(monkeypatch, "identity")
    path = tmp_path / "identity.json"
    path.write_text("{}")
    path.chmod(0o644)
    result = run("--home", str(tmp_path))
    assert result.exit_code == 1
    assert f"next: chmod 600 '{path}'" in result.stdout
    assert "1 error, no warnings" in result.stdout


def test_without_an_error_the_exit_code_is_0(tmp_path, monkeypatch):
    only(monkeypatch, "identity", "memory")
    result = run("--home", str(tmp_path))
    assert result.exit_code == 0
    assert "no errors" in result.stdout


def test_an_interface_that_is_not_there_is_one_clear_error(tmp_path):
    result = run("--home", str(tmp_path), "--interface", "eth-none")
    assert isinstance(result.exception, ClusterError)
    assert str(result.exception).startswith("--interface eth-none: this machine has no such interface")


# -- the checks together


async def test_a_failing_or_hanging_check_stops_no_other(tmp_path):
    hang = threading.Event()

    async def broken(_: Subject):
        raise OSError(5, "Input/output error")

    async def blocked(_: Subject):
        return await in_thread(hang.wait)  # as a dead network file system does

    async def fine(_: Subject):
        return [finding("fine", "ok", "it is")]

    try:
        found = await examine(subject(tmp_path), {"broken": broken, "blocked": blocked, "fine": fine}, limit_s=0.2)
    finally:
        hang.set()
    assert [(it.check, it.level) for it in found] == [("broken", "warning"), ("blocked", "warning"), ("fine", "ok")]
    assert "Input/output error" in found[0].text
    assert "within 0.2 s" in found[1].text


@pytest.mark.slow
async def test_devices_in_sight_are_checked_for_version_and_trust(tmp_path, cluster):
    mine, other = new_identity().public, new_identity().public
    desk, sofa = Discovery(HOST), Discovery(HOST)
    try:
        await desk.announce(f"{cluster}-a", cluster=cluster, role="worker", version="99.1", port=7, key=mine)
        await sofa.announce(f"{cluster}-b", cluster=cluster, role="head", version="99.1", port=8, key=other)
        await sofa.set_pairing(7, 4242)
        checks = {"devices": CHECKS["devices"]}
        examined = subject(tmp_path, cluster=cluster, trusts=lambda key: key == mine)
        judged: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            while not all(any(f"{cluster}-{each} is" in text for text in judged) for each in "ab"):
                found = await examine(examined, checks, PATIENCE_S)  # on a busy machine a reply may be late
                judged = [it.text for it in found if it.check == "trust"]
    finally:
        await desk.close()
        await sofa.close()
    assert [it.text for it in found if it.check == "trust" and it.level == "ok"] == [f"{cluster}-a is trusted here"]
    (stranger,) = [it for it in found if it.check == "trust" and it.level == "warning"]
    assert f"{cluster}-b is not trusted yet" in stranger.text
    assert stranger.next == "primad join --code 7-WORD-WORD"
    assert [it.level for it in found if it.check == "versions"] == ["note", "note"]


# -- facts of this machine


async def test_multicast_on_loopback_comes_back():
    (place,) = await network.gather_places(HOST, None)
    if place.problem:
        pytest.skip(f"this machine has no multicast on loopback: {place.problem}")
    assert (place.interface, place.address, place.virtual) == ("loopback", HOST, False)


def test_a_taken_port_is_seen_and_its_owner_named():
    with socket.create_server((HOST, 0)) as server, socket.create_server((HOST, 0)) as other:
        number = server.getsockname()[1]
        control, http = network.gather_ports(HOST, number, True, other.getsockname()[1])
    assert (control.problem, http.problem) == ("in use", "in use")
    (free, _) = network.gather_ports(HOST, number, True, 1)
    assert free.problem == ""


async def test_a_connection_to_a_named_device_is_tried():
    with socket.create_server((HOST, 0)) as server, socket.socket() as deaf:
        deaf.bind((HOST, 0))
        port, closed = server.getsockname()[1], deaf.getsockname()[1]
        wanted = targets((), "home", (f"{HOST}:{port}", f"{HOST}:{closed}"))
        reached = await gather_reached(wanted, PATIENCE_S)
    assert [problem == "" for problem in reached.values()] == [True, False]


def test_facts_of_this_machine_make_findings(tmp_path):
    """Levels are not asserted: every fact must be available on this system and judged."""
    findings = [
        *machine.judge_memory(machine.gather_memory(), "Linux"),
        *machine.judge_battery(machine.gather_battery()),
        *machine.judge_files(machine.gather_files()),
        *machine.judge_clock(machine.gather_clock(), "Linux"),
        *machine.judge_platform(*machine.gather_platform()),
        *storage.judge_disk(storage.gather_disk(tmp_path / "not" / "yet")),
        *storage.judge_identity(storage.gather_identity(tmp_path)),
        *judge_firewall(gather_firewall(), needed(7770, ())),
    ]
    assert len(findings) >= 7
    assert all(it.text for it in findings)


def test_a_home_that_is_not_there_yet_is_judged_by_the_folder_above(tmp_path):
    facts = storage.gather_disk(tmp_path / "a" / "b")
    assert facts.writable
    assert facts.free_bytes > 0
    assert facts.read_bytes_per_s is None


@pytest.mark.slow
def test_llama_cpp_is_queried_in_a_child(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # importing it in this process fails
    facts = gpus.gather_engine(tmp_path, None, PATIENCE_S)
    assert facts.package
    assert not isinstance(facts.devices, str)


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-ins are shell scripts")
def test_a_crash_or_hang_of_llama_cpp_is_a_result(monkeypatch, tmp_path):
    crash = tmp_path / "crash"
    crash.write_text("#!/bin/sh\necho illegal instruction >&2\nexit 132\n")
    crash.chmod(0o755)
    hang = tmp_path / "hang"
    hang.write_text("#!/bin/sh\nexec sleep 60\n")
    hang.chmod(0o755)
    monkeypatch.setattr(gpus.sys, "executable", str(crash))
    crashed = gpus.gather_engine(tmp_path, None, PATIENCE_S)
    assert (crashed.devices, crashed.runs) == ("a trial ended with code 132: illegal instruction", False)
    monkeypatch.setattr(gpus.sys, "executable", str(hang))
    assert gpus.gather_engine(tmp_path, None, 0.5).devices == "a trial did not end within 0.5 s"


def test_a_card_is_known_by_its_vendor(tmp_path):
    for card, vendor in (("card0", "0x8086"), ("card1", "0x10de"), ("card2", "0x1234"), ("card0-DP-1", "0x8086")):
        folder = tmp_path / card / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
    assert [(it.vendor, it.usable) for it in gpus._cards(tmp_path)] == [("Intel", True), ("NVIDIA", False)]


def test_a_command_that_is_missing_fails_or_hangs_has_no_output():
    assert output_of("primad-no-such-program") is None
    assert output_of(sys.executable, "-c", "raise SystemExit(3)", timeout_s=PATIENCE_S) is None
    assert output_of(sys.executable, "-c", "import time; time.sleep(60)", timeout_s=0.5) is None
    assert (output_of(sys.executable, "-c", "print('hello')", timeout_s=PATIENCE_S) or "").strip() == "hello"


async def test_an_exception_in_a_thread_is_raised_to_the_awaiter():
    def broken() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_thread(broken)
