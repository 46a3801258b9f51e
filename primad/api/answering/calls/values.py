"""Interprets a text as an argument, by the JSON schema of the function's parameters. Pure.

Formats other than JSON write all arguments as text. If the schema allows strings the text is kept, since what looks
like a number may be a house number. References, unions, enums and ``nullable`` are resolved; patterns are not checked.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Functions = Mapping[str, Mapping[str, Any] | None]
"""The JSON schema of each function's parameters by the function's name, or None."""

_ANY: Final = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_PYTHON: Final = {"True": True, "False": False, "None": None}
_MISSING: Final = object()
MAX_LOOK: Final = 100
"""The depth to which nested references and unions are resolved."""


class UnfinishedCallError(Exception):
    """The apparent end of the body is part of an argument, so the body continues."""


def loaded(text: str) -> Any:
    """Decode ``text`` as JSON. Raises ``ValueError``, and ``UnfinishedCallError`` if it ends inside a string."""
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError as exc:
        is_cut_escape = exc.msg.startswith("Invalid \\u") and exc.pos >= len(text) - 8
        if exc.msg.startswith("Unterminated string") or is_cut_escape:
            raise UnfinishedCallError from exc
        raise
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


class ArgumentPlace:
    """A place in the parameters of a function, with its allowed values."""

    def __init__(self, schemas: Sequence[Any], root: Any) -> None:
        """One of ``schemas``, parts of the document ``root``, has to match; an empty schema allows everything."""
        self._schemas, self._root = schemas, root

    @classmethod
    def of(cls, functions: Functions, name: str) -> ArgumentPlace:
        """Return the place of the arguments of the function ``name``."""
        schema = functions.get(name)
        return cls([schema] if schema else [], schema)

    def member(self, key: str) -> ArgumentPlace:
        """Return the place of the value of ``key`` in an object."""
        found, others = [], []
        for schema in self._parts():
            named = schema.get("properties")
            if isinstance(named, dict) and key in named:
                found.append(named[key])
                continue
            patterns = schema.get("patternProperties")
            others += list(patterns.values()) if isinstance(patterns, dict) else []
            others += [schema["additionalProperties"]] if isinstance(schema.get("additionalProperties"), dict) else []
        return ArgumentPlace(found or others, self._root)

    def item(self) -> ArgumentPlace:
        """Return the place of any value in a list."""
        found: list[Any] = []
        for schema in self._parts():
            for items in (schema.get("items"), schema.get("prefixItems")):
                found += items if isinstance(items, list) else [items] if isinstance(items, dict) else []
        return ArgumentPlace(found, self._root)

    def is_for(self, kind: str) -> bool:
        """Whether a value of ``kind`` is allowed here, and not every kind."""
        kinds, _ = self._look()
        return kinds != _ANY and kind in kinds

    def value(self, text: str, *, is_text: bool | None = None) -> Any:
        """Return the value of ``text`` here; ``is_text`` is whether the model marks it as text, None if it does not
        say."""
        if is_text:
            return text
        kinds, members = self._look()
        texts = [member for member in members if isinstance(member, str)]
        value = _parsed(text, with_python="string" not in kinds and not texts)
        literal = next((each for each in (text, text.strip()) if each in texts), _MISSING)
        named = value if any(type(member) is type(value) and member == value for member in members) else _MISSING
        for each in (named, literal) if is_text is False else (literal, named):
            if each is not _MISSING:
                return each
        if value is _MISSING:
            return text
        kind = _kind(value)
        if kinds == _ANY:
            return value
        if "string" in kinds:
            others = kinds - {"string"} if is_text is False else kinds & {"null", "object", "array"}
            return value if kind in others else text
        return text if texts and kind not in kinds else value

    def _look(self) -> tuple[frozenset[str], list[Any]]:
        """Return the kinds of values that are allowed here, and additional single values."""
        members: list[Any] = []
        seen: dict[str, frozenset[str]] = {}
        kinds = [self._kinds(schema, members, seen, MAX_LOOK) for schema in self._schemas]
        return frozenset().union(*kinds) if kinds else _ANY, members

    def _kinds(self, schema: Any, members: list[Any], seen: dict[str, frozenset[str]], look: int) -> frozenset[str]:
        if schema is False:
            return frozenset()
        if not isinstance(schema, dict) or not look:
            return _ANY
        kinds = _named(schema.get("type"))
        listed = schema.get("enum") if isinstance(schema.get("enum"), list) else None
        listed = [schema["const"]] if "const" in schema else listed
        if listed is not None:
            members += listed
            kinds = frozenset()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in seen:
                seen[reference] = frozenset()
                seen[reference] = self._kinds(self._at(reference), members, seen, look - 1)
            kinds &= seen[reference]
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                kinds &= frozenset().union(*(self._kinds(part, members, seen, look - 1) for part in schema[word]))
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else []:
            kinds &= self._kinds(part, members, seen, look - 1)
        no = schema.get("not")
        if isinstance(no, dict) and no.keys() == {"type"}:
            kinds -= _named(no["type"])
        return kinds | {"null"} if schema.get("nullable") is True else kinds

    def _parts(self) -> Iterator[dict[str, Any]]:
        """Yield the schemas of the content: those here, and those that they refer to or combine."""
        waiting, seen = list(self._schemas), set[int]()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            yield schema
            if isinstance(schema.get("$ref"), str):
                waiting.append(self._at(schema["$ref"]))
            for word in ("anyOf", "oneOf", "allOf"):
                waiting += schema[word] if isinstance(schema.get(word), list) else []

    def _at(self, reference: str) -> Any:
        """Return the schema of ``reference``; one that allows everything if it does not exist."""
        at = self._root
        for step in reference.removeprefix("#").split("/")[1:] if reference.startswith("#") else ["?"]:
            name = step.replace("~1", "/").replace("~0", "~")
            at = at.get(name) if isinstance(at, dict) else None
        return at


def parameter(functions: Functions, name: str, key: str) -> ArgumentPlace:
    """Return the place of the parameter ``key`` of the function ``name``."""
    return ArgumentPlace.of(functions, name).member(key)


def _named(kind: Any) -> frozenset[str]:
    """Return the kinds of the keyword ``type``; all of them if it names an unknown one."""
    named = frozenset(each.lower() for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str))
    if not named or not named <= _ANY:
        return _ANY
    return named | {"integer"} if "number" in named else named


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    kinds = ((str, "string"), (int, "integer"), (float, "number"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "array")


def _parsed(text: str, *, with_python: bool) -> Any:
    """Parse ``text`` as JSON or one of Python's words; ``with_python`` also as Python's lists and dictionaries."""
    word = text.strip()
    if word in _PYTHON:
        return _PYTHON[word]
    try:
        value = loaded(text)
    except (ValueError, UnfinishedCallError):
        return _literal(word) if with_python and word[:1] in ("{", "[") else _MISSING
    return _MISSING if isinstance(value, float) and not math.isfinite(value) else value


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return _MISSING
    return value if isinstance(value, dict | list) else _MISSING
