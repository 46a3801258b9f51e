"""Access over HTTP with API keys: each dialect refuses in its own shape, and limits are reported."""

from __future__ import annotations

import httpx
import pytest

from primad.api.app import create_app
from primad.api.http.access import OF_THIS_MACHINE, OPEN, Admission, Door
from primad.api.http.errors import error_response
from primad.api.http.guard import KeyGuard
from primad.api.http.key_file import KeyFile, add_key, remove_key
from primad.api.http.keys import ApiKey, digest_of
from primad.errors import ConfigError
from tests.fakes.backend import FakeBackend, replies
from tests.fakes.http import ask

KEY = "a-key-of-some-length"
HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def app_for(*keys: ApiKey, origins: tuple[str, ...] = ()):
    return create_app(FakeBackend(replies("Hello")), admission=Admission(door=Door(lambda: keys), origins=origins))


def key(**limits: int) -> ApiKey:
    return ApiKey(name="laptop", digest=digest_of(KEY), **limits)


@pytest.mark.parametrize(
    "headers", [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}]
)
def test_a_client_with_a_key_is_let_in(headers):
    assert ask(app_for(key()), "GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer wrong"},
        {"authorization": KEY},
        {"x-api-key": "wrong"},
        {"x-api-key": ""},
        {b"x-api-key": b"\xff\xfe"},
    ],
)
def test_a_client_without_a_key_is_refused_except_for_the_health_check(headers):
    app = app_for(key())
    response = ask(app, "POST", "/v1/chat/completions", headers=headers, json=HELLO)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert ask(app, "GET", "/health", headers=headers).status_code == 200
    assert ask(app, "HEAD", "/api/hello", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", lambda body: body["error"]["code"] == "invalid_api_key"),
        ("/tokenize", lambda body: body["error"]["code"] == "invalid_api_key"),
        ("/v1/responses", lambda body: body["error"]["code"] == "invalid_api_key"),
        ("/v1/messages", lambda body: body["error"]["type"] == "authentication_error"),
        ("/api/chat", lambda body: "Bearer" in body["error"]),
    ],
)
def test_the_refusal_has_the_shape_of_the_dialect_and_is_short(path, shape):
    response = ask(app_for(key()), "POST", path, json=HELLO)
    assert response.status_code == 401
    assert shape(response.json())
    assert len(response.content) < 200


def test_a_host_name_is_refused_before_a_key_is_looked_at():
    response = ask(app_for(key()), "GET", "/v1/models", headers={"host": "evil.example"})
    assert response.status_code == 403


def test_an_allowed_page_gets_its_preflight_without_a_key_and_can_read_refusals():
    app, origin = app_for(key(), origins=("http://desk.lan",)), {"origin": "http://desk.lan"}
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert ask(app, "OPTIONS", "/v1/chat/completions", headers=origin | preflight).status_code == 200
    refused = ask(app, "POST", "/v1/chat/completions", headers=origin, json=HELLO)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://desk.lan"


