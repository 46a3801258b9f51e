"""A head that requires keys refuses strangers, but not this user's commands, nor clients with a key."""

from __future__ import annotations

import httpx

from tests.e2e.cluster import PATIENCE_S, heading, primad


def models(url: str, key: str | None) -> int:
    """Return the HTTP status of a request for the models with ``key``."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE_S).status_code


def ended(*words: object, code: int = 0, **environment: str) -> str:
    """Run ``primad`` with these words; check its exit code and return its output."""
    with primad(*words, **environment) as run:
        assert run.wait_end() == code, run.output
        return run.output


def test_keys_are_added_and_removed_at_run_time_and_the_own_user_needs_none(quick_model, new_home, cluster):
    home = new_home("head")
    keys = ("--home", str(home))
    printed = ended("key", "add", "laptop", *keys)
    (key,) = [line for line in printed.splitlines() if line.startswith("primad-")]
    with heading(quick_model, home, cluster, "--alone", "--api-key-file", home / "api-keys") as head:
        head.wait_serving()
        assert [models(head.url, each) for each in (None, "wrong", key)] == [401, 401, 200]
        assert "requires an API key" in ended("status", "--url", head.url, code=2)
        assert "serving" in ended("status", "--url", head.url, "--api-key", key)
        assert "serving" in ended("status", PRIMAD_HOME=str(home))
        asked = ("chat", "Hi", "--max-tokens", 4, "--temperature", 0)
        assert "error" not in ended(*asked, PRIMAD_HOME=str(home))
        assert "requires an API key" in ended(*asked, "--url", head.url, code=2)
        assert "error" not in ended(*asked, "--url", head.url, PRIMAD_API_KEY=key)
        guest = next(line for line in ended("key", "add", "guest", *keys).splitlines() if line.startswith("primad-"))
        assert models(head.url, guest) == 200
        ended("key", "remove", "laptop", *keys)
        assert [models(head.url, each) for each in (key, guest)] == [401, 200]
        assert key not in head.run.output
