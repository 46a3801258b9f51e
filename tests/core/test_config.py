"""The owner's settings: flags over environment over file over defaults; an error names the bad value."""

from __future__ import annotations

import dataclasses
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.errors import ConfigError
from primad.settings import config as config_module
from primad.settings.config import (
    Config,
    any_host,
    check_address,
    check_host,
    default_home,
    is_loopback,
    join_address,
    load_config,
    open_home,
    open_kv_cache,
    split_address,
)
from primad.settings.limits import NO_LIMITS, OwnerLimits
from primad.settings.quantities import Share


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
    assert (config.home, config.cluster, config.host, config.port) == (home, "home", any_host(), None)
    assert (config.interface, config.devices, config.nice, config.limits) == (None, (), 0, NO_LIMITS)
    assert (config.pause_on_battery, config.transfer_limit_bytes_per_s) == (False, None)
    assert (config.heartbeat_interval_s, config.suspect_after_s, config.gone_after_s) == (0.5, 1.5, 4.0)
    assert (config.replan_gain, config.keep_loaded_s) == (0.10, 600.0)
    assert config.threads is None, "the profile says how many"
    assert config.name
    assert not home.exists(), "reading a configuration creates no folder"


EVERY = [
    ("name", "flag", "variable", "file"),
    ("cluster", "flag", "variable", "file"),
    ("host", "127.0.0.2", "127.0.0.3", "127.0.0.4"),
    ("port", 1, 2, 3),
    ("threads", 4, 5, 6),
    ("nice", 7, 8, 9),
    ("interface", "eth0", "wlan0", "en0"),
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
def test_pause_on_battery_over_all_sources(home, yes, no):
    assert load(home, flags={"pause_on_battery": yes}, environ={"PRIMAD_PAUSE_ON_BATTERY": str(no)}).pause_on_battery
    assert not load(
        home, flags={"pause_on_battery": no}, environ={"PRIMAD_PAUSE_ON_BATTERY": str(yes)}
    ).pause_on_battery
    assert load(home, environ={"PRIMAD_PAUSE_ON_BATTERY": str(yes)}, file="pause_on_battery = false").pause_on_battery
    assert load(home, file="pause_on_battery = true").pause_on_battery


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("max_disk", "40GB", "limits.disk_bytes", 40_000_000_000),
        ("max_ram", "8GiB", "limits.ram", 8 << 30),
        ("max_ram", "50%", "limits.ram", Share(0.5)),
        ("max_vram", "0B", "limits.vram", 0),
        ("kv_cache", "/somewhere/cells", "kv_cache", Path("/somewhere/cells")),
        ("kv_cache", "off", "kv_cache", None),
        ("kv_cache_limit", "2GB", "kv_cache_limit_bytes", 2_000_000_000),
        ("transfer_limit", "100Mbit", "transfer_limit_bytes_per_s", 12.5e6),
        ("transfer_limit", "20MB/s", "transfer_limit_bytes_per_s", 20e6),
        ("keep_loaded", "2h", "keep_loaded_s", 7200.0),
        ("keep_loaded", "0", "keep_loaded_s", 0.0),
        ("replan_gain", "25%", "replan_gain", 0.25),
        ("heartbeat_interval", "250ms", "heartbeat_interval_s", 0.25),
        ("suspect_after", "2", "suspect_after_s", 2.0),
        ("gone_after", "1min", "gone_after_s", 60.0),
    ],
)
def test_quantities_from_every_source(home, key, value, field, expected):
    def read(config: Config) -> object:
        found: object = config
        for name in field.split("."):
            found = getattr(found, name)
        return found

    assert read(load(home, flags={key: value})) == expected
    assert read(load(home, environ={f"PRIMAD_{key.upper()}": value})) == expected
    assert read(load(home, file=f'{key} = "{value}"')) == expected


def test_numbers_of_the_file_are_bytes_and_seconds(home):
    config = load(home, file="max_disk = 5000\nmax_ram = 7000\nkeep_loaded = 30\ngone_after = 6.5\nreplan_gain = 0.2")
    assert (config.limits.disk_bytes, config.limits.ram, config.keep_loaded_s) == (5000, 7000, 30.0)
    assert (config.gone_after_s, config.replan_gain) == (6.5, 0.2)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"suspect_after": "0.9"}, "suspect_after: 0.9 s is less than two heartbeat_interval, 1 s"),
        ({"heartbeat_interval": "2"}, "suspect_after: 1.5 s is less than two heartbeat_interval, 4 s"),
        ({"gone_after": "1.9"}, "gone_after: 1.9 s is less than suspect_after and a heartbeat_interval, 2 s"),
        ({"suspect_after": "9"}, "gone_after: 4 s is less than suspect_after and a heartbeat_interval, 9.5 s"),
    ],
)
def test_patience_that_contradicts_itself_is_refused(home, values, named):
    text = refusal(home, environ={f"PRIMAD_{key.upper()}": value for key, value in values.items()})
    assert named.split(": ", 1)[1] in text
    assert text.upper().removeprefix("PRIMAD_").startswith(named.split(":")[0].upper())


