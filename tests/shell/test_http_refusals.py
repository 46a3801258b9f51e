"""Bad requests and failures: always OpenAI's error object with the right status, and never a 500 for client input."""

from __future__ import annotations

import json
import socket
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.api.answering.backend import Health
from primad.api.app import create_app
from primad.api.dialects.openai.schema import ChatRequest, CompletionRequest
from primad.api.http.access import Admission
from primad.api.http.connection import MAX_BODY_BYTES
from primad.api.http.errors import error_response
from primad.api.http.guard import is_allowed
from primad.errors import RequestError, RingError
from primad.network.own_places import own_names
from tests.fakes.backend import ByteVocabulary, FakeBackend, replies
from tests.fakes.http import ask, call, events, post

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]
VALID = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "Hi"}}
both = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def error(response: httpx.Response, status: int) -> dict[str, str | None]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
    return body["error"]


@both
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 9999, b'{"n": NaN}', b'{"n": 1e999}'])
def test_a_body_that_is_no_request_is_an_error(path, body):
    response = call(FakeBackend(replies()), "POST", path, content=body, headers={"content-type": "application/json"})
    assert error(response, 400)["type"] == "invalid_request_error"


@both
def test_a_body_that_is_nested_too_deeply_has_its_own_error_code(path):
    body = b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    response = call(FakeBackend(replies()), "POST", path, content=body, headers={"content-type": "application/json"})
    assert error(response, 400)["code"] == "nested_too_deeply"


@both
def test_a_wrong_field_is_named(path):
    assert error(post(FakeBackend(replies()), path, **VALID[path], temperature=-1), 400)["param"] == "temperature"


