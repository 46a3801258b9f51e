"""Log lines about the faults of others: one now and then, with a count, so that no peer can fill a disk with them."""

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
        """``what`` happened because of ``why``, said unless something was said a moment ago."""
        self._count += 1
        now = self._clock()
        if now - self._reported_s >= self._every_s:
            self._reported_s = now
            self._log.warning("%s (%d so far): %s", what, self._count, why)
