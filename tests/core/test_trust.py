"""The devices that a device trusts, and the files with them."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from primad.errors import ConfigError
from primad.system.files import MAX_FILE_BYTES
from primad.trust.identity import Identity, fingerprint, is_key, key_hex, load_identity, new_identity, parse_key
from primad.trust.local_trust import LocalTrust, default_folder
from primad.trust.trust import BY_HAND, HEAD, LOCAL, MAX_DEVICES, PAIRED, WORKER, TrustStore, trusted_now

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="Windows has access lists in place of mode bits")
PI, NAS, LAMP = (new_identity().public for _ in range(3))


@pytest.fixture
def local(tmp_path: Path) -> LocalTrust:
    """A folder of local devices that is not the user's."""
    return LocalTrust(tmp_path / "local")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def identity(home: Path) -> Identity:
    return load_identity(home)


@pytest.fixture
def store(home: Path, identity: Identity, local: LocalTrust) -> TrustStore:
    return TrustStore(home, identity, local)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# identity


def test_an_identity_is_made_once_and_only_its_owner_may_read_it(home: Path):
    identity = load_identity(home)
    assert load_identity(home) == identity
    assert is_key(identity.public)
    assert identity.secret not in repr(identity)
    if os.name == "posix":
        assert mode(home / "identity.json") == 0o600
    assert [path.name for path in home.iterdir() if path.suffix != ".lock"] == ["identity.json"]


def test_two_homes_are_two_devices(tmp_path: Path):
    assert load_identity(tmp_path / "a") != load_identity(tmp_path / "b")
    assert new_identity() != new_identity()


@POSIX
def test_an_identity_that_others_could_read_is_closed_to_them_with_a_warning(home: Path, caplog):
    identity = load_identity(home)
    (home / "identity.json").chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert load_identity(home) == identity
    assert mode(home / "identity.json") == 0o600
    assert "mode 644" in caplog.text
    assert identity.secret not in caplog.text


OTHER = new_identity()
DAMAGED = {
    "empty": b"",
    "no JSON": b"\x00\xff",
    "another shape": b"[1, 2]",
    "a field too many": json.dumps({"version": 1, "public": PI, "secret": PI, "more": 1}).encode(),
    "a field too few": b'{"version": 1}',
    "keys that do not belong together": json.dumps({"version": 1, "public": PI, "secret": OTHER.secret}).encode(),
    "a key that is none": json.dumps({"version": 1, "public": PI, "secret": "#" * 40}).encode(),
    "a later version": json.dumps({"version": 2, "public": OTHER.public, "secret": OTHER.secret}).encode(),
    "too large": b" " * (MAX_FILE_BYTES + 1),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_identity_is_one_clear_line_and_is_left_alone(home: Path, data: bytes):
    home.mkdir()
    (home / "identity.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"identity\.json") as error:
        load_identity(home)
    assert "\n" not in str(error.value)
    assert OTHER.secret not in str(error.value)
    assert (home / "identity.json").read_bytes() == data


def test_a_home_that_cannot_be_written_to_is_one_clear_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"identity\.json: cannot be"):
        load_identity(tmp_path / "file")
    (tmp_path / "home" / "identity.json").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"identity\.json: cannot be read"):
        load_identity(tmp_path / "home")


def test_keys_are_read_in_both_spellings():
    assert parse_key(PI) == parse_key(key_hex(PI)) == parse_key(f" {key_hex(PI).upper()}\n") == PI
    for text in ("", "a" * 39, "a" * 41, "#" * 40, "g" * 64, "é" * 40, '"' * 40):
        with pytest.raises(ConfigError, match="not a device key"):
            parse_key(text)


def test_fingerprints_are_short_and_of_one_key_only():
    assert fingerprint(PI) == fingerprint(PI) != fingerprint(NAS)
    groups = fingerprint(PI).split("-")
    assert len(groups) == 8
    assert all(len(group) == 4 and group.isalnum() for group in groups)


# the store


def test_nobody_is_trusted_at_first_but_oneself(store: TrustStore, identity: Identity):
    assert not store.trusts(PI)
    assert store.trusts(identity.public)
    assert store.entries() == []


def test_a_paired_device_is_trusted_also_by_the_next_process(
    store: TrustStore, home: Path, identity: Identity, local: LocalTrust
):
    device = trusted_now("pi", PI, PAIRED)
    store.add(device)
    assert store.trusts(PI)
    assert not store.trusts(NAS)
    assert TrustStore(home, identity, local).entries() == [device]
    if os.name == "posix":
        assert mode(home / "trust.json") == 0o600


