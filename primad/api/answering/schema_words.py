"""Rewrites a JSON schema in the keywords that llguidance supports. Pure.

Keywords without effect are removed: ``uniqueItems: false``, an unknown format (JSON Schema has formats as annotations),
``propertyNames`` that every name matches. Others are replaced by equivalents: names of listed properties, look-aheads
at the start of a pattern, ``not`` of everything. The rest is kept, and refused by name if it cannot be guaranteed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import permutations
from typing import Any, Final

from primad.api.answering.pattern_words import MAX_LITERAL, anything_but, without_look_ahead

FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""The keywords that llguidance guarantees."""
MAX_UNIQUE: Final = 4
"""Up to this many listed values, lists without repetition are enumerated."""

_ONE: Final = (
    *("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
_SEVERAL: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_TYPES: Final = ("null", "boolean", "string", "number", "object", "array")
_APPLIED: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "not"})
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords that may have the value null."""
_ANNOTATIONS: Final = frozenset({"title", "description", "examples", "default", "format", "$comment"})


def in_known_words(schema: Any, root: Mapping[str, Any] | None = None) -> Any:
    """Return ``schema``, a part of ``root`` (by default itself), rewritten for llguidance: an object, for a part also a
    boolean."""
    if not isinstance(schema, dict):
        return schema
    root = schema if root is None else root
    rewritten = dict(schema)
    for word in _ONE:
        if isinstance(rewritten.get(word), dict):
            rewritten[word] = in_known_words(rewritten[word], root)
    for word in _SEVERAL:
        if isinstance(rewritten.get(word), list):
            rewritten[word] = [in_known_words(part, root) for part in rewritten[word]]
    for word in _NAMED:
        if isinstance(rewritten.get(word), dict):
            rewritten[word] = {name: in_known_words(part, root) for name, part in rewritten[word].items()}
    _leave_out_vacuous(rewritten)
    _close_unevaluated(rewritten)
    _name_properties(rewritten, root)
    _make_unique(rewritten, root)
    _rewrite_pattern(rewritten)
    fitting = _negated(rewritten)
    return schema if fitting is False and schema is root else fitting  # a schema without any match is refused by name


def _leave_out_vacuous(rewritten: dict[str, Any]) -> None:
    """Remove keywords that every value matches."""
    for word in [word for word, value in rewritten.items() if value is None and word not in _VALUES]:
        del rewritten[word]
    kinds = rewritten.get("type")
    if isinstance(kinds, str | list):  # Gemini's are in capitals
        kinds = _in_lower_case(kinds) if isinstance(kinds, str) else [_in_lower_case(kind) for kind in kinds]
        rewritten["type"] = kinds
    if kinds == "any" or (isinstance(kinds, list) and "any" in kinds):
        del rewritten["type"]
    if rewritten.get("minContains") == 0 and "maxContains" not in rewritten:
        rewritten.pop("contains", None)
    if "format" in rewritten and rewritten["format"] not in list(FORMATS):
        del rewritten["format"]
    if not rewritten.get("uniqueItems", True) or rewritten.get("maxItems") in (0, 1):
        rewritten.pop("uniqueItems", None)
    for word in ("dependentRequired", "dependentSchemas", "dependencies"):
        if isinstance(rewritten.get(word), dict) and not any(rewritten[word].values()):
            del rewritten[word]
    idle = ["then", "else"] if "if" not in rewritten else [] if {"then", "else"} & rewritten.keys() else ["if"]
    for word in (*idle, *(("minContains", "maxContains") if "contains" not in rewritten else ())):
        rewritten.pop(word, None)


def _in_lower_case(kind: Any) -> Any:
    lower = kind.lower() if isinstance(kind, str) else kind
    return lower if lower in (*_TYPES, "integer", "any") else kind


def _close_unevaluated(rewritten: dict[str, Any]) -> None:
    """Replace ``unevaluated...`` by ``additional...`` if no other keyword could have evaluated a value."""
    for word, instead in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        value = rewritten.get(word)
        if word not in rewritten:
            continue
        if _fits_all(value) or instead in rewritten:
            del rewritten[word]
        elif not _APPLIED.intersection(rewritten) and "contains" not in rewritten:
            rewritten[instead] = rewritten.pop(word)


def _name_properties(rewritten: dict[str, Any], root: Mapping[str, Any]) -> None:
    """Express ``propertyNames`` as properties, or as a pattern for all of them."""
    names = resolved(rewritten.get("propertyNames"), root)
    if not isinstance(names, dict):
        if names is True:
            del rewritten["propertyNames"]
        return
    asked = {word: value for word, value in names.items() if word not in _ANNOTATIONS}
    if asked.get("type") == "string":
        del asked["type"]
    others = rewritten.get("additionalProperties", True)
    listed = _listed(asked)
    if not asked:
        del rewritten["propertyNames"]
    elif listed is not None and len(asked) == 1 and "patternProperties" not in rewritten:
        known = rewritten.get("properties", {})
        if set(rewritten.get("required", ())) <= set(listed):
            del rewritten["propertyNames"]
            allowed = [name for name in listed if isinstance(name, str) and (name in known or others is not False)]
            rewritten["properties"] = {name: known.get(name, others) for name in allowed}
            rewritten["additionalProperties"] = False
    elif (
        asked.keys() <= {"pattern", "minLength", "maxLength"}
        and not {"properties", "patternProperties"} & rewritten.keys()
    ):
        patterns = [asked["pattern"]] if "pattern" in asked else []
        if asked.keys() & {"minLength", "maxLength"}:
            patterns.append(rf"^[\s\S]{{{asked.get('minLength', 0)},{asked.get('maxLength', '')}}}$")
        if len(patterns) == 1:
            del rewritten["propertyNames"]
            rewritten["patternProperties"], rewritten["additionalProperties"] = {patterns[0]: others}, False


def _make_unique(rewritten: dict[str, Any], root: Mapping[str, Any]) -> None:
    """Enumerate lists of few listed values. For other lists ``uniqueItems`` only bounds their length."""
    if rewritten.get("uniqueItems") is not True:
        return
    del rewritten["uniqueItems"]
    items = resolved(rewritten.get("items"), root)
    listed = _listed(items) if isinstance(items, dict) and "prefixItems" not in rewritten else None
    if listed is None:
        return
    rewritten["maxItems"] = min(len(listed), rewritten.get("maxItems", len(listed)))
    if len(listed) <= MAX_UNIQUE and not rewritten.keys() & {"anyOf", "oneOf", "allOf", "contains"}:
        del rewritten["items"]
        counts = range(rewritten.pop("minItems", 0), rewritten.pop("maxItems") + 1)
        rewritten["anyOf"] = [
            {
                "type": "array",
                "prefixItems": [{"const": value} for value in values],
                "minItems": count,
                "maxItems": count,
            }
            for count in counts
            for values in permutations(listed, count)
        ]


def _rewrite_pattern(rewritten: dict[str, Any]) -> None:
    patterns = without_look_ahead(rewritten["pattern"]) if isinstance(rewritten.get("pattern"), str) else None
    if patterns is not None:
        rewritten["pattern"] = patterns[0]
        rewritten["allOf"] = [*rewritten.get("allOf", ()), *({"pattern": pattern} for pattern in patterns[1:])]


def _negated(rewritten: dict[str, Any]) -> Any:
    """Remove ``not`` of everything, of nothing, of types, or of listed values."""
    if "not" not in rewritten:
        return rewritten
    no = rewritten["not"]
    if _fits_all(no):
        return False
    asked = {} if not isinstance(no, dict) else {word: no[word] for word in no if word not in _ANNOTATIONS}
    if no is False:
        del rewritten["not"]
    elif asked.keys() == {"type"} and asked["type"] != "integer" and "integer" not in asked["type"]:
        unwanted = {asked["type"]} if isinstance(asked["type"], str) else set(asked["type"])
        unwanted |= {"integer"} if "number" in unwanted else set()
        kinds = rewritten.get("type", list(_TYPES))
        kinds = [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind not in unwanted]
        if not kinds:
            return False
        rewritten["type"] = kinds
        del rewritten["not"]
    elif (
        asked.keys() in ({"enum"}, {"const"}) and _listed(asked) is not None and isinstance(rewritten.get("enum"), list)
    ):
        listed = [(type(value), value) for value in _listed(asked) or ()]
        rewritten["enum"] = [value for value in rewritten["enum"] if (type(value), value) not in listed]
        del rewritten["not"]
    elif rewritten.get("type") == "string" and asked.keys() in ({"enum"}, {"const"}):
        others = [_any_text_but(value) for value in _listed(asked) or () if isinstance(value, str)]
        if None not in others:
            rewritten["allOf"] = [*rewritten.get("allOf", ()), *({"pattern": pattern} for pattern in others)]
            del rewritten["not"]
    return rewritten


def _any_text_but(text: str) -> str | None:
    """Return a pattern of all texts but ``text``."""
    return anything_but(f"{re.escape(text)}$") if text and len(text) <= MAX_LITERAL // 2 else None


def _fits_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS)


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that ``schema`` lists."""
    if "const" in schema:
        return [schema["const"]]
    for word in ("anyOf", "oneOf"):
        parts = schema.get(word)
        if isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts):
            found = [_listed(part) for part in parts]
            return None if None in found else [value for values in found for value in values or ()]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the target of ``schema``'s reference in ``root``, if ``schema`` is only a reference."""
    for _ in range(8):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        if not schema["$ref"].startswith("#/") or schema.keys() - _ANNOTATIONS != {"$ref"}:
            break
        at: Any = root
        for step in schema["$ref"][2:].split("/"):
            at = at.get(re.sub("~1", "/", step).replace("~0", "~")) if isinstance(at, dict) else None
        schema = at
    return schema
