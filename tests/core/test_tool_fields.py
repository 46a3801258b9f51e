"""Tool fields of a request, and what they become: a prompt, a parser and a grammar."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from primad.api.answering.backend import TextModel
from primad.api.answering.job import Job
from primad.api.answering.reading import PARSERS
from primad.api.dialects.openai.job import chat_job
from primad.api.dialects.openai.schema import ChatRequest, parse
from primad.api.dialects.openai.tool_fields import MAX_TOOLS, MAX_TOOLS_CHARS
from primad.cli.main import app
from primad.errors import RequestError
from tests.fakes.backend import ByteVocabulary

BYTES = LLTokenizer("byte")
HELLO = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
KNOWS = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
THINKS = KNOWS + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", CITY), tool("now")]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """The choice of some tools."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name) for name in names]}}


def job(template: str = KNOWS, **fields: Any) -> Job:
    request = parse(ChatRequest, json.dumps({"messages": HELLO} | fields).encode())
    vocabulary = ByteVocabulary(chat_template=template)
    served = TextModel(id="toy", created=0, context_tokens=99_000, vocabulary=vocabulary, tool_parser="hermes")
    return chat_job(request, served, seed=7, now=datetime(2025, 1, 1))


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        job(**fields)
    assert caught.value.status == 400
    return caught.value


def fits(asked: Job, text: str) -> bool:
    grammar = asked.choices[0].sampling.grammar
    assert grammar is not None
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(BYTES.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "param", "reported"),
    [
        ({"tools": {}}, "tools", "array"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
        ({"tools": [tool("")]}, "tools[0].function.name", ""),
        ({"tools": [tool("f" * 129)]}, "tools[0].function.name", "128"),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools", "two tools are named 'f'"),
        ({"tools": [tool(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools", str(MAX_TOOLS)),
        ({"tools": [tool("f", {"x": "y" * MAX_TOOLS_CHARS})]}, "tools", str(MAX_TOOLS_CHARS)),
        ({"tools": [tool("f", [])]}, "tools[0].function.parameters", ""),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "tool_choice": tool("other")}, "tool_choice", "no tool 'other'"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", '"required"'),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "other")}, "tool_choice", "no tool 'other'"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        ({"reasoning_format": "some"}, "reasoning_format", ""),
        ({"tools": TOOLS, "grammar": 'root ::= "x"'}, "grammar", "cannot be combined with tools"),
        ({"tools": [tool("f", {"not": {}})], "tool_choice": "required"}, "tools.f.parameters", "'not'"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]}, None, "calls"),
    ],
)
def test_a_nonsensical_field_is_named(fields, param, reported):
    error = refusal(**fields)
    assert error.param == param or param is None
    assert reported in str(error)


def test_fields_that_request_nothing_are_accepted():
    for fields in ({"tools": []}, {"tools": None, "tool_choice": "auto"}, {"functions": [], "function_call": "none"}):
        assert job(**fields).reading is None


def test_without_tools_and_thoughts_nothing_is_looked_for():
    assert job().reading is None
    assert job(tools=TOOLS, tool_choice="none").reading is None


def test_a_template_gets_whole_tools_unless_none_may_be_called():
    given = bytes(job(tools=TOOLS).choices[0].prompt[1:]).decode()
    listed = json.loads(given.partition("<tool_call>")[0])
    assert [each["function"]["name"] for each in listed] == ["weather", "now"]
    assert listed[1]["function"] == {
        "name": "now",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    assert bytes(job(tools=TOOLS, tool_choice="none").choices[0].prompt[1:]) == b"Hi"


def test_a_call_may_be_demanded():
    asked = job(tools=TOOLS, tool_choice="required")
    assert fits(asked, ROME)
    assert fits(asked, f"{ROME}\n{NOW}")
    assert not fits(asked, "Hello")
    assert not fits(asked, ROME.replace("Rome", "Paris"))
    assert not fits(job(tools=TOOLS, tool_choice="required", parallel_tool_calls=False), f"{ROME}\n{NOW}")
    for printed in ("any", {"type": "required"}, {"type": "any"}, allowed("required", "weather", "now")):
        assert job(tools=TOOLS, tool_choice=printed).choices[0].sampling == asked.choices[0].sampling
    few = job(tools=TOOLS, tool_choice=allowed("required", "now"))
    assert fits(few, NOW)
    assert not fits(few, ROME)
    reading = job(tools=TOOLS, tool_choice=allowed("auto", "now")).reading
    assert reading is not None
    assert reading.functions.keys() == {"now"}
    named = job(tools=TOOLS, tool_choice=tool("now"))
    assert fits(named, NOW)
    assert not fits(named, ROME)
    assert not fits(named, f"{NOW}\n{NOW}")
    assert job(tools=TOOLS, tool_choice="auto").choices[0].sampling.grammar is None


def test_a_demanded_call_has_no_parameters_but_those_named():
    more = ROME.replace("}}", ', "x": 1}}')
    assert not fits(job(tools=TOOLS, tool_choice="required"), more)
    open_tool = tool("weather", CITY | {"additionalProperties": True})
    assert fits(job(tools=[open_tool], tool_choice="required"), more)


def test_with_tools_a_schema_constrains_only_the_text():
    asked = job(tools=TOOLS, json_schema={"type": "null"})
    assert fits(asked, "null")
    assert fits(asked, ROME)
    assert not fits(asked, "Hello")
    demanded = job(tools=TOOLS, json_schema={"type": "null"}, tool_choice="required")
    assert not fits(demanded, "null")
    assert fits(job(tools=TOOLS, json_schema={"type": "null"}, tool_choice="none"), "null")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, ROME),
        ({"json_schema": {"type": "null"}}, "null"),
        ({"json_schema": {"type": "null"}, "tools": TOOLS}, "null"),
        ({"json_schema": {"type": "null"}, "reasoning_format": "none"}, "null"),
    ],
)
def test_a_grammar_applies_after_thoughts_that_the_prompt_opens(fields, text):
    asked = job(THINKS, **fields)
    assert fits(asked, f"hm</think>\n\n{text}")
    assert not fits(asked, text)


