"""Joins the calls that a reader reports in parts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from primad.api.answering.calls.events import TextPiece

CUT = "..."
"""Appended to the arguments of an incomplete call, which stay text."""


def calls_in(reported: Iterable[TextPiece]) -> list[tuple[str, Any]]:
    """Each call by name, with its arguments as a value if they are complete."""
    found: list[tuple[str, str]] = []
    whole: list[bool] = []
    for part in (part for each in reported for part in each.calls):
        if part.name is not None:
            found.append((part.name, ""))
            whole.append(False)
        assert not whole[-1], "a call continues after its end"
        found[-1], whole[-1] = (found[-1][0], found[-1][1] + part.arguments), part.is_whole
    return [
        (name, json.loads(text) if is_whole else text + CUT)
        for (name, text), is_whole in zip(found, whole, strict=True)
    ]
