"""Constrained output: turns a JSON schema or a grammar into the text for the tail's token mask. Pure.

llguidance reads that text, here to check it, and again next to the sampler. Unsupported keywords are refused by name
before anything is computed. Bounds limit the work of a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from primad.api.answering.schema_words import in_known_words
from primad.errors import RequestError, printable

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_GRAMMAR_CHARS: Final = 128 << 10
MAX_NESTING: Final = 64
MAX_GBNF_RULES: Final = 512
MAX_PROPERTIES: Final = 5000
MAX_MULTIPLE: Final = 100_000
"""Limit of ``multipleOf``: each remainder is a state. A million of them took 8 s."""

_WHITESPACE: Final = r" ?|\n{1,2}[ \t]{0,20}"
"""White space between the parts of JSON: a space, or indented lines. Without a bound a model may write nothing else."""
_UNIMPLEMENTED: Final = re.compile(r"Unimplemented keys: (\[.*\])")
_KEYWORDS: Final = {
    "Unknown format": "format",
    "regex parse error": "pattern",
    "invalid regex": "pattern",
    "oneOf constraints": "oneOf",
    "Invalid type": "type",
    "properties must be": "properties",
    "Resource ": "$ref",
    "Pointer ": "$ref",
    "'multipleOf'": "multipleOf",
}
"""The keyword that llguidance complains about, by the start of its message."""
_ENDLESS: Final = "NoExtensionBias"
"""llguidance's message for a schema or rule that only refers to itself."""


def of_schema(schema: Any, *, param: str = "json_schema") -> str:
    """Return the grammar of all JSON texts that match ``schema``, a JSON schema as a value; ``param`` is its field.

    Raises ``RequestError`` (400) that names the unsupported keyword, or the exceeded bound.
    """
    from llguidance import LLMatcher

    if not isinstance(schema, dict):
        raise RequestError(f"'{param}': a JSON schema must be an object", param=param, code="invalid_value")
    _check_parts(schema, param)
    _check_size(json.dumps(schema), param)
    known = _known(schema)
    _check_parts(known, param)
    text = json.dumps(known)
    _check_size(text, param)
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})
    except ValueError as exc:
        raise RequestError(f"'{param}': {_line(exc)}", param=param, code="invalid_value") from exc
    wrong = _wrong(grammar)
    if wrong is not None:
        raise RequestError(_schema_complaint(wrong, param), param=param, code="unsupported_schema")
    return grammar


def of_text(text: str, *, param: str = "grammar") -> str:
    """Return the grammar of ``text``, written as GBNF (with a rule ``root``) or as Lark (with a rule ``start``).

    Raises ``RequestError`` (400) with the error's position, or the exceeded bound.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    _check_size(text, param)
    lark = text
    if not is_lark_syntax(text):
        if text.count("::=") > MAX_GBNF_RULES:
            raise RequestError(f"'{param}' has more than {MAX_GBNF_RULES} rules", param=param, code="invalid_value")
        try:
            lark = gbnf_to_lark(text)
        except Exception as exc:
            detail = "it is nested too deeply" if isinstance(exc, RecursionError) else _line(exc)
            raise RequestError(f"'{param}' is not GBNF: {detail}", param=param, code="invalid_value") from exc
    grammar = LLMatcher.grammar_from_lark(lark)
    wrong = _wrong(grammar)
    if wrong is not None:
        endless = "a rule only refers to itself, so no text matches"
        detail = endless if wrong.startswith(_ENDLESS) else _line(wrong)
        raise RequestError(f"'{param}': {detail}", param=param, code="invalid_value")
    return grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a model writes a function call: the text before the name, between name and arguments (a JSON object), and
    after them; ``between`` separates two calls. The default is the form of Hermes and Qwen."""

    before: str = '<tool_call>\n{"name": "'
    middle: str = '", "arguments": '
    behind: str = "}\n</tool_call>"
    between: str = "\n"


HERMES: Final = CallForm()


