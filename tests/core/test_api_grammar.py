"""A schema or grammar is enforced, or refused with the reason, at bounded cost."""

from __future__ import annotations

import json

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from primad.api.answering.grammar import (
    MAX_GRAMMAR_CHARS,
    MAX_NESTING,
    CallForm,
    behind_thoughts,
    of_calls,
    of_schema,
    of_text,
)
from primad.api.answering.pattern_words import without_look_ahead
from primad.errors import RequestError

BYTES = LLTokenizer("byte")


def fits(grammar: str, text: str) -> bool:
    """Whether ``text`` matches the grammar."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(BYTES.tokenize_str(text)) and matcher.is_accepting()


def refusal(make, what) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(what, param="field")
    error = caught.value
    assert (error.status, error.param) == (400, "field")
    assert "\n" not in str(error)
    assert len(str(error)) < 400
    return error


SHIP = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "masts": {"type": "integer", "minimum": 1, "maximum": 7},
        "crew": {"type": "array", "items": {"$ref": "#/$defs/person"}},
    },
    "required": ["name", "masts"],
    "additionalProperties": False,
    "$defs": {"person": {"type": "object", "properties": {"age": {"type": "number"}}, "required": ["age"]}},
}


@pytest.mark.parametrize(
    "value",
    [
        {"name": "x", "masts": 3},
        {"name": "x", "masts": 8},
        {"name": "", "masts": 3},
        {"masts": 3},
        {"name": "x", "masts": 3, "sails": 1},
        {"name": "ß", "masts": 1, "crew": [{"age": 1.5}]},
        {"name": "x", "masts": 1, "crew": [{}]},
        [],
        "x",
    ],
)
def test_a_schemas_grammar_has_what_fits_and_nothing_else(value):
    is_valid = jsonschema.Draft202012Validator(SHIP).is_valid(value)
    grammar = of_schema(SHIP)
    for text in (json.dumps(value, ensure_ascii=False), json.dumps(value, indent=2, ensure_ascii=False)):
        assert fits(grammar, text) == is_valid


def test_white_space_has_a_bound():
    grammar = of_schema({"type": "array"})
    assert fits(grammar, "[\n\n  1, 2]")
    assert not fits(grammar, "[\n\n\n1]")
    assert not fits(grammar, "[" + " " * 30 + "1]")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"pattern": "a"}}, "not"),
        ({"not": {"type": "integer"}}, "not"),
        ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"b": {}}}, "propertyNames"),
        ({"propertyNames": {"enum": ["a"]}, "required": ["b"]}, "propertyNames"),
        ({"contains": {"type": "null"}}, "contains"),
        ({"properties": {"a": {"dependentSchemas": {"b": {"required": ["c"]}}}}}, "dependentSchemas"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "string", "pattern": "^(?!.*ab)a"}, "pattern"),
        ({"type": "string", "pattern": "^(?=a)b|c"}, "pattern"),
        ({"type": "string", "pattern": "^(?=a"}, "pattern"),
        ({"type": "colour"}, "type"),
        ({"$ref": "https://example.com/schema"}, "$ref"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "oneOf"),
    ],
)
def test_a_keyword_that_cannot_be_expressed_is_named(schema, keyword):
    error = refusal(of_schema, schema)
    assert f"'{keyword}'" in str(error)
    assert error.code == "unsupported_schema"


TEXT = {"type": "string"}
VACUOUS = [
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": TEXT},
    {"type": "object", "propertyNames": True},
    {"type": "object", "propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"type": "string", "title": "n"}}},
    {"type": "array", "items": TEXT, "uniqueItems": False},
    {"type": "array", "uniqueItems": None},
    *({"type": "string", "format": name} for name in ("password", "byte", "regex", "idn-email", "made-up", "", None)),
    {"type": "any"},
    {"type": "Any"},
    {"type": ["string", "any"]},
    {"type": None, "items": None, "required": None, "properties": None, "description": None},
    {"type": "ARRAY", "items": {"type": "STRING"}},
    {"contains": {"type": "string"}, "minContains": 0},
    {"not": False},
    {"if": {"type": "string"}},
    {"then": {"type": "string"}},
    {"minContains": 1},
    {"dependentRequired": {}},
    {"unevaluatedProperties": True},
    {"unevaluatedItems": {}},
    {"anyOf": [{"items": {"propertyNames": {}}}, {"not": False}]},
    {"properties": {"format": {"enum": [{"format": "made-up"}]}}, "required": ["format"]},
]


@pytest.mark.parametrize("schema", VACUOUS)
def test_a_keyword_that_constrains_nothing_is_left_out(schema):
    of_schema(schema)
    of_schema({"type": "object", "properties": {"a": {"items": schema}}, "$defs": schema.get("$defs", {})})


NARROWING = [
    (
        {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": "x"}, {"c": 1}, []],
    ),
    (
        {"type": "object", "propertyNames": {"const": "a"}, "properties": {"a": TEXT, "b": TEXT}},
        [{"a": "x"}, {"b": "x"}],
    ),
    ({"propertyNames": {"anyOf": [{"const": "a"}, {"enum": ["b"]}]}}, [{"a": 1, "b": 1}, {"c": 1}]),
    ({"type": "string", "not": {"enum": ["a", "xn--a"]}}, ["", "a", "aa", "b", "xn--a", "xn--", "xn--ab"]),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{}, {"ab": 1}, {"b": 1}]),
    ({"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}}, [{"ab": 1}, {"": 1}, {"abc": 1}]),
    ({"type": "object", "properties": {"a": TEXT, "b": {"not": {}}}}, [{}, {"a": "x"}, {"a": "x", "b": 1}]),
    ({"not": {"type": "null"}}, [1, "x", None, {}]),
    ({"type": ["string", "null"], "not": {"type": ["null"]}}, ["x", None]),
    ({"enum": [1, "a", True, None], "not": {"enum": [1, None]}}, [1, "a", True, None]),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}, {"b": 1}]),
    ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, [[], ["a"], ["b", "a"], ["a", "a"], ["c"]]),
    (
        {
            "type": "array",
            "items": {"$ref": "#/$defs/x"},
            "uniqueItems": True,
            "minItems": 1,
            "$defs": {"x": {"enum": [1, 2]}},
        },
        [[], [1], [2, 1], [1, 1], [3]],
    ),
    *(
        (
            {"type": "string", "pattern": pattern},
            [
                "",
                "a",
                "-a",
                "aB1",
                "ab1",
                "1.5",
                ".",
                "-.",
                "x",
                "xn",
                "xn--a",
                "xna",
                " ",
                "a a",
                "a ",
                "b.",
                "aab",
                "2",
                "b",
                "a--",
                "a@b.cc",
                "a..b@b.cc",
                "123.45",
                "1234.5",
                "12.345",
                "1.500",
            ],
        )
        for pattern in (
            r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
            r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{2,}$",
            r"^(?!\s*$).+",
            r"^(?!-)[a-z-]+$",
            r"^(?!(?:xn--))[a-z-]+$",
            r"^(?!.*\.)[a-z.]*$",
            r"^(?!\s)(?!.*\s$)[a-z ]+$",
            r"^(?=.{2,3}$)(?!$)[a-z]+$",
            r"^(?![^a]+$)[ab.]*$",
            r"^(?!a$).*$",
            r"^(?!(?:a|b)$)[ab]+$",
            r"^(?!a|x)[a-z]+$",
            r"^(?!-)(?!.*--)[a-z-]+$",
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
            r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
        )
    ),
]


@pytest.mark.parametrize(("schema", "values"), NARROWING)
def test_a_keyword_that_can_be_rewritten_is_enforced(schema, values):
    grammar = of_schema(schema)
    judged = [jsonschema.Draft202012Validator(schema).is_valid(value) for value in values]
    assert [fits(grammar, json.dumps(value)) for value in values] == judged
    assert len(set(judged)) == 2, "both are tried"


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"enum": ["a"]}, "required": True},
        {"propertyNames": {"enum": ["a"]}, "properties": 7},
        {"propertyNames": 7},
        {"pattern": "^(?=a)b", "allOf": 7},
        {"items": {"enum": [1]}, "uniqueItems": True, "minItems": "x"},
        {"not": {"type": 7}},
        {"not": {"enum": 7}, "enum": [1]},
    ],
)
def test_a_keyword_that_makes_no_sense_is_refused(schema):
    refusal(of_schema, schema)


@pytest.mark.parametrize("value", [[], {}, 7])
def test_a_format_that_is_no_name_is_left_out(value):
    of_schema({"type": "string", "format": value})


def test_texts_that_may_not_repeat_may():
    grammar = of_schema({"type": "array", "items": TEXT, "uniqueItems": True})
    assert fits(grammar, '["a", "a"]')
    assert not fits(of_schema({"items": {"enum": list("abcde")}, "uniqueItems": True}), json.dumps(list("abcdea")))


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}]
)
def test_a_rule_that_only_refers_to_itself_is_refused(schema):
    assert "'$ref': refers to itself" in str(refusal(of_schema, schema))
    for text in ("start: start", "root ::= root"):
        assert "a rule only refers to itself" in str(refusal(of_text, text))


def test_a_schema_that_nothing_fits_is_refused():
    assert "minimum" in str(refusal(of_schema, {"type": "integer", "minimum": 5, "maximum": 3}))


@pytest.mark.parametrize("schema", [None, [], "string", 7, True])
def test_a_schema_is_an_object(schema):
    assert "object" in str(refusal(of_schema, schema))


def test_a_schema_that_is_too_deep_or_too_long_is_refused():
    deep: dict[str, object] = {"type": "null"}
    for _ in range(MAX_NESTING):
        deep = {"items": deep}
    assert str(MAX_NESTING) in str(refusal(of_schema, deep))
    assert str(MAX_GRAMMAR_CHARS) in str(refusal(of_schema, {"description": "x" * MAX_GRAMMAR_CHARS}))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 100_001},
        {"type": "object", "properties": {str(number): {} for number in range(5001)}},
        {"type": "object", "propertyNames": {"enum": [str(number) for number in range(5001)]}},
        {"type": "string", "pattern": "^(?!" + "(" * 40_000 + "a" + ")" * 40_000 + ").*$"},
        {"type": "string", "pattern": "^(?=a)" + "(" * 60_000 + "x" + ")" * 60_000},
    ],
    ids=["multiple", "properties", "names", "nested look-ahead", "nested groups"],
)
def test_a_schema_that_would_take_seconds_to_parse_is_refused_first(schema):
    assert refusal(of_schema, schema).code == "unsupported_schema"


def test_a_pattern_with_groups_in_groups_forbids_what_they_do():
    deep = "(" * 900 + "ab|c" + ")" * 900
    assert without_look_ahead(f"^(?!{deep}).*$") == without_look_ahead("^(?!ab|c).*$")


def test_a_schema_that_is_too_much_work_is_refused():
    patterns = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i}}}$"} for i in range(1000)}
    refusal(of_schema, {"type": "object", "properties": patterns})


def test_gbnf_and_lark():
    gbnf = of_text('root ::= "a" [0-9]{2} tail?\n# a comment\ntail ::= "-" ("x" | "y")+')
    lark = of_text('start: "a" /[0-9]{2}/ tail?\ntail: "-" ("x" | "y")+')
    for text, is_one in [("a12", True), ("a12-xyx", True), ("a1", False), ("a12-", False)]:
        assert fits(gbnf, text) == fits(lark, text) == is_one


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        'foo ::= "a"',
        "root ::= missing",
        "root ::= (",
        "root ::= " + "(" * 5000,
        "start: )",
        "start: missing",
        "start: /[a/",
        'root ::= "\x00',
        "r" + "".join(f'ule{i} ::= "x"\nr' for i in range(600)),
        "start: " + "x" * MAX_GRAMMAR_CHARS,
    ],
)
def test_a_grammar_that_is_wrong_is_refused(text):
    refusal(of_text, text)


WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}


@pytest.mark.parametrize("several", [False, True])
def test_a_call_is_of_a_function_that_is_there_with_its_parameters(several):
    grammar = of_calls({"weather": WEATHER, "now": None}, CallForm(), several=several)
    rome = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert fits(grammar, rome)
    assert fits(grammar, now)
    assert fits(grammar, f"{rome}\n{now}") == several
    for wrong in (rome.replace("Rome", "Paris"), rome.replace("weather", "other"), f"Well: {rome}", rome[:-1], "{}"):
        assert not fits(grammar, wrong)


def test_a_call_in_another_form():
    form = CallForm(before='{"name": "', middle='", "parameters": ', behind="}", between="; ")
    grammar = of_calls({'say"it"': None}, form, several=True)
    assert fits(grammar, '{"name": "say\\"it\\"", "parameters": {"a": 1}}')


@pytest.mark.parametrize("answer", [of_schema({"type": "object"}), of_text("start: /[{]}/"), of_text('root ::= "{}"')])
def test_thoughts_may_come_before_an_answer_that_fits(answer):
    grammar = behind_thoughts(answer, "</think>")
    for thoughts in ("", 'I think {"', "two\n\nlines <b> </b>"):
        assert fits(grammar, f"{thoughts}</think>\n\n{{}}")
    assert not fits(grammar, "{}")
    assert not fits(grammar, "x</think>y")


def test_a_tool_that_cannot_be_expressed_leaves_the_others():
    odd = {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}
    tools = {"weather": WEATHER, "odd": odd}
    grammar = of_calls(tools, CallForm(), several=False)
    rome = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    for text, is_one in ((rome, True), (rome.replace("weather", "odd"), True), (rome.replace("Rome", "x"), False)):
        assert fits(grammar, text) == is_one
    with pytest.raises(RequestError, match=r"'tools\.odd\.parameters': the keyword 'if'"):
        of_calls({"odd": odd}, CallForm(), several=False)
    assert fits(of_calls({"odd": odd}, CallForm(), several=False, demanded=False), rome.replace("weather", "odd"))
