"""Reads one answer as it grows: thoughts first, then text with calls in it. Pure.

What could still become a marker is held back, and so is a call until it is whole. White space around calls and thoughts
belongs to neither. What turns out to be no call is text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from primad.api.calls.choose import Thinking
from primad.api.calls.events import Call, Told
from primad.api.calls.form import ToolForm


class Reader:
    """``feed`` it the text of an answer piece by piece, then ``finish``; together that says all of it."""

    def __init__(
        self,
        form: ToolForm | None,
        thinking: Thinking | None,
        *,
        opened: bool,
        functions: Mapping[str, Mapping[str, Any] | None],
    ) -> None:
        """``form`` None: no calls are looked for. ``opened``: the prompt ended inside thoughts. ``functions``: those that
        may be called, by name, with the JSON schemas of their parameters."""
        self._form, self._thinking, self._functions = form, thinking, functions
        self._step: Callable[[bool], bool] = self._text
        if thinking is not None:
            self._step = self._thought if opened else self._begin
        self._held = ""
        self._drops_space, self._is_blank = opened, True
        self._body, self._looked = 0, 0
        self._scan: _JsonScan | None = None
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
        told = Told(text="".join(self._texts), thought="".join(self._thoughts), calls=tuple(self._calls))
        self._texts, self._thoughts, self._calls = [], [], []
        return told

    def _begin(self, is_last: bool) -> bool:
        """Whether the answer opens thoughts. Each step says whether there is another one to take."""
        assert self._thinking is not None
        begun, begin = self._held.lstrip(), self._thinking.begin
        if begun.startswith(begin):
            self._held, self._drops_space, self._step = begun[len(begin) :], True, self._thought
            return True
        if begin.startswith(begun) and not is_last:
            return False
        self._step = self._text
        return True

    def _thought(self, is_last: bool) -> bool:
        assert self._thinking is not None
        self._drop_space()
        end = self._thinking.end
        at = self._held.find(end)
        if at >= 0:
            self._thoughts.append(self._held[:at].rstrip())
            self._held, self._drops_space, self._step = self._held[at + len(end) :], True, self._text
            return True
        count = len(self._held) if is_last else _certain(self._held, (end,))
        self._thoughts.append(self._held[:count])
        self._held = self._held[count:]
        return False

    def _text(self, is_last: bool) -> bool:
        self._drop_space()
        place = self._marker()
        if place is None:
            markers = () if self._form is None else (self._form.begin, *self._form.noise)
            self._say(len(self._held) if is_last or not markers else _certain(self._held, markers))
            return False
        at, marker = place
        before = len(self._held[:at].rstrip())
        if before:
            self._say(before)
        elif marker and marker in self._form_noise():
            self._held, self._drops_space = self._held[at + len(marker) :], True
        else:
            self._body = self._looked = at + len(marker)
            self._scan, self._step = None, self._call
        return True

    def _marker(self) -> tuple[int, str] | None:
        """Where a call may begin, and the marker there."""
        if self._form is None:
            return None
        space = len(self._held) - len(self._held.lstrip())
        if not self._form.begin and self._is_blank and self._held[space : space + 1] in ("{", "["):
            return space, ""
        markers = [marker for marker in (self._form.begin, *self._form.noise) if marker]
        found = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        return min(found) if found else None

    def _form_noise(self) -> Sequence[str]:
        return () if self._form is None else self._form.noise

    def _call(self, is_last: bool) -> bool:
        assert self._form is not None
        inner, outer = self._end_by_marker(self._form.end) if self._form.end else self._end_of_json(self._form)
        if inner < 0 and not is_last:
            return False
        self._step = self._text
        calls = self._form.parse(self._held[self._body : inner], self._functions) if inner >= 0 else None
        if calls is None:
            self._say(max(outer, 1))
        else:
            self._calls += calls
            self._held, self._drops_space = self._held[outer:], True
        return True

    def _end_by_marker(self, end: str) -> tuple[int, int]:
        """Where the body and the marker behind it end; -1 and the body's beginning while they have not."""
        at = self._held.find(end, max(self._body, self._looked - len(end) + 1))
        self._looked = len(self._held)
        return (at, at + len(end)) if at >= 0 else (-1, self._body)

    def _end_of_json(self, form: ToolForm) -> tuple[int, int]:
        if self._scan is None:
            prefix = form.prefix.match(self._held, self._body)
            if prefix is None and self._held[self._body :].lstrip()[:1] not in ("{", "["):
                return -1, self._body
            self._scan = _JsonScan(self._body if prefix is None else prefix.end())
        at = self._scan.end(self._held)
        return (at, at) if at >= 0 else (-1, self._body)

    def _say(self, count: int) -> None:
        """Give ``count`` characters as text."""
        text, self._held = self._held[:count], self._held[count:]
        self._texts.append(text)
        self._is_blank = self._is_blank and not text.strip()

    def _drop_space(self) -> None:
        if self._drops_space:
            self._held = self._held.lstrip()
            self._drops_space = not self._held


class _JsonScan:
    """Finds the end of the JSON object or list that begins at ``at``, in a text that grows."""

    def __init__(self, at: int) -> None:
        self._at, self._depth, self._in_string = at, 0, False

    def end(self, text: str) -> int:
        """The place behind it, -1 while it is not whole."""
        while self._at < len(text):
            char = text[self._at]
            if self._in_string and char == "\\":
                if self._at + 1 == len(text):
                    return -1
                self._at += 1
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string and char in "{[":
                self._depth += 1
            elif not self._in_string and char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return self._at + 1
            self._at += 1
        return -1


def _certain(text: str, markers: Sequence[str]) -> int:
    """How much of ``text`` cannot belong to one of ``markers``, nor to the white space before it."""
    earliest = len(text)
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), 0, -1):
            if text.endswith(marker[:length]):
                earliest = min(earliest, len(text) - length)
                break
    return len(text[:earliest].rstrip())
