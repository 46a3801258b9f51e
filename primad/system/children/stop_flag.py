"""End a child process from another thread."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable


class StopFlag:
    """Ends the child that is watched, now or as soon as there is one. ``end`` does it."""

    def __init__(self, end: Callable[[subprocess.Popen[bytes]], None]) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_set = False

    def set(self) -> None:
        """End the running child, and every child that starts later."""
        with self._lock:
            self._is_set = True
            if self._child is not None:
                self._end(self._child)

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        """Register ``child`` for ``set`` to end."""
        with self._lock:
            self._child = child
            if self._is_set:
                self._end(child)
