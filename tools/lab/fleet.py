"""The description of a lab: which devices there are and what each may use. Read from TOML, checked completely.

[defaults]                      # every key but name and ip may stand here too
mbit_per_s = 900

[[device]]
name = "desk"                   # up to 15 of a-z, 0-9, '-'; also its host name
cpus = 1.5                      # CPU time per second
memory_bytes = "2GB"            # numbers, or texts with kB, MB, GB, KiB, MiB, GiB
disk_bytes = "3GB"              # its home lies on a file system of this size
disk_read_bytes_per_s = "500MB"
disk_write_bytes_per_s = "300MB"
mbit_per_s = 100                # each way
latency_ms = 4                  # added to a round trip, half each way
ip = "10.77.0.9"                # otherwise 10.77.0.1 and on, in order
ipv6 = true                     # also fd77::1 and on
ipv4 = false                    # no IPv4; without ipv6 it has the link-local address of its interface alone
multicast = false               # no mDNS in or out
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.lab.names import LabError

NETWORK: Final = ipaddress.ip_network("10.77.0.0/24")
"""Addresses of every lab; they exist inside its namespaces only, so labs do not meet."""

MAX_DEVICES: Final = 64
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,14}")
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]i?)?B?\s*")
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY: Final = {"Ki": 1 << 10, "ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "K": 10**3}
_BYTES: Final = ("memory_bytes", "disk_bytes", "disk_read_bytes_per_s", "disk_write_bytes_per_s")
_MIN_MEMORY: Final = 16 << 20
_MIN_DISK: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One device as asked for; None means no limit of its own. ``latency_ms`` is added to a round trip."""

    name: str
    memory_bytes: int | None = None
    cpus: float | None = None
    disk_bytes: int | None = None
    disk_read_bytes_per_s: int | None = None
    disk_write_bytes_per_s: int | None = None
    mbit_per_s: float | None = None
    latency_ms: float = 0.0
    ip: str | None = None
    ipv6: bool = False
    ipv4: bool = True
    multicast: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise LabError(f"device {self.name!r}: no name; use up to 15 of a-z, 0-9 and '-'")
        for key in _BYTES:
            self._check(key, int, minimum=1)
        self._check("memory_bytes", int, minimum=_MIN_MEMORY)
        self._check("disk_bytes", int, minimum=_MIN_DISK)
        self._check("cpus", float, minimum=0.01)
        self._check("mbit_per_s", float, minimum=0.01)
        self._check("latency_ms", float, minimum=0)
        if self.latency_ms > 60_000:
            raise LabError(f"device {self.name}: latency_ms = {self.latency_ms:g}; at most 60000")
        if self.ip is not None:
            _check_ip(self.name, self.ip)

    def _check(self, key: str, kind: type, *, minimum: float) -> None:
        value = getattr(self, key)
        numbers = (int, float) if kind is float else (int,)
        if value is None or (isinstance(value, numbers) and not isinstance(value, bool) and minimum <= value < 1e18):
            return
        raise LabError(f"device {self.name}: {key} = {value!r}; give a number from {minimum:g} on")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The devices of a lab, at least one; names and addresses are unique."""

    devices: tuple[DeviceSpec, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.devices) <= MAX_DEVICES:
            raise LabError(f"a fleet has from 1 to {MAX_DEVICES} devices; this one has {len(self.devices)}")
        for what, values in (("name", [spec.name for spec in self.devices]), ("ip", list(self.addresses()))):
            for value in values:
                if values.count(value) > 1:
                    raise LabError(f"{what} {value}: two devices of the fleet have it; give each its own")

    def addresses(self) -> tuple[str, ...]:
        """The IPv4 address of every device, in order."""
        return tuple(spec.ip or str(NETWORK[number]) for number, spec in enumerate(self.devices, start=1))


def _check_ip(name: str, text: str) -> None:
    try:
        inside = ipaddress.ip_address(text) in list(NETWORK.hosts())
    except ValueError:
        inside = False
    if not inside:
        raise LabError(f"device {name}: ip = {text!r}; give a host address in {NETWORK}")


def size(value: Any, where: str) -> Any:
    """``value`` in bytes where it is a text such as ``"2GB"``; anything else as it is. Raises ``LabError``."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise LabError(f"{where} = {value!r}: no size; write a number, or one with a unit such as '500MB' or '2GiB'")
    return int(float(match[1]) * (_UNITS | _BINARY)[match[2] or ""])


def load_fleet(path: Path) -> Fleet:
    """The fleet that a TOML file describes. Raises ``LabError`` naming the key that is wrong."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise LabError(f"{path}: cannot be read: {exc.strerror or exc}; give a fleet file") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise LabError(f"{path}: no TOML: {exc}; correct it") from exc
    return parse_fleet(document, str(path))


def parse_fleet(document: Mapping[str, Any], where: str) -> Fleet:
    """The fleet that a parsed TOML document describes. Raises ``LabError`` naming the key that is wrong."""
    for key in document:
        if key not in ("defaults", "device"):
            raise LabError(f"{where}: {key}: unknown; a fleet has [defaults] and [[device]]")
    defaults, devices = document.get("defaults", {}), document.get("device", [])
    if not isinstance(defaults, dict) or not isinstance(devices, list):
        raise LabError(f"{where}: write [defaults] once and [[device]] for each device")
    if any(not isinstance(entry, dict) or "name" not in entry for entry in devices):
        raise LabError(f"{where}: a device without a name; give each [[device]] one")
    known = {field.name for field in dataclasses.fields(DeviceSpec)}
    specs = []
    for entry in devices:
        merged = {**defaults, **entry}
        for key in merged:
            if key not in known or (key in defaults and key in ("name", "ip")):
                raise LabError(
                    f"{where}: device {entry['name']!r}: {key}: unknown here; known: {', '.join(sorted(known))}"
                )
        for key in _BYTES:
            if key in merged:
                merged[key] = size(merged[key], f"{where}: device {entry['name']!r}: {key}")
        for key in ("ipv6", "ipv4", "multicast"):
            if not isinstance(merged.get(key, True), bool):
                raise LabError(f"{where}: device {entry['name']!r}: {key} = {merged[key]!r}; write true or false")
        specs.append(DeviceSpec(**merged))
    return Fleet(tuple(specs))
