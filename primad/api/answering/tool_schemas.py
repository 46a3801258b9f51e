"""Rewrites tools so that all chat templates can process them: some fail on missing or unexpected schema keywords. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from primad.api.answering.calls.values import ArgumentPlace
from primad.api.answering.schema_words import resolved

_KINDS: Final = ("object", "array", "string", "number", "integer", "boolean")
MAX_DEPTH: Final = 6
"""More deeply nested schemas are described as texts."""


def described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tool`` with a description of each parameter, which some templates need."""
    function = tool["function"]
    parameters = function["parameters"]
    properties = parameters.get("properties")
    if not isinstance(properties, dict):
        return dict(tool)
    rewritten_tool = {
        name: {"description": ""} | schema if isinstance(schema, dict) else schema
        for name, schema in properties.items()
    }
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": rewritten_tool}}}


def simplified(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tool`` with one type and a description for each parameter, ``items`` of lists and ``properties`` of
    objects."""
    function, parameters = tool["function"], tool["function"]["parameters"]
    rewritten_tool = _simple(parameters | {"type": "object"}, parameters, MAX_DEPTH)
    return {
        **tool,
        "function": {**function, "description": function.get("description") or "", "parameters": rewritten_tool},
    }


def _simple(schema: Any, root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    place = ArgumentPlace([schema], root)
    kind = next((kind for kind in _KINDS if depth and place.is_for(kind)), "string")
    known = resolved(schema, root)
    known = known if isinstance(known, dict) else {}
    stated = schema.get("description") if isinstance(schema, dict) else None
    rewritten_tool: dict[str, Any] = {"type": kind, "description": str(stated or known.get("description") or "")}
    values = known.get("enum")
    if kind == "string" and isinstance(values, list) and all(isinstance(value, str) for value in values):
        rewritten_tool["enum"] = values
    if kind == "array":
        rewritten_tool["items"] = _simple(known.get("items"), root, depth - 1)
    if kind == "object":
        properties, required = known.get("properties"), known.get("required")
        inner = properties if isinstance(properties, dict) else {}
        rewritten_tool["properties"] = {name: _simple(each, root, depth - 1) for name, each in inner.items()}
        rewritten_tool["required"] = [name for name in required if name in inner] if isinstance(required, list) else []
        rewritten_tool["additionalProperties"] = {"type": "string", "description": ""}
    return rewritten_tool
