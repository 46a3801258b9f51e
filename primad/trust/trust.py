"""The devices that this one trusts: ``trust.json`` in the home folder, and the daemons of the same user on this
machine.

Trust belongs to a key, a name is only a label; no two devices of the file have the same one. A device is trusted as a
head, which may give this one work and introduce others to it, or as a worker, which may do what a ring needs: fetch
layers and KV cache, and measure links. Only the owner of this device changes the file, so no other device can fill it:
devices that a head introduces are kept in memory, with that head, by the worker's daemon.

The command line and a daemon may both write the file, so each change is read, made and written under a lock; every
query checks whether the file was replaced, so that a change by another process acts at once. A revoked key stays
revoked, even if a head introduces it, until its device is paired again or added by hand.

In a file of version 1 there were no roles: devices that the owner paired or added by hand count as heads, as before.
Entries that heads wrote are ignored: heads introduce devices whenever they connect.

A change waits for the disk and may be made in a thread; concurrent queries use the file's previous content.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import msgspec

from primad.errors import ConfigError, printable
from primad.settings.config import NAME
from primad.system.files import alone_with, read_private, write_private
from primad.trust.identity import Identity, is_key
from primad.trust.labels import free_name
from primad.trust.local_trust import LocalTrust, default_folder

logger = logging.getLogger(__name__)

FILE_NAME: Final = "trust.json"
VERSION: Final = 2
TrustRole = Literal["head", "worker"]
HEAD: Final = "head"
WORKER: Final = "worker"
PAIRED: Final = "paired"
BY_HAND: Final = "by hand"
LOCAL: Final = "same user, same machine"
MAX_DEVICES: Final = 1024
MAX_REVOKED: Final = 4096
_CURE: Final = "correct it, or move it away and pair the devices again"

_Stamp = tuple[int, int, int] | None
"""Identifies a version of a file; None without a file."""


@dataclass(frozen=True, slots=True)
class TrustedDevice:
    """A device that is, or was, trusted as ``role``: ``key`` in Z85, ``how`` a phrase for people, ``since`` the UTC
    time."""

    device: str
    key: str
    how: str
    since: str
    role: TrustRole = WORKER


@dataclass(frozen=True, slots=True)
class _Known:
    """The file's content by key; replaced as a whole, so that every thread sees one version of it."""

    trusted: dict[str, TrustedDevice]
    revoked: dict[str, TrustedDevice]
    stamp: _Stamp


class _Versioned(msgspec.Struct, frozen=True):
    version: int


class _Stored(_Versioned, frozen=True, forbid_unknown_fields=True):
    trusted: list[TrustedDevice]
    revoked: list[TrustedDevice]


def trusted_now(device: str, key: str, how: str, role: TrustRole = WORKER) -> TrustedDevice:
    """Return a device to trust. Raises ``ConfigError`` for an invalid name or key."""
    if not NAME.fullmatch(device):
        raise ConfigError(
            f"{printable(device, 70)!r} is not a device name; use up to 62 letters, digits, '.', '_' and '-'"
        )
    if not is_key(key):
        raise ConfigError(f"the key of {device} is not a device key; give the one that 'primad devices' shows there")
    return TrustedDevice(device, key, how, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), role)


