"""Seconds that tests measured, by the promise that they belong to.

Tests do not judge them, since a machine may be slow or paused; ``tools/faults times`` does, on an idle one.
"""

from __future__ import annotations

import sys

from tools.lab.forecasts import PROMISES

_noted: list[tuple[str, float]] = []


def note(promise: str, seconds: float, what: str = "") -> None:
    """Record a figure of the running test. ``promise`` is one of ``tools/lab/forecasts.py``."""
    assert promise in PROMISES, promise
    sys.stdout.write(f"{promise}: {seconds:.2f} s {what}\n")  # shown with -s or -rP
    _noted.append((promise, seconds))


def taken() -> list[tuple[str, float]]:
    """Return all figures since the last call."""
    found = _noted.copy()
    _noted.clear()
    return found
