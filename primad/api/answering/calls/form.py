"""A format of function calls: the markers around a call, and how it is read. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from primad.api.answering.calls.events import Call
from primad.api.answering.calls.steps import StepReader
from primad.api.answering.calls.values import Functions, loaded
from primad.api.answering.grammar import CallForm

Parse = Callable[[str, Functions], Sequence[Call] | None]
"""Returns the calls in a body; None if it is not a call of the functions. Raises ``UnfinishedCallError``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """The markers around a body. Without ``end`` the body ends with its JSON, which may follow what ``prefix`` matches
    and has strings in ``quotes``. Without ``begin`` a call is detected only at the start of a response."""

    begin: str
    end: str
    prefix: re.Pattern[str] = re.compile(r"\s*(?=[{\[])")
    quotes: str = '"'


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """A model family's call format: ``name`` is the value for ``--tool-parser``.

    ``call_form`` is the same format for a grammar, None if arguments are not JSON. ``head`` matches a body up to
    arguments that are a JSON object, with the function's name as its only matching group: after it a call streams. A
    body without a ``head`` is read by ``parse`` when it is complete. ``noise`` lists meaningless markers around calls;
    ``frames`` those around whole responses, which are removed even if no calls are allowed. With
    ``uses_control_tokens`` markers may be control tokens. A response made of messages has its own ``reader`` instead of
    markers (given functions, and whether thoughts are part of the text), which finds thoughts if it ``has_thoughts``.
    """

    name: str
    parse: Parse
    markers: tuple[Markers, ...] = ()
    noise: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    call_form: CallForm | None = None
    head: re.Pattern[str] | None = None
    uses_control_tokens: bool = True
    reader: Callable[[Functions, bool, bool], StepReader] | None = None
    has_thoughts: bool = False

    def __str__(self) -> str:
        """The marker's name, which is shown in its place."""
        return self.name

    @property
    def reads_text(self) -> bool:
        """Whether the format is needed to read a response without calls."""
        return self.reader is not None or bool(self.frames)


ARGUMENTS: Final = r"""\s*(?=\{\s*["}])"""
"""A pattern of the place before a JSON object."""
JSON_HEAD: Final = (
    r"""\s*(?:\[\s*)?\{\s*(?:"(?:id|type|tool_call_id)"\s*:\s*"[^"\\<`]*"\s*,\s*)?"(?:name|function|tool_name)"\s*:\s*"([^"\\<`]+)"\s*,"""
    rf"""\s*"(?:arguments|parameters|args)"\s*:{ARGUMENTS}"""
)
"""A pattern of the text before the arguments for ``parse_json``, as nearly all models write it."""
_NAMES: Final = ("name", "function", "tool_name")
_ARGUMENTS: Final = ("arguments", "parameters", "args")


def parse_json(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse ``{"name": ..., "arguments": {...}}``, a list of such objects or one per line; models vary the two names."""
    return all_of(_call_of(item, functions) for item in _items(body))


def parse_named(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse ``{"f": {...}}``, or a list of such objects."""
    return all_of(
        call_of(name, arguments, functions)
        for item in _items(body)
        for name, arguments in (item.items() if isinstance(item, dict) else [("", None)])
    )


def _items(body: str) -> list[Any]:
    """Return the values in a list, or those one after the other; none if ``body`` is not JSON."""
    try:
        value = loaded(body)
    except ValueError:
        lines = re.split(r"(?<=\})\s*\n\s*(?=\{)", body.strip())
        try:
            return [loaded(line) for line in lines] if len(lines) > 1 else []
        except ValueError:
            return []
    return value if isinstance(value, list) else [value]


def _call_of(item: Any, functions: Functions) -> Call | None:
    if not isinstance(item, dict):
        return None
    item = item["function"] if isinstance(item.get("function"), dict) else item
    name = next((item[key] for key in _NAMES if isinstance(item.get(key), str)), None)
    arguments: Any = next((item[key] for key in _ARGUMENTS if key in item), {})
    return None if name is None else call_of(name, arguments, functions)


def all_of(calls: Iterable[Call | None]) -> Sequence[Call] | None:
    """Return all ``calls``, or None if there are none or one is invalid."""
    found = list(calls)
    return None if not found or None in found else [call for call in found if call is not None]


def call_of(name: str, arguments: Any, functions: Functions) -> Call | None:
    """Return a call with ``arguments``, an object or its text; None if the function is not one of ``functions``.

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
    except (ValueError, TypeError):  # infinity is not JSON
        return None
    return Call(name=name, arguments=text.encode(errors="replace").decode())  # JSON can contain unpaired surrogates
