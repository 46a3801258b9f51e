"""The API's responses, in memory: shapes, counts and streams."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from primad.api.answering.backend import ModelNames
from primad.api.app import create_app
from primad.api.http import endpoint
from primad.ring.messages import PromptProgress
from tests.fakes.backend import BOS, EOS, ByteVocabulary, FakeBackend, replies
from tests.fakes.http import PATIENCE_S, BareClient, call, events, post

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]
PLAIN = ByteVocabulary(chat_template="{{ messages[-1].content }}")


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_a_chat():
    backend = FakeBackend(replies("Hello 😀"), vocabulary=PLAIN)
    body = post(backend, CHAT, model="toy", messages=HELLO).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body.pop("timings")["prompt_n"] == body["usage"]["prompt_tokens"]
    assert body == {
        "object": "chat.completion",
        "model": "toy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello 😀", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": usage(3, 10),
    }
    assert backend.calls[0].prompt == [BOS, *b"Hi"]


def test_a_chat_that_streams():
    got = events(post(FakeBackend(replies("Né")), CHAT, messages=HELLO, stream=True))
    assert got.pop() == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in got}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in got)
    assert [chunk["choices"] for chunk in got] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "N"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "é"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    ]


def test_a_stream_with_its_counts():
    options = {"include_usage": True}
    got = events(
        post(FakeBackend(replies("ab"), vocabulary=PLAIN), CHAT, messages=HELLO, stream=True, stream_options=options)
    )
    *chunks, counts, done = got
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert counts["choices"] == []
    assert counts["usage"] == usage(3, 2)


def test_a_completion():
    body = post(FakeBackend(replies("abc")), COMPLETIONS, prompt="Hi").json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body.pop("timings")["predicted_n"] == 3
    assert body == {
        "object": "text_completion",
        "model": "toy",
        "choices": [{"text": "abc", "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "usage": usage(3, 3),
    }


def test_a_completion_that_streams():
    got = events(post(FakeBackend(replies("ab")), COMPLETIONS, prompt="Hi", echo=True, stream=True))
    assert got.pop() == "[DONE]"
    assert [(choice["text"], choice["finish_reason"]) for chunk in got for choice in chunk["choices"]] == [
        ("Hi", None),
        ("a", None),
        ("b", None),
        ("", "stop"),
    ]


def test_a_response_may_have_no_tokens():
    assert post(FakeBackend(replies()), COMPLETIONS, prompt="Hi").json()["choices"][0]["text"] == ""
    got = events(post(FakeBackend(replies()), CHAT, messages=HELLO, stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in got[:-1]] == [{"role": "assistant", "content": ""}, {}]


def test_prompts_and_choices_run_one_after_another():
    backend = FakeBackend(lambda call: [call.prompt[-1], *str(call.sampling.seed).encode()])
    body = post(backend, COMPLETIONS, prompt=["a", "b"], n=2, seed=5, echo=True).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "aa5"),
        (1, "aa6"),
        (2, "bb5"),
        (3, "bb6"),
    ]
    assert body["usage"] == usage(4, 8)


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_generated_concurrently(stream):
    all_began = asyncio.Event()

    def script(call):
        if len(backend.calls) == 3:
            all_began.set()
        yield all_began
        yield from str(call.sampling.seed).encode()

    backend = FakeBackend(script)
    backend.served = replace(backend.served, sequences=3)
    client = BareClient(CHAT, messages=HELLO, n=3, seed=5, stream=stream)
    async with asyncio.timeout(PATIENCE_S):
        await create_app(backend)(client.scope, client.receive, client.send)
    printed = b"".join([client.got.get_nowait().get("body", b"") for _ in range(client.got.qsize())])
    assert all(b'"content":"%d"' % seed in printed for seed in (5, 6, 7))


def test_choices_that_stream_each_have_a_role_and_an_end():
    backend = FakeBackend(replies("a"))
    options = {"include_usage": True}
    got = events(post(backend, CHAT, messages=HELLO, n=2, stream=True, stream_options=options))
    choices = [choice for chunk in got[:-1] for choice in chunk["choices"]]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [choice["delta"] for choice in mine] == [{"role": "assistant", "content": ""}, {"content": "a"}, {}]
    assert got[-2]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hi"})])
def test_a_request_has_a_priority_and_may_expire_until_its_first_choice_starts(path, fields):
    backend = FakeBackend(replies("a"))
    post(backend, path, **fields, n=2, priority=-3)
    post(backend, path, **fields)
    assert [(call.priority, call.may_expire) for call in backend.calls] == [(-3, True), (-3, False), (0, True)]


def test_max_tokens_ends_a_response_with_length():
    body = post(FakeBackend(replies("abcdef")), CHAT, messages=HELLO, max_tokens=3).json()
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("abc", "length")
    assert body["usage"]["completion_tokens"] == 3


def test_completions_stop_after_16_tokens_by_default():
    assert post(FakeBackend(replies("x" * 99)), COMPLETIONS, prompt="Hi").json()["choices"][0]["text"] == "x" * 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_frees_the_sequence_at_once_and_is_never_sent(stream):
    backend = FakeBackend(replies("one\nEND", AssertionError("one token too many")))
    response = post(backend, COMPLETIONS, prompt="Hi", stop=["\nEND", "never"], stream=stream)
    choices = [c for chunk in events(response)[:-1] for c in chunk["choices"]] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "one"
    assert choices[-1]["finish_reason"] == "stop"
    assert backend.calls[0].closed.is_set()
    assert backend.calls[0].sampled == 7


def test_a_partial_stop_string_is_sent_at_the_end():
    body = post(FakeBackend(replies("one\nEN")), COMPLETIONS, prompt="Hi", stop="\nEND").json()
    assert body["choices"][0]["text"] == "one\nEN"


def test_usage_with_a_stop_string_counts_the_sampled_tokens():
    body = post(FakeBackend(replies("abEND", "x")), COMPLETIONS, prompt="Hi", stop="END").json()
    assert body["usage"]["completion_tokens"] == 5


def test_logprobs_of_a_chat():
    backend = FakeBackend(replies("a", EOS, "€"))
    body = post(backend, CHAT, messages=HELLO, logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "</s>", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.0, "bytes": [98]},
        ],
    }
    assert backend.calls[0].logprobs == 2


def test_logprobs_of_a_stream_are_those_of_its_text():
    got = events(post(FakeBackend(replies("a€bEND")), CHAT, messages=HELLO, logprobs=True, stop="END", stream=True))
    parts = [chunk["choices"][0] for chunk in got[:-1]]
    pieces = [(part["delta"]["content"], part["logprobs"]["content"]) for part in parts if part["logprobs"]]
    assert [(text, len(content)) for text, content in pieces] == [("a", 1), ("€", 3), ("b", 1)]
    for text, content in pieces:
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text
        assert all(entry["top_logprobs"] == [] for entry in content)


def test_logprobs_of_a_completion():
    body = post(FakeBackend(replies("aéEND")), COMPLETIONS, prompt="Hi", logprobs=1, stop="END").json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}],
        "text_offset": [0, 1, 1],
    }


def test_the_models_template_makes_the_prompt():
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    backend = FakeBackend(replies("x"), vocabulary=ByteVocabulary(chat_template=template))
    post(backend, CHAT, messages=[{"role": "developer", "content": "S"}, *HELLO])
    assert backend.calls[0].prompt == [BOS, *b"[system]S[user]Hi>"]


def test_without_a_seed_every_request_has_another():
    backend = FakeBackend(replies("x"))
    for _ in range(3):
        post(backend, CHAT, messages=HELLO)
    assert len({call.sampling.seed for call in backend.calls}) > 1


def test_models():
    model = {
        "object": "model",
        "id": "toy",
        "created": 1_700_000_000,
        "owned_by": "primad",
        "max_model_len": 4096,
        "meta": {"n_ctx": 4096, "n_ctx_train": 4096},
    }
    backend = FakeBackend(replies())
    assert call(backend, "GET", "/v1/models").json() == {"object": "list", "data": [model]}
    assert call(backend, "GET", "/v1/models/toy").json() == model


def test_about_and_health():
    backend = FakeBackend(replies())
    assert call(backend, "GET", "/").json()["name"] == "primad"
    response = call(backend, "GET", "/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "detail": "serving toy on 1 device", "model": "toy"}


def test_the_openapi_document_is_whole():
    backend = FakeBackend(replies())
    document = call(backend, "GET", "/openapi.json")
    schemas = document.json()["components"]["schemas"]
    refs = {part.split('"')[0] for part in document.text.split("#/components/schemas/")[1:]}
    assert {"ChatRequest", "ChatCompletion", "Message", "ErrorBody"} <= refs <= set(schemas)
    assert call(backend, "GET", "/docs").status_code == 404


def test_no_cors():
    response = call(FakeBackend(replies()), "GET", "/v1/models", headers={"origin": "http://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_model_is_served_by_its_names_or_by_any_with_the_option():
    backend = FakeBackend(replies("x"))
    aliased, any_name = ModelNames(aliases=("gpt-4", "local")), ModelNames(any_model=True)
    listed = call(backend, "GET", "/v1/models", names=aliased).json()["data"]
    assert [model["id"] for model in listed] == ["toy", "gpt-4", "local"]
    assert call(backend, "GET", "/v1/models/local", names=aliased).json()["id"] == "local"
    body = {"model": "gpt-4", "messages": HELLO}
    assert call(backend, "POST", CHAT, json=body, names=aliased).json()["model"] == "gpt-4"
    assert call(backend, "POST", CHAT, json=body | {"model": "gpt-5"}, names=aliased).status_code == 404
    assert call(backend, "POST", CHAT, json=body | {"model": "gpt-5"}, names=any_name).status_code == 200


def test_paths_without_v1_are_those_with_it():
    body = {"messages": HELLO, "prompt": "Hi"}
    for path in (CHAT, COMPLETIONS):
        assert (
            post(FakeBackend(replies("ab")), path.removeprefix("/v1"), **body).json()["usage"]["completion_tokens"] == 2
        )


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hi"})])
def test_a_stream_reports_prompt_progress_on_request(path, body):
    def backend() -> FakeBackend:
        return FakeBackend(lambda call: [PromptProgress(request=1, tokens=1), 72], vocabulary=PLAIN)

    reported = events(post(backend(), path, stream=True, return_progress=True, **body))[:-1]
    (progress,) = [event["prompt_progress"] for event in reported if "prompt_progress" in event]
    assert progress.pop("time_ms") >= 0
    assert progress == {"total": 3, "cache": 0, "processed": 1}
    silent = events(post(backend(), path, stream=True, **body))[:-1]
    assert not any("prompt_progress" in event for event in silent)
    assert len(silent) == len(reported) - 1
    assert "prompt_progress" not in post(backend(), path, return_progress=True, **body).json()


async def test_logprobs_without_streaming_have_a_bound_that_callers_share(monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_LISTED", 100)
    app = create_app(FakeBackend(replies("x" * 20)))
    options = {"messages": HELLO, "logprobs": True, "top_logprobs": 9}

    async def send(**more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(CHAT, json=options | more)

    for _ in range(3):
        assert (await send(max_tokens=4)).status_code == 200
        refused = await send()
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_logprobs")
    assert (await send(stream=True)).text.count('"top_logprobs"') == 20
