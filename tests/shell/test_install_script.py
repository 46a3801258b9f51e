"""``packaging/install.sh`` announces what it will do, asks, and does exactly that. A stub stands in for the wheel."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "packaging" / "install.sh"
CONSTRAINTS = "# for base dev\nsaying==1.0 \\\n    --hash=sha256:%s\n# for dev\nno-such-package==1.0\n"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")


def write_wheel(folder: Path, name: str, version: str, needs: str = "", **files: str) -> Path:
    """Write a wheel with these files; returns its path."""
    info = f"{name}-{version}.dist-info"
    files = {path.replace("__", "."): text for path, text in files.items()} | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nprimad = primad_stub:main\n" if name == "primad" else "",
    }
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD")))
    return made


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with the program ``primad`` that needs one package and llama.cpp."""
    needs = "Requires-Dist: saying\nRequires-Dist: llama-cpp-python==0.3.36\n"
    return write_wheel(
        tmp_path, "primad", "0.1.0", needs, primad_stub__py="import saying\ndef main():\n    print(saying.WHAT)\n"
    )


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_wheel(tmp_path, "llama_cpp_python", "0.3.36")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A package index with the one package that primad needs."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, "saying", "1.0", saying__py="WHAT = 'it runs'\n")
    return folder


BUILDS = """#!/bin/sh
[ "$1" = --kept ] || exit 1
echo "build-llama: 1 min 00 s: 3 of 9 targets" >&2
echo "$HOME/../llama_cpp_python-0.3.36-py3-none-any.whl"
"""
"""Stands in for ``tools/build-llama``, whose progress is tested elsewhere."""
INSTALLS = """#!/bin/sh
echo "$(basename "$0") $*" >"$HOME/../asked"
for folder in "$@"; do
  case "$folder" in
    --no-index*) folder=${folder##* } ;; # pipx gives it to pip as one word
  esac
  [ ! -d "$folder" ] || ls "$folder" >"$HOME/../wheels"
done
"""
"""Stands in for uv and pipx; keeps the arguments and the wheels to install."""


PYTHON = """#!/bin/sh
for folder; do :; done
case "$1 $2" in
  *_base_executable*) echo "$0" ;;
  "-m venv") [ -d "{kept}" ] || "{python}" -m venv "{kept}" && mkdir -p "$folder" && cp -a "{kept}/." "$folder" ;;
  *) exec "{python}" "$@" ;;
esac
"""
"""This Python, but environments are made once and then copied, in a tenth of the time."""


def checkout(tmp_path: Path, constraints: str) -> Path:
    """The script in a checkout with these constraints."""
    for name in ("packaging/install.sh", "tools/locked", "tools/wheel_cpu.py"):
        made = tmp_path / "checkout" / name
        made.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, made)
    program(tmp_path / "checkout" / "tools" / "build-llama", BUILDS)
    (tmp_path / "checkout" / "tools" / "constraints.txt").write_text(constraints)
    return tmp_path / "checkout" / "packaging" / "install.sh"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


