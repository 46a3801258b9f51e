"""Conversations in the shapes that clients send; each text describes itself."""

from __future__ import annotations

from typing import Any, Final

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def call(*ids: str, text: str = "") -> Message:
    """Tool calls together with ``text``."""
    calls = [
        {"id": each, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        for each in ids
    ]
    return assistant(text, tool_calls=calls)


def result(text: str, call_id: str = "a") -> Message:
    """A tool's result."""
    return {"role": "tool", "content": text, "tool_call_id": call_id}


HISTORIES: Final[dict[str, list[Message]]] = {
    "one": [user("user-one")],
    "usual": [system("system-one"), user("user-one"), assistant("answer-one"), user("user-two")],
    "two system messages": [system("system-one"), system("system-two"), user("user-one")],
    "a later one": [system("system-one"), user("user-one"), assistant("answer-one"), system("B"), user("user-two")],
    "the last one": [system("system-one"), user("user-one"), system("C")],
    "developer": [
        {"role": "developer", "content": "system-one"},
        user("user-one"),
        {"role": "developer", "content": "D"},
    ],
    "only system": [system("system-one")],
    "empty system": [system(""), user("user-one"), system("")],
    "two users": [user("user-one"), user("user-two")],
    "two assistants": [user("user-one"), assistant("answer-one"), assistant("answer-two"), user("user-two")],
    "greeting": [system("system-one"), assistant("answer-one"), user("user-one")],
    "empty answer": [user("user-one"), assistant(""), user("user-two")],
    "call": [system("system-one"), user("user-one"), call("a"), result("result-one")],
    "two calls": [user("user-one"), call("a", "b"), result("result-one"), result("result-two", "b")],
    "user after a result": [user("user-one"), call("a"), result("result-one"), user("user-two")],
    "system after a result": [system("system-one"), user("user-one"), call("a"), result("result-one"), system("E")],
    "open call": [user("user-one"), call("a"), user("user-two")],
    "result of nothing": [user("user-one"), result("result-one"), user("user-two")],
    "last call": [user("user-one"), call("a")],
    "begun by a call": [call("a"), result("result-one"), user("user-one")],
    "text next to a call": [user("user-one"), call("a", text="text-one"), result("result-one"), user("user-two")],
    "text next to two calls": [
        system("system-one"),
        user("user-one"),
        call("a", "b", text="text-one"),
        result("result-two", "b"),
        result("result-one"),
    ],
    "two rounds of calls": [
        user("user-one"),
        call("a", "b"),
        result("result-one"),
        result("result-two", "b"),
        call("c", text="text-one"),
        result("result-three", "c"),
        assistant("answer-one"),
        user("user-two"),
    ],
    "marker": [user("user-one"), assistant("<|channel|>final<|message|>answer-one"), user("user-two")],
}
