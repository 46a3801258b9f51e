"""How the bodies of calls are read that are not JSON alone, family by family. Pure."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from html import unescape
from typing import Any, Final

from primad.api.calls.events import Call
from primad.api.calls.form import (
    ARGUMENTS,
    JSON_HEAD,
    Functions,
    UnfinishedCallError,
    all_of,
    call_of,
    parse_json,
    typed,
)

_FUNCTION: Final = re.compile(r"(?:\A|</function>)\s*<function=([^>\n]+)>")
_PARAMETER: Final = re.compile(r"(?:\A\s*|\n\s*|</parameter>\s*)<parameter=([^>\n]+)>")
_INVOKE: Final = re.compile(r"""\s*name=["']([^"'\n]+)["']\s*(?:/\s*>?|>(.*))""", re.DOTALL)
_NAMED: Final = re.compile(
    r"""\s*<(｜DSML｜ ?)?parameter name=["']([^"'\n]+)["'](?: string="(true|false)")?>(.*?)</(?:｜DSML｜ ?)?parameter>\s*""",
    re.DOTALL,
)
_ARGUMENT: Final = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_MISTRAL: Final = re.compile(r"\s*([^\[\]{}\s]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)
MISTRAL_PREFIX: Final = re.compile(r"\s*(?:(?=[{\[])|[^\[\]{}\s]+(?:\[CALL_ID\]\w+)?(?:\[ARGS\]|(?=\{)))")
HEAD: Final = re.compile(JSON_HEAD)
MISTRAL_HEAD: Final = re.compile(rf"{JSON_HEAD}|\s*([^\[\]{{}}\s]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?{ARGUMENTS}")
DEEPSEEK_HEAD: Final = re.compile(
    rf"\s*(?:function<｜tool▁sep｜>)?([^\s<{{]+)(?:<｜tool▁sep｜>|\n)\s*(?:```json)?{ARGUMENTS}"
)
KIMI_HEAD: Final = re.compile(rf"\s*(?:functions\.)?([^\s:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>{ARGUMENTS}")
_KIMI: Final = re.compile(r"\s*(?:functions\.)?([^\s:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*)", re.DOTALL)
_K3_CALL: Final = re.compile(r'tool="([^"]*)"[^<]*<\|sep\|>(.*)', re.DOTALL)
_K3_ARGUMENT: Final = re.compile(
    r'\s*<\|open\|>(?:argument key="([^"]*)" type="(\w+)"|json[^<]*)<\|sep\|>(.*?)<\|close\|>(?:argument|json)<\|sep\|>\s*'
    r"(?=<\|open\|>argument|\Z)",
    re.DOTALL,
)
_GEMMA: Final = re.compile(r"\s*call:([^\s{]+)\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_KEY: Final = re.compile(r"([{,]\s*)([^\s\"{}\[\],:][^\"{}\[\],:]*):")


def parse_qwen_coder(body: str, functions: Functions) -> Sequence[Call] | None:
    """``<function=f><parameter=key>value</parameter></function>``, several of them, or JSON."""
    text = body.strip()
    if text[:1] in ("{", "["):
        return parse_json(text, functions)
    if not text.startswith("<function="):  # it was the marker
        text = f"<function={text}</function>"
    if not text.endswith("</function>"):
        raise UnfinishedCallError
    _, *parts = _FUNCTION.split(text.removesuffix("</function>"))
    return all_of(
        call_of(name.strip(), _parameters(name.strip(), inner, functions), functions)
        for name, inner in zip(parts[::2], parts[1::2], strict=True)
    )


def _parameters(name: str, text: str, functions: Functions) -> dict[str, Any] | None:
    before, *parts = _PARAMETER.split(text)
    if before.strip():
        raise UnfinishedCallError
    found = {}
    for key, value in zip(parts[::2], parts[1::2], strict=True):
        value = value.rstrip().removesuffix("</parameter>") if value.rstrip().endswith("</parameter>") else value
        value = value.removeprefix("\n").removesuffix("\n")
        found[key.strip()] = typed(name, key.strip(), value, functions)
    return found


def parse_invoke(body: str, functions: Functions) -> Sequence[Call] | None:
    """``name="f"><parameter name="key">value</parameter>``, of which the name is an attribute (MiniMax, DeepSeek)."""
    head = _INVOKE.fullmatch(body)
    if head is None:
        return None
    name, inner = head[1], head[2] or ""
    arguments, at = {}, 0
    while inner[at:].strip():
        found = _NAMED.match(inner, at)
        if found is None:
            raise UnfinishedCallError
        value = found[4] if found[1] else found[4].removeprefix("\n").removesuffix("\n")
        arguments[found[2]] = value if found[3] == "true" else typed(name, found[2], value, functions)
        at = found.end()
    return all_of([call_of(name, arguments, functions)])


def parse_glm(body: str, functions: Functions) -> Sequence[Call] | None:
    """The name, then ``<arg_key>key</arg_key><arg_value>value</arg_value>`` for each argument."""
    before, *parts = _ARGUMENT.split(body)
    name = before.strip()
    found = {}
    for key, value in zip(parts[::2], parts[1::2], strict=True):
        if not value.rstrip().endswith("</arg_value>"):
            raise UnfinishedCallError
        found[key.strip()] = typed(name, key.strip(), value.rstrip().removesuffix("</arg_value>"), functions)
    return all_of([call_of(name, found, functions)])


def parse_deepseek(body: str, functions: Functions) -> Sequence[Call] | None:
    """``name<｜tool▁sep｜>{...}``, or ``function<｜tool▁sep｜>name`` and the object in a block of JSON."""
    name, _, rest = body.partition("<｜tool▁sep｜>")
    if name.strip() == "function":
        name, _, rest = rest.partition("\n")
    arguments = rest.strip().removeprefix("```json").removesuffix("```")
    return all_of([call_of(name.strip(), arguments, functions)])


def parse_mistral(body: str, functions: Functions) -> Sequence[Call] | None:
    """A list of JSON objects, or ``name[ARGS]{...}``."""
    return parse_json(body, functions) if body.lstrip()[:1] == "[" else _matched(_MISTRAL, body, functions)


def parse_kimi(body: str, functions: Functions) -> Sequence[Call] | None:
    """``functions.name:0<|tool_call_argument_begin|>{...}``."""
    return _matched(_KIMI, body, functions)


def parse_kimi_k3(body: str, functions: Functions) -> Sequence[Call] | None:
    """``tool="name" index="1"<|sep|>``, then elements of arguments, each with its key and its type, or one of JSON."""
    head = _K3_CALL.fullmatch(body)
    if head is None:
        return None
    name, inner = unescape(head[1]), head[2]
    arguments, at = {}, 0
    while inner[at:].strip():
        found = _K3_ARGUMENT.match(inner, at)
        if found is None:
            raise UnfinishedCallError
        if found[1] is None:
            return all_of([call_of(name, found[3], functions)])
        key = unescape(found[1])
        arguments[key] = found[3] if found[2] == "string" else typed(name, key, found[3], functions)
        at = found.end()
    return all_of([call_of(name, arguments, functions)])


def _matched(pattern: re.Pattern[str], body: str, functions: Functions) -> Sequence[Call] | None:
    found = pattern.fullmatch(body)
    return None if found is None else all_of([call_of(found[1], found[2], functions)])


def parse_gemma(body: str, functions: Functions) -> Sequence[Call] | None:
    """``call:name{key:value}`` with bare keys, and strings between marks of their own; or what is in a block of code."""
    found = _GEMMA.fullmatch(body)
    if found is None:
        return parse_any(body, functions)
    parts = re.split(r'<\|"\|>|<escape>', found[2])
    if len(parts) % 2 == 0:
        raise UnfinishedCallError
    texts = [
        json.dumps(part) if number % 2 else _GEMMA_KEY.sub(lambda key: f'{key[1]}"{key[2].strip()}":', part)
        for number, part in enumerate(parts)
    ]
    return all_of([call_of(found[1], "".join(texts), functions)])


def parse_python(body: str, functions: Functions) -> Sequence[Call] | None:
    """A Python list of calls with keyword arguments that are literals: ``[f(a=1), g()]``."""
    try:
        value = ast.parse(body.strip(), mode="eval").body
        items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        return all_of(_python_call(item, functions) for item in items)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(item: ast.expr, functions: Functions) -> Call | None:
    if not isinstance(item, ast.Call) or item.args:
        return None
    arguments = {keyword.arg: ast.literal_eval(_json_names(keyword.value)) for keyword in item.keywords}
    return None if None in arguments else call_of(ast.unparse(item.func), json.dumps(arguments), functions)


def _json_names(value: ast.expr) -> ast.expr:
    """``value`` with JSON's ``true``, ``false`` and ``null`` as Python has them."""
    names = {"true": True, "false": False, "null": None}
    for node in ast.walk(value):
        for field, inner in ast.iter_fields(node):
            for part in inner if isinstance(inner, list) else [inner]:
                if isinstance(part, ast.Name) and part.id in names:
                    constant = ast.Constant(names[part.id])
                    new = (
                        [constant if each is part else each for each in inner] if isinstance(inner, list) else constant
                    )
                    setattr(node, field, new)
                    inner = new
    if isinstance(value, ast.Name) and value.id in names:
        return ast.Constant(names[value.id])
    return value


def parse_any(body: str, functions: Functions) -> Sequence[Call] | None:
    """JSON, or Python's calls."""
    try:
        return parse_json(body, functions) or parse_python(body, functions)
    except UnfinishedCallError:
        return parse_python(body, functions)
