"""Reads the bodies of calls that are not plain JSON, by model family. Pure."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any, Final

from primad.api.answering.calls.events import Call
from primad.api.answering.calls.form import ARGUMENTS, JSON_HEAD, all_of, call_of, parse_json
from primad.api.answering.calls.values import ArgumentPlace, Functions, UnfinishedCallError, parameter

_FUNCTION: Final = re.compile(r"(?:\A|</function>)\s*<function=([^>\n]+)>")
_PARAMETER: Final = re.compile(r"(?:\A\s*|\n\s*|</parameter>\s*)<parameter=([^>\n]+)>")
_INVOKE: Final = re.compile(r"""\s*(?:name=)?["']([^"'\n]+)["']\s*(?:/\s*>?|>(.*))""", re.DOTALL)
_NAMED: Final = re.compile(
    r"""\s*<(｜DSML｜ ?|atem:)?param(?:eter)? name=["']([^"'\n]+)["'](?: string="(true|false)")?>"""
    r"""(?:<!\[CDATA\[(.*?)\]\]>|(.*?))</(?:｜DSML｜ ?|atem:)?param(?:eter)?>\s*""",
    re.DOTALL,
)
_ARGUMENT: Final = re.compile(
    r"<arg_key(?::opensource)?>([^<]*)</arg_key(?::opensource)?>\s*<arg_value(?::opensource)?>"
)
_ARGUMENT_END: Final = re.compile(r"</arg_value(?::opensource)?>\s*\Z")
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
_SOLAR: Final = re.compile(r"[^<]*<\|tool_call:name\|>([^<]+)<\|tool_call:args\|>(.*)", re.DOTALL)
_M3_SPACE: Final = "]<]minimax[>["
_M3_TAG: Final = re.compile(r"<(/?)([^<>]+)>(.*)", re.DOTALL)
MAX_ELEMENTS: Final = 64
"""The depth of nesting."""
_GEMMA: Final = re.compile(r"\s*call:([^\s{]+)\s*(\{.*\})\s*", re.DOTALL)
_JSON_WORDS: Final = {"None": "null", "True": "true", "False": "false"}
_PYTHON_WORD: Final = re.compile(r"\b(?:None|True|False)\b(?!\":)")
_QUOTED: Final = re.compile(r"""(?<=[=\[{(,:\s])(['"])((?:\\.|[^\\])*?)\1(?=\s*[,)\]}:])""", re.DOTALL)
"""Matches a text that ends where a value may end."""
_GEMMA_KEY: Final = re.compile(r"([{,]\s*)([^\s\"{}\[\],:][^\"{}\[\],:]*):")


def parse_qwen_coder(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse ``<function=f><parameter=key>value</parameter></function>``, possibly several; JSON may replace it or be
    inside."""
    text = body.strip()
    if text[:1] in ("{", "["):
        return parse_json(text, functions)
    if not text.startswith("<function="):  # it was part of the marker
        text = f"<function={text}</function>"
    if not text.endswith("</function>"):
        raise UnfinishedCallError
    _, *parts = _FUNCTION.split(text.removesuffix("</function>"))
    return all_of(
        call_of(name.strip(), _parameters(name.strip(), inner, functions), functions)
        for name, inner in zip(parts[::2], parts[1::2], strict=True)
    )


def _parameters(name: str, text: str, functions: Functions) -> dict[str, Any] | str | None:
    if text.lstrip()[:1] == "{":
        return text
    before, *parts = _PARAMETER.split(text)
    if before.strip():
        raise UnfinishedCallError
    found = {}
    for key, value in zip(parts[::2], parts[1::2], strict=True):
        value = value.rstrip().removesuffix("</parameter>") if value.rstrip().endswith("</parameter>") else value
        value = value.removeprefix("\n").removesuffix("\n")
        found[key.strip()] = parameter(functions, name, key.strip()).value(value)
    return found


def parse_invoke(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse ``name="f"><parameter name="key">value</parameter>``, where the name is an attribute (MiniMax, DeepSeek,
    MiniCPM 5, Muse)."""
    head = _INVOKE.fullmatch(body)
    if head is None:
        return None
    name, inner = head[1], head[2] or ""
    arguments, at = {}, 0
    while inner[at:].strip():
        found = _NAMED.match(inner, at)
        if found is None:
            raise UnfinishedCallError
        value = found[4] if found[5] is None else found[5]
        if not found[1] and found[4] is None:
            value = value.removeprefix("\n").removesuffix("\n")
        is_text = None if found[3] is None else found[3] == "true"
        arguments[found[2]] = parameter(functions, name, found[2]).value(value, is_text=is_text)
        at = found.end()
    return all_of([call_of(name, arguments, functions)])


def parse_minimax_m3(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse ``name="f">``, then elements named after the parameters, with nested elements for lists and objects."""
    head, *parts = body.split(_M3_SPACE)
    found = _INVOKE.fullmatch(head)
    if found is None:
        return None
    nodes = [_Element(tag="", place=ArgumentPlace.of(functions, found[1]), inner=[], text="")]
    for part in parts:
        tag = _M3_TAG.fullmatch(part)
        if tag is None or (tag[1] and (len(nodes) == 1 or nodes[-1].tag != tag[2])) or len(nodes) > MAX_ELEMENTS:
            raise UnfinishedCallError
        if tag[1]:
            node = nodes.pop()
            nodes[-1].inner.append((node.tag, node.value()))
        else:
            place = nodes[-1].place
            place = place.item() if tag[2] == "item" and not place.is_for("object") else place.member(tag[2])
            nodes.append(_Element(tag=tag[2], place=place, inner=[], text=tag[3]))
    if len(nodes) > 1:
        raise UnfinishedCallError
    return all_of([call_of(found[1], dict(nodes[0].inner), functions)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Element:
    tag: str
    place: ArgumentPlace
    inner: list[tuple[str, Any]]
    text: str

    def value(self) -> Any:
        """Return the content: a list if all elements are items, unless an object is wanted."""
        is_list = self.place.is_for("array") or not self.place.is_for("object")
        if self.inner:
            is_list = is_list and all(tag == "item" for tag, _ in self.inner)
            return [value for _, value in self.inner] if is_list else dict(self.inner)
        if not self.text.strip() and not self.place.is_for("string"):
            for kind, empty in (("array", []), ("object", {})):
                if self.place.is_for(kind):
                    return empty
        return self.place.value(self.text)


def parse_glm(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse the name, then ``<arg_key>key</arg_key><arg_value>value</arg_value>`` for each argument."""
    before, *parts = _ARGUMENT.split(body)
    name = before.strip().removesuffix("<tool_sep:opensource>").strip()
    found = {}
    for key, value in zip(parts[::2], parts[1::2], strict=True):
        end = _ARGUMENT_END.search(value)
        if end is None:
            raise UnfinishedCallError
        found[key.strip()] = parameter(functions, name, key.strip()).value(value[: end.start()])
    return all_of([call_of(name, found, functions)])


def parse_deepseek(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse ``name<｜tool▁sep｜>{...}``, or ``function<｜tool▁sep｜>name`` and the object in a block of JSON."""
    name, _, rest = body.partition("<｜tool▁sep｜>")
    if name.strip() == "function":
        name, _, rest = rest.partition("\n")
    arguments = rest.strip().removeprefix("```json").removesuffix("```")
    return all_of([call_of(name.strip(), arguments, functions)])


def parse_mistral(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse a list of JSON objects, or ``name[ARGS]{...}``."""
    return parse_json(body, functions) if body.lstrip()[:1] == "[" else _matched(_MISTRAL, body, functions)


def parse_kimi(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse ``functions.name:0<|tool_call_argument_begin|>{...}``."""
    return _matched(_KIMI, body, functions)


def parse_solar(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse ``id<|tool_call:name|>name<|tool_call:args|>{...}``."""
    return _matched(_SOLAR, body, functions)


def parse_kimi_k3(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse ``tool="name" index="1"<|sep|>``, then elements of arguments, each with its key and type, or one element of
    JSON."""
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
        arguments[key] = parameter(functions, name, key).value(found[3], is_text=found[2] == "string")
        at = found.end()
    return all_of([call_of(name, arguments, functions)])


def _matched(pattern: re.Pattern[str], body: str, functions: Functions) -> Sequence[Call] | None:
    found = pattern.fullmatch(body)
    return None if found is None else all_of([call_of(found[1], found[2], functions)])


def parse_gemma(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse ``call:name{key:value}`` with bare keys, and strings between special marks; or the content of a code block."""
    found = _GEMMA.fullmatch(body)
    if found is None:
        return parse_any(body, functions)
    parts = re.split(r'<\|"\|>|<escape>', found[2])
    if len(parts) % 2 == 0:
        raise UnfinishedCallError
    texts = [json.dumps(part) if number % 2 else _gemma_words(part) for number, part in enumerate(parts)]
    return all_of([call_of(found[1], "".join(texts), functions)])


def _gemma_words(text: str) -> str:
    """Return ``text`` outside strings as JSON: quoted keys, and JSON's words for Python's, which the template writes."""
    text = _GEMMA_KEY.sub(lambda key: f'{key[1]}"{key[2].strip()}":', text)
    return _PYTHON_WORD.sub(lambda word: _JSON_WORDS[word[0]], text)


def parse_python(body: str, functions: Functions) -> Sequence[Call] | None:
    """Parse a Python list of calls with keyword arguments that are literals, ``[f(a=1), g()]``, or one call per line."""
    try:
        lines = _python_lines(body.strip())
        values = [line.value for line in lines if isinstance(line, ast.Expr)]
        items = [item for each in values for item in (each.elts if isinstance(each, ast.List | ast.Tuple) else [each])]
        return all_of(_python_call(item, functions) for item in items) if len(values) == len(lines) else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _python_lines(text: str) -> list[ast.stmt]:
    """Parse ``text`` as Python. If it is invalid, first escape line ends and quotes inside strings, which templates
    leave unescaped."""
    try:
        return ast.parse(text).body
    except SyntaxError:
        return ast.parse(_QUOTED.sub(_escaped, text)).body


def _escaped(found: re.Match[str]) -> str:
    quote, inner = found.groups()
    return quote + re.sub(rf"(?<!\\){quote}", rf"\\{quote}", inner).replace("\n", "\\n") + quote


def _python_call(item: ast.expr, functions: Functions) -> Call | None:
    if not isinstance(item, ast.Call) or item.args:
        return None
    arguments = {keyword.arg: ast.literal_eval(_json_names(keyword.value)) for keyword in item.keywords}
    return None if None in arguments else call_of(ast.unparse(item.func), json.dumps(arguments), functions)


def _json_names(value: ast.expr) -> ast.expr:
    """Return ``value`` with JSON's ``true``, ``false`` and ``null`` replaced by Python's."""
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
    """Parse JSON, or Python's calls."""
    try:
        return parse_json(body, functions) or parse_python(body, functions)
    except UnfinishedCallError:
        return parse_python(body, functions)