def of_calls(
    functions: Mapping[str, Mapping[str, Any] | None],
    form: CallForm,
    *,
    several: bool,
    demanded: bool = True,
    param: str = "tools",
) -> str:
    """Return the grammar of a call of one of ``functions`` (the JSON schema of its parameters by name, or None), or of
    ``several`` calls.

    If parameters are unsupported, arguments are any object. If all of them are and a call is ``demanded``, raises
    ``RequestError`` (400) that names the function and the keyword.
    """
    from llguidance import LLMatcher

    assert functions
    rules, names, refusals = [], [], []
    for number, (name, parameters) in enumerate(functions.items()):
        schema: dict[str, Any] = {"type": "object"}
        if parameters is not None:
            try:
                of_schema(parameters, param=f"{param}.{printable(name, 64)}.parameters")
                schema = dict(_known(parameters))
            except RequestError as exc:
                if exc.code != "unsupported_schema":
                    raise
                refusals.append(exc)
        schema["x-guidance"] = {"whitespace_pattern": _WHITESPACE}
        begin = _quoted(form.before + json.dumps(name, ensure_ascii=False)[1:-1] + form.middle)
        rules += [f"call_{number}: {begin} parameters_{number} {_quoted(form.behind)}"]
        rules += [f"parameters_{number}: %json {json.dumps(schema)}"]
        names.append(f"call_{number}")
    if demanded and len(refusals) == len(functions):
        raise refusals[0]
    more = f" ({_quoted(form.between)} call)*" if several else ""
    lark = "\n".join([f"start: call{more}", f"call: {' | '.join(names)}", *rules])
    _check_size(lark, param)
    grammar = LLMatcher.grammar_from_lark(lark)
    wrong = _wrong(grammar)
    if wrong is not None:
        raise RequestError(f"'{param}': {_line(wrong)}", param=param, code="unsupported_schema")
    return grammar


def _known(schema: Any) -> Any:
    """Return ``schema`` in supported words; unchanged if a keyword's value is invalid, so that it is refused by name."""
    try:
        return in_known_words(schema)
    except (TypeError, ValueError, AttributeError):
        return schema


def either(one: str, other: str) -> str:
    """Return the grammar of all texts of ``one`` and of all of ``other``."""
    parts = [*_parts(one, "one"), *_parts(other, "other")]
    return json.dumps({"grammars": [{"lark_grammar": "start: @one | @other"}, *parts]})


def behind_thoughts(grammar: str, end: str) -> str:
    """Return ``grammar`` after any text that ends with ``end`` (such as ``</think>``): for a prompt that lets the model
    think."""
    thoughts = f"start: thoughts /\\s{{0,4}}/ @answer\nthoughts[suffix={_quoted(end)}]: /(.|\\n)*/"
    return json.dumps({"grammars": [{"lark_grammar": thoughts}, *_parts(grammar, "answer")]})


def _parts(grammar: str, name: str) -> list[dict[str, Any]]:
    """Return ``grammar`` as parts of another one, the first of them named ``name``."""
    first, *rest = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return [first | {"name": name}, *rest]


def _quoted(text: str) -> str:
    """``text`` as Lark quotes it."""
    return json.dumps(text, ensure_ascii=False)


def _wrong(grammar: str) -> str | None:
    """Return why ``grammar`` is unsupported, checked up to its first choice; None if it is supported."""
    from llguidance import LLMatcher, LLParserLimits

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        return messages[0]
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.consume_tokens(matcher.compute_ff_tokens())
        matcher.compute_bitmask()
    return matcher.get_error() or None


@cache
def _bytes() -> LLTokenizer:
    """Return a vocabulary in which every byte is a token: a grammar that fails with it fails with every model."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _schema_complaint(wrong: str, param: str) -> str:
    found = _UNIMPLEMENTED.search(wrong)
    if found is not None:
        named = ", ".join(f"'{printable(name, 40)}'" for name in json.loads(found[1])[:4])
        return f"'{param}': the keyword {named} cannot be guaranteed; leave it out, or rewrite it"
    if wrong.startswith(_ENDLESS):
        return f"'{param}': '$ref': refers to itself, so no text matches; refer to a part of a value"
    keyword = next((keyword for begin, keyword in _KEYWORDS.items() if begin in wrong), None)
    return f"'{param}': {f'{keyword!r}: ' if keyword is not None else ''}{_line(wrong)}"


def _line(text: object) -> str:
    """llguidance's message as one line."""
    lines = [line.strip() for line in str(text).splitlines()]
    return printable(" ".join(line for line in lines if line and not set(line) <= {"^"}), 200)


def _check_size(text: str, param: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"'{param}' has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are accepted",
            param=param,
            code="invalid_value",
        )


def _check_parts(schema: Any, param: str) -> None:
    """Check level by level, so that any depth can be checked."""
    level: list[Any] = [schema]
    properties = 0
    for _ in range(MAX_NESTING + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
                named, multiple = value.get("properties"), value.get("multipleOf")
                properties += len(named) if isinstance(named, dict) else 0
                if properties > MAX_PROPERTIES or (isinstance(multiple, int) and multiple > MAX_MULTIPLE):
                    bounds = (
                        f"at most {MAX_PROPERTIES} properties and multiples of at most {MAX_MULTIPLE} are guaranteed"
                    )
                    raise RequestError(f"'{param}': {bounds}", param=param, code="unsupported_schema")
            elif isinstance(value, list):
                inner += value
        if not inner:
            return
        level = inner
    raise RequestError(f"'{param}' is nested more than {MAX_NESTING} deep", param=param, code="invalid_value")
