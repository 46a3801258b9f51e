"""Applies the model's own chat template: turns messages into the text that the model was trained to continue. Pure.

The template is Jinja source from the model file, and so untrusted: it runs in Jinja's immutable sandbox, where it may
change only lists (Kimi K2's template does; it gets copies). It has the environment of Hugging Face transformers
(``utils/chat_template_utils.py``): trimmed blocks, loop controls, ``tojson``, ``raise_exception``, ``strftime_now`` and
the ``generation`` tag. A model without a template gets ChatML, which most such models understand best.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from primad.api.answering.backend import Vocabulary
from primad.api.answering.calls.choose import Thinking, thinks
from primad.api.answering.conversation import Messages, text_of
from primad.api.answering.grammar import HERMES, CallForm
from primad.api.answering.pictures import KnownPicture, PromptTokens, tokens_with_pictures
from primad.api.answering.tool_prompt import for_template, with_argument
from primad.errors import ModelError, RequestError, printable

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
"""Exceptions that escape Jinja when a template fails on the messages."""


MAX_TRIES: Final = 24
"""Attempts after which no other prompt is searched for, even if this one leaves something out."""
_MARK: Final = "qzmark"
"""A placeholder for a text, to see where a template writes it."""
_CHANGES: Final = frozenset({"append", "clear", "extend", "insert", "pop", "remove", "reverse"})
_IS_CHANGING: Final = re.compile(rf"\.(?:{'|'.join(sorted(_CHANGES))})\(")
"""Methods by which templates change lists."""
_WORDS: Final = re.compile(r"\w[\w ]{6,62}\w")
"""A part of a text that every template writes unchanged, and no template writes by itself."""


class _Generation(Extension):
    """``{% generation %}`` only marks the assistant's part for training: its body is the output."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def tokenize_prompt(
    vocabulary: Vocabulary, text: str, pictures: Mapping[str, KnownPicture] | None = None
) -> PromptTokens:
    """Return a prompt that a template wrote as token ids, with ``pictures`` where their markers are.

    Special tokens in the text are parsed as such. The tokenizer adds its own only if the template did not write the
    beginning-of-sequence token, so that it is never doubled (llama.cpp's convention).
    """
    begun = vocabulary.bos != "" and text.startswith(vocabulary.bos)
    return tokens_with_pictures(vocabulary, text, pictures or {}, add_special=not begun)


def render(
    vocabulary: Vocabulary,
    messages: Sequence[Mapping[str, Any]],
    *,
    now: datetime,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    form: CallForm = HERMES,
    opens: bool = True,
    continues: bool = False,
    max_chars: int | None = None,
) -> str:
    """Return the prompt for ``messages`` as text, by the model's template, ready for the assistant's next turn if it
    ``opens`` one.

    Each message has ``role`` and ``content`` and may have ``name``, ``tool_calls``, ``tool_call_id`` and
    ``reasoning_content``; a developer's message is a system message for templates. ``now`` is what ``strftime_now``
    formats; ``variables`` are the request's, by name. ``tools`` are those that may be called, described in ``form`` if
    the template does not support tools. If it ``continues``, the prompt ends with the text of the last message, which
    is the assistant's. The caller refuses a prompt of more than ``max_chars``, so no better one is searched for then.

    Raises ``RequestError`` if the template refuses the messages in every shape and ``ModelError`` if it is invalid.
    """
    source = vocabulary.chat_template or CHATML
    template = _Template(_compile(source), source, vocabulary, now, variables or {}, tools, form, max_chars)
    return template.continued(messages) if continues else template.prompt(messages, opens=opens)


