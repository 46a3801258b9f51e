"""Calls and thoughts in every dialect, whole and streamed; then the official clients over a real port."""

from __future__ import annotations

import dataclasses
import json
from contextlib import aclosing
from typing import Any

import msgspec
import pydantic_core
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primad.api.answering.calls.form import Markers
from primad.api.answering.calls.forms import FORMS
from primad.api.answering.generation import WrittenChoice, write
from primad.api.answering.reading import CompletionReading
from primad.api.dialects.openai.job import completion_job
from primad.api.dialects.openai.schema import CompletionRequest, parse
from primad.cli.conversation import Received
from tests.fakes.backend import IM_END, IM_START, ByteVocabulary, FakeBackend, replies
from tests.fakes.http import events, post, served
from tests.lazily import Lazily

anthropic = Lazily("anthropic")
ollama = Lazily("ollama")
openai = Lazily("openai")

HELLO = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
KNOWS = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
OPENS = KNOWS + "{% if enable_thinking is not false %}<think>\n{% else %}<think></think>{% endif %}"


def calls(city: str, *, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def backend(*texts: Any, template: str = KNOWS) -> FakeBackend:
    made = FakeBackend(replies(*texts), vocabulary=ByteVocabulary(chat_template=template))
    assert made.served is not None
    made.served = dataclasses.replace(made.served, tool_parser="hermes")
    return made


def value(arguments: str) -> Any:
    """``arguments`` as an object, as far as they are complete."""
    return pydantic_core.from_json(arguments, allow_partial=True)


def openai_whole(made: FakeBackend, **fields: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    choice = post(made, "/v1/chat/completions", messages=HELLO, **fields).json()["choices"][0]
    message = choice["message"]
    found = message.get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in found)
    assert len({call["id"] for call in found}) == len(found)
    assert (message["content"] is None) <= bool(found)
    given = [(call["function"]["name"], value(call["function"]["arguments"])) for call in found]
    return message.get("reasoning_content", ""), message["content"] or "", given, choice["finish_reason"]


def openai_streamed(made: FakeBackend, **fields: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    *chunks, done = events(post(made, "/v1/chat/completions", messages=HELLO, stream=True, **fields))
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    found = [call for delta in deltas for call in delta.get("tool_calls", [])]
    starts = [call for call in found if "id" in call]
    assert [call["index"] for call in starts] == list(range(len(starts)))
    assert len({call["id"] for call in starts}) == len(starts)
    assert all((call.keys() >= {"id", "type"}) == ("name" in call["function"]) for call in found)
    texts = [
        "".join(call["function"]["arguments"] for call in found if call["index"] == number)
        for number in range(len(starts))
    ]
    given = [(call["function"]["name"], value(text)) for call, text in zip(starts, texts, strict=True)]
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    return (
        thought,
        "".join(delta.get("content", "") for delta in deltas),
        given,
        chunks[-1]["choices"][0]["finish_reason"],
    )


ANTHROPIC = {"model": "claude-any", "max_tokens": 999, "messages": HELLO}
ANTHROPIC_TOOLS = [{"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}]
ENDS = {"tool_use": "tool_calls", "end_turn": "stop", "max_tokens": "length"}


def anthropic_whole(made: FakeBackend, **fields: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    tools = {"tools": ANTHROPIC_TOOLS} if fields.pop("tools", None) else {}
    asked = ANTHROPIC | tools | {"thinking": {"type": "enabled", "budget_tokens": 1024}} | fields
    body = post(made, "/v1/messages", **asked).json()
    return *of_blocks(body["content"]), ENDS[body["stop_reason"]]


def anthropic_streamed(made: FakeBackend, **fields: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    tools = {"tools": ANTHROPIC_TOOLS} if fields.pop("tools", None) else {}
    asked = ANTHROPIC | tools | {"thinking": {"type": "enabled", "budget_tokens": 1024}} | fields
    blocks: list[dict[str, Any]] = []
    end, is_open = "", False
    for event in post(made, "/v1/messages", stream=True, **asked).text.split("\n\n")[:-1]:
        data = json.loads(event.split("\ndata: ")[1])
        match data["type"]:
            case "content_block_start":
                assert not is_open
                assert data["index"] == len(blocks)
                blocks.append(data["content_block"] | {"json": ""})
                is_open = True
            case "content_block_delta":
                assert is_open
                delta = data["delta"]
                kind = delta["type"].removesuffix("_delta").replace("input_json", "json")
                names = {"text": "text", "thinking": "thinking", "json": "json", "signature": "signature"}
                blocks[-1][names[kind]] += delta["partial_json" if kind == "json" else names[kind]]
            case "content_block_stop":
                is_open = False
            case "message_delta":
                end = data["delta"]["stop_reason"]
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = value(text)
    return *of_blocks(blocks), ENDS[end]


def of_blocks(blocks: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, Any]]]:
    thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return thought, text, [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]


def ollama_whole(made: FakeBackend, **fields: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    return of_lines([post(made, "/api/chat", model="toy", messages=HELLO, stream=False, **fields).json()])


def ollama_streamed(made: FakeBackend, **fields: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    lines = post(made, "/api/chat", model="toy", messages=HELLO, **fields).text.splitlines()
    return of_lines([json.loads(line) for line in lines])


def of_lines(lines: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, Any]], str]:
    messages = [line["message"] for line in lines]
    found = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    assert lines[-1]["done_reason"] in ("stop", "length")
    given = [(call["name"], call["arguments"]) for call in found]
    thought = "".join(message.get("thinking", "") for message in messages)
    return thought, "".join(message["content"] for message in messages), given, "tool_calls" if found else "stop"


def responses_whole(made: FakeBackend, **fields: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    return of_items(post(made, "/v1/responses", input="Hi", **flat(fields)).json()["output"])


def responses_streamed(made: FakeBackend, **fields: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    got = post(made, "/v1/responses", input="Hi", stream=True, **flat(fields)).text.split("\n\n")[:-1]
    data = [json.loads(event.split("\ndata: ")[1]) for event in got]
    items = data[-1]["response"]["output"]
    assert [event["item"] for event in data if event["type"] == "response.output_item.done"] == items
    starts = [event for event in data if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in starts] == list(range(len(items)))
    assert [event["item"]["id"] for event in starts] == [item["id"] for item in items]
    assert len({item["id"] for item in items}) == len(items)
    deltas = "".join(event["delta"] for event in data if event["type"] == "response.function_call_arguments.delta")
    assert deltas == "".join(item["arguments"] for item in items if item["type"] == "function_call")
    return of_items(items)


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    tools = [{"type": "function"} | tool["function"] for tool in fields.get("tools", [])]
    return fields | ({"tools": tools} if tools else {})


def of_items(items: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, Any]], str]:
    def texts(kind: str) -> str:
        return "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])

    given = [(item["name"], value(item["arguments"])) for item in items if item["type"] == "function_call"]
    return texts("reasoning"), texts("message"), given, "tool_calls" if given else "stop"


every_dialect = pytest.mark.parametrize(
    "dialect",
    [
        openai_whole,
        openai_streamed,
        anthropic_whole,
        anthropic_streamed,
        ollama_whole,
        ollama_streamed,
        responses_whole,
        responses_streamed,
    ],
)


@every_dialect
def test_calls(dialect):
    only = dialect(backend(calls("Rome")), tools=TOOLS)
    assert only == ("", "", [("weather", {"city": "Rome"})], "tool_calls")
    text = dialect(backend("Let me see. ", calls("Rome"), "\n", calls("Tromsø")), tools=TOOLS)
    assert (text[0], text[1].strip(), text[3]) == ("", "Let me see.", "tool_calls")
    assert text[2] == [("weather", {"city": "Rome"}), ("weather", {"city": "Tromsø"})]


@every_dialect
@pytest.mark.parametrize("text", ["Hello", calls("Rome", name="other"), calls("Rome")[:30], "<tool_call>{</tool_call>"])
def test_text_that_is_no_call_stays_text(dialect, text):
    assert dialect(backend(text), tools=TOOLS) == ("", text, [], "stop")


CUT = calls("Rome").partition("Rome")[0]


@every_dialect
@pytest.mark.parametrize("text", [CUT + "Ro", f"{CUT}\\x", calls("Rome").replace('"Rome"', "NaN")])
def test_a_call_that_is_cut_in_its_arguments_is_marked(dialect, text):
    thought, printed, given, finish = dialect(backend(text), tools=TOOLS)
    rest = text[len(CUT) :] if "\\" in text else "NaN" + text.partition("NaN")[2] if "NaN" in text else ""
    if dialect in (ollama_whole, ollama_streamed):
        assert (thought, given, finish) == ("", [], "stop")
        assert sorted(printed) == sorted(text.partition("<tool_call>\n")[2])
    else:
        assert (thought, printed, given) == ("", rest, [("weather", {})])
        assert finish == ("tool_calls" if dialect in (responses_whole, responses_streamed) else "length")


def test_a_call_is_streamed_as_it_is_written():
    made = backend("Hm. ", calls("Rome"), calls("Oslo"))
    got = post(made, "/v1/chat/completions", messages=HELLO, tools=TOOLS, stream=True).text
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in got.splitlines() if line.startswith("data: {")]
    reported = [call for delta in deltas for call in delta.get("tool_calls", [])]
    shared = '{"city": "'  # held back while the second call may still be a repetition
    assert len(reported) > 2 * len('{"city": "Rome"}') - len(shared) - 4
    assert [call["function"].get("name") for call in reported if "id" in call] == ["weather", "weather"]
    blocks = post(made, "/v1/messages", stream=True, **ANTHROPIC, tools=ANTHROPIC_TOOLS).text
    assert blocks.count("input_json_delta") == len(reported)
    items = post(made, "/v1/responses", input="Hi", stream=True, tools=flat({"tools": TOOLS})["tools"]).text
    assert items.count("event: response.function_call_arguments.delta") == len(reported)


@every_dialect
def test_without_tools_a_call_is_text(dialect):
    assert dialect(backend(calls("Rome"))) == ("", calls("Rome"), [], "stop")


@every_dialect
def test_thoughts(dialect):
    thought, text, given, finish = dialect(backend("I think.\n</think>\n\nHello", template=OPENS))
    assert (thought.strip(), text.strip(), given, finish) == ("I think.", "Hello", [], "stop")
    thought, text, given, finish = dialect(backend("Hm.</think>\n\n", calls("Rome"), template=OPENS), tools=TOOLS)
    assert (thought.strip(), text.strip(), given, finish) == ("Hm.", "", [("weather", {"city": "Rome"})], "tool_calls")


@pytest.mark.parametrize("dialect", [openai_whole, openai_streamed])
def test_reasoning_stays_in_the_content_on_request(dialect):
    assert dialect(backend("Hm.</think>Hello", template=OPENS), reasoning_format="none")[:2] == ("", "Hm.</think>Hello")


@pytest.mark.parametrize("dialect", [openai_whole, openai_streamed])
def test_one_call_ends_the_response_without_parallel_calls(dialect):
    made = backend(calls("Rome"), calls("Oslo"))
    got = dialect(made, tools=TOOLS, parallel_tool_calls=False)
    assert got == ("", "", [("weather", {"city": "Rome"})], "tool_calls")
    assert made.calls[0].sampled <= len(calls("Rome"))


MARKS = [mark for form in FORMS.values() for each in form.markers for mark in (each.begin, each.end) if mark]
PIECES = [
    *MARKS,
    calls("Rome"),
    '{"name": "weather", "arguments": ',
    '"\\ud83d"',
    "1e999",
    "</think>",
    "{",
    "}}",
    "[",
    '"',
    "é",
    "x",
]


@every_dialect
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.lists(st.sampled_from(PIECES), max_size=8).map("".join), name=st.sampled_from(list(FORMS)))
def test_any_model_output_gets_a_response(dialect, text, name):
    made = backend(text, template=OPENS)
    assert made.served is not None
    made.served = dataclasses.replace(made.served, tool_parser=name)
    _, _, given, _ = dialect(made, tools=TOOLS)
    assert all(called == "weather" for called, _ in given)


async def test_a_marker_may_be_a_control_token(monkeypatch):
    made = backend(IM_START, '{"name": "weather", "arguments": {"city": "Rome"}}', IM_END, "?", IM_END)
    marked = dataclasses.replace(FORMS["hermes"], markers=(Markers(begin="<|im_start|>", end="?"),))
    monkeypatch.setitem(FORMS, "marked", marked)
    asked = CompletionReading(
        form="marked", thinking=None, opened=False, functions={"weather": None}, several=True, shows_control=True
    )
    job = completion_job(parse(CompletionRequest, b'{"prompt": "Hi", "max_tokens": 99}'), made.model(), seed=1)

    async def answer(reading: CompletionReading | None) -> WrittenChoice:
        reading_job = msgspec.structs.replace(job, reading=reading)
        async with aclosing(write(made, made.model().vocabulary, reading_job, job.choices[0], clock=float)) as written:
            return WrittenChoice.of(job.choices[0], [part async for part in written])

    read, plain = await answer(asked), await answer(None)
    assert ([call.name for call in read.calls], read.text) == (["weather"], "")
    assert plain.text == '{"name": "weather", "arguments": {"city": "Rome"}}?'


@pytest.mark.parametrize("asked", [{}, {"tools": TOOLS}])
def test_markers_around_a_response_are_removed(asked):
    made = backend("<|START_RESPONSE|>Hi there.<|END_RESPONSE|>")
    assert made.served is not None
    made.served = dataclasses.replace(made.served, tool_parser="command-r")
    assert openai_whole(made, **asked)[1] == "Hi there."


def test_reasoning_is_sent_only_on_request():
    body = post(backend("Hm.</think>Hi", template=OPENS), "/v1/messages", **ANTHROPIC).json()
    assert [block["type"] for block in body["content"]] == ["text"]
    line = post(backend("Hi", template=OPENS), "/api/chat", model="toy", messages=HELLO, think=False, stream=False)
    assert line.json()["message"] == {"role": "assistant", "content": "Hi"}


def test_stop_strings_and_limits_hold_for_all_of_the_text():
    cut = openai_whole(backend(calls("Rome")), tools=TOOLS, stop=["Rome"])
    assert cut == ("", "", [("weather", {})], "stop")
    limited = openai_whole(backend("Hm, I think", template=OPENS), max_tokens=4)
    assert limited == ("Hm, ", "", [], "length")


def test_log_probabilities_of_all_tokens_are_there():
    text = "Hm.</think>Hi" + calls("Rome")
    asked = {"messages": HELLO, "tools": TOOLS, "logprobs": True}
    whole = post(backend(text, template=OPENS), "/v1/chat/completions", **asked).json()["choices"][0]
    assert [token["token"] for token in whole["logprobs"]["content"]] == list(text)
    *chunks, _ = events(post(backend(text, template=OPENS), "/v1/chat/completions", stream=True, **asked))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token["token"] for part in parts if part for token in part["content"]] == list(text)


def test_the_conversation_continues_in_every_dialect():
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}{% endfor %}"
        "{% if tools %}{% endif %}>"
    )
    arguments = {"city": "Rome"}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    requests: list[tuple[str, dict[str, Any]]] = [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "content": "hot"},
                ]
            },
        ),
        (
            "/v1/messages",
            ANTHROPIC
            | {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": arguments}],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "hot"}]},
                ]
            },
        ),
        (
            "/api/chat",
            {
                "model": "toy",
                "messages": [
                    *HELLO,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]},
                    {"role": "tool", "tool_name": "weather", "content": "hot"},
                ],
            },
        ),
        (
            "/v1/responses",
            {
                "input": [
                    *HELLO,
                    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": json.dumps(arguments)},
                    {"type": "function_call_output", "call_id": "c1", "output": "hot"},
                ]
            },
        ),
    ]
    for path, body in requests:
        made = backend("x", template=template)
        assert post(made, path, **body).status_code == 200, path
        prompt = bytes(made.calls[0].prompt[1:]).decode()
        assert prompt == '[user]Hi[assistant]weather{"city": "Rome"}[tool]hot>', path


