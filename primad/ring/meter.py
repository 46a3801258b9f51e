"""What a ring process counts of its own work."""

from __future__ import annotations

from collections import deque
from typing import Final

import psutil

from primad.ring.messages import Status

HOPS_KEPT: Final = 4096


class Meter:
    """What ``Status`` reports."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        self.compute_s = 0.0
        self.hop_s: deque[float] = deque(maxlen=HOPS_KEPT)

    def status(self, refused: int) -> Status:
        """The figures until now."""
        memory = psutil.Process().memory_info()
        return Status(
            steps=self.steps,
            rows=self.rows,
            compute_s=self.compute_s,
            hop_s=list(self.hop_s),
            rss_bytes=memory.rss,
            private_bytes=memory.rss - getattr(memory, "shared", 0),
            refused=refused,
        )
