"""A conversation, its streamed updates, and its rendering."""

from __future__ import annotations

import asyncio
import json

import pytest

from primad.cli.conversation import AskedQuestion, Conversation, Piece, Received, ShownPicture, shown, split_command
from primad.cli.drawing import Drawing
from primad.errors import ClusterError


def chunk(**delta: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": delta}]})


def printed(question: str, answer: str) -> Conversation:
    talk = Conversation("Be brief.")
    talk.asking(question)
    talk.answered(answer)
    return talk


def test_a_question_comes_after_all_that_was_answered():
    assert printed("one?", "1").asking("two?") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two?"},
    ]


def test_a_question_without_a_reply_is_not_part_of_the_history_but_can_be_asked_again():
    talk = printed("one?", "1")
    talk.asking("two?")
    talk.answered("")
    assert [each["content"] for each in talk.asking("three?")] == ["Be brief.", "one?", "1", "three?"]
    talk.answered("")
    assert talk.again() == AskedQuestion("three?")
    talk.answered("3")
    assert talk.again() == AskedQuestion("three?")
    assert [each["content"] for each in talk.messages()] == ["Be brief.", "one?", "1"]


def test_cleared_it_keeps_the_system_message():
    talk = printed("one?", "1")
    talk.clear()
    assert talk.messages() == [{"role": "system", "content": "Be brief."}]
    assert talk.again() is None


def test_it_is_written_as_text_or_as_json():
    talk = printed("wie schön?", "sehr")
    assert talk.written("a.md") == "system:\nBe brief.\n\nuser:\nwie schön?\n\nassistant:\nsehr\n"
    assert json.loads(talk.written("a.json")) == {"messages": talk.messages()}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("/system Be kind. ", ("/system", "Be kind.")),
        ("/clear", ("/clear", "")),
        (" /etc is a folder?", None),
        ("why?", None),
    ],
)
def test_a_slash_begins_a_command(line: str, found: tuple[str, str] | None):
    assert split_command(line) == found


def test_thoughts_and_replies_are_distinguished_and_counted():
    received = Received()
    lines = [
        ": waiting",
        "",
        chunk(role="assistant"),
        chunk(reasoning_content="hm"),
        chunk(content="a"),
        chunk(content="b"),
    ]
    pieces = [piece for at, line in enumerate(lines) for piece in received.take(line, float(at))]
    assert pieces == [Piece("hm", is_thought=True), Piece("a"), Piece("b")]
    assert (received.text, received.pace(), received.is_whole) == ("ab", "3 tokens, 1.00 tokens/s", False)
    received.take('data: {"choices": [], "usage": {"completion_tokens": 5}}', 9.0)
    received.take("data: [DONE]", 9.0)
    assert (received.pace(), received.is_whole) == ("5 tokens, 2.00 tokens/s", True)


def test_nothing_and_one_token_have_no_pace():
    received = Received()
    assert received.pace() == ""
    received.take(chunk(content="a"), 1.0)
    assert received.pace() == "1 token"


@pytest.mark.parametrize(
    "line",
    ["data: {", "data: []", "data: 1", 'data: {"choices": [1]}', 'data: {"usage": {"x": 1}}', "data: " + "[" * 100_000],
)
def test_a_stream_of_something_else_is_one_clear_error(line: str):
    with pytest.raises(ClusterError, match="not like an OpenAI endpoint"):
        Received().take(line, 0.0)


def test_an_error_of_the_server_is_shown_in_its_words():
    with pytest.raises(ClusterError, match="primad is stopping"):
        Received().take('data: {"error": {"message": "primad is stopping"}}', 0.0)


def test_no_text_steers_the_terminal():
    assert shown("a\x1b[2Jb\r\x07\u009bc\n\td\U0001f600") == "a[2Jbc\n\td\U0001f600"


async def test_much_text_in_a_short_time_is_drawn_together_and_nothing_is_lost():
    drawn: list[Piece] = []
    drawing = Drawing(drawn.append, between_s=3600.0)
    drawing.add([Piece("first")])
    assert drawn == [Piece("first")]
    for letter in "abc":
        drawing.add([Piece(letter, is_thought=letter == "a")])
    assert len(drawn) == 1
    drawing.finish()
    assert drawn == [Piece("first"), Piece("a", is_thought=True), Piece("bc")]


async def test_text_that_came_between_two_screens_is_drawn_though_nothing_follows():
    second = asyncio.Event()
    drawn: list[str] = []

    def draw(piece: Piece) -> None:
        drawn.append(piece.text)
        if len(drawn) == 2:
            second.set()

    drawing = Drawing(draw, between_s=0.001)
    drawing.add([Piece("a")])
    drawing.add([Piece("b")])
    await asyncio.wait_for(second.wait(), 60)
    assert drawn == ["a", "b"]
    drawing.finish()


def test_pictures_go_with_the_next_question_and_stay_with_it():
    talk = Conversation()
    talk.pictures.append(ShownPicture("a.png", "data:,a"))
    asked = talk.asking("What is it?")
    shown_ = [{"type": "image_url", "image_url": {"url": "data:,a"}}, {"type": "text", "text": "What is it?"}]
    assert asked == [{"role": "user", "content": shown_}]
    talk.answered("A cat.")
    assert talk.asking("Why?") == [
        *asked,
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Why?"},
    ]
    assert talk.written("a.txt") == "user:\n[a.png]\nWhat is it?\n\nassistant:\nA cat.\n"
