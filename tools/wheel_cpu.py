"""Find which CPU features a wheel of llama.cpp needs and whether this machine has them: a build is for one CPU.

    python tools/wheel_cpu.py llama_cpp_python-0.3.36-py3-none-linux_x86_64.whl

llama.cpp itself knows which instructions it was compiled for, so the wheel needs no additional file. It is queried in a
separate process, which such an instruction may kill. The script prints what the wheel needs; if the wheel cannot run
here, it exits with 1 and one line that says why. A wheel with code for several CPUs (``libggml-cpu-*``) chooses by
itself and is not queried.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LIBRARIES = ("libggml-base", "libggml-cpu")
FLAGS = {
    "sse3": "pni",
    "ssse3": "ssse3",
    "avx": "avx",
    "avx_vnni": "avx_vnni",
    "avx2": "avx2",
    "bmi2": "bmi2",
    "f16c": "f16c",
    "fma": "fma",
    "avx512": "avx512f",
    "avx512_vbmi": "avx512vbmi",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
    "neon": "asimd",
    "fp16_va": "asimdhp",
    "dotprod": "asimddp",
    "matmul_int8": "i8mm",
    "sve": "sve",
    "sme": "sme",
    "sme2": "sme2",
}
"""llama.cpp's name of each feature (``ggml_cpu_has_...``), and Linux's."""


class UnfitError(Exception):
    """The wheel cannot run here."""


def main(wheel: Path) -> None:
    """Print what ``wheel`` needs. Raises ``UnfitError``."""
    needs = needs_of(wheel)
    here = flags_here()
    lacking = [name for name in needs if here and FLAGS[name] not in here]
    if lacking:
        raise UnfitError(f"needs a processor with {shown(lacking)}, which this one lacks")
    print(shown(needs))


def needs_of(wheel: Path) -> list[str]:
    """Return names of ``FLAGS``. Raises ``UnfitError`` where the library cannot even be loaded."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        members = [each for each in archive.namelist() if each.startswith("llama_cpp/lib/libggml-")]
        if not any(Path(each).stem == LIBRARIES[1] for each in members):
            return []
        archive.extractall(folder, members)
        asked = [sys.executable, __file__, "--ask", str(Path(folder) / "llama_cpp" / "lib")]
        ended = subprocess.run(asked, capture_output=True, text=True, check=False)
    if ended.returncode < 0:
        raise UnfitError("has instructions that this processor lacks")
    if ended.returncode:
        raise UnfitError(f"cannot be loaded here: {ended.stderr.strip().splitlines()[-1]}")
    return ended.stdout.split()


def ask(folder: Path) -> None:
    """Print the names of ``FLAGS`` for which the library in ``folder`` was compiled."""
    suffix = ".dylib" if platform.system() == "Darwin" else ".so"
    *_, library = [ctypes.CDLL(str(folder / f"{name}{suffix}"), ctypes.RTLD_GLOBAL) for name in LIBRARIES]
    print(*[name for name in FLAGS if getattr(library, f"ggml_cpu_has_{name}", int)()])


def flags_here() -> set[str]:
    """The features of this CPU by Linux's names; empty on other systems, where they are not known."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()}


def shown(names: list[str]) -> str:
    return ", ".join(name.upper() for name in names) or "nothing in particular"


if __name__ == "__main__":
    try:
        if sys.argv[1] == "--ask":
            ask(Path(sys.argv[2]))
        else:
            main(Path(sys.argv[1]))
    except (UnfitError, zipfile.BadZipFile, OSError) as exc:
        sys.exit(str(exc))
