"""What is read in an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a function, whole; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """What is added to the calls of an answer: with a ``name`` a call begins, with None the last one goes on.

    ``arguments`` is what its arguments, a JSON object as text, go on with. They end here if it ``is_whole``; a call that
    never is was cut short.
    """

    name: str | None
    arguments: str
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """What a piece of the model's text adds, each part in its own place; a call that goes on does so before the rest."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallPart, ...] = ()
