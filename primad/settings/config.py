"""What the owner of this device decided, read once: flags over environment over file over defaults.

The file is ``config.toml`` in the home folder. Every key below may stand in it; the environment variable of a key is
``PRIMAD_`` and its name in capitals. Daemons hear all networks of this machine unless told otherwise, since nobody but
devices that were paired gets anything out of them; ``host = "127.0.0.1"`` keeps a daemon to this machine.

    name, cluster         this device's name; devices of one cluster find each other
    host, port            address and port that the daemon listens on for other devices
    interface             use this network only: an interface such as "eth0", or one of its addresses
    models                a list of folders with GGUF files, which commands then know by name
    devices               a list such as ["192.168.1.20"]: devices asked where multicast is blocked
    threads, nice         compute threads; how far computing stands back for other programs, 0 to 19
    lock                  true: weights that stay in memory are pinned there (mlock); the system cannot take them back
    max_ram, max_vram     the most that primad uses: "8GB", "8GiB", or "50%" of what the device has
    gpu                   the GPUs to use of several, by names ("RTX 3090") or llama.cpp's ("CUDA0,CUDA1"); "off": none
    max_disk              the most that the layer cache holds: "40GB"
    pause_on_battery      true: this device computes nothing while it runs on battery
    kv_cache              a folder in which KV cells of prompts stay, also when primad ends; "off" (the default) for none
    kv_cache_limit        the most that those take there: "4GB"
    transfer_limit        the most that layers take of the network, each way: "20MB/s" or "100Mbit/s"
    keep_loaded           how long a worker keeps its layers in memory when its head went away: "10min"
    replan_gain           a new plan is taken while serving when it is faster by so much: 0.1 or "10%"
    heartbeat_interval    how often devices tell each other that they are there: 0.5 (seconds)
    suspect_after         a device that is silent so long is suspected: 1.5
    gone_after            a device that is silent so long is gone, and the ring goes on without it: 4

Options of ``serve`` and ``plan`` stand below these keys, in tables ``[serve]`` and ``[plan]``: ``context = 16384``.
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
"""So like a key, from 0 to 1, is a slip of it."""
TABLES: Final = ("serve", "join", "plan")
"""Commands whose options may stand in the file too, each in a table of its own (``tables.py``)."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,61}")
"""Names of devices and clusters, our own and those that others announce."""
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+(?:%[A-Za-z0-9._-]+)?\]|[\w.-]+)(?::([0-9]{1,5}))?")
_DAY_S: Final = 86_400.0
MIN_TRANSFER_BYTES_PER_S: Final = 1e6
DEFAULT_KV_CACHE_BYTES: Final = 4_000_000_000

Flags = Mapping[str, Any]
"""Options of the command line by key; None where one was not given."""


def any_host() -> str:
    """The address that stands for all addresses of this machine.

    ``::`` hears IPv4 too, also where IPv6 is switched off by sysctl; a kernel without IPv6 has only ``0.0.0.0``.
    """
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def check_host(host: Any, source: str) -> str:
    """``host`` if one can listen on it. Raises ``ConfigError``."""
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
    """Whether ``host`` stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: Any, source: str) -> str:
    """``address`` as ``host:port``, with the usual control port where it names none. Raises ``ConfigError``."""
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
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an ``address`` that ``check_address`` accepted, without the brackets of IPv6."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _name(value: Any, source: str, *, kind: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ConfigError(f"{source}: {value!r} is not a {kind} name; use up to 62 letters, digits, '.', '_' and '-'")
    return value


def _interface(value: Any, source: str) -> str:
    """Only the form: whether this machine has it now is asked when it is used, since networks come and go."""
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
    """A slower transfer would look like a device that does not answer: one chunk is 4 MiB."""
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
    """A key of the file, the environment and the command line, called as its field without the unit."""
    return field(metadata={"check": check, "default": default, "bounds": bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One device's configuration; the module's text says what each key is.

    ``port`` is None where the owner left it open (then the default is tried first). ``host`` is the address that daemons
    listen on for each other. ``threads`` pins the number of compute threads; None takes what the profile found best.
    ``lock`` pins resident weights to memory. Without ``kv_cache`` no KV cells stay once nobody needs them.
    ``transfer_limit_bytes_per_s`` is None for no limit. ``replan_gain`` is a fraction.
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
"""The keys of the owner's limits, and the field and the check of each."""
_FIELDS: Final = {_UNIT.sub("", each.name): each for each in fields(Config) if each.metadata}
KEYS: Final = (*_FIELDS, *_LIMITS)


