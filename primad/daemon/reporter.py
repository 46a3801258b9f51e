"""How a daemon shows long work to its owner; the CLI implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

ReportLine = Callable[[str], None]
"""Shows the owner one line."""


class Reporter(Protocol):
    """Shows lines and progress."""

    def report_line(self, line: str) -> None:
        """Show one line."""

    def progress(self, device: str, phase: str, done: int, total: int) -> None:
        """``device`` has done ``done`` of ``total`` in ``phase`` (fetch, copy, compare: bytes; others: steps)."""

    def wait(self, words: str) -> None:
        """Show ``words`` about what is waited for, until other words replace them or ``resolve`` is called."""

    def resolve(self) -> None:
        """Clear progress and waiting lines: no work is under way."""
