"""Anthropic's dialect over a fake backend: shapes, streams and errors; then its official client over a real port."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primad.api.answering.backend import Health
from primad.errors import RequestError, RingError
from tests.fakes.backend import BOS, ByteVocabulary, FakeBackend, replies
from tests.fakes.http import call, post, served
from tests.lazily import Lazily

anthropic = Lazily("anthropic")

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "Hi"}]
LONG = {"role": "user", "content": "x" * 50}
BODY: dict[str, Any] = {"model": "claude-any", "max_tokens": 50, "messages": HELLO}
VOCABULARY = ByteVocabulary(chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>")


def named_events(response) -> list[tuple[str, dict[str, Any]]]:
    """The name and data of each event; checks that they agree."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][0] == found[-1][1]["type"]
    return found


def refused(response, status: int) -> dict[str, str]:
    body = response.json()
    assert response.status_code == status, response.text
    assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    return body["error"]


def test_a_message():
    body = post(FakeBackend(replies("Grüße"), vocabulary=VOCABULARY), PATH, **BODY).json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": "Grüße"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "output_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [({"max_tokens": 2}, "max_tokens", None), ({"stop_sequences": ["x", "ND"]}, "stop_sequence", "ND")],
)
def test_why_it_stopped(fields, reason, sequence):
    body = post(FakeBackend(replies("one END")), PATH, **BODY | fields).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    ended = named_events(post(FakeBackend(replies("one END")), PATH, **BODY | fields, stream=True))[-2][1]
    assert ended["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert ended["usage"]["output_tokens"] == body["usage"]["output_tokens"]


def test_a_stream_has_named_events_and_no_done():
    got = named_events(post(FakeBackend(replies("ab")), PATH, **BODY, stream=True))
    assert [name for name, _ in got] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert got[0][1]["message"]["content"] == []
    assert [data["delta"]["text"] for name, data in got if name == "content_block_delta"] == ["a", "b"]
    empty = named_events(post(FakeBackend(replies()), PATH, **BODY, stream=True))
    assert [name for name, _ in empty] == ["message_start", "message_delta", "message_stop"]


def test_the_system_prompt_without_the_clients_notes_comes_first():
    backend = FakeBackend(replies("x"), vocabulary=VOCABULARY)
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc=1"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    post(backend, PATH, **BODY, system=system)
    post(backend, PATH, **BODY, system="Be long.")
    texts = [bytes(call.prompt[1:]).decode() for call in backend.calls]
    assert texts == ["[system]Be brief.[user]Hi>", "[system]Be long.[user]Hi>"]


def test_blocks_become_messages():
    backend = FakeBackend(replies("x"), vocabulary=VOCABULARY)
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": blocks}]
    assert post(backend, PATH, **BODY | {"messages": messages}).status_code == 200
    assert backend.calls[0].prompt == [BOS, *b"[user]a\nb>"]
    assert post(backend, COUNT, model="claude-x", messages=messages).json() == {"input_tokens": 11}
    assert len(backend.calls) == 1


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("is_old", [False, True])
def test_a_format_bounds_the_answer_or_is_refused_by_its_own_name(is_old):
    def field(wanted: dict[str, Any]) -> dict[str, Any]:
        return {"output_format": wanted} if is_old else {"output_config": {"format": wanted}}

    backend = FakeBackend(replies("{}"), vocabulary=VOCABULARY)
    assert post(backend, PATH, **BODY | field({"type": "json_schema", "schema": SCHEMA})).status_code == 200
    assert backend.calls[0].sampling.grammar is not None
    assert post(backend, PATH, **BODY, output_config={"effort": "high"}).status_code == 200
    assert backend.calls[1].sampling.grammar is None
    error = refused(post(backend, PATH, **BODY | field({"type": "json_schema", "schema": {"not": {}}})), 400)
    assert error["message"].startswith("'output_config.format': the keyword 'not'")
    refused(post(backend, PATH, **BODY | field({"type": "grammar"})), 400)


def test_a_name_that_is_neither_claude_nor_served_is_refused():
    assert refused(post(FakeBackend(replies()), PATH, **BODY | {"model": "gpt-4"}), 404)["type"] == "not_found_error"
    assert post(FakeBackend(replies()), PATH, **BODY | {"model": "toy"}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "messages[0].content"),
    ],
)
def test_unsupported_fields_are_named(fields, reported):
    error = refused(post(FakeBackend(replies()), PATH, **BODY | fields), 400)
    assert error["type"] == "invalid_request_error"
    assert reported in error["message"]


