"""Make every cell of the fault matrix and write the table of ``docs/faults.md`` with the times measured.

Arguments go to pytest, so that ``-k 'decode'`` makes some cells anew; the times of the others stay as they are, and
so does that of a cell that fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools.lab import missing  # noqa: E402
from tools.lab.matrix import CELLS, PAGE, Outcome, pages_seconds, with_table  # noqa: E402

TESTS = "tests/homelab/test_faults.py"


def main(arguments: list[str]) -> int:
    """Run the tests and write the page; the exit code."""
    if (reason := missing()) is not None:
        print(f"faults: error: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        told = [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        command = [sys.executable, "-m", "pytest", TESTS, "-v", "-m", "slow", *told, *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        measured = seconds_of(report) if report.exists() else {}
    page = PAGE.read_text(encoding="utf-8")
    known = pages_seconds(page) | measured
    PAGE.write_text(with_table(page, known), encoding="utf-8")
    lacking = [cell.id for cell in CELLS if cell.outcome is not Outcome.NONE and cell.id not in known]
    print(f"{PAGE.relative_to(ROOT)}: {len(measured)} cells measured" + (f", none yet: {lacking}" if lacking else ""))
    return code


def seconds_of(report: Path) -> dict[str, float]:
    """The time of every cell that passed, by its id, from pytest's report."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("name", "").partition("[")[2].removesuffix("]")
        for note in case.iter("property"):
            if note.get("name") == "seconds" and case.find("failure") is None:
                found[name] = float(note.get("value", ""))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
