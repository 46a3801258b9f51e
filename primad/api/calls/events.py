"""What is read in an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a function, whole; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a piece of the model's text adds, each part in its own place."""

    text: str = ""
    thought: str = ""
    calls: tuple[Call, ...] = ()
