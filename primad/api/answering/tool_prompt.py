"""Prepares tools, calls and their results for a chat template: in its format, or as plain text if it has no support.
Pure.

Templates differ. Most take the arguments of an earlier call as an object, some as text; ``Arguments`` is both. If a
template never mentions ``tools``, the system message describes them with the call format; calls and results of earlier
turns are written into ordinary messages. A template that refuses a conversation gets it in other ``shapes``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Final

from primad.api.answering.conversation import Messages, in_parts, shapes, without_markers
from primad.api.answering.grammar import CallForm
from primad.api.answering.tool_schemas import described, simplified

_NULL_CONTENT: Final = re.compile(r"(?<!_)content['\"]?\]? is (?:not )?none")
_THOUGHTS: Final = re.compile(r"""message(?:\.|\[['"])(reasoning|thinking|thought)\b""")
"""Matches templates' other names for ``reasoning_content``."""
_SHORT_IDS: Final = re.compile(r"length\s*!=\s*9\b")
"""Matches Mistral's templates, which refuse call ids other than nine letters and digits."""


@lru_cache(maxsize=32)
def mentions(template: str, name: str) -> bool:
    """Whether ``template`` uses the variable or field ``name``."""
    return re.search(rf"\b{name}\b", template) is not None


class Arguments(dict[str, Any]):
    """A call's arguments: an object for templates that look inside or write JSON, text for those that print or
    concatenate it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: Any) -> str:
        return str(self) + str(other)

    def __radd__(self, other: Any) -> str:
        return str(other) + str(self)


def for_template(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: CallForm
) -> Iterator[tuple[Messages, dict[str, Any]]]:
    """Yield the inputs for ``template``, best first: messages, and ``tools`` by that name, None if it has no support.

    Each input is for a template that refuses the one before. Calls in ``messages`` have their arguments as text.
    """
    turns = [_named_thoughts(template, _developer_as_system(message)) for message in messages]
    is_described = bool(tools) and not mentions(template, "tools")
    native = {"tools": list(tools) if tools and not is_described else None}
    known: list[dict[str, Any]] = [native, {}]  # some templates iterate over tools even if there are none
    if tools and not is_described:
        known = [native, *[{"tools": list(map(each, tools))} for each in (described, simplified)]]
    whole = _announced(turns, announcement(tools, form)) if is_described else turns
    yield from _given(template, whole, form, known)
    plain = without_markers(whole, template)
    if plain != whole:
        yield from _given(template, plain, form, known)
    for shape, variables in _given(template, whole, form, known):
        yield in_parts(shape), variables


def _given(
    template: str, messages: Messages, form: CallForm, known: Sequence[dict[str, Any]]
) -> Iterator[tuple[Messages, dict[str, Any]]]:
    for variables in known:
        for variants in _variants(template, messages, form):
            for together in zip_longest(*map(shapes, variants)):
                yield from ((shape, variables) for shape in together if shape is not None)


def _variants(template: str, messages: Messages, form: CallForm) -> Iterator[list[Messages]]:
    """Yield ``messages`` with calls and results as ``template`` may support them, then call by call, finally as text;
    the variants in one list are equally good."""
    if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        yield [messages]
        return
    if mentions(template, "tool_calls"):
        without = (None, "") if _NULL_CONTENT.search(template) else ("",)
        separated, in_turns = _text_before_calls(messages), _text_before_calls(messages, is_own_turn=True)
        for each in (messages, separated, in_turns):
            for shape in (each, _call_by_call(each)):
                yield [_as_wanted(template, shape, content) for content in without]
    yield [_as_text(messages, form)]


def _developer_as_system(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system" if message["role"] == "developer" else message["role"]}


def _named_thoughts(template: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return ``message`` with its thoughts also under the template's name for them. One template refuses thoughts next
    to text and calls, so they are left out there."""
    thought = message.get("reasoning_content")
    if not thought or mentions(template, "reasoning_content") or (message["content"] and message.get("tool_calls")):
        return message
    return message | dict.fromkeys(set(_THOUGHTS.findall(template)), thought)


def announcement(tools: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    """Return the description of functions and of the call format, for a model whose template has no tools."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = written_call("NAME", "{ARGUMENTS}", form)
    return (
        f"You can call these functions, each given as JSON with the schema of its parameters:\n{listed}\n\n"
        "To call one, write this, with its name and its arguments as a JSON object, and nothing after "
        f"it:\n{example}\n\nCall a function only if it helps; otherwise answer as usual."
    )


def written_call(name: str, arguments: str, form: CallForm) -> str:
    """Return a call as a model writes it in ``form``."""
    return form.before + json.dumps(name, ensure_ascii=False)[1:-1] + form.middle + arguments + form.behind


def _as_wanted(template: str, messages: Messages, without: str | None) -> Messages:
    """Return ``messages`` with what templates expect in calls and results; ``without`` is the content of a call without
    text."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            names |= {call["id"]: call["function"]["name"] for call in calls}
            content = message["content"] or without
            message = message | {"content": content, "tool_calls": [_call(template, call) for call in calls]}
        elif "tool_call_id" in message:
            known = {"name": names[message["tool_call_id"]]} if message["tool_call_id"] in names else {}
            message = known | message | {"tool_call_id": _id(template, message["tool_call_id"])}
        found.append(message)
    return found


def _text_before_calls(messages: Messages, *, is_own_turn: bool = False) -> Messages:
    """Return ``messages`` with text next to calls moved to a message before them, since some templates show only one of
    the two. If roles have to alternate, an empty user turn follows that message."""
    found: Messages = []
    for message in messages:
        if not message.get("tool_calls") or not message["content"]:
            found.append(message)
            continue
        found.append({key: value for key, value in message.items() if key != "tool_calls"})
        found += [{"role": "user", "content": ""}] if is_own_turn else []
        found.append({key: message[key] for key in ("role", "tool_calls")} | {"content": ""})
    return found


def _call_by_call(messages: Messages) -> Messages:
    """Return ``messages`` with each call in its own message, followed by its result: some models make one call at a
    time."""
    runs: list[deque[dict[str, Any]]] = []
    """Messages, and the results of each call."""
    last: dict[str, deque[dict[str, Any]]] = {}
    """The results of each call id, the last one first."""
    for message in messages:
        calls = message.get("tool_calls") or []
        results = last.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        if results is not None:
            results.appendleft(message)
            continue
        last = {}
        if not calls:
            runs.append(deque([message]))
            continue
        for number, call in enumerate(calls):
            first = {"role": message["role"], "content": ""} if number else message
            last[call["id"]] = deque()
            runs += [deque([first | {"tool_calls": [call]}]), last[call["id"]]]
    return [message for run in runs for message in run]


def with_argument(call: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Return ``call``, as templates get it, with ``word`` as its only argument."""
    return {**call, "function": {**call["function"], "arguments": Arguments({"word": word})}}


def _call(template: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = _parsed(function["arguments"])
    return {**call, "id": _id(template, call["id"]), "function": {**function, "arguments": arguments}}


def _parsed(text: str) -> Arguments | str:
    """Return the arguments as an object; other values stay text."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return Arguments(value) if isinstance(value, dict) else text


def _id(template: str, call: str) -> str:
    return hashlib.sha256(call.encode(errors="replace")).hexdigest()[:9] if _SHORT_IDS.search(template) else call


def _as_text(messages: Messages, form: CallForm) -> Messages:
    """Return ``messages`` with calls written into the assistant's text, and results as user messages."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    """Each message, and the texts that are its content."""
    is_result = False
    for message in messages:
        role, content = message["role"], message["content"] or ""
        rest = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            calls = [written_call(each["name"], each["arguments"] or "{}", form) for each in functions]
            rest["content"] = "\n".join([content, *calls] if content else calls)
        elif role == "tool":
            rest = {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        if is_result and rest["role"] == "user":  # many templates want the roles to alternate
            found[-1][1].append(rest["content"])
        else:
            found.append((rest, [rest["content"]]))
        is_result = role == "tool"
    return [rest | {"content": "\n".join(texts)} if len(texts) > 1 else rest for rest, texts in found]


def _announced(messages: Messages, text: str) -> Messages:
    """Return ``messages`` with ``text`` in the system message, which is added if missing."""
    has_system = messages[0]["role"] == "system"
    first = messages[0]["content"] + "\n\n" + text if has_system and messages[0]["content"] else text
    return [{"role": "system", "content": first}, *messages[int(has_system) :]]
