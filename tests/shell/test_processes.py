"""Test processes: each test runs once, files stay whole, and a process that dies is a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tests fork on Linux alone")
KEPT = """
import pytest

@pytest.fixture(scope="session")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    yield folder
    (folder.parent / "torn-down").touch()
"""
FILE = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test_each(mine, number):
    print("printed")
    (mine / f"{os.getpid()} {__name__} {number}").touch(exist_ok=False)
    assert not (mine.parent / "torn-down").exists()
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(KEPT)
    words = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", folder, "-p", "no:cacheprovider"]
    words += ["-p", "tests.processes", "--processes", "2", "--basetemp", folder / "temporary", folder, *options]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_each_test_runs_once_and_a_file_in_one_process(tmp_path):
    for name in "abcde":
        (tmp_path / f"test_{name}.py").write_text(FILE)
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert "15 passed" in ended.stdout
    left = [path.name.split() for path in tmp_path.glob("temporary/process-?/mine0/*")]
    assert sorted((module, number) for _, module, number in left) == [(f"test_{n}", i) for n in "abcde" for i in "012"]
    assert len({(pid, module) for pid, module, _ in left}) == 5
    assert len(list(tmp_path.glob("temporary/process-?/torn-down"))) == len({pid for pid, _, _ in left}) <= 2


def test_a_failure_is_reported_with_its_output(tmp_path):
    (tmp_path / "test_a.py").write_text(FILE)
    (tmp_path / "test_b.py").write_text(FILE + "    assert number != 1\n")
    ended = run(tmp_path)
    assert ended.returncode == 1
    assert "1 failed, 5 passed" in ended.stdout
    assert ended.stdout.count("\nprinted\n") == 1


def test_a_killed_process_is_a_failure_and_the_other_continues(tmp_path):
    (tmp_path / "test_a.py").write_text(FILE + "    os.kill(os.getpid(), 9)\n")
    for name in "bc":
        (tmp_path / f"test_{name}.py").write_text(FILE)
    ended = run(tmp_path)
    assert ended.returncode == 1
    assert re.search(r"the process of tests ended \(-9\) after test_a.py::test_each\[0\]", ended.stdout)
    assert "1 failed, 6 passed" in ended.stdout
