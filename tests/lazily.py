"""Modules that take seconds to import, only where a test uses them, or once for all processes of tests that fork."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_names: set[str] = set()


def import_all() -> None:
    """Import the modules that the tests collected may use."""
    for name in _names:
        import_module(name)


class Lazily:
    """The module ``name``, imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        _names.add(name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):  # which pytest looks for in all that a test file has
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
