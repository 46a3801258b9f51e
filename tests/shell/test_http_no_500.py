"""No request body is answered with 500, in any dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primad.api.app import create_app
from primad.api.http.dialect import COMPONENT
from tests.fakes.backend import ByteVocabulary, FakeBackend, replies
from tests.fakes.embeddings import FakeEmbeddings
from tests.fakes.http import call

HELLO = [{"role": "user", "content": "Hi"}]
LIKELY: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/completion": {"prompt": "Hi"},
    "/tokenize": {"content": "Hi"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": HELLO},
    "/v1/messages": {"model": "claude-x", "max_tokens": 5, "messages": HELLO},
    "/v1/messages/count_tokens": {"model": "claude-x", "messages": HELLO},
    "/api/chat": {"model": "toy", "messages": HELLO},
    "/api/generate": {"model": "toy", "prompt": "Hi"},
    "/api/show": {"model": "toy"},
    "/v1/responses": {"input": "Hi"},
    "/v1/embeddings": {"input": "sea"},
    "/v1/rerank": {"query": "sea", "documents": ["ship"]},
    "/api/embed": {"model": "small", "input": "sea"},
    "/api/embeddings": {"model": "small", "prompt": "sea"},
}
DOCUMENT = create_app(FakeBackend(replies())).openapi()
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([2**64, 10**40, 1e308])
    | st.floats()
    | st.text(max_size=5)
    | st.just(HELLO),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def fields_of(path: str) -> list[str]:
    """The fields in the OpenAPI document, or those of the example for paths that it lacks."""
    body = DOCUMENT["paths"].get(path, {}).get("post", {}).get("requestBody")
    if body is None:
        return list(LIKELY[path])
    reference = body["content"]["application/json"]["schema"]["$ref"]
    return list(DOCUMENT["components"]["schemas"][reference.removeprefix(COMPONENT.format(""))]["properties"])


@pytest.mark.parametrize("path", LIKELY)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_body_is_answered_with_500(path, data):
    fields = st.dictionaries(st.sampled_from(fields_of(path)), VALUES, max_size=3)
    body = json.dumps(LIKELY[path] | data.draw(fields, "fields"))
    vocabulary = ByteVocabulary(adds_bos=data.draw(st.booleans(), "adds_bos"))
    backend = FakeBackend(replies("some ", 257, "answer"), vocabulary=vocabulary, context_tokens=64)
    response = call(
        backend,
        "POST",
        path,
        embeddings=FakeEmbeddings(),
        content=body,
        headers={"content-type": "application/json"},
    )
    assert response.status_code in (200, 400, 404), response.text


@pytest.mark.parametrize("path", LIKELY)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 9999, b'{"n": 1e999}'])
def test_a_body_that_is_no_request_is_refused(path, body):
    response = call(FakeBackend(replies()), "POST", path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
