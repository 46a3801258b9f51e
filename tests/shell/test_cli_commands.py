"""The command line of a cluster's owner: what commands pass on, and one clear line for every mistake."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from primad.cli import devices as devices_command
from primad.cli import pair_pause_leave as device_commands
from primad.cli.endpoint import reached
from primad.errors import ClusterError
from primad.network import admin
from primad.network.admin import (
    AdminRequest,
    BringCode,
    Described,
    Done,
    Leave,
    OpenPairing,
    PairingCode,
    Pause,
    Refusal,
    Resume,
)
from primad.network.peer import Peer
from primad.relay.place import ApiPlace
from primad.settings.config import any_host
from primad.settings.quantities import Share
from primad.trust.identity import fingerprint, key_hex, load_identity, new_identity
from primad.trust.trust import TrustStore, trusted_now

INTERFACE = next(iter(psutil.net_if_addrs()))
DESK, LAMP, ATTIC = (new_identity().public for _ in range(3))


@pytest.fixture(autouse=True)
def _isolated(tmp_path, monkeypatch):
    """Hide this user's home folder and the daemons that run here."""
    monkeypatch.setenv("PRIMAD_LOG", "WARNING")
    monkeypatch.setenv("PRIMAD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PRIMAD_LOCAL_TRUST", str(tmp_path / "local"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("PRIMAD_HOST", "PRIMAD_PORT", "PRIMAD_NAME", "PRIMAD_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def joined(monkeypatch) -> list[tuple]:
    """What ``primad join`` passes to the daemon: (config, keyword arguments)."""
    calls: list[tuple] = []
    run = SimpleNamespace(join=lambda config, reporter, **more: calls.append((config, more)))
    monkeypatch.setitem(sys.modules, "primad.worker.join", run)  # importing the daemon itself is slow
    return calls


@pytest.fixture
def served(monkeypatch) -> list[tuple]:
    """What ``primad serve`` passes to the daemon: (config, HTTP host)."""
    calls: list[tuple] = []
    serving = SimpleNamespace(serve=lambda config, model, options, host, reporter: calls.append((config, host)))
    monkeypatch.setitem(sys.modules, "primad.head.serve", serving)
    monkeypatch.setitem(sys.modules, "primad.head.daemon", SimpleNamespace(ServeOptions=SimpleNamespace))
    return calls


def assert_refused(run: tuple[int, str, str], *named: str) -> None:
    code, out, err = run
    assert (code, out) == (2, "")
    assert err.startswith("primad: error: ")
    assert err.count("\n") == 1
    for words in named:
        assert words in err


# ---- join and serve -------------------------------------------------------------------------------------------------


def test_join_passes_on_its_owners_options(command, joined):
    limits = ("--max-ram", "50%", "--max-vram", "6GB", "--max-disk", "40GB", "--nice", 10, "--pause-on-battery")
    pairing = ("--code", "7-lamp-river", "--device", "192.168.1.20:4711")
    assert command("join", *limits, *pairing, "--interface", INTERFACE, "--host", "127.0.0.1")[0] == 0
    ((config, more),) = joined
    assert (config.limits.ram, config.limits.vram, config.limits.disk_bytes) == (Share(0.5), 6 * 10**9, 40 * 10**9)
    assert (config.nice, config.pause_on_battery) == (10, True)
    assert (config.interface, config.host, config.devices) == (INTERFACE, "127.0.0.1", ())
    assert more == {"code": "7-lamp-river", "pair_at": "192.168.1.20:4711", "api": None}


def test_join_without_options_listens_on_all_networks(command, joined):
    assert command("join")[0] == 0
    ((config, more),) = joined
    assert config.host == any_host()
    assert more == {"code": None, "pair_at": None, "api": None}


def test_join_relays_requests_only_if_its_owner_wants_it(command, joined, home):
    code, _, err = command("join", "--api", "--api-host", "0.0.0.0", "--api-port", 0, "--allow-host", "sofa.lan")
    assert code == 0
    assert "warning: --api-host 0.0.0.0: the HTTP endpoint is not encrypted" in err
    assert joined[0][1]["api"] == ApiPlace(host="0.0.0.0", port=0, allowed_hosts=("sofa.lan",))
    home.mkdir()
    (home / "config.toml").write_text("[join]\napi = true\napi_port = 8081\n")
    assert command("join")[0] == 0
    assert joined[1][1]["api"] == ApiPlace(host="127.0.0.1", port=8081)


def test_a_flag_can_switch_off_what_the_file_switches_on(command, joined, home):
    home.mkdir()
    (home / "config.toml").write_text("pause_on_battery = true")
    command("join", "--no-pause-on-battery")
    command("join")
    assert [config.pause_on_battery for config, _ in joined] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--device", "desk:1"), "needs the head's --code too"),
        (("--code", "7-lamp-river", "--device", "desk:x"), "--device: 'desk:x' is not a device address"),
        (("--max-ram", "8"), "--max-ram: '8' is not a size"),
        (("--max-vram", "many"), "--max-vram: "),
        (("--max-disk", "50%"), "--max-disk: "),
        (("--nice", "20"), "--nice: "),
        (("--nice", "low"), "--nice"),
        (("--interface", ""), "--interface: "),
        (("--interface", "no-such0"), "--interface no-such0: this machine has no such interface"),
        (("--code", "lamp"), "--code: 'lamp' is not a code"),
        (("--host", "nowhere..example"), "--host: "),
        (("--insecure-lan",), "--insecure-lan"),
    ],
)
def test_options_that_join_refuses(command, joined, home, arguments, named):
    assert_refused(command("join", *arguments), named)
    assert joined == []
    assert not home.exists()


def test_serve_passes_on_limits_and_two_addresses(command, served, monkeypatch):
    monkeypatch.setenv("PRIMAD_PORT", "nonsense")  # a head has no control port
    options = ("--max-ram", "8GiB", "--nice", 5, "--interface", INTERFACE, "--listen", "127.0.0.1")
    code, _, err = command("serve", "--model", "x.gguf", *options)
    assert (code, err) == (0, "")
    ((config, http_host),) = served
    assert (config.limits.ram, config.nice, config.interface) == (8 << 30, 5, INTERFACE)
    assert (config.host, http_host) == ("127.0.0.1", "127.0.0.1")


def test_the_host_variable_sets_the_address_for_devices_and_not_for_http(command, served, monkeypatch):
    monkeypatch.setenv("PRIMAD_HOST", "127.0.0.2")
    command("serve", "--model", "x.gguf")
    ((config, http_host),) = served
    assert (config.host, http_host) == ("127.0.0.2", "127.0.0.1")


def test_an_open_http_endpoint_causes_a_warning(command, served):
    _, _, err = command("serve", "--model", "x.gguf", "--host", "0.0.0.0", "--no-auth")
    assert err.startswith("warning: --host 0.0.0.0: the HTTP endpoint has no password and no encryption; ")
    assert served[0][1] == "0.0.0.0"


def test_a_head_warns_that_it_does_not_pause_on_battery(command, served, home):
    home.mkdir()
    (home / "config.toml").write_text("pause_on_battery = true")
    assert "has no effect on the head" in command("serve", "--model", "x.gguf")[2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--listen", "nowhere..example"), "--listen: "),
        (("--host", "nowhere..example"), "--host: "),
        (("--allow-host", "desk.lan:80"), "--allow-host desk.lan:80: "),
        (("--allow-host", "*"), "--allow-host *: "),
        (("--cors-origin", "*"), "--cors-origin *: "),
        (("--cors-origin", "desk.lan"), "--cors-origin desk.lan: "),
        (("--max-ram", "0B"), "--max-ram: without memory"),
        (("--interface", "no-such0"), "--interface no-such0: "),
        (("--pause-on-battery",), "--pause-on-battery"),
        (("--sequences", "many"), "--sequences many: give a whole number from 1 to 64, or auto"),
        (("--sequences", "0"), "--sequences 0: "),
        (("--sequences", "65"), "--sequences 65: "),
        (("--sequences", "-1"), "--sequences"),
        (("--sequences", "1.5"), "--sequences 1.5: "),
    ],
)
def test_options_that_serve_refuses(command, served, arguments, named):
    assert_refused(command("serve", "--model", "x.gguf", *arguments), named)
    assert served == []


