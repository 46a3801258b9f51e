"""The configuration of this device, read once: flags override the environment, then the file, then the defaults.

The file is ``config.toml`` in the home folder and may have any key below; the environment variable of a key is
``PRIMAD_`` and its name in capitals. Daemons listen on all networks of this machine by default, since only paired
devices get anything from them; ``host = "127.0.0.1"`` restricts a daemon to this machine.

    name, cluster         this device's name; devices of one cluster find each other
    host, port            address and port that the daemon listens on for other devices
    interface             use this network only: an interface such as "eth0", or one of its addresses
    models                a list of folders with GGUF files, which commands then know by name
    devices               a list such as ["192.168.1.20"]: devices asked where multicast is blocked
    threads, nice         compute threads; how far computing yields to other programs, 0 to 19
    lock                  true: weights that stay in memory are pinned there (mlock); the system cannot take them back
    max_ram, max_vram     memory limits of primad: "8GB", "8GiB", or "50%" of what the device has
    gpu                   the GPUs to use, by name ("RTX 3090") or by llama.cpp's name ("CUDA0,CUDA1"); "off": none
    max_disk              size limit of the layer cache: "40GB"
    pause_on_battery      true: this device computes nothing while it runs on battery
    kv_cache              a folder that keeps the KV cache of prompts, even when primad ends; "off" (default): none
    kv_cache_limit        size limit of that folder: "4GB"
    transfer_limit        bandwidth limit for layers, in each direction: "20MB/s" or "100Mbit/s"
    keep_loaded           how long a worker keeps its layers in memory after its head is gone: "10min"
    replan_gain           gain that a new plan must have to replace the one that serves: 0.1 or "10%"
    heartbeat_interval    time between heartbeats: 0.5 (seconds)
    suspect_after         a device that is silent for this long is suspected: 1.5
    gone_after            a device that is silent for this long is gone, and the ring continues without it: 4

Options of ``serve`` and ``plan`` follow these keys, in tables ``[serve]`` and ``[plan]``: ``context = 16384``.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import platformdirs

from primad.errors import ConfigError, printable
from primad.settings.limits import OwnerLimits
from primad.settings.quantities import (
    Amount,
    did_you_mean,
    parse_amount,
    parse_bytes,
    parse_duration,
    parse_gain,
    parse_list,
    parse_rate,
    parse_whole,
    parse_yes_no,
)

DEFAULT_CONTROL_PORT: Final = 7770
DEFAULT_HTTP_PORT: Final = 8080
DEFAULT_CLUSTER: Final = "home"
LOOPBACK: Final = "127.0.0.1"
_VARIABLE: Final = "PRIMAD_"
_UNIT: Final = re.compile(r"_(bytes|s|bytes_per_s)$")
_NEARLY: Final = 0.8
"""Similarity to a key, from 0 to 1, from which a name counts as a typing error of it."""
TABLES: Final = ("serve", "join", "plan")
"""Commands whose options may be in the file too, each in a table of its own (``tables.py``)."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}")
"""Names of devices and clusters, this one's and those that others announce."""
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+(?:%[A-Za-z0-9._-]+)?\]|[\w.-]+)(?::([0-9]{1,5}))?")
_DAY_S: Final = 86_400.0
MIN_TRANSFER_BYTES_PER_S: Final = 1e6
DEFAULT_KV_CACHE_BYTES: Final = 4_000_000_000

Flags = Mapping[str, Any]
"""Options of the command line by key; None for an option that was not given."""


def any_host() -> str:
    """Return the address that means all addresses of this machine.

    ``::`` receives IPv4 too, even where sysctl disables IPv6; a kernel without IPv6 has only ``0.0.0.0``.
    """
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def check_host(host: Any, source: str) -> str:
    """Return ``host`` if this machine can listen on it. Raises ``ConfigError``."""
    if not isinstance(host, str):
        raise ConfigError(f"{source}: {host!r} is not an address")
    try:
        if not host:
            raise OSError("it is empty")
        socket.getaddrinfo(host, None, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"{source}: {printable(repr(host), 80)} is not an address of this machine: {exc}") from exc
    return host


