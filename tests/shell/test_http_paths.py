"""Paths with an extra slash, and HEAD wherever GET works."""

from __future__ import annotations

import httpx

from primad.api.app import create_app
from primad.api.http.access import Admission, Door
from tests.fakes.backend import FakeBackend, replies
from tests.fakes.http import call

HELLO = [{"role": "user", "content": "Hi"}]


def test_an_extra_slash_changes_nothing():
    bodies = {
        "/v1/chat/completions": {"messages": HELLO},
        "/api/chat": {"model": "toy", "messages": HELLO, "stream": False},
        "/v1/messages": {"model": "toy", "max_tokens": 3, "messages": HELLO},
        "/tokenize": {"content": "x"},
        **dict.fromkeys(("/v1/models", "/v1/models/toy", "/health", "/v1/health", "/props", "/api/tags")),
    }
    for path, body in bodies.items():
        method = "GET" if body is None else "POST"
        for printed in (
            path,
            f"/{path}",
            f"{path}/",
            f"//{path}//",
            path.replace("/", "//"),
            path.replace("/v1/", "/v1///"),
        ):
            answer = call(FakeBackend(replies("x")), method, f"http://127.0.0.1:8080{printed}", json=body)
            assert answer.status_code == 200, (printed, answer.text)
    assert call(FakeBackend(replies()), "GET", "http://127.0.0.1:8080//v2/models").status_code == 404


def test_head_works_wherever_get_does_and_the_openapi_document_lists_it_once():
    for path in ("/", "/v1/models", "/v1/models/toy", "/health", "/props", "/api/tags", "/metrics", "/status"):
        assert call(FakeBackend(replies()), "HEAD", path).status_code == 200, path
    assert call(FakeBackend(replies()), "HEAD", "/ui/events").status_code == 405
    assert "head" not in create_app(FakeBackend(replies())).openapi()["paths"]["/v1/models"]


async def test_a_slash_too_many_opens_no_door():
    app = create_app(FakeBackend(replies()), admission=Admission(door=Door(lambda: ())))

    async def status(path: str) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return (await client.get(f"http://127.0.0.1:8080{path}")).status_code

    for path in ("//v1/models", "/v1/models/", "//health/../v1/models", "/page//../v1/models", "/ui/who/"):
        assert await status(path) in (401, 404), path
    for path in ("//health", "/v1/health/", "//page//page.css"):
        assert await status(path) == 200, path