def install(home: Path, *arguments: object, script: Path = SCRIPT, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a home of its own, without a terminal or a package index."""
    shared = home.parent.parent
    environment = {
        "HOME": str(home),
        "PATH": f"{home.parent}/programs:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PYTHON": str(program(shared / "python", PYTHON.format(python=sys.executable, kept=shared / "environment"))),
        "TMPDIR": str(home.parent),
    }
    argv = ["sh", str(script), *map(str, arguments)]
    return subprocess.run(
        argv, env=environment | more, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def test_it_installs_only_files_with_the_right_hash_into_the_stated_folders(
    home: Path, wheel: Path, llama: Path, index: Path
) -> None:
    options = ("--from", wheel, "--yes", "--llama-wheel", llama, "--sha256", sha256(llama))
    refused = install(home, *options, script=checkout(home.parent, CONSTRAINTS % ("0" * 64)), PIP_FIND_LINKS=str(index))
    assert refused.returncode == 2
    assert "hash" in refused.stderr.lower()
    assert not (home / ".local" / "bin").exists()

    script = checkout(home.parent, CONSTRAINTS % sha256(index / "saying-1.0-py3-none-any.whl"))
    ended = install(home, "--from", wheel, "--yes", script=script, PIP_FIND_LINKS=str(index), CXX=sys.executable)
    assert ended.returncode == 0, ended.stderr
    assert_progress_and_offer(ended, llama)
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


def assert_progress_and_offer(ended: subprocess.CompletedProcess[str], llama: Path) -> None:
    """Assert that it showed the build's progress, and how other machines can reuse the wheel."""
    assert "3 of 9 targets" in ended.stderr
    command = f"packaging/install.sh --llama-wheel ~/{llama.name} --sha256 {sha256(llama)}"
    assert re.search(rf"scp \S+/{re.escape(llama.name)} OTHER:\n.*\n +{re.escape(command)}\n", ended.stdout)


@pytest.mark.parametrize(
    ("installer", "asked"), [("uv", "uv tool install --force --python"), ("pipx", "pipx install --force --python")]
)
def test_uv_and_pipx_get_checked_wheels_and_use_no_index(
    home: Path, wheel: Path, llama: Path, index: Path, installer: str, asked: str
) -> None:
    program(home.parent / "programs" / installer, INSTALLS)
    script = checkout(home.parent, CONSTRAINTS % sha256(index / "saying-1.0-py3-none-any.whl"))
    options = ("--from", wheel, "--yes", "--installer", installer)
    ended = install(home, *options, script=script, PIP_FIND_LINKS=str(index), CXX=sys.executable)
    assert ended.returncode == 0, ended.stderr
    assert_progress_and_offer(ended, llama)
    printed = (home.parent / "asked").read_text()
    assert printed.startswith(asked)
    assert "--no-index --find-links" in printed
    assert printed.endswith(" primad\n")
    assert (home.parent / "wheels").read_text().split() == [llama.name, wheel.name, "saying-1.0-py3-none-any.whl"]
    assert f"{installer} " in ended.stdout.splitlines()[-1]
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(("asked", "code"), [(("--dry-run",), 0), ((), 2)], ids=["a dry run", "nobody to ask"])
def test_it_does_nothing_without_confirmation(home: Path, wheel: Path, asked: tuple[str, ...], code: int) -> None:
    ended = install(home, "--from", wheel, *asked, CXX=sys.executable, CMAKE_ARGS="-DGGML_VULKAN=on")
    assert ended.returncode == code
    assert 'with CMAKE_ARGS="-DGGML_VULKAN=on"' in ended.stdout
    assert "It changes nothing else." in ended.stdout
    assert list(home.iterdir()) == []


def test_an_llama_cpp_that_is_given_needs_no_compiler_and_must_have_its_hash(
    home: Path, wheel: Path, llama: Path
) -> None:
    options = ("--from", wheel, "--dry-run", "--llama-wheel", llama)
    ended = install(home, *options, "--sha256", sha256(llama), CXX="no-such-compiler")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"take llama.cpp from {llama}, whose SHA-256 is right" in ended.stdout
    assert f"its SHA-256 is {sha256(llama)}, not 00" in install(home, *options, "--sha256", "00").stderr
    llama.write_bytes(b"wheel")
    unfit = install(home, *options, "--sha256", sha256(llama))
    assert (unfit.returncode, len(unfit.stderr.splitlines())) == (2, 1)
    assert f"--llama-wheel {llama}: File is not a zip file; leave it out to build one here" in unfit.stderr


def test_a_wheel_that_becomes_another_one_after_it_was_judged_is_not_installed(
    home: Path, wheel: Path, llama: Path
) -> None:
    options = ("--from", wheel, "--yes", "--llama-wheel", llama, "--sha256", sha256(llama))
    program(home.parent / "programs" / "mktemp", f'#!/bin/sh\necho other >>"{llama}"\nexec /usr/bin/mktemp "$@"\n')
    ended = install(home, *options, script=checkout(home.parent, CONSTRAINTS % ("0" * 64)))
    assert (ended.returncode, "changed meanwhile" in ended.stderr) == (2, True)
    assert not (home / ".local").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--from", "no-such.whl"), "--from no-such.whl: no such file"),
        (("--all",), "--all: not known; --help says what there is"),
        (("--from",), "--from: needs a value"),
        (("--extras", "hub,rm"), "--extras hub,rm: the only extra is plot"),
        ((), "needs a C++ compiler to build llama.cpp"),
        (("--sha256", "00"), "--llama-wheel and --sha256 go together"),
        (("--installer", "conda"), "--installer conda: not known; there are uv, pipx and venv"),
    ],
    ids=["file", "option", "value", "extras", "compiler", "hash", "installer"],
)
def test_a_mistake_is_one_line(home: Path, arguments: tuple[str, ...], why: str) -> None:
    ended = install(home, *arguments, CXX="no-such-compiler")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert why in ended.stderr


def test_shellcheck_accepts_the_scripts() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = [path for path in SCRIPT.parent.rglob("*") if path.is_file() and path.read_bytes()[:2] == b"#!"]
    assert SCRIPT in scripts
    ended = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert ended.stdout == ""
    assert os.access(SCRIPT, os.X_OK)