def test_a_change_by_another_process_acts_at_once(store: TrustStore, home: Path, identity: Identity, local: LocalTrust):
    command = TrustStore(home, identity, local)
    command.add(trusted_now("pi", PI, PAIRED))
    assert store.trusts(PI)
    command.revoke("pi")
    assert not store.trusts(PI)
    (home / "trust.json").unlink()
    assert store.revoked() == frozenset()


def test_changes_of_two_stores_add_up(store: TrustStore, home: Path, identity: Identity, local: LocalTrust):
    other = TrustStore(home, identity, local)
    store.add(trusted_now("pi", PI, PAIRED))
    other.add(trusted_now("nas", NAS, BY_HAND))
    assert [each.device for each in store.entries()] == ["nas", "pi"]


def test_changes_of_many_processes_add_up(store: TrustStore, home: Path):
    code = (
        "import sys; from pathlib import Path; from primad.trust.identity import load_identity, new_identity\n"
        "from primad.system import files; from primad.trust.trust import TrustStore, trusted_now\n"
        "files.LOCK_PATIENCE_S = 100\n"  # disk stalls do not matter here
        "home = Path(sys.argv[1]); store = TrustStore(home, load_identity(home))\n"
        "for number in range(5): store.add(trusted_now(f'd{number}', new_identity().public, 'paired'))"
    )
    environment = os.environ | {"PRIMAD_LOCAL_TRUST": str(home.parent / "local")}
    writers = [subprocess.Popen([sys.executable, "-c", code, str(home)], env=environment) for _ in range(3)]
    assert [writer.wait(200) for writer in writers] == [0, 0, 0]
    assert len(store.entries()) == 15


def test_revoked_stays_revoked_until_paired_again(store: TrustStore):
    pi = trusted_now("pi", PI, PAIRED)
    store.add(pi)
    assert store.revoke("pi") == [pi]
    assert store.revoked() == {PI}
    assert not store.trusts(PI)
    for how in (PAIRED, BY_HAND):
        store.add(trusted_now("pi", PI, how))
        assert store.trusts(PI)
        assert store.revoked() == frozenset()
        store.revoke(PI)


def test_nobody_gets_the_name_of_a_device_that_is_trusted(store: TrustStore, local: LocalTrust):
    assert store.add(trusted_now("pi", PI, PAIRED)).device == "pi"
    assert store.add(trusted_now("pi", NAS, PAIRED)).device == "pi-2"
    assert store.add(trusted_now("pi", NAS, BY_HAND)).device == "pi-2", "it has it already"
    assert store.add(trusted_now("pi", PI, PAIRED)).device == "pi"
    with local.announce("pi", LAMP):
        assert {each.device: each.key for each in store.entries()} == {"pi": PI, "pi-2": NAS, "pi-3": LAMP}
        assert [store.name_of(key) for key in (PI, LAMP, new_identity().public)] == ["pi", "pi-3", None]
    assert {each.key for each in store.revoke("pi")} == {PI}
    assert store.add(trusted_now("nas", NAS, PAIRED)).device == "nas", "its owner called it otherwise"
    long = "x" * 62
    assert store.add(trusted_now(long, PI, PAIRED)).device == long
    assert store.add(trusted_now(long, LAMP, PAIRED)).device == f"{'x' * 57}-2"


def test_a_device_is_a_head_only_by_decision_of_the_owner(store: TrustStore, identity: Identity, local: LocalTrust):
    store.add(trusted_now("pi", PI, PAIRED))
    assert not store.is_head(PI), "a device without that role is no head"
    store.add(trusted_now("pi", PI, PAIRED, HEAD))
    assert store.is_head(PI)
    store.add(trusted_now("pi", PI, PAIRED, WORKER))
    assert store.is_head(PI), "two devices that change their parts are paired once for each"
    store.add(trusted_now("pi", PI, BY_HAND, WORKER))
    assert not store.is_head(PI)
    store.add(trusted_now("pi", PI, BY_HAND, HEAD))
    store.revoke("pi")
    assert not store.is_head(PI)
    store.add(trusted_now("pi", PI, PAIRED, WORKER))
    assert not store.is_head(PI), "revocation takes that too"
    assert not store.is_head(NAS)
    assert store.is_head(identity.public)
    with local.announce("laptop", NAS):
        assert store.is_head(NAS), "a daemon of this user can read this device's secret"