def is_loopback(host: str) -> bool:
    """Whether ``host`` is only reachable from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: Any, source: str) -> str:
    """Return ``address`` as ``host:port``, with the default control port where it names none. Raises ``ConfigError``."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    port = DEFAULT_CONTROL_PORT if match is None else int(match[2] or DEFAULT_CONTROL_PORT)
    if match is None or not 0 < port < 65_536:
        raise ConfigError(
            f"{source}: {address!r} is not a device address; give host:port, for example 192.168.1.20:7770"
        )
    return f"{match[1]}:{port}"


def has_port(address: str) -> bool:
    """Whether ``address`` is a host with a port."""
    match = _ADDRESS.fullmatch(address)
    return match is not None and match[2] is not None


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Split an ``address`` that ``check_address`` accepted into host and port, without the brackets of IPv6."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _name(value: Any, source: str, *, kind: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ConfigError(f"{source}: {value!r} is not a {kind} name; use up to 62 letters, digits, '.', '_' and '-'")
    return value


def _interface(value: Any, source: str) -> str:
    """Check only the form: whether this machine has it is checked on use, since networks come and go."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value.strip()) <= 128:
        raise ConfigError(f"{source}: {printable(repr(value), 80)} is not an interface; give one such as eth0")
    return value.strip()


def _some_memory(value: Any, source: str) -> Amount:
    amount = parse_amount(value, source)
    if amount == 0:
        raise ConfigError(f"{source}: without memory this device computes nothing; give more, or do not start it")
    return amount


def _addresses(value: Any, source: str) -> tuple[str, ...]:
    return tuple(check_address(device, source) for device in parse_list(value, source))


def _host_name() -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname().split(".")[0]).strip("-._")
    return name[:62] or "device"


def _gpu(value: Any, source: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{source}: {value!r} is not a name of a GPU; 'primad profile' names them, 'off' takes none")
    return value.strip()


def _transfer_limit(value: Any, source: str) -> float:
    """Check that the rate is not so low that a device seems not to respond: one chunk is 4 MiB."""
    rate = parse_rate(value, source)
    if rate < MIN_TRANSFER_BYTES_PER_S:
        raise ConfigError(f"{source}: {value!r} is too slow for layers; give at least 1MB/s")
    return rate


def _folder_or_off(value: Any, source: str) -> Path | None:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ConfigError(f"{source}: {printable(repr(value), 80)} is not a folder; give one, or off")
    return None if str(value) == "off" else Path(value).expanduser().absolute()


def _folders(value: Any, source: str) -> tuple[Path, ...]:
    given = parse_list(value, source)
    if not all(isinstance(each, str | Path) and str(each).strip() for each in given):
        raise ConfigError(f"{source}: {printable(repr(value), 80)} is not a list of folders; give them as texts")
    return tuple(Path(each).expanduser().absolute() for each in given)


def _key(check: Callable[..., Any], default: Any, **bounds: Any) -> Any:
    """Declare a key of the file, the environment and the command line, named as its field without the unit."""
    return field(metadata={"check": check, "default": default, "bounds": bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One device's configuration; the module's docstring explains each key.

    ``port`` is None where the owner did not set it (then the default is tried first). ``host`` is the address that
    daemons listen on for each other. ``threads`` fixes the number of compute threads; None takes the best number in the
    profile. ``lock`` pins resident weights to memory. Without ``kv_cache`` KV cells are deleted when no request needs
    them. ``transfer_limit_bytes_per_s`` is None for no limit. ``replan_gain`` is a fraction.
    """

    home: Path
    limits: OwnerLimits
    name: str = _key(_name, _host_name, kind="device")
    cluster: str = _key(_name, DEFAULT_CLUSTER, kind="cluster")
    host: str = _key(check_host, any_host)
    port: int | None = _key(parse_whole, None, maximum=65_535)
    interface: str | None = _key(_interface, None)
    devices: tuple[str, ...] = _key(_addresses, ())
    models: tuple[Path, ...] = _key(_folders, ())
    threads: int | None = _key(parse_whole, None, minimum=1, maximum=1024)
    nice: int = _key(parse_whole, 0, maximum=19)
    lock: bool = _key(parse_yes_no, False)
    kv_cache: Path | None = _key(_folder_or_off, None)  # noqa: RUF009 - a field
    kv_cache_limit_bytes: int = _key(parse_bytes, DEFAULT_KV_CACHE_BYTES)
    pause_on_battery: bool = _key(parse_yes_no, False)
    transfer_limit_bytes_per_s: float | None = _key(_transfer_limit, None)
    keep_loaded_s: float = _key(parse_duration, 600.0, maximum=7 * _DAY_S)
    replan_gain: float = _key(parse_gain, 0.10)
    heartbeat_interval_s: float = _key(parse_duration, 0.5, minimum=0.05, maximum=60)
    suspect_after_s: float = _key(parse_duration, 1.5, minimum=0.1, maximum=600)
    gone_after_s: float = _key(parse_duration, 4.0, minimum=0.2, maximum=3600)

    @property
    def layers(self) -> Path:
        """The folder of the layer cache."""
        return layer_folder(self.home)

    @property
    def kv_folder(self) -> Path:
        """The folder of KV blocks: the cache, or one that is emptied at each start."""
        return self.kv_cache if self.kv_cache is not None else self.home / "run" / "cells"

    @property
    def run(self) -> Path:
        """The folder for files of this run: metadata splits and logs."""
        return self.home / "run"