# ---- pair, leave, pause, resume -------------------------------------------------------------------------------------


@pytest.fixture
def daemon(monkeypatch, home):
    """A daemon that answers from the returned dictionary, by type of request."""
    replies: dict[type, object] = {}
    home.mkdir()

    def ask(folder: Path, request: AdminRequest, timeout_s: float = 5.0) -> object:
        assert folder == home
        assert timeout_s > 0
        return replies[type(request)]

    monkeypatch.setattr(admin, "ask", ask)
    monkeypatch.setattr(admin, "is_running", lambda folder: folder == home)
    return replies


def test_pair_shows_the_code_and_what_to_type(command, daemon):
    places = ["192.168.1.10:4711", "[fd00::1]:4711", "desk.local:4711"]
    daemon[OpenPairing] = PairingCode(code="7-lamp-river", expires_s=600.0, port=4711, addresses=places)
    code, out, err = command("pair")
    assert (code, err) == (0, "")
    assert "code 7-lamp-river, good for 10 minutes" in out
    assert "  primad join --code 7-lamp-river\n" in out
    assert "  primad pair --code 7-lamp-river\n" in out
    assert all(f"  primad join --code 7-lamp-river --device {place}\n" in out for place in places)


def test_pair_shows_the_code_to_programs(command, daemon):
    daemon[OpenPairing] = PairingCode(code="7-lamp-river", expires_s=600.0, port=4711, addresses=["10.0.0.2:4711"])
    code, out, err = command("pair", "--json")
    assert (code, err) == (0, "")
    shown = {"code": "7-lamp-river", "expires_s": 600.0, "port": 4711, "addresses": ["10.0.0.2:4711"]}
    assert json.loads(out) == shown