def test_roles_of_a_file_without_them_follow_from_what_the_owner_did(home: Path, identity: Identity, local: LocalTrust):
    def entry(device: str, key: str, how: str) -> dict[str, str]:
        return {"device": device, "key": key, "how": how, "since": ""}

    other, more = new_identity().public, new_identity().public
    stored = {
        "version": 1,
        "trusted": [entry("desk", PI, PAIRED), entry("desk", NAS, BY_HAND), entry("x", other, "introduced by desk")],
        "revoked": [entry("lamp", LAMP, PAIRED), entry("unknown", more, "revoked by desk")],
    }
    (home / "trust.json").write_text(json.dumps(stored))
    store = TrustStore(home, identity, local)
    assert [(each.device, each.key, each.role) for each in store.entries()] == [
        ("desk", PI, HEAD),
        ("desk-2", NAS, HEAD),
    ]
    assert store.revoked() == {LAMP}
    store.add(trusted_now("x", other, PAIRED))
    assert [each.role for each in TrustStore(home, identity, local).entries()] == [HEAD, HEAD, WORKER]


def test_a_key_that_is_not_known_yet_can_be_revoked_but_a_name_cannot(store: TrustStore):
    store.revoke(PI)
    assert store.revoked() == {PI}
    with pytest.raises(ConfigError, match="no device 'nobody' is trusted"):
        store.revoke("nobody")


def test_oneself_can_be_neither_added_nor_revoked(store: TrustStore, identity: Identity):
    with pytest.raises(ConfigError, match="own"):
        store.add(trusted_now("me", identity.public, BY_HAND))
    with pytest.raises(ConfigError, match="is trusted"):
        store.revoke(identity.public)
    assert store.trusts(identity.public)


def test_more_devices_than_a_home_has_are_refused(store: TrustStore, home: Path):
    many = [
        {"device": f"d{number}", "key": new_identity().public, "how": PAIRED, "since": ""}
        for number in range(MAX_DEVICES)
    ]
    (home / "trust.json").write_text(json.dumps({"version": 2, "trusted": many, "revoked": []}))
    with pytest.raises(ConfigError, match="is the maximum"):
        store.add(trusted_now("pi", PI, PAIRED))
    assert not store.trusts(PI)