@given(
    st.fixed_dictionaries(
        {},
        optional={
            key: st.one_of(st.text(max_size=12), st.floats(), st.integers(), st.booleans(), st.lists(st.text()))
            for key in config_module.KEYS
            if key != "host"  # a name would be resolved
        },
    )
)
def test_no_value_breaks_the_configuration(flags):
    try:
        config = load_config({"home": "/nonexistent", **flags}, {})
    except ConfigError:
        return
    assert 2 * config.heartbeat_interval_s <= config.suspect_after_s + 1e-6 <= config.gone_after_s


def test_an_option_that_was_not_given_decides_nothing(home):
    flags = dict.fromkeys(("name", "cluster", "host", "port", "threads", "max_ram", "nice"))
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
    ("name", "", "not a device name"),
    ("name", "a b", "not a device name"),
    ("name", "-a", "not a device name"),
    ("name", "a" * 63, "not a device name"),
    ("name", "ä", "not a device name"),
    ("name", "a\n", "not a device name"),
    ("cluster", "../x", "not a cluster name"),
    ("host", "nowhere..example", "not an address of this machine"),
    ("host", "a" * 70, "not an address of this machine"),
    ("host", "256.1.1.1.1", "not an address of this machine"),
    ("port", "x", "not a whole number from 0 to 65535"),
    ("port", "-1", "not a whole number"),
    ("port", "65536", "not a whole number"),
    ("port", "1.5", "not a whole number"),
    ("port", "9" * 5000, "not a whole number"),
    ("threads", "0", "not a whole number from 1 to 1024"),
    ("threads", "1025", "not a whole number"),
    ("pause_on_battery", "maybe", "neither true nor false"),
    ("nice", "20", "not a whole number from 0 to 19"),
    ("nice", "-5", "not a whole number"),
    ("interface", "eth0\n", "not an interface"),
    ("interface", " ", "not an interface"),
    ("max_ram", "8", "not a size; give one such as 16GiB, 500MB or 50%"),
    ("max_ram", "0%", "not a share"),
    ("max_ram", "101%", "not a share"),
    ("max_ram", "0GB", "computes nothing"),
    ("max_vram", "-1GB", "not a size"),
    ("max_disk", "50%", "not a size"),
    ("max_disk", "1e9GB", "not a size"),
    ("kv_cache", " ", "not a folder"),
    ("kv_cache_limit", "much", "not a size"),
    ("transfer_limit", "fast", "not a rate"),
    ("transfer_limit", "0MB/s", "not a rate"),
    ("keep_loaded", "forever", "not a time from 0 to 604800 s"),
    ("keep_loaded", "8d", "not a time"),
    ("replan_gain", "1001%", "not a gain"),
    ("replan_gain", "-0.1", "not a gain"),
    ("heartbeat_interval", "0.01", "not a time from 0.05 to 60 s"),
    ("suspect_after", "0", "not a time"),
    ("gone_after", "2h", "not a time"),
    ("devices", "de sk", "not a device address"),
    ("devices", "desk:0", "not a device address"),
    ("devices", "desk:65536", "not a device address"),
    ("devices", "a:1,b:", "not a device address"),
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
    ("name", "5", "not a device name"),
    ("name", '""', "not a device name"),
    ("cluster", "[]", "not a cluster name"),
    ("host", "5", "not an address"),
    ("port", "true", "not a whole number"),
    ("port", "80.5", "not a whole number"),
    ("port", "80.0", "not a whole number"),
    ("port", "inf", "not a whole number"),
    ("port", "nan", "not a whole number"),
    ("port", "[80]", "not a whole number"),
    ("port", "1979-05-27", "not a whole number"),
    ("threads", "{a = 1}", "not a whole number"),
    ("pause_on_battery", "2", "neither true nor false"),
    ("pause_on_battery", "[]", "neither true nor false"),
    ("max_ram", "true", "not a size"),
    ("max_disk", "-1", "not a size"),
    ("max_disk", "1.5", "not a size"),
    ("transfer_limit", "5", "not a rate"),
    ("keep_loaded", "nan", "not a time"),
    ("gone_after", "inf", "not a time"),
    ("gone_after", "true", "not a time"),
    ("replan_gain", "[]", "not a gain"),
    ("interface", "0", "not an interface"),
    ("devices", "5", "not a list"),
    ("devices", "[5]", "not a device address"),
    ("devices", '["de sk"]', "not a device address"),
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


