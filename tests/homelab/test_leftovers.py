"""Nothing of a lab stays on the machine, whatever happens to it or to the program that built it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.homelab.running import PATIENCE_S, MakeLab, probe
from tools.lab import DeviceSpec, Fleet, Homelab, LabError, missing, record
from tools.lab.names import ROOTS, lab_ids
from tools.lab.network import Network

REPOSITORY = Path(__file__).parents[2]
TOOL = (sys.executable, str(REPOSITORY / "tools" / "homelab.py"))
FLEET = Fleet((DeviceSpec(name="a", disk_bytes=32 << 20, latency_ms=1), DeviceSpec(name="b")))
FLEET_TEXT = '[[device]]\nname = "a"\ndisk_bytes = "32MB"\nlatency_ms = 1\n[[device]]\nname = "b"\n'

START = """
import os, signal, subprocess, sys
from tests.homelab.test_leftovers import FLEET, traces
from tools.lab import Homelab
from tools.lab.network import Network

def crash():
    print(lab.id, len(traces(lab.id)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

lab = Homelab(FLEET)
if sys.argv[1] == "halfway":
    Network.build = lambda self: crash()
lab.up()
words = ["bash", "-c", "echo in; sleep 1000"]
lab.device("a").popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.readline()
crash()
"""


def traces(lab: str) -> set[str]:
    """Return everything of a lab on this machine: mounts, loop devices, cgroups, folders, processes."""
    found = set(Path("/proc/self/mountinfo").read_text().splitlines())
    found |= set(texts(Path("/sys/block").glob("loop*/loop/backing_file")))
    found |= {folder for folder, _, _ in os.walk("/sys/fs/cgroup")}
    found |= {str(path) for path in ROOTS.iterdir()}
    processes = list(Path("/proc").glob("[0-9]*"))
    found |= {*texts(path / "cgroup" for path in processes), *texts(path / "cmdline" for path in processes)}
    return {entry for entry in found if f"primad-lab-{lab}" in entry}


def texts(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the texts of these files; files of other labs may vanish meanwhile."""
    for path in paths:
        with suppress(OSError):
            yield path.read_bytes().decode(errors="replace")


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()} | set(
        Path("/proc/net/route").read_text().splitlines()
    )


def crash(when: str) -> str:
    """Build a lab in a process that is killed; return its id. Any later lab may remove it."""
    done = subprocess.run(
        [sys.executable, "-c", START, when],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    lab, left = done.stdout.split()
    assert int(left) > 0
    return lab


def tool(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``tools/homelab.py``."""
    return subprocess.run([*TOOL, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def lab_of(pid: int) -> str | None:
    """Return the lab that a process is building."""
    for lab in lab_ids(ROOTS):
        with suppress(LabError):
            owner = record.read(lab).owner
            if owner is not None and owner.pid == pid:
                return lab
    return None


def test_a_lab_is_removed_after_its_block(make_lab: MakeLab) -> None:
    before = interfaces()
    with Homelab(FLEET) as lab, probe(lab.device("a"), "serve", "a"):
        assert traces(lab.id)
        assert interfaces() == before
    assert not traces(lab.id)
    assert interfaces() == before
    lab.down()  # repeating it is no error


def test_a_lab_that_cannot_be_finished_undoes_itself(make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Network) -> None:
        assert traces(lab.id)
        raise KeyboardInterrupt

    lab = Homelab(FLEET)
    monkeypatch.setattr(Network, "build", refuse)
    with pytest.raises(KeyboardInterrupt):
        lab.up()
    assert not traces(lab.id)


def test_a_disk_that_cannot_be_made_is_an_error(make_lab: MakeLab) -> None:
    lab = Homelab(Fleet((DeviceSpec(name="a", disk_bytes=(1 << 59)),)))
    with pytest.raises(LabError, match="disk_bytes"):
        lab.up()
    assert not traces(lab.id)


@pytest.mark.parametrize("when", ["halfway", "up"])
def test_down_removes_leftovers_of_a_killed_program(make_lab: MakeLab, when: str) -> None:
    lab = crash(when)
    done = tool("down", lab)
    gone = done.stdout == f"lab {lab}: gone\n"
    assert gone or f"lab {lab}: not there" in done.stderr, done.stderr  # another test's lab may have removed it first
    assert not traces(lab)


def test_the_next_lab_removes_leftovers_of_a_killed_program(make_lab: MakeLab) -> None:
    lab = crash("up")
    make_lab(DeviceSpec(name="a"))
    assert not traces(lab)


def test_the_tool_builds_breaks_and_removes_a_lab(make_lab: MakeLab, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET_TEXT)
    done = tool("up", str(fleet))
    assert done.returncode == 0, done.stderr
    lab = done.stdout.split()[1].rstrip(":")
    try:
        make_lab(DeviceSpec(name="other"))  # neither removes the other
        assert tool("--lab", lab, "exec", "b", "hostname").stdout == "b\n"
        assert tool("--lab", lab, "exec", "b", "--", "sh", "-c", "exit 7").returncode == 7
        for words in (
            ("partition", "a | b"),
            ("heal",),
            ("cut", "a"),
            ("plug", "a"),
            ("half-open", "a", "b"),
            ("freeze", "a"),
            ("thaw", "a"),
            ("slow", "a", "0.5"),
            ("fill-disk", "a"),
            ("free-disk", "a"),
            ("kill", "a"),
        ):
            done = tool("--lab", lab, *words)
            assert done.returncode == 0, done.stderr
        assert "half-open" in tool("status").stdout
        for words, named in (
            (("cut", "x"), "'x': not in lab"),
            (("kill", "b", "--ring"), "no ring process"),
            (("fill-disk", "b"), "disk_bytes"),
            (("exec", "b"), "no command"),
            (("up", str(tmp_path / "none.toml")), "none.toml"),
        ):
            done = tool("--lab", lab, *words)
            assert done.returncode == 2
            assert done.stderr.startswith("homelab: error: ")
            assert named in done.stderr
            assert done.stderr.count("\n") == 1
    finally:
        assert tool("down", lab).returncode == 0
    assert not traces(lab)


def test_an_interrupted_tool_leaves_nothing(make_lab: MakeLab, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text("".join(f'[[device]]\nname = "d{number}"\ndisk_bytes = "8MB"\n' for number in range(16)))
    while (lab := interrupted(fleet)) is None:  # it was built before
        continue
    assert not traces(lab)


def interrupted(fleet: Path) -> str | None:
    """Interrupt the tool while it builds a lab; which one. None where it was built before that."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*TOOL, "up", str(fleet)], **pipes) as building:
        while (lab := lab_of(building.pid)) is None and building.poll() is None:
            time.sleep(0.001)
        building.send_signal(signal.SIGINT)
        printed, reported = building.communicate(timeout=PATIENCE_S)
    if building.returncode == 0:
        assert tool("down", printed.split()[1].rstrip(":")).returncode == 0
        return None
    assert building.returncode == 130, reported
    assert lab is not None
    return lab


def test_without_root_the_tool_is_one_clear_error(tmp_path: Path) -> None:
    if missing() is not None:
        done = tool("status")
        assert done.returncode == 2
        assert done.stderr.startswith("homelab: error: requires ")
        return
    code = "import os; from tools.lab import missing; os.setuid(65534); print(missing())"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("requires root"), done.stderr
