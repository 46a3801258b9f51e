"""The Debian package on fresh machines: install, start, upgrade, remove, and the documented way to a ring of three.

These tests run only in ``tools/test --full`` or when this file is named. They take minutes, need root and the tools
listed in ``machines.py``, and download the parts of package and root. PRIMAD_DEB and PRIMAD_DEBIAN_ROOT name existing
ones.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from primad import __version__
from tests.debian.machines import PATIENCE_S, Machine, machines, missing, new_root
from tests.fakes.documents import fences
from tests.homelab.cluster import CODE
from tests.homelab.running import Running

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(4 * PATIENCE_S)]
ROOT = Path(__file__).parents[2]
FIRST, SECOND = (f"primad_{__version__}-{revision}_amd64.deb" for revision in (1, 2))
NAMES = ("desk", "mini", "laptop")


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if (reason := missing()) is not None:
        pytest.skip(f"Debian machines: {reason}")


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_root(tmp_path_factory.mktemp("debian"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A folder with two versions of the package and a model."""
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o755)  # some users on the machines are not root
    if given := os.environ.get("PRIMAD_DEB"):
        shutil.copy(given, folder / FIRST)
    else:
        # This is the wheel that tools/setup built for this machine; building another would take ten minutes.
        wheels = [path for path in Path.home().glob(".cache/primad/wheels/*/llama_cpp_python-*.whl") if is_plain(path)]
        assert wheels, "no wheel of llama.cpp; run tools/setup"
        wheel = max(wheels, key=lambda path: path.stat().st_mtime)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        build(ROOT / "packaging/deb/build", "--llama-wheel", wheel, "--sha256", digest, "--out", folder)
    unpacked = folder.parent / "unpacked"
    build("dpkg-deb", "-R", folder / FIRST, unpacked)
    control = unpacked / "DEBIAN" / "control"
    control.write_text(control.read_text().replace(f"Version: {__version__}-1", f"Version: {__version__}-2"))
    build("dpkg-deb", "--root-owner-group", "-Zzstd", "-z1", "-b", unpacked, folder / SECOND)
    shutil.rmtree(unpacked)
    shutil.copy(smollm2.resolve(), folder / "model.gguf")
    shutil.copy(ROOT / "tests" / "fakes" / "profile.py", folder / "made_up.py")
    return folder


def is_plain(wheel: Path) -> bool:
    """Whether the wheel is CPU-only and needs no driver."""
    with zipfile.ZipFile(wheel) as archive:
        return not any(re.search("vulkan|cuda|hip", Path(name).name) for name in archive.namelist() if ".so" in name)


def build(*argv: object) -> None:
    ended = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def shown(machine: Machine, name: str) -> str:
    """A property of the service."""
    return machine.run("systemctl", "show", "--value", "-p", name, "primad").strip()


def options(machine: Machine, words: str) -> None:
    """Set the service's options in /etc/default/primad."""
    machine.run("sed", "-i", f's/^PRIMAD_OPTIONS=.*/PRIMAD_OPTIONS="{words}"/', "/etc/default/primad")


