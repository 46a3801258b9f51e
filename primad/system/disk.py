"""How much of a disk always stays free."""

from __future__ import annotations

from typing import Final

RESERVE_BYTES: Final = 1 << 30
RESERVE_SHARE: Final = 0.02


def reserve_bytes(total_bytes: int) -> int:
    """What stays free of a disk of ``total_bytes``: a full system disk stops more than us."""
    return min(RESERVE_BYTES, int(total_bytes * RESERVE_SHARE))
