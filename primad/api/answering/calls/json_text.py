"""Reads a JSON object that arrives in pieces: finds its certain part, its end, and its first error. Pure."""

from __future__ import annotations

import json
import math
import re
from typing import Final

MAX_DEPTH: Final = 128
MAX_SCALAR_CHARS: Final = 400
"""Limit of a number: Python does not read integers of many thousand digits."""

_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE: Final = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_HALF_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_LOW: Final = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF_LOW: Final = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")
_HIGH: Final = re.compile(r"\\u[dD][89abAB]")
_WORD: Final = re.compile(r"[-+.\w]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS: Final = ("true", "false", "null")
_VALUE: Final = '{["0'
"""How values start; 0 represents words: numbers, true, false and null."""


class JsonText:
    """Reads one JSON object from its start.

    The text is unchanged, except that control characters in strings are escaped and half a character becomes a question
    mark. The accepted part is a prefix of an object that ``json.loads`` reads; numbers and words are accepted only when
    complete.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._next = "{"
        self._is_key = self._is_in_string = False
        self.is_whole = self.is_wrong = False

    def take(self, text: str, *, is_last: bool) -> tuple[str, int]:
        """Return the certain part of ``text``, and how many characters of ``text`` it covers.

        The caller passes the rest again with more text, unless it follows the object or cannot be part of one. With
        ``is_last`` no more text follows.
        """
        taken, at = [], 0
        while not self.is_whole and at < len(text):
            piece, end = self._in_string(text, at) if self._is_in_string else self._token(text, at)
            if not piece:
                break
            taken.append(piece)
            at = end
        if is_last and not self.is_whole and not self.is_wrong:
            self.is_wrong = not self._is_in_string and not _may_begin(text[at:])
            if not self.is_wrong:
                taken.append(text[at:])
                at = len(text)
        return "".join(taken), at

    def _in_string(self, text: str, at: int) -> tuple[str, int]:
        plain = _PLAIN.match(text, at)
        if plain is not None:
            return plain[0], plain.end()
        if text[at] == '"':
            self._is_in_string = False
            self._next = ":" if self._is_key else "," + self._closers[-1]
            return '"', at + 1
        if text[at] != "\\":
            return json.dumps(text[at])[1:-1], at + 1
        escape = _ESCAPE.match(text, at)
        if escape is None:
            self.is_wrong = _HALF_ESCAPE.fullmatch(text, at) is None
            return "", at
        if _HIGH.match(text, at):
            low = _LOW.match(text, escape.end())
            if low is not None:
                return escape[0] + low[0], low.end()
            return ("", at) if _HALF_LOW.fullmatch(text, escape.end()) else ("?", escape.end())
        return "?" if _LOW.match(text, at) else escape[0], escape.end()

    def _token(self, text: str, at: int) -> tuple[str, int]:
        kind, end = text[at], at + 1
        if kind in " \t\n\r":
            return kind, end
        word = _WORD.match(text, at)
        if word is not None and word[0]:
            end = word.end()
            if end == len(text) and end - at <= MAX_SCALAR_CHARS:  # more of it may follow
                return "", at
            kind = "0" if _is_scalar(word[0]) else ""
        if not kind or kind not in self._next or len(self._closers) == MAX_DEPTH:
            self.is_wrong = True
            return "", at
        self._follow(kind)
        return text[at:end], end

    def _follow(self, kind: str) -> None:
        """Set what may follow something that starts with ``kind``."""
        match kind:
            case "{":
                self._closers.append("}")
                self._next = '"}'
            case "[":
                self._closers.append("]")
                self._next = _VALUE + "]"
            case '"':
                self._is_in_string, self._is_key = True, "0" not in self._next
            case ":":
                self._next = _VALUE
            case ",":
                self._next = '"' if self._closers[-1] == "}" else _VALUE
            case _:
                if kind != "0":
                    self._closers.pop()
                self._next = "," + self._closers[-1] if self._closers else ""
                self.is_whole = not self._closers


def _is_scalar(word: str) -> bool:
    if word in _LITERALS:
        return True
    return len(word) <= MAX_SCALAR_CHARS and _NUMBER.fullmatch(word) is not None and math.isfinite(float(word))


def _may_begin(word: str) -> bool:
    """Whether ``word`` is valid, or may become valid with more text."""
    return _is_scalar(word) or _is_scalar(word + "0") or any(literal.startswith(word) for literal in _LITERALS)
