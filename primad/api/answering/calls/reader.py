"""Reads a growing response: thoughts first, then text with calls in it. Pure.

Text that could still become a marker is held back, and so is a call until the JSON of its arguments starts after its
name. From then on the call streams and cannot be taken back: invalid JSON becomes text, and so does anything that does
not close the call. A call in another format is held back until it is complete. White space around calls and thoughts is
dropped. A false call is text, and so are markers around calls without a call, unless they are control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from primad.api.answering.calls.choose import Thinking
from primad.api.answering.calls.events import CallPart
from primad.api.answering.calls.form import Markers, ToolForm
from primad.api.answering.calls.scan import JsonScan, certain
from primad.api.answering.calls.steps import StepReader
from primad.api.answering.calls.values import UnfinishedCallError

MAX_FAILED: Final = 200
"""After this many false starts or ends of calls the rest of a response is text, which keeps reading linear."""
FAILED_CHARS: Final = 4096
"""A false start in a longer text counts as several, since resuming after it takes longer."""

MAX_PREFIX_CHARS: Final = 256
"""Limit of the text between a marker and the JSON after it."""

_CONTROL: Final = ("|", "｜")
"""Markers that contain one of these are control tokens, which are never text."""

_WORDS: Final = re.compile(r"\w +\w")
_IN_OBJECT: Final = re.compile(
    r"""\s*(?:,\s*"(?:[^"\\]|\\.)*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[-+.\w]+)\s*)*\}""", re.DOTALL
)
_IN_LIST: Final = re.compile(r"\s*[,\]]")
_NEXT_LINE: Final = re.compile(r"\s*\n\s*(?=\{)")


class Reader(StepReader):
    """Pass the text of a response to ``feed`` piece by piece, then call ``finish``; together they return all of it."""

    def __init__(
        self,
        form: ToolForm | None,
        thinking: Thinking | None,
        *,
        opened: bool,
        functions: Mapping[str, Mapping[str, Any] | None],
    ) -> None:
        """``form`` None: no calls are detected. ``opened``: the prompt ended inside thoughts. ``functions``: those that
        may be called, by name, with the JSON schemas of their parameters."""
        super().__init__(self._text if thinking is None else self._begin)
        self._form, self._thinking, self._functions = form, thinking, functions
        self._is_opened = opened
        self._drops_space, self._is_blank = opened, True
        self._dropped = self._noisy = ""
        self._is_behind_call, self._failed = False, 0
        self._markers: Markers | None = None
        self._body, self._looked = 0, 0
        self._is_called = False
        self._closing: list[re.Pattern[str]] = []
        self._scan: JsonScan | None = None

    def _end(self) -> None:
        if self._noisy.strip():
            self._texts.append(self._noisy.lstrip() if self._is_blank else self._noisy)

    def _begin(self, is_last: bool) -> bool:
        """Check whether the response opens thoughts; some models do it repeatedly. Each step returns whether another
        step follows."""
        assert self._thinking is not None
        begun, begin = self._held.lstrip(), self._thinking.begin
        end = self._thinking.end
        if begun.startswith((begin, end)):
            is_open = begun.startswith(begin)
            self._held, self._drops_space = begun[len(begin if is_open else end) :], True
            self._step = self._thought if is_open else self._text
            return True
        if (begin.startswith(begun) or end.startswith(begun)) and not is_last:
            return False
        self._step = self._thought if self._is_opened else self._text
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
        marks = [each for each in (self._form.markers if self._form else ()) if each.begin and each.end]
        found = [(at, each) for each in marks if (at := self._held.find(each.begin)) >= 0]
        at, markers = min(found, key=lambda each: each[0], default=(0, None))
        space = certain(self._held, (end, *(each.begin for each in marks))) if not is_last else len(self._held)
        self._think(len(self._held[:at].rstrip()) if markers else space)
        if markers is None:
            return False
        begin = len(self._held) - len(self._held.lstrip())
        is_called = self._is_called_in_thoughts(begin, markers)
        if is_called and is_last:  # some models call without ending their thoughts
            self._step = self._text
        elif is_last or is_called is False:
            self._think(len(self._held) if is_last else begin + len(markers.begin))
            self._looked = 0
        return is_called is False or self._step == self._text

    def _think(self, count: int) -> None:
        self._thoughts.append(self._held[:count])
        self._held = self._held[count:]

    def _is_called_in_thoughts(self, begin: int, markers: Markers) -> bool | None:
        """Whether the marker at ``begin`` starts a call, None while undecided. A call names its function immediately;
        other words are thoughts about calls. Only the end of the response decides whether a call in thoughts is made.
        """
        assert self._form is not None
        body = begin + len(markers.begin)
        near = self._held[body : body + MAX_PREFIX_CHARS]
        named = min((at for name in self._functions if (at := near.find(name)) >= 0), default=len(near))
        if named == MAX_PREFIX_CHARS or _WORDS.search(near[: named + 1]):
            return False
        self._looked = max(self._looked, body)
        while (inner := self._held.find(markers.end, self._looked)) >= 0:
            try:
                self._is_called = (
                    self._is_called or self._form.parse(self._held[body:inner], self._functions) is not None
                )
                return self._is_called
            except UnfinishedCallError:
                self._looked = inner + len(markers.end)
                if self._fails():
                    self._form = None
                    return False
        return None

    def _text(self, is_last: bool) -> bool:
        self._drop_space()
        begun = self._begun()
        noise = [(at, mark) for mark in self._noise if (at := self._held.find(mark)) >= 0]
        if noise and (begun is None or min(noise)[0] < begun[0]):
            at, mark = min(noise)
            self._say(len(self._held[:at].rstrip()))
            self._drop(
                self._held.index(mark), len(mark), is_noise=not self._is_behind_call and not self._is_dropped(mark)
            )
            if self._thinking is not None and mark == self._thinking.begin:
                self._step = self._thought
            return True
        if begun is None:
            marks = (*self._begins, *self._noise)
            self._say(len(self._held) if is_last or not marks else certain(self._held, marks))
            return False
        at, self._markers = begun
        self._say(len(self._held[:at].rstrip()))
        self._body = self._looked = len(self._held) - len(self._held.lstrip()) + len(self._markers.begin)
        self._scan, self._step = None, self._call
        return True

    @property
    def _begins(self) -> Sequence[str]:
        return () if self._form is None else [markers.begin for markers in self._form.markers if markers.begin]

    @property
    def _noise(self) -> Sequence[str]:
        """Markers that are not text: those around calls and responses, and those of thoughts that are control tokens."""
        thoughts = () if self._thinking is None else (self._thinking.begin, self._thinking.end)
        marks = tuple(mark for mark in thoughts if _is_control(mark))
        return marks if self._form is None else (*marks, *self._form.noise, *self._form.frames)

    def _is_dropped(self, mark: str) -> bool:
        """Whether ``mark`` is never text."""
        return _is_control(mark) or (self._form is not None and mark in self._form.frames)

    def _begun(self) -> tuple[int, Markers] | None:
        """Return where a call may start, and its markers."""
        space = len(self._held) - len(self._held.lstrip())
        found = []
        for markers in () if self._form is None else self._form.markers:
            at = self._held.find(markers.begin) if markers.begin else space
            if at >= 0 and (markers.begin or (self._is_blank and self._held[space : space + 1] in ("{", "["))):
                found.append((at, markers))
        return min(found, key=lambda each: each[0]) if found else None

    def _call(self, is_last: bool) -> bool:
        assert self._form is not None
        assert self._markers is not None
        head = self._opens(self._body - len(self._markers.begin), self._body)
        if head is not None:
            end, opened = self._markers.end, head[0].lstrip()[:1]
            self._closing = [*([_IN_OBJECT] if opened in ("{", "[") else []), *([_IN_LIST] if opened == "[" else [])]
            self._closing += [re.compile(rf"\s*(?:```\s*)?{re.escape(end)}")] if end else []
            return True
        inner, outer = self._end_by_marker(self._markers.end) if self._markers.end else self._end_of_json(self._markers)
        if inner < 0 and not is_last:
            return False
        try:
            calls = self._form.parse(self._held[self._body : inner], self._functions) if inner >= 0 else None
        except UnfinishedCallError:
            self._looked, is_enough = outer, self._fails()
            if self._markers.end and not is_enough:
                return True
            calls = None
        self._step = self._text
        if calls is None:
            self._form = None if self._fails() else self._form
            self._say(max(outer, 1))
        else:
            self._calls += [CallPart(name=each.name, arguments=each.arguments, is_whole=True) for each in calls]
            begin = self._body - len(self._markers.begin)
            self._drop(begin, outer - begin, is_noise=False)
        return True

    def _opens(self, begin: int, body: int) -> re.Match[str] | None:
        """Return the head at ``body`` of a call that can stream, if there is one. The call has then begun, and is
        removed from ``begin`` on."""
        assert self._form is not None
        head = self._form.head and self._form.head.match(self._held, body, body + MAX_PREFIX_CHARS)
        if not head or (name := head[head.lastindex or 0]) not in self._functions:
            return None
        self._drop(begin, head.end() - begin, is_noise=False)
        self._open_call(name)
        self._step = self._in_arguments
        return head

    def _in_arguments(self, is_last: bool) -> bool:
        self._add_arguments(is_last)
        if self._arguments.is_whole:
            self._step = self._behind_arguments
        elif self._arguments.is_wrong or is_last:
            self._end_call()
        return self._step != self._in_arguments

    def _behind_arguments(self, is_last: bool) -> bool:
        """Read the text that closes a call; in a list another call may follow."""
        assert self._markers is not None
        while self._closing:
            found = self._closing[0].match(self._held, 0, MAX_PREFIX_CHARS)
            if found is None and self._markers.end:  # some models forget the brace before it
                found = self._closing[-1].match(self._held, 0, MAX_PREFIX_CHARS)
                self._closing = self._closing[-1:] if found else self._closing
            again = _NEXT_LINE.match(self._held, 0, MAX_PREFIX_CHARS) if found is None else None
            if (
                again is not None and len(self._closing) == 1 and self._markers.end
            ):  # some models write one object after the other
                self._held, self._step = self._held[again.end() - 1 :], self._next_in_list
                return True
            if found is None:
                if not is_last and len(self._held) < MAX_PREFIX_CHARS:
                    return False
                break
            if found[0].endswith(","):
                self._held, self._step = self._held[found.end() - 1 :], self._next_in_list
                return True
            self._held = self._held[found.end() :]
            del self._closing[0]
        self._end_call()
        return True

    def _next_in_list(self, is_last: bool) -> bool:
        if self._opens(0, 1):
            self._closing.insert(0, _IN_OBJECT)
            return True
        if not is_last and len(self._held) < MAX_PREFIX_CHARS:
            return False
        self._end_call()
        return True

    def _end_call(self) -> None:
        """End the call: text or another call follows, only text if this call was not closed."""
        is_closed = self._arguments.is_whole and not self._closing
        self._step, self._is_blank = self._text, self._is_blank and is_closed

    def _fails(self) -> bool:
        """Note that the text was not a call; return whether there were too many such texts."""
        self._failed += 1 + len(self._held) // FAILED_CHARS
        return self._failed >= MAX_FAILED

    def _end_by_marker(self, end: str) -> tuple[int, int]:
        """Return where the body ends and where the marker after it ends; -1 and the body's start while unknown."""
        at = self._held.find(end, self._looked)
        if at < 0:
            self._looked = max(self._looked, len(self._held) - len(end) + 1)
        return (at, at + len(end)) if at >= 0 else (-1, self._body)

    def _end_of_json(self, markers: Markers) -> tuple[int, int]:
        if self._scan is None:
            prefix = markers.prefix.match(self._held, self._body, self._body + MAX_PREFIX_CHARS)
            if prefix is None:
                return (-1 if len(self._held) < self._body + MAX_PREFIX_CHARS else self._body), self._body
            self._scan = JsonScan(prefix.end(), markers.quotes)
        at = self._scan.end(self._held)
        return (at, at) if at >= 0 else (-1, self._body)

    def _say(self, count: int) -> None:
        """Emit ``count`` characters as text, after any removed ones."""
        text, self._held = self._held[:count], self._held[count:]
        if text:
            text = (self._noisy.lstrip() if self._is_blank else self._noisy) + text
            self._texts.append(text)
            self._is_blank, self._is_behind_call = self._is_blank and not text.strip(), False
            self._dropped = self._noisy = ""

    def _drop(self, space: int, count: int, *, is_noise: bool) -> None:
        """Remove ``count`` characters after ``space`` white-space characters, and the white space after them.
        ``is_noise``: they are text unless a call follows."""
        self._dropped += self._held[:space]
        self._noisy = self._noisy + self._held[: space + count] if is_noise else self._dropped
        self._is_behind_call = not is_noise
        self._held, self._drops_space = self._held[space + count :], True

    def _drop_space(self) -> None:
        if self._drops_space:
            rest = self._held.lstrip()
            space = self._held[: len(self._held) - len(rest)]
            self._dropped, self._noisy = self._dropped + space, self._noisy + space
            self._held, self._drops_space = rest, not rest


def _is_control(mark: str) -> bool:
    return any(char in mark for char in _CONTROL)
