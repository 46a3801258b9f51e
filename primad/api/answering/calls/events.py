"""Events read from a response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One complete function call; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """An addition to the calls of a response: with a ``name`` a call starts, with None the last one continues.

    ``arguments`` continue the call's arguments, a JSON object as text. ``is_whole``: the arguments end here; a call
    whose parts never have it was cut off.
    """

    name: str | None
    arguments: str
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """What a piece of the model's text adds, by kind; parts that continue a call precede the rest."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallPart, ...] = ()
