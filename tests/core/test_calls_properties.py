"""Whatever a model writes is parsed: calls come back as they were written, and nothing else is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primad.api.answering.calls.choose import Thinking
from primad.api.answering.calls.forms import FORMS
from primad.api.answering.calls.reader import MAX_FAILED, MAX_PREFIX_CHARS
from primad.api.answering.reading import CompletionReading
from tests.fakes.reported import CUT, calls_in

THINK = Thinking(begin="<think>", end="</think>")
MANY = 12
"""The number of examples per form."""
Arguments = dict[str, Any]
Found = tuple[str, str, list[tuple[str, Any]]]


def read(
    name: str,
    pieces: list[str],
    *,
    thinking: Thinking | None = None,
    opened: bool = False,
    like: Arguments | None = None,
) -> Found:
    """The parse of ``pieces``, with a function ``f`` whose parameters are like those in ``like``."""
    reader = CompletionReading(
        form=name,
        thinking=thinking,
        opened=opened,
        functions={"f": schema_of(like or {})},
        several=True,
        shows_control=True,
    ).reader()
    reported = [*map(reader.feed, pieces), reader.finish()]
    return "".join(each.thought for each in reported), "".join(each.text for each in reported), calls_in(reported)


def schema_of(value: Any) -> dict[str, Any]:
    """A schema that marks strings, lists and objects as they are in ``value``."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: schema_of(inner) for key, inner in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0]) if value else {}}
    return {"type": ["string", "null"]} if isinstance(value, str) else {}


def split(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def elements(arguments: Arguments, begin: str, middle: str, end: str) -> str:
    return "".join(f"{begin}{key}{middle}{plain(value)}{end}" for key, value in arguments.items())


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(inner)}" for key, inner in value.items()) + "}"
    return "[" + ",".join(map(gemma, value)) + "]" if isinstance(value, list) else json.dumps(value)


def minimax_m3(value: Any) -> str:
    space = "]<]minimax[>["
    if isinstance(value, dict):
        return "".join(f"{space}<{key}>{minimax_m3(inner)}{space}</{key}>" for key, inner in value.items())
    if isinstance(value, list):
        return "".join(f"{space}<item>{minimax_m3(inner)}{space}</item>" for inner in value)
    return plain(value)


def python(name: str, arguments: Arguments) -> str:
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


