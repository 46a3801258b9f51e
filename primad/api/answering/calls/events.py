"""Events read from a response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a function, whole; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """An addition to the calls of a response: with a ``name`` a call starts, with None the last one continues.

    ``arguments`` continue its arguments, a JSON object as text. They end here if it ``is_whole``; a call that never is
    was cut off.
    """

    name: str | None
    arguments: str
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """What a piece of the model's text adds, by kind; a call that continues precedes the rest."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallPart, ...] = ()
