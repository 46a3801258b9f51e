"""Write ``profiles/devices`` anew from ``profiles/data_sheets.json``, by the rule of ``tools/lab/data_sheets.py``.

.venv/bin/python tools/data_sheets.py            write them
.venv/bin/python tools/data_sheets.py --check    only say whether they are current, as a test asks for it
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from primad.profiler.store import encode_profile
from tools.lab.data_sheets import SHEETS, profiles, read_sheets

DEVICES = SHEETS.parent / "devices"
MEASURED = "2026-11-28"


def main() -> int:
    """Write the files, or name those that are not what the rule gives."""
    check, stale = "--check" in sys.argv[1:], []
    for name, (device, how) in profiles(read_sheets()).items():
        path, content = DEVICES / f"{name}.json", encode_profile(device, how, MEASURED)
        if path.is_file() and path.read_bytes() == content:
            continue
        stale.append(name)
        if not check:
            path.write_bytes(content)
    for name in stale:
        print(f"{name}: {'is not what the rule gives; run tools/data_sheets.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
