"""``primad devices trust`` and ``revoke``, without the rest of the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer

from primad.cli import sight
from primad.cli.trust import revoke, trust
from primad.errors import ConfigError
from primad.network.peer import Peer
from primad.trust.identity import fingerprint, key_hex, load_identity, new_identity
from primad.trust.local_trust import LocalTrust
from primad.trust.trust import BY_HAND, TrustStore

KEY = next(key for key in iter(lambda: new_identity().public, "") if key.startswith("-"))
"""A key that looks like an option in one of its spellings."""
OTHER = new_identity().public
RENAMED = Peer(
    device="pi5",
    cluster="home",
    role="worker",
    version="1",
    protocol=5,
    addresses=("10.0.0.2",),
    port=7770,
    key=KEY,
    pairing=None,
    revision=2,
)
PEERS = [replace(RENAMED, device="pi", revision=1), RENAMED, replace(RENAMED, device="x", key=OTHER)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIMAD_LOCAL_TRUST", str(tmp_path / "local"))
    monkeypatch.setattr(sight, "peers_in_sight", lambda config, seconds: PEERS)
    return tmp_path / "home"


def primad(*words: str) -> None:
    app = typer.Typer()
    app.command()(trust)
    app.command()(revoke)
    app(words, standalone_mode=False)


def test_a_device_is_trusted_by_its_key_in_either_spelling_and_revoked_by_name_or_key(home: Path, capsys):
    own = load_identity(home)
    store = TrustStore(home, own, LocalTrust(home / "local"))
    for key in (KEY, key_hex(KEY)):
        for name in ("pi", key):
            primad("trust", "pi", "--key", key, "--home", str(home))
            assert [(each.device, each.key, each.how) for each in store.entries()] == [("pi", KEY, BY_HAND)]
            printed = capsys.readouterr().out
            assert fingerprint(KEY) in printed
            assert f"--key {key_hex(own.public)}" in printed
            assert own.secret not in printed
            assert "--head" in printed, "one of the two leads"
            primad("trust", "pi", "--key", key, "--head", "--home", str(home))
            assert store.is_head(KEY)
            assert "--head" not in capsys.readouterr().out
            primad("trust", "pi", "--key", new_identity().public, "--home", str(home))
            assert "pi-2 is trusted here as a worker" in capsys.readouterr().out
            primad("revoke", "pi-2", "--home", str(home))
            primad("revoke", "--home", str(home), "--", name)
            assert not store.trusts(KEY)
            assert "pi is no longer trusted here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("trust", "pi", "--key", "x"), "not a device key"),
        (("trust", "a b", "--key", KEY), "not a device name"),
        (("revoke", "pi"), "no device 'pi' is trusted"),
    ],
)
def test_an_invalid_option_is_one_error_line(home: Path, words: tuple[str, ...], error: str):
    with pytest.raises(ConfigError, match=error) as raised:
        primad(*words, "--home", str(home))
    assert "\n" not in str(raised.value)


def test_a_device_that_was_renamed_is_revoked_by_either_name_and_a_stranger_by_none(home: Path, capsys):
    store = TrustStore(home, load_identity(home), LocalTrust(home / "local"))
    for name in ("pi", "pi5"):
        primad("trust", "pi", "--key", KEY, "--home", str(home))
        primad("revoke", name, "--home", str(home))
        assert f"pi is no longer trusted here ({fingerprint(KEY)})" in capsys.readouterr().out
        assert not store.trusts(KEY)
    with pytest.raises(ConfigError, match="no device 'x' is trusted"):
        primad("revoke", "x", "--home", str(home))