def test_a_code_is_passed_to_the_running_daemon(command, daemon):
    daemon[BringCode] = Done(text="mini is paired with desk")
    assert command("pair", "--code", "7-lamp-river", "--device", "desk:4711") == (0, "mini is paired with desk\n", "")
    daemon[BringCode] = Refusal(reason="wrong code")
    assert_refused(command("pair", "--code", "7-lamp-river"), "wrong code")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--code", "lamp"), "--code: 'lamp' is not a code"),
        (("--code", "7-lamp-river", "--device", "desk:x"), "--device: 'desk:x' is not a device address"),
        (("--device", "desk:4711"), "needs the other device's --code too"),
        (("--code", "7-lamp-river", "--json"), "--json: "),
    ],
    ids=["no code", "no address", "no code for it", "json"],
)
def test_options_that_pair_refuses(command, home, arguments, named):
    assert_refused(command("pair", *arguments), named)
    assert not home.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root could")
def test_root_writes_nothing_into_the_folder_of_a_service(command, home):
    home.mkdir()
    os.chown(home, 12345, 12345)
    assert_refused(command("pair", "--code", "7-lamp-river"), "belongs to user 12345", "start its service first")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(("verb", "request_type"), [("leave", Leave), ("pause", Pause), ("resume", Resume)])
def test_the_result_is_printed_and_a_refusal_is_an_error(command, daemon, verb, request_type):
    daemon[request_type] = Done(text="it is done [really]")
    assert command(verb) == (0, "it is done [really]\n", "")
    daemon[request_type] = Refusal(reason="the head does not pause")
    assert_refused(command(verb), "the head does not pause")
    daemon[request_type] = Described(status={})
    assert_refused(command(verb), "sent Described; restart it")


@pytest.mark.parametrize("verb", ["pair", "leave", "pause", "resume"])
def test_without_a_daemon_the_command_names_what_to_start(command, home, verb):
    assert_refused(command(verb), f"--home {home}: no primad runs with this folder", "'primad join' or 'primad serve'")
    assert not home.exists()


def test_a_device_whose_daemon_is_off_is_paused_for_the_next_start(command, home):
    home.mkdir()
    code, out, _ = command("pause")
    assert code == 0
    assert "paused until 'primad resume', also after a restart (no primad runs here now)" in out
    assert (home / "paused.json").exists()
    assert command("resume")[1].startswith("computes again")
    assert not (home / "paused.json").exists()


def test_lifetimes_are_shown_in_words():
    assert [device_commands._minutes(seconds) for seconds in (5, 89, 90, 600)] == [
        "5 s",
        "89 s",
        "2 minutes",
        "10 minutes",
    ]


# ---- devices --------------------------------------------------------------------------------------------------------

PEER = Peer(
    device="desk",
    cluster="home",
    role="worker",
    version="1.2.3",
    protocol=2,
    addresses=("192.168.1.20", "fe80::1%eth0"),
    port=7770,
    key=DESK,
    pairing=None,
)


@pytest.fixture
def sight(monkeypatch) -> list[Peer]:
    """The discovered devices, filled in by the test."""
    peers: list[Peer] = []

    async def look(host: str, seconds: float, interface: str | None = None) -> list[Peer]:
        return peers

    monkeypatch.setattr("primad.network.discovery.look", look)
    return peers


