"""The membership core, as those see it who work for it."""

from __future__ import annotations

from typing import Protocol

from primad.membership import types


class Core(Protocol):
    """Hears what happens, and decides what is done about it elsewhere."""

    def post(self, event: types.Event) -> None:
        """Something happened."""

    def describe(self, what: str) -> None:
        """What goes on, for the health check while nothing is served."""