def test_requests_over_the_limit_get_retry_after():
    door = Door(lambda: [key(requests_per_min=1)])
    app = KeyGuard(create_app(FakeBackend(replies())), door, lambda path, exc: error_response(exc), clock=lambda: 0.0)
    headers = {"x-api-key": KEY}
    assert ask(app, "GET", "/v1/models", headers=headers).status_code == 200
    response = ask(app, "GET", "/v1/models", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert response.headers["retry-after"] == "60"


@pytest.mark.parametrize("stream", [False, True])
def test_the_ring_gets_the_owner_of_a_request(stream):
    backend = FakeBackend(replies("Hello"))
    guarded = create_app(backend, admission=Admission(door=Door(lambda: [key()])))
    fields = HELLO | {"stream": stream}
    assert ask(guarded, "POST", "/v1/chat/completions", headers={"x-api-key": KEY}, json=fields).status_code == 200
    assert ask(create_app(backend), "POST", "/v1/chat/completions", json=fields).status_code == 200
    assert [call.owner for call in backend.calls] == ["laptop", ""]


@pytest.mark.parametrize(
    ("address", "owner"),
    [
        ("192.168.1.7", "192.168.1.7"),
        ("::ffff:192.168.1.7", "192.168.1.7"),
        ("FD00:0::7", "fd00::7"),
        ("127.0.0.1", ""),
        ("127.9.9.9", ""),
        ("::1", ""),
        ("::ffff:127.0.0.1", ""),
    ],
)
async def test_without_keys_each_machine_is_one_owner(address, owner):
    backend = FakeBackend(replies("Hello"))
    transport = httpx.ASGITransport(create_app(backend), client=(address, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        await client.post("/v1/chat/completions", json=HELLO)
    assert [call.owner for call in backend.calls] == [owner]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_prompt_and_completion_count_towards_the_limit(stream):
    app, headers = app_for(key(tokens_per_min=1)), {"x-api-key": KEY}
    fields = {"messages": [{"role": "user", "content": "x" * 200}], "stream": stream}  # hours' worth of the limit
    first = ask(app, "POST", "/v1/chat/completions", headers=headers, json=fields)
    assert first.status_code == 200
    second = ask(app, "POST", "/v1/chat/completions", headers=headers, json=HELLO)
    assert second.status_code == 429
    assert "1 tokens per minute" in second.json()["error"]["message"]


def test_keys_are_added_and_removed_under_a_server_that_runs(tmp_path):
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match="there is no such file; write one with"):
        KeyFile(path)
    add_key(path, key())
    assert path.stat().st_mode & 0o077 == 0
    assert KEY not in path.read_text()
    file = KeyFile(path)
    assert file.keys() == (key(),)
    with pytest.raises(ConfigError, match="already has a key laptop"):
        add_key(path, key())
    path.write_text("damaged")
    assert file.keys() == (key(),)
    path.unlink()
    assert file.keys() == ()
    with pytest.raises(ConfigError, match="has no key laptop; there are: none"):
        remove_key(path, "laptop")
    add_key(path, key())
    remove_key(path, "laptop")
    with pytest.raises(ConfigError, match="has no key; write one with"):
        KeyFile(path)


# ---- without keys ----------------------------------------------------------------------------------------------------


def from_proxy(app, headers, path: str = "/v1/models") -> httpx.Response:
    return ask(app, "GET", path, headers=headers)


ELSEWHERE = [
    {"x-forwarded-for": "192.168.1.7"},
    {"x-forwarded-for": "127.0.0.1, 203.0.113.9"},
    {"x-forwarded-for": "unknown"},
    {"x-real-ip": "2001:db8::7"},
    {"cf-connecting-ip": "203.0.113.9"},
    {"forwarded": 'for="[2001:db8::7]:4711";proto=https'},
    {"forwarded": "proto=http;for=192.0.2.60, for=127.0.0.1"},
    {"forwarded": "by=203.0.113.43"},
    {"forwarded": ", ".join(["for=127.0.0.1"] * 33)},
]
HERE = [
    {},
    {"x-forwarded-for": "127.0.0.1"},
    {"x-forwarded-for": "::1, 127.0.0.2:80"},
    {"forwarded": 'for="[::1]:4711"'},
    {"x-forwarded-proto": "https"},
]


@pytest.mark.parametrize("headers", ELSEWHERE, ids=str)
def test_a_request_proxied_for_another_machine_needs_a_key(headers):
    local = create_app(FakeBackend(replies("Hello")), admission=Admission(door=OF_THIS_MACHINE))
    answer = from_proxy(local, headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "from_elsewhere")
    assert "www-authenticate" not in answer.headers
    assert from_proxy(local, headers, "/health").status_code != 403
    everybody = create_app(FakeBackend(replies("Hello")), admission=Admission(door=OPEN))
    assert from_proxy(everybody, headers).status_code == 200
    assert from_proxy(app_for(key()), headers | {"x-api-key": KEY}).status_code == 200


@pytest.mark.parametrize("headers", HERE, ids=str)
def test_programs_of_this_machine_need_no_key(headers):
    local = create_app(FakeBackend(replies("Hello")), admission=Admission(door=OF_THIS_MACHINE))
    assert from_proxy(local, headers).status_code == 200
