"""Whole fleets as data: ``profiles/fleets/*.json``, made of devices in ``profiles/devices/*.json``.

To plan for devices that are not here. The format is described in ``profiles/README.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from halda import DeviceProfile, LinkProfile
from primad.errors import ConfigError
from primad.gguf.shapes import profiles_directory
from primad.profiler.store import load_profile

FLEET_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Devices in the order of the file, and a link for each ordered pair of them."""

    devices: tuple[DeviceProfile, ...]
    links: tuple[LinkProfile, ...]


class _Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device under another name: several of one kind in a fleet."""

    profile: str
    name: str


class _Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link of every pair that is not listed separately."""

    round_trip_s: float
    bytes_per_s: float
    late_s: float = 0.0


class _OwnLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One ordered pair, by the names in the fleet."""

    source: str
    target: str
    round_trip_s: float
    bytes_per_s: float
    late_s: float = 0.0


class _FleetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    source: str
    devices: list[str | _Named]
    link: _Link
    links: list[_OwnLink] = []


def fleet_names() -> tuple[str, ...]:
    """The fleets that come with primad."""
    return tuple(sorted(path.stem for path in (profiles_directory() / "fleets").glob("*.json")))


def read_fleet(name_or_path: str | Path) -> Fleet:
    """A fleet that comes with primad, or the one in a file (a path or a name that ends in ``.json``).

    Devices of a file are searched next to it first (``NAME.json``), then among those that come with primad. Raises
    ``ConfigError``.
    """
    given = str(name_or_path)
    own_file = isinstance(name_or_path, Path) or given.endswith(".json") or "/" in given
    if not own_file and given not in fleet_names():
        raise ConfigError(
            f"no fleet '{given}'; there are {', '.join(fleet_names())}, or give the path of a fleet's file"
        )
    path = Path(given) if own_file else profiles_directory() / "fleets" / f"{given}.json"
    found = _decode(path)
    devices = tuple(_device(path, entry) for entry in found.devices)
    names = [device.device for device in devices]
    if not devices or len(set(names)) < len(names):
        raise ConfigError(f"{path}: needs devices with different names, has {', '.join(names) or 'none'}")
    return Fleet(devices=devices, links=_links(path, found, names))


def _device(fleet: Path, entry: str | _Named) -> DeviceProfile:
    profile = entry if isinstance(entry, str) else entry.profile
    beside, built_in = fleet.parent / f"{profile}.json", profiles_directory() / "devices" / f"{profile}.json"
    path = beside if beside.is_file() else built_in
    if not path.is_file():
        raise ConfigError(f"{fleet}: device '{profile}' is neither in {beside} nor in {built_in}")
    found = load_profile(path).device
    return found if isinstance(entry, str) else replace(found, device=entry.name, host=entry.name)


def _links(path: Path, found: _FleetFile, names: list[str]) -> tuple[LinkProfile, ...]:
    own = {(link.source, link.target): link for link in found.links}
    unknown = sorted({name for pair in own for name in pair} - set(names))
    if unknown:
        raise ConfigError(f"{path}: a link names {', '.join(unknown)}, which is no device of the fleet")
    links = []
    for source in names:
        for target in names:
            if source == target:
                continue
            figures = own.get((source, target)) or found.link
            if min(figures.round_trip_s, figures.late_s) < 0 or not figures.bytes_per_s > 0:
                raise ConfigError(
                    f"{path}: the link from {source} to {target} needs a rate above 0 and no negative time"
                )
            links.append(
                LinkProfile(
                    source=source,
                    target=target,
                    address="",
                    round_trip_s=figures.round_trip_s,
                    bytes_per_s=figures.bytes_per_s,
                    late_s=figures.late_s,
                )
            )
    return tuple(links)


def _decode(path: Path) -> _FleetFile:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_FleetFile)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: is not a fleet: {exc}") from exc
    if found.version != FLEET_VERSION:
        raise ConfigError(f"{path}: format version {found.version}; this primad reads version {FLEET_VERSION}")
    return found
