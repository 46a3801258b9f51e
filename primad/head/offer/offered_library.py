"""The library of a head, read again on demand, so that new files are offered and vanished ones are not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Final

from primad.errors import PrimadError
from primad.library.library import Library, LibraryModel

FRESH_S: Final = 2.0
"""A list is used for this long before the library is read again: clients ask in bursts."""


class OfferedLibrary:
    """Lists what ``read`` finds, which takes a moment. ``report_line`` gets every problem, once."""

    def __init__(
        self, read: Callable[[], Library], report_line: Callable[[str], None], *, fresh_s: float = FRESH_S
    ) -> None:
        self._read, self._report_line, self._fresh_s = read, report_line, fresh_s
        self.found = Library((), ())
        self._changed_s: Mapping[str, int] = {}
        self._read_s: float | None = None
        self._reading = asyncio.Lock()
        self._reported: set[str] = set()

    def created(self, model: LibraryModel) -> int:
        """Return when the model's file was written, in Unix seconds; 0 if unknown."""
        return self._changed_s.get(model.name, 0)

    async def look(self, *, again: bool = False) -> Library:
        """Return the current library. With ``again`` it is read even if the last list is fresh; calls with ``again``
        that arrive during a reading share the next one."""
        asked_s = time.monotonic()
        async with self._reading:
            fresh_since_s = asked_s if again else time.monotonic() - self._fresh_s
            if self._read_s is not None and fresh_since_s < self._read_s:
                return self.found
            began_s = time.monotonic()
            try:
                await asyncio.to_thread(self.read)
            except PrimadError as exc:  # a wrong line in models.toml: the last list stays valid
                self._report(str(exc))
                self._read_s = began_s
        for each in self.found.problems:
            self._report(each.line)
        for model in self.found.models:
            if model.problem:
                self._report(f"{model.name} cannot be used: {model.problem}")
        return self.found

    def _report(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            self._report_line(line)

    def read(self) -> Library:
        """Read the library. Raises ``PrimadError`` for wrong settings."""
        began_s, library = time.monotonic(), self._read()
        changed = {}
        for model in library.models:
            with contextlib.suppress(OSError):
                changed[model.name] = int(model.files[0].stat().st_mtime)
        self.found, self._changed_s, self._read_s = library, changed, began_s
        return library
