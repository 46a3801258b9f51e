"""``packaging/install.sh`` says what it will do, asks, and does that and nothing else. A stub of a wheel stands in."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "packaging" / "install.sh"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Has the program ``primad``, and needs no package."""
    path = tmp_path / "primad-0.1.0-py3-none-any.whl"
    info = "primad-0.1.0.dist-info"
    files = {
        "primad_stub.py": "def main():\n    print('it runs')\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: primad\nVersion: 0.1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nprimad = primad_stub:main\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD")))
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


def install(home: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """The script in a home of its own, with no terminal, and with no index to take packages from."""
    environment = {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PYTHON": sys.executable,
        "TMPDIR": str(home.parent),
    }
    argv = ["sh", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        argv, env=environment | more, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def test_it_installs_where_it_says_and_nowhere_else(home: Path, wheel: Path, compiler: str) -> None:
    ended = install(home, "--from", wheel, "--with", "venv", "--yes", CXX=compiler)
    assert ended.returncode == 0, ended.stderr
    assert f"make the folder {home}/.local/lib/primad" in ended.stdout
    assert f"link {home}/.local/bin/primad" in ended.stdout
    assert f"{home}/.local/bin is not on your PATH" in ended.stdout
    local = home / ".local"
    assert [
        sorted(path.name for path in folder.iterdir()) for folder in (home, local, local / "bin", local / "lib")
    ] == [
        [".local"],
        ["bin", "lib"],
        ["primad"],
        ["primad"],
    ]
    program = subprocess.run([local / "bin" / "primad"], capture_output=True, text=True, check=True)
    assert program.stdout == "it runs\n"


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """A GCC of this version: 12.2.0, which needs a cure."""
    path = tmp_path / "gcc"
    path.write_text('#!/bin/sh\n[ "$1" = -dumpfullversion ] && echo 12.2.0 || echo "g++ (GCC) 12.2.0"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("asked", "code"), [(("--dry-run",), 0), ((), 2)], ids=["a dry run", "nobody to ask"])
def test_it_does_nothing_unless_somebody_says_yes(
    home: Path, wheel: Path, compiler: str, asked: tuple[str, ...], code: int
) -> None:
    ended = install(home, "--from", wheel, "--with", "venv", *asked, CXX=compiler, CMAKE_ARGS="-DGGML_VULKAN=on")
    assert ended.returncode == code
    assert "-DGGML_VULKAN=on -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'" in ended.stdout
    assert "It changes nothing else." in ended.stdout
    assert list(home.iterdir()) == []


def test_an_llama_cpp_that_is_given_needs_no_compiler_and_must_have_its_hash(home: Path, wheel: Path) -> None:
    llama = wheel.with_name("llama_cpp_python-0.3.36-py3-none-any.whl")
    llama.write_bytes(b"wheel")
    right = hashlib.sha256(b"wheel").hexdigest()
    given = ("--from", wheel, "--with", "venv", "--dry-run", "--llama-wheel", llama)
    ended = install(home, *given, "--sha256", right, CXX="no-such-compiler")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"take llama.cpp from {llama}, whose SHA-256 is right" in ended.stdout
    assert f"its SHA-256 is {right}, not 00" in install(home, *given, "--sha256", "00").stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--from", "no-such.whl"), "--from no-such.whl: no such file"),
        (("--from", "/", "--with", "conda"), "--with conda: not known; there are uv, pipx and venv"),
        (("--all",), "--all: not known; --help says what there is"),
        (("--with",), "--with: needs a value"),
        (("--extras", "hub;rm"), "--extras hub;rm: give names with commas between, as in hub,plot"),
        (("--with", "venv"), "needs a C++ compiler to build llama.cpp"),
        (("--sha256", "00"), "--llama-wheel and --sha256 go together"),
    ],
    ids=["file", "tool", "option", "value", "extras", "compiler", "hash"],
)
def test_a_mistake_is_one_line(home: Path, arguments: tuple[str, ...], why: str) -> None:
    ended = install(home, *arguments, CXX="no-such-compiler")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert why in ended.stderr


def test_shellcheck_has_nothing_to_say_against_the_scripts() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = [path for path in SCRIPT.parent.rglob("*") if path.is_file() and path.read_bytes()[:2] == b"#!"]
    assert SCRIPT in scripts
    ended = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert ended.stdout == ""
    assert os.access(SCRIPT, os.X_OK)
