"""What clients of several dialects look for in responses."""

from __future__ import annotations

from typing import Any

from primad.api.answering.backend import ModelNames
from tests.fakes.backend import ByteVocabulary, FakeBackend, replies
from tests.fakes.embeddings import FakeEmbeddings
from tests.fakes.http import call, events, post

HELLO = [{"role": "user", "content": "Hi"}]
TEMPLATE = ByteVocabulary(chat_template="{{ messages[-1].content }}")
NAMES = ModelNames(aliases=("gpt-4o",))
ANTHROPIC = {"anthropic-version": "2023-06-01"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hi"},
    "/completion": {"prompt": "Hi"},
    "/v1/messages": {"max_tokens": 9, "messages": HELLO},
    "/v1/responses": {"input": "Hi"},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "Hi"},
}


def long(value: Any) -> Any:
    return [{"role": "user", "content": "x" * 500}] if isinstance(value, list) else "x" * 500


def test_a_prompt_that_is_too_long_is_refused_with_the_phrase_that_clients_look_for():
    for path, request in BODIES.items():
        body = {key: value if key == "max_tokens" else long(value) for key, value in request.items()}
        answer = post(FakeBackend(replies(), vocabulary=TEMPLATE, context_tokens=64), path, model="toy", **body)
        assert (answer.status_code, "exceeds the available context size" in answer.text) == (400, True), answer.text


def test_the_response_has_the_requested_model_name():
    def request(path: str, **body: Any) -> Any:
        return call(FakeBackend(replies("x"), vocabulary=TEMPLATE), "POST", path, json=body, names=NAMES)

    for path, body in BODIES.items():
        assert request(path, stream=False, model="gpt-4o", **body).json()["model"] == "gpt-4o", path
    for path in ("/v1/chat/completions", "/v1/completions", "/completion", "/v1/responses"):
        assert request(path, **BODIES[path]).json()["model"] == "toy", path
    streamed = events(request("/v1/chat/completions", stream=True, model="gpt-4o", messages=HELLO))
    assert {event["model"] for event in streamed[:-1]} == {"gpt-4o"}


def test_tokens_are_counted_even_for_a_prompt_that_is_too_long():
    backend = FakeBackend(replies(), vocabulary=TEMPLATE, context_tokens=64)
    for path in ("/v1/chat/completions", "/v1/responses"):
        reported = post(backend, f"{path}/input_tokens", **BODIES[path]).json()
        assert reported == {"object": "response.input_tokens", "input_tokens": 3}
        field = next(iter(BODIES[path]))
        assert post(backend, f"{path}/input_tokens", **{field: long(BODIES[path][field])}).json()["input_tokens"] == 501
    assert post(backend, "/v1/responses/input_tokens", input="Hi", model="other").status_code == 404
    assert not backend.calls


def test_clients_of_the_anthropic_dialect_get_models_in_its_format():
    backend = FakeBackend(replies())
    listed = call(backend, "GET", "/v1/models", headers=ANTHROPIC, names=NAMES, embeddings=FakeEmbeddings()).json()
    assert [(each["type"], each["id"]) for each in listed["data"]][:2] == [("model", "toy"), ("model", "gpt-4o")]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "toy", listed["data"][-1]["id"])
    assert listed["data"][0]["created_at"] == "2023-11-14T22:13:20Z"
    assert call(backend, "GET", "/v1/models/toy", headers=ANTHROPIC).json() == listed["data"][0]
    backend.served = None
    assert call(backend, "GET", "/v1/models", headers=ANTHROPIC).json()["data"] == []
    assert call(backend, "GET", "/v1/models").json() == {"object": "list", "data": []}
