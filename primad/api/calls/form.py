"""A form in which models write that they call functions: where a call begins and ends, and what stands between. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from primad.api.calls.events import Call
from primad.api.grammar import CallForm

Functions = Mapping[str, Mapping[str, Any] | None]
"""By name the JSON schema of the parameters, or None."""
Parse = Callable[[str, Functions], Sequence[Call] | None]
"""The calls that stand between the markers; None for what is no call of the functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """How a model family calls. ``begin`` and ``end`` are markers; without ``end`` a call ends where its JSON does, which
    may stand behind what ``prefix`` matches. With an empty ``begin`` only the answer's beginning may be a call."""

    name: str
    begin: str
    end: str
    parse: Parse
    call_form: CallForm | None = None
    uses_control_tokens: bool = True
    prefix: re.Pattern[str] = re.compile("")
    noise: tuple[str, ...] = ()
    """Markers around calls that mean nothing."""


_NAMES: Final = ("name", "function")
_ARGUMENTS: Final = ("arguments", "parameters", "args")


def parse_json(body: str, functions: Functions) -> Sequence[Call] | None:
    """``{"name": ..., "arguments": {...}}``, or a list of such; the names that models give to the two vary."""
    try:
        value = json.loads(body, strict=False)
    except (ValueError, RecursionError):
        return None
    items = value if isinstance(value, list) else [value]
    found = [_call_of(item, functions) for item in items]
    return None if not found or None in found else [call for call in found if call is not None]


def _call_of(item: Any, functions: Functions) -> Call | None:
    if not isinstance(item, dict):
        return None
    item = item["function"] if isinstance(item.get("function"), dict) else item
    name = next((item[key] for key in _NAMES if isinstance(item.get(key), str)), None)
    arguments: Any = next((item[key] for key in _ARGUMENTS if key in item), {})
    return None if name is None else call_of(name, arguments, functions)


def call_of(name: str, arguments: Any, functions: Functions) -> Call | None:
    """A call with ``arguments``, an object or its text; None unless it is of ``functions``."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return None
    if name not in functions or not isinstance(arguments, dict | None):
        return None
    return Call(name=name, arguments=json.dumps(arguments or {}, ensure_ascii=False))


def typed(name: str, key: str, text: str, functions: Functions) -> Any:
    """What ``text`` means as the parameter ``key`` of the function ``name``: text where its schema says so, else JSON."""
    properties = (functions.get(name) or {}).get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
