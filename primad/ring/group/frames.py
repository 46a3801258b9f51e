"""Sealed frames between two ranks: an AEAD with a key for each direction of each connection.

A frame is its kind and size, which are authenticated, and its sealed content. Its nonce is its number on the
connection, so repeated, missing or reordered frames do not open. Keys are derived from the group's key, which came over
the control link, and from both ranks' cleartext hellos, each with its own salt: no key is used twice, and a peer with
another group's key, or one that changed a hello, cannot open the first frame.
"""

from __future__ import annotations

import math
import secrets
import struct
from functools import cache
from hashlib import blake2b
from time import perf_counter
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from primad.ring.messages import GROUP_KEY_BYTES

KEY_BYTES: Final = GROUP_KEY_BYTES
TAG_BYTES: Final = 16
FRAME_BYTES: Final = 1 << 18
"""Larger contents are sent in several frames, so that sealing, sending and opening overlap."""
HEADER: Final = struct.Struct("<II")
FRAME_ROOM: Final = HEADER.size + FRAME_BYTES + TAG_BYTES
_HELLO: Final = struct.Struct("<8sBBBx16s")
HELLO_BYTES: Final = _HELLO.size
_MAGIC: Final = b"primadG1"
_TRIES: Final = 5
"""Trials, of which the fastest counts: another program may take the core in between."""
_PERSON: Final = b"primad group"
PROOF, PART, TOTAL, LENGTH, LOGITS, STEP, VALUES = range(1, 8)
"""Kinds of frames: the proof of the key, a part of a sum, a total, the length of what follows, logits or a step; values
that the first rank has for all."""


class RankHello(NamedTuple):
    """A rank's cleartext hello: its number, the number of ranks, and whether AES is faster on its processor."""

    rank: int
    ranks: int
    prefers_aes: bool
    salt: bytes

    @classmethod
    def of(cls, rank: int, ranks: int) -> RankHello:
        """Make a new hello."""
        return cls(rank, ranks, prefers_aes(), secrets.token_bytes(16))

    def packed(self) -> bytes:
        """The hello as it is sent."""
        return _HELLO.pack(_MAGIC, self.rank, self.ranks, self.prefers_aes, self.salt)


def hello_of(data: bytes) -> RankHello | None:
    """Decode a hello; None if ``data`` is not one."""
    magic, rank, ranks, aes, salt = _HELLO.unpack(data)
    return RankHello(rank, ranks, bool(aes), salt) if magic == _MAGIC and aes <= 1 and rank < ranks else None


@cache
def prefers_aes() -> bool:
    """Whether this processor does AES faster than ChaCha20, as it does if it has instructions for it."""
    content, key = bytes(FRAME_BYTES), bytes(KEY_BYTES)
    ciphers: tuple[AESGCM | ChaCha20Poly1305, ...] = AESGCM(key), ChaCha20Poly1305(key)
    times = [math.inf, math.inf]
    for _ in range(_TRIES):
        for at, cipher in enumerate(ciphers):
            began = perf_counter()
            cipher.encrypt(bytes(12), content, None)
            times[at] = min(times[at], perf_counter() - began)
    return times[0] < times[1]


class Direction:
    """One direction of a connection: seals frames on one side, opens them on the other."""

    def __init__(self, key: bytes, sender: RankHello, receiver: RankHello) -> None:
        assert len(key) == KEY_BYTES
        both = sorted((sender.packed(), receiver.packed()))
        derived = blake2b(b"".join([*both, sender.packed()]), key=key, person=_PERSON, digest_size=KEY_BYTES).digest()
        aes = sender.prefers_aes and receiver.prefers_aes
        self._cipher: AESGCM | ChaCha20Poly1305 = AESGCM(derived) if aes else ChaCha20Poly1305(derived)
        self._number = 0

    def _nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(12, "little")

    def seal(self, kind: int, content: memoryview | bytes, room: memoryview) -> memoryview:
        """Seal the next frame, in ``room`` (at least ``FRAME_ROOM``)."""
        header, size = HEADER.pack(kind, len(content)), HEADER.size + len(content) + TAG_BYTES
        room[: HEADER.size] = header
        self._cipher.encrypt_into(self._nonce(), content, header, room[HEADER.size : size])
        return room[:size]

    def open(self, header: bytes, sealed: memoryview, into: memoryview) -> bool:
        """Open the next frame into ``into``; return False if it is not what the sender sealed."""
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, header, into)
        except InvalidTag:
            return False
        return True


def frames_of(content: memoryview) -> list[memoryview]:
    """Split a message into the contents of its frames."""
    return [content[at : at + FRAME_BYTES] for at in range(0, len(content), FRAME_BYTES)] or [content]
