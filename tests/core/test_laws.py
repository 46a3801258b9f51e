"""``tools/laws.py`` finds type names defined twice and imports in the wrong direction."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def broken(root: Path) -> list[str]:
    """The laws' findings in the sources under ``root``."""
    argv = [sys.executable, str(ROOT / "tools" / "laws.py"), str(root)]
    run = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (int(bool(run.stderr)), "")
    return run.stderr.splitlines()


def write(root: Path, **files: str) -> None:
    """Write source files; ``__`` in a path stands for a slash."""
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    "second",
    ["class Plan: ...", "Plan = int | str", "Plan: TypeAlias = int"],
    ids=["a class", "an alias", "an annotated alias"],
)
def test_a_type_name_that_is_defined_twice_is_reported_with_both_places(tmp_path: Path, second: str) -> None:
    write(tmp_path, primad__ring__a="class Plan: ...", solver__halda__b=f"import os\n{second}")
    assert broken(tmp_path) == ["Plan is defined more than once: primad/ring/a.py:1, solver/halda/b.py:2"]


@pytest.mark.parametrize(
    "text",
    [
        "class _Running: ...",
        "_Plan = int | str",
        "T = TypeVar('T')",
        "Kind = typing.TypeVar('Kind')",
        "LIMIT = 3",
        "Limit: int = 3",
        "plan = 3",
        "def f():\n    class Plan: ...",
    ],
)
def test_private_names_type_variables_and_constants_are_free(tmp_path: Path, text: str) -> None:
    write(tmp_path, primad__a=text, primad__b=text)
    assert broken(tmp_path) == []


def test_tools_import_nothing_of_the_tests(tmp_path: Path) -> None:
    write(tmp_path, tools__bench="def f():\n    from tests.fakes import engine", tools__lab__a="import tests.fakes")
    assert broken(tmp_path) == [
        "tools/bench.py:2: a tool imports tests.fakes",
        "tools/lab/a.py:1: a tool imports tests.fakes",
    ]


def test_tests_import_the_lab_and_the_model_maker_alone(tmp_path: Path) -> None:
    write(tmp_path, tests__a="from tools import lab, synth\nfrom tools.lab.disk import forget\nimport tools.synthetic")
    assert broken(tmp_path) == []
    write(tmp_path, tests__a="from tools import bench", tests__b="import tools.synthesis")
    what = "what both need belongs to tools/lab"
    assert broken(tmp_path) == [
        f"tests/a.py:1: a test imports tools.bench; {what}",
        f"tests/b.py:1: a test imports tools.synthesis; {what}",
    ]


def test_nothing_imports_packaging(tmp_path: Path) -> None:
    write(
        tmp_path,
        packaging__man="",
        packaging__system_files="import man",
        tests__a="from packaging.version import Version",
    )
    assert broken(tmp_path) == []
    write(tmp_path, primad__a="import man", tools__b="def f():\n    from packaging.man import page")
    assert broken(tmp_path) == [
        "primad/a.py:1: imports man of packaging/, which nothing imports",
        "tools/b.py:2: imports packaging.man of packaging/, which nothing imports",
    ]


def test_the_product_prints_and_logs_in_one_place_each(tmp_path: Path) -> None:
    write(tmp_path, primad__cli__output="out = Console()", tools__a="print(1)", primad__b="channel.print(1)")
    assert broken(tmp_path) == []
    write(tmp_path, primad__a="print(1)", solver__halda__b="import sys\ndef f():\n    sys.stderr.write('x')")
    what = "cli/output.py prints, system/terminal.py logs"
    assert broken(tmp_path) == [
        f"primad/a.py:1: calls print; {what}",
        f"solver/halda/b.py:3: calls sys.stderr.write; {what}",
    ]


def test_the_product_imports_no_tools(tmp_path: Path) -> None:
    write(tmp_path, primad__a="from tools.research.published import solve_published")
    (line,) = broken(tmp_path)
    assert line == "primad/a.py:1: what runs imports tools.research.published, which only a checkout has"