_LIMITS: Final = {
    "max_ram": ("ram", _some_memory),
    "max_vram": ("vram", parse_amount),
    "max_disk": ("disk_bytes", parse_bytes),
    "gpu": ("gpu", _gpu),
}
"""The keys of the owner's limits, with the field and the check of each."""
_FIELDS: Final = {_UNIT.sub("", each.name): each for each in fields(Config) if each.metadata}
KEYS: Final = (*_FIELDS, *_LIMITS)


def default_home() -> Path:
    """Return the default home folder."""
    return Path(platformdirs.user_data_dir("primad", appauthor=False))


def layer_folder(home: Path) -> Path:
    """The folder of the layer cache in ``home``."""
    return home / "cache" / "layers"


def models_folder(home: Path) -> Path:
    """The folder in ``home`` for models that were downloaded by name."""
    return home / "models"


def digests_file(home: Path) -> Path:
    """The file in ``home`` with the digests of the layers of model files."""
    return home / "digests.json"


def usage_folder(home: Path) -> Path:
    """The folder in ``home`` with the usage counts of the experts of each layer."""
    return home / "expert-usage"


def checks_folder(home: Path) -> Path:
    """The folder in ``home`` with the verdicts on which models can be cut exactly."""
    return home / "checks"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The content of the configuration file ``path``."""

    path: Path
    values: Mapping[str, Any]


class _Sources:
    """Look up the value of a key and its source, by precedence."""

    def __init__(self, flags: Flags, environ: Mapping[str, str], stored: Mapping[str, Any], file: Path) -> None:
        self._flags = flags
        self._environ = environ
        self._stored = stored
        self._file = file

    def get(self, key: str) -> tuple[Any, str] | None:
        """Return (value, name of its source), or None where there is no value."""
        if self._flags.get(key) is not None and self._flags[key] != ():
            return self._flags[key], "--device" if key == "devices" else f"--{key.replace('_', '-')}"
        variable = f"{_VARIABLE}{key.upper()}"
        if self._environ.get(variable):
            return self._environ[variable], variable
        if key in self._stored:
            return self._stored[key], f"'{key}' in {self._file}"
        return None


def load_config(flags: Flags, environ: Mapping[str, str] = os.environ, stored: ConfigFile | None = None) -> Config:
    """Return the configuration; ``stored`` is its file, if that has been read already.

    Raises ``ConfigError`` naming the flag, variable or key that is wrong.
    """
    _check_variables(environ)
    home = home_of(flags, environ)
    if stored is None or stored.path.parent != home:
        stored = config_file(flags, environ)
    sources = _Sources(flags, environ, _own_keys(stored), stored.path)

    def chosen(key: str, check: Callable[..., Any], default: Any = None, bounds: Mapping[str, Any] = {}) -> Any:
        if (given := sources.get(key)) is not None:
            return check(*given, **bounds)
        return default() if callable(default) else default

    config = Config(
        home=home,
        limits=OwnerLimits(**{name: chosen(key, check) for key, (name, check) in _LIMITS.items()}),
        **{each.name: chosen(key, **each.metadata) for key, each in _FIELDS.items()},
    )
    _check_patience(config, sources)
    return config


def _check_variables(environ: Mapping[str, str]) -> None:
    """Reject a variable that is nearly named as a key, as a typing error; other variables may belong to other programs."""
    for variable in sorted(name for name in environ if name.startswith(_VARIABLE)):
        key = variable.removeprefix(_VARIABLE).lower()
        close = () if key in KEYS else difflib.get_close_matches(key, KEYS, n=1, cutoff=_NEARLY)
        if close:
            raise ConfigError(f"{variable}: no such variable; did you mean {_VARIABLE}{close[0].upper()}?")


def _check_patience(config: Config, sources: _Sources) -> None:
    """Check that a device is late by more than one heartbeat before it is suspected, and suspected before it is gone."""
    pairs = (
        ("suspect_after", config.suspect_after_s, "two heartbeat_interval", 2 * config.heartbeat_interval_s),
        (
            "gone_after",
            config.gone_after_s,
            "suspect_after and a heartbeat_interval",
            config.suspect_after_s + config.heartbeat_interval_s,
        ),
    )
    for key, seconds, others, minimum in pairs:
        if seconds < minimum - 1e-9:
            given = sources.get(key)
            source = key if given is None else given[1]
            raise ConfigError(f"{source}: {seconds:g} s is less than {others}, {minimum:g} s; give at least that")


def home_of(flags: Flags, environ: Mapping[str, str]) -> Path:
    """Return the home folder. Raises ``ConfigError``."""
    source = "--home" if flags.get("home") else "PRIMAD_HOME"
    chosen = flags.get("home") or environ.get("PRIMAD_HOME") or default_home()
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError as exc:
        raise ConfigError(f"{source}: {chosen}: {str(exc).rstrip('.')}; give the folder's full path") from exc
    except FileNotFoundError as exc:
        raise ConfigError(
            f"{source}: {chosen}: the folder that you are in is gone; give the folder's full path"
        ) from exc


def open_home(config: Config) -> None:
    """Create the home folder. Raises ``ConfigError`` when that is impossible, or this user may not write to it."""
    _make_writable(config.home, f"--home {config.home}")
    for folder in (config.run, config.layers):
        _make_writable(folder, str(folder))


def open_kv_cache(config: Config) -> None:
    """Create the folder for the KV cache of prompts, if one is configured. Raises ``ConfigError`` as ``open_home``."""
    if config.kv_cache is not None:
        _make_writable(config.kv_cache, f"--kv-cache {config.kv_cache}", mode=0o700)


def _make_writable(folder: Path, source: str, mode: int = 0o777) -> None:
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{source}: cannot be used: {exc.strerror or exc}; choose another folder") from exc
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{source}: this user may not write there; let them, or choose another folder")


def config_file(flags: Flags, environ: Mapping[str, str] = os.environ) -> ConfigFile:
    """Read the configuration file, empty where there is none. Raises ``ConfigError``."""
    return toml_file(home_of(flags, environ) / "config.toml")


def toml_file(path: Path) -> ConfigFile:
    """Read the TOML file ``path``, empty where there is none. Raises ``ConfigError``."""
    try:
        return ConfigFile(path, tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return ConfigFile(path, {})
    except NotADirectoryError as exc:
        raise ConfigError(f"{path.parent}: is not a folder; give one for a home folder") from exc
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}; check who may read it") from exc
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read as TOML: {exc}") from exc
    except RecursionError as exc:
        raise ConfigError(f"{path}: cannot be read as TOML: it is nested too deeply") from exc


def _own_keys(stored: ConfigFile) -> dict[str, Any]:
    path, content = stored.path, {key: value for key, value in stored.values.items() if key not in TABLES}
    unknown = sorted(set(content) - set(KEYS))
    if unknown:
        known = f"known are {', '.join(KEYS)}{did_you_mean(unknown[0], KEYS)}"
        raise ConfigError(f"{path}: unknown key '{printable(unknown[0], 80)}'; {known}")
    return content
