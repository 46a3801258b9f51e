"""Where commands print: lines and tables for people, JSON for programs, and on standard error what is neither."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console

out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
tables = Console(highlight=False, markup=False, emoji=False)
"""For what is as wide as the terminal."""
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_json(answer: object) -> None:
    """Print ``answer`` as JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")
