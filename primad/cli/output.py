"""Printing: lines and tables for people, JSON for programs, and everything else on standard error.

Nothing else in primad prints (``tools/laws.py``), so that no text of a file or a device reaches the terminal unescaped.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from primad.errors import Stopped
from primad.system.terminal import safe, safe_json


class _SafeConsole(Console):
    """A console whose only terminal codes are rich's own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(safe(segment.text), segment.style)


out = _SafeConsole(highlight=False, soft_wrap=True, markup=False, emoji=False)
tables = _SafeConsole(highlight=False, markup=False, emoji=False)
"""For output as wide as the terminal."""
err = _SafeConsole(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_json(answer: object) -> None:
    """Print ``answer`` as JSON."""
    write_json(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")


def write_json(text: str) -> None:
    """Write the JSON ``text`` so that programs can read it and it cannot control the terminal."""
    sys.stdout.write(safe_json(text))


@contextlib.contextmanager
def daemon_command() -> Iterator[None]:
    """Wrap a command that runs a daemon: Ctrl-C ends it normally, even before the daemon's loop runs."""
    try:
        yield
    except KeyboardInterrupt as exc:
        raise Stopped from exc