@both
def test_a_schema_that_cannot_be_followed_is_refused_by_its_keyword(path):
    schema = {"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "null"}}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for field, value in (("response_format", wanted), ("json_schema", schema)):
        refused = error(post(FakeBackend(replies()), path, **VALID[path], **{field: value}), 400)
        assert "'contains'" in refused["message"]
        assert (refused["param"], refused["code"]) == (field, "unsupported_schema")
    assert error(post(FakeBackend(replies()), path, **VALID[path], grammar="root ::= x"), 400)["param"] == "grammar"


MEDIA_TYPES = (
    *(
        {"content-type": printed}
        for printed in ("text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data")
    ),
    {},  # like a fetch of a Blob
)
PAGES = (
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
    {"sec-fetch-mode": "navigate"},
    {"referer": "http://evil.example/"},
    {"Origin": "http://127.0.0.1:9999", "Sec-Fetch-Site": "same-site"},
)
DIALECTS = {
    CHAT: VALID[CHAT],
    COMPLETIONS: VALID[COMPLETIONS],
    "/completion": {"prompt": "Hi"},
    "/tokenize": {"content": "Hi"},
    "/v1/messages": {"model": "toy", "max_tokens": 5, "messages": HELLO},
    "/v1/responses": {"input": "Hi"},
    "/api/chat": {"model": "toy", "messages": HELLO, "stream": False},
    "/api/generate": {"model": "toy", "prompt": "Hi", "stream": False},
}


def test_a_program_need_not_set_the_json_content_type():
    for path, fields in DIALECTS.items():
        for printed in MEDIA_TYPES:
            answer = call(FakeBackend(replies("x")), "POST", path, content=json.dumps(fields).encode(), headers=printed)
            assert answer.status_code == 200, (path, printed, answer.text)


def test_a_page_must_set_the_json_content_type_and_no_body_is_read_before():
    async def body():
        raise AssertionError("the body is read")
        yield b""

    for path in DIALECTS:
        for page in PAGES:
            for printed in MEDIA_TYPES:
                answer = call(FakeBackend(replies()), "POST", path, content=body(), headers=page | printed)
                assert answer.status_code == 400, (path, page, printed)
                assert "application/json" in answer.text


@both
def test_a_body_that_is_too_large_is_refused(path):
    json_type = {"content-type": "application/json"}
    body = b'{"prompt": "' + b"x" * MAX_BODY_BYTES
    error(call(FakeBackend(replies()), "POST", path, content=body, headers=json_type), 413)

    async def in_chunks():
        for _ in range(9):
            yield b"x" * (1 << 20)

    error(call(FakeBackend(replies()), "POST", path, content=in_chunks(), headers=json_type), 413)
    error(call(FakeBackend(replies()), "POST", path, headers=json_type | {"content-length": "9" * 5000}), 413)


def test_unknown_paths_and_methods():
    backend = FakeBackend(replies())
    assert "/nothing" in error(call(backend, "GET", "/nothing"), 404)["message"]
    error(call(backend, "GET", "/v1/"), 404)
    response = call(backend, "GET", CHAT)
    assert "GET /v1/chat/completions" in error(response, 405)["message"]
    assert response.headers["allow"] == "POST"
    error(call(backend, "OPTIONS", CHAT), 405)


def test_an_unknown_model():
    backend = FakeBackend(replies())
    for response in (
        post(backend, CHAT, **VALID[CHAT], model="gpt-4"),
        post(backend, COMPLETIONS, **VALID[COMPLETIONS], model="gpt-4"),
        call(backend, "GET", "/v1/models/some/one"),
    ):
        assert error(response, 404)["code"] == "model_not_found"


def test_a_prompt_longer_than_the_context():
    backend = FakeBackend(replies(), context_tokens=10)
    error = post(backend, COMPLETIONS, prompt="x" * 11).json()["error"]
    assert (error["type"], error["code"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (12, 10)
    assert "--context" in error["message"]


def test_a_template_that_refuses():
    vocabulary = ByteVocabulary(chat_template="{{ raise_exception('no system role') }}")
    assert "no system role" in str(
        error(post(FakeBackend(replies(), vocabulary=vocabulary), CHAT, messages=HELLO), 400)
    )


def test_a_broken_template_is_a_server_error():
    vocabulary = ByteVocabulary(chat_template="{% if %}")
    response = post(FakeBackend(replies(), vocabulary=vocabulary), CHAT, messages=HELLO)
    assert "tokenizer.chat_template" in str(error(response, 500)["message"])


def test_a_client_gets_retry_after():
    response = error_response(RequestError("not loaded yet", status=429, retry_s=41.2))
    assert response.headers["retry-after"] == "42"


def test_while_loading():
    backend = FakeBackend(replies())
    backend.state, backend.served = Health(serving=False, taken=False, detail="shipping layers"), None
    response = call(backend, "GET", "/health")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert response.json() == {"status": "loading", "detail": "shipping layers", "model": None}
    assert call(backend, "GET", "/v1/models").json() == {"object": "list", "data": []}
    error(call(backend, "GET", "/v1/models/toy"), 404)
    for path, body in VALID.items():
        response = post(backend, path, **body)
        assert "shipping layers" in str(error(response, 503)["message"])
        assert int(response.headers["retry-after"]) > 0


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_ring_that_breaks_before_the_first_token(path, stream):
    backend = FakeBackend(replies(RingError("worker b went away")))
    response = post(backend, path, **VALID[path], stream=stream)
    assert error(response, 503) == {
        "message": "worker b went away",
        "type": "server_error",
        "param": None,
        "code": "service_unavailable",
    }
    assert int(response.headers["retry-after"]) > 0
    assert backend.calls[0].closed.is_set()


@both
def test_a_ring_that_breaks_later(path):
    assert error(post(FakeBackend(replies("a", RingError("gone"))), path, **VALID[path]), 503)["message"] == "gone"
    got = events(post(FakeBackend(replies("a", RingError("gone"))), path, **VALID[path], stream=True))
    assert got[-1]["error"]["message"] == "gone"
    assert all("choices" in chunk for chunk in got[:-1])


def test_a_response_that_ends_with_an_error_is_a_503():
    backend = FakeBackend(replies())
    backend.ending = ("error", "deadline of step 7 passed")
    assert error(post(backend, CHAT, messages=HELLO), 503)["message"] == "deadline of step 7 passed"


@both
def test_a_grammar_that_cannot_be_followed_is_the_requests_fault(path):
    backend = FakeBackend(replies("a"))
    backend.ending = ("refused", "the grammar is too much work; make it simpler")
    got = error(post(backend, path, **VALID[path]), 400)
    assert (got["message"], got["type"]) == (backend.ending[1], "invalid_request_error")
    reported = events(post(backend, path, **VALID[path], stream=True))[-1]["error"]
    assert (reported["message"], reported["type"]) == (backend.ending[1], "invalid_request_error")


def test_a_full_queue():
    backend = FakeBackend(replies(RequestError("8 requests are waiting", status=429)))
    response = post(backend, CHAT, messages=HELLO)
    assert error(response, 429)["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) > 0


def test_internal_errors_reveal_nothing():
    response = post(FakeBackend(replies(ZeroDivisionError("secret"))), CHAT, messages=HELLO)
    assert "secret" not in str(error(response, 500))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil", "[x]", ""]
)
def test_a_foreign_host_name_is_refused(host):
    response = call(FakeBackend(replies()), "GET", "/v1/models", headers={"host": host})
    assert error(response, 403)["code"] == "host_not_allowed"


def test_our_own_host_names_are_served():
    for host in (
        "localhost",
        "LOCALHOST:8080",
        "a.localhost",
        "127.0.0.1",
        "127.0.0.1:1",
        "[::1]:80",
        "::1",
        "attic.local:80",
    ):
        assert is_allowed(host, {"attic.local"})
    assert not is_allowed("attic.local", set())


def test_the_name_of_this_machine_is_ours_with_its_domain_without_and_in_mdns(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Attic.lan")
    names = {name.lower() for name in own_names()}
    for host in ("attic.local", "ATTIC.local.:8080", "attic", "attic.lan:80"):
        assert is_allowed(host, names)
    for host in ("other.local", "attic.evil", "local", "x.attic.local"):
        assert not is_allowed(host, names)


NAMES = [*ChatRequest.model_fields, *CompletionRequest.model_fields, "repetition_penalty", "user"]
NUMBERS = st.integers(-5, 200) | st.integers() | st.floats() | st.sampled_from([2**31, 2**63, 1e308, -0.0, 256, 260])
SCALARS = (
    st.none() | st.booleans() | NUMBERS | st.text(max_size=6) | st.sampled_from(["toy", "1", "user", "text", "\ud800"])
)
KEYS = st.sampled_from(["role", "content", "type", "text", "include_usage", "1", "259"]) | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | VALUES, "content": st.text(max_size=9) | VALUES}
)
FIELDS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
LIKELY = st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=3), "prompt": st.text(max_size=9) | VALUES})
BODIES = st.builds(lambda likely, fields: likely | fields, LIKELY, FIELDS).map(json.dumps)


