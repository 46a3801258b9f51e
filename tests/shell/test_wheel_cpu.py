"""A wheel of llama.cpp names the processor that it was built for, and is refused on another one."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "wheel_cpu.py"
ELSEWHERE = "sve" if platform.machine() in ("x86_64", "AMD64") else "avx"
"""A feature that this machine's processor cannot have."""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux' list of flags, and a compiler"
)


def wheel(folder: Path, **sources: str) -> Path:
    """A wheel with libraries compiled from these C sources."""
    made = folder / "llama_cpp_python-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for name, source in sources.items():
            library = f"libggml-{name}.so"
            command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(folder / library), "-"]
            subprocess.run(command, input=source, text=True, check=True)
            archive.write(folder / library, f"llama_cpp/lib/{library}")
    return made


def checked(path: Path) -> tuple[int, str, str]:
    ended = subprocess.run([sys.executable, str(TOOL), str(path)], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            f"int ggml_cpu_has_{ELSEWHERE}(void) {{ return 1; }}",
            f"needs a processor with {ELSEWHERE.upper()}, which this",
        ),
        (
            "__attribute__((constructor)) void begin(void) { __builtin_trap(); }",
            "has instructions that this processor lacks",
        ),
        ("int nowhere(void); int begin(void) { return nowhere(); }", "cannot be loaded here: "),
    ],
    ids=["says so", "dies of it", "cannot be loaded"],
)
def test_a_wheel_for_another_processor_is_refused_with_the_reason(tmp_path: Path, source: str, why: str) -> None:
    code, out, printed = checked(wheel(tmp_path, base="", cpu=source))
    assert (code, out, len(printed.splitlines())) == (1, "", 1)
    assert why in printed


def test_a_wheel_that_fits_lists_the_features_it_needs(tmp_path: Path) -> None:
    known = "sse3" if ELSEWHERE == "sve" else "neon"
    fits = wheel(tmp_path, base="", cpu=f"int ggml_cpu_has_{known}(void) {{ return 1; }}")
    assert checked(fits) == (0, f"{known.upper()}\n", "")


def test_a_wheel_with_runtime_dispatch_is_not_checked(tmp_path: Path) -> None:
    code, _, printed = checked(wheel(tmp_path, **{"base": "", "cpu-haswell": "int begin(void) { __builtin_trap(); }"}))
    assert (code, printed) == (0, "")


def test_an_invalid_wheel_is_named(tmp_path: Path) -> None:
    path = tmp_path / "llama_cpp_python-1.2.3-py3-none-any.whl"
    path.write_bytes(b"wheel")
    code, _, printed = checked(path)
    assert (code, printed) == (1, "File is not a zip file\n")
