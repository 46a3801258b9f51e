"""Sets whether and how much a model thinks, in the words of its chat template. Pure.

Templates call it ``enable_thinking``, ``thinking``, ``reasoning`` or otherwise. Unused variables have no effect, so all
switches are set. An effort is text that some templates write into the prompt, so it is set only if the template knows
it. Nemotron Nano v2 has a word in the user's message instead of a variable.
"""

from __future__ import annotations

import re
from typing import Any, Final

from primad.api.answering.tool_prompt import mentions

NO_EFFORT: Final = "none"
"""OpenAI's effort that turns thinking off."""
_MIN: Final = ("no_think", NO_EFFORT, "minimal", "low")
"""Templates' names for the least effort, the least one first."""
_SCALE: Final = (*_MIN, "medium", "high", "xhigh", "max")
_VARIABLE: Final = re.compile(r"(?<![.\w])enable_thinking(?!\s*=[^=])")
"""Matches where a template reads a variable of that name that it does not set itself."""
_EFFORTS: Final = ("reasoning_effort", "thinking_effort", "reasoning_strength")


def thinking_variables(template: str, thinks: bool | None, effort: str | None) -> dict[str, Any]:
    """Return the variables of ``template`` for whether the model ``thinks``, and with which ``effort``; None: the
    model's choice."""
    if effort == NO_EFFORT and thinks is None:
        thinks = False
    found: dict[str, Any] = {} if thinks is None else _switches(thinks)
    for name in _EFFORTS:
        if mentions(template, name):
            wanted = _effort(template, name, thinks, effort)
            found |= {} if wanted is None else {name: wanted}
    return found


def with_word(
    messages: list[dict[str, Any]], template: str, thinks: bool | None, effort: str | None
) -> list[dict[str, Any]]:
    """Return ``messages``, with the thinking word in the user's last one if ``template`` knows only that."""
    thinks = False if thinks is None and effort == NO_EFFORT else thinks
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=None)
    if thinks is None or last is None or "/no_think' in" not in template or _VARIABLE.search(template):
        return messages
    edited = messages[last] | {"content": f"{messages[last]['content']} {'/think' if thinks else '/no_think'}"}
    return [*messages[:last], edited, *messages[last + 1 :]]


def _switches(thinks: bool) -> dict[str, Any]:
    return {
        **dict.fromkeys(("enable_thinking", "thinking", "think", "reasoning"), thinks),
        "thinking_mode": "enabled" if thinks else "disabled",
        "thinking_option": "on" if thinks else "off",
        **({} if thinks else {"thinking_budget": 0}),
    }


def _effort(template: str, name: str, thinks: bool | None, effort: str | None) -> str | None:
    """Return the value of the variable ``name``; None: unset."""
    none = next((word for word in _MIN[:2] if _is_quoted(template, word)), None)
    if thinks is False and effort in (None, NO_EFFORT):
        return next((word for word in _MIN if _is_quoted(template, word)), "low")
    if effort is None:
        return "high" if thinks and none is not None else None
    allowed = re.search(rf"\b{name} not in \[([^\]]*)\]", template)
    words = re.findall(r"\w+", allowed[1]) if allowed is not None else []
    known = [word for word in _SCALE if word in words]
    if not known or effort in words or effort not in _SCALE:
        return effort
    place = _SCALE.index(effort)
    return min(known, key=lambda word: (abs(_SCALE.index(word) - place), -_SCALE.index(word)))


def _is_quoted(template: str, word: str) -> bool:
    return re.search(rf"""(['"]){word}\1""", template) is not None
