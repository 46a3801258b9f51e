"""Reads a response of gpt-oss, which consists of messages in channels: analysis, commentary and final. Pure.

A message is a header, ``<|message|>`` and its content. The header may name the channel and, with ``to=functions.NAME``,
the function that the content calls. Markers are not part of the text; unexpected text between them is. Muse writes the
same without channels: its thoughts are messages ``to=self``, and its calls are not JSON, so each call is sent whole.
"""

from __future__ import annotations

import re
from typing import Final

from primad.api.answering.calls.events import CallPart
from primad.api.answering.calls.families import parse_invoke
from primad.api.answering.calls.form import ARGUMENTS
from primad.api.answering.calls.scan import certain
from primad.api.answering.calls.steps import StepReader
from primad.api.answering.calls.values import Functions, UnfinishedCallError

_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>")
_BEGINS: Final = ("<|start|>", "<|channel|>")
_MARKS: Final = (*_ENDS, *_BEGINS)
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_TO: Final = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_HEADER: Final = re.compile(r"<\|start\|>\w*|<\|channel\|>\w*|\bto=[^\s<]+|<\|constrain\|>\w*|<\|\w+\|>")
_OBJECT: Final = re.compile(ARGUMENTS)
_HALF_OBJECT: Final = re.compile(r"(?:\{\s*)?")
_INVOKE: Final = "<atem:function_calls>"
_INVOKE_END: Final = "</atem:function_calls>"
_INVOKED: Final = re.compile(
    r"<atem:function_calls>\s*<atem:invoke(.*?)</atem:invoke>\s*</atem:function_calls>", re.DOTALL
)

MAX_HEADER_CHARS: Final = 512
"""Longer text is not a header."""
MAX_FAILED: Final = 200
"""After this many false ends no further call that is sent whole is read, which keeps reading linear."""


class HarmonyReader(StepReader):
    """Like ``Reader``. With ``keeps_thoughts`` thoughts are part of the text. With ``continues`` the final message has
    already begun."""

    def __init__(self, functions: Functions, keeps_thoughts: bool, continues: bool) -> None:
        super().__init__(self._content if continues else self._between)
        self._functions, self._keeps_thoughts = functions, keeps_thoughts
        self._channel, self._name = "final", ""
        self._is_called = False
        self._looked = self._failed = 0

    def _between(self, is_last: bool) -> bool:
        """Read between messages, and before the first, whose header the prompt may have started."""
        self._held = self._held.lstrip()
        end = next((mark for mark in _ENDS if self._held.startswith(mark)), None)
        if end is not None:
            self._held = self._held[len(end) :]
            return True
        begins = (*_BEGINS, "to=")
        if self._held.startswith(begins):
            self._step = self._header
            return True
        if not self._held or (not is_last and any(mark.startswith(self._held) for mark in (*begins, *_ENDS))):
            return False
        self._channel, self._step = "final", self._content
        return True

    def _header(self, is_last: bool) -> bool:
        near = self._held[:MAX_HEADER_CHARS]
        at = near.find(_MESSAGE)
        ends = [found for mark in _ENDS if (found := near.find(mark)) >= 0]
        if ends and (at < 0 or min(ends) < at):  # an invalid header
            self._say(_HEADER.sub("", self._held[: min(ends)]).strip())
            self._held, self._step = self._held[min(ends) :], self._between
            return True
        is_long = len(near) == MAX_HEADER_CHARS
        if at < 0 and not is_last and not is_long:
            return False
        header = near[:at] if at >= 0 else near
        self._held = self._held[at + len(_MESSAGE) if at >= 0 else len(near) :]
        if at < 0:
            self._say(_HEADER.sub("", header).lstrip())
            self._channel, self._step = "final", self._content
            return is_long
        channels, to = _CHANNEL.findall(header), _TO.findall(header)
        self._channel, self._name = channels[-1] if channels else "final", to[-1] if to else ""
        self._channel = "analysis" if self._name == "self" and not channels else self._channel
        self._is_called, self._looked = False, 0
        self._step = self._call if self._name in self._functions else self._content
        return True

    def _content(self, is_last: bool) -> bool:
        found = [at for mark in _MARKS if (at := self._held.find(mark)) >= 0]
        count = min(found) if found else len(self._held) if is_last else certain(self._held, _MARKS)
        self._say(self._held[:count].rstrip() if found else self._held[:count])
        self._held = self._held[count:]
        if found:
            self._step = self._between
        return bool(found)

    def _call(self, is_last: bool) -> bool:
        """Read a call's arguments, which may contain markers; what follows the JSON is text."""
        begun = self._held.lstrip()
        if self._is_called or _OBJECT.match(begun):
            if not self._is_called:
                self._held, self._is_called = begun, True
                self._open_call(self._name)
            self._add_arguments(is_last)
            if self._arguments.is_whole:
                self._step = self._between
            elif self._arguments.is_wrong or is_last:
                self._step = self._content
        elif begun.startswith(_INVOKE):
            self._held = begun
            return self._invoked(is_last)
        elif is_last or not (_HALF_OBJECT.fullmatch(begun) or _INVOKE.startswith(begun)):
            self._step = self._content
        return self._step != self._call

    def _invoked(self, is_last: bool) -> bool:
        """Read a call that is sent when it is complete; an argument may contain a false end."""
        while self._failed < MAX_FAILED and (at := self._held.find(_INVOKE_END, self._looked)) >= 0:
            self._looked = at + len(_INVOKE_END)
            found = _INVOKED.fullmatch(self._held, 0, self._looked)
            try:
                calls = parse_invoke(found[1], self._functions) if found else None
            except UnfinishedCallError:
                calls = None
            if calls:
                self._calls += [CallPart(name=each.name, arguments=each.arguments, is_whole=True) for each in calls]
                self._held, self._step = self._held[self._looked :], self._between
                return True
            self._failed += 1
        if is_last or self._failed == MAX_FAILED:
            self._step = self._content
        return self._step != self._call

    def _say(self, text: str) -> None:
        is_thought = self._channel == "analysis" and self._step == self._content
        (self._thoughts if is_thought and not self._keeps_thoughts else self._texts).append(text)
