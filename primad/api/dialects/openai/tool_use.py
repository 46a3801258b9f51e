"""Turns a chat's tools and thoughts into a prompt, a reader of the response, and a grammar. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from primad.api.answering import grammar
from primad.api.answering.backend import TextModel, Vocabulary
from primad.api.answering.calls.choose import Thinking
from primad.api.answering.chat import render, tokenize_prompt
from primad.api.answering.pictures import PromptTokens, check_all_shown, known_pictures
from primad.api.answering.reading import CompletionReading, Manner, manner_of
from primad.api.answering.tool_prompt import mentions
from primad.api.dialects.openai.chat_fields import ChatFields
from primad.api.dialects.openai.sampling import grammar_of
from primad.api.dialects.openai.schema import ChatRequest
from primad.api.dialects.openai.thinking_fields import with_word
from primad.errors import RequestError

_OPEN: Final = frozenset(
    {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "propertyNames"}
)
"""Schema keywords that define by themselves which other properties are allowed."""


def chat_text(request: ChatFields, served: TextModel, *, now: datetime, max_chars: int | None = None) -> str:
    """Return the prompt of ``request`` as text; ``max_chars`` is as in ``render``. Raises like ``render``."""
    template = served.vocabulary.chat_template or ""
    named = (request.chat_template_kwargs or {}).get("enable_thinking")
    thinks = named if isinstance(named, bool) else request.enable_thinking
    return render(
        served.vocabulary,
        with_word(request.conversation, template, thinks, request.reasoning_effort),
        now=now,
        variables=request.variables_for(template),
        tools=[tool.for_template() for tool in request.callable_tools],
        form=_manner(served).call_form,
        opens=request.opens_turn,
        continues=request.continues,
        max_chars=max_chars,
    )


def chat_tokens(request: ChatFields, text: str, served: TextModel) -> PromptTokens:
    """Return the token ids of ``text``, the prompt of ``request``."""
    known = known_pictures(request.pictures, served)
    check_all_shown(text, known)
    return tokenize_prompt(served.vocabulary, text, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRules:
    """How a response is read (None: it is all text), and its grammar (None: unconstrained)."""

    reading: CompletionReading | None
    grammar: str | None


def completion_rules(request: ChatRequest, served: TextModel, text: str) -> CompletionRules:
    """Return the rules for the response to ``request``, whose prompt is ``text``.

    A required call is constrained to its format and its function's parameters. If only the text is constrained, a
    response may call instead, if there are tools. Both constraints apply after thoughts if the prompt opens them, else
    from the first token.

    Raises ``RequestError`` (400) for unsupported constraints.
    """
    manner = _manner(served)
    wanted = _wanted(request, manner)
    thinking = None if request.reasoning_format == "none" else manner.thinking
    opened = manner.thinking is not None and _is_opened(text, request.begun, manner.thinking)
    if wanted is not None and opened and manner.thinking is not None:
        wanted = grammar.behind_thoughts(wanted, manner.thinking.end)
    functions = {tool.function.name: tool.function.parameters for tool in request.callable_tools}
    if not functions and thinking is None and not manner.form.reads_text:
        return CompletionRules(reading=None, grammar=wanted)
    form = manner.form if manner.form.reads_text else None
    if functions:
        is_reported = not mentions(served.vocabulary.chat_template or "", "tools")
        form = manner.form if wanted is None and not is_reported else manner.asked
    reading = CompletionReading(
        form=None if form is None else str(form),
        thinking=thinking if opened or not request.continues else None,
        continues=request.continues,
        opened=opened and thinking is not None,
        functions=functions,
        several=request.several_calls,
        keeps_thoughts=request.reasoning_format == "none",
        shows_control=(form is not None and form.uses_control_tokens) or _is_control(served.vocabulary, thinking),
    )
    return CompletionRules(reading=reading, grammar=wanted)


def _is_opened(text: str, begun: str, thinking: Thinking) -> bool:
    """Whether the prompt ``text`` ends inside thoughts; ``begun`` is the part of its end that the client sent."""
    if thinking.begin in begun or thinking.end in begun:
        return begun.rfind(thinking.begin) > begun.rfind(thinking.end)
    return text[: len(text) - len(begun)].rstrip().endswith(thinking.begin)


def _wanted(request: ChatRequest, manner: Manner) -> str | None:
    demanded = request.demanded_tools
    if request.callable_tools and request.grammar:
        raise RequestError(
            "'grammar' cannot be combined with tools; use response_format, or leave out the tools",
            param="grammar",
            code="invalid_value",
        )
    wanted = grammar_of(request)
    if not demanded and (wanted is None or not request.callable_tools):
        return wanted
    functions = {tool.function.name: _closed(tool.function.parameters) for tool in demanded or request.callable_tools}
    calls = grammar.of_calls(functions, manner.call_form, several=request.several_calls, demanded=bool(demanded))
    return calls if demanded or wanted is None else grammar.either(calls, wanted)


def _closed(parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """``parameters`` without unnamed ones, if they do not say: small models invent some."""
    if parameters is None or "properties" not in parameters or _OPEN.intersection(parameters):
        return parameters
    return parameters | {"additionalProperties": False}


def _manner(served: TextModel) -> Manner:
    return manner_of(served.vocabulary.chat_template, served.tool_parser)


def _is_control(vocabulary: Vocabulary, thinking: Thinking | None) -> bool:
    """Whether the marker that ends thoughts is a control token, which has no ``piece``."""
    if thinking is None:
        return False
    tokens = vocabulary.tokenize(thinking.end, add_special=False, parse_special=True)
    return len(tokens) == 1 and not vocabulary.piece(tokens[0])
