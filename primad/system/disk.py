"""How much of a disk always stays free."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

RESERVE_BYTES: Final = 1 << 30
RESERVE_SHARE: Final = 0.02


def reserve_bytes(total_bytes: int) -> int:
    """What stays free of a disk of ``total_bytes``: a full system disk stops more than us."""
    return min(RESERVE_BYTES, int(total_bytes * RESERVE_SHARE))


def lacking_room(folder: Path, size_bytes: int) -> str:
    """In words what is free where ``folder`` is, if ``size_bytes`` do not fit; else empty. Raises ``OSError``."""
    usage = shutil.disk_usage(folder)
    reserve = reserve_bytes(usage.total)
    if usage.free - size_bytes >= reserve:
        return ""
    return f"{usage.free} bytes of disk are free, of which {reserve} stay free"