def test_the_package_is_installed_started_upgraded_removed_and_purged(
    debian: Path, shared: Path, tmp_path: Path
) -> None:
    with machines(("desk",), debian, tmp_path, shared) as started:
        desk = started["desk"]
        desk.run("apt-get", "install", "-y", f"/shared/{FIRST}")
        assert desk.run("primad", "--version").startswith("primad ")
        assert shown(desk, "UnitFileState") == "disabled"
        for path in ("/usr/share/man/man1/primad.1.gz", "/usr/share/bash-completion/completions/primad"):
            desk.run("test", "-f", path)

        # The service runs as its own user, without capabilities.
        desk.run("systemctl", "enable", "--now", "primad")
        first = shown(desk, "MainPID")
        status = desk.run("cat", f"/proc/{first}/status")
        assert "NoNewPrivs:\t1" in status
        user = desk.run("id", "-u", "primad").strip()
        assert re.search(rf"^Uid:\t{user}\t", status, re.MULTILINE)
        assert re.search(r"^CapBnd:\t0+$", status, re.MULTILINE)
        identity = desk.run("cat", "/var/lib/primad/identity.json")

        # An upgrade keeps the owner's settings and the device's identity, and restarts the service.
        desk.run("sh", "-c", "echo PRIMAD_NAME=atelier >>/etc/default/primad")
        desk.run("apt-get", "install", "-y", f"/shared/{SECOND}")
        assert f"{__version__}-2" in desk.run("dpkg-query", "-W", "primad")
        assert shown(desk, "ActiveState") == "active", desk.log()
        assert shown(desk, "MainPID") not in (first, "0")
        assert "PRIMAD_NAME=atelier" in desk.run("cat", f"/proc/{shown(desk, 'MainPID')}/environ")
        assert desk.run("cat", "/var/lib/primad/identity.json") == identity

        # systemd enforces the memory limit of the options; a service with wrong options stays stopped and says why.
        options(desk, "--max-ram 1GB")
        desk.run("systemctl", "restart", "primad")
        assert shown(desk, "MemoryMax") == str(1_000_000_000 + (1 << 30)), desk.log()
        options(desk, "--no-such")
        desk.run("systemctl", "restart", "primad", code=1)
        assert (shown(desk, "ActiveState"), shown(desk, "NRestarts")) == ("failed", "0"), desk.log()
        printed = desk.run("sh", "-c", "primad service status 2>&1", code=3)
        assert "another start would fail in the same way: " in printed
        assert "--no-such" in printed
        options(desk, "")
        desk.run("primad", "service", "start")
        assert (shown(desk, "ActiveState"), shown(desk, "MemoryMax")) == ("active", "infinity")
        assert "no such option" in desk.run("primad", "service", "logs", "--lines", "100").lower()
        desk.run("primad", "service", "stop")
        assert shown(desk, "ActiveState") == "inactive"
        options(desk, "--max-ram 1GB")
        desk.run("primad", "service", "start")

        # An installed service replaces the package's, which returns when the other is removed.
        desk.run("primad", "service", "install", "--system", "join", "--max-ram", "2GB")
        assert shown(desk, "MemoryMax") == str(2_000_000_000 + (1 << 30))
        assert (shown(desk, "ActiveState"), shown(desk, "User")) == ("active", "primad")
        desk.run("primad", "service", "status")
        desk.run("primad", "service", "remove", "--system")
        assert (shown(desk, "ActiveState"), shown(desk, "MemoryMax")) == ("inactive", "infinity")
        desk.run("systemctl", "enable", "--now", "primad")

        desk.run("apt-get", "remove", "-y", "primad")
        assert shown(desk, "ActiveState") == "inactive"
        desk.run("test", "-e", "/usr/lib/primad", code=1)
        desk.run("test", "-e", "/usr/bin/primad", code=1)
        assert desk.run("cat", "/var/lib/primad/identity.json") == identity
        assert "atelier" in desk.run("cat", "/etc/default/primad")

        desk.run("apt-get", "purge", "-y", "primad")
        for path in (
            "/var/lib/primad",
            "/etc/default/primad",
            "/etc/systemd/system/multi-user.target.wants/primad.service",
        ):
            desk.run("test", "-e", path, code=1)
        desk.run("id", "primad", code=1)


def count_as_measured(machine: Machine) -> None:
    """Write made-up figures: machines that measure at the same time would share this machine's cores."""
    machine.run("install", "-d", "-o", "primad", "-g", "primad", "-m", "700", "/var/lib/primad")
    machine.run("install", "-d", "/root/.local/share/primad")
    code = "import sys, made_up, pathlib; made_up.seed(pathlib.Path(sys.argv[1]))"
    for user, home, folder in (("root", "/root", "/root/.local/share/primad"), ("primad",) + ("/var/lib/primad",) * 2):
        python = ("env", f"HOME={home}", "PYTHONPATH=/shared", "/usr/lib/primad/bin/python3", "-B", "-c", code, folder)
        machine.run("runuser", "-u", user, "--", *python)


def steps() -> list[tuple[list[str], list[str]]]:
    """The commands of docs/install.md, verbatim, with the machines where each is typed."""
    found = []
    for fence in fences(ROOT / "docs" / "install.md", "sh"):
        for line in fence.text.splitlines():
            command, _, where = line.partition("  # ")
            on = [name for name in NAMES if name in re.split(r"[,:]\s*", where.strip())]
            if on:
                found.append((shlex.split(command), on))
    return found


def test_the_commands_of_the_manual_lead_from_the_package_to_a_response_of_a_ring_of_three(
    debian: Path, shared: Path, tmp_path: Path
) -> None:
    serving: Running | None = None
    codes: list[str] = []
    answer = ""
    with machines(NAMES, debian, tmp_path, shared) as started:
        for words, names in steps():
            typed = [word for word in words if word != "sudo"]  # root is the only user on these machines
            for name in names:
                machine = started[name]
                match typed:
                    case ["apt", "install", package]:
                        machine.run("apt-get", "install", "-y", f"/shared/{Path(package).name}")
                        count_as_measured(machine)
                    case ["primad", "serve", "--model", _, *rest]:
                        serving = machine.start("primad", "serve", "--model", "/shared/model.gguf", *rest)
                        codes.append(serving.wait_for(CODE, PATIENCE_S)[0])
                    case ["primad", "pair"]:
                        found = re.search(CODE, machine.run(*typed))
                        assert found is not None
                        codes.append(found[0])
                    case ["primad", "pair", *rest, "--code", _]:
                        machine.run("primad", "pair", *rest, "--code", codes.pop())
                    case ["primad", "chat", question]:
                        assert serving is not None
                        serving.wait_for("http://", PATIENCE_S)
                        answer = machine.run("primad", "chat", question, "--temperature", "0", "--max-tokens", "24")
                        status = machine.run("primad", "status")
                    case _:
                        machine.run(*typed)
    assert len(answer.split()) > 5
    assert [name for name in NAMES if name not in status] == []
