"""A worker's ring process and what it has loaded; it may outlive the ring that it was started for."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from primad.daemon.loading import Workspace, remove_metadata
from primad.engine.protocol import EngineOptions
from primad.errors import PrimadError, RingError, WeightsError
from primad.ring.messages import Opened, RingEvent
from primad.ring.spawn import RingProcess
from primad.system.stopped import wait_stopped

logger = logging.getLogger(__name__)

_EVENTS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadKey:
    """What a ring process has loaded, whatever its place in a route: windows (first, last, layers, GPU layers), and how.

    ``streamed`` are, for each window, the layers that it streams, counted from its first; they pass through ``slots``.
    """

    windows: tuple[tuple[int, int, tuple[str, ...], int], ...]
    width: int
    extra_buffers: bool
    streamed: tuple[tuple[int, ...], ...]
    slots: int
    options: EngineOptions


class LoadedProcess:
    """A ring process and what it has loaded. ``indices`` are the route indices of its windows, in order."""

    def __init__(self, ring: RingProcess, content: LoadKey, number: int) -> None:
        self.ring = ring
        self.content = content
        self.number = number
        """Tells its files from those of others; epochs would not, since each head counts its own."""
        self.indices: list[int] = []
        self.memory_low = False
        """Whether it was short of memory: what it holds is not kept for another ring."""
        self._events: asyncio.Queue[RingEvent] = asyncio.Queue(_EVENTS)
        self._error: RingError | WeightsError | None = None
        self._first: RingEvent | None = None
        self._ended = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    @property
    def ended(self) -> bool:
        """Whether its process is no more."""
        return self._error is not None

    async def _read(self) -> None:
        try:
            async for event in self.ring.events():
                await self._events.put(event)
        except PrimadError as exc:
            self._error = exc if isinstance(exc, WeightsError) else RingError(str(exc))
            self._ended.set()

    async def _watch(self) -> None:
        await wait_stopped(self.ring.pid)
        self._error = RingError("the ring process was stopped")
        self._ended.set()

    async def answers(self, timeout_s: float) -> bool:
        """Whether it opens within ``timeout_s``; ``next_event`` gives that.

        What it says before is about an epoch that is over: it was on its way when it was asked to reopen.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not isinstance(event := await self.next_event(), Opened):
                    logger.debug("of an epoch that is over: %s", type(event).__name__)
                self._first = event
        except (TimeoutError, RingError, WeightsError):
            return False
        return True

    async def next_event(self) -> RingEvent:
        """Its next event. Raises ``RingError`` when it ended or was stopped, ``WeightsError`` when its weights ended it."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._events.empty() and self._error is None:
            waits = [asyncio.create_task(self._events.get()), asyncio.create_task(self._ended.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if waits[0].done():
                    return waits[0].result()  # type: ignore[return-value]
            finally:
                for wait in waits:
                    wait.cancel()
        if not self._events.empty():
            return self._events.get_nowait()
        assert self._error is not None
        raise self._error

    def forget_events(self) -> None:
        """Drop what it said about an epoch that is over."""
        while not self._events.empty():
            self._events.get_nowait()

    async def close(self, place: Workspace) -> None:
        """End the process, and let its files go."""
        for task in self._tasks:
            task.cancel()
        await self.ring.close()
        remove_metadata(place, self.number)
        place.cache.end_lease(owner(self.number))


def owner(number: int) -> str:
    """Who holds the layers of part ``number`` in the cache."""
    return f"part-{number}"
