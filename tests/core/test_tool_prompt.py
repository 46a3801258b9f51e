"""Tools, calls and results reach every chat template: as it wants them, or as text."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from primad.api.answering.chat import render
from primad.api.answering.tool_schemas import simplified
from tests.fakes.backend import ByteVocabulary

NOW = datetime(2025, 2, 3)
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Tromsø"}'}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "cold", "tool_call_id": "call_1"},
]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Tromsø"}}\n</tool_call>'


def rendered(template: str, messages=ASKED, tools=(TOOL,)) -> str:
    return render(ByteVocabulary(chat_template=template), messages, now=NOW, tools=tools)


KNOWS = "{% if tools %}{{ tools[0].function.name }}!{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Tromsø"}'),
        ("{{ c.function.arguments }}", '{"city": "Tromsø"}'),
        ("{{ '<' + c.function.arguments + '>' }}", '<{"city": "Tromsø"}>'),
        ("{{ '<' ~ c.function.arguments ~ '>' }}", '<{"city": "Tromsø"}>'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "city=Tromsø"),
        ("{% if c.function.arguments is string %}no{% else %}{{ c.function | tojson }}{% endif %}", None),
        ("{{ c.id }}", "call_1"),
        ("{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}", ""),
        ("{{ m['content'] is none }}", "True"),
        ("{{ m['content'] }}", ""),
    ],
)
def test_a_template_that_knows_calls_gets_them_as_it_looks_at_them(arguments, text):
    got = rendered(KNOWS + arguments + "{% endfor %}{% endfor %}")
    expected = json.dumps(CALL["function"] | {"arguments": {"city": "Tromsø"}}, ensure_ascii=False)
    assert got == "weather!" + (expected if text is None else text)


def test_a_result_has_the_name_of_its_function():
    template = KNOWS + "{% endfor %}{% if m.role == 'tool' %}{{ m.name }}:{{ m.content }}{% endif %}{% endfor %}"
    assert rendered(template) == "weather!weather:cold"


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", ""])
def test_arguments_that_are_no_object_are_rendered_all_the_same(arguments):
    call = CALL | {"function": {"name": "weather", "arguments": arguments}}
    messages = [*ASKED[:1], ASKED[1] | {"tool_calls": [call]}]
    got = rendered(KNOWS + "{{ c.function.arguments }}{% endfor %}{% endfor %}", messages)
    assert got == "weather!" + (arguments or "{}")


PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}>"


def test_a_template_that_knows_nothing_of_tools_gets_them_as_text():
    got = rendered(PLAIN)
    system, user = got.split("[user]", 1)
    assert system.startswith("[system]")
    assert json.dumps(TOOL["function"]) in system
    assert '<tool_call>\n{"name": "NAME", "arguments": {ARGUMENTS}}\n</tool_call>' in system
    assert user == f"Hi[assistant]{HERMES}[user]<tool_response>\ncold\n</tool_response>>"


def test_the_system_message_comes_first():
    got = rendered(PLAIN, [{"role": "system", "content": "Be brief."}, *ASKED])
    assert got.startswith("[system]Be brief.\n\nYou can call")
    assert got.count("[system]") == 1


def test_consecutive_results_and_the_next_user_message_are_one_message():
    messages = [*ASKED, ASKED[2] | {"content": "dark"}, {"role": "user", "content": "And?"}]
    got = rendered(PLAIN, messages, tools=())
    answers = "<tool_response>\ncold\n</tool_response>\n<tool_response>\ndark\n</tool_response>\nAnd?"
    assert got == f"[user]Hi[assistant]{HERMES}[user]{answers}>"


def test_where_there_is_no_system_message_the_users_has_the_tools():
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    assert rendered(refuses, ASKED[:1]).startswith("[user]You can call")
    reported = rendered(refuses, [{"role": "system", "content": "x"}, *ASKED[:1]])
    assert reported.startswith("[user]x\n\nYou can call")


def test_without_tools_and_calls_nothing_is_different():
    assert rendered(PLAIN, ASKED[:1], tools=()) == "[user]Hi>"


ODD = {
    "type": "object",
    "properties": {
        "optional": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "referred": {"$ref": "#/$defs/P", "description": "A place."},
        "anything": True,
        "unsaid": {},
        "mixed": {"enum": [1, "x", None]},
        "list": {"type": "array"},
        "map": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "$defs": {"P": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TRIPS = (
    "{{ tool.function.description | length }}",
    "{% for n, p in tool.function.parameters.properties.items() %}{{ n + p.type + p.description }}{% endfor %}",
    "{{ tool.function.parameters.properties.list['items'].type + tool.function.parameters.required | join }}",
    "{% macro kind(s) %}{% if s.type == 'object' %}{% for p in s.properties.values() %}{{ kind(p) }}{% endfor %}"
    "{% elif s.type in ['string', 'number', 'integer', 'boolean'] %}{{ s.type }}{% elif s.type == 'array' %}"
    "{{ kind(s['items']) }}{% else %}{{ kind({'type': s.type[0]}) }}{% endif %}{% endmacro %}"
    "{{ kind(tool.function.parameters) }}",
)


@pytest.mark.parametrize("walk", TRIPS)
@pytest.mark.parametrize("parameters", [ODD, {}, {"type": "object"}, {"properties": {"a": {"type": ["null"]}}}, None])
def test_a_template_that_trips_over_a_schema_gets_a_simpler_one(walk, parameters):
    template = "{% for tool in tools %}{{ tool.function.name }}:" + walk + "{% endfor %}" + PLAIN
    function = {"name": "odd", "description": None, "parameters": parameters or {}}
    if "list" not in walk or parameters is ODD:
        assert rendered(template, ASKED[:1], [{"type": "function", "function": function}]).startswith("odd:")


def test_a_simpler_schema_keeps_what_it_can_say():
    reported = simplified({"type": "function", "function": {"name": "odd", "parameters": ODD}})["function"][
        "parameters"
    ]
    kinds = {name: each["type"] for name, each in reported["properties"].items()}
    assert kinds == dict.fromkeys(kinds, "string") | {
        "either": "integer",
        "referred": "object",
        "list": "array",
        "map": "object",
    }
    assert reported["properties"]["referred"]["description"] == "A place."
    assert reported["properties"]["referred"]["properties"]["x"]["type"] == "number"
    assert reported["properties"]["referred"]["required"] == ["x"]


def test_tools_that_a_template_leaves_out_are_put_where_it_shows_them():
    begin = "{% for m in messages %}"
    template = (
        begin + "{% if m.role == 'user' and tools %}({{ tools[0].function.name }}){% endif %}" + PLAIN[len(begin) :]
    )
    assert "(weather)" in rendered(template, [{"role": "system", "content": "Be brief."}])
