"""Ollama's dialect over a fake backend: shapes, lines and errors; then its official client over a real port."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest

from primad.api.answering.backend import Health, ModelNames
from primad.errors import RingError
from tests.fakes.backend import BOS, ByteVocabulary, FakeBackend, replies
from tests.fakes.http import call, post, served
from tests.lazily import Lazily

ollama = Lazily("ollama")

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "Hi"}]
VOCABULARY = ByteVocabulary(chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>")
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"model": "toy:latest", "messages": HELLO},
    GENERATE: {"model": "toy", "prompt": "Hi"},
}
both = pytest.mark.parametrize("path", [CHAT, GENERATE])


def text_of(line: dict[str, Any]) -> str:
    return line["message"]["content"] if "message" in line else line["response"]


@both
def test_a_response_comes_in_lines_or_whole(path):
    response = post(FakeBackend(replies("aéb"), vocabulary=VOCABULARY), path, **VALID[path])
    assert response.headers["content-type"].startswith("application/x-ndjson")
    *parts, last = [json.loads(line) for line in response.text.splitlines()]
    assert [text_of(part) for part in parts] == ["a", "é", "b"]
    assert not any(part["done"] or "eval_count" in part for part in parts)
    whole = post(FakeBackend(replies("aéb"), vocabulary=VOCABULARY), path, **VALID[path], stream=False).json()
    assert (text_of(last), text_of(whole)) == ("", "aéb")
    for end in (last, whole):
        assert (end["done"], end["done_reason"], end["model"]) == (True, "stop", VALID[path]["model"])
        assert (end["prompt_eval_count"], end["eval_count"]) == (10, 4)
        assert end["total_duration"] >= end["eval_duration"] >= 0


def test_options_and_format_reach_the_core():
    backend = FakeBackend(replies("{}"), vocabulary=VOCABULARY)
    options = {"num_predict": 3, "temperature": 0, "seed": 7, "stop": ["x"], "num_ctx": 9, "top_k": 2}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for wanted in ("json", schema, ""):
        post(backend, CHAT, **VALID[CHAT], options=options, format=wanted, keep_alive="5m", think=False)
    call_ = backend.calls[0]
    assert (call_.max_tokens, call_.sampling.temperature, call_.sampling.seed, call_.sampling.top_k) == (3, 0, 7, 2)
    assert [each.sampling.grammar is None for each in backend.calls] == [False, False, True]


@both
def test_numbers_are_parsed_as_ollama_does(path):
    free_tokens = 4096 - 10
    for options, field, got in (
        ({"top_k": 40.0}, "top_k", 40),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": None}, "top_k", 40),
        ({"seed": 42.0}, "seed", 42),
        ({"repeat_last_n": -1.0}, "penalty_tokens", 4096),
        ({"repeat_last_n": 0}, "penalty_tokens", 0),
        ({"repeat_penalty": 0}, "repeat_penalty", 1),
        ({"mirostat": 2.0}, "mirostat", 2),
        ({"temperature": 2.5}, "temperature", 2.5),
        ({"temperature": -1}, "temperature", 0),
        ({"top_p": 1.5}, "top_p", 1),
        ({"presence_penalty": 3}, "presence_penalty", 3),
        ({"num_predict": 2.0}, "max_tokens", 2),
        *(({"num_predict": each}, "max_tokens", free_tokens) for each in (0, -1, -2, -1.0, None)),
    ):
        backend = FakeBackend(replies("x"), vocabulary=VOCABULARY)
        answer = post(backend, path, **VALID[path], options=options)
        assert answer.status_code == 200, (options, answer.text)
        fields = backend.calls[0]
        assert (fields.max_tokens if field == "max_tokens" else getattr(fields.sampling, field)) == got, options


def test_think_is_passed_by_the_templates_own_variable():
    for template in ("{{ thinking }}", "{{ enable_thinking }}", "{{ reasoning }}", "{{ think }}"):
        backend = FakeBackend(replies("x"), vocabulary=ByteVocabulary(chat_template=template))
        for think in (True, False, "high"):
            assert post(backend, CHAT, **VALID[CHAT], think=think).status_code == 200
        assert [bytes(each.prompt[1:]) for each in backend.calls] == [b"True", b"False", b"True"]


def test_a_whole_response_has_the_time_of_its_tokens(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    whole = post(FakeBackend(replies("abc"), vocabulary=VOCABULARY), CHAT, **VALID[CHAT], stream=False).json()
    assert whole["eval_duration"] >= 2e9
    assert whole["total_duration"] == whole["prompt_eval_duration"] + whole["eval_duration"]


def test_content_that_is_null_is_empty():
    backend = FakeBackend(replies("x"), vocabulary=VOCABULARY)
    printed = [{"role": "assistant", "content": None}, *HELLO]
    assert post(backend, CHAT, model="toy", messages=printed).status_code == 200
    assert backend.calls[0].prompt == [BOS, *b"[assistant][user]Hi>"]


@both
def test_log_probabilities_come_with_their_tokens(path):
    fields = {"logprobs": True, "top_logprobs": 1}
    whole = post(FakeBackend(replies("aé"), vocabulary=VOCABULARY), path, **VALID[path], **fields, stream=False).json()
    assert next((each["token"], len(each["top_logprobs"])) for each in whole["logprobs"]) == ("a", 1)
    lines = post(FakeBackend(replies("aé"), vocabulary=VOCABULARY), path, **VALID[path], **fields).text.splitlines()
    streamed = [each for line in lines for each in json.loads(line).get("logprobs", [])]
    assert streamed == whole["logprobs"]
    assert "logprobs" not in post(FakeBackend(replies("a")), path, **VALID[path], stream=False).json()
    assert post(FakeBackend(replies("a")), path, **VALID[path], top_logprobs=1).status_code == 400
    assert post(FakeBackend(replies("a")), GENERATE, model="toy", prompt="a", raw=True, **fields).status_code == 200


def test_generate_applies_the_template_unless_raw():
    backend = FakeBackend(replies("x"), vocabulary=VOCABULARY)
    post(backend, GENERATE, **VALID[GENERATE], system="S")
    post(backend, GENERATE, **VALID[GENERATE], raw=True)
    assert [each.prompt for each in backend.calls] == [[BOS, *b"[system]S[user]Hi>"], [BOS, *b"Hi"]]
    assert backend.calls[1].max_tokens == 4096 - 3


@both
def test_without_a_prompt_the_model_is_there(path):
    for empty in ({"prompt": None, "messages": None}, {"messages": []}):
        assert post(FakeBackend(replies()), path, model="toy", stream=False, **empty).json()["done"] is True
    backend = FakeBackend(replies("x"))
    body = post(backend, path, model="toy").json()
    assert (body["done"], body["done_reason"], text_of(body)) == (True, "load", "")
    assert backend.calls == []


def test_models_are_listed_and_shown_in_ollamas_format():
    backend = FakeBackend(replies(), vocabulary=VOCABULARY)
    listed = call(backend, "GET", "/api/tags", names=ModelNames(aliases=("b:7b",))).json()["models"]
    assert [model["name"] for model in listed] == ["toy:latest", "b:7b"]
    assert call(backend, "GET", "/api/ps").json()["models"][0]["context_length"] == 4096
    assert tuple(map(int, call(backend, "GET", "/api/version").json()["version"].split("."))) > (0, 6, 4)
    shown = post(backend, "/api/show", model="toy").json()
    assert shown["model_info"]["general.basename"] == "toy"
    assert (shown["template"], shown["capabilities"]) == (VOCABULARY.chat_template, ["completion"])
    assert post(backend, "/api/show", name="other").status_code == 404
    backend.served = None
    assert call(backend, "GET", "/api/tags").json() == {"models": []}


@both
def test_errors_have_its_shape(path):
    for fields, status, reported in (
        ({"model": "other"}, 404, "other"),
        ({"options": {"temperature": 1e9}}, 400, "'options.temperature'"),
        ({"options": {"num_predict": "3"}}, 400, "'options.num_predict'"),
        ({"options": {"num_predict": True}}, 400, "'options.num_predict'"),
        ({"format": {"not": {}}}, 400, "'format'"),
        ({"format": 3}, 400, "format"),
        ({"stream": "yes"}, 400, "stream"),
    ):
        response = post(FakeBackend(replies()), path, **VALID[path] | fields)
        assert response.status_code == status, response.text
        assert response.json().keys() == {"error"}
        assert reported in response.json()["error"]
    backend = FakeBackend(replies())
    backend.state = Health(serving=False, taken=False, detail="loading")
    assert post(backend, path, **VALID[path]).status_code == 503
    lines = post(FakeBackend(replies("a", RingError("gone"))), path, **VALID[path]).text.splitlines()
    assert json.loads(lines[-1]) == {"error": "gone"}
    assert call(FakeBackend(replies()), "POST", "/api/embed", json={}).json().keys() == {"error"}


def test_images_are_refused_by_name_where_the_model_sees_none():
    message = HELLO[0] | {"images": ["aGk="]}
    assert "images" in post(FakeBackend(replies()), CHAT, model="toy", messages=[message]).json()["error"]


async def test_the_official_client():
    async with served(FakeBackend(replies("Hello"), vocabulary=VOCABULARY)) as url:
        client = ollama.AsyncClient(host=url)
        assert [model.model for model in (await client.list()).models] == ["toy:latest"]
        answer = await client.chat(model="toy", messages=HELLO)
        assert (answer.message.content, answer.done_reason) == ("Hello", "stop")
        parts = [part.message.content async for part in await client.chat("toy", HELLO, stream=True)]
        assert "".join(parts) == "Hello"
        assert (await client.generate("toy", "Hi")).response == "Hello"
        assert (await client.show("toy")).details.format == "gguf"
        assert (await client.ps()).models[0].context_length == 4096
        with pytest.raises(ollama.ResponseError, match="not served here"):
            await client.chat(model="other", messages=HELLO)
        await client._client.aclose()
