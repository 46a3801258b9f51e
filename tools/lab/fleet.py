"""The description of a lab: its devices and their limits, read from TOML and checked completely.

[defaults]                      # any key except name and ip is allowed here too
mbit_per_s = 900

[[device]]
name = "desk"                   # up to 15 of a-z, 0-9, '-'; also its host name
cpus = 1.5                      # CPU time per second
memory_bytes = "2GB"            # numbers, or strings with kB, MB, GB, KiB, MiB, GiB
disk_bytes = "3GB"              # size of the file system of its home
disk_read_bytes_per_s = "500MB"
disk_write_bytes_per_s = "300MB"
mbit_per_s = 100                # each way
latency_ms = 4                  # added to a round trip, half each way
ip = "10.77.0.9"                # otherwise 10.77.0.1 and on, in order
ipv6 = true                     # also fd77::1 and on
ipv4 = false                    # no IPv4; without ipv6 it has only a link-local address
multicast = false               # no mDNS in or out
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from tools.lab.names import LabError

NETWORK: Final = ipaddress.ip_network("10.77.0.0/24")
"""Addresses of every lab; they exist only inside its namespaces, so labs do not meet."""

MAX_DEVICES: Final = 64
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]i?)?B?\s*")
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY: Final = {"Ki": 1 << 10, "ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "K": 10**3}
_Rate = Annotated[int, Meta(ge=1)]


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device as specified; None means no limit of its own. ``latency_ms`` is added to a round trip."""

    name: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,14}$")]
    memory_bytes: Annotated[int, Meta(ge=16 << 20)] | None = None
    cpus: Annotated[float, Meta(ge=0.01, le=1e6)] | None = None
    disk_bytes: Annotated[int, Meta(ge=4 << 20)] | None = None
    disk_read_bytes_per_s: _Rate | None = None
    disk_write_bytes_per_s: _Rate | None = None
    mbit_per_s: Annotated[float, Meta(ge=0.01, le=1e9)] | None = None
    latency_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    ip: str | None = None
    ipv6: bool = False
    ipv4: bool = True
    multicast: bool = True


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    defaults: dict[str, Any] = {}
    device: list[dict[str, Any]] = []


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


def _size(value: Any) -> Any:
    """Return ``value`` in bytes if it is a text such as ``"2GB"``; anything else unchanged."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else int(float(match[1]) * (_UNITS | _BINARY)[match[2] or ""])


def load_fleet(path: Path) -> Fleet:
    """Read a fleet from a TOML file. Raises ``LabError`` naming the wrong key."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise LabError(f"{path}: cannot be read: {exc.strerror or exc}; give a fleet file") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise LabError(f"{path}: no TOML: {exc}; correct it") from exc
    return parse_fleet(document, str(path))


def parse_fleet(document: Mapping[str, Any], where: str) -> Fleet:
    """Return the fleet of a parsed TOML document. Raises ``LabError`` naming the wrong key."""
    specs, at = [], where
    try:
        found = msgspec.convert(document, _Document)
        if own := {"name", "ip"} & found.defaults.keys():
            raise LabError(f"{where}: defaults: {', '.join(own)}: unknown here; each [[device]] has its own")
        for number, entry in enumerate(found.device, start=1):
            at = f"{where}: device {number}"
            merged = {key: _size(value) if "bytes" in key else value for key, value in (found.defaults | entry).items()}
            specs.append(spec := msgspec.convert(merged, DeviceSpec))
            if spec.ip is not None and ipaddress.ip_address(spec.ip) not in list(NETWORK.hosts()):
                raise LabError(f"{at}: ip = {spec.ip}; give a host address in {NETWORK}")
    except (msgspec.ValidationError, ValueError) as exc:
        raise LabError(f"{at}: {exc}; correct it, as tools/lab/fleet.py says") from exc
    return Fleet(tuple(specs))
