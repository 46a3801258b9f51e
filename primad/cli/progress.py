"""Progress for the owner of a terminal, plain lines for a log file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

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


class _Share(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.percentage:>3.0f}%")


class _Time(TimeRemainingColumn):
    """Remaining time, or elapsed time if the total is unknown."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text(str(timedelta(seconds=int(task.elapsed or 0))))


class RichReporter:
    """Implements ``daemon.reporter.Reporter`` on a rich console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._reported: set[tuple[str, str]] = set()
        self._waited: TaskID | None = None

    def report_line(self, line: str) -> None:
        """Print one line for the owner."""
        self._console.print(line.replace("\n", " "), markup=False)

    def progress(self, device: str, phase: str, done: int, total: int) -> None:
        """On a terminal a bar per device and phase; elsewhere a line at each end of a phase."""
        words = _WORDS.get(phase, phase)
        key = (device, phase)
        if not self._console.is_terminal:
            if done == total and key not in self._reported and not phase.startswith("profile "):
                self._reported.add(key)
                amount = f" ({show_bytes(total)})" if phase in ("fetch", "copy", "compare") else ""
                self._console.print(f"{device}: {words}: done{amount}", markup=False)
            return
        progress = self._bars()
        if key not in self._tasks:
            self._tasks[key] = progress.add_task(f"{device}: {words}", total=total)
        progress.update(self._tasks[key], completed=done, total=total)

    @contextlib.contextmanager
    def waiting(self, words: str) -> Iterator[Callable[[str], None]]:
        """Show ``words``, which may change, and the elapsed time while this context is active; only on a terminal."""
        if not self._console.is_terminal:
            yield lambda words: None
            return
        bars = self._bars()
        task = bars.add_task(words, total=None)
        try:
            yield lambda words: bars.update(task, description=words, refresh=True)
        finally:
            bars.remove_task(task)
            if bars is self._progress and not bars.tasks:
                self.resolve()

    def _bars(self) -> Progress:
        if self._progress is None:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Share(), _Time())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.start()
        return self._progress

    def wait(self, words: str) -> None:
        """Show ``words`` until others follow or the bars are removed."""
        if not self._console.is_terminal:
            return
        bars = self._bars()
        if self._waited is not None:
            bars.remove_task(self._waited)
        self._waited = bars.add_task(words, total=None)

    def resolve(self) -> None:
        """Remove the bars."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._waited = None
        self._tasks.clear()
        self._reported.clear()
