"""The wheel and the sdist: the same bytes twice, and a program that needs no source tree.

The wheel is installed into its own environment; dependencies come from the tests' environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("primad", "solver", "profiles", "packaging", "docs", "examples")
INSTALLING = {"tools/build-llama", "tools/constraints.txt", "tools/locked"}
"""What packaging/install.sh needs in addition."""
EPOCH = "1700000000"


def built(tmp_path: Path, umask: int) -> Path:
    """A folder with wheel and sdist, built from a copy of the sources with other times and modes."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    tree.mkdir()
    previous = os.umask(umask)
    try:
        for name in SOURCES:
            shutil.copytree(
                ROOT / name, tree / name, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("__pycache__")
            )
        (tree / "tools").mkdir()
        pages = [path.name for path in ROOT.glob("*.md")]
        for name in (*pages, "pyproject.toml", "LICENSE", ".gitignore", *INSTALLING):
            shutil.copyfile(ROOT / name, tree / name)
        environment = os.environ | {"SOURCE_DATE_EPOCH": EPOCH, "PYTHON": sys.executable}
        run("bash", tree / "packaging" / "build", out, env=environment)
    finally:
        os.umask(previous)
    return out


def run(*argv: object, **more: object) -> str:
    """The program's output; a failure fails the test with it."""
    ended = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return str(ended.stdout)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built"), 0o022)


@pytest.fixture(scope="module")
def clean(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment with the wheel and nothing of this checkout."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    binaries = folder / ("Scripts" if sys.platform == "win32" else "bin")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", next(binaries.glob("python*"))]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", *dist.glob("*.whl"), env=outside())
    inside = run(next(binaries.glob("python*")), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(inside, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return binaries


def outside(**more: str) -> dict[str, str]:
    """Environment variables without a path to the source tree."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more


def test_the_same_sources_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    again = built(tmp_path, 0o077)
    assert sorted(path.name for path in dist.iterdir()) == sorted(path.name for path in again.iterdir())
    assert {path.suffix for path in dist.iterdir()} == {".whl", ".gz"}
    for path in dist.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_the_installed_package_needs_no_source_tree(clean: Path, tmp_path: Path) -> None:
    code = "import primad, halda; from primad.cli.main import main; print(primad.__file__, halda.__file__)"
    for file in run(next(clean.glob("python*")), "-c", code, cwd=tmp_path, env=outside()).split():
        assert Path(file).is_relative_to(clean.parent), file


def test_the_program_starts_and_finds_the_files_of_its_package(clean: Path, tmp_path: Path) -> None:
    program = shutil.which("primad", path=str(clean))
    assert program is not None
    environment = outside(PRIMAD_HOME=str(tmp_path / "home"))
    assert "join" in run(program, "--help", cwd=tmp_path, env=environment)
    plan = run(program, "plan", "--model-shape", "llama3-8b", "--fleet", "apple-home", cwd=tmp_path, env=environment)
    assert "tokens/s" in plan


def test_the_sdist_holds_what_builds_the_wheel_and_no_tests(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "primad/__init__.py", "solver/halda/__init__.py"} <= inside
    assert {"packaging/build", *INSTALLING} <= inside
    assert not [
        name for name in inside - INSTALLING if name.startswith(("tests", "tools", ".venv", ".models", "shared"))
    ]


def test_the_wheel_holds_every_file_of_the_program(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        inside = set(archive.namelist())
    files = [path for path in (ROOT / "primad").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert [path for path in files if str(path.relative_to(ROOT)) not in inside] == []
