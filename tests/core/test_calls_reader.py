"""A completion is parsed into thoughts, text and calls, however it is split."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.api.answering.calls.choose import Thinking, form_of, thinks
from primad.api.answering.calls.events import TextPiece
from primad.api.answering.calls.forms import FORMS
from primad.api.answering.calls.reader import Reader
from primad.api.answering.reading import AUTO, CompletionReading, manner_of
from primad.api.answering.tool_prompt import written_call
from tests.fakes.reported import CUT, calls_in

FUNCTIONS: dict[str, dict[str, Any] | None] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": "string"}},
    },
    "now": None,
}
THINK = Thinking(begin="<think>", end="</think>")
ROME = {"city": "Rome", "days": 3}
CALL = json.dumps({"name": "weather", "arguments": ROME})
WRITTEN = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "qwen3-coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "llama3-json": json.dumps({"name": "weather", "parameters": ROME}),
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "deepseek": f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{json.dumps(ROME)}<｜tool▁call▁end｜>",
    "minimax": '<invoke name="weather">\n<parameter name="city">Rome</parameter>\n<parameter name="days">3</parameter>\n'
    "</invoke>",
    "json": CALL,
    "llama3-pythonic": "[weather(city='Rome', days=3)]",
    "gpt-oss": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{json.dumps(ROME)}",
    "deepseek-dsml": '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>',
    "gemma": '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>',
    "kimi-k3": '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome'
    '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>',
    "phi-4-mini": f"<|tool_call|>[{CALL}]<|/tool_call|>",
    "granite": f"<|tool_call|>[{CALL}]",
    "command-r": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
    f"{json.dumps(ROME)}}}\n]<|END_ACTION|>",
    "minimax-m3": ']<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Rome]<]minimax[>[</city>]<]minimax[>[<days>3'
    "]<]minimax[>[</days>]<]minimax[>[</invoke>",
    "minicpm5": '<function name="weather"><param name="city">Rome</param><param name="days">3</param></function>',
    "muse": '<|start|>assistant to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
    '<atem:parameter name="city">Rome</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls><|eot|>",
    "nemotron-v2": f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    "tool-calls": f"<tool_calls>[{CALL}]</tool_calls>",
    "apertus": f'<|tools_prefix|>[{{"weather": {json.dumps(ROME)}}}]<|tools_suffix|>',
    "solar": f"<|tool_call:begin|>a1<|tool_call:name|>weather<|tool_call:args|>{json.dumps(ROME)}<|tool_call:end|>",
    "firefunction": f"functools[{CALL}]",
    "gigachat": f"<|function_call|>{CALL}",
    "gigachat3": f"function call<|role_sep|>\n{CALL}",
    "functionary": f"<function=weather>{json.dumps(ROME)}</function>",
    "functionary-v3-2": f"weather\n{json.dumps(ROME)}",
    "kimi": f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{json.dumps(ROME)}<|tool_call_end|>",
}
"""The last ones are from llama.cpp's models/templates (Kimi-K3, Phi-4-mini-instruct, c4ai-command-r7b-12-2024) and
from IBM's documentation of Granite 3 (ibm.com/granite/docs)."""
OTHERS = [
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{json.dumps(ROME)}"),
    (
        "deepseek",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{json.dumps(ROME)}\n```<｜tool▁call▁end｜>",
    ),
    ("deepseek", f"<｜tool▁calls▁begin｜>{WRITTEN['deepseek']}<｜tool▁calls▁end｜>"),
    ("llama3-json", f"<|python_tag|>{WRITTEN['llama3-json']}"),
    ("qwen3-coder", f"<tool_call>{CALL}</tool_call>"),
    ("minimax", f"<minimax:tool_call>\n{WRITTEN['minimax']}\n</minimax:tool_call>"),
    ("kimi-k3", f"<|open|>tools<|sep|>{WRITTEN['kimi-k3']}<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"),
    (
        "kimi-k3",
        '<|open|>call tool="weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
        f"{json.dumps(ROME)}<|close|>json<|sep|><|close|>call<|sep|>",
    ),
    ("phi-4-mini", f"<|tool_call|>{CALL}<|/tool_call|>"),
    ("granite", f"<tool_call>[{CALL}]</tool_call>"),
    ("command-r", f'Action: ```json\n[{{"tool_name": "weather", "parameters": {json.dumps(ROME)}}}]\n```'),
    ("gemma", "<start_function_call>call:weather{city:<escape>Rome<escape>,days:3}<end_function_call>"),
    ("gemma", "```tool_code\n[weather(city='Rome', days=3)]\n```"),
    ("gemma", f"```json\n{CALL}\n```"),
    ("json", f"```json\n{CALL}\n```"),
    ("llama3-pythonic", '<|tool_call_start|>[weather(city="Rome", days=3)]<|tool_call_end|>'),
    ("llama3-pythonic", '<function_calls>\nweather(city="Rome", days=3)\n</function_calls>'),
    ("qwen3-coder", WRITTEN["qwen3-coder"].replace("tool_call>", "seed:tool_call>")),
    ("qwen3-coder", f"<tool_call><function=weather>{json.dumps(ROME)}</function></tool_call>"),
    (
        "glm",
        "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n<arg_key:opensource>city"
        "</arg_key:opensource>\n<arg_value:opensource>Rome</arg_value:opensource>\n<arg_key:opensource>days"
        "</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
    ),
    ("minimax-m3", f"]<]minimax[>[<tool_call>\n{WRITTEN['minimax-m3']}\n]<]minimax[>[</tool_call>"),
    ("minicpm5", WRITTEN["minicpm5"].replace(">Rome<", "><![CDATA[Rome]]><")),
    ("solar", f"<|think|><|end|><|begin|>assistant<|tool_calls|>{WRITTEN['solar']}<|calls|>".partition("<|end|>")[2]),
    ("gigachat3", f"<|message_sep|>\n\n{WRITTEN['gigachat3']}<|message_sep|>"),
    ("functionary-v3-2", f">>>{WRITTEN['functionary-v3-2']}"),
    ("tool-calls", f"<tool_calls>\n{CALL}\n</tool_calls>"),
    ("tool-calls", f"<tool_call>[{CALL}]</tool_call>"),
    ("command-r", f"Action:\n```json\n[{CALL}]\n```"),
]
STREAMED = [
    "apertus",
    "command-r",
    "deepseek",
    "firefunction",
    "functionary",
    "functionary-v3-2",
    "gigachat",
    "gigachat3",
    "gpt-oss",
    "granite",
    "hermes",
    "json",
    "kimi",
    "llama3-json",
    "mistral",
    "nemotron-v2",
    "phi-4-mini",
    "solar",
    "tool-calls",
]
"""The forms whose calls are streamed."""
Read = tuple[str, str, list[tuple[str, Any]]]


def read(name: str | None, pieces: list[str], *, thinking: Thinking | None = None, opened: bool = False) -> Read:
    asked = CompletionReading(
        form=name, thinking=thinking, opened=opened, functions=FUNCTIONS, several=True, shows_control=True
    )
    reader = asked.reader()
    reported = [*map(reader.feed, pieces), reader.finish()]
    return "".join(each.thought for each in reported), "".join(each.text for each in reported), calls_in(reported)


def test_a_form_goes_by_its_name_and_stands_for_it():
    for name, form in FORMS.items():
        asked = CompletionReading(
            form=str(form), thinking=None, opened=False, functions=FUNCTIONS, several=True, shows_control=True
        )
        assert asked.form == name
        as_it_is: Any = form
        assert type(replace(asked, form=as_it_is).reader()) is type(asked.reader())


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.call_form is not None])
def test_a_call_that_a_grammar_enforces_is_read(name):
    form = FORMS[name].call_form
    assert form is not None
    calls = [written_call("weather", json.dumps(ROME), form), written_call("now", "{}", form)]
    for text, reported in ((calls[0], 1), (form.between.join(calls), 2)):
        assert read(name, list(text)) == ("", "", [("weather", ROME), ("now", {})][:reported])


def test_there_is_an_example_of_every_form():
    assert WRITTEN.keys() == FORMS.keys()


@pytest.mark.parametrize(("name", "text"), [*WRITTEN.items(), *OTHERS])
def test_a_call_in_every_form(name, text):
    assert read(name, [text]) == ("", "", [("weather", ROME)])
    assert read(name, list(text)) == ("", "", [("weather", ROME)])


@pytest.mark.parametrize("name", sorted(name for name, form in FORMS.items() if form.reader is None))
def test_half_a_call_and_garbage_are_text(name):
    text = WRITTEN[name]
    for wrong in (
        text[: len(text) // 3],
        text.replace("weather", "other"),
        f"no {{call}} [TOOL <tool_ {text[:5]}",
        "{}",
        "[]",
    ):
        assert read(name, [wrong]) == ("", wrong, [])
        assert read(name, list(wrong)) == ("", wrong, [])


@pytest.mark.parametrize(
    "name",
    [
        "hermes",
        "qwen3-coder",
        "glm",
        "mistral",
        "deepseek",
        "deepseek-dsml",
        "gemma",
        "kimi",
        "minimax",
        "kimi-k3",
        "granite",
        "minimax-m3",
        "minicpm5",
        "nemotron-v2",
        "tool-calls",
        "apertus",
        "solar",
        "firefunction",
        "gigachat",
        "functionary",
    ],
)
def test_text_before_calls_and_several_of_them(name):
    text = f"Let me see.\n\n{WRITTEN[name]}\n{WRITTEN[name]}"
    assert read(name, list(text)) == ("", "Let me see.", [("weather", ROME)] * 2)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 5000])
def test_invalid_json_ends_a_call_and_is_text(number):
    before, after = WRITTEN["hermes"].split("3")
    cut = before.partition('"arguments": ')[2]
    for pieces in ([before, number, after], [before + number + after]):
        assert read("hermes", pieces) == ("", number + after, [("weather", cut + CUT)])


@pytest.mark.parametrize("name", STREAMED)
def test_a_call_that_is_cut_off_in_its_arguments_is_one(name):
    for cut in ('{"city": "Ro', '{"city": "Rome", "days": ', '{"'):
        text = WRITTEN[name].partition(json.dumps(ROME))[0] + cut
        assert read(name, [text]) == read(name, list(text)) == ("", "", [("weather", cut + CUT)])


@pytest.mark.parametrize("name", STREAMED)
def test_a_call_is_streamed_as_it_forms(name):
    reader = CompletionReading(
        form=name, thinking=None, opened=False, functions=FUNCTIONS, several=True, shows_control=True
    ).reader()
    head, arguments, rest = WRITTEN[name].partition(json.dumps(ROME))
    assert not any(reader.feed(char).calls for char in head)
    parts = [part for char in arguments for part in reader.feed(char).calls]
    assert [part.name for part in parts] == ["weather", *[None] * (len(parts) - 1)]
    assert len(parts) > len(arguments) // 2
    assert "".join(part.arguments for part in parts) == arguments
    assert [part.is_whole for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (reader.feed(rest), reader.finish()) == (TextPiece(), TextPiece())


@pytest.mark.parametrize(
    ("name", "text", "rest"),
    [
        ("hermes", f"<tool_call>{CALL[:-1]}</tool_call>", ""),
        ("hermes", f"<tool_call>{CALL} and more", " and more"),
        ("hermes", f'<tool_call>{CALL[:-1]}, "id": "x"}}</tool_call>', ""),
        ("hermes", f"<tool_call>{CALL[:-1]}] {{", "] {"),
        ("mistral", f"[TOOL_CALLS][{CALL} and more", " and more"),
        ("mistral", f"[TOOL_CALLS][{CALL}, 7]", ", 7]"),
        ("json", f"[{CALL}", ""),
    ],
)
def test_text_that_does_not_close_a_call_is_text(name, text, rest):
    assert read(name, [text]) == read(name, list(text)) == ("", rest, [("weather", ROME)])


def test_markers_without_calls_end_the_search_for_calls_in_a_long_text():
    looks: list[int] = []

    class Looking(Reader):
        def _begun(self):
            looks.append(len(self._held))
            return super()._begun()

    for form in FORMS.values():
        marker = next((each.begin for each in form.markers if each.begin), "")
        text = f"{marker} " * 20_000
        looks.clear()
        reader = Looking(form, None, opened=False, functions=FUNCTIONS)
        reader.feed(text)
        reader.finish()
        assert sum(looks) < 12 * len(text), form.name


def test_a_list_of_calls():
    text = f'[TOOL_CALLS][{CALL[:-1]}, "id": "123456789"}}, {CALL}]'
    assert read("mistral", [text]) == read("mistral", list(text)) == ("", "", [("weather", ROME)] * 2)


def test_text_after_a_call_keeps_its_whitespace():
    assert read("hermes", list(f"One {WRITTEN['hermes']}\ntwo ")) == ("", "One \ntwo ", [("weather", ROME)])


def test_channels():
    printed = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        f"<|start|>assistant{WRITTEN['gpt-oss']}"
    )
    assert read("gpt-oss", list(printed)) == ("Hm.", "Wait.", [("weather", ROME)])
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi "
    assert read("gpt-oss", list(final)) == ("Hm.", "Hi ", [])
    assert read("gpt-oss", ['{"a": 1}']) == ("", '{"a": 1}', [])
    thought, text, calls = read("gpt-oss", list(WRITTEN["gpt-oss"].replace("weather", "other")))
    assert (thought, calls) == ("", [])
    assert '"city": "Rome"' in text


def test_markers_around_a_completion_are_no_text():
    for name, text in (
        ("command-r", "<|START_RESPONSE|>Hi there.<|END_RESPONSE|>"),
        ("kimi-k3", "<|open|>response<|sep|>Hi there.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"),
    ):
        assert FORMS[name].reads_text
        assert read(name, [text]) == read(name, list(text)) == ("", "Hi there.", [])


def test_llama_separates_calls():
    text = WRITTEN["llama3-json"]
    assert read("llama3-json", [f"{text}; {text}"])[2] == [("weather", ROME)] * 2


@pytest.mark.parametrize(
    ("text", "opened", "thought", "rest"),
    [
        ("<think>\nHm.\n</think>\n\nHi", False, "Hm.", "Hi"),
        ("Hm.\n</think>\n\nHi", True, "Hm.", "Hi"),
        ("\n<think>Hm", False, "Hm", ""),
        (" Hi <think>", False, "", " Hi <think>"),
        ("<thin", False, "", "<thin"),
        ("</think>Hi ", True, "", "Hi "),
        ("Hm</thin", True, "Hm</thin", ""),
    ],
)
def test_thoughts(text, opened, thought, rest):
    for pieces in ([text], list(text)):
        assert read(None, pieces, thinking=THINK, opened=opened) == (thought, rest, [])
    assert read("hermes", list(text), thinking=THINK, opened=opened) == (thought, rest, [])


def test_a_marker_inside_of_thoughts_is_no_call():
    thought, text, calls = read("hermes", [f"<think>{WRITTEN['hermes']}</think>Hi"], thinking=THINK)
    assert (thought, text, calls) == (WRITTEN["hermes"], "Hi", [])


@pytest.mark.parametrize(
    "printed",
    [
        "I could <tool_call> a function, weather, and ",
        f"Not {WRITTEN['hermes'].replace('weather', 'other')} but ",
        "<tool_call>weather</tool_call> is ",
        f"<tool_call>\n{'x' * 400}",
        '{"name": "weather"} ',
    ],
)
def test_thoughts_after_a_marker_that_begins_no_call_are_streamed_at_once(printed):
    reader = CompletionReading(
        form="hermes", thinking=THINK, opened=True, functions=FUNCTIONS, several=True, shows_control=True
    ).reader()
    assert "".join(reader.feed(char).thought for char in f"{printed}Hm!") == f"{printed}Hm!"
    assert reader.feed("</think>Hi").text + reader.finish().text == "Hi"


def test_a_call_that_thoughts_do_not_end_before_is_one():
    printed = f"I could <tool_call> it: {WRITTEN['hermes']}"
    for pieces in ([printed], list(printed)):
        assert read("hermes", pieces, thinking=THINK, opened=True) == (
            "I could <tool_call> it:",
            "",
            [("weather", ROME)],
        )


PARTS = st.lists(
    st.sampled_from(
        [*WRITTEN.values(), "<think>", "</think>", "Hi", " ", "\n", "<", "{", "[", '"', "}", "]", "\\", "é"]
    ),
    max_size=6,
).map("".join)


@given(text=PARTS, name=st.sampled_from([None, *WRITTEN]), opened=st.booleans(), data=st.data())
def test_every_splitting_is_read_alike(text, name, opened, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for thinking in (None, THINK):
        is_open = opened and thinking is not None
        whole = read(name, [text], thinking=thinking, opened=is_open)
        assert read(name, pieces, thinking=thinking, opened=is_open) == whole


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' }}", "qwen3-coder"),
        ("<tool_call>{{ '<arg_key>' }}", "glm"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3-json"),
        ("{{ '<｜tool▁call▁begin｜>' }}", "deepseek"),
        ("{{ '<minimax:tool_call>' }}", "minimax"),
        ("{{ '<|channel|>' }}", "gpt-oss"),
        ("{{ '<|tool_call>call:' }}", "gemma"),
        ("{{ '<|tool_call_begin|>' }}", "kimi"),
        ("{{ '｜DSML｜' }}", "deepseek-dsml"),
        ("{{ '<|python_start|>' }}", "llama3-pythonic"),
        ("{{ '<|open|>' + tag }}", "kimi-k3"),
        ("{{ '<|START_ACTION|>[' }}", "command-r"),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi-4-mini"),
        ("respond only with <|tool_call|> followed by a JSON list of tools used", "granite"),
        ("<|tool_list_start|>[", "llama3-pythonic"),
        ("List of tools: [", "llama3-pythonic"),
        ("<function_calls>", "llama3-pythonic"),
        ("<AVAILABLE_TOOLS><TOOLCALL>[", "nemotron-v2"),
        ("<|tools_prefix|>", "apertus"),
        ("<seed:tool_call>\n<function=f>", "qwen3-coder"),
        ("<tool_calls>[ within <tool_call></tool_call>", "tool-calls"),
        ("<tool_calls{}> <arg_key{}>", "glm"),
        ('<function=example_function_name>{"example_name', "functionary"),
        (">>>all", "functionary-v3-2"),
        ("]<]minimax[>[<tool_call>", "minimax-m3"),
        ('<function name="f"><param name="k">', "minicpm5"),
        ('<atem:invoke name="f">', "muse"),
        ("<|tool_call:begin|>", "solar"),
        ("functools[", "firefunction"),
        ("<|function_call|> `function call`", "gigachat"),
        ("'role': 'function call'", "gigachat3"),
        ("<tool_call> For each function call, return", "hermes"),
        ("'Write \\'Action:\\' followed by'", "command-r"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_form_is_read_off_the_template(template, name):
    assert form_of(template).name == name


@pytest.mark.parametrize(
    ("template", "answer", "thought", "printed"),
    [
        ("<mm:think></mm:think>", "<mm:think>hm</mm:think>Hi", "hm", "Hi"),
        ("<mm:think></mm:think>", "</mm:think>Hi", "", "Hi"),
        ("<think></think>", "Hi </think> <think>", "", "Hi </think> <think>"),
        ("<think{}></think{}>", "<think:opensource>hm</think:opensource>Hi", "hm", "Hi"),
        ("<|inner_prefix|><|inner_suffix|>", "<|inner_prefix|>hm<|inner_suffix|>Hi", "hm", "Hi"),
        (
            "<|START_ACTION|><|END_THINKING|>",
            "<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>Hi<|END_TEXT|>",
            "hm",
            "Hi",
        ),
        ("<|tool_call><channel|>", "<|channel>thought\nhm<channel|>Hi<channel|>", "hm", "Hi"),
        ("<|tool_call><channel|>", "Hi<|channel>thought\nhm<channel|>", "hm", "Hi"),
        ("<|tool_call:begin|>", "<|think|>hm<|end|><|begin|>assistant<|content|>Hi<|end|>", "hm", "Hi"),
        ("<tool_calls>[BEGIN FINAL RESPONSE]", "[BEGIN FINAL RESPONSE]\nHi\n[END FINAL RESPONSE]", "", "Hi"),
        (
            "<tool_calls>[BEGIN FINAL RESPONSE]",
            "Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\nHi[END FINAL RESPONSE]",
            "hm",
            "Hi",
        ),
        ("<atem:invoke", " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Hi<|eot|>", "hm", "Hi"),
        (">>>all", "all\nHi >>> 1 + 1", "", "Hi >>> 1 + 1"),
        ("<|function_call|>", "Hi<|message_sep|>", "", "Hi"),
    ],
)
def test_markers_that_families_write_around_completions_are_no_text(template, answer, thought, printed):
    manner = manner_of(template, AUTO)
    for name in {manner.form.name if manner.form.reads_text else None, manner.form.name}:
        for pieces in ([answer], list(answer)):
            assert read(name, pieces, thinking=manner.thinking) == (thought, printed, [])


def test_consecutive_objects_are_several_calls():
    for name, begin, end in (
        ("tool-calls", "<tool_calls>", "</tool_calls>"),
        ("hermes", "<tool_call>", "</tool_call>"),
    ):
        text = f"{begin}\n{CALL}\n{CALL}\n{end}"
        assert read(name, [text]) == read(name, list(text)) == ("", "", [("weather", ROME)] * 2)


def test_messages_to_functions_are_calls():
    functionary = f"all\nLet me see.>>>weather\n{json.dumps(ROME)}\n>>>weather\n{json.dumps(ROME)}"
    muse = f"to=self<|message|>Hm.<|eom|>{WRITTEN['muse']}{WRITTEN['muse']}"
    for name, text, thought, printed in (
        ("functionary-v3-2", functionary, "", "Let me see."),
        ("muse", muse, "Hm.", ""),
    ):
        assert read(name, [text]) == read(name, list(text)) == (thought, printed, [("weather", ROME)] * 2)
    for name in ("functionary-v3-2", "muse"):
        wrong = WRITTEN[name].replace("weather", "other")
        assert read(name, [wrong])[2] == []
        assert "Rome" in read(name, [wrong])[1]


def test_thoughts_are_read_off_the_template():
    assert thinks("{{ '<think>' }}{{ '</think>' }}") == THINK
    assert thinks("{{ messages }}") is None
    assert thinks("{{ '<|open|>' + tag }}") == Thinking(begin="<|open|>think<|sep|>", end="<|close|>think<|sep|>")
    assert thinks("<|START_THINKING|><|END_THINKING|>") == Thinking(begin="<|START_THINKING|>", end="<|END_THINKING|>")
