"""A second work tree may link to the first one's environment if its own sources are used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the tools are shell scripts")


def set_up(tree: Path, python_path: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": python_path, "PYTHON": sys.executable}
    environment.pop("PRIMAD_VENV", None)
    words = [tree / "tools" / "setup", "--core"]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path) -> Path:
    """A work tree whose environment is a link to another tree's."""
    made = tmp_path / "second"
    (made / "tools").mkdir(parents=True)
    for name in ("pyproject.toml", "tools/setup", "tools/build-llama", "tools/constraints.txt"):
        shutil.copy(ROOT / name, made / name)
    other = tmp_path / "first" / ".venv" / "bin"
    other.mkdir(parents=True)
    (other / "primad").touch(mode=0o755)
    (made / ".venv").symlink_to(other.parent)
    return made


def test_a_linked_environment_is_used_unchanged(tree):
    ended = set_up(tree, f"{tree}:{tree}/solver")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(path.name for path in (tree / ".venv").iterdir()) == ["bin"]


def test_a_linked_environment_whose_sources_would_be_imported_is_refused(tree):
    ended = set_up(tree, "")
    assert ended.returncode == 2
    assert f"set PYTHONPATH={tree}:{tree}/solver" in ended.stderr


def test_a_link_that_leads_nowhere_is_no_environment(tree):
    shutil.rmtree(tree.parent / "first")
    ended = set_up(tree, f"{tree}:{tree}/solver")
    assert ended.returncode == 2
    assert "leads to no environment" in ended.stderr