def hermes(name: str, arguments: Arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


WRITERS: dict[str, Callable[[str, Arguments], str]] = {
    "hermes": hermes,
    "json": lambda name, arguments: json.dumps({"name": name, "arguments": arguments}),
    "llama3-json": lambda name, arguments: json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False),
    "llama3-pythonic": python,
    "mistral": lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}",
    "deepseek": lambda name, arguments: (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
    ),
    "kimi": lambda name, arguments: (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
    ),
    "kimi-k3": lambda name, arguments: (
        f'<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>'
        + "".join(
            f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "object"}"<|sep|>{plain(value)}'
            "<|close|>argument<|sep|>"
            for key, value in arguments.items()
        )
        + "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "phi-4-mini": lambda name, arguments: (
        f"<|tool_call|>[{json.dumps({'name': name, 'arguments': arguments})}]<|/tool_call|>"
    ),
    "granite": lambda name, arguments: f"<|tool_call|>[{json.dumps({'name': name, 'arguments': arguments})}]",
    "command-r": lambda name, arguments: (
        f'<|START_ACTION|>[\n{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {json.dumps(arguments)}}}\n]'
        "<|END_ACTION|>"
    ),
    "gpt-oss": lambda name, arguments: (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
    ),
    "gemma": lambda name, arguments: f"<|tool_call>call:{name}{gemma(arguments)}<tool_call|>",
    "qwen3-coder": lambda name, arguments: (
        f"<tool_call>\n<function={name}>\n"
        f"{elements(arguments, '<parameter=', f'>{chr(10)}', f'{chr(10)}</parameter>{chr(10)}')}</function>\n</tool_call>"
    ),
    "glm": lambda name, arguments: (
        f"<tool_call>{name}\n"
        f"{elements(arguments, '<arg_key>', '</arg_key><arg_value>', f'</arg_value>{chr(10)}')}</tool_call>"
    ),
    "minimax": lambda name, arguments: (
        f'<minimax:tool_call>\n<invoke name="{name}">\n'
        f"{elements(arguments, '<parameter name=' + chr(34), chr(34) + '>', f'</parameter>{chr(10)}')}"
        "</invoke>\n</minimax:tool_call>"
    ),
    "minimax-m3": lambda name, arguments: (
        f']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="{name}">{minimax_m3(arguments)}]<]minimax[>[</invoke>\n'
        "]<]minimax[>[</tool_call>"
    ),
    "minicpm5": lambda name, arguments: (
        f'<function name="{name}">'
        f"{elements(arguments, '<param name=' + chr(34), chr(34) + '><![CDATA[', ']]></param>')}</function>"
    ),
    "muse": lambda name, arguments: (
        f'<|start|>assistant to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        f"{elements(arguments, '<atem:parameter name=' + chr(34), chr(34) + '>', f'</atem:parameter>{chr(10)}')}"
        "</atem:invoke>\n</atem:function_calls><|eot|>"
    ),
    "nemotron-v2": lambda name, arguments: (
        f"<TOOLCALL>[{json.dumps({'name': name, 'arguments': arguments})}]</TOOLCALL>"
    ),
    "tool-calls": lambda name, arguments: (
        f"<tool_calls>[{json.dumps({'name': name, 'arguments': arguments, 'id': '7'})}]</tool_calls>"
    ),
    "apertus": lambda name, arguments: f"<|tools_prefix|>[{json.dumps({name: arguments})}]<|tools_suffix|>",
    "solar": lambda name, arguments: (
        f"<|tool_calls|><|tool_call:begin|>a1b2<|tool_call:name|>{name}<|tool_call:args|>{json.dumps(arguments)}"
        "<|tool_call:end|><|calls|>"
    ),
    "firefunction": lambda name, arguments: f" functools[{json.dumps({'name': name, 'arguments': arguments})}]",
    "gigachat": lambda name, arguments: (
        f"<|function_call|>{json.dumps({'name': name, 'arguments': arguments})}<|message_sep|>"
    ),
    "gigachat3": lambda name, arguments: (
        f"<|message_sep|>\n\nfunction call<|role_sep|>\n{json.dumps({'name': name, 'arguments': arguments})}"
    ),
    "functionary": lambda name, arguments: f"<function={name}>{json.dumps(arguments)}</function>",
    "functionary-v3-2": lambda name, arguments: f"{name}\n{json.dumps(arguments)}",
    "deepseek-dsml": lambda name, arguments: (
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="{name}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{key}" string="{json.dumps(isinstance(value, str))}">{plain(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        + "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
}
"""Writes a call in each form, as the template or documentation of its model does."""
MARKERS = sorted({mark for form in FORMS.values() for each in form.markers for mark in (each.begin, each.end) if mark})
JSON_TEXTS = st.lists(
    st.one_of(st.text(max_size=5), st.sampled_from([*MARKERS, '"', "'", "\\", "\n", "{", "}", "[ARGS]", "<think>"])),
    max_size=4,
).map("".join)
"""The contents of a JSON string, which may include markers."""
BARE_TEXTS = st.text(st.sampled_from("ab <>/=\"'{}[]:;,\\é字😀\n"), max_size=12).filter(
    lambda text: text == text.strip()
)
KEYS = st.from_regex(r"[a-z]{1,3}_[a-z]", fullmatch=True)
NUMBERS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)


def values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        NUMBERS | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=6,
    )


def arguments_of(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Arguments]:
    return st.dictionaries(KEYS, values(texts), max_size=4)


BARE_ARGUMENTS, JSON_ARGUMENTS = arguments_of(BARE_TEXTS), arguments_of(JSON_TEXTS)
HAS_BARE_TEXT = {"gemma", "qwen3-coder", "glm", "minimax", "deepseek-dsml", "kimi-k3", "minicpm5", "muse"}
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        NUMBERS | BARE_TEXTS,
        lambda inner: st.lists(BARE_TEXTS, max_size=3) | st.lists(NUMBERS, max_size=3) | st.dictionaries(KEYS, inner),
        max_leaves=6,
    ),
    max_size=4,
)
"""Arguments of MiniMax M3, whose format has no JSON."""


def test_every_form_is_written():
    assert WRITERS.keys() == FORMS.keys()


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=MANY)
@given(data=st.data())
def test_calls_come_back_as_they_were_written(name, data):
    kinds = {"minimax-m3": TREES} | dict.fromkeys(HAS_BARE_TEXT, BARE_ARGUMENTS)
    arguments = data.draw(kinds.get(name, JSON_ARGUMENTS))
    text = WRITERS[name]("f", arguments)
    for pieces in ([text], split(text, data)):
        assert read(name, pieces, like=arguments) == ("", "", [("f", arguments)])


CUT_ARGUMENTS: Arguments = {"to_a": 'a "b"\n<c> é😀', "n_b": [1, None, -2.5], "in_c": {"x_d": True, "y_e": "}"}}


@pytest.mark.parametrize("name", WRITERS)
def test_calls_cut_in_two_anywhere_are_read_as_the_whole(name):
    arguments: Arguments = CUT_ARGUMENTS | ({"n_b": ["x", "y"]} if name == "minimax-m3" else {})
    one = WRITERS[name]("f", arguments)
    between = "\n>>>" if name == "functionary-v3-2" else "\n"
    for text, expected in (
        (f"{one}{between}{one}", ("", "", [("f", arguments)] * 2)),
        (f"<think>\nHm.\n</think>\n\nWell.\n{one}\nDone.", None),
    ):
        whole = read(name, [text], thinking=THINK, like=arguments)
        assert expected in (None, whole)
        for at in range(len(text) + 1):
            assert read(name, [text[:at], text[at:]], thinking=THINK, like=arguments) == whole, text[:at]
        assert read(name, list(text), thinking=THINK, like=arguments) == whole


