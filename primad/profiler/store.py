"""Device profiles as files: measured here, published by others, or filled in by hand (``how`` says which).

The format is JSON: ``version``, ``measured`` (UTC date), ``how`` and ``device``, the fields of ``DeviceProfile`` with their
units in their names. All values of a file are checked before use.
"""

from __future__ import annotations

import json
import time
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from halda import DeviceProfile
from primad.errors import ConfigError, printable
from primad.settings.old_names import KEYS
from primad.settings.profiles import Implausible, check_profile, shown

VERSION: Final = 2
MAX_FILE_BYTES: Final = 1 << 20
_NEW_KEYS: Final = {old: new for new, old in KEYS.items()}
_MAY_LACK: Final = frozenset(
    {
        "prefill_offload",
        "disk_id",
        "routing",
        "attention_flop_per_s",
        "cores",
        "other_gpus",
        "context_bytes",
        "pci",
        "exact_states",
    }
)
"""Fields that older files may lack, since they were added later."""
_CURE: Final = "correct it there, or write the file again with 'primad profile --remeasure --save FILE'"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """The content of a file."""

    version: int
    measured: str
    how: str
    device: DeviceProfile


def utc_now() -> str:
    """The time of a measurement as it is stored."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def encode_profile(profile: DeviceProfile, how: str, measured: str | None = None) -> bytes:
    """``profile`` as it is stored; ``measured`` is the UTC time, now when left out."""
    stored = StoredProfile(version=VERSION, measured=measured or utc_now(), how=how, device=profile)
    return msgspec.json.format(msgspec.json.encode(stored), indent=2) + b"\n"


def save_profile(path: Path, profile: DeviceProfile, how: str, measured: str | None = None) -> None:
    """Write ``profile`` to ``path``. Raises ``ConfigError`` when that cannot be done."""
    try:
        path.write_bytes(encode_profile(profile, how, measured))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be written: {exc.strerror or exc}; choose another file") from exc


def load_profiles(*paths: Path) -> list[DeviceProfile]:
    """The profiles in ``paths``: files, or folders of ``.json`` files; each device once.

    Raises ``ConfigError`` that names the file, the field and the value that cannot be.
    """
    found: dict[str, Path] = {}
    profiles = []
    for path in _files(paths):
        profile = load_profile(path).device
        if profile.device in found:
            raise ConfigError(
                f"{path}: device.device is {profile.device!r}, as in {found[profile.device]}; give each device its own name"
            )
        found[profile.device] = path
        profiles.append(profile)
    return profiles


def _files(paths: tuple[Path, ...]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            files = sorted(path.glob("*.json"))
            if not files:
                raise ConfigError(f"{path}: holds no .json file; give a profile or a folder of them")
            yield from files
        else:
            yield path


def load_profile(path: Path) -> StoredProfile:
    """The profile in the file ``path``. Raises ``ConfigError`` that names the file, the field and the value."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}; give a profile of a device") from exc
    try:
        return parse_profile(data)
    except Implausible as exc:
        raise ConfigError(f"{path}: {exc}; {_CURE}") from exc


def parse_profile(data: bytes) -> StoredProfile:
    """The profile in ``data``. Raises ``Implausible``."""
    raw = _json(data)
    if not isinstance(raw, dict):
        raise Implausible("the file", _shown(raw), "expected an object with version, measured, how and device")
    if raw.get("version") != VERSION or isinstance(raw.get("version"), bool):
        raise Implausible("version", _shown(raw.get("version")), f"this primad reads version {VERSION}")
    _check_keys(raw, StoredProfile, "")
    try:
        stored = msgspec.convert(raw, StoredProfile)
    except (msgspec.ValidationError, OverflowError) as exc:
        raise _of_wrong_type(raw, str(exc)) from exc
    _check_measured(stored)
    try:
        check_profile(stored.device)
    except Implausible as exc:
        exc.args = (f"device.{exc.args[0]}",)
        raise
    return stored


def _json(data: bytes) -> object:
    """Decode with the standard library, which accepts NaN and infinity, so that an error can name their place."""
    if len(data) > MAX_FILE_BYTES:
        raise Implausible("the file", "too large", f"a profile has at most {MAX_FILE_BYTES} bytes")

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        pairs = [(_NEW_KEYS.get(name, name), value) for name, value in pairs]
        content = dict(pairs)
        if len(content) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise Implausible("the file", "ambiguous", f"the field '{printable(twice, 70)}' stands twice in one object")
        return content

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as exc:
        raise Implausible("the file", "not JSON", printable(exc, 120)) from exc


def _check_keys(raw: object, kind: Any, path: str) -> None:
    """Check recursively that ``raw`` has every required field of the dataclass ``kind``, and no unknown field."""
    if not is_dataclass(kind) or not isinstance(raw, dict):
        return
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        if field.name not in raw and field.name not in _MAY_LACK:
            raise Implausible(f"{path}{field.name}", "missing", "every field is required")
    for key, value in raw.items():
        if key not in hints:
            known = ", ".join(field.name for field in fields(kind))
            raise Implausible(f"{path}{printable(key, 70)}", "unknown", f"the fields there are {known}")
        for inner in _dataclasses_in(hints[key]):
            if isinstance(value, list):
                for number, item in enumerate(value):
                    _check_keys(item, inner, f"{path}{key}[{number}].")
            else:
                _check_keys(value, inner, f"{path}{key}.")


def _dataclasses_in(hint: Any) -> list[Any]:
    if is_dataclass(hint):
        return [hint]
    if typing.get_origin(hint) in (tuple, types.UnionType, typing.Union):
        return [item for item in typing.get_args(hint) if is_dataclass(item)]
    return []


def _of_wrong_type(raw: object, why: str) -> Implausible:
    """msgspec says "Expected `int`, got `str` - at `$.device.cpu.speeds[0].type`"; find the value that stands there."""
    what, _, place = why.partition(" - at `$.")
    path = place.rstrip("`")
    value: Any = raw
    for part in path.replace("[", ".[").split("."):
        if isinstance(value, list) and part.startswith("["):
            value = value[int(part.strip("[]"))]
        elif isinstance(value, dict) and part in value:
            value = value[part]
    return Implausible(path or "the file", _shown(value), what[:1].lower() + what[1:].replace("`", ""))


def _shown(value: object) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, dict | list) else shown(value)


def _check_measured(stored: StoredProfile) -> None:
    try:
        datetime.fromisoformat(stored.measured)
    except ValueError as exc:
        raise Implausible("measured", shown(stored.measured), "expected a UTC date such as 2025-01-31") from exc
    if not stored.how.strip() or len(stored.how) > 2000:
        raise Implausible("how", shown(stored.how), "say in 1 to 2000 characters how it was measured")
