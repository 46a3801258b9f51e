"""Official clients give tools to a real head: required calls are made, and the conversation continues."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from primad.engine.vocabulary import LlamaVocabulary
from tests.e2e.cluster import PATIENCE_S, Head, serving
from tests.lazily import Lazily

anthropic = Lazily("anthropic")
ollama = Lazily("ollama")
openai = Lazily("openai")
langchain_openai = Lazily("langchain_openai")

pytestmark = pytest.mark.slow

MODEL = "quick-15-layers"
QUESTION = "How is the weather in Oslo?"
HELLO = [{"role": "user", "content": QUESTION}]
CITIES = ["Oslo", "Rome"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA}
TOOLS: list[Any] = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def head(quick_model: Path, module_home) -> Iterator[Head]:
    cluster = f"tools-{time.time_ns():x}"
    with serving(quick_model, module_home("head"), cluster, "--alone", "--context", 2048) as head:
        yield head


def test_openais_client(head):
    with openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0, "tools": TOOLS}
        answer = client.chat.completions.create(**ask, tool_choice=NAMED)
        (call,) = answer.choices[0].message.tool_calls or []
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in CITIES
        with client.chat.completions.stream(**ask, tool_choice=NAMED) as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed is not None
        assert [(each.function.name, each.function.arguments) for each in streamed] == [
            (call.function.name, call.function.arguments)
        ]
        either = client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False)
        (chosen,) = either.choices[0].message.tool_calls or []
        assert chosen.type == "function"
        assert chosen.function.name in ("get_weather", "get_time")
        printed = [
            *HELLO,
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "4 degrees and rain"},
        ]
        more = client.chat.completions.create(**ask | {"messages": printed}, tool_choice="none", max_tokens=12)
        assert more.choices[0].message.content
        response = client.responses.create(
            model=MODEL,
            input=QUESTION,
            tools=[{"type": "function", "strict": True, **WEATHER}],
            tool_choice={"type": "function", "name": "get_weather"},
        )
        assert [item.type for item in response.output] == ["function_call"]


def test_anthropics_client(head):
    tools: Any = [{"name": "get_weather", "description": "The weather in a city.", "input_schema": SCHEMA}]
    ask: dict[str, Any] = {"model": "claude-any", "max_tokens": 200, "tools": tools, "extra_body": {"temperature": 0}}
    must: Any = {"type": "any", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=head.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        answer = client.messages.create(**ask, messages=HELLO, tool_choice=must)
        (block,) = answer.content
        assert (block.type, block.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
        assert block.input["city"] in CITIES
        with client.messages.stream(**ask, messages=HELLO, tool_choice=must) as stream:
            (streamed,) = stream.get_final_message().content
        assert (streamed.type, streamed.input) == ("tool_use", block.input)
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "4 degrees and rain"}
        printed = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        more = client.messages.create(**ask | {"max_tokens": 12}, messages=printed, tool_choice={"type": "none"})
        assert [each.type for each in more.content] == ["text"]


def test_ollamas_client(head):
    client = ollama.Client(host=head.url, timeout=PATIENCE_S)
    printed: list[Any] = [
        *HELLO,
        {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]},
        {"role": "tool", "tool_name": "get_weather", "content": "4 degrees and rain"},
    ]
    options = {"temperature": 0, "num_predict": 12}
    answer = client.chat(model=MODEL, messages=printed, tools=TOOLS, options=options)
    assert answer.message.content or answer.message.tool_calls
    client._client.close()


class GetWeather(BaseModel):
    """The weather in a city."""

    days: bool


def test_langchain(head):
    model = langchain_openai.ChatOpenAI(
        base_url=f"{head.url}/v1", api_key="none", model=MODEL, temperature=0, timeout=PATIENCE_S, max_retries=0
    )
    bound = model.bind_tools([GetWeather], tool_choice="GetWeather")
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert (call["name"], set(call["args"])) == ("GetWeather", {"days"})
    whole = None
    for part in bound.stream(QUESTION):
        whole = part if whole is None else whole + part
    assert whole is not None
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [(call["name"], call["args"])]
    found = model.with_structured_output(GetWeather, method="function_calling").invoke(QUESTION)
    assert isinstance(found, GetWeather)


def test_control_tokens_are_written_where_they_carry_calls(smollm2):
    vocabulary = LlamaVocabulary(smollm2)
    (begin,) = vocabulary.tokenize("<|im_start|>", add_special=False, parse_special=True)
    (end,) = vocabulary.tokenize("<|im_end|>", add_special=False, parse_special=True)
    (word,) = vocabulary.tokenize("ship", add_special=False, parse_special=True)
    assert [vocabulary.piece(token) for token in (begin, end, word)] == [b"", b"", b"ship"]
    assert [vocabulary.piece_or_marker(token) for token in (begin, end, word)] == [b"<|im_start|>", b"", b"ship"]
    vocabulary.release()
