"""Patterns without look-ahead, which llguidance cannot follow. Pure.

A look-ahead at the beginning is one more pattern that a text has to fit. One that forbids is, where it is simple enough,
a pattern of what is left.
"""

from __future__ import annotations

import re
from typing import Final

_ONE: Final = r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\(?:[dDsSwW]|[^\w\s])|[^\\\[\](){}|*+?^$]"
_IS_ONE: Final = re.compile(_ONE)
_ALL_OF: Final = re.compile(rf"({_ONE})([*+])\$")
_SOMEWHERE: Final = re.compile(rf"(?:\.|\[\\s\\S\])\*({_ONE})(\$?)")
_LITERAL: Final = re.compile(r"(?:[\w -]|\\[^\w\s])+")
_LOOKS: Final = ("(?=", "(?!")
_ANYWHERE: Final = re.compile(r"(?<!\\)\(\?(?:[=!]|<[=!])")
MAX_LITERAL: Final = 32


def without_look_ahead(pattern: str) -> list[str] | None:
    """Patterns that a text fits together where it fits ``pattern``; None where it has no look-ahead, or one that cannot be
    said otherwise."""
    if not pattern.startswith("^") or not pattern[1:].startswith(_LOOKS):
        return None
    rest, found = pattern[1:], []
    while rest.startswith(_LOOKS):
        end = _end_of_group(rest)
        inner = rest[3:end].removeprefix("^")
        wanted = f"^(?:{inner})" if rest.startswith("(?=") else _anything_but(inner)
        if end < 0 or wanted is None:
            return None
        found.append(wanted)
        rest = rest[end + 1 :]
    found = [f"^{rest}", *found]
    return None if any(_ANYWHERE.search(each) for each in found) or _top_level_or(rest) else found


def _anything_but(inner: str) -> str | None:
    """A pattern of all texts that do not begin with what fits ``inner``."""
    if inner == "$":
        return r"[\s\S]"
    if inner.startswith("(?:") and _end_of_group(inner) == len(inner) - 1:
        inner = inner[3:-1]
    whole = _ALL_OF.fullmatch(inner)
    if whole:
        other = _complement(whole[1])
        return other if whole[2] == "*" else f"^$|{other}"
    somewhere = _SOMEWHERE.fullmatch(inner)
    if somewhere:
        other = _complement(somewhere[1])
        return f"^$|{other}$" if somewhere[2] else f"^{other}*$"
    if _IS_ONE.fullmatch(inner):
        return f"^$|^{_complement(inner)}"
    if _LITERAL.fullmatch(inner) and len(inner) <= MAX_LITERAL:
        chars = re.findall(r"\\?.", inner)
        begun = ["".join(chars[:count]) for count in range(len(chars))]
        return "|".join(f"^{text}$|^{text}{_complement(char)}" for text, char in zip(begun, chars, strict=True))
    return None


def _complement(one: str) -> str:
    """All characters but ``one``, a class or a character."""
    if one == ".":
        return r"\n"
    if one.startswith("[^"):
        return f"[{one[2:]}"
    if one.startswith("["):
        return f"[^{one[1:]}"
    if one.startswith("\\") and one[1].isalpha():
        return one.swapcase()
    is_plain = one.startswith("\\") or re.fullmatch(r"[ \w]", one)
    return f"[^{one}]" if is_plain else rf"[^\{one}]"


def _end_of_group(text: str) -> int:
    """Where the group at the beginning of ``text`` ends; -1 where it does not."""
    depth, at, is_in_class = 0, 0, False
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif is_in_class:
            is_in_class = char != "]"
        elif char == "[":
            is_in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
            if not depth:
                return at
        at += 1
    return -1


def _top_level_or(text: str) -> bool:
    """Whether ``text`` has alternatives, of which only the first one stood behind the look-aheads."""
    end = _end_of_group(f"({text})")
    depth_free = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", text)
    while (shorter := re.sub(r"\([^()]*\)", "", depth_free)) != depth_free:
        depth_free = shorter
    return end != len(text) + 1 or "|" in depth_free
