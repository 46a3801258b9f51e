"""What the owner of this device decided, read once: flags over environment over file over defaults.

The file is ``config.toml`` in the home folder; every key of ``Config`` that ``_FILE_KEYS`` names may stand in it, and the
environment variable of a key is ``PRIMAD_`` and its name in capitals.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import platformdirs

from primad.errors import ConfigError

DEFAULT_CONTROL_PORT: Final = 7770
DEFAULT_HTTP_PORT: Final = 8080
DEFAULT_CLUSTER: Final = "home"
LOOPBACK: Final = "127.0.0.1"
_FILE_KEYS: Final = ("name", "cluster", "host", "port", "threads", "insecure_lan", "devices")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}")
"""Names of devices and clusters, our own and those that others announce."""

Flags = Mapping[str, Any]
"""Options of the command line by key; None where one was not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One device's configuration.

    ``port`` is None where the owner left it open (then the default is tried first). ``host`` is the address that daemons
    listen on. ``threads`` pins the number of compute threads; None takes what the profile found best. ``devices`` are
    addresses (host:port) of devices that multicast does not reach.
    """

    home: Path
    name: str
    cluster: str
    host: str
    port: int | None
    threads: int | None
    insecure_lan: bool
    devices: tuple[str, ...]

    @property
    def layers(self) -> Path:
        """The folder of the layer cache."""
        return self.home / "cache" / "layers"

    @property
    def run(self) -> Path:
        """The folder for files of this run: metadata splits and logs."""
        return self.home / "run"


def default_home() -> Path:
    """Where a daemon keeps its things when nobody says otherwise."""
    return Path(platformdirs.user_data_dir("primad", appauthor=False))


def load_config(flags: Flags, environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration. Raises ``ConfigError`` naming the flag, variable or key that is wrong."""
    home = _home(flags, environ)
    stored = _read_file(home / "config.toml")

    def chosen(key: str, default: Any) -> tuple[Any, str]:
        if flags.get(key) is not None and flags[key] != ():
            return flags[key], "--device" if key == "devices" else f"--{key.replace('_', '-')}"
        variable = f"PRIMAD_{key.upper()}"
        if environ.get(variable):
            return environ[variable], variable
        if key in stored:
            return stored[key], f"'{key}' in {home / 'config.toml'}"
        return default, key

    name, source = chosen("name", _host_name())
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"{source}: {name!r} is no device name; use up to 62 letters, digits, '.', '_' and '-'")
    cluster, source = chosen("cluster", DEFAULT_CLUSTER)
    if not isinstance(cluster, str) or not NAME.fullmatch(cluster):
        raise ConfigError(f"{source}: {cluster!r} is no cluster name; use up to 62 letters, digits, '.', '_' and '-'")
    insecure_lan = _flag(*chosen("insecure_lan", False))
    host, source = chosen("host", "0.0.0.0" if insecure_lan else LOOPBACK)
    check_host(host, source, insecure_lan=insecure_lan)
    port, port_source = chosen("port", None)
    threads, threads_source = chosen("threads", None)
    devices, devices_source = chosen("devices", ())
    return Config(
        home=home,
        name=name,
        cluster=cluster,
        host=host,
        port=None if port is None else _number(port, port_source, most=65_535),
        threads=None if threads is None else _number(threads, threads_source, least=1, most=1024),
        insecure_lan=insecure_lan,
        devices=tuple(check_address(device, devices_source) for device in _list(devices, devices_source)),
    )


def _home(flags: Flags, environ: Mapping[str, str]) -> Path:
    source = "--home" if flags.get("home") else "PRIMAD_HOME"
    chosen = flags.get("home") or environ.get("PRIMAD_HOME") or default_home()
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError as exc:
        raise ConfigError(f"{source}: {chosen}: {exc}; give the folder's full path") from exc


def open_home(config: Config) -> None:
    """Create the home folder. Raises ``ConfigError`` when that cannot be done."""
    try:
        for folder in (config.home, config.run, config.layers):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"--home {config.home}: cannot be used: {exc.strerror or exc}; choose another folder"
        ) from exc


def check_host(host: Any, source: str, *, insecure_lan: bool) -> None:
    """Accept ``host`` to listen on. Raises ``ConfigError`` for one that leaves this machine without leave."""
    if not isinstance(host, str):
        raise ConfigError(f"{source}: {host!r} is no address")
    if is_loopback(host):
        return
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"{source}: {host!r} is no address of this machine: {exc}") from exc
    if not insecure_lan:
        raise ConfigError(
            f"{source}: {host} can be reached from other machines, and nothing is encrypted or checked yet; "
            f"use {LOOPBACK}, or add --insecure-lan if you trust everyone on that network"
        )


def is_loopback(host: str) -> bool:
    """Whether ``host`` stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: Any, source: str) -> str:
    """``address`` if it is ``host:port``. Raises ``ConfigError``."""
    match = (
        re.fullmatch(r"(\[[0-9a-fA-F:.%a-z]+\]|[^:\s\[\]]+):(\d{1,5})", address) if isinstance(address, str) else None
    )
    if match is None or not 0 < int(match[2]) < 65_536:
        raise ConfigError(f"{source}: {address!r} is no device address; give host:port, for example 192.168.1.20:7770")
    return str(address)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read as TOML: {exc}") from exc
    unknown = sorted(set(content) - set(_FILE_KEYS))
    if unknown:
        raise ConfigError(f"{path}: unknown key '{unknown[0]}'; known are {', '.join(_FILE_KEYS)}")
    return content


def _number(value: Any, source: str, *, least: int = 0, most: int) -> int:
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else -1
    except ValueError:
        number = -1
    if not least <= number <= most:
        raise ConfigError(f"{source}: {value!r} is not a whole number from {least} to {most}")
    return number


def _flag(value: Any, source: str) -> bool:
    match str(value).lower():
        case "true" | "1" | "yes":
            return True
        case "false" | "0" | "no":
            return False
        case _:
            raise ConfigError(f"{source}: {value!r} is neither true nor false")


def _list(value: Any, source: str) -> list[Any]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{source}: {value!r} is not a list")
    return list(value)


def _host_name() -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname().split(".")[0]).strip("-._")
    return name[:62] or "device"
