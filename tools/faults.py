"""Run everything that is timed, on a machine that is otherwise idle.

    tools/faults [pytest arguments]          every cell of the fault matrices, and the tables of ``docs/faults.md``
    tools/faults times [pytest arguments]    the times that primad guarantees (``tools/lab/forecasts.py``)
    tools/faults crowd [pytest arguments]    1,000 requests of clients that leave, give up, read slowly: what remains of them
    tools/faults long [pytest arguments]     a device dies at 100 to 8,000 tokens of a response: length of the pause

Arguments go to pytest, so ``-k 'decode'`` measures some cells again; the times of the others stay as they are, and so
does the time of a cell that fails. ``times`` runs tests that record how long things take, one after another, and judges
them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools.lab import group_matrix, missing  # noqa: E402
from tools.lab.figures import run_facts  # noqa: E402
from tools.lab.forecasts import judged  # noqa: E402
from tools.lab.matrix import CELLS, PAGE, Outcome, pages_seconds, with_table  # noqa: E402

MATRIX = ("tests/homelab/test_faults.py", "tests/homelab/test_group_faults.py")
TESTS = {"crowd": ("tests/e2e/test_crowd.py", "-q", "-rP"), "long": ("tests/e2e/test_long_answers.py", "-v")}
TIMED = (
    "tests/e2e/test_ctrl_c.py",
    "tests/e2e/test_recovery.py",
    "tests/e2e/test_disk_faults.py",
    "tests/e2e/test_restart.py",
    "tests/e2e/test_attacks.py",
    "tests/e2e/test_hostile_requests.py",
    "tests/shell/test_control.py",
    "tests/shell/test_floods.py",
    "tests/shell/test_doctor.py",
)


def main(arguments: list[str]) -> int:
    """Run the fault matrix, the timed tests, or the tests of a crowd or of long responses; return the exit code."""
    kind, *others = arguments or [""]
    if kind == "times":
        return times(others)
    if kind not in TESTS:
        return matrix(arguments)
    code, found = run([*TESTS[kind], "-m", "slow and matrix", *others])
    for test, name, seconds in found:
        print(f"{test}: {name.removeprefix('gap_')}: {seconds:.2f} s")
    return code


def matrix(arguments: list[str]) -> int:
    """Run the cells and write the page; return the exit code."""
    if (reason := missing()) is not None:
        print(f"faults: error: {reason}", file=sys.stderr)
        return 2
    code, found = run([*MATRIX, "-v", "-m", "slow", *arguments])
    measured = {test.partition("[")[2].removesuffix("]"): value for test, name, value in found if name == "seconds"}
    page = PAGE.read_text(encoding="utf-8")
    known = {**pages_seconds(page), **group_matrix.pages_seconds(page), **measured}
    facts = run_facts([]) if {*measured} & {cell.id for cell in group_matrix.CELLS} else None
    of = None if facts is None else f"{facts['day']}, commit {facts['commit']}, {facts['cores']} cores"
    PAGE.write_text(group_matrix.with_table(with_table(page, known), known, of), encoding="utf-8")
    lacking = [cell.id for cell in CELLS if cell.outcome is not Outcome.NONE and cell.id not in known]
    lacking += [cell.id for cell in group_matrix.CELLS if cell.id not in known]
    print(f"{PAGE.relative_to(ROOT)}: {len(measured)} cells measured" + (f", none yet: {lacking}" if lacking else ""))
    return code


def times(arguments: list[str]) -> int:
    """Run the tests that record times and judge them; return the exit code, 1 where a limit was exceeded."""
    code, found = run([*TIMED, "-q", "-m", "slow or not slow", *arguments])
    lines = judged(found)
    print("\n".join(lines))
    return code or int(any(line.startswith("BROKEN") for line in lines))


def run(arguments: list[str]) -> tuple[int, list[tuple[str, str, float]]]:
    """Run pytest: return its exit code, and the seconds that passed tests recorded, as (test, name, seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        reported = [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        code = subprocess.run([sys.executable, "-m", "pytest", *reported, *arguments], cwd=ROOT, check=False).returncode
        return code, list(noted(report)) if report.exists() else []


def noted(report: Path) -> Iterator[tuple[str, str, float]]:
    """Yield every figure in pytest's report except those of failed tests."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            continue
        for each in case.iter("property"):
            yield case.get("name", ""), each.get("name", ""), float(each.get("value", "nan"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
