"""Base of all readers of responses: text arrives in pieces and is read in steps. Pure."""

from __future__ import annotations

from collections.abc import Callable

from primad.api.answering.calls.events import CallPart, TextPiece
from primad.api.answering.calls.json_text import JsonText


class StepReader:
    """Pass the text of a response to ``feed`` piece by piece, then call ``finish``; together they return all of it.

    A step reads from ``_held``, adds to texts, thoughts and calls, and returns whether there is another step. Its
    argument is whether the text has ended.
    """

    def __init__(self, first: Callable[[bool], bool]) -> None:
        """``first`` is the first step."""
        self._step = first
        self._held = ""
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[CallPart] = []
        self._arguments = JsonText()

    def feed(self, text: str) -> TextPiece:
        """Return the events of ``text``."""
        self._held += text
        return self._read(is_last=False)

    def finish(self) -> TextPiece:
        """Return the events of the text that was held back."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> TextPiece:
        while self._step(is_last):
            pass
        if is_last:
            self._end()
        piece = TextPiece(text="".join(self._texts), thought="".join(self._thoughts), calls=tuple(self._calls))
        self._texts, self._thoughts, self._calls = [], [], []
        return piece

    def _end(self) -> None:
        """End reading: there are no more steps."""

    def _open_call(self, name: str) -> None:
        """Start a call whose arguments begin with the held text."""
        self._calls.append(CallPart(name=name, arguments="", is_whole=False))
        self._arguments = JsonText()

    def _add_arguments(self, is_last: bool) -> None:
        """Move the certain part of the arguments from the held text to the call."""
        added, count = self._arguments.take(self._held, is_last=is_last)
        self._held = self._held[count:]
        if added:
            begun = self._calls.pop() if self._calls else CallPart(name=None, arguments="", is_whole=False)
            is_whole = self._arguments.is_whole
            self._calls.append(CallPart(name=begun.name, arguments=begun.arguments + added, is_whole=is_whole))
