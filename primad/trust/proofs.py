"""Counts the proofs of a code that this device gave, in ``proofs.json`` in the home folder.

An impostor of the inviter can test one guess with each proof, and people retype a code that did not work, so the count
outlives the command. It is written before the proof is sent. Codes are stored as hashes under this device's secret key.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from primad.errors import ClusterError, ConfigError
from primad.system.files import alone_with, read_private, write_private
from primad.trust.identity import Identity
from primad.trust.pairing import MAX_TRIES
from primad.trust.words import Code

FILE_NAME: Final = "proofs.json"
MAX_CODES: Final = 64
"""The number of remembered codes, the latest ones; only the owner of this device enters them."""


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    proofs: dict[str, int]


class Proofs:
    """The proofs of ``code`` by the device with this home folder and identity."""

    def __init__(self, home: Path, identity: Identity, code: Code) -> None:
        self._path = home / FILE_NAME
        self._code = code
        self._name = hashlib.blake2b(str(code).encode(), key=identity.secret.encode(), digest_size=16).hexdigest()

    def check(self) -> None:
        """Raise ``ClusterError`` if no more proofs of the code are allowed, ``ConfigError`` for a damaged file."""
        self._check(self._read())

    def count(self) -> None:
        """Count a proof that is about to be sent. Raises like ``check``, and ``ConfigError`` if it cannot be stored."""
        with alone_with(self._path):
            proofs = self._read()
            self._check(proofs)
            proofs[self._name] = proofs.pop(self._name, 0) + 1
            kept = dict(list(proofs.items())[-MAX_CODES:])
            write_private(self._path, msgspec.json.encode(_Stored(1, kept)) + b"\n")

    def _check(self, proofs: dict[str, int]) -> None:
        if proofs.get(self._name, 0) >= MAX_TRIES:
            raise ClusterError(
                f"--code {self._code.number}-...: was tried {MAX_TRIES} times without success, so it is "
                "invalid here; get a new one with 'primad pair' on the device that showed it"
            )

    def _read(self) -> dict[str, int]:
        data = read_private(self._path)
        try:
            stored = _Stored(1, {}) if data is None else msgspec.json.decode(data, type=_Stored)
        except msgspec.MsgspecError as exc:
            raise ConfigError(f"{self._path}: is damaged ({exc}); move it away, and pair with a new code") from exc
        if stored.version != 1:
            raise ConfigError(f"{self._path}: is of version {stored.version}, this primad knows 1; update it")
        return stored.proofs
