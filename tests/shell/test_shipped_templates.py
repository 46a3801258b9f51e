"""Chat templates of real models, shipped with llama.cpp, with conversations in every shape that clients send."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from itertools import product
from typing import Any

import pytest

from primad.api.answering import chat
from primad.api.answering.backend import TextModel
from primad.api.dialects.openai.job import chat_text
from primad.api.dialects.openai.schema import ChatRequest, parse
from tests.fakes.backend import ByteVocabulary
from tests.fakes.histories import HISTORIES, Message, assistant, call, result, system, user

CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Tells it.", "parameters": CITY}}
    for name in ("weather", "clock")
]
PARTS: list[Any] = [{"type": "text", "text": "user-one"}, {"type": "text", "text": "user-two"}]
SHAPES: dict[str, list[Message]] = HISTORIES | {
    "no system prompt, then one": [user("user-one"), assistant("answer-one"), system("system-one"), user("user-two")],
    "system and developer": [system("system-one"), {"role": "developer", "content": "system-two"}, user("user-one")],
    "only assistants": [assistant("answer-one"), assistant("answer-two"), user("user-one")],
    "empty question": [user(""), assistant("answer-one"), user("user-one")],
    "contents in parts": [system("system-one"), {"role": "user", "content": PARTS}],
    "a result in parts": [user("user-zero"), call("a"), {"role": "tool", "tool_call_id": "a", "content": PARTS}],
    "a result that is JSON": [user("user-one"), call("a"), result('{"sky": "result-one"}')],
    "an empty result": [user("user-one"), call("a"), result(""), user("user-two")],
    "null content with a call": [user("user-one"), call("a") | {"content": None}, result("result-one")],
    "a result that is missing": [user("user-one"), call("a", "b"), result("result-one"), user("user-two")],
    "results alone": [result("result-one")],
    "thoughts": [user("user-one"), assistant("answer-one", reasoning_content="hm"), user("user-two")],
    "thoughts alone": [user("user-one"), assistant("", reasoning_content="hm"), user("user-two")],
    "thoughts and a call": [user("user-one"), call("a") | {"reasoning_content": "hm"}, result("result-one")],
    "thoughts, text and a call": [user("user-one"), call("a", text="text-one") | {"reasoning_content": "hm"}],
    "thoughts in the text": [user("user-one"), assistant("<think>\nhm\n</think>\n\nanswer-one"), user("user-two")],
    "a call of the old API": [
        user("user-one"),
        assistant(None, function_call={"name": "weather", "arguments": '{"city": "Rome"}'}),
        {"role": "function", "name": "weather", "content": "result-one"},
    ],
}
PREFILLED = {
    "an answer": [user("user-one"), assistant("answer-one")],
    "an answer and no question": [assistant("answer-one")],
    "an answer with a space": [system("system-one"), user("user-one"), assistant("answer-one ")],
    "an answer behind a result": [user("user-one"), call("a"), result("result-one"), assistant("answer-one")],
}
MESSAGE_WORDS = re.compile(r"(?:user|system|answer|text|result)-\w+")


def prompt(template: str, messages: list[Message], **fields: Any) -> str:
    served = TextModel(
        id="toy", created=0, context_tokens=99_999, vocabulary=ByteVocabulary(chat_template=template, adds_bos=False)
    )
    request = parse(ChatRequest, json.dumps({"messages": messages, **fields}).encode())
    return chat_text(request, served, now=datetime(2025, 2, 3))


@pytest.fixture(scope="module", autouse=True)
def _compiled_once() -> Iterator[None]:
    """Compiling a template takes as long as all its conversations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "_compile", cache(chat._compile.__wrapped__))
        yield


def test_there_are_many(templates):
    assert len(templates) >= 70


def test_every_template_shows_the_whole_conversation_in_every_form_with_and_without_tools(templates):
    wrong = []
    for (name, template), tools, (shape, messages) in product(templates.items(), ([], TOOLS), SHAPES.items()):
        got = prompt(template, messages, **{"tools": tools} if tools else {})
        printed = MESSAGE_WORDS.findall(json.dumps([message.get("content") for message in messages]))
        called = sum(len(message.get("tool_calls") or ()) for message in messages)
        left_out = [each for each in printed if each not in got]
        is_shown = got.count("Rome") >= called and "qzmark" not in got and (not tools or "clock" in got)
        wrong += [(name, bool(tools), shape, left_out)] if left_out or not is_shown else []
    assert wrong == []


def test_every_template_can_continue_a_prefilled_response(templates):
    for name, template in templates.items():
        for shape, messages in PREFILLED.items():
            got, printed = prompt(template, messages), messages[-1]["content"]
            assert got.endswith(printed), (name, shape)
            assert got.count(printed) == 1, (name, shape)
