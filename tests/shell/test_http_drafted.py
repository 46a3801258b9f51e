"""Usage reports drafted tokens, and a client may ask for none."""

from __future__ import annotations

import pytest

from tests.fakes.backend import FakeBackend
from tests.fakes.http import events, post

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


def drafting(drafted: int, accepted: int) -> FakeBackend:
    backend = FakeBackend(lambda _: b"yes")
    backend.drafts = (drafted, accepted)
    return backend


def test_usage_has_accepted_and_rejected_draft_tokens():
    used = post(drafting(7, 4), "/v1/chat/completions", **HELLO).json()["usage"]
    assert used["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 3}
    several = post(drafting(7, 4), "/v1/completions", prompt=["Hello", "Hello"]).json()["usage"]
    assert several["completion_tokens_details"] == {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 6}


def test_a_stream_reports_draft_tokens_with_its_usage():
    fields = HELLO | {"stream_options": {"include_usage": True}}
    *_, counts, _ = events(post(drafting(5, 5), "/v1/chat/completions", stream=True, **fields))
    details = counts["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 0}


def test_usage_without_drafts_has_no_draft_tokens():
    assert "completion_tokens_details" not in post(drafting(0, 0), "/v1/chat/completions", **HELLO).json()["usage"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_a_client_may_turn_speculation_off(path):
    backend = drafting(0, 0)
    fields = HELLO if "chat" in path else {"prompt": "Hello"}
    post(backend, path, **fields)
    post(backend, path, speculate=False, **fields)
    assert [call.speculates for call in backend.calls] == [True, False]
