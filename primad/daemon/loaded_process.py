"""A ring process and what it has loaded, on the head or on a worker; on a worker it may outlive its ring."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, NoReturn

from primad.daemon.gpu_care import GpuCare
from primad.daemon.layer_files import Workspace, release_files
from primad.daemon.ring_process import RingProcess
from primad.engine.protocol import EngineOptions
from primad.errors import LoadAgainError, PrimadError, RingError
from primad.gguf.windows import WindowPlan
from primad.ring.messages import GpuLoaded, GpuLow, Opened, RingCommand, RingEvent
from primad.system.children.stopped import wait_stopped

logger = logging.getLogger(__name__)

_EVENTS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadKey:
    """What a ring process has loaded, regardless of its place in a route: the ``content`` of its windows, and how they
    are loaded.

    It ``keeps`` KV cache or does not. How much stays in memory may differ between rings.
    """

    windows: tuple[WindowPlan, ...]
    width: int
    options: EngineOptions
    keeps: bool


class LoadedProcess:
    """A ring process that loads, or has loaded, ``content`` from the files of load ``number``.

    ``send`` it commands, read ``events`` or ``listen``, ``close`` it. ``gpu_care`` is notified of its GPU use, if it
    has any.
    """

    def __init__(
        self, ring: RingProcess, place: Workspace, number: int, content: LoadKey, gpu_care: GpuCare | None = None
    ) -> None:
        self._gpu_care = gpu_care
        self.content = content
        self.number = number
        """Distinguishes its files from those of others; a worker's epochs would not, since each head counts its own."""
        self.memory_low = False
        """Whether it was short of memory, or a GPU was: then what it holds is not kept for another ring."""
        self._ring, self._place = ring, place
        ring.listen(self._hears)
        self._events: asyncio.Queue[RingEvent | None] = asyncio.Queue(_EVENTS)
        """None wakes a reader that waits for an event that will not come."""
        self._heard: Callable[[RingEvent], None] | None = None
        self._error: PrimadError | None = None
        self._first: RingEvent | None = None
        self._ending: asyncio.Task[None] | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._end)

    @property
    def ended(self) -> bool:
        """Whether its process has ended or was stopped."""
        return self._error is not None

    async def _read(self) -> None:
        async for event in self._ring.events():
            if type(event) is GpuLoaded:  # ``isinstance`` takes a microsecond if it is not
                self.memory_low = event.layers < event.planned
                if self._gpu_care is not None:
                    self._gpu_care.loaded(self.number, event, self._load_again)
            elif type(event) is GpuLow:
                if self._gpu_care is not None:
                    self._gpu_care.low(self.number, event)
            elif not self._hears(event):
                await self._events.put(event)

    def _hears(self, event: RingEvent) -> bool:
        """Pass ``event`` on immediately, if possible, which saves some turns of the event loop per token; return
        whether it was."""
        if self._heard is None or not self._events.empty() or type(event) in (GpuLoaded, GpuLow):
            return False
        self._heard(event)
        return True

    def _load_again(self, reason: str) -> None:
        """End the process, as there is more or less memory than its windows were loaded for; its owner loads them
        again."""
        if self._error is not None:
            return
        self.memory_low = True
        self._error = LoadAgainError(reason)
        with contextlib.suppress(asyncio.QueueFull):
            self._events.put_nowait(None)
        self._ending = asyncio.create_task(self._let_go())  # there may be no reader to notice the error

    async def _let_go(self) -> None:
        await self._ring.close()
        if self._gpu_care is not None:
            self._gpu_care.released(self.number)

    async def _watch(self) -> None:
        await wait_stopped(self._ring.pid)
        raise RingError("the ring process was stopped")

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._error is not None:
            return
        error = task.exception()
        if isinstance(error, PrimadError):
            self._error = error
            if self._gpu_care is not None:
                self._gpu_care.failed(error)
        else:
            logger.error("the events of a ring process cannot be read", exc_info=error)
            self._error = RingError(f"internal error: {type(error).__name__}: {error}")
        with contextlib.suppress(asyncio.QueueFull):
            self._events.put_nowait(None)

    async def send(self, *commands: RingCommand) -> None:
        """Send it commands; if it has ended, ``events`` raises that."""
        await self._ring.send(*commands)

    async def events(self) -> AsyncIterator[RingEvent]:
        """Yield its events as they come.

        Never ends without an error: raises ``PrimadError`` when the process ended or was stopped, ``WeightsError`` if
        its weights caused that.
        """
        while True:
            yield await self._next_event()

    async def listen(self, heard: Callable[[RingEvent], None]) -> NoReturn:
        """Call ``heard`` with each event; raises as ``events`` does, and what ``heard`` raises."""
        self._heard = heard
        try:
            while True:
                heard(await self._next_event())
        finally:
            self._heard = None

    async def _next_event(self) -> RingEvent:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        event = None if self.ended and self._events.empty() else await self._events.get()
        if event is None:
            assert self._error is not None
            raise self._error
        return event

    async def answers(self, timeout_s: float) -> bool:
        """Return whether it opens within ``timeout_s``; ``events`` then begins with that event.

        Earlier events are about an epoch that is over: they were on their way when it was asked to reopen.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not isinstance(event := await self._next_event(), Opened):
                    logger.debug("of an epoch that is over: %s", type(event).__name__)
                self._first = event
        except (TimeoutError, PrimadError):
            return False
        return True

    def forget_events(self) -> None:
        """Drop its events about an epoch that is over."""
        while not self._events.empty():
            self._events.get_nowait()

    async def close(self) -> None:
        """End the process, and release its files."""
        for task in self._tasks:
            task.cancel()
        try:
            if self._ending is not None:
                await asyncio.wait([self._ending])
            await self._ring.close()
        finally:
            release_files(self._place, self.number)
            if self._gpu_care is not None:
                self._gpu_care.released(self.number)
