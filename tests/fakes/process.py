"""A scripted ring process, strict about the order of commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from primad.errors import PrimadError, RingError
from primad.ring.messages import Connect, JoinGroup, Open, Opened, Reopen, Report, RingCommand, RingEvent, Status
from primad.trust.identity import new_identity

Command = TypeVar("Command")
STATUS = Status(steps=3, rows=4, compute_s=0.5, hop_s=[], rss_bytes=1, private_bytes=1, refused=0)


class FakeRingProcess:
    """One process. It opens at once, unless ``holds_back``; ``die`` ends it."""

    pid = 1  # no real priority changes: tests run with nice 0

    def __init__(self, number: int, *, holds_back: bool) -> None:
        self.number = number
        self.commands: list[RingCommand] = []
        self.closed = False
        self.keys: list[str] = []
        self.holds_back = holds_back
        self._events: asyncio.Queue[RingEvent | PrimadError] = asyncio.Queue()
        self._news = asyncio.Condition()

    async def send(self, command: RingCommand) -> None:
        assert not self.closed, f"{type(command).__name__} to a process that was ended"
        match command:
            case Open():
                assert not self.commands, "opened twice"
                self._open()
            case Reopen():
                assert self.commands, "reopened before it was opened"
                self._open()
            case Connect() | JoinGroup():
                assert self.keys, "connected before it was open"
            case Report():
                self.report_line(STATUS)
            case _:
                raise AssertionError(f"a worker's ring process was sent {type(command).__name__}")
        self.commands.append(command)
        async with self._news:
            self._news.notify_all()

    def _open(self) -> None:
        if not self.holds_back:
            self.keys.append(new_identity().public)
            self.report_line(Opened(f"tcp://127.0.0.1:{4000 + self.number}", self.keys[-1]))

    def report_line(self, event: RingEvent) -> None:
        """Send an event to the daemon."""
        self._events.put_nowait(event)

    def die(self, reason: str | PrimadError = "the ring process was ended by SIGABRT") -> None:
        """End with ``reason``."""
        self._events.put_nowait(RingError(reason) if isinstance(reason, str) else reason)

    def listen(self, hear: Callable[[RingEvent], bool]) -> None:
        """Ignored: ``events`` has all of them, and no more is promised."""

    async def events(self) -> AsyncIterator[RingEvent]:
        while True:
            event = await self._events.get()
            if isinstance(event, PrimadError):
                raise event
            yield event

    async def close(self) -> None:
        assert not self.closed, "ended twice"
        self.closed = True
        async with self._news:
            self._news.notify_all()

    async def reported(self, kind: type[Command]) -> Command:
        """The latest command of ``kind``, once there is one."""
        async with self._news:
            await self._news.wait_for(lambda: any(isinstance(command, kind) for command in self.commands))
        return [command for command in self.commands if isinstance(command, kind)][-1]

    async def ended(self) -> None:
        """Wait until the daemon has ended it."""
        async with self._news:
            await self._news.wait_for(lambda: self.closed)


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments with which a process was started."""

    log: Path
    threads: int
    place: int


class FakeProcesses:
    """Replaces ``RingProcess`` in a module of the daemon: ``start`` makes a ``FakeRingProcess``."""

    def __init__(self) -> None:
        self.all: list[FakeRingProcess] = []
        self.starts: list[Start] = []
        self.holds_back = False
        self._news = asyncio.Condition()

    async def start(self, log: Path, *, threads: int, place: int = 0, gpu: bool = False) -> FakeRingProcess:
        self.starts.append(Start(log, threads, place))
        process = FakeRingProcess(len(self.all), holds_back=self.holds_back)
        self.all.append(process)
        async with self._news:
            self._news.notify_all()
        return process

    async def started(self, count: int) -> FakeRingProcess:
        """The ``count``-th process, once there is one."""
        await self.wait(lambda: len(self.all) >= count)
        return self.all[count - 1]

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; checked when a process starts."""
        async with self._news:
            await self._news.wait_for(condition)

    @property
    def alive(self) -> list[FakeRingProcess]:
        """The processes that were not ended."""
        return [process for process in self.all if not process.closed]
