"""Seconds that a test saw, by the promise that they belong to.

No test judges them, for a machine may be slow or paused: ``tools/faults times`` does, on one that has nothing else to do.
"""

from __future__ import annotations

import sys

from tools.lab.forecasts import PROMISES

_noted: list[tuple[str, float]] = []


def note(promise: str, seconds: float, what: str = "") -> None:
    """Keep a figure of the test that runs. ``promise`` is one of ``tools/lab/forecasts.py``."""
    assert promise in PROMISES, promise
    sys.stdout.write(f"{promise}: {seconds:.2f} s {what}\n")  # for who runs the tests with -s or -rP
    _noted.append((promise, seconds))


def taken() -> list[tuple[str, float]]:
    """All figures since the last call."""
    found = _noted.copy()
    _noted.clear()
    return found