@pytest.mark.parametrize(
    ("block", "printed"),
    [
        ({"type": "document", "title": "T", "source": {"type": "text", "data": "words"}}, "T\nwords"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "words"}]}}, "words"),
        ({"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "x"}]}, "T\nx"),
        ({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "f"}]}, "f"),
    ],
)
def test_a_block_with_a_text_is_read_as_text(block, printed):
    backend = FakeBackend(replies("x"))
    assert post(backend, PATH, **BODY | {"messages": [{"role": "user", "content": [block]}]}).status_code == 200
    assert printed.encode() in bytes(token for token in backend.calls[0].prompt if token < 256)


def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words():
    printed = refused(post(FakeBackend(replies(), context_tokens=16), PATH, **BODY | {"messages": [LONG]}), 400)[
        "message"
    ]
    assert printed.startswith("prompt is too long: ")
    assert "tokens > 16 maximum" in printed
    assert "--context" in printed


def test_a_prompt_that_does_not_fit_is_still_counted():
    backend = FakeBackend(replies(), vocabulary=VOCABULARY, context_tokens=16)
    assert post(backend, COUNT, model="claude-x", messages=[LONG]).json() == {"input_tokens": 58}
    assert backend.served is not None
    backend.served = dataclasses.replace(backend.served, context_shift=True)
    assert post(backend, COUNT, model="claude-x", messages=[*HELLO, LONG]).json() == {"input_tokens": 66}


def test_bad_days_have_its_own_shape():
    backend = FakeBackend(replies())
    backend.state = Health(serving=False, taken=False, detail="loading")
    assert refused(post(backend, PATH, **BODY), 503)["type"] == "overloaded_error"
    full = FakeBackend(replies(RequestError("full", status=429)))
    assert refused(post(full, PATH, **BODY, stream=True), 429)["type"] == "rate_limit_error"
    assert refused(post(FakeBackend(replies(KeyError("x"))), PATH, **BODY), 500)["type"] == "api_error"
    assert refused(call(backend, "GET", PATH), 405)["type"] == "invalid_request_error"
    refused(call(backend, "POST", PATH, json=BODY, headers={"host": "evil.example"}), 403)
    name, last = named_events(post(FakeBackend(replies("a", RingError("gone"))), PATH, **BODY, stream=True))[-1]
    assert (name, last["error"]) == ("error", {"type": "overloaded_error", "message": "gone"})


def test_head_requests_for_liveness_succeed():
    for path in ("/", "/api/hello"):
        response = call(FakeBackend(replies()), "HEAD", path)
        assert (response.status_code, response.content) == (200, b"")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KINDS = ["text", "thinking", "tool_use", "tool_result", "image", "odd"]
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS) | VALUES},
    optional=dict.fromkeys(("text", "thinking", "id", "name", "input", "tool_use_id", "content"), VALUES),
)
BODIES = st.fixed_dictionaries(
    {
        "model": st.just("claude-x"),
        "max_tokens": st.just(5),
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant"]), "content": st.lists(BLOCKS) | VALUES}
            ),
            max_size=3,
        ),
    },
    optional=dict.fromkeys(("system", "tools", "tool_choice", "thinking", "stop_sequences", "stream"), VALUES),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(body=BODIES.map(json.dumps))
def test_no_body_is_answered_with_500(body):
    backend = FakeBackend(replies("some answer"), context_tokens=64)
    response = call(backend, "POST", PATH, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        refused(response, 400)


async def test_the_official_client():
    async with (
        served(FakeBackend(replies("Hello"), vocabulary=VOCABULARY)) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        message = await client.messages.create(**BODY)
        assert (message.content[0].text, message.stop_reason) == ("Hello", "end_turn")
        async with client.messages.stream(**BODY) as stream:
            assert [text async for text in stream.text_stream] == list("Hello")
            assert (await stream.get_final_message()).usage.output_tokens == 5
        counted = await client.messages.count_tokens(model="claude-x", messages=HELLO)
        assert counted.input_tokens == message.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**BODY | {"model": "other"})
