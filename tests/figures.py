"""Seconds that tests measured, by the time limit that they belong to.

Tests do not judge them, since a machine may be slow or paused; ``tools/faults times`` does, on an idle one.
"""

from __future__ import annotations

import sys

from tools.lab.forecasts import PROMISES

_noted: list[tuple[str, float]] = []


def note(limit: str, seconds: float, what: str = "") -> None:
    """Record a figure of the running test. ``limit`` is one of ``tools/lab/forecasts.py``."""
    assert limit in PROMISES, limit
    sys.stdout.write(f"{limit}: {seconds:.2f} s {what}\n")  # shown with -s or -rP
    _noted.append((limit, seconds))


def take() -> list[tuple[str, float]]:
    """Return all figures since the last call."""
    found = _noted.copy()
    _noted.clear()
    return found