@pytest.mark.parametrize(
    ("device", "key"),
    [("", PI), ("a b", PI), ("\x1b[2J", PI), ("pi", ""), ("pi", "x" * 41)],
    ids=["no name", "a space", "a terminal's command", "no key", "a key too long"],
)
def test_an_invalid_name_or_key_is_refused(device: str, key: str):
    with pytest.raises(ConfigError) as error:
        trusted_now(device, key, PAIRED)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"version": 3, "trusted": {}, "more": []}',
        b'{"version": 1, "trusted": [{"device": "pi", "key": "no", "how": "", "since": ""}], "revoked": []}',
    ],
)
def test_a_damaged_file_is_an_error_at_the_start_and_changes_nothing_later(
    store: TrustStore, home: Path, identity: Identity, local: LocalTrust, data: bytes, caplog
):
    store.add(trusted_now("pi", PI, PAIRED))
    (home / "trust.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"trust\.json"):
        TrustStore(home, identity, local)
    with caplog.at_level(logging.WARNING):
        assert store.trusts(PI)
        assert not store.trusts(NAS)
    assert caplog.text.count("trust is unchanged") == 1
    with pytest.raises(ConfigError, match=r"trust\.json"):
        store.revoke("pi")


def test_a_change_that_cannot_be_written_is_an_error_and_no_change(store: TrustStore, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        store.add(trusted_now("pi", PI, PAIRED))
    assert not store.trusts(PI)


def test_a_question_during_a_change_is_answered_from_the_file(store: TrustStore, monkeypatch: pytest.MonkeyPatch):
    """The event loop asks while a thread waits for the disk."""
    answers: list[tuple[bool, bool]] = []

    def asked_meanwhile(descriptor: int) -> None:
        answers.append((store.trusts(PI), store.trusts(NAS)))

    store.add(trusted_now("nas", NAS, PAIRED))
    monkeypatch.setattr(os, "fsync", asked_meanwhile)
    store.add(trusted_now("pi", PI, PAIRED))
    store.revoke("nas")
    assert answers == [(False, True), (True, True)]
    assert (store.trusts(PI), store.trusts(NAS)) == (True, False)


# daemons of the same user on this machine


def test_a_daemon_of_this_user_is_trusted_while_it_lives(store: TrustStore, local: LocalTrust, tmp_path: Path):
    other = load_identity(tmp_path / "other")
    neighbour = TrustStore(tmp_path / "other", other, LocalTrust(local.folder))
    assert not store.trusts(other.public)
    with neighbour.announce_locally("laptop"):
        assert store.trusts(other.public)
        assert [(each.device, each.how) for each in store.entries()] == [("laptop", LOCAL)]
        if os.name == "posix":
            assert mode(local.folder) == 0o700
            assert [mode(path) for path in local.folder.iterdir()] == [0o600]
    assert list(local.folder.iterdir()) == []
    assert not LocalTrust(local.folder).knows(other.public)


ANNOUNCING = """
import sys
from pathlib import Path
from primad.trust.local_trust import LocalTrust
with LocalTrust(Path(sys.argv[1])).announce("laptop", sys.argv[2]):
    print(flush=True)
    sys.stdin.read()
"""


def test_a_command_with_the_key_of_a_daemon_takes_nothing_from_it_when_it_ends(local: LocalTrust):
    with local.announce("laptop", PI):
        command = subprocess.Popen(
            [sys.executable, "-c", ANNOUNCING, local.folder, PI], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert command.stdout is not None
        assert command.stdout.readline()
        assert local.devices() == [("laptop", PI)]
        command.communicate(timeout=30)
        assert command.returncode == 0
        assert LocalTrust(local.folder).knows(PI)
    assert not LocalTrust(local.folder).knows(PI)


def test_revocation_wins_over_being_local(store: TrustStore, local: LocalTrust):
    with LocalTrust(local.folder).announce("laptop", PI):
        assert store.trusts(PI)
        assert [each.device for each in store.revoke("laptop")] == ["laptop"]
        assert not store.trusts(PI)
        assert store.entries() == []


def leftover(local: LocalTrust, **changes: object) -> Path:
    """A daemon's note, as if left over with ``changes``."""
    with local.announce("laptop", PI):
        path = next(local.folder.glob("*.json"))
        data = json.loads(path.read_bytes())
    path.write_text(json.dumps(data | changes))
    path.chmod(0o600)
    return path


def test_files_of_a_dead_daemon_are_ignored_and_removed(local: LocalTrust):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    path = leftover(local, pid=ended.pid)
    assert not local.knows(PI)
    assert not path.exists()


def test_another_process_with_the_same_number_is_not_taken_for_it(local: LocalTrust):
    path = leftover(local, created=1.0, since_boot=psutil.boot_time())
    assert not local.knows(PI)
    assert not path.exists()


def test_a_clock_that_was_set_since_changes_nothing(local: LocalTrust):
    leftover(local, created=1.0)
    assert local.knows(PI)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff" * 100, b"{}"])
def test_garbage_in_the_folder_is_not_believed(local: LocalTrust, data: bytes):
    leftover(local).write_bytes(data)
    assert not local.knows(PI)
    assert local.devices() == []


def test_a_note_counts_for_its_own_key_only(local: LocalTrust):
    path = leftover(local)
    path.rename(path.with_name(f"{key_hex(NAS)}.json"))
    assert not local.knows(NAS)
    assert not local.knows(PI)


@POSIX
@pytest.mark.parametrize("bits", [0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_not_believed(local: LocalTrust, bits: int, caplog):
    leftover(local)
    assert local.knows(PI)
    local.folder.chmod(bits)
    assert not LocalTrust(local.folder).knows(PI)
    assert LocalTrust(local.folder).devices() == []
    with caplog.at_level(logging.WARNING), local.announce("nas", NAS):
        assert not LocalTrust(local.folder).knows(NAS)
    assert "others could write to it" in caplog.text


@POSIX
def test_links_and_files_that_others_can_write_to_are_not_believed(local: LocalTrust, tmp_path: Path):
    path = leftover(local)
    path.chmod(0o666)
    assert not local.knows(PI)
    path.chmod(0o600)
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    assert not local.knows(PI)
    (tmp_path / "link").symlink_to(local.folder)
    path.unlink()
    moved.rename(path)
    assert local.knows(PI)
    assert not LocalTrust(tmp_path / "link").knows(PI)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_folder_of_another_user_is_not_believed(local: LocalTrust):
    leftover(local)
    os.chown(local.folder, 12345, -1)
    assert not local.knows(PI)
    os.chown(local.folder, 0, -1)
    assert local.knows(PI)


def test_the_folder_can_be_moved(tmp_path: Path):
    assert default_folder({"PRIMAD_LOCAL_TRUST": str(tmp_path)}) == tmp_path
    assert default_folder({}).parts[-2:] == ("primad", "local-devices")


def test_a_folder_that_cannot_be_made_costs_a_line_and_nothing_else(tmp_path: Path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING), LocalTrust(tmp_path / "file" / "local").announce("pi", PI):
        assert "have to be paired with" in caplog.text


def test_the_stored_file_has_version_and_role(store: TrustStore, home: Path):
    store.add(trusted_now("pi", PI, PAIRED))
    stored = msgspec.json.decode((home / "trust.json").read_bytes())
    assert stored["version"] == 2
    assert {"device": "pi", "key": PI, "how": "paired", "role": "worker"}.items() <= stored["trusted"][0].items()
