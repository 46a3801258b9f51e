"""API keys: access, and limits per minute."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.api.http.access import OPEN, Door, TooOftenError
from primad.api.http.key_file import parse_keys, written_keys
from primad.api.http.keys import Allowance, ApiKey, digest_of, key_like, new_key
from primad.errors import ConfigError, RequestError

FILE = Path("keys")
KEY = new_key()
LAPTOP = ApiKey(name="laptop", digest=digest_of(KEY))
limits = st.none() | st.integers(1, 10**9)


def limited(requests: int | None = None, tokens: int | None = None) -> ApiKey:
    return ApiKey(name="guest", digest=digest_of("guest"), requests_per_min=requests, tokens_per_min=tokens)


def test_only_the_key_itself_is_found():
    assert key_like(KEY, [limited(), LAPTOP]) == LAPTOP
    for printed in ("", KEY[:-1], KEY + " ", KEY.upper(), LAPTOP.digest, "\udcff"):
        assert key_like(printed, [limited(), LAPTOP]) is None


def test_no_key_is_made_twice_and_none_is_kept():
    assert new_key() != new_key()
    assert KEY not in written_keys([LAPTOP])


def test_a_minutes_requests_may_come_at_once_and_come_back_evenly():
    allowance = Allowance(limited(requests=3), 0.0)
    assert [allowance.ask(0.0) for _ in range(3)] == [None] * 3
    assert allowance.ask(0.0) == ("3 requests per minute", 20)
    assert allowance.ask(19.5) == ("3 requests per minute", 1)
    assert allowance.ask(20.1) is None
    assert [allowance.ask(1e6) for _ in range(4)][-1] is not None


def test_tokens_that_were_used_are_waited_for():
    allowance = Allowance(limited(tokens=60), 0.0)
    assert allowance.ask(0.0) is None
    allowance.used(90)
    assert allowance.ask(0.0) == ("60 tokens per minute", 31)
    assert allowance.ask(31.0) is None


def test_the_door_lets_everybody_in_without_keys_and_always_to_the_health_check_and_the_files_of_the_page():
    assert OPEN.enter("/v1/models", None, 0.0) is None
    for path in ("/health", "/", "/page/page.css", "/ui/owner"):
        assert Door(lambda: [LAPTOP]).enter(path, None, 0.0) is None
    closed = ("/healthy", "/health/", "//health", "/status", "/metrics", "/openapi.json")
    for path in (*closed, "/page", "/pages/", "/ui/events", "/ui/ticket", "/ui/owner/"):
        with pytest.raises(RequestError) as refused:
            Door(lambda: [LAPTOP]).enter(path, None, 0.0)
        assert refused.value.status == 401


def test_a_key_that_is_taken_away_lets_nobody_in_any_more():
    keys = [LAPTOP]
    door = Door(lambda: keys)
    assert door.enter("/v1/models", KEY, 0.0) is not None
    keys.clear()
    with pytest.raises(RequestError):
        door.enter("/v1/models", KEY, 0.0)


def test_each_key_has_its_own_allowance_and_a_new_limit_starts_full():
    keys = [LAPTOP, limited(requests=1)]
    door = Door(lambda: keys)
    door.enter("/status", "guest", 0.0)
    with pytest.raises(TooOftenError) as refused:
        door.enter("/status", "guest", 0.0)
    assert (refused.value.status, refused.value.wait_s) == (429, 60)
    assert "guest" in str(refused.value)
    door.enter("/status", KEY, 0.0)
    keys[1] = limited(requests=2)
    door.enter("/status", "guest", 0.0)


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}", fullmatch=True), st.tuples(limits, limits), max_size=5
    )
)
def test_a_file_of_keys_is_read_as_it_was_written(made):
    keys = tuple(
        ApiKey(name=name, digest=digest_of(name), requests_per_min=requests, tokens_per_min=tokens)
        for name, (requests, tokens) in made.items()
    )
    assert parse_keys(written_keys(keys), FILE) == keys


@pytest.mark.parametrize(
    "line",
    [
        "laptop",
        f"lap/top {'0' * 64}",
        f"laptop {'0' * 63}",
        f"laptop {'G' * 64}",
        f"laptop {'0' * 64} requests",
        f"laptop {'0' * 64} requests=0",
        f"laptop {'0' * 64} requests=9999999999",
        f"laptop {'0' * 64} words=7",
        f"laptop {'0' * 64} tokens=7 tokens=8",
        f"laptop {'0' * 64}\nlaptop {'1' * 64}",
    ],
)
def test_a_bad_line_is_named(line):
    with pytest.raises(ConfigError, match=rf"^keys, line {3 + line.count(chr(10))}: "):
        parse_keys(f"# keys\n\n{line}\n", FILE)
