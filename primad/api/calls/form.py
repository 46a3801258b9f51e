"""A form in which models write that they call functions: what stands around a call, and how it is read. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from primad.api.calls.events import Call
from primad.api.grammar import CallForm

Functions = Mapping[str, Mapping[str, Any] | None]
"""By name the JSON schema of the parameters, or None."""
Parse = Callable[[str, Functions], Sequence[Call] | None]
"""The calls in a body; None for what is no call of the functions. Raises ``UnfinishedCallError``."""


class UnfinishedCallError(Exception):
    """The body goes on: what looked like its end is part of an argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """What stands around a body. Without ``end`` it ends where its JSON does, which may stand behind what ``prefix``
    matches, with strings in ``quotes``; without ``begin`` only what begins an answer is one."""

    begin: str
    end: str
    prefix: re.Pattern[str] = re.compile(r"\s*(?=[{\[])")
    quotes: str = '"'


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """How a model family calls: ``name`` is what ``--tool-parser`` takes.

    ``call_form`` is the same for a grammar, None where arguments are not JSON. ``head`` is what stands in a body before
    arguments that are a JSON object, with the function's name as its only group that matches: behind it a call is told as it
    forms, while a body that does not begin so is read by ``parse`` when it is whole. ``noise`` are markers around calls that
    mean nothing; if it ``frames_text``, also where nothing may be called. Markers may be control tokens if it
    ``uses_control_tokens``. With ``channels`` an answer has channels, of thoughts, calls and text, instead of markers.
    """

    name: str
    parse: Parse
    markers: tuple[Markers, ...] = ()
    noise: tuple[str, ...] = ()
    call_form: CallForm | None = None
    head: re.Pattern[str] | None = None
    uses_control_tokens: bool = True
    channels: bool = False
    frames_text: bool = False

    @property
    def reads_text(self) -> bool:
        """Whether it is needed to read an answer in which nothing may be called."""
        return self.channels or self.frames_text


ARGUMENTS: Final = r"""\s*(?=\{\s*["}])"""
"""The place before a JSON object, in a pattern."""
JSON_HEAD: Final = (
    r"""\s*(?:\[\s*)?\{\s*(?:"(?:id|type|tool_call_id)"\s*:\s*"[^"\\<`]*"\s*,\s*)?"(?:name|function|tool_name)"\s*:\s*"([^"\\<`]+)"\s*,"""
    rf"""\s*"(?:arguments|parameters|args)"\s*:{ARGUMENTS}"""
)
"""What stands before the arguments in what ``parse_json`` reads, as nearly all models write it."""
_NAMES: Final = ("name", "function", "tool_name")
_ARGUMENTS: Final = ("arguments", "parameters", "args")
_PYTHON: Final = {"True": True, "False": False, "None": None}


def loaded(text: str) -> Any:
    """``text`` as JSON. Raises ``ValueError``, and ``UnfinishedCallError`` where it ends inside a string."""
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError as exc:
        is_cut_escape = exc.msg.startswith("Invalid \\u") and exc.pos >= len(text) - 8
        if exc.msg.startswith("Unterminated string") or is_cut_escape:
            raise UnfinishedCallError from exc
        raise
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def parse_json(body: str, functions: Functions) -> Sequence[Call] | None:
    """``{"name": ..., "arguments": {...}}``, or a list of such; the names that models give to the two vary."""
    try:
        value = loaded(body)
    except ValueError:
        return None
    return all_of(_call_of(item, functions) for item in (value if isinstance(value, list) else [value]))


def _call_of(item: Any, functions: Functions) -> Call | None:
    if not isinstance(item, dict):
        return None
    item = item["function"] if isinstance(item.get("function"), dict) else item
    name = next((item[key] for key in _NAMES if isinstance(item.get(key), str)), None)
    arguments: Any = next((item[key] for key in _ARGUMENTS if key in item), {})
    return None if name is None else call_of(name, arguments, functions)


def all_of(calls: Iterable[Call | None]) -> Sequence[Call] | None:
    """All ``calls``, or None where one is none, or there are none."""
    found = list(calls)
    return None if not found or None in found else [call for call in found if call is not None]


def call_of(name: str, arguments: Any, functions: Functions) -> Call | None:
    """A call with ``arguments``, an object or its text; None unless it is of ``functions``.

    Raises ``UnfinishedCallError``.
    """
    if isinstance(arguments, str):
        try:
            arguments = loaded(arguments)
        except ValueError:
            return None
    if name not in functions or not isinstance(arguments, dict | None):
        return None
    try:
        text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    except ValueError:  # infinity is no JSON
        return None
    return Call(name=name, arguments=text.encode(errors="replace").decode())  # JSON can write halves of characters


def typed(name: str, key: str, text: str, functions: Functions) -> Any:
    """What ``text`` means as the parameter ``key`` of the function ``name``: text where its schema says so, else JSON."""
    properties = (functions.get(name) or {}).get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    if text.strip() in _PYTHON:
        return _PYTHON[text.strip()]
    try:
        return loaded(text)
    except (ValueError, UnfinishedCallError):
        return text
