"""Rewrites patterns with look-ahead, which llguidance does not support. Pure.

A look-ahead at the start is another pattern that a text has to match. A simple negative one becomes a pattern of the
remaining texts.
"""

from __future__ import annotations

import re
from typing import Final

_ONE: Final = r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\(?:[dDsSwW]|[^\w\s])|[^\\\[\](){}|*+?^$]"
_IS_ONE: Final = re.compile(_ONE)
_ALL_OF: Final = re.compile(rf"({_ONE})([*+])\$")
_SOMEWHERE: Final = re.compile(rf"(?:\.|\[\\s\\S\])\*({_ONE})(\$?)")
_TWICE: Final = re.compile(r"\.\*(\\[^\w\s]|[\w -])\1")
"""Matches one character twice, anywhere."""
_DIGITS: Final = re.compile(r"\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d\{0,(\d+)\}\\\.\\d\{0,(\d+)\}0\*\$")
_LITERAL: Final = re.compile(r"(?:[\w -]|\\[^\w\s])+")
_LOOKS: Final = ("(?=", "(?!")
_ANYWHERE: Final = re.compile(r"(?<!\\)\(\?(?:[=!]|<[=!])")
MAX_LITERAL: Final = 32
MAX_CHARS: Final = 2048
"""Limit of a pattern that is rewritten; longer ones stay as they are, and are refused if unsupported."""


def without_look_ahead(pattern: str) -> list[str] | None:
    """Return patterns that together match the same texts as ``pattern``; None without a look-ahead, or with an
    unsupported one."""
    if len(pattern) > MAX_CHARS or not pattern.startswith("^") or not pattern[1:].startswith(_LOOKS):
        return None
    rest, found = pattern[1:], []
    while rest.startswith(_LOOKS):
        end = _end_of_group(rest)
        inner = rest[3:end].removeprefix("^")
        wanted = [f"^(?:{inner})"] if rest.startswith("(?=") else [anything_but(each) for each in _alternatives(inner)]
        if end < 0 or None in wanted:
            return None
        found += [each for each in wanted if each is not None]
        rest = rest[end + 1 :]
    rest = _DIGITS.sub(_without_idle, rest)
    found = [f"^{rest}", *found]
    return None if any(_ANYWHERE.search(each) for each in found) or _top_level_or(rest) else found


def _without_idle(found: re.Match[str]) -> str:
    """Return ``found`` without a look-ahead that allows as many digits as the pattern after it (pydantic's of decimal
    numbers)."""
    maximum, whole, places = map(int, found.groups())
    return found[0] if whole + 1 + places > maximum else found[0].partition("$)")[2]


def _alternatives(inner: str) -> list[str]:
    """Return the forbidden alternatives: ``a|b``, or ``(?:a|b)$``."""
    behind = ""
    while (group := re.match(r"\((?:\?:)?", inner)) is not None:
        end = _end_of_group(inner)
        if end < 0 or inner[end + 1 :] not in ("", "$"):
            break
        inner, behind = inner[group.end() : end], inner[end + 1 :] + behind
    return [each + behind for each in ([inner] if re.search(r"[()\[]", inner) else re.split(r"(?<!\\)\|", inner))]


def anything_but(inner: str) -> str | None:
    """Return a pattern of all texts that do not start with a match of ``inner``; None if it is not simple enough."""
    if inner == "$":
        return r"[\s\S]"
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
    twice = _TWICE.fullmatch(inner)
    if twice:
        other = _complement(twice[1])
        return f"^(?:{twice[1]}?{other})*{twice[1]}?$"
    literal = inner.removesuffix("$")
    if _LITERAL.fullmatch(literal) and len(literal) <= MAX_LITERAL:
        chars = re.findall(r"\\?.", literal)
        begun = ["".join(chars[:count]) for count in range(len(chars))]
        others = [f"^{text}$|^{text}{_complement(char)}" for text, char in zip(begun, chars, strict=True)]
        return "|".join([*others, rf"^{literal}[\s\S]"] if inner.endswith("$") else others)
    return None


def _complement(one: str) -> str:
    """Return a class of all characters but ``one``, a class or a character."""
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
    """Return where the group at the start of ``text`` ends; -1 if it does not."""
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
    """Whether ``text`` has alternatives: the look-aheads would belong only to the first."""
    end = _end_of_group(f"({text})")
    depth_free = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", text)
    while (shorter := re.sub(r"\([^()]*\)", "", depth_free)) != depth_free:
        depth_free = shorter
    return end != len(text) + 1 or "|" in depth_free
