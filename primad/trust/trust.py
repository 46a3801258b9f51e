"""Whom this device trusts: ``trust.json`` in the home folder, and the daemons of the same user on this machine.

Trust is in a key, a name is only how people call it. The command line and a daemon may both write the file, so each change
is read, made and written under a lock; every question looks whether the file was replaced, so that a change by another
process acts at once. A key that was revoked stays revoked, whoever introduces it, until its device is paired with again or
added by hand.

A change waits for the disk and may be made in a thread: who asks meanwhile is answered from what stands in the file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from primad.errors import ConfigError, printable
from primad.settings.config import NAME
from primad.system.private_file import alone_with, read_private, write_private
from primad.trust.identity import Identity, is_key
from primad.trust.local_trust import LocalTrust, default_folder

logger = logging.getLogger(__name__)

FILE_NAME: Final = "trust.json"
PAIRED: Final = "paired"
BY_HAND: Final = "by hand"
LOCAL: Final = "same user, same machine"
MAX_DEVICES: Final = 1024
MAX_REVOKED: Final = 4096
_CURE: Final = "correct it, or move it away and pair the devices again"

_Stamp = tuple[int, int, int] | None
"""What tells one version of a file from the next; None where there is none."""


@dataclass(frozen=True, slots=True)
class TrustedDevice:
    """A device that is trusted, or was: ``key`` in Z85, ``how`` one phrase for people, ``since`` the UTC time."""

    device: str
    key: str
    how: str
    since: str


@dataclass(frozen=True, slots=True)
class _Known:
    """What was read of the file, by key; replaced as a whole, so that every thread sees one version of it."""

    trusted: dict[str, TrustedDevice]
    revoked: dict[str, TrustedDevice]
    stamp: _Stamp


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    trusted: list[TrustedDevice]
    revoked: list[TrustedDevice]


def trusted_now(device: str, key: str, how: str) -> TrustedDevice:
    """A device that is trusted from now on. Raises ``ConfigError`` for what is no name or no key."""
    if not NAME.fullmatch(device):
        raise ConfigError(
            f"{printable(device, 70)!r} is no device name; use up to 62 letters, digits, '.', '_' and '-'"
        )
    if not is_key(key):
        raise ConfigError(f"the key of {device} is no device key; give the one that 'primad devices' shows there")
    return TrustedDevice(device, key, how, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


class TrustStore:
    """Answers whom to trust, and changes the answer.

    ``local`` are the daemons of this user on this machine; those of the user's own folder when left out.
    Raises ``ConfigError`` for a damaged file.
    """

    def __init__(self, home: Path, identity: Identity, local: LocalTrust | None = None) -> None:
        self._path = home / FILE_NAME
        self._own = identity.public
        self._local = local if local is not None else LocalTrust(default_folder())
        self._known = self._read()

    def trusts(self, key: str) -> bool:
        """Whether the device with ``key`` may come in now. Our own key is trusted: only our processes can prove it."""
        known = self._refresh()
        if key in known.revoked:
            return False
        return key == self._own or key in known.trusted or (is_key(key) and self._local.knows(key))

    def entries(self) -> list[TrustedDevice]:
        """All that are trusted, by name: those of the file, and the daemons of this user that run here."""
        known = self._refresh()
        return sorted((self._others_here(known) | known.trusted).values(), key=lambda each: (each.device, each.key))

    def revoked(self) -> frozenset[str]:
        """The keys that were revoked."""
        return frozenset(self._refresh().revoked)

    def lost(self) -> list[TrustedDevice]:
        """All that were revoked, by name."""
        return sorted(self._refresh().revoked.values(), key=lambda each: (each.device, each.key))

    def add(self, device: TrustedDevice) -> None:
        """Trust ``device``; paired or by hand also when it was revoked before. Raises ``ConfigError``."""
        trusted_now(device.device, device.key, device.how)
        if device.key == self._own:
            raise ConfigError(f"the key of {device.device} is this device's own; give the other one's")
        with self._changing() as known:
            if device.how in (PAIRED, BY_HAND):
                known.revoked.pop(device.key, None)
            if device.key not in known.revoked:
                self._put(known, device)

    def introduce(self, devices: Iterable[tuple[str, str]], by: str) -> None:
        """Trust the (name, key) that device ``by`` vouches for, except those known here, revoked here or malformed."""
        news = [
            trusted_now(device, key, f"introduced by {by}")
            for device, key in devices
            if NAME.fullmatch(device) and is_key(key) and key != self._own
        ]
        known = self._refresh()
        if all(device.key in known.trusted or device.key in known.revoked for device in news):
            return
        with self._changing() as known:
            for device in news:
                if device.key not in known.trusted and device.key not in known.revoked:
                    self._put(known, device)

    def revoke(self, name_or_key: str) -> list[TrustedDevice]:
        """Trust none of that name, or the one with that key, any more; returns who lost it.

        A key need not be known: it is kept from ever being introduced. Raises ``ConfigError`` for a name that nobody has.
        """
        with self._changing() as known:
            held = self._others_here(known) | known.trusted
            gone = [each for each in held.values() if name_or_key in (each.device, each.key)]
            if not gone and is_key(name_or_key) and name_or_key != self._own:
                gone = [known.revoked.get(name_or_key) or trusted_now("unknown", name_or_key, BY_HAND)]
            if not gone:
                raise ConfigError(f"no device {printable(name_or_key, 70)!r} is trusted; 'primad devices' lists them")
            self._put_out(known, gone)
        return gone

    def withdraw(self, keys: Iterable[str], by: str) -> list[TrustedDevice]:
        """Revoke those of ``keys`` that are not revoked yet, because device ``by`` has done so; returns who lost it.

        Malformed keys and our own are left out. Raises ``ConfigError`` when that cannot be kept.
        """
        wanted = {key for key in keys if is_key(key) and key != self._own}
        if wanted <= self._refresh().revoked.keys():
            return []
        with self._changing() as known:
            gone = [
                known.trusted.get(key) or trusted_now("unknown", key, f"revoked by {by}")
                for key in sorted(wanted - known.revoked.keys())
            ]
            self._put_out(known, gone)
        return gone

    @contextlib.contextmanager
    def announce_locally(self, device: str) -> Iterator[None]:
        """Let the other daemons of this user on this machine trust this one while inside."""
        with self._local.announce(device, self._own):
            yield

    def _others_here(self, known: _Known) -> dict[str, TrustedDevice]:
        """The daemons of this user that run here, by key; not those that were revoked, nor this one."""
        left_out = known.revoked.keys() | {self._own}
        here = ((name, key) for name, key in self._local.devices() if key not in left_out)
        return {key: TrustedDevice(name, key, LOCAL, "") for name, key in here}

    def _put(self, known: _Known, device: TrustedDevice) -> None:
        if device.key not in known.trusted and len(known.trusted) >= MAX_DEVICES:
            raise ConfigError(f"{self._path}: holds {MAX_DEVICES} devices, which is the most; revoke some first")
        known.trusted[device.key] = device

    def _put_out(self, known: _Known, devices: list[TrustedDevice]) -> None:
        if len(known.revoked) + len(devices) > MAX_REVOKED:
            raise ConfigError(f"{self._path}: holds {len(known.revoked)} revoked keys, which is the most; {_CURE}")
        for device in devices:
            known.trusted.pop(device.key, None)
            known.revoked[device.key] = device

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Known]:
        """What is changed inside is written, and counts from then on; what others wrote before is kept."""
        with alone_with(self._path):
            self._known = self._read()
            changed = _Known(dict(self._known.trusted), dict(self._known.revoked), None)
            yield changed
            stored = _Stored(1, list(changed.trusted.values()), list(changed.revoked.values()))
            write_private(self._path, msgspec.json.format(msgspec.json.encode(stored), indent=1) + b"\n")
            self._known = self._read()

    def _refresh(self) -> _Known:
        """What stands in the file, read again if it is another one. A damaged one changes nothing and costs one log line."""
        known = self._known
        stamp = _stamp(self._path)
        if stamp == known.stamp:
            return known
        try:
            known = self._read()
        except ConfigError as exc:
            known = replace(known, stamp=stamp)
            logger.warning("trust is as it was before: %s", exc)
        self._known = known
        return known

    def _read(self) -> _Known:
        stamp = _stamp(self._path)
        data = read_private(self._path)
        trusted, revoked = _parse(self._path, data) if data is not None else ([], [])
        return _Known({each.key: each for each in trusted}, {each.key: each for each in revoked}, stamp)


def _stamp(path: Path) -> _Stamp:
    try:
        found = os.stat(path)  # noqa: PTH116 - asked with every message, and a Path's is four times as slow
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _parse(path: Path, data: bytes) -> tuple[list[TrustedDevice], list[TrustedDevice]]:
    try:
        stored = msgspec.json.decode(data, type=_Stored)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{path}: is damaged ({exc}); {_CURE}") from exc
    if stored.version != 1:
        raise ConfigError(f"{path}: is of version {stored.version}, this primad knows 1; update it")
    if len(stored.trusted) > MAX_DEVICES or len(stored.revoked) > MAX_REVOKED:
        raise ConfigError(f"{path}: holds more devices than {MAX_DEVICES}, or revoked keys than {MAX_REVOKED}; {_CURE}")
    for each in (*stored.trusted, *stored.revoked):
        if not NAME.fullmatch(each.device) or not is_key(each.key):
            raise ConfigError(f"{path}: {printable(each.device, 70)!r} has a name or a key that cannot be; {_CURE}")
    return stored.trusted, stored.revoked
