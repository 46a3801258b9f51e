"""The schema of an argument decides how its text is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from primad.api.answering.calls.forms import FORMS
from primad.api.answering.calls.values import ArgumentPlace
from primad.api.answering.reading import CompletionReading
from tests.fakes.reported import calls_in

TEXT, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
DEFS = {
    "text": TEXT,
    "maybe": {"anyOf": [{"$ref": "#/$defs/text"}, NULL]},
    "self": {"anyOf": [TEXT, {"$ref": "#/$defs/self"}]},
    "only/self": {"$ref": "#/$defs/only~1self"},
    "level": {"type": "string", "enum": ["1", "2"]},
    "point": {"type": "object", "properties": {"x": {"type": "number"}}},
}
LIKE_JSON = ["12345", "1.0", "007", "true", "True", '{"name": "x"}', '["a"]', '"x"', "1e3", "-", ""]
TEXTS = [
    TEXT,
    {"anyOf": [TEXT, NULL]},
    {"oneOf": [NULL, TEXT]},
    {"type": ["string", "null"]},
    {"type": "string", "nullable": True},
    {"$ref": "#/$defs/text"},
    {"$ref": "#/$defs/maybe"},
    {"$ref": "#/$defs/self"},
    {"allOf": [{"$ref": "#/$defs/text"}], "nullable": True, "default": None},
    {"allOf": [{"title": "t"}, {"type": ["string", "integer"]}, {"type": ["string", "null"]}]},
    {"anyOf": [{"type": "string", "format": "date"}, {"type": "string", "pattern": "x"}]},
    {"type": "string", "enum": ["a", "b"]},
    {"enum": ["a", "b"]},
    {"const": "a"},
    {"type": "STRING"},
    {"not": {"type": ["number", "boolean", "object", "array"]}},
]


@pytest.mark.parametrize("schema", TEXTS)
def test_a_text_stays_as_it_was_written_where_texts_are_allowed(schema):
    place = ArgumentPlace([schema], {"$defs": DEFS})
    assert [place.value(text) for text in LIKE_JSON] == LIKE_JSON


OTHERS: list[tuple[dict[str, Any], str, Any]] = [
    ({"anyOf": [TEXT, NULL]}, "null", None),
    ({"anyOf": [TEXT, NULL]}, "None", None),
    (TEXT, "null", "null"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"enum": ["a", None]}, "null", None),
    ({"enum": ["null", None]}, "null", "null"),
    (INTEGER, "5", 5),
    ({"anyOf": [INTEGER, NULL]}, "5", 5),
    ({"type": ["integer", "null"]}, "null", None),
    ({"type": "number"}, "5", 5),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": ["string", "integer"]}, "5", "5"),
    ({"anyOf": [TEXT, {"type": "array", "items": TEXT}]}, '["a", "b"]', ["a", "b"]),
    ({"anyOf": [TEXT, {"$ref": "#/$defs/point"}]}, '{"x": 1}', {"x": 1}),
    ({"anyOf": [TEXT, {"$ref": "#/$defs/point"}]}, "[1]", "[1]"),
    ({"$ref": "#/$defs/level"}, "1", "1"),
    ({"$ref": "#/$defs/level"}, " 1\n", "1"),
    ({"anyOf": [{"enum": ["auto"]}, INTEGER]}, "5", 5),
    ({"anyOf": [{"enum": ["auto"]}, INTEGER]}, "auto", "auto"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": [True, "1"]}, "1", "1"),
    ({"enum": ["a", 1]}, "1", 1),
    ({"const": False}, "false", False),
    ({"$ref": "#/$defs/point"}, '{"x": 1}', {"x": 1}),
    ({"$ref": "#/$defs/point"}, "{'x': 1}", {"x": 1}),
    ({"type": "array"}, "[1, {2}]", "[1, {2}]"),
    ({}, "5", 5),
    ({"description": "any"}, '{"a": 1}', {"a": 1}),
    ({"type": "any"}, "5", 5),
    ({"$ref": "#/$defs/only~1self"}, "5", 5),
    ({"$ref": "elsewhere.json"}, "5", 5),
    ({"$ref": "#/$defs/none"}, "5", 5),
    ({"allOf": [TEXT, INTEGER]}, "5", 5),
]


@pytest.mark.parametrize(("schema", "text", "value"), OTHERS)
def test_other_values_are_read_where_they_are_allowed(schema, text, value):
    found = ArgumentPlace([schema], {"$defs": DEFS}).value(text)
    assert (type(found), found) == (type(value), value)


def test_a_type_that_the_format_marks_decides():
    either = ArgumentPlace([{"type": ["string", "integer"]}], {})
    assert either.value("5", is_text=True) == "5"
    assert either.value("5", is_text=False) == 5
    assert ArgumentPlace([TEXT], {}).value("5", is_text=False) == "5"
    assert ArgumentPlace([{"enum": ["1", 1]}], {}).value("1", is_text=False) == 1


def test_parameters_are_found_in_every_part_of_a_schema():
    root = {
        "$ref": "#/$defs/base",
        "$defs": {"base": {"properties": {"a": TEXT}}},
        "allOf": [{"properties": {"b": {"type": ["string", "null"]}}}],
        "anyOf": [{"properties": {"c": TEXT}}, {"properties": {"c": NULL}}],
        "additionalProperties": TEXT,
    }
    assert [ArgumentPlace([root], root).member(key).value("1") for key in "abcd"] == ["1"] * 4
    assert ArgumentPlace([root], root).member("c").value("null") is None
    patterned = {"patternProperties": {"^x": TEXT}}
    assert ArgumentPlace([patterned], patterned).member("x").value("1") == "1"


def test_references_and_unions_inside_of_each_other_take_no_time():
    names = [f"d{number}" for number in range(60)]
    twice = {
        name: {"anyOf": [{"$ref": f"#/$defs/{follower}"}] * 2}
        for name, follower in zip(names, [*names[1:], "end"], strict=True)
    }
    root = {"$defs": {**twice, "end": TEXT}}
    assert ArgumentPlace([{"$ref": "#/$defs/d30"}], root).value("1") == "1"
    deep: Any = TEXT
    for _ in range(500):
        deep = {"anyOf": [deep]}
    assert ArgumentPlace([deep], {}).value("1") == 1


OPTIONAL = {"$defs": DEFS, "type": "object", "properties": {"v": {"$ref": "#/$defs/maybe"}}}
WRITTEN = {
    "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=v>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "minimax": '<invoke name="f">\n<parameter name="v">{}</parameter>\n</invoke>',
    "minimax-m3": ']<]minimax[>[<invoke name="f">]<]minimax[>[<v>{}]<]minimax[>[</v>]<]minimax[>[</invoke>',
    "minicpm5": '<function name="f"><param name="v">{}</param></function>',
    "muse": 'to=f<|message|><atem:function_calls><atem:invoke name="f"><atem:parameter name="v">{}</atem:parameter>'
    "</atem:invoke></atem:function_calls>",
    "deepseek-dsml": '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="v">{}</｜DSML｜parameter>\n</｜DSML｜invoke>',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_every_form_keeps_optional_texts(name):
    for text in ("12345", "true", '{"a": 1}'):
        reader = CompletionReading(
            form=name, thinking=None, opened=False, functions={"f": OPTIONAL}, several=True, shows_control=True
        ).reader()
        reported = [reader.feed(WRITTEN[name].replace("{}", text)), reader.finish()]
        assert calls_in(reported) == [("f", {"v": text})]


@pytest.mark.parametrize(
    ("form", "text", "value"),
    [
        ("llama3-pythonic", "[f(s='two\nlines')]", "two\nlines"),
        ("llama3-pythonic", "[f(s='it's \"so\", is it')]", 'it\'s "so", is it'),
        ("llama3-pythonic", "[f(s='a', t='b\n')]", "a"),
        ("gemma", "call:f{s:None}", None),
        ("gemma", 'call:f{s:<|"|>None<|"|>}', "None"),
        ("gemma", "call:f{s:[True,{None:False}]}", [True, {"None": False}]),
    ],
)
def test_text_that_templates_write_without_escaping_is_read(form, text, value):
    calls = FORMS[form].parse(text, {"f": None})
    assert calls is not None
    assert json.loads(calls[0].arguments)["s"] == value