def default_home() -> Path:
    """Where a daemon keeps its things when nobody says otherwise."""
    return Path(platformdirs.user_data_dir("primad", appauthor=False))


def layer_folder(home: Path) -> Path:
    """The folder of the layer cache of the home folder ``home``."""
    return home / "cache" / "layers"


def models_folder(home: Path) -> Path:
    """The folder in ``home`` for models that were fetched by name."""
    return home / "models"


def digests_file(home: Path) -> Path:
    """The file in ``home`` where it is kept what the layers of model files hold."""
    return home / "digests.json"


def usage_folder(home: Path) -> Path:
    """The folder in ``home`` where it is kept how often the experts of each layer are used."""
    return home / "expert-usage"


def checks_folder(home: Path) -> Path:
    """The folder in ``home`` where it is kept which models were found to be cut exactly."""
    return home / "checks"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What the configuration file ``path`` says."""

    path: Path
    values: Mapping[str, Any]


class _Sources:
    """The value of a key and where it came from, by precedence."""

    def __init__(self, flags: Flags, environ: Mapping[str, str], stored: Mapping[str, Any], file: Path) -> None:
        self._flags = flags
        self._environ = environ
        self._stored = stored
        self._file = file

    def get(self, key: str) -> tuple[Any, str] | None:
        """(value, name of its source), or None where nobody gave one."""
        if self._flags.get(key) is not None and self._flags[key] != ():
            return self._flags[key], "--device" if key == "devices" else f"--{key.replace('_', '-')}"
        variable = f"{_VARIABLE}{key.upper()}"
        if self._environ.get(variable):
            return self._environ[variable], variable
        if key in self._stored:
            return self._stored[key], f"'{key}' in {self._file}"
        return None


def load_config(flags: Flags, environ: Mapping[str, str] = os.environ, stored: ConfigFile | None = None) -> Config:
    """The configuration; ``stored`` is its file, where that was read before. Raises ``ConfigError`` naming the flag,
    variable or key that is wrong."""
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
    """One that is nearly named as a key is a slip; others may be anybody's."""
    for variable in sorted(name for name in environ if name.startswith(_VARIABLE)):
        key = variable.removeprefix(_VARIABLE).lower()
        close = () if key in KEYS else difflib.get_close_matches(key, KEYS, n=1, cutoff=_NEARLY)
        if close:
            raise ConfigError(f"{variable}: no such variable; did you mean {_VARIABLE}{close[0].upper()}?")


def _check_patience(config: Config, sources: _Sources) -> None:
    """A device must be late by more than one heartbeat before it is suspected, and suspected before it is gone."""
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
    """The home folder. Raises ``ConfigError``."""
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
    """Create the home folder. Raises ``ConfigError`` when that cannot be done, or this user may not write into it."""
    _make_writable(config.home, f"--home {config.home}")
    for folder in (config.run, config.layers):
        _make_writable(folder, str(folder))


def open_kv_cache(config: Config) -> None:
    """Create the folder that KV cells of prompts stay in, if there is to be one. Raises ``ConfigError`` as ``open_home``."""
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
    """The configuration file, empty where there is none. Raises ``ConfigError``."""
    return toml_file(home_of(flags, environ) / "config.toml")


def toml_file(path: Path) -> ConfigFile:
    """What the file ``path`` says, nothing where there is none. Raises ``ConfigError``."""
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
