"""The calls that a reader tells in parts, joined."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from primad.api.answering.calls.events import TextPiece

CUT = "..."
"""Behind the arguments of a call that is not whole; those are text."""


def calls_in(reported: Iterable[TextPiece]) -> list[tuple[str, Any]]:
    """Each call by name, with its arguments as a value if they are whole."""
    found: list[tuple[str, str]] = []
    whole: list[bool] = []
    for part in (part for each in reported for part in each.calls):
        if part.name is not None:
            found.append((part.name, ""))
            whole.append(False)
        assert not whole[-1], "a call goes on behind its end"
        found[-1], whole[-1] = (found[-1][0], found[-1][1] + part.arguments), part.is_whole
    return [
        (name, json.loads(text) if is_whole else text + CUT)
        for (name, text), is_whole in zip(found, whole, strict=True)
    ]
