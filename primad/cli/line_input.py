"""Input lines: with editing and history on a terminal, plain elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from primad.cli.output import out

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

PROMPT = "> "


def is_typed() -> bool:
    """Whether input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def line_reader(home: Path) -> Callable[[], str]:
    """Reads the next input, which may have several lines; its history is kept in ``home`` if that folder exists.

    Raises ``EOFError`` at the end and ``KeyboardInterrupt`` for Ctrl-C.
    """
    if not is_typed():
        return out.input
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(history=_history(home), key_bindings=_keys(), multiline=True)
    return lambda: session.prompt(PROMPT, prompt_continuation=". ")


def _history(home: Path) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = home / "chat-history"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter, or Enter after a backslash, starts another line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