def test_a_file_that_is_nested_without_end_is_a_config_error(home):
    assert "nested too deeply" in refusal(home, file="x = " + "[" * 50_000)


def test_a_file_in_place_of_the_folder_is_refused(home):
    home.write_text("")
    assert refusal(home) == f"{home}: is not a folder; give one for a home folder"


def test_a_folder_in_place_of_the_file_is_refused(home):
    (home / "config.toml").mkdir(parents=True)
    assert refusal(home).startswith(f"{home / 'config.toml'}: cannot be read")


@pytest.mark.parametrize("key", ["nmae", "home", "Name"])
def test_an_unknown_key_in_the_file_is_refused(home, key):
    text = refusal(home, file=f'{key} = "x"')
    assert f"unknown key '{key}'; known are name, cluster" in text


def test_a_misspelt_key_is_refused_with_the_likely_one(home):
    assert (
        refusal(home, environ={"PRIMAD_MAXRAM": "8GB"})
        == "PRIMAD_MAXRAM: no such variable; did you mean PRIMAD_MAX_RAM?"
    )
    assert load(home, environ={"PRIMAD_VENV": ".venv"}).threads is None, "others have variables of their own"
    assert refusal(home, file='max_rma = "8GB"').endswith("; did you mean 'max_ram'?")
    assert "did you mean" not in refusal(home, file="frobnicate = 1")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows removes no folder that somebody is in")
def test_a_relative_home_in_a_folder_that_is_gone_is_refused(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        ConfigError, match=r"^--home: here: the folder that you are in is gone; give the folder's full path"
    ):
        load_config({"home": "here"}, {})
    assert load_config({"home": str(tmp_path)}, {}).home == tmp_path


# ---- who may reach this device --------------------------------------------------------------------------------------


def test_a_daemon_listens_on_all_networks_unless_configured_otherwise(home, monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    assert load(home).host == "::"
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert load(home).host == "0.0.0.0"
    assert load(home, flags={"host": "127.0.0.1"}).host == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_stays_on_this_machine(host):
    assert is_loopback(host)
    assert check_host(host, "--host") == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.20", "", "127.1", "127.0.0.1.example", "fe80::1"])
def test_anything_else_is_not_loopback(host):
    assert not is_loopback(host)


@pytest.mark.parametrize("address", ["desk:7770", "192.168.1.20:1", "[::1]:65535", "[fe80::1%eth0]:7770", "a-b.c:80"])
def test_an_address_is_host_and_port(address):
    assert check_address(address, "--device") == address


@pytest.mark.parametrize("host", ["desk", "192.168.1.20", "desk.local", "[::1]", "[fe80::1%eth0]"])
def test_an_address_without_a_port_has_the_usual_one(host):
    assert check_address(host, "--device") == f"{host}:7770"
    assert join_address(*split_address(f"{host}:7770")) == f"{host}:7770"


@pytest.mark.parametrize("address", ["", ":1", "desk:", "desk:x", "::1:80", "a b:1", "a:1:2", "a:1\n", 7, None])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match=r"^--device: .* is not a device address; give host:port, for example"):
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


def test_a_folder_of_somebody_else_is_refused_before_anything_is_written(home, monkeypatch):
    """As after a first start with sudo. Root may write everywhere, so the system call is faked."""
    config = dataclasses.replace(load(home), kv_cache=home / "cells")
    monkeypatch.setattr(config_module.os, "access", lambda folder, _: folder == config.home)
    with pytest.raises(ConfigError, match=f"^{config.run}: this user may not write there; let them, or choose another"):
        open_home(config)
    with pytest.raises(ConfigError, match=f"^--kv-cache {config.kv_cache}: this user may not write there; "):
        open_kv_cache(config)


def test_the_folder_of_kept_prompts_is_closed_to_others(home):
    config = dataclasses.replace(load(home), kv_cache=home / "cells")
    open_kv_cache(config)
    assert config.kv_cache.is_dir()
    if sys.platform != "win32":
        assert config.kv_cache.stat().st_mode & 0o077 == 0


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_without_limits_all_that_is_free_may_be_used():
    assert NO_LIMITS.ram_bytes(5, 10) == NO_LIMITS.vram_bytes(5, 10) == 5
    assert NO_LIMITS.disk_for_layers(5, 10) == 15


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.floats(0.01, 1.0))
def test_a_limit_only_takes_away(available, total, limit, share):
    limits = OwnerLimits(ram=limit, vram=Share(share), disk_bytes=limit)
    assert limits.ram_bytes(available, total) == min(available, limit)
    assert limits.vram_bytes(available, total) == min(available, int(share * total))
    assert 0 <= limits.disk_for_layers(available, total) <= available + total
    assert limits.disk_for_layers(available, total) <= limit
