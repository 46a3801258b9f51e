"""The connection to another rank of the group, which never blocks: it sends and receives what it can."""

from __future__ import annotations

import socket
from collections import deque

from primad.errors import RankError
from primad.ring.group.frames import FRAME_ROOM, HEADER, TAG_BYTES, Direction, frames_of


class RankPeer:
    """Rank ``rank``, called ``name``, at the other end of ``connection``.

    Frames are sealed one at a time when sent, and opened one at a time when received, straight into their place.
    """

    def __init__(self, rank: int, name: str, connection: socket.socket, sends: Direction, takes: Direction) -> None:
        self.rank, self.name, self.connection = rank, name, connection
        self._sends, self._takes = sends, takes
        connection.setblocking(False)
        self._out: deque[tuple[int, memoryview]] = deque()
        self._in: deque[tuple[int, memoryview]] = deque()
        self._sealing, self._taking = memoryview(bytearray(FRAME_ROOM)), memoryview(bytearray(FRAME_ROOM))
        self._sealed = memoryview(b"")
        self._got = 0

    def send(self, kind: int, content: memoryview) -> None:
        """Send ``content``, whose memory must not change until it ``has_sent``."""
        self._out.extend((kind, frame) for frame in frames_of(content))

    def expect(self, kind: int, into: memoryview) -> None:
        """Expect a message of kind ``kind`` that fills ``into``, after those expected already."""
        self._in.extend((kind, frame) for frame in frames_of(into))

    @property
    def has_sent(self) -> bool:
        """Whether everything has left this process."""
        return not self._out and not self._sealed

    @property
    def has_all(self) -> bool:
        """Whether everything expected has come."""
        return not self._in

    @property
    def due(self) -> int:
        """Number of frames that are expected."""
        return len(self._in)

    def push(self) -> bool:
        """Send what the connection takes; return whether it took anything. Raises ``RankError``."""
        if not self._sealed:
            if not self._out:
                return False
            self._sealed = self._sends.seal(*self._out.popleft(), self._sealing)
        try:
            count = self.connection.send(self._sealed)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise self.error(f"cannot be reached any more: {exc.strerror or exc}") from exc
        self._sealed = self._sealed[count:]
        return True

    def pull(self) -> bool:
        """Receive what has come; return whether anything had. Raises ``RankError``."""
        if not self._in:
            return False
        kind, into = self._in[0]
        end = HEADER.size + len(into) + TAG_BYTES
        try:
            count = self.connection.recv_into(self._taking[self._got : end])
        except BlockingIOError:
            return False
        except OSError as exc:
            raise self.error(f"cannot be reached any more: {exc.strerror or exc}") from exc
        if not count:
            raise self.error("closed its connection")
        self._got += count
        if self._got >= HEADER.size:
            self._open(kind, into, end)
        return True

    def _open(self, kind: int, into: memoryview, end: int) -> None:
        header = bytes(self._taking[: HEADER.size])
        if header != HEADER.pack(kind, len(into)):
            other, size = HEADER.unpack(header)
            raise self.error(f"sent {size} bytes of kind {other} where {len(into)} of kind {kind} were due")
        if self._got == end:
            if not self._takes.open(header, self._taking[HEADER.size : end], into):
                raise self.error("sent a frame that it did not seal")
            self._in.popleft()
            self._got = 0

    def error(self, what: str) -> RankError:
        """The error that this device did ``what``."""
        message = f"{self.name} of this group {what}; the ring forms again without it, or with other shares"
        return RankError(message, self.name)
