"""Finds ends in a growing text. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class JsonScan:
    """Finds the end of the object or list that starts at ``at``; ``quotes`` delimit strings."""

    def __init__(self, at: int, quotes: str = '"') -> None:
        self._at, self._quotes = at, quotes
        self._depth, self._quote = 0, ""

    def end(self, text: str) -> int:
        """Return the position after the end, -1 while it is incomplete."""
        while self._at < len(text):
            char = text[self._at]
            if self._quote and char == "\\":
                if self._at + 1 == len(text):
                    return -1
                self._at += 1
            elif self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in self._quotes:
                self._quote = char
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return self._at + 1
            self._at += 1
        return -1


def certain(text: str, markers: Sequence[str]) -> int:
    """Return the length of the prefix of ``text`` that cannot belong to one of ``markers`` or to the white space before
    it."""
    earliest = len(text)
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), 0, -1):
            if text.endswith(marker[:length]):
                earliest = min(earliest, len(text) - length)
                break
    return len(text[:earliest].rstrip())
