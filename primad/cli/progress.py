"""Progress for the owner of a terminal, plain lines for a log file."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from primad.settings.quantities import show_bytes

_WORDS: Final = {
    "hash": "reading layers",
    "fetch": "shipping layers",
    "copy": "copying layers",
    "compare": "comparing with the hub",
    "load": "loading windows",
    "links": "measuring links",
    "profile": "profiling",
    "profile memory": "profiling: memory",
    "profile disk": "profiling: disk",
}


class RichReporter:
    """Implements ``daemon.reporter.Reporter`` on a rich console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._told: set[tuple[str, str]] = set()

    def say(self, line: str) -> None:
        """One line for the owner."""
        self._console.print(line, markup=False)

    def progress(self, device: str, phase: str, done: int, total: int) -> None:
        """A bar a device and phase on a terminal; one line at each end of a phase elsewhere."""
        words = _WORDS.get(phase, phase)
        key = (device, phase)
        if not self._console.is_terminal:
            if done == total and key not in self._told and not phase.startswith("profile "):
                self._told.add(key)
                amount = f" ({show_bytes(total)})" if phase in ("fetch", "copy", "compare") else ""
                self._console.print(f"{device}: {words}: done{amount}", markup=False)
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(f"{device}: {words}", total=total)
        self._progress.update(self._tasks[key], completed=done, total=total)

    def settle(self) -> None:
        """Take the bars away."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._tasks.clear()
        self._told.clear()
