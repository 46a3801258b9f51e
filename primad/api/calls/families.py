"""The forms of the model families that do not write JSON alone. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from primad.api.calls.events import Call
from primad.api.calls.form import Functions, call_of, parse_json, typed

_FUNCTION: Final = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_INVOKE: Final = re.compile(r"""\s*<invoke name=["']?([^"'>\n]+)["']?>(.*?)</invoke>\s*""", re.DOTALL)
_NAMED_PARAMETER: Final = re.compile(r"""<parameter name=["']?([^"'>\n]+)["']?>\n?(.*?)\n?</parameter>""", re.DOTALL)
_ARGUMENT: Final = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_DEEPSEEK: Final = re.compile(r"(?:function)?<｜tool▁sep｜>")
_FENCED: Final = re.compile(r"([^\n{]+?)\s*(?:```json\s*)?(\{.*\})\s*(?:```)?\s*", re.DOTALL)
_MISTRAL: Final = re.compile(r"\s*([^\[\]{}\s]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)
MISTRAL_PREFIX: Final = re.compile(r"\s*[^\[\]{}\s]+(?:\[CALL_ID\]\w+)?\[ARGS\]")


def _elements(
    body: str, functions: Functions, call: re.Pattern[str], parameter: re.Pattern[str]
) -> Sequence[Call] | None:
    """Calls that are elements with their parameters inside."""
    found, at = [], 0
    while at < len(body):
        match = call.match(body, at)
        if match is None or match.end() == at:
            return None
        name = match[1].strip()
        arguments = {
            key.strip(): typed(name, key.strip(), text, functions) for key, text in parameter.findall(match[2])
        }
        found.append(call_of(name, arguments, functions))
        at = match.end()
    return None if not found or None in found else [each for each in found if each is not None]


def parse_qwen_coder(body: str, functions: Functions) -> Sequence[Call] | None:
    """``<function=f><parameter=key>value</parameter></function>``, or JSON."""
    return (
        parse_json(body, functions)
        if body.lstrip()[:1] in ("{", "[")
        else _elements(body, functions, _FUNCTION, _PARAMETER)
    )


def parse_minimax(body: str, functions: Functions) -> Sequence[Call] | None:
    """``<invoke name="f"><parameter name="key">value</parameter></invoke>``, several of them."""
    return _elements(body, functions, _INVOKE, _NAMED_PARAMETER)


def parse_glm(body: str, functions: Functions) -> Sequence[Call] | None:
    """The name, then ``<arg_key>key</arg_key><arg_value>value</arg_value>`` for each argument."""
    name = body.partition("<arg_key>")[0].strip()
    arguments = {key.strip(): typed(name, key.strip(), text, functions) for key, text in _ARGUMENT.findall(body)}
    call = call_of(name, arguments, functions)
    return None if call is None else [call]


def parse_deepseek(body: str, functions: Functions) -> Sequence[Call] | None:
    """The name and a JSON object, with marks between them that vary."""
    return _named(
        _FENCED.fullmatch(_DEEPSEEK.sub("", body, count=1) if body.startswith("function") else _spaced(body)), functions
    )


def _spaced(body: str) -> str:
    return body.replace("<｜tool▁sep｜>", "\n", 1)


def parse_mistral(body: str, functions: Functions) -> Sequence[Call] | None:
    """A list of JSON objects, or ``name[ARGS]{...}``."""
    return parse_json(body, functions) if body.lstrip()[:1] == "[" else _named(_MISTRAL.fullmatch(body), functions)


def _named(match: re.Match[str] | None, functions: Functions) -> Sequence[Call] | None:
    call = None if match is None else call_of(match[1].strip(), match[2], functions)
    return None if call is None else [call]
