"""A daemon's side of a draft process for another device's head: starts it, notifies it, reads its drafts, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from primad.errors import ProtocolError, RingError
from primad.ring.speculation.draft_link import begin_drafting
from primad.ring.speculation.messages import MAX_UNREPORTED_BYTES, Drafted, DraftTask
from primad.system.children.channel import frame
from primad.system.children.spawn import GRACE_S, connected, how_it_ended, read_frame

_decoder = msgspec.msgpack.Decoder(Drafted)


class DraftingProcess:
    """One draft process. ``start`` it, ``notify`` it, read ``drafts`` to the end, ``close`` it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, log: Path) -> DraftingProcess:
        """Start a process whose standard error goes to the file ``log``. Raises ``RingError`` if that fails."""

        def begin(theirs: socket.socket) -> subprocess.Popen[bytes]:
            with log.open("wb") as errors:
                return begin_drafting(theirs, errors)

        return cls(*await connected(begin, "the draft process"))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def notify(self, task: DraftTask) -> None:
        """Send a task without waiting. Raises ``RingError`` if too many earlier bytes are unread."""
        with contextlib.suppress(OSError):
            self._writer.write(frame(task))
        if self._writer.transport.get_write_buffer_size() > MAX_UNREPORTED_BYTES:
            raise RingError("the draft process accepts nothing more")

    async def drafts(self) -> AsyncIterator[Drafted]:
        """Yield its drafts as they come. Never ends without an error: raises ``RingError`` when the process has
        ended."""
        while True:
            try:
                yield _decoder.decode(await read_frame(self._reader))
            except (asyncio.IncompleteReadError, OSError) as exc:
                raise RingError(await self._obituary()) from exc
            except msgspec.DecodeError as exc:
                raise ProtocolError(f"not a message of a draft process: {exc}") from exc

    async def _obituary(self) -> str:
        try:
            code = await asyncio.to_thread(self._process.wait, GRACE_S)
        except subprocess.TimeoutExpired:
            return "the draft process closed its connection"
        return f"the draft process {how_it_ended(code)}"

    async def close(self) -> None:
        """Kill the process, which has no state to save."""
        self._writer.transport.abort()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