def listed(command, *arguments: str) -> dict[str, dict]:
    code, out, err = command("devices", "--json", *arguments)
    assert (code, err) == (0, "")
    return {row["device"]: row for row in json.loads(out)}


def test_without_devices_in_sight_only_the_own_key_is_shown(command, sight, home):
    code, out, _ = command("devices")
    assert code == 0
    assert "no device discovered; start 'primad join' on one" in out
    own = load_identity(home).public
    assert f"its key: {key_hex(own)}" in out
    assert fingerprint(own) in out


def test_devices_are_listed_with_trust_and_state(command, sight, home):
    store = TrustStore(home, load_identity(home))
    for name, key in (("desk", DESK), ("lamp", LAMP), ("attic", ATTIC)):
        store.add(trusted_now(name, key, "paired"))
    store.revoke("lamp")
    stranger = new_identity().public
    sight += [
        PEER,
        replace(PEER, device="lamp", key=LAMP, role="head", pairing=(7, 4711)),
        replace(PEER, device="stranger", key=stranger),
    ]
    rows = listed(command)
    assert {name: (row["trusted"], row["state"]) for name, row in rows.items()} == {
        "desk": ("yes", "discovered"),
        "lamp": ("revoked", "shows a code"),
        "stranger": ("no", "discovered"),
        "attic": ("yes", "not discovered"),
    }
    assert rows["desk"]["addresses"] == ["192.168.1.20", "fe80::1%eth0"]
    assert (rows["desk"]["fingerprint"], rows["desk"]["key"]) == (fingerprint(DESK), key_hex(DESK))
    table = command("devices")[1]
    for words in ("trusted", "revoked", fingerprint(DESK)[:19], fingerprint(DESK)[20:], "192.168.1.20:7770", "attic"):
        assert words in table


def test_a_device_has_one_line_with_its_current_name(command, sight, home):
    TrustStore(home, load_identity(home)).add(trusted_now("desk", DESK, "paired"))
    sight += [replace(PEER, device="tower", revision=2, addresses=("192.168.1.21",)), replace(PEER, revision=1)]
    assert {name: row["calls_itself"] for name, row in listed(command).items()} == {"desk": "tower"}
    table = command("devices")[1]
    assert "calls itself" in table
    assert "192.168.1.21:7770" in table
    assert "192.168.1.20:7770" not in table, "that is where it was"


@pytest.mark.parametrize(
    ("http", "places"),
    [
        ("127.0.0.1", ["127.0.0.1:8080"]),
        ("0.0.0.0", ["192.168.1.20:8080"]),
        ("::", ["192.168.1.20:8080", "[fe80::1%eth0]:8080"]),
        ("192.168.1.20", ["192.168.1.20:8080"]),
        ("", ["192.168.1.20:8080", "[fe80::1%eth0]:8080"]),
    ],
    ids=["itself", "IPv4", "all", "one", "older"],
)
def test_a_head_is_listed_with_the_address_of_its_http_server(command, sight, http, places):
    sight.append(replace(PEER, role="head", port=8080, http=http))
    assert listed(command)["desk"]["places"] == places
    assert ("that device only" in " ".join(command("devices")[1].split())) == (http == "127.0.0.1")


def test_a_head_is_reached_by_the_name_or_the_address_that_devices_shows(sight, home):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        head = replace(PEER, role="head", port=port, addresses=("127.0.0.1",))
        sight += [head, replace(PEER, device="lamp", key=LAMP, role="head", port=8080, http="127.0.0.1")]
        TrustStore(home, load_identity(home)).add(trusted_now("den", DESK, "paired"))
        for wanted in ("desk", "den", f"den:{port}", f"127.0.0.1:{port}"):
            assert reached(None, wanted, "key").url == f"http://127.0.0.1:{port}"
        with pytest.raises(
            ClusterError, match="--head lamp: it serves only programs of its own device; start it there"
        ):
            reached(None, "lamp", None)
        with pytest.raises(
            ClusterError, match="--head attic: no head of this name was discovered; 'primad devices' lists"
        ):
            reached(None, "attic", None)
        sight.append(replace(head, key=ATTIC, addresses=("10.0.0.9",)))
        with pytest.raises(ClusterError, match=rf"2 heads have this name; .*127.0.0.1:{port}.*10.0.0.9:{port}"):
            reached(None, "desk", None)


