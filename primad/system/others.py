"""What other programs take of this machine's processors while something is measured."""

from __future__ import annotations

import os
import sys
import time

import psutil

_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")
"""The time of guests counts as their host's already."""


class Others:
    """The processors that programs other than this one and its ended children keep busy from now on."""

    def __init__(self) -> None:
        self._others_s, self._start = _others_s(), time.monotonic()

    def cores(self) -> float:
        """How many of them, on average; 0 where the system does not say what children took (Windows)."""
        took_s = time.monotonic() - self._start
        return 0.0 if sys.platform == "win32" or took_s <= 0 else max(0.0, (_others_s() - self._others_s) / took_s)


def _others_s() -> float:
    """Seconds of processors since the system started."""
    every = psutil.cpu_times()._asdict()
    return float(sum(seconds for name, seconds in every.items() if name not in _NOT_BUSY) - sum(os.times()[:4]))