@pytest.mark.parametrize("printed", ["</tool_call>", "\x1f</tool_call>", 'a "</tool_call>', "\\</tool_call>"])
def test_an_argument_may_contain_the_end_of_a_call(printed):
    text = hermes("f", {"a": printed})
    assert read("hermes", [text]) == read("hermes", list(text)) == ("", "", [("f", {"a": printed})])


def test_a_bad_escape_ends_a_call_and_later_calls_are_read():
    wrong, right = '[TOOL_CALLS]f[ARGS]{"a": "\\u12"}', '[TOOL_CALLS]f[ARGS]{"a": 1}'
    assert (
        read("mistral", [wrong + right])
        == read("mistral", list(wrong + right))
        == (
            "",
            '\\u12"}',
            [("f", '{"a": "' + CUT), ("f", {"a": 1})],
        )
    )


def test_a_block_of_code_that_is_no_call_is_text():
    for name in ("gemma", "json"):
        for text in ('So:\n\n```json\n{"a": 1}\n```\nand on.', "```json\n{", "```python\nf(a=1)\n```"):
            assert read(name, [text]) == read(name, list(text)) == ("", text, [])


WORDS = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from([*MARKERS, *(mark for form in FORMS.values() for mark in (*form.noise, *form.frames))]),
        st.sampled_from(["<think>", "</think>", "[TOOL_CALLS]f[ARGS]", '{"name": "f"', "[f(a=", "call:f{", "\n", " "]),
        st.sampled_from(["<|message|>", "<|start|>", "<|channel|>analysis", "to=functions.f", "<|end|>", "<|call|>"]),
        st.sampled_from([">>>", ">>>all\n", ">>>f\n", "all\n", "f\n", "to=f<|message|>", "to=self", "<|eom|>"]),
        st.sampled_from(['<atem:function_calls><atem:invoke name="f">', "</atem:invoke></atem:function_calls>"]),
    ),
    max_size=8,
).map("".join)


def bare(text: str, name: str) -> str:
    """``text`` without white space and without the control tokens around calls in the form ``name``."""
    for mark in FORMS[name].noise:
        text = text.replace(mark, "") if "|" in mark or "｜" in mark else text
    for mark in FORMS[name].frames:
        text = text.replace(mark, "")
    return "".join(text.split())


@pytest.mark.parametrize("name", sorted(name for name, form in FORMS.items() if form.reader is None))
@settings(max_examples=MANY)
@given(text=WORDS)
def test_nothing_is_lost_where_nothing_is_called(name, text):
    for pieces in ([text], list(text)):
        thought, printed, calls = read(name, pieces)
        assert thought == ""
        assert calls or bare(printed, name) == bare(text, name)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=MANY)
@given(text=WORDS, opened=st.booleans(), data=st.data())
def test_any_splitting_of_any_text_is_read_alike(name, text, opened, data):
    pieces = split(text, data)
    assert read(name, pieces) == read(name, [text])
    whole = read(name, [text], thinking=THINK, opened=opened)
    assert read(name, pieces, thinking=THINK, opened=opened) == whole


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3-json", "int a = 1; int b;\n"),
        ("minimax", "Calls stand in <minimax:tool_call> and </minimax:tool_call> ."),
        ("qwen3-coder", "a </tool_call>"),
    ],
)
def test_markers_of_other_formats_are_text(name, text):
    for pieces in ([text], list(text)):
        assert read(name, pieces) == ("", text, [])


def test_a_model_may_open_thoughts_that_the_prompt_opened():
    for pieces in (["<think>\nHm.</think>Hi"], list("\n<think>Hm.</think>\nHi")):
        assert read("hermes", pieces, thinking=THINK, opened=True) == ("Hm.", "Hi", [])


def test_text_that_never_becomes_a_call_is_returned_as_text():
    for text in (f"[TOOL_CALLS]{'x' * MAX_PREFIX_CHARS}", f"<|python_tag|>{'x' * MAX_PREFIX_CHARS}"):
        name = "mistral" if text.startswith("[") else "llama3-json"
        assert read(name, [text, " more"])[1] == f"{text} more"
    text = "<tool_call></tool_call>" * (MAX_FAILED + 1)
    assert read("hermes", [text]) == read("hermes", list(text)) == ("", text, [])
    thought, printed, calls = read("gpt-oss", ["<|channel|>analysis", " x" * 300, "<|end|>Hi"])
    assert (thought, calls) == ("", [])
    assert printed.count("x") == 300
