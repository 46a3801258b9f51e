"""Where commands print: lines and tables for people, JSON for programs, and on standard error what is neither."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import msgspec
from rich.console import Console

from primad.errors import Stopped

out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
tables = Console(highlight=False, markup=False, emoji=False)
"""For what is as wide as the terminal."""
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_json(answer: object) -> None:
    """Print ``answer`` as JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")


@contextlib.contextmanager
def daemon_command() -> Iterator[None]:
    """A command that runs a daemon: Ctrl-C is the end that its owner meant, also before the daemon's own loop runs."""
    try:
        yield
    except KeyboardInterrupt as exc:
        raise Stopped from exc
