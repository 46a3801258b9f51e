"""Strict chat templates: the history that clients resend reaches the model, whatever its template requires."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from primad.api.answering.backend import TextModel
from primad.api.answering.chat import render
from primad.api.dialects.anthropic.job import chat_request as of_anthropic
from primad.api.dialects.anthropic.schema import MessagesRequest
from primad.api.dialects.ollama.job import chat_request as of_ollama
from primad.api.dialects.ollama.schema import OllamaChatRequest
from primad.api.dialects.openai.job import chat_job
from primad.api.dialects.openai.schema import ChatRequest, parse
from primad.api.dialects.responses.job import chat_request as of_responses
from primad.api.dialects.responses.schema import ResponsesRequest
from primad.errors import ModelError, RequestError
from primad.head.model.vocabulary import chat_template_in
from tests.fakes.backend import ByteVocabulary
from tests.fakes.histories import HISTORIES, Message, assistant, call, result, system, user

NOW = datetime(2025, 2, 3)
EACH = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}"
)
OPENS = "{% if add_generation_prompt %}[assistant]{% endif %}"


def refusing(condition: str, reason: str) -> str:
    return f"{{% for m in messages %}}{{% if {condition} %}}{{{{ raise_exception('{reason}') }}}}{{% endif %}}{{% endfor %}}"


ALTERNATE = (
    "{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role != 'tool' and m.role != 'system' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"
)
CALLS_OR_TEXT = EACH.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
TEMPLATES = {
    "takes all": EACH,
    "alternate": ALTERNATE + EACH,
    "alternate, tools as well": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + EACH,
    "alternate after a system message": refusing("m.role == 'system' and not loop.first", "only first")
    + ALTERNATE
    + EACH,
    "system first": refusing("m.role == 'system' and not loop.first", "must be at the beginning") + EACH,
    "no system role": refusing("m.role == 'system'", "System role not supported") + EACH,
    "no system role, alternate": refusing("m.role == 'system'", "System role not supported") + ALTERNATE + EACH,
    "later system messages dropped": EACH.replace(
        "[{{ m.role }}]", "{% if m.role != 'system' or loop.first %}[{{ m.role }}]"
    ).replace("{{ m.content }}", "{{ m.content }}{% endif %}"),
    "first system message dropped": "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.s = m.content %}{% endfor %}{{ ns.s }}{% for m in messages if m.role != 'system' %}[{{ m.role }}]"
    "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}",
    "all system messages dropped": EACH.replace("in messages", "in messages if m.role != 'system'"),
    "system with the last user": "{% for m in messages if m.role != 'system' %}"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}",
    "last must be the user": "{% if messages[-1].role != 'user' %}{{ raise_exception('last must be user') }}{% endif %}"
    + EACH,
    "a user must be there": "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found') }}{% endif %}" + EACH,
    "user first": "{% set m = messages[1] if messages[0].role == 'system' else messages[0] %}"
    "{% if m.role != 'user' %}{{ raise_exception('a user begins') }}{% endif %}" + EACH,
    "no empty assistant": refusing("m.role == 'assistant' and not m.content and not m.tool_calls", "must say something")
    + EACH,
    "content has a length": "{% if messages[0].content is none %}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.content | length > 0 %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}({{ c.function.name }})"
    "{% endfor %}{% endfor %}",
    "one call at a time": refusing("m.tool_calls and m.tool_calls | length > 1", "single tool-calls") + EACH,
    "calls or text": CALLS_OR_TEXT,
    "calls or text, alternate": ALTERNATE + CALLS_OR_TEXT,
    "the last answer continues": EACH.replace("m.tool_calls or []", "([] if loop.last else m.tool_calls) or []"),
    "a call that begins is dropped": EACH.replace("m.tool_calls or []", "([] if loop.first else m.tool_calls) or []"),
    "no tools": EACH.partition("{% for c")[0] + "{% endfor %}",
    "results need their call": "{% for m in messages %}{% if m.role == 'tool' and messages[loop.index0 - 1].role not in "
    "['assistant', 'tool'] %}{{ raise_exception('no previous call') }}{% endif %}{% endfor %}" + EACH,
    "results dropped": EACH.replace("in messages", "in messages if m.role != 'tool'"),
    "contents in parts": "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% endfor %}",
    "no marker in an answer": refusing("m.role == 'assistant' and '<|channel|>' in m.content", "tags in content")
    + EACH
    + "{# <|channel|> #}",
    "goes through no tools": "{% for tool in tools %}{{ tool }}{% endfor %}" + EACH,
    "written as JSON": "{% for m in messages %}{{ m.role }}: {{ m.content | tojson }}\n"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_takes_every_history_and_renders_all_its_messages(name):
    vocabulary = ByteVocabulary(chat_template=TEMPLATES[name])
    for history, messages in HISTORIES.items():
        got = render(vocabulary, messages, now=NOW)
        for message in messages:
            is_shown = message["content"] in got or (history == "marker" and "answer-one" in got)
            assert is_shown, f"{history}: {message} is not in {got!r}"
        assert "qzmark" not in got, history
        if any(message.get("tool_calls") for message in messages) and name != "contents in parts":
            assert "weather" in got, f"{history}: no call in {got!r}"


class _Counting(ByteVocabulary):
    """Counts renderings by reads of ``bos``."""

    seen = 0

    @property
    def bos(self) -> str:  # type: ignore[override]
        self.__class__.seen += 1
        return "<s>"

    @bos.setter
    def bos(self, _: str) -> None:
        pass


CALLS = "{% for c in m.tool_calls or [] %}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
OF_CALLS = {
    "takes all": "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + CALLS,
    "the first call": "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}({{ m.tool_calls[0].function.arguments | tojson }}){% endif %}{% endfor %}",
    "one call at a time": "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('single tool-calls') }}{% endif %}[{{ m.role }}]{{ m.content }}" + CALLS,
    "text or calls": "{% for m in messages %}[{{ m.role }}]{% if m.content %}{{ m.content }}{% else %}"
    + CALLS.replace("{% endfor %}{% endfor %}", "{% endfor %}{% endif %}{% endfor %}"),
    "a queue of its own": "{% set q = namespace(ids=[]) %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% set _ = q.ids.append(c.id) %}{% endfor %}{% if m.role == 'tool' %}{{ q.ids.pop(0) }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}" + CALLS,
}


@pytest.mark.parametrize("name", OF_CALLS)
def test_every_call_is_rendered_in_the_form_of_the_template(name):
    calls = [
        {"id": each, "type": "function", "function": {"name": "f", "arguments": json.dumps({"to": each})}}
        for each in "ab"
    ]
    asked = [
        user("user-one"),
        assistant("text-one", tool_calls=calls),
        result("result-a", "a"),
        result("result-b", "b"),
    ]
    before = json.dumps(asked)
    got = render(ByteVocabulary(chat_template=OF_CALLS[name]), [*asked, user("user-two")], now=NOW)
    shown = ["user-one", "text-one", '({"to": "a"})', '({"to": "b"})', "result-b", "user-two"]
    assert [each for each in shown if each not in got] == []
    assert [got.index(each) for each in shown] == sorted(got.index(each) for each in shown)
    assert got.index('({"to": "a"})') < got.index("result-a") < got.index("result-b")
    assert json.dumps(asked) == before, "what the client sent is as it was"


def test_a_template_changes_nothing_that_it_was_given():
    source = "{% set _ = messages.pop() %}{% for m in messages %}{{ m.content }}{% endfor %}"
    asked = [user("user-one"), user("user-two")]
    assert render(ByteVocabulary(chat_template=source + "user-two"), asked, now=NOW) == "user-oneuser-two"
    assert len(asked) == 2
    with pytest.raises(RequestError):
        render(ByteVocabulary(chat_template="{{ messages[0].update(a=1) }}"), asked, now=NOW)


def test_a_history_that_a_template_takes_unchanged_is_rendered_once():
    for template in (
        EACH,
        TEMPLATES["system first"],
        TEMPLATES["written as JSON"],
        EACH.replace("m.content", "m.content | trim"),
    ):
        for history in ("one", "usual", "call"):
            _Counting.seen = 0
            render(_Counting(chat_template=template), HISTORIES[history], now=NOW)
            assert _Counting.seen == 1


def test_an_order_that_a_template_takes_stays():
    got = render(ByteVocabulary(chat_template=EACH), HISTORIES["a later one"], now=NOW)
    assert got == "[system]system-one[user]user-one[assistant]answer-one[system]B[user]user-two"


def test_a_later_system_message_keeps_its_place():
    got = render(ByteVocabulary(chat_template=TEMPLATES["system first"]), HISTORIES["a later one"], now=NOW)
    assert got == "[system]system-one[user]user-one[assistant]answer-one[user]B\n\nuser-two"


def test_a_system_prompt_begins_the_users_turn_where_there_is_no_system_role():
    got = render(ByteVocabulary(chat_template=TEMPLATES["no system role, alternate"]), HISTORIES["usual"], now=NOW)
    assert got == "[user]system-one\n\nuser-one[assistant]answer-one[user]user-two"


def test_a_history_refused_in_every_shape_is_answered_with_the_option_to_use():
    refuses = "{{ raise_exception('never') }}"
    with pytest.raises(RequestError, match=r"refuses the messages: never .*serve --chat-template FILE"):
        render(ByteVocabulary(chat_template=refuses), HISTORIES["two users"], now=NOW)


SERVED = TextModel(
    id="toy",
    created=0,
    context_tokens=99_000,
    vocabulary=ByteVocabulary(chat_template=TEMPLATES["no system role, alternate"], adds_bos=False),
)


def prompt(request: ChatRequest, template: str | None = None, **kinds: Any) -> str:
    served = SERVED
    if template is not None:
        served = TextModel(
            id="toy",
            created=0,
            context_tokens=99_000,
            vocabulary=ByteVocabulary(chat_template=template, adds_bos=False),
            **kinds,
        )
    return bytes(chat_job(request, served, seed=1, now=NOW).choices[0].prompt).decode()


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_system_prompt_reaches_a_model_without_one_in_every_dialect():
    hi = [user("hi")]
    asked = [
        parse(ChatRequest, body(messages=[system("Be brief"), *hi])),
        of_anthropic(
            parse(MessagesRequest, body(model="claude-x", max_tokens=9, system="Be brief", messages=hi)), SERVED
        ),
        of_responses(parse(ResponsesRequest, body(instructions="Be brief", input="hi"))),
        of_ollama(parse(OllamaChatRequest, body(model="toy", messages=[system("Be brief"), *hi]))),
    ]
    assert {prompt(each) for each in asked} == {"[user]Be brief\n\nhi"}


def chat(*messages: Message, **fields: Any) -> ChatRequest:
    return parse(ChatRequest, body(messages=list(messages), **fields))


CLOSED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "last", "fields", "end"),
    [
        (CLOSED, assistant("The sky is "), {}, "<user>x</><assistant>The sky is "),
        (
            CLOSED,
            assistant("a"),
            {"continue_final_message": True, "add_generation_prompt": False},
            "<user>x</><assistant>a",
        ),
        (CLOSED, assistant("a"), {"add_generation_prompt": False}, "<user>x</><assistant>a"),
        (CLOSED, assistant("a"), {"add_generation_prompt": True}, "<assistant>a</><assistant>"),
        (CLOSED, assistant("a"), {"continue_final_message": False}, "<assistant>a</><assistant>"),
        (CLOSED, assistant(""), {}, "<user>x</><assistant>"),
        (CLOSED, user("y"), {"add_generation_prompt": False}, "<user>y</>"),
        (CLOSED.replace(" | trim", ""), assistant("{% x %}<|im_end|>"), {}, "<assistant>{% x %}<|im_end|>"),
        (TEMPLATES["last must be the user"] + OPENS, assistant("a"), {}, "[user]x[assistant]a"),
        (TEMPLATES["no system role, alternate"], assistant("a"), {}, "[user]x[assistant]a"),
        (THINKS, assistant("a", reasoning_content="hm"), {}, "<assistant><think>\nhm\n</think>\na"),
        (THINKS, assistant("", reasoning_content="hm"), {}, "<user>x</><assistant><think>\nhm"),
        (THINKS, assistant("<think>hm"), {}, "<user>x</><assistant><think>hm"),
        (
            TEMPLATES["last must be the user"].removesuffix(EACH) + THINKS,
            assistant("a"),
            {},
            "<think>\n\n</think>\n\na",
        ),
    ],
)
def test_a_completion_continues_where_the_last_message_ends(template, last, fields, end):
    special = {259: "<|im_end|>"}
    made = chat_job(
        chat(user("x"), last, **fields),
        TextModel(id="toy", created=0, context_tokens=9999, vocabulary=ByteVocabulary(chat_template=template)),
        seed=1,
        now=NOW,
    )
    got = "".join(special.get(each) or chr(each) for each in made.choices[0].prompt[1:])
    assert got.endswith(end), got


def test_a_continued_text_is_read_as_text_and_continued_thoughts_as_thoughts():
    def read(last: Message, answer: str, template: str = THINKS) -> tuple[str, str]:
        served = TextModel(id="toy", created=0, context_tokens=9999, vocabulary=ByteVocabulary(chat_template=template))
        reading = chat_job(chat(user("x"), last), served, seed=1, now=NOW).reading
        assert reading is not None
        reader = reading.reader()
        parts = [reader.feed(answer), reader.finish()]
        return "".join(part.thought for part in parts), "".join(part.text for part in parts)

    assert read(assistant("The sky is"), " blue") == ("", " blue")
    assert read(assistant("", reasoning_content="hm"), ", well</think>Hi") == (", well", "Hi")
    assert read(assistant("The sky is"), " blue", EACH + "{# <|channel|> #}") == ("", " blue")


def test_a_prefill_that_cannot_be_is_named():
    for messages, fields, param in (
        ([user("x")], {"continue_final_message": True}, "continue_final_message"),
        ([user("x"), call("a")], {"continue_final_message": True}, "continue_final_message"),
        (
            [user("x"), assistant("a")],
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
    ):
        with pytest.raises(RequestError) as caught:
            chat(*messages, **fields)
        assert caught.value.param == param
    with pytest.raises(RequestError, match="cannot continue"):
        prompt(chat(assistant("a")), TEMPLATES["last must be the user"])


ASKED = [user("x")]
NAMED = {"name": "f", "arguments": '{"a": 1}'}
UNDERSTOOD = [
    (assistant(None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]), '{"a": 1}', ""),
    (assistant(None, tool_calls=[{"id": None, "type": None, "function": {"name": "f", "arguments": None}}]), "{}", ""),
    (assistant(None, tool_calls=[{"type": "custom", "custom": {"name": "f", "input": "t"}}]), '{"input": "t"}', ""),
    (assistant(None, function_call=NAMED), '{"a": 1}', ""),
    (assistant([{"type": "refusal", "refusal": "no"}]), None, "no"),
    (assistant(None, refusal="no"), None, "no"),
    (assistant([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]), "hm", "a"),
    (assistant([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "a"]), "hm", "a"),
    (assistant([{"type": "redacted_thinking", "data": "z"}, {"type": "output_text", "text": "a"}]), None, "a"),
    (assistant("a", reasoning="hm"), "hm", "a"),
    (assistant("a", thinking_blocks=[{"type": "thinking", "thinking": "hm"}]), "hm", "a"),
    ({"role": "tool", "tool_call_id": "c", "content": None}, None, ""),
    ({"role": "tool", "tool_call_id": "c", "content": {"a": [1]}}, None, '{"a": [1]}'),
    ({"role": "tool", "tool_call_id": None, "content": [{"a": 1}]}, None, '[{"a": 1}]'),
    ({"role": "function", "name": "f", "content": "7"}, None, "7"),
    ({"role": "system", "content": None}, None, ""),
    ({"role": "user", "content": None}, None, ""),
]


def test_history_that_clients_send_back_is_understood():
    for message, more, text in UNDERSTOOD:
        read = chat(*ASKED, message).messages[-1].for_template()
        calls = read.get("tool_calls")
        assert read["content"] == text, message
        assert (calls[0]["function"]["arguments"] if calls else read.get("reasoning_content")) == more, message


def test_a_result_of_the_old_api_belongs_to_its_call():
    called, reported = chat(
        *ASKED, assistant(None, function_call=NAMED), {"role": "function", "name": "f", "content": "7"}
    ).messages[1:]
    assert called.tool_calls is not None
    assert called.tool_calls[0].id == reported.tool_call_id
    assert reported.role == "tool"


def test_other_dialects_are_understood_as_well():
    blocks = [{"type": "tool_use", "id": "c", "name": "f", "input": None}]
    messages = [user("x"), {"role": "assistant", "content": blocks}, {"role": "assistant", "content": None}]
    asked = of_anthropic(parse(MessagesRequest, body(model="claude-x", max_tokens=9, messages=messages)), SERVED)
    assert asked.messages[1].for_template()["tool_calls"][0]["function"]["arguments"] == "{}"
    for arguments in ('{"a": 1}', {"a": 1}):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        line = of_ollama(
            parse(OllamaChatRequest, body(model="toy", messages=[user("x"), assistant("", tool_calls=calls)]))
        )
        assert line.messages[1].for_template()["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    items = [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": 1}},
        {"type": "function_call_output", "call_id": "c", "output": {"b": 2}},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "t"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": None},
    ]
    printed = [each.for_template() for each in of_responses(parse(ResponsesRequest, body(input=items))).messages]
    assert [each["content"] for each in printed] == ["no", '{"b": 2}', "", ""]
    assert printed[2]["tool_calls"][0]["function"]["arguments"] == '{"input": "t"}'


def test_half_a_surrogate_pair_is_a_replacement_character():
    def read(escaped: str) -> str:
        text = f'{{"messages": [{{"role": "user", "content": "{escaped}"}}]}}'
        return str(parse(ChatRequest, text.encode()).messages[0].content)

    assert read(r"cut \ud83d") == "cut �"
    assert read(r"\ude00 \ud83d\ude00 \ud83d\u0041 \\ud83d \\\ud83d \uD83D\uD83D") == "� \U0001f600 �A \\ud83d \\� ��"


def test_empty_stop_strings_say_nothing():
    assert chat(*ASKED, stop=["", "END"]).stops == ("END",)
    assert chat(*ASKED, stop="").stops == ()
    asked = parse(MessagesRequest, body(model="claude-x", max_tokens=9, stop_sequences=[""], messages=ASKED))
    assert of_anthropic(asked, SERVED).stops == ()


def test_the_owner_may_give_another_template(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}", "utf-8")
    assert chat_template_in(file) == "{{ messages[0].content }}"
    for content, reported in (
        (b"{% if %}", "Expected"),
        (b" ", "is empty"),
        (b"\xff", "not text"),
        (b"x" * (1 << 20 | 1), "larger"),
    ):
        file.write_bytes(content)
        with pytest.raises(Exception, match=reported) as caught:
            chat_template_in(file)
        assert str(caught.value).startswith(f"--chat-template {file}: ")
        assert not isinstance(caught.value, ModelError)
    with pytest.raises(Exception, match="No such file"):
        chat_template_in(tmp_path / "none")