@both
@given(body=BODIES | VALUES.map(json.dumps) | st.binary(max_size=60))
def test_no_body_is_answered_with_500(path, body):
    backend = FakeBackend(replies("an answer of some ", 257, "tokens"), context_tokens=64)
    response = call(backend, "POST", path, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        error(response, response.status_code)
    assert all(each.closed.is_set() for each in backend.calls)


@given(
    path=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
    method=st.sampled_from(["GET", "POST", "PUT"]),
)
def test_no_path_is_answered_with_500(path, method):
    response = call(FakeBackend(replies()), method, "http://localhost/" + quote(path))
    assert response.status_code < 500


def test_names_that_the_owner_allows_are_served():
    allowed = {"desk.lan", "*.local"}
    for host in ("desk.lan", "DESK.LAN:8080", "mini.local", "a.mini.local:80", "host.docker.internal:8080"):
        assert is_allowed(host, allowed), host
    for host in ("local", ".local", "xlocal", "a.desk.lan", "mini.local.evil", "docker.internal"):
        assert not is_allowed(host, allowed), host


def test_the_refusal_of_a_host_name_names_the_option_that_allows_it():
    response = call(FakeBackend(replies()), "GET", "/health", headers={"host": "desk.lan"})
    assert "--allow-host" in str(error(response, 403)["message"])


def preflight_from(origin: str, **more: str) -> httpx.Response:
    """The response to a web page of ``origin`` that asks for the models."""
    app = create_app(FakeBackend(replies()), admission=Admission(origins=("http://desk.lan:3000",)))
    return ask(app, "OPTIONS" if more else "GET", "/v1/models", headers={"origin": origin, **more})


def test_only_pages_of_allowed_origins_may_send_requests():
    requested = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    named, other = "http://desk.lan:3000", "http://evil.example"
    assert preflight_from(named).headers["access-control-allow-origin"] == named
    assert preflight_from(named, **requested).headers["access-control-allow-origin"] == named
    assert preflight_from(named, **requested).status_code == 200
    assert "access-control-allow-origin" not in preflight_from(other).headers
    assert preflight_from(other, **requested).status_code == 400
    assert (
        "access-control-allow-origin"
        not in call(FakeBackend(replies()), "GET", "/v1/models", headers={"origin": named}).headers
    )