def test_capabilities_of_the_template_are_reported():
    made = backend(template=OPENS)
    assert post(made, "/api/show", model="toy").json()["capabilities"] == ["completion", "tools", "thinking"]
    listed = post(made, "/apply-template", messages=HELLO, tools=TOOLS).json()["prompt"]
    assert '"weather"' in listed


def test_primad_chat_separates_reasoning_from_the_response():
    stream = post(backend("Hm.</think>Hi", template=OPENS), "/v1/chat/completions", messages=HELLO, stream=True)
    received = Received()
    pieces = [piece for line in stream.text.splitlines() for piece in received.take(line, 0.0)]
    assert "".join(piece.text for piece in pieces if piece.is_thought).strip() == "Hm."
    assert (received.text, received.is_whole) == ("Hi", True)


async def test_the_official_clients():
    text = ("Hm.</think>\n\n", calls("Rome"))
    async with (
        served(backend(*text, template=OPENS)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ours,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as theirs,
    ):
        answer = await ours.chat.completions.create(model="toy", messages=HELLO, tools=TOOLS)
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"
        async with ours.chat.completions.stream(model="toy", messages=HELLO, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert kinds.count("tool_calls.function.arguments.delta") > 9
        assert kinds.count("tool_calls.function.arguments.done") == 1
        assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"city": "Rome"}
        tool = {"type": "function", **FUNCTION}
        response = await ours.responses.create(model="toy", input="Hi", tools=[tool])
        assert [item.type for item in response.output] == ["reasoning", "function_call"]
        async with ours.responses.stream(model="toy", input="Hi", tools=[tool]) as stream:
            final_response = await stream.get_final_response()
        assert [item.type for item in final_response.output] == ["reasoning", "function_call"]
        asked = ANTHROPIC | {
            "tools": ANTHROPIC_TOOLS,
            "max_tokens": 2000,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        message = await theirs.messages.create(**asked)
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        async with theirs.messages.stream(**asked) as stream:
            partial = [event.partial_json async for event in stream if event.type == "input_json"]
            last = await stream.get_final_message()
        assert "".join(partial) == '{"city": "Rome"}'
        assert len(partial) > 9
        assert (last.content[-1].input, last.stop_reason) == ({"city": "Rome"}, "tool_use")
        client = ollama.AsyncClient(host=url)
        line = await client.chat(model="toy", messages=HELLO, tools=TOOLS)
        assert line.message.tool_calls[0].function.arguments == {"city": "Rome"}
        assert line.message.thinking.strip() == "Hm."
        await client._client.aclose()


@pytest.mark.parametrize("reported", [openai_whole, openai_streamed])
def test_a_repeated_call_ends_the_response(reported: Any):
    rome, oslo = calls("Rome"), calls("Oslo")
    weather = [("weather", {"city": city}) for city in ("Rome", "Oslo")]
    for texts, found in (
        ((rome, rome, rome), weather[:1]),
        ((rome, "\n", rome), weather[:1]),
        ((rome, oslo, oslo, rome), weather),
        ((rome, oslo, rome), [*weather, weather[0]]),
        ((rome, "And again:", rome), [weather[0], weather[0]]),
        ((rome, calls("Romeo")), [weather[0], ("weather", {"city": "Romeo"})]),
    ):
        made = backend(*texts)
        *_, given, finish = reported(made, tools=TOOLS)
        assert (given, finish) == (found, "tool_calls"), texts
    made = backend(rome, rome, "never read")
    reported(made, tools=TOOLS)
    assert made.calls[0].sampled < 2 * len(rome) + 2


def test_a_repeated_call_that_is_cut_counts_as_incomplete():
    made = backend(calls("Rome"), calls("Rome")[:-20])
    made.ending = ("length", None)
    *_, given, finish = openai_streamed(made, tools=TOOLS)
    assert (len(given), finish) == (2, "length")
