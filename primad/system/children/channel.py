"""The private socket pair between a daemon and its ring process: length-prefixed msgpack frames.

A socket pair needs no port and no file, no other process can connect to it, and each side notices the other's end
immediately, whatever its cause: a ring process never outlives its daemon.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Final, Generic, TypeVar

import msgspec

from primad.errors import ProtocolError
from primad.system.wire import encode

LENGTH: Final = struct.Struct("<I")
MAX_FRAME_BYTES: Final = 64 << 20
_Command = TypeVar("_Command")


def frame(message: msgspec.Struct) -> bytes:
    """``message`` as one frame."""
    body = encode(message)
    return LENGTH.pack(len(body)) + body


def frame_bytes(length: bytes) -> int:
    """The size in a frame's length prefix. Raises ``ProtocolError`` if it is out of bounds."""
    size: int = LENGTH.unpack(length)[0]
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {size} bytes from the other process; at most {MAX_FRAME_BYTES} are allowed")
    return size


class Frames:
    """Received data, cut into the bodies of its frames."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that ``data`` completes. Raises ``ProtocolError`` if a length prefix is too large."""
        if not self._begun and len(data) >= LENGTH.size and frame_bytes(data[: LENGTH.size]) == len(data) - LENGTH.size:
            return [data[LENGTH.size :]]
        self._begun += data
        bodies: list[bytes] = []
        while len(self._begun) >= LENGTH.size:
            end = LENGTH.size + frame_bytes(bytes(self._begun[: LENGTH.size]))
            if len(self._begun) < end:
                break
            bodies.append(bytes(self._begun[LENGTH.size : end]))
            del self._begun[:end]
        return bodies


class RingChannel(Generic[_Command]):
    """The ring process's end: blocking sends, receives that never wait. ``decoder`` decodes what arrives."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self.connection = connection
        self._decoder = decoder
        self._frames = Frames()
        self.is_open = True

    def notify(self, *events: msgspec.Struct) -> None:
        """Send events; when the other end is gone, only ``is_open`` changes."""
        try:
            for event in events:
                self.connection.sendall(frame(event))
        except OSError:
            self.is_open = False

    def commands(self) -> list[_Command]:
        """The commands that have arrived; call it when the connection is readable. ``is_open`` turns False at the end
        of the other."""
        try:
            data = self.connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            return []
        try:
            return [self._decoder.decode(body) for body in self._frames.feed(data)]
        except msgspec.DecodeError as exc:
            raise ProtocolError(f"not a command of the other process: {exc}") from exc
