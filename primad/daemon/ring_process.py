"""The daemon's side of a ring process: starts it, exchanges messages with it, notices its end, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import msgspec

from primad.errors import PrimadError, ProtocolError, RingError, WeightsError
from primad.ring.messages import RingBroken, RingCommand, RingEvent, cause_of, event_decoder, in_few
from primad.system.children.channel import Frames, frame
from primad.system.children.child import begin_child
from primad.system.children.spawn import GRACE_S, connected, environment, how_it_ended

LEAVE_S: Final = 0.5
"""A ring process that computes or loads may not notice within this time that it is to end, and is killed."""


CUT_SHORT: Final = "a layer file was cut short or its disk failed while it was read (SIGBUS)"


BUS_ERROR: Final = "Fatal Python error: Bus error"
"""What Python logs of a SIGBUS. While it writes the stacks, other threads go on, so that may end in a SIGSEGV."""


LOG_BYTES: Final = 1 << 16


MAX_ARRIVED: Final = 64


class _Events(asyncio.StreamReaderProtocol):
    """Cuts what arrives into events, one turn of the event loop earlier than a stream reader would, which gets nothing.

    Each event goes to ``hear``, and to ``next`` if ``hear`` returns False or earlier events wait there.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.hear: Callable[[RingEvent], bool] = lambda _: False
        self._frames = Frames()
        self._arrived = deque[RingEvent]()
        self._news = asyncio.Event()
        self._is_gone = False
        self._error: Exception | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        try:
            for body in self._frames.feed(data):
                event: RingEvent = event_decoder.decode(body)
                if self._arrived or type(event) is RingBroken or not self.hear(event):
                    self._arrived.append(event)
                    self._news.set()
        except msgspec.DecodeError as exc:
            self._error = ProtocolError(f"not an event of the ring process: {exc}")
            self._news.set()
        except Exception as exc:  # noqa: BLE001 (``next`` raises it)
            self._error = exc
            self._news.set()
        if len(self._arrived) >= MAX_ARRIVED and self._transport is not None:
            self._transport.pause_reading()

    def eof_received(self) -> bool | None:
        self._end()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end()

    async def next(self) -> RingEvent | None:
        """Return the next event that ``hear`` did not take; None at the end. Raises what ``hear`` raised, or
        ``ProtocolError``."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if self._is_gone:
                return None
            self._news.clear()
            await self._news.wait()
        event = self._arrived.popleft()
        if not self._arrived and self._transport is not None and not self._is_gone:
            self._transport.resume_reading()
        return event

    def _end(self) -> None:
        self._is_gone = True
        self._news.set()


class RingProcess:
    """One ring process. ``start`` it, ``send`` it commands, read ``events`` to the end, ``close`` it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: Path,
    ) -> None:
        self._process = process
        self._writer = writer
        self._log = log
        protocol = writer.transport.get_protocol()
        assert isinstance(protocol, _Events), "it was asked for"
        self._events = protocol

    @classmethod
    async def start(cls, log: Path, *, threads: int, place: int = 0, gpu: bool = False) -> RingProcess:
        """Start a ring process for ``threads`` compute threads, whose standard error goes to the file ``log``.

        ``place`` and ``gpu`` are as in ``environment``. Raises ``RingError`` if this device cannot start another
        process.
        """
        variables = environment(os.environ, threads, place, gpu=gpu)
        try:
            return cls(
                *await connected(lambda theirs: cls._begin(log, theirs, variables), "the ring process", _Events), log
            )
        except RingError:
            raise
        except BaseException:
            _remove_empty(log)
            raise

    @staticmethod
    def _begin(log: Path, theirs: socket.socket, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        with log.open("wb") as errors:
            return begin_child("primad.ring.process", theirs, variables, errors)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def send(self, *commands: RingCommand) -> None:
        """Send it commands, which it reads together; if it has ended, ``events`` raises that."""
        with contextlib.suppress(OSError):
            self._writer.write(b"".join(map(frame, in_few(commands))))
            await self._writer.drain()

    def listen(self, hear: Callable[[RingEvent], bool]) -> None:
        """Pass each event to ``hear`` as it arrives, and to ``events`` if ``hear`` returns False or earlier events wait
        there.

        ``events`` raises what ``hear`` raises."""
        self._events.hear = hear

    async def events(self) -> AsyncIterator[RingEvent]:
        """Yield its events as they come.

        Raises the error that broke it (``messages.FAULTS``), ``WeightsError`` if its weights are damaged, and
        ``RingError`` when it ends; it never ends without an error.
        """
        while (event := await self._events.next()) is not None:
            if type(event) is RingBroken:
                raise cause_of(event)
            yield event
        raise await self._obituary()

    async def _obituary(self) -> PrimadError:
        try:
            code = await asyncio.to_thread(self._process.wait, GRACE_S)
        except subprocess.TimeoutExpired:
            return RingError("the ring process closed its connection")
        log = _text(self._log)
        if sys.platform != "win32" and (code == -signal.SIGBUS or BUS_ERROR in log):
            return WeightsError(CUT_SHORT, None)
        how = how_it_ended(code)
        last = _last_line(log)
        return RingError(f"the ring process {how}" + (f": {last}" if last else ""))

    async def close(self) -> None:
        """End it: it ends by itself when its connection closes, and is killed after ``LEAVE_S`` if it does not.

        Data that it has not read yet is dropped, since it may never read it. If this is cancelled, the process is
        killed immediately.
        """
        self._writer.transport.abort()
        try:
            await asyncio.to_thread(self._process.wait, LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        except BaseException:
            self._process.kill()
            raise
        finally:
            _remove_empty(self._log)


def _remove_empty(log: Path) -> None:
    """Remove an empty log: they would add up, one for each ring."""
    with contextlib.suppress(OSError):
        if log.stat().st_size == 0:
            log.unlink()


def _text(log: Path) -> str:
    """Return the end of the log."""
    try:
        return log.read_bytes()[-LOG_BYTES:].decode("utf-8", errors="replace")
    except OSError:
        return ""


def _last_line(text: str) -> str:
    """Return the last line of a log before the stacks that Python writes when a signal ends it."""
    lines = text.partition("Fatal Python error: ")[0].strip().splitlines()
    return lines[-1].strip() if lines else ""
