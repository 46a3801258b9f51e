"""The licences of primad's dependencies are listed, and the list is current."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_package_that_is_asked_for_is_listed_with_its_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in ("hub", "plot") for each in project["optional-dependencies"][extra]),
    ]
    page = (ROOT / "docs" / "reference" / "licences.md").read_text()
    rows = re.findall(r"^\| \[([\w.-]+)\]\(https?://\S+\) \| (\S.*?) \|", page, re.MULTILINE)
    listed = {re.sub(r"[-_.]+", "-", name).lower() for name, _ in rows}
    asked = {re.sub(r"[-_.]+", "-", re.split(r"[\[<>=]", each)[0]).lower() for each in wanted}
    assert asked <= listed


def test_the_list_is_current() -> None:
    if find_spec("llama_cpp") is None or find_spec("huggingface_hub") is None:
        pytest.skip("not all that is listed is installed")
    argv = [sys.executable, str(ROOT / "packaging" / "licences.py"), "--check"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")
