"""Write ``tools/constraints.txt``: the packages of each group with versions and hashes, from which ``tools/locked``
selects.

uv resolves for all systems and every Python that primad supports, and keeps the versions in the file. A line above each
package says what it is for.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tools" / "constraints.txt"
LLAMA = "llama-cpp-python"
HEAD = """\
# The versions that the test suite passed with, and the hashes of their files; tools/lock writes this file.
# What installs primad takes its packages from here (tools/locked), so that nothing else comes in, whatever an index serves.
"""
EXTRAS = {"base": [], "hub": ["hub"], "plot": ["plot"], "dev": ["dev"]}
CORE = ("hatchling", "hypothesis", "matplotlib", "pytest", "scipy", "uv")
"""The packages of dev that core tests need, and the installer."""


def main(options: Sequence[str]) -> None:
    """Resolve everything together, then each group within the result."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = [*project["build-system"]["requires"], "scikit-build-core[pyproject]", "cmake", "ninja"]  # of llama.cpp
    with tempfile.TemporaryDirectory() as folder:
        tools, every = Path(folder, "build.in"), Path(folder, "all.txt")
        tools.write_text("\n".join(build))
        every.write_text(FILE.read_text())
        blocks = resolve(every, "pyproject.toml", str(tools), "--all-extras", "--generate-hashes", *options)
        groups = {
            group: resolve(Path(folder, group), "pyproject.toml", *extras_of(names), "--constraints", str(every))
            for group, names in EXTRAS.items()
        }
        core = Path(folder, "core.in")
        core.write_text("\n".join(filter(of_core, project["project"]["optional-dependencies"]["dev"])))
        groups["core"] = resolve(Path(folder, "core"), "pyproject.toml", str(core), "--constraints", str(every))
        groups["build"] = resolve(Path(folder, "tools.txt"), str(tools), "--constraints", str(every))
    FILE.write_text(HEAD + "".join(f"# for {use(name, groups)}\n{block}\n" for name, block in blocks.items()))


def of_core(requirement: str) -> bool:
    return requirement.startswith(CORE)


def extras_of(names: Sequence[str]) -> list[str]:
    return [word for name in names for word in ("--extra", name)]


def use(name: str, groups: dict[str, dict[str, str]]) -> str:
    """The groups that need the package, separated by blanks."""
    return "llama" if name == LLAMA else " ".join(group for group, blocks in groups.items() if name in blocks)


def resolve(out: Path, *arguments: str) -> dict[str, str]:
    """Return what uv writes to ``out``, by package."""
    how = ("--universal", "--python-version", "3.11", "--no-header", "--no-annotate", "--quiet")
    subprocess.run(["uv", "pip", "compile", *arguments, *how, "-o", str(out)], check=True, cwd=ROOT)
    blocks = re.split(r"\n(?=\S)", out.read_text().strip())
    return {re.split(r"[=\[]", block)[0]: block for block in blocks}


if __name__ == "__main__":
    main(sys.argv[1:])
