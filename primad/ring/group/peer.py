"""The connection to another rank of the group, which never blocks: it sends and takes what it can."""

from __future__ import annotations

import socket
from collections import deque
from typing import Final

from primad.errors import RankError
from primad.ring.group.frames import HEADER, TAG_BYTES, Direction, frame_sizes

_SPARE: Final = HEADER.size + TAG_BYTES


class RankPeer:
    """Rank ``rank``, called ``name``, at the other end of ``connection``."""

    def __init__(self, rank: int, name: str, connection: socket.socket, sends: Direction, takes: Direction) -> None:
        self.rank, self.name, self.connection = rank, name, connection
        self._sends, self._takes = sends, takes
        connection.setblocking(False)
        self._out: deque[tuple[int, memoryview]] = deque()
        self._sealed = memoryview(b"")
        self._buffer = bytearray()
        self._into = memoryview(b"")
        self._kind = 0
        self._sizes: list[int] = []
        self._frame = self._got = self._at = self._end = 0

    def send(self, kind: int, content: memoryview) -> None:
        """Send ``content``, whose memory must not change until it ``has_sent``."""
        at = 0
        for size in frame_sizes(len(content)):
            self._out.append((kind, content[at : at + size]))
            at += size

    def expect(self, kind: int, into: memoryview) -> None:
        """What comes next is as large as ``into``, where it goes."""
        self._kind, self._into, self._sizes = kind, into, frame_sizes(len(into))
        self._frame = self._got = self._at = 0
        self._end = len(into) + len(self._sizes) * _SPARE
        if len(self._buffer) < self._end:
            self._buffer = bytearray(self._end)

    @property
    def has_sent(self) -> bool:
        """Whether all is out of this process."""
        return not self._out and not self._sealed

    @property
    def has_all(self) -> bool:
        """Whether what was expected has come."""
        return self._frame == len(self._sizes)

    def push(self) -> bool:
        """Send what the connection takes; whether that was something. Raises ``RankError``."""
        if not self._sealed:
            if not self._out:
                return False
            self._sealed = memoryview(self._sends.seal(*self._out.popleft()))
        try:
            count = self.connection.send(self._sealed)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise self.error(f"cannot be reached any more: {exc.strerror or exc}") from exc
        self._sealed = self._sealed[count:]
        return True

    def pull(self) -> bool:
        """Take what has come; whether that was something. Raises ``RankError``."""
        if self.has_all:
            return False
        try:
            count = self.connection.recv_into(memoryview(self._buffer)[self._got : self._end])
        except BlockingIOError:
            return False
        except OSError as exc:
            raise self.error(f"cannot be reached any more: {exc.strerror or exc}") from exc
        if not count:
            raise self.error("closed its connection")
        self._got += count
        self._open()
        return True

    def _open(self) -> None:
        while not self.has_all:
            size, begin = self._sizes[self._frame], self._at + self._frame * _SPARE
            if self._got < begin + HEADER.size:
                return
            header = bytes(self._buffer[begin : begin + HEADER.size])
            if HEADER.unpack(header) != (self._kind, size):
                kind, other = HEADER.unpack(header)
                raise self.error(f"sent {other} bytes of kind {kind} where {size} of kind {self._kind} were due")
            end = begin + _SPARE + size
            if self._got < end:
                return
            content = self._takes.open(header, memoryview(self._buffer)[begin + HEADER.size : end])
            if content is None:
                raise self.error("sent what it did not seal")
            self._into[self._at : self._at + size] = content
            self._at += size
            self._frame += 1

    def error(self, what: str) -> RankError:
        """That this device did ``what``."""
        message = f"{self.name} of this group {what}; the ring forms anew without it, or with other shares"
        return RankError(message, self.name)