def test_thoughts_are_looked_for_where_the_template_thinks():
    reading = job(THINKS).reading
    assert reading is not None
    assert (reading.form, reading.opened) == (None, True)
    assert job(THINKS, reasoning_format="none").reading is None
    unopened = job(THINKS.replace("{% if add_generation_prompt %}", "{% if false %}")).reading
    assert unopened is not None
    assert not unopened.opened


def test_the_form_is_the_servers_where_the_template_has_none():
    request = parse(ChatRequest, json.dumps({"messages": HELLO, "tools": TOOLS}).encode())
    served = TextModel(id="toy", created=0, context_tokens=9000, vocabulary=ByteVocabulary())
    reading = chat_job(request, served, seed=7, now=datetime(2025, 1, 1)).reading
    assert reading is not None
    assert reading.form is not None
    other = dataclasses.replace(served, tool_parser="hermes")
    reading = chat_job(request, other, seed=7, now=datetime(2025, 1, 1)).reading
    assert reading is not None
    assert reading.form is not None
    assert reading.form == "hermes"


def test_the_help_names_every_form():
    (option,) = [param for param in app.built.commands["serve"].params if param.name == "tool_parser"]
    assert f"{', '.join(PARSERS[1:-1])} or {PARSERS[-1]}." in option.help


def test_the_documents_name_only_known_forms():
    reported = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    (listed,) = re.findall(r"detected from the chat template, else(.*?)\n- ", reported, re.DOTALL)
    named = set(re.findall(r"`([\w-]+)`", listed))
    assert {"hermes", "tool-calls"} <= named <= set(PARSERS) - {"auto"}
