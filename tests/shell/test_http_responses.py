"""OpenAI's Responses over a fake backend, and with the official client over a real port."""

from __future__ import annotations

import json
from typing import Any

import pytest

from primad.errors import RingError
from tests.fakes.backend import BOS, ByteVocabulary, FakeBackend, replies
from tests.fakes.http import post, served
from tests.lazily import Lazily

openai = Lazily("openai")

PATH = "/v1/responses"
VOCABULARY = ByteVocabulary(chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>")


def named_events(response) -> list[dict[str, Any]]:
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for number, event in enumerate(events):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert (found[-1]["type"], found[-1]["sequence_number"]) == (name.removeprefix("event: "), number)
    return found


def test_a_response():
    body = post(FakeBackend(replies("Hi")), PATH, model="toy", input="Hello", metadata={"a": "b"}).json()
    assert (body["object"], body["status"], body["model"], body["metadata"]) == (
        "response",
        "completed",
        "toy",
        {"a": "b"},
    )
    assert body["output"][0]["content"][0]["text"] == "Hi"
    assert body["usage"]["output_tokens"] == 2
    cut = post(FakeBackend(replies("Hi there")), PATH, input="Hello", max_output_tokens=2).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_items_become_messages():
    backend = FakeBackend(replies("x"), vocabulary=VOCABULARY)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "z"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "message", "role": "user", "content": "c"},
    ]
    assert post(backend, PATH, input=items, instructions="S", tools=[{"type": "web_search"}]).status_code == 200
    assert backend.calls[0].prompt == [BOS, *b"[system]S[user]a[assistant]b[user]c>"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "x" * 40}}, "reasoning.effort"),
        ({"input": "a" * 5000}, "input"),
    ],
)
def test_a_refusal_names_the_field_as_it_was_sent(fields, param):
    response = post(FakeBackend(replies()), PATH, **{"input": "Hi"} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert "response_format" not in response.text


@pytest.mark.parametrize(
    ("item", "reported"),
    [
        ({"type": "item_reference", "id": "w"}, "input[1] is of type 'item_reference'"),
        (
            {"role": "user", "content": [{"type": "input_video", "input_video": "x"}]},
            "input[1] has a part of type 'input_video'",
        ),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}, "'input_file'"),
    ],
)
def test_an_item_that_cannot_be_read_is_named(item, reported):
    response = post(FakeBackend(replies()), PATH, input=[{"role": "user", "content": "Hi"}, item])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
    assert reported in response.json()["error"]["message"]


def test_results_of_other_servers_tools_are_in_the_prompt_and_shell_calls_are_tool_calls():
    backend = FakeBackend(replies("x"), vocabulary=VOCABULARY)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": None}]},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c", "output": "out"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": "d"},
    ]
    assert post(backend, PATH, input=items).status_code == 200
    printed = bytes(token for token in backend.calls[0].prompt if token < 256).decode()
    assert '{"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}' in printed
    assert printed.index("local_shell") < printed.index("out") < printed.index("[assistant]b") < printed.index("d>")


def test_allowed_tools_restrict_the_callable_ones():
    backend = FakeBackend(replies("x"), vocabulary=VOCABULARY)
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("one", "two")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "two"}]}
    assert post(backend, PATH, input="a", tools=tools, tool_choice=choice).status_code == 200
    assert b'"two"' in bytes(token for token in backend.calls[0].prompt if token < 256)
    assert b'"one"' not in bytes(token for token in backend.calls[0].prompt if token < 256)


def test_a_stream_of_named_events():
    got = named_events(post(FakeBackend(replies("ab")), PATH, input="Hello", stream=True))
    assert [event["type"].removeprefix("response.") for event in got] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert got[-1]["response"]["output"][0] == got[-2]["item"]
    failed = named_events(post(FakeBackend(replies("a", RingError("gone"))), PATH, input="Hello", stream=True))[-1]
    assert (failed["type"], failed["response"]["error"]["message"]) == ("response.failed", "gone")
    assert failed["response"]["output"][0]["content"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"previous_response_id": "resp_1"}, "send the whole conversation as 'input'"),
        ({"background": True}, "nothing is stored"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ],
)
def test_unsupported_fields_are_named(fields, reported):
    response = post(FakeBackend(replies()), PATH, **{"input": "Hi"} | fields)
    assert response.status_code == 400
    assert reported in response.json()["error"]["message"]


def test_a_ring_that_breaks_before_the_first_token():
    response = post(FakeBackend(replies(RingError("gone"))), PATH, input="Hi", stream=True)
    assert (response.status_code, response.json()["error"]["message"]) == (503, "gone")


async def test_the_official_client():
    async with (
        served(FakeBackend(replies("Hello"))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        response = await client.responses.create(model="toy", input="Hi", instructions="Be brief.")
        assert (response.output_text, response.status) == ("Hello", "completed")
        async with client.responses.stream(model="toy", input="Hi") as stream:
            events = [event async for event in stream]
            assert (await stream.get_final_response()).output_text == "Hello"
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert deltas == list("Hello")
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
        form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
        assert (await client.responses.create(model="toy", input="Hi", text=form)).status == "completed"
