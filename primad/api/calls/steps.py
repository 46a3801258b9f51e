"""What all readers of answers have in common: text comes in pieces, and is read step by step. Pure."""

from __future__ import annotations

from collections.abc import Callable

from primad.api.calls.events import Call, Told


class StepReader:
    """``feed`` it the text of an answer piece by piece, then ``finish``; together that says all of it.

    A step reads from what is ``_held``, adds to texts, thoughts and calls, and says whether there is another one to take. It
    is told whether the text has ended.
    """

    def __init__(self, first: Callable[[bool], bool]) -> None:
        """``first`` is the step to begin with."""
        self._step = first
        self._held = ""
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Call] = []

    def feed(self, text: str) -> Told:
        """What ``text`` adds."""
        self._held += text
        return self._read(is_last=False)

    def finish(self) -> Told:
        """What was held back."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> Told:
        while self._step(is_last):
            pass
        if is_last:
            self._end()
        told = Told(text="".join(self._texts), thought="".join(self._thoughts), calls=tuple(self._calls))
        self._texts, self._thoughts, self._calls = [], [], []
        return told

    def _end(self) -> None:
        """No step is left to take."""
