"""A conversation that became too long continues without its oldest messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.api.dialects.openai.chat_fields import Message, completion_room, shifted
from primad.errors import PromptTooLongError
from tests.core.test_api_job import chat, served

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def message(role: str, content: str) -> Message:
    return Message.model_validate({"role": role, "content": content})


def printed(messages: list[Message]) -> str:
    return "".join(str(each.content) for each in messages)


TALK = [
    message(*each) for each in (("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
]


@pytest.mark.parametrize(
    ("maximum", "left"), [(9, "Sabcd"), (5, "Sabcd"), (4, "Scd"), (3, "Scd"), (2, "Scd"), (0, "Scd")]
)
def test_the_oldest_exchanges_go_and_the_system_and_the_last_one_stay(maximum, left):
    assert printed(shifted(TALK, lambda messages: len(messages) <= maximum)) == left


@given(
    roles=st.lists(st.sampled_from(["user", "assistant", "tool", "system"]), min_size=1, max_size=30),
    maximum=st.integers(0, 30),
)
def test_no_more_is_left_out_than_must_be(roles, maximum):
    messages = [message(role, f"{number},") for number, role in enumerate(roles)]
    found = shifted(messages, lambda each: len(each) <= maximum)
    assert found == [each for each in messages if each in found]
    assert [each for each in messages if each.role == "system"] == [each for each in found if each.role == "system"]
    if len(messages) <= maximum:
        assert found == messages
    spoken = [each for each in found if each.role != "system"]
    if found != messages:
        assert spoken[0].role == "user"
    if len(found) > maximum:
        assert sum(each.role == "user" for each in found) <= 1


def test_room_is_left_for_the_answer():
    assert completion_room(100, None) == 25
    assert completion_room(100, 10) == 10
    assert completion_room(100, 90) == 50


def test_a_long_conversation_is_answered_where_the_context_shifts():
    on = served(40, chat_template=TEMPLATE)
    talk = [
        {"role": "user", "content": "one" * 6},
        {"role": "assistant", "content": "two" * 6},
        {"role": "user", "content": "end"},
    ]
    with pytest.raises(PromptTooLongError):
        chat(served(38, chat_template=TEMPLATE), messages=talk)
    job = chat(replace(on, context_shift=True), messages=talk)
    assert bytes(job.choices[0].prompt[1:]) == b"end"
    assert chat(replace(on, context_shift=True), messages=talk[-1:]).prompt_tokens == 4
    with pytest.raises(PromptTooLongError):
        chat(replace(on, context_shift=True), messages=[{"role": "user", "content": "x" * 50}])
