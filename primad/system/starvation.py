"""How long a process had to wait for a processor, which other programs had: who is late because of that does not hang.

Linux says so of each thread; elsewhere it counts as never.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_MOST_TIMES: Final = 10
"""All in all a process has so many times as long as it may take; with less of a processor nothing is to be had from it."""
_PROC: Final = Path("/proc")


class OwnTime:
    """The time that process ``pid`` has had since now, without what it waited for a processor."""

    def __init__(self, pid: int, *, proc: Path = _PROC, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads, self._clock = proc / str(pid) / "task", clock
        self._waited_ns = self._waits()
        self._start = self._looked = clock()
        self._starved_s = 0.0

    def left_s(self, most_s: float) -> float:
        """What is left of ``most_s``. To be asked again and again, as often as it is to be exact.

        Its threads work for each other, so what the one takes that waited longest counts between two looks.
        """
        now, waits = self._clock(), self._waits()
        longest_ns = max((each - self._waited_ns.get(thread, 0) for thread, each in waits.items()), default=0)
        self._starved_s += min(max(0, longest_ns) / 1e9, now - self._looked)
        self._waited_ns, self._looked = waits, now
        took_s = now - self._start
        return min(most_s - (took_s - self._starved_s), _MOST_TIMES * most_s - took_s)

    def _waits(self) -> dict[str, int]:
        found = {}
        with contextlib.suppress(OSError):  # it has ended, or the system has no such files
            for thread in self._threads.iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    found[thread.name] = int((thread / "schedstat").read_text().split()[1])
        return found
