"""``primad key``, and what ``serve`` requires before it listens beyond this device."""

from __future__ import annotations

import pytest

from primad.api.http.key_file import read_keys
from primad.api.http.keys import key_like


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    """Hide this user's home folder and key."""
    monkeypatch.setenv("PRIMAD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PRIMAD_API_KEY", raising=False)


def test_a_key_is_printed_once_listed_by_name_and_removed(command, tmp_path):
    path = tmp_path / "home" / "api-keys"
    assert "no keys in" in command("key", "list")[1]
    code, out, err = command("key", "add", "guest", "--requests", "20", "--tokens", "20000")
    assert (code, out.count("\n")) == (0, 1)
    assert "--api-key-file" in err
    (saved,) = read_keys(path) or ()
    assert key_like(out.strip(), [saved]) == saved
    assert out.strip() not in path.read_text()
    command("key", "add", "laptop")
    assert command("key", "list")[1] == "guest: 20 requests per minute, 20000 tokens per minute\nlaptop: no limits\n"
    assert command("key", "remove", "guest")[0] == 0
    assert command("key", "list")[1] == "laptop: no limits\n"


def test_a_key_that_manages_is_listed_so(command, tmp_path):
    command("key", "add", "phone", "--manages")
    assert [key.manages for key in read_keys(tmp_path / "home" / "api-keys") or ()] == [True]
    assert command("key", "list")[1] == "phone: no limits; manages models\n"


def test_keys_may_be_in_any_file(command, tmp_path):
    command("key", "add", "laptop", "--file", tmp_path / "mine")
    assert "laptop" in command("key", "list", "--file", tmp_path / "mine")[1]
    assert "laptop" not in command("key", "list")[1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("add", "a b"), "'a b' is not a valid name of a key"),
        (("add", "--", "-x"), "'-x' is not a valid name of a key"),
        (("add", "x", "--requests", "0"), "--requests"),
        (("remove", "nobody"), "has no key nobody; there are: none"),
    ],
)
def test_invalid_key_options_are_refused(command, arguments, named):
    code, out, err = command("key", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("primad: error: ")
    assert named in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--host", "0.0.0.0"), "or --no-auth"),
        (("--host", "0.0.0.0", "--no-auth", "--api-key", "k" * 16), "--no-auth: contradicts"),
        (("--no-auth", "--api-key-file", "keys"), "--no-auth: contradicts"),
        (("--api-key", "short"), "--api-key: a key has 16 to 512"),
        (("--api-key", "with a space in between"), "--api-key: a key has 16 to 512"),
    ],
)
def test_serve_requires_a_decision_on_who_may_send_requests(command, arguments, named):
    code, _, err = command("serve", "--model", "x.gguf", *arguments)
    assert code == 2
    assert named in err
    assert "k" * 16 not in err
    assert "with a space" not in err