class TrustStore:
    """Queries and changes trust.

    ``local`` are the daemons of this user on this machine; by default those of the user's own folder. Raises
    ``ConfigError`` for a damaged file.
    """

    def __init__(self, home: Path, identity: Identity, local: LocalTrust | None = None) -> None:
        self._path = home / FILE_NAME
        self._own = identity.public
        self._local = local if local is not None else LocalTrust(default_folder())
        self._known = self._read()

    def trusts(self, key: str) -> bool:
        """Whether the device with ``key`` is admitted now. Our own key is trusted: only our processes can prove it."""
        known = self._refresh()
        return key not in known.revoked and (key in known.trusted or self._is_ours(key))

    def is_head(self, key: str) -> bool:
        """Whether the device with ``key`` may give this one work. Daemons of this user may: they can read our
        secret."""
        known = self._refresh()
        if key in known.revoked:
            return False
        entry = known.trusted.get(key)
        return (entry is not None and entry.role == HEAD) or self._is_ours(key)

    def name_of(self, key: str) -> str | None:
        """Return the name under which the device with ``key`` is trusted, or None."""
        return next((each.device for each in self._held(self._refresh()) if each.key == key), None)

    def _is_ours(self, key: str) -> bool:
        return key == self._own or (is_key(key) and self._local.knows(key))

    def entries(self) -> list[TrustedDevice]:
        """All trusted devices, by name: those of the file, and the daemons of this user that run here.

        No two of them have the same name.
        """
        return sorted(self._held(self._refresh()), key=lambda each: each.device)

    def revoked(self) -> frozenset[str]:
        """Return the revoked keys."""
        return frozenset(self._refresh().revoked)

    def lost(self) -> list[TrustedDevice]:
        """Return all revoked devices, by name."""
        return sorted(self._refresh().revoked.values(), key=lambda each: (each.device, each.key))

    def add(self, device: TrustedDevice) -> TrustedDevice:
        """Trust ``device``, even if it was revoked before; returns the stored form.

        If its name is taken, a number is appended. A former head stays one when it is paired again. Raises
        ``ConfigError``.
        """
        trusted_now(device.device, device.key, device.how)
        if device.key == self._own:
            raise ConfigError(f"the key of {device.device} is this device's own; give the other one's")
        with self._changing() as known:
            known.revoked.pop(device.key, None)
            before = known.trusted.get(device.key)
            if before is not None and before.role == HEAD and device.how == PAIRED:
                device = replace(device, role=HEAD)
            taken = {each.device for each in known.trusted.values() if each.key != device.key}
            device = replace(device, device=free_name(device.device, taken))
            if before is None and len(known.trusted) >= MAX_DEVICES:
                raise ConfigError(f"{self._path}: has {MAX_DEVICES} devices, which is the maximum; revoke some first")
            known.trusted[device.key] = device
        return device

    def is_known(self, name_or_key: str) -> bool:
        """Whether this is a key, or the name of a trusted device."""
        return is_key(name_or_key) or any(each.device == name_or_key for each in self.entries())

    def revoke(self, name_or_key: str) -> list[TrustedDevice]:
        """Stop trusting the device of that name or key; return the devices that lost trust.

        A key need not be known: it then cannot be introduced. Raises ``ConfigError`` for an unknown name.
        """
        with self._changing() as known:
            gone = [each for each in self._held(known) if name_or_key in (each.device, each.key)]
            if not gone and is_key(name_or_key) and name_or_key != self._own:
                gone = [known.revoked.get(name_or_key) or trusted_now("unknown", name_or_key, BY_HAND)]
            if not gone:
                raise ConfigError(
                    f"no device {printable(name_or_key, 70)!r} is trusted; 'primad devices' lists them. "
                    "One that a head introduced is revoked by its key, which 'primad devices --json' shows"
                )
            if len(known.revoked) + len(gone) > MAX_REVOKED:
                raise ConfigError(f"{self._path}: has {len(known.revoked)} revoked keys, which is the maximum; {_CURE}")
            for device in gone:
                known.trusted.pop(device.key, None)
                known.revoked[device.key] = device
        return gone

    @contextlib.contextmanager
    def announce_locally(self, device: str) -> Iterator[None]:
        """Have the other daemons of this user on this machine trust this one inside this context."""
        with self._local.announce(device, self._own):
            yield

    def _held(self, known: _Known) -> list[TrustedDevice]:
        """Return the file's devices and this user's daemons that run here and were not revoked; names are unique."""
        left_out = known.trusted.keys() | known.revoked.keys() | {self._own}
        here = [TrustedDevice(name, key, LOCAL, "", HEAD) for name, key in self._local.devices() if key not in left_out]
        return _with_free_names([*known.trusted.values(), *here])

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Known]:
        """Changes inside this context are written, and apply from then on; earlier changes of others are kept."""
        with alone_with(self._path):
            self._known = self._read()
            changed = _Known(dict(self._known.trusted), dict(self._known.revoked), None)
            yield changed
            stored = _Stored(VERSION, list(changed.trusted.values()), list(changed.revoked.values()))
            write_private(self._path, msgspec.json.format(msgspec.json.encode(stored), indent=1) + b"\n")
            self._known = self._read()

    def _refresh(self) -> _Known:
        """Return the file's content, read again if it was replaced. A damaged file changes nothing and costs one log
        line."""
        known = self._known
        stamp = _stamp(self._path)
        if stamp == known.stamp:
            return known
        try:
            known = self._read()
        except ConfigError as exc:
            known = replace(known, stamp=stamp)
            logger.warning("trust is unchanged: %s", exc)
        self._known = known
        return known

    def _read(self) -> _Known:
        stamp = _stamp(self._path)
        data = read_private(self._path)
        trusted, revoked = _parse(self._path, data) if data is not None else ([], [])
        return _Known({each.key: each for each in trusted}, {each.key: each for each in revoked}, stamp)


def _stamp(path: Path) -> _Stamp:
    try:
        found = os.stat(path)  # noqa: PTH116 - called with every message, and Path.stat is four times as slow
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _parse(path: Path, data: bytes) -> tuple[list[TrustedDevice], list[TrustedDevice]]:
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version not in (1, VERSION):
            raise ConfigError(f"{path}: is of version {version}, this primad knows {VERSION}; update it")
        stored = msgspec.json.decode(data, type=_Stored)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{path}: is damaged ({exc}); {_CURE}") from exc
    if len(stored.trusted) > MAX_DEVICES or len(stored.revoked) > MAX_REVOKED:
        raise ConfigError(f"{path}: has more devices than {MAX_DEVICES}, or revoked keys than {MAX_REVOKED}; {_CURE}")
    for each in (*stored.trusted, *stored.revoked):
        if not NAME.fullmatch(each.device) or not is_key(each.key):
            raise ConfigError(f"{path}: {printable(each.device, 70)!r} has an invalid name or key; {_CURE}")
    trusted, revoked = (stored.trusted, stored.revoked) if version == VERSION else _of_version_1(stored)
    return _with_free_names(trusted), revoked


def _of_version_1(stored: _Stored) -> tuple[list[TrustedDevice], list[TrustedDevice]]:
    """Return the owner's entries, without those that heads wrote."""
    trusted = [replace(each, role=HEAD) for each in stored.trusted if not each.how.startswith("introduced by ")]
    return trusted, [each for each in stored.revoked if not each.how.startswith("revoked by ")]


def _with_free_names(devices: Iterable[TrustedDevice]) -> list[TrustedDevice]:
    """Return ``devices``, each with a unique name."""
    found: dict[str, TrustedDevice] = {}
    for device in devices:
        name = free_name(device.device, found)
        found[name] = replace(device, device=name)
    return list(found.values())
