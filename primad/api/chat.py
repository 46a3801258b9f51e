"""The model's own chat template: from messages to the text that the model was trained to continue. Pure.

The template is Jinja source out of the model file, and so not to be trusted: it runs in Jinja's immutable sandbox, in the
environment of Hugging Face transformers (``utils/chat_template_utils.py``): trimmed blocks, loop controls, ``tojson``,
``raise_exception``, ``strftime_now`` and the ``generation`` tag. A model without a template gets ChatML, which most
models without one understand best.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from primad.api.backend import Vocabulary
from primad.api.grammar import HERMES, CallForm
from primad.api.tool_prompt import for_template
from primad.errors import ModelError, RequestError

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of a model whose file has none."""

_RUNTIME_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    LookupError,
    OSError,
    RuntimeError,
    StopIteration,
    SystemError,
    TypeError,
    ValueError,
)
"""What Jinja lets through when a template trips over the messages."""


class _Generation(Extension):
    """``{% generation %}``, which only marks the assistant's part for training: its body is the output."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def tokenize_prompt(vocabulary: Vocabulary, text: str) -> list[int]:
    """A prompt that a template wrote, as token ids.

    Special tokens in the text are parsed as such. The tokenizer adds its own only when the template did not already
    write the beginning-of-sequence token, which is therefore never doubled (llama.cpp's convention).
    """
    begun = vocabulary.bos != "" and text.startswith(vocabulary.bos)
    return vocabulary.tokenize(text, add_special=not begun, parse_special=True)


def render(
    vocabulary: Vocabulary,
    messages: Sequence[Mapping[str, Any]],
    *,
    now: datetime,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    form: CallForm = HERMES,
) -> str:
    """The prompt for ``messages`` as text, by the model's template, ready for the assistant's next turn.

    Each message has ``role`` and ``content`` and may have ``name``, ``tool_calls``, ``tool_call_id`` and
    ``reasoning_content``; a developer's message is a system message to templates. ``now`` is what ``strftime_now`` formats;
    ``variables`` are the request's, by name. ``tools`` are those that may be called, in ``form`` where the template knows
    nothing of tools.

    Raises ``RequestError`` when the template refuses the messages and ``ModelError`` when it is no template.
    """
    source = vocabulary.chat_template or CHATML
    refusal: RequestError | None = None
    for said, known in for_template(source, messages, tools, form):
        try:
            return _render(vocabulary, source, said, known, now, variables or {})
        except RequestError as exc:
            refusal = refusal or exc
    assert refusal is not None
    raise refusal


def _render(
    vocabulary: Vocabulary,
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    now: datetime,
    variables: Mapping[str, Any],
) -> str:
    template = _compile(source)
    try:
        return template.render(
            {
                "documents": None,
                **variables,
                "tools": tools,
                "messages": [_developer_as_system(message) for message in messages],
                "add_generation_prompt": True,
                "bos_token": vocabulary.bos,
                "eos_token": vocabulary.eos,
                "strftime_now": _strftime(now),
            }
        )
    except _RUNTIME_ERRORS as exc:
        reason = str(exc).strip() or type(exc).__name__
        raise RequestError(f"the model's chat template refuses the messages: {reason}", param="messages") from exc


@lru_cache(maxsize=4)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except (*_RUNTIME_ERRORS, SyntaxError) as exc:
        raise ModelError(
            f"the model file's chat template (tokenizer.chat_template) does not compile: {exc}; "
            "use /v1/completions, or a model file with a working template"
        ) from exc


def _developer_as_system(message: Mapping[str, Any]) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role}


def _strftime(now: datetime) -> Callable[[str], str]:
    return now.strftime


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
