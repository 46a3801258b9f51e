"""This device's identity: a CURVE key pair, created at first use and kept in the home folder.

Other devices pin the public half, and the gate asks about it; the secret half never leaves ``identity.json`` (mode
0600) and the memory of our own processes.
"""

from __future__ import annotations

import hashlib
import re
import struct
from base64 import b32encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import zmq
from zmq.utils import z85

from primad.errors import ConfigError
from primad.system.files import alone_with, read_private, write_private

FILE_NAME: Final = "identity.json"
_KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_HEX: Final = re.compile(r"[0-9a-fA-F]{64}")
_CURE: Final = "move it away to get a new identity, and pair this device again"


@dataclass(frozen=True, slots=True)
class Identity:
    """A CURVE key pair in Z85, 40 characters each."""

    public: str
    secret: str = field(repr=False)


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    public: str
    secret: str


def new_identity() -> Identity:
    """Return a new key pair that is not stored."""
    public, secret = zmq.curve_keypair()
    return Identity(public.decode(), secret.decode())


def load_identity(home: Path) -> Identity:
    """Return the identity of the device with this home folder; created at first use.

    Raises ``ConfigError`` for a file that is damaged or cannot be read, and a folder that cannot be written to.
    """
    path = home / FILE_NAME
    data = read_private(path)
    if data is None:
        data = _make(path)
    try:
        stored = msgspec.json.decode(data, type=_Stored)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{path}: is damaged ({exc}); {_CURE}") from exc
    if stored.version != 1:
        raise ConfigError(f"{path}: is of version {stored.version}, this primad knows 1; update it, or {_CURE}")
    if not is_key(stored.secret) or zmq.curve_public(stored.secret.encode()).decode() != stored.public:
        raise ConfigError(f"{path}: is damaged (its keys do not belong together); {_CURE}")
    return Identity(stored.public, stored.secret)


def _make(path: Path) -> bytes:
    """Write a new identity, unless another process of ours has done so meanwhile; return the stored one."""
    with alone_with(path):
        data = read_private(path)
        if data is None:
            made = new_identity()
            data = msgspec.json.encode(_Stored(1, made.public, made.secret)) + b"\n"
            write_private(path, data)
        return data


def is_key(text: str) -> bool:
    """Whether ``text`` has the shape of a public key in Z85."""
    if not _KEY.fullmatch(text):
        return False
    try:
        return len(z85.decode(text)) == 32
    except (ValueError, struct.error):  # five characters that encode more than four bytes hold
        return False


def parse_key(text: str) -> str:
    """Return a public key that a person gave, in Z85 or as 64 hexadecimal digits, as Z85. Raises ``ConfigError``."""
    text = text.strip()
    if _HEX.fullmatch(text):
        return z85.encode(bytes.fromhex(text)).decode()
    if not is_key(text):
        raise ConfigError("--key: not a device key; give the 64 digits that 'primad devices' shows on that device")
    return text


def key_hex(key: str) -> str:
    """Return ``key`` (Z85) as 64 hexadecimal digits, which need no quoting in shells."""
    return z85.decode(key).hex()


def fingerprint(key: str) -> str:
    """Return ``key`` in a form for people to compare: eight groups of four letters and digits, 160 bits of its hash."""
    text = b32encode(hashlib.blake2b(key.encode(), digest_size=20, person=b"primad-finger").digest()).decode().lower()
    return "-".join(text[at : at + 4] for at in range(0, 32, 4))