def test_with_cluster_only_that_cluster_is_listed(command, sight):
    sight += [PEER, replace(PEER, device="other", cluster="work", key=LAMP)]
    assert set(listed(command)) == {"desk", "other"}
    assert set(listed(command, "--cluster", "work")) == {"other"}


def test_a_running_daemon_supplies_the_states(command, sight, daemon):
    sight += [PEER, replace(PEER, device="lamp", key=LAMP)]
    daemon[admin.Describe] = Described(status={"devices": {"desk": "serving layers 0-9"}})
    states = {name: row["state"] for name, row in listed(command).items()}
    assert states == {"desk": "serving layers 0-9", "lamp": "discovered"}


def test_names_are_labels_of_keys_and_introduced_devices_are_marked(command, sight, daemon, home):
    TrustStore(home, load_identity(home)).add(trusted_now("den", DESK, "paired"))
    sight += [PEER, replace(PEER, device="den", key=LAMP), replace(PEER, device="attic", key=ATTIC)]
    daemon[admin.Describe] = Described(status={"devices": {"den": "serving"}, "introduced": [ATTIC]})
    rows = json.loads(command("devices", "--json")[1])
    assert [(row["device"], row["key"], row["trusted"], row["state"]) for row in rows] == [
        ("den", key_hex(DESK), "yes", "serving"),
        ("den", key_hex(LAMP), "no", "discovered"),
        ("attic", key_hex(ATTIC), "introduced", "discovered"),
    ]


@pytest.mark.parametrize("answer", [Described(status={}), Described(status={"devices": 5}), Refusal(reason="x")])
def test_a_daemon_without_device_states_changes_nothing(daemon, home, answer):
    daemon[admin.Describe] = answer
    assert devices_command.report(home) == devices_command.DaemonReport()


def test_a_name_from_the_network_is_no_markup(command, sight):
    sight.append(replace(PEER, version="[red]1[/red]"))
    assert "[red]1[/red]" in command("devices")[1]


def test_trust_is_granted_and_revoked_by_hand(command, sight, home):
    sight.append(PEER)
    assert command("devices", "trust", "desk", "--key", key_hex(DESK))[0] == 0
    assert listed(command)["desk"]["trusted"] == "yes"
    assert command("devices", "revoke", "desk")[0] == 0
    assert listed(command)["desk"]["trusted"] == "revoked"


def test_another_device_trusts_this_one_by_the_listed_key(command, sight, home, tmp_path):
    own = command("devices")[1].split("its key: ")[1].strip()
    other = tmp_path / "other"
    assert command("devices", "trust", "desk", "--key", own, "--home", other)[0] == 0
    assert TrustStore(other, load_identity(other)).trusts(load_identity(home).public)


def test_an_option_before_the_command_is_not_ignored(command, home, tmp_path):
    run = command("devices", "--home", tmp_path / "other", "trust", "desk", "--key", key_hex(DESK))
    assert_refused(run, "--home: belongs after 'trust'")
    assert not home.exists()


@pytest.mark.parametrize("arguments", [(), ("cache",)])
def test_a_command_group_without_a_command_shows_its_help_and_no_error(command, arguments):
    code, out, err = command(*arguments)
    assert code == 2
    assert "Commands" in out + err
    assert "error" not in out + err


def test_every_command_has_help_with_examples(command):
    commands = ["join", "serve", "profile", "plan", "pair", "leave", "pause", "resume", "chat", "devices", "doctor"]
    below = [("devices", "trust"), ("devices", "revoke"), ("cache", "list"), ("cache", "verify"), ("cache", "prune")]
    for words in [(name,) for name in commands] + below:
        code, out, err = command(*words, "--help")
        assert (code, err) == (0, "")
        assert "Examples:" in out
        assert "insecure" not in out


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_command_does_not_end_with_success(command, daemon, monkeypatch):
    monkeypatch.setattr(admin, "ask", interrupted)
    assert command("pair") == (130, "", "stopped\n")


def test_a_stopped_daemon_ends_with_success(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "primad.worker.join", SimpleNamespace(join=interrupted))
    assert command("join") == (0, "", "stopped\n")


def test_a_missing_home_folder_is_one_clear_error(command, monkeypatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert_refused(command("status"), "HOME: not set, and this user has no home folder; set it to ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_output_to_a_full_disk_is_one_error_line():
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", "from primad.cli.main import main; main()", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 2
    assert ended.stderr == "primad: error: standard output: No space left on device; free some space there\n"
