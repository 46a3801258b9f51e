"""The model's chat template, rendered as Hugging Face does, in a sandbox."""

from __future__ import annotations

from datetime import datetime

import pytest

from primad.api.answering.chat import render, tokenize_prompt
from primad.errors import ModelError, RequestError
from tests.fakes.backend import BOS, IM_END, IM_START, ByteVocabulary

NOW = datetime(2025, 2, 3, 4, 5, 6)
HELLO = [{"role": "user", "content": "Hi"}]


def rendered(template: str, messages=HELLO) -> str:
    return render(ByteVocabulary(chat_template=template), messages, now=NOW)


def prompt_of(vocabulary: ByteVocabulary) -> list[int]:
    return tokenize_prompt(vocabulary, render(vocabulary, HELLO, now=NOW)).tokens


def test_a_model_without_a_template_gets_chatml():
    assert (
        render(ByteVocabulary(), [{"role": "system", "content": "Be brief."}, *HELLO], now=NOW)
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_of_the_template_are_parsed():
    tokens = prompt_of(ByteVocabulary())
    assert tokens == [BOS, IM_START, *b"user\nHi", IM_END, *b"\n", IM_START, *b"assistant\n"]


@pytest.mark.parametrize("template", ["{{ bos_token }}Hi", "Hi"])
def test_bos_is_never_doubled(template):
    tokens = prompt_of(ByteVocabulary(chat_template=template))
    assert tokens == [BOS, *b"Hi"]


def test_a_model_without_bos_gets_none():
    vocabulary = ByteVocabulary(chat_template="{{ bos_token }}Hi", bos="", adds_bos=False)
    assert prompt_of(vocabulary) == [*b"Hi"]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2025"),
        ("{{ {'ä': [1, none]} | tojson }}", '{"ä": [1, null]}'),
        ("{{ messages | tojson(indent=1) }}", '[\n {\n  "role": "user",\n  "content": "Hi"\n }\n]'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc", "a\n  b\nc"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("x{% generation %}{{ messages[0].content }}{% endgeneration %}y", "xHiy"),
        ("{{ undefined_thing }}|{{ messages[0]['content'] | trim }}", "|Hi"),
    ],
)
def test_the_environment_is_hugging_faces(template, text):
    assert rendered(template) == text


def test_a_developers_message_is_a_system_message():
    assert rendered("{{ messages[0].role }}", [{"role": "developer", "content": "x"}]) == "system"


def test_a_message_is_never_taken_for_a_template():
    message = "{{ 7 * 7 }}{% raw %}"
    assert rendered("{{ messages[0].content }}", [{"role": "user", "content": message}]) == message


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ missing.attribute }}",
        "{{ messages[7].role }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ strftime_now.__self__.year }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_refuses_the_request(template):
    with pytest.raises(RequestError, match="chat template refuses the messages") as caught:
        rendered(template)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "change",
    ["|attr('append')", "['append']", "|attr('app' ~ 'end')", ".append ", '.clear if 0 else messages["append"]'],
)
def test_a_template_changes_no_list_of_which_it_gets_no_copy(change):
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match="unsafe"):
        render(ByteVocabulary("{{ (messages" + change + ")('x') }}"), messages, now=NOW)
    assert len(messages) == 1


def test_the_templates_own_words_reach_the_client():
    with pytest.raises(RequestError, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("template", ["{% if %}", "{{", "{% nonsense %}", "{{ x | nofilter }}", "(" * 3 + "{{ ((( }}"])
def test_a_broken_template_is_the_model_files_fault(template):
    with pytest.raises(ModelError, match=r"does not compile.*serve --chat-template FILE"):
        rendered(template)


def test_half_a_character_becomes_no_part_of_a_prompt():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": r'{"a": "x\ud800y"}'}}
    printed = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = "{% for each in messages[1].tool_calls %}{{ each.function.arguments.a }}{% endfor %}{{ '\\udfff' }}Hi"
    assert render(ByteVocabulary(chat_template=template), printed, now=NOW) == "x?y?Hi"


@pytest.mark.parametrize("words", [r"\ud800", r"\x1b[2J", "x" * 100_000])
def test_a_refusal_of_a_template_is_a_short_line(words):
    vocabulary = ByteVocabulary(chat_template=f"{{{{ raise_exception('{words}') }}}}")
    with pytest.raises(RequestError) as caught:
        render(vocabulary, [{"role": "user", "content": "Hi"}], now=NOW)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
