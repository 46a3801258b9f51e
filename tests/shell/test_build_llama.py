"""Wheels of llama.cpp: build progress, the kinds in the wheelhouse, installation by hash."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && exit ;;
  *" install "*) case "$*" in *--require-hashes*) exit ;; *) exit 1 ;; esac ;;
esac
case "$*" in *--no-build-isolation*--require-hashes*) ;; *) exit 1 ;; esac
while [ "$1" != --wheel-dir ]; do shift; done
echo "CMAKE_ARGS=$CMAKE_ARGS" >"$2/seen"
echo "  *** Building project with Ninja..."
echo "  [1/3] Building CXX object a.o"
echo "  [3/3] Linking CXX shared library b.so"
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the tools are shell scripts")


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def tool(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [str(ROOT / "tools" / name), *map(str, arguments)]
    kept = {key: value for key, value in os.environ.items() if key != "CMAKE_ARGS"}
    return subprocess.run(argv, env=kept | environment, capture_output=True, text=True, check=False)


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A GCC that needs no workaround."""
    return program(
        tmp_path / "gcc", '#!/bin/sh\n[ "$1" = -dumpfullversion ] && echo 14.2.0 || echo "g++ (GCC) 14.2.0"\n'
    )


def test_a_build_reports_its_progress(tmp_path: Path, compiler: Path) -> None:
    python = program(tmp_path / "python", PIP + 'touch "$2/llama_cpp_python-1.2.3-py3-none-any.whl"\n')
    ended = tool("build-llama", python, tmp_path / "out", CXX=str(compiler), PRIMAD_PROGRESS_S="0")
    assert ended.returncode == 0
    printed = [re.sub(r"\d+ min \d\d s", "TIME", line) for line in ended.stderr.splitlines()]
    assert printed[1:] == [
        "build-llama: TIME: 1 of 3 targets",
        "build-llama: TIME: 3 of 3 targets",
        "build-llama: built in TIME",
    ]
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == ["", ".whl"]


def test_a_build_that_fails_shows_its_last_lines(tmp_path: Path, compiler: Path) -> None:
    python = program(tmp_path / "python", PIP + 'echo "error: no such header"\nexit 1\n')
    ended = tool("build-llama", python, tmp_path / "out", CXX=str(compiler))
    assert ended.returncode == 2
    assert "error: no such header" in ended.stderr
    assert f"all are in {tmp_path}/out/build.log" in ended.stderr.splitlines()[-1]


def test_a_wheel_is_built_once_for_a_machine_and_kept(tmp_path: Path, compiler: Path) -> None:
    made = PIP.replace("#!/bin/sh\n", f'#!/bin/sh\n[ "$1" != -c ] || exec {sys.executable} "$@"\n')
    python = program(tmp_path / "python", made + 'touch "$2/llama_cpp_python-1.2.3-py3-none-any.whl"\n')
    where = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    first, again = (tool("build-llama", "--kept", python, **where) for _ in range(2))
    assert "built in" in first.stderr
    assert (again.stdout, again.stderr) == (first.stdout, "")
    kept = Path(first.stdout.strip())
    assert kept.is_file()
    assert kept.is_relative_to(tmp_path / "cache" / "primad" / "wheels")
    other = tool("build-llama", "--folder", python, **where, CMAKE_ARGS="-DGGML_VULKAN=on").stdout
    assert other
    assert other != str(kept.parent)


@pytest.mark.parametrize(("version", "flags"), [("12.2.0", "-fno-tree-dse -fno-dse"), ("13.3.0", ""), ("14.2.0", "")])
def test_a_compiler_that_breaks_amx_gets_the_flags_that_cure_it(tmp_path: Path, version: str, flags: str) -> None:
    gcc = program(tmp_path / "gcc", f'#!/bin/sh\n[ "$1" = -dumpfullversion ] && echo {version} || echo "g++ (GCC)"\n')
    assert tool("build-llama", "--flags", CXX=str(gcc)).stdout.strip() == flags
    tool("build-llama", program(tmp_path / "python", PIP), tmp_path, CXX=str(gcc), CMAKE_ARGS="-DA=on")
    cure = f" -DCMAKE_CXX_FLAGS='{flags}'" if flags else ""
    assert (tmp_path / "seen").read_text() == f"CMAKE_ARGS=-DA=on{cure}\n"


def test_the_wheelhouse_has_a_kind_for_each_level_and_each_backend() -> None:
    listed = dict(line.split(": ") for line in tool("wheelhouse", "--list").stdout.splitlines())
    assert list(listed) == ["x86-64-v2", "x86-64-v3", "x86-64-v4"]
    assert all("-DGGML_NATIVE=OFF" in switches for switches in listed.values())
    on = {level: set(re.findall(r"GGML_(\w+)=ON", switches)) for level, switches in listed.items()}
    assert on["x86-64-v2"] < on["x86-64-v3"] < on["x86-64-v4"]
    with_gpu = tool("wheelhouse", "--list", "--vulkan", "--level", "x86-64-v3").stdout
    assert with_gpu.startswith("x86-64-v3-vulkan: ")
    assert "-DGGML_VULKAN=ON" in with_gpu


@pytest.mark.parametrize(
    "arguments", [("--level", "x86-64-v9"), ("--level",), ("--all",)], ids=["level", "none", "option"]
)
def test_the_wheelhouse_names_unknown_arguments(arguments: tuple[str, ...]) -> None:
    ended = tool("wheelhouse", *arguments)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert ended.stderr.startswith(f"wheelhouse: error: {' '.join(arguments)}: ")


def test_set_up_refuses_a_different_wheel(tmp_path: Path) -> None:
    found = re.search(r'"llama-cpp-python==([\w.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    wheel = tmp_path / f"llama_cpp_python-{found[1]}-py3-none-any.whl"
    old = tmp_path / "llama_cpp_python-0.1.0-py3-none-any.whl"
    for path in (wheel, old):
        path.write_bytes(b"wheel")
    right = hashlib.sha256(b"wheel").hexdigest()
    refused = {
        ("--llama-wheel", wheel): "--llama-wheel and --sha256 go together",
        ("--llama-wheel", wheel, "--sha256", "0" * 64): f"its SHA-256 is {right}",
        ("--llama-wheel", old, "--sha256", right): "not a wheel of llama-cpp-python",
        ("--llama-wheel", tmp_path / "none.whl", "--sha256", right): "no such file",
        ("--llama-wheel", wheel, "--sha256", right): "File is not a zip file; leave it out to build one here",
    }
    for arguments, why in refused.items():
        ended = tool("setup", *arguments, PRIMAD_VENV=str(tmp_path / "venv"), PYTHON=sys.executable)
        assert ended.returncode == 2
        assert why in ended.stderr
    assert not (tmp_path / "venv").exists()