@dataclass(frozen=True, slots=True)
class _Template:
    compiled: jinja2.Template
    source: str
    vocabulary: Vocabulary
    now: datetime
    variables: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    form: CallForm
    max_chars: int | None

    def prompt(self, messages: Sequence[Mapping[str, Any]], *, opens: bool, must: str = "") -> str:
        """Return the first prompt with ``must`` and all of ``messages``; if there is none, the first with ``must``."""
        refusal: RequestError | None = None
        found: list[str] = []
        for shape, known in for_template(self.source, messages, self.tools, self.form):
            try:
                text = self._text(shape, known, opens)
            except RequestError as exc:
                refusal = refusal or exc
                continue
            if must not in text or text in found:
                continue
            is_too_long = self.max_chars is not None and len(text) > self.max_chars
            if is_too_long or not self._leaves_out(shape, known, opens, text):
                return text
            found.append(text)
            if len(found) == MAX_TRIES:
                break
        if not found:
            raise refusal or _refusal("it leaves out the last one")
        return found[0]

    def continued(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt that ends with the last message. Its turn stays open if the template shows it unchanged;
        otherwise it follows the start of a turn."""
        *before, last = messages
        thinking = thinks(self.source)
        last_text = str(last["content"])
        if not last_text.strip() and thinking is not None:
            last_text = f"{thinking.begin}\n{last.get('reasoning_content', '')}"
        if last_text.strip() and not (thinking and last_text.lstrip().startswith(thinking.begin)):
            try:
                text = self.prompt([*before, {**last, "content": _MARK}], opens=False, must=_MARK)
                return _begun(text[: text.rindex(_MARK)], last_text, thinking)
            except RequestError:
                pass  # e.g. if the last one must be the user's
        if not before:
            raise _refusal("it cannot continue an assistant's message that is the first one")
        return _begun(self.prompt(before, opens=True), last_text, thinking)

    def _text(self, messages: Messages, known: Mapping[str, Any], opens: bool) -> str:
        given = {**self.variables, **known, "messages": messages}
        if _IS_CHANGING.search(self.source):
            given = deepcopy(given)
        try:
            text = self.compiled.render(
                {
                    "documents": None,
                    "date_string": self.now.strftime("%d %b %Y"),
                    "datetime": self.now.strftime("%b %d %Y"),
                    "functions": _tojson(list(self.tools)),
                    **given,
                    "add_generation_prompt": opens,
                    "bos_token": self.vocabulary.bos,
                    "eos_token": self.vocabulary.eos,
                    "strftime_now": _strftime(self.now),
                }
            )
            return text.encode(errors="replace").decode()  # without unpaired surrogates, as in arguments of calls
        except _RUNTIME_ERRORS as exc:
            raise _refusal(printable(exc).strip() or type(exc).__name__) from exc

    def _leaves_out(self, messages: Messages, known: Mapping[str, Any], opens: bool, text: str) -> bool:
        """Whether the prompt ``text`` lacks part of ``messages``, or some tools.

        A text that is not found may have been rewritten by the template; then a placeholder word decides.
        """
        if not all(tool["function"]["name"] in text for tool in self.tools):
            return True
        words: list[str] = []

        def word() -> str:
            words.append(f"{_MARK}{len(words)}x")
            return words[-1]

        asked, shown = [], _Shown(text)
        for number, message in enumerate(messages):
            calls = message.get("tool_calls") or []
            is_at_an_end = number + 1 == len(messages) or all(each["role"] == "system" for each in messages[:number])
            if calls and (len(calls) > 1 or message["content"] or is_at_an_end):  # where some templates omit calls
                message = message | {"tool_calls": [with_argument(call, word()) for call in calls]}
            if _is_doubted(number, message, shown):
                message = message | {"content": word()}
            asked.append(message)
        if not words:
            return False
        try:
            shown = _Shown(self._text(asked, known, opens))
        except RequestError:
            return False
        return not all(word in shown for word in words)


class _Shown:
    """A prompt in which messages are searched in order, each from where the last one was found."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def __contains__(self, last_text: str) -> bool:
        at = self._text.find(last_text, self._at)
        if at < 0:
            at = self._text.find(last_text, 0, self._at + len(last_text))
        self._at = at if at >= 0 else self._at
        return at >= 0


def _begun(text: str, last_text: str, thinking: Thinking | None) -> str:
    """Return ``text``, the start of a turn, followed by ``last_text``: inside thoughts if these are thoughts, else
    after them."""
    if thinking is None:
        return text + last_text
    is_opened = text.rstrip().endswith(thinking.begin)
    if last_text.lstrip().startswith(thinking.begin):
        if is_opened:
            return text.rstrip() + last_text.lstrip().removeprefix(thinking.begin)
        return _closed(thinking).sub("", text) + last_text
    return f"{text.rstrip()}\n\n{thinking.end}\n\n{last_text}" if is_opened else text + last_text


@lru_cache(maxsize=4)
def _closed(thinking: Thinking) -> re.Pattern[str]:
    """Return a pattern of empty thoughts at the end of a prompt."""
    return re.compile(rf"(?:{re.escape(thinking.begin)}\s*)?{re.escape(thinking.end)}\s*\Z")


def _is_doubted(number: int, message: Mapping[str, Any], text: _Shown) -> bool:
    """Whether ``text`` may lack ``message``: its beginning is missing, or too short to decide."""
    content = text_of(message).strip()
    if not content:
        return False
    words = _WORDS.search(content)
    probes = [words[0]] if words else [content, json.dumps(content, ensure_ascii=False)[1:-1]]
    is_there = any(probe in text for probe in probes)
    return not is_there or (number > 0 and message["role"] == "system" and words is None)


def _refusal(reason: str) -> RequestError:
    return RequestError(
        f"the model's chat template refuses the messages: {reason} (`primad serve --chat-template FILE` replaces it)",
        param="messages",
        of_model=True,
    )


def check_template(source: str) -> None:
    """Raise ``ModelError`` unless ``source`` is a chat template."""
    _compile(source)


class _Environment(ImmutableSandboxedEnvironment):
    changes_lists = False
    """Whether the template is known to change lists, so that it gets copies; other templates may
    not."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, list) and attr in _CHANGES:
            return self.changes_lists
        return super().is_safe_attribute(obj, attr, value)


@lru_cache(maxsize=4)
def _compile(source: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.changes_lists = _IS_CHANGING.search(source) is not None
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except (*_RUNTIME_ERRORS, SyntaxError) as exc:
        raise ModelError(
            f"the model file's chat template (tokenizer.chat_template) does not compile: {printable(exc)}; "
            "use /v1/completions, or replace it with `primad serve --chat-template FILE`"
        ) from exc


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
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_as_list
    )


def _as_list(value: Any) -> list[Any]:
    """Return results of Jinja's filters, such as ``map``, as lists."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
