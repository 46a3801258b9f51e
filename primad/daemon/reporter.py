"""How a daemon shows long work to its owner; the CLI has the implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

ReportLine = Callable[[str], None]
"""Tells the owner one line."""


class Reporter(Protocol):
    """Shows lines and progress."""

    def report_line(self, line: str) -> None:
        """One line for the owner."""

    def progress(self, device: str, phase: str, done: int, total: int) -> None:
        """``device`` has done ``done`` of ``total`` in ``phase`` (fetch, copy, compare: bytes; others: steps)."""

    def wait(self, words: str) -> None:
        """``words`` say what is waited for, until other ones do or all is settled."""

    def resolve(self) -> None:
        """Nothing is under way any more."""
