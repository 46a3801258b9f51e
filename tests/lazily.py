"""Import slow modules on first use, or once before the test processes fork."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_names: set[str] = set()


def import_all() -> None:
    """Import the modules that the collected tests may use."""
    for name in _names:
        import_module(name)


class Lazily:
    """The module ``name``, imported on first attribute access."""

    def __init__(self, name: str) -> None:
        self._name = name
        _names.add(name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):  # pytest looks for these in every object of a test file
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
