"""Generated files that packages ship with the program: the manual page, the shell completions, the service."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from primad.cli.main import app

ROOT = Path(__file__).parents[2]
CHECKS = {
    "bash": ("share/bash-completion/completions/primad", ("bash", "-n")),
    "zsh": ("share/zsh/vendor-completions/_primad", ("zsh", "-n")),
    "fish": ("share/fish/vendor_completions.d/primad.fish", ("fish", "--no-execute")),
}


def written(folder: Path) -> Path:
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run([sys.executable, ROOT / "packaging" / "system_files.py", folder], env=environment, check=True)
    return folder


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("usr"))


@pytest.fixture(scope="module")
def page(prefix: Path) -> Path:
    """The manual page, decompressed."""
    path = prefix / "primad.1"
    path.write_bytes(gzip.decompress((prefix / "share/man/man1/primad.1.gz").read_bytes()))
    return path


def test_the_same_commands_give_the_same_files(prefix: Path, tmp_path: Path) -> None:
    again = written(tmp_path)
    files = [path.relative_to(again) for path in again.rglob("*") if path.is_file()]
    assert len(files) >= 4
    assert [name for name in files if (prefix / name).read_bytes() != (again / name).read_bytes()] == []


def test_the_manual_page_has_every_command_and_option(page: Path) -> None:
    text = page.read_text().replace("\\-", "-")
    commands = list(app.built.commands.items())
    for name, command in commands:
        if command.hidden:
            continue
        assert f".SS primad {name} " in text
        commands += [(f"{name} {inner}", each) for inner, each in getattr(command, "commands", {}).items()]
        assert [
            word for param in command.params for word in param.opts if word.startswith("-") and word not in text
        ] == []


def test_roff_accepts_the_manual_page(page: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    argv = ["groff", "-man", "-ww", "-k", "-Tutf8", str(page)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert "large language model" in ended.stdout


@pytest.mark.parametrize("shell", CHECKS)
def test_completions_are_scripts_of_their_shell(prefix: Path, shell: str) -> None:
    place, check = CHECKS[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([*check, prefix / place], check=True)


def test_bash_completes_commands(prefix: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    script = '. "$0"; COMP_WORDS=(primad se) COMP_CWORD=1; _primad_completion "$1"; echo "${COMPREPLY[@]}"'
    program = Path(sys.executable).with_name("primad")
    argv = ["bash", "-c", script, str(prefix / CHECKS["bash"][0]), str(program)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split() == ["serve", "service"]


def test_the_service_runs_as_its_own_user(prefix: Path) -> None:
    unit = (prefix / "lib/systemd/system/primad.service").read_text().splitlines()
    assert "ExecStart=/usr/bin/primad join $PRIMAD_OPTIONS" in unit
    assert "User=primad" in unit
    default = (ROOT / "packaging" / "deb" / "default").read_text()
    assert "EnvironmentFile=-/etc/default/primad" in unit
    assert 'PRIMAD_OPTIONS=""' in default.splitlines()


def test_systemd_accepts_the_service(prefix: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # The program is not installed here.
    unit = (prefix / "lib/systemd/system/primad.service").read_text().replace("/usr/bin/primad", "/bin/true")
    (tmp_path / "primad.service").write_text(unit)
    argv = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / "primad.service")]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert [line for line in ended.stderr.splitlines() if "primad.service" in line] == []
