"""Files named in docstrings and comments exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"``([\w./-]+\.(?:py|md))``")
OTHERS = {"utils/chat_template_utils.py"}
"""Files of other projects."""


def test_every_file_that_the_code_names_is_there():
    files = [
        path
        for room in ("primad", "solver", "tests", "tools", "docs", "profiles")
        for path in (ROOT / room).rglob("*.*")
    ]
    by_name: dict[str, list[Path]] = {}
    for path in files:
        by_name.setdefault(path.name, []).append(path)
    gone = []
    for path in files:
        if path.suffix != ".py" or ("solver" not in path.parts and "primad" not in path.parts):
            continue
        for name in set(NAMED.findall(path.read_text(encoding="utf-8"))) - OTHERS:
            sibling, found = path.parent / name, by_name.get(Path(name).name, [])
            named = [each for each in found if str(each).endswith(f"/{name}")]
            if not sibling.is_file() and (("/" not in name and len(named) != 1) or not named):
                gone.append(f"{path.relative_to(ROOT)} names {name}")
    assert not gone
