"""Reads a response of Functionary 3.2, which consists of messages to recipients: all, or a function. Pure.

A message is ``>>>``, its recipient, a newline and its content. The prompt ends with the first ``>>>``. Another ``>>>``
without a recipient is text, such as Python's prompt.
"""

from __future__ import annotations

import re
from typing import Final

from primad.api.answering.calls.form import ARGUMENTS
from primad.api.answering.calls.scan import certain
from primad.api.answering.calls.steps import StepReader
from primad.api.answering.calls.values import Functions

_MARK: Final = ">>>"
_ALL: Final = "all"
_OBJECT: Final = re.compile(ARGUMENTS)
_HALF_OBJECT: Final = re.compile(r"\s*(?:\{\s*)?")


class RecipientReader(StepReader):
    """Like ``Reader``, for a model without thoughts. With ``continues`` a text has already begun."""

    def __init__(self, functions: Functions, keeps_thoughts: bool, continues: bool) -> None:
        super().__init__(self._content if continues else self._begin)
        self._names = {f"{name}\n": name for name in (*functions, _ALL)}
        self._is_called = False

    def _begin(self, is_last: bool) -> bool:
        begun = self._held.lstrip()
        if _MARK.startswith(begun) and not is_last:
            return False
        self._held, self._step = begun if begun.startswith(_MARK) else _MARK + self._held, self._recipient
        return True

    def _recipient(self, is_last: bool) -> bool:
        behind = self._held[len(_MARK) :]
        name = next((line for line in self._names if behind.startswith(line)), None)
        if name is None and not is_last and any(line.startswith(behind) for line in self._names):
            return False
        if name is None:
            self._say(len(_MARK))
            self._step = self._content
            return True
        self._held, self._is_called = behind[len(name) :], False
        self._step = self._content if self._names[name] == _ALL else self._call
        self._name = self._names[name]
        return True

    def _content(self, is_last: bool) -> bool:
        at = self._held.find(_MARK)
        self._say(at if at >= 0 else len(self._held) if is_last else certain(self._held, (_MARK,)))
        if at >= 0:
            self._step = self._recipient
        return at >= 0

    def _call(self, is_last: bool) -> bool:
        if self._is_called or _OBJECT.match(self._held):
            if not self._is_called:
                self._held, self._is_called = self._held.lstrip(), True
                self._open_call(self._name)
            self._add_arguments(is_last)
            if self._arguments.is_whole or self._arguments.is_wrong or is_last:
                self._step = self._behind if self._arguments.is_whole else self._content
        elif is_last or not _HALF_OBJECT.fullmatch(self._held):
            self._held, self._step = f"{self._name}\n{self._held}", self._content
        return self._step != self._call

    def _behind(self, is_last: bool) -> bool:
        self._held = self._held.lstrip()
        self._step = self._content if self._held else self._behind
        return bool(self._held)

    def _say(self, count: int) -> None:
        self._texts.append(self._held[:count])
        self._held = self._held[count:]
