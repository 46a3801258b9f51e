"""Cached prompt tokens are reported in every dialect and counted; a client may ask not to use them."""

from __future__ import annotations

import json

import pytest

from primad.ring.messages import PromptProgress
from tests.fakes.backend import FakeBackend
from tests.fakes.http import call, events, post

HELLO = [{"role": "user", "content": "Hi"}]
PATHS = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/completion": {"prompt": "Hello"},
    "/v1/messages": {"model": "claude-any", "max_tokens": 50, "messages": HELLO},
    "/v1/responses": {"input": "Hi"},
    "/api/chat": {"model": "toy", "messages": HELLO, "stream": False},
}


def reuses(count: int) -> FakeBackend:
    return FakeBackend(lambda _: [PromptProgress(request=1, tokens=count, reused=count), *b"yes"])


def test_usage_has_the_cached_tokens():
    chat = post(reuses(2), "/v1/chat/completions", **PATHS["/v1/chat/completions"]).json()["usage"]
    assert chat["prompt_tokens_details"] == {"cached_tokens": 2}
    anthropic = post(reuses(2), "/v1/messages", **PATHS["/v1/messages"]).json()["usage"]
    assert (anthropic["input_tokens"], anthropic["cache_read_input_tokens"]) == (chat["prompt_tokens"] - 2, 2)
    responses = post(reuses(2), "/v1/responses", **PATHS["/v1/responses"]).json()["usage"]
    assert responses["input_tokens_details"] == {"cached_tokens": 2}
    timings = post(reuses(2), "/completion", **PATHS["/completion"]).json()["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (2, 4)


def test_streams_report_cached_tokens_with_their_usage():
    fields = PATHS["/v1/chat/completions"] | {"stream_options": {"include_usage": True}}
    *_, counts, _ = events(post(reuses(2), "/v1/chat/completions", stream=True, **fields))
    assert counts["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    reported = post(reuses(2), "/v1/messages", stream=True, **PATHS["/v1/messages"]).text
    delta = next(line for line in reported.split("\n") if line.startswith('data: {"type":"message_delta"'))
    assert json.loads(delta.removeprefix("data: "))["usage"]["cache_read_input_tokens"] == 2
    *_, end = events(post(reuses(2), "/completion", stream=True, **PATHS["/completion"]))
    assert end["timings"]["cache_n"] == 2


def test_a_response_ended_by_a_stop_string_reports_cached_tokens_too():
    fields = PATHS["/v1/chat/completions"] | {"stop": ["s"]}
    assert post(reuses(2), "/v1/chat/completions", **fields).json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 2
    }


def test_progress_starts_with_the_cached_tokens():
    fields = PATHS["/v1/chat/completions"] | {"return_progress": True}
    reported = events(post(reuses(2), "/v1/chat/completions", stream=True, **fields))
    progress = [event["prompt_progress"] for event in reported if "prompt_progress" in event]
    assert [(each["cache"], each["processed"]) for each in progress] == [(2, 2)]


def test_a_prompt_with_several_choices_is_counted_once():
    fields = {"prompt": ["Hello", "Hello"], "n": 2}
    used = post(reuses(3), "/v1/completions", **fields).json()["usage"]
    assert used["prompt_tokens_details"] == {"cached_tokens": 6}


@pytest.mark.parametrize("path", PATHS)
def test_a_client_may_have_all_of_it_computed(path):
    backend = reuses(0)
    assert post(backend, path, **PATHS[path]).status_code == 200
    assert [call.reuses for call in backend.calls] == [True]
    if path in ("/v1/chat/completions", "/v1/completions", "/completion"):
        post(backend, path, cache_prompt=False, **PATHS[path])
        assert [call.reuses for call in backend.calls] == [True, False]


def test_metrics_count_it():
    backend = reuses(2)
    post(backend, "/v1/completions", **PATHS["/v1/completions"])
    assert "primad_cached_tokens_total" in call(backend, "GET", "/metrics").text
