"""The paper's fleet under our plan, beside what was published: the tables of profiles/PAPER.md.

.venv/bin/python tools/paper_table.py            print
.venv/bin/python tools/paper_table.py --write    write profiles/PAPER.md
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from primad.profiler.fleets import read_fleet
from tools.lab.pages import between
from tools.lab.paper import FLEET, MODELS, PAGE, row, tables


def with_tables(page: str, found: Mapping[str, str]) -> str:
    """``page`` with each table between its marks replaced."""
    for name, table in found.items():
        page = between(page, f"<!-- {name} -->", f"<!-- end of {name} -->", f"\n{table}\n")
    return page


def main() -> int:
    """Print the tables, or write them into the page."""
    fleet = read_fleet(FLEET)
    found = tables([row(name, fleet) for name in MODELS])
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    else:
        print("\n\n".join(found.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
