"""The shapes in which a conversation may be given to a chat template, the closest first. Pure.

Templates are stricter than clients: some accept a system message only at the start, or none; some require user and
assistant to alternate, or a user to start. Each shape gives up a little more of the conversation's structure, but none
of its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

Messages = list[dict[str, Any]]

_PARAGRAPH: Final = "\n\n"
_MARK: Final = re.compile(r"<[^<>\s{}%'\"]{1,40}>|\[/?[A-Z][A-Z_]+\]")
"""Matches what looks like a marker in the source of a template."""
_CHANNELS: Final = re.compile(r"\s*<\|channel\|>.*<\|message\|>", re.DOTALL)
"""Matches the text before the last message of a raw gpt-oss response."""


def shapes(messages: Messages) -> Iterator[Messages]:
    """Yield ``messages``, then variants for stricter templates, each shape once."""
    joined = _joined(_with_one_system(messages))
    begun = _ended_by_user(_begun_by_user(joined))
    without_system = _ended_by_user(_system_in_user(joined))
    found: list[Messages] = []
    for shape in (messages, joined, begun, _in_results(begun), without_system, _in_results(without_system)):
        if shape and shape not in found:
            found.append(shape)
            yield shape


def without_markers(messages: Messages, template: str) -> Messages:
    """Return ``messages`` with each marker of ``template`` in user text broken by a space, so that it stays text."""
    marks = sorted(set(_MARK.findall(template)), key=len, reverse=True)
    if not marks:
        return messages
    pattern = re.compile("|".join(map(re.escape, marks)))

    def plain(text: str) -> str:
        return pattern.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", _CHANNELS.sub("", text, count=1))

    return [
        message
        if message["role"] == "system"
        else message | {name: plain(message[name]) for name in ("content", "reasoning_content") if message.get(name)}
        for message in messages
    ]


def in_parts(messages: Messages) -> Messages:
    """Return ``messages`` with their contents as lists of one part, for templates that require lists."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]} if message["content"] else message
        for message in messages
    ]


def text_of(message: Mapping[str, Any]) -> str:
    """Return the content of a message in any shape as text."""
    content = message["content"]
    return str(content[0]["text"]) if isinstance(content, list) else content or ""


def _with_one_system(messages: Messages) -> Messages:
    """Merge the leading system messages; turn later ones into user messages, in place."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    first = _PARAGRAPH.join(message["content"] for message in messages[:count] if message["content"])
    rest = [
        {"role": "user", "content": message["content"]} if message["role"] == "system" else message
        for message in messages[count:]
        if message["role"] != "system" or message["content"]
    ]
    return [{"role": "system", "content": first}, *rest] if first else rest


def _joined(messages: Messages) -> Messages:
    """Merge adjacent messages of one role, and remove empty assistant messages."""
    groups: list[Messages] = []
    for message in messages:
        role = message["role"]
        if role == "assistant" and not message["content"] and not message.get("tool_calls"):
            continue
        if groups and role == groups[-1][0]["role"] and role in ("user", "assistant"):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [group[0] if len(group) == 1 else _as_one(group) for group in groups]


def _as_one(messages: Messages) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for message in messages:
        joined |= message
    joined["content"] = _all_of(messages, "content")
    if thoughts := _all_of(messages, "reasoning_content"):
        joined["reasoning_content"] = thoughts
    if calls := [call for message in messages for call in message.get("tool_calls") or ()]:
        joined["tool_calls"] = calls
    return joined


def _all_of(messages: Messages, name: str) -> str:
    return _PARAGRAPH.join(text for message in messages if (text := message.get(name)))


def _begun_by_user(messages: Messages) -> Messages:
    """Let the user have the first turn, an empty one if the client has none."""
    at = int(bool(messages) and messages[0]["role"] == "system")
    if len(messages) > at and messages[at]["role"] == "user":
        return messages
    return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


def _ended_by_user(messages: Messages) -> Messages:
    """Add an empty last turn of the user if a call has no result yet."""
    is_open = bool(messages) and bool(messages[-1].get("tool_calls"))
    return [*messages, {"role": "user", "content": ""}] if is_open else messages


def _system_in_user(messages: Messages) -> Messages:
    """Move the system text to the start of the first user turn."""
    if not messages or messages[0]["role"] != "system":
        return _begun_by_user(messages)
    return _joined([{"role": "user", "content": messages[0]["content"]}, *messages[1:]])


def _in_results(messages: Messages) -> Messages:
    """Move user text after tool results into the last result."""
    groups: list[Messages] = []
    for message in messages:
        if groups and message["role"] == "user" and groups[-1][0]["role"] == "tool":
            groups[-1].append(message)
        else:
            groups.append([message])
    return [group[0] if len(group) == 1 else group[0] | {"content": _all_of(group, "content")} for group in groups]
