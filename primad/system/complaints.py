"""Rate-limited log lines about faults of peers, with a count, so that no peer can fill the disk with them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 1.0


class Complaints:
    """Lets one warning through to ``log`` every ``every_s``; ``clock`` gives seconds on any scale."""

    def __init__(
        self, log: logging.Logger, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self._reported_s = -math.inf
        self._count = 0

    def add(self, what: str, why: object) -> None:
        """Log that ``what`` happened because of ``why``, unless a line was logged within the last ``every_s``."""
        self._count += 1
        now = self._clock()
        if now - self._reported_s >= self._every_s:
            self._reported_s = now
            self._log.warning("%s (%d so far): %s", what, self._count, why)
