"""What the owner decided: flags over environment over file over defaults, and each bad value by its name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from primad.config import Config, check_address, check_host, default_home, is_loopback, load_config, open_home
from primad.errors import ConfigError


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "home"


def load(home: Path, *, flags=None, environ=None, file: str | None = None) -> Config:
    if file is not None:
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(file, encoding="utf-8")
    return load_config({"home": home} | (flags or {}), environ or {})


def refusal(home: Path, **sources) -> str:
    with pytest.raises(ConfigError) as caught:
        load(home, **sources)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_a_word_of_the_owner(home):
    config = load(home)
    assert (config.home, config.cluster, config.host, config.port) == (home, "home", "127.0.0.1", None)
    assert (config.insecure_lan, config.devices) == (False, ())
    assert config.threads is None, "the profile says how many"
    assert config.name
    assert not home.exists(), "reading a configuration leaves nothing behind"


EVERY = [
    ("name", "flag", "variable", "file"),
    ("cluster", "flag", "variable", "file"),
    ("host", "127.0.0.2", "127.0.0.3", "127.0.0.4"),
    ("port", 1, 2, 3),
    ("threads", 4, 5, 6),
]


@pytest.mark.parametrize(("key", "flag", "variable", "stored"), EVERY)
def test_flags_over_environment_over_file_over_defaults(home, key, flag, variable, stored):
    flags, environ = {key: flag}, {f"PRIMAD_{key.upper()}": str(variable)}
    file = f"{key} = {stored!r}".replace("'", '"')
    default = getattr(load(home), key)
    assert getattr(load(home, flags=flags, environ=environ, file=file), key) == flag
    assert getattr(load(home, environ=environ, file=file), key) == variable
    assert getattr(load(home, file=file), key) == stored
    assert getattr(load(home, file=""), key) == default


def test_devices_come_from_one_place_only(home):
    flags, environ = {"devices": ("a:1", "b:2")}, {"PRIMAD_DEVICES": "c:3, d:4"}
    file = 'devices = ["e:5"]'
    assert load(home, flags=flags, environ=environ, file=file).devices == ("a:1", "b:2")
    assert load(home, environ=environ, file=file).devices == ("c:3", "d:4")
    assert load(home, flags={"devices": ()}, file=file).devices == ("e:5",)


@pytest.mark.parametrize("yes", [True, "true", "1", "yes", "TRUE"])
@pytest.mark.parametrize("no", [False, "false", "0", "no", "No"])
def test_insecure_lan_over_all_sources(home, yes, no):
    assert load(home, flags={"insecure_lan": yes}, environ={"PRIMAD_INSECURE_LAN": str(no)}).insecure_lan
    assert not load(home, flags={"insecure_lan": no}, environ={"PRIMAD_INSECURE_LAN": str(yes)}).insecure_lan
    assert load(home, environ={"PRIMAD_INSECURE_LAN": str(yes)}, file="insecure_lan = false").insecure_lan
    assert load(home, file="insecure_lan = true").insecure_lan


def test_an_option_that_was_not_given_decides_nothing(home):
    flags = dict.fromkeys(("name", "cluster", "host", "port", "threads", "insecure_lan"))
    assert load(home, flags=flags, file='name = "desk"').name == "desk"


def test_an_empty_variable_decides_nothing(home):
    assert load(home, environ={"PRIMAD_CLUSTER": ""}).cluster == "home"


def test_the_home_is_the_flag_or_the_variable_or_the_users(tmp_path):
    variable = {"PRIMAD_HOME": str(tmp_path / "b")}
    assert load_config({"home": tmp_path / "a"}, variable).home == tmp_path / "a"
    assert load_config({"home": None}, variable).home == tmp_path / "b"
    assert load_config({}, {"PRIMAD_HOME": "relative"}).home == Path("relative").absolute()
    assert load_config({}, {"PRIMAD_HOME": "~/x"}).home == Path.home() / "x"
    assert default_home().name == "primad"


def test_a_home_of_an_unknown_user_is_refused():
    with pytest.raises(ConfigError, match=r"^--home: ~nobody-of-this-name/x: .*; give the folder's full path"):
        load_config({"home": "~nobody-of-this-name/x"}, {})
    with pytest.raises(ConfigError, match=r"^PRIMAD_HOME: ~nobody-of-this-name/x: "):
        load_config({}, {"PRIMAD_HOME": "~nobody-of-this-name/x"})


BAD = [
    ("name", "", "no device name"),
    ("name", "a b", "no device name"),
    ("name", "-a", "no device name"),
    ("name", "a" * 63, "no device name"),
    ("name", "ä", "no device name"),
    ("name", "a\n", "no device name"),
    ("cluster", "../x", "no cluster name"),
    ("host", "nowhere..example", "no address of this machine"),
    ("host", "a" * 70, "no address of this machine"),
    ("host", "256.1.1.1.1", "no address of this machine"),
    ("host", "0.0.0.0", "can be reached from other machines"),
    ("host", "::", "can be reached from other machines"),
    ("port", "x", "not a whole number from 0 to 65535"),
    ("port", "-1", "not a whole number"),
    ("port", "65536", "not a whole number"),
    ("port", "1.5", "not a whole number"),
    ("port", "9" * 5000, "not a whole number"),
    ("threads", "0", "not a whole number from 1 to 1024"),
    ("threads", "1025", "not a whole number"),
    ("insecure_lan", "maybe", "neither true nor false"),
    ("devices", "desk", "no device address"),
    ("devices", "desk:0", "no device address"),
    ("devices", "desk:65536", "no device address"),
    ("devices", "a:1,b", "no device address"),
]
NAMES = {"devices": "--device"}


@pytest.mark.parametrize(("key", "value", "why"), [case for case in BAD if case[1]])
def test_a_bad_value_is_refused_by_its_source(home, key, value, why):
    flag = (value,) if key == "devices" and "," not in value else value
    text = refusal(home, flags={key: flag})
    assert text.startswith(NAMES.get(key, f"--{key.replace('_', '-')}") + ": ")
    assert why in text
    text = refusal(home, environ={f"PRIMAD_{key.upper()}": value})
    assert text.startswith(f"PRIMAD_{key.upper()}: ")
    assert why in text


TOML = [
    ("name", "5", "no device name"),
    ("name", '""', "no device name"),
    ("cluster", "[]", "no cluster name"),
    ("host", "5", "no address"),
    ("host", '"8.8.8.8"', "can be reached from other machines"),
    ("port", "true", "not a whole number"),
    ("port", "80.5", "not a whole number"),
    ("port", "80.0", "not a whole number"),
    ("port", "inf", "not a whole number"),
    ("port", "nan", "not a whole number"),
    ("port", "[80]", "not a whole number"),
    ("port", "1979-05-27", "not a whole number"),
    ("threads", "{a = 1}", "not a whole number"),
    ("insecure_lan", "2", "neither true nor false"),
    ("insecure_lan", "[]", "neither true nor false"),
    ("devices", "5", "not a list"),
    ("devices", "[5]", "no device address"),
    ("devices", '["desk"]', "no device address"),
]


@pytest.mark.parametrize(("key", "value", "why"), TOML)
def test_a_bad_value_in_the_file_is_refused_by_its_key(home, key, value, why):
    text = refusal(home, file=f"{key} = {value}")
    assert text.startswith(f"'{key}' in {home / 'config.toml'}: ")
    assert why in text


@pytest.mark.parametrize("content", ["name", "name = ", "=", "\ufeffname", "[a", "a = 1\na = 2", "\x00"])
def test_a_file_that_is_not_toml_is_refused(home, content):
    assert refusal(home, file=content).startswith(f"{home / 'config.toml'}: cannot be read as TOML: ")


def test_a_file_that_is_not_text_is_refused(home):
    home.mkdir()
    (home / "config.toml").write_bytes(b"name = '\xff'")
    assert "cannot be read as TOML" in refusal(home)


def test_a_folder_in_place_of_the_file_is_refused(home):
    (home / "config.toml").mkdir(parents=True)
    assert refusal(home).startswith(f"{home / 'config.toml'}: cannot be read")


@pytest.mark.parametrize("key", ["nmae", "home", "Name"])
def test_an_unknown_key_in_the_file_is_refused(home, key):
    text = refusal(home, file=f'{key} = "x"')
    assert f"unknown key '{key}'; known are name, cluster" in text


# ---- who may hear this device ---------------------------------------------------------------------------------------


def test_a_daemon_leaves_this_machine_only_with_leave(home):
    assert "use 127.0.0.1, or add --insecure-lan" in refusal(home, flags={"host": "0.0.0.0"})
    assert load(home, flags={"host": "0.0.0.0", "insecure_lan": True}).host == "0.0.0.0"


def test_with_leave_a_daemon_listens_everywhere_unless_told_otherwise(home):
    assert load(home, flags={"insecure_lan": True}).host == "0.0.0.0"
    assert load(home, flags={"insecure_lan": True, "host": "127.0.0.1"}).host == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_leave(host):
    assert is_loopback(host)
    check_host(host, "--host", insecure_lan=False)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.20", "8.8.8.8", "", "127.1", "127.0.0.1.example", "fe80::1"]
)
def test_anything_else_is_not_loopback(host):
    assert not is_loopback(host)
    with pytest.raises(ConfigError):
        check_host(host, "--host", insecure_lan=False)


@pytest.mark.parametrize("address", ["desk:7770", "192.168.1.20:1", "[::1]:65535", "[fe80::1%eth0]:7770", "a-b.c:80"])
def test_an_address_is_host_and_port(address):
    assert check_address(address, "--device") == address


@pytest.mark.parametrize(
    "address", ["", ":1", "desk", "desk:", "desk:x", "::1:80", "[::1]", "a b:1", "a:1:2", "a:1\n", 7, None]
)
def test_an_address_without_host_or_port_is_refused(address):
    with pytest.raises(ConfigError, match=r"^--device: .* is no device address; give host:port, for example"):
        check_address(address, "--device")


# ---- the home folder ------------------------------------------------------------------------------------------------


def test_opening_a_home_makes_its_folders(home):
    config = load(home)
    open_home(config)
    open_home(config)
    assert config.layers.is_dir()
    assert config.run.is_dir()


def test_a_home_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    config = dataclasses.replace(load(tmp_path), home=tmp_path / "file" / "home")
    with pytest.raises(ConfigError, match=f"^--home {config.home}: cannot be used: Not a directory; choose another"):
        open_home(config)
