"""What a head asks its workers to take part in: what each was asked, how it stands, and what ended it.

What the worker did not hear is said again (see ``network/messages.py`` on connections that are reset).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, Protocol

from primad.errors import ClusterError
from primad.head.members.core import AGAIN, SENT, DeviceLostError, StageError
from primad.network.messages import (
    DownloadedLayer,
    HeadMessage,
    Link,
    Load,
    Progress,
    Release,
    StageState,
    WorkerStatus,
)
from primad.system.tasks import resolve

logger = logging.getLogger(__name__)

MISSES: Final = 2
"""After so many answers in a row that know nothing of a message it was lost: one alone may have overtaken it when the
connection was made anew."""
MAX_REPEATS: Final = 5
"""What was said so often again is not lost: the worker does not understand it."""

OnProgress = Callable[[str, Progress], None]


class Participant(Protocol):
    """The device that participates: it is told what to do, and gives what it says about an epoch to who attends."""

    next_ping: int
    """The number of the next ping to it."""

    @property
    def name(self) -> str:
        """The device's name."""

    async def send(self, message: HeadMessage) -> None:
        """Tell it something. Raises ``ClusterError`` when it takes no messages."""

    async def ask_status(self) -> None:
        """Have it say what its ring processes do. Raises ``ClusterError`` as ``send``."""

    def attend(self, stage: Stage) -> None:
        """From now on ``stage`` hears what is about its epoch."""

    def forget(self, stage: Stage) -> None:
        """``stage`` is over."""


class Unheard:
    """Whether a message to a worker was lost, by what the worker's answers to pings know of it."""

    def __init__(self, next_ping: int) -> None:
        self._asked_before = next_ping
        self._misses = self.repeats = 0

    def is_lost(self, number: int, next_ping: int, *, arrived: bool) -> bool:
        """Ping ``number`` was answered: is the message to be said again, before ``next_ping``?"""
        if arrived or number < self._asked_before:
            self._misses = 0
            return False
        self._misses += 1
        if self._misses < MISSES:
            return False
        self._misses, self._asked_before = 0, next_ping
        self.repeats += 1
        return True


class Stage:
    """One worker's stage in one epoch, as the head sees it.

    ``loaded`` becomes its ring process's (port, key), ``linked`` is set when it sends to the next device. ``broken`` gets
    the ``StageError`` or ``DeviceLostError`` that ends it.
    """

    def __init__(self, worker: Participant, load: Load, on_progress: OnProgress) -> None:
        self._worker = worker
        self.epoch = load.epoch
        self._load = load
        self._on_progress = on_progress
        self._asked: Load | Link | None = None
        self._unheard = Unheard(0)
        loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[tuple[int, str]] = loop.create_future()
        self.linked: asyncio.Future[None] = loop.create_future()
        self.broken: asyncio.Future[ClusterError] = loop.create_future()
        self.keeps = False
        """Whether its ring process keeps KV cells, once it is loaded."""
        self.downloaded: list[DownloadedLayer] = []
        """What it fetched of layers that had no digest, once it is loaded."""
        self.status: WorkerStatus | None = None
        self._status_news = asyncio.Event()
        worker.attend(self)

    @property
    def name(self) -> str:
        """The device's name."""
        return self._worker.name

    async def load(self) -> None:
        """Have the worker load its windows. Raises ``DeviceLostError`` when it takes no messages."""
        await self._ask(self._load)

    async def connect(self, address: str, key: str, sender: str) -> None:
        """Tell the worker where its steps go, and from whom they come. Raises ``DeviceLostError`` as ``load``."""
        await self._ask(Link(epoch=self.epoch, address=address, key=key, sender=sender))

    async def _ask(self, message: Load | Link) -> None:
        try:
            await self._worker.send(message)
        except ClusterError as exc:
            raise DeviceLostError(f"{self.name} is gone: {exc}", self.name) from exc
        self._asked, self._unheard = message, Unheard(self._worker.next_ping)

    async def wait_status(self) -> WorkerStatus | None:
        """What the worker's ring process did so far, asked for now."""
        self._status_news.clear()
        await self._worker.ask_status()
        await self._status_news.wait()
        return self.status

    async def release(self) -> None:
        """Let the worker give its windows back; nothing more is heard of it here. A worker that is gone has done so."""
        self._worker.forget(self)
        with contextlib.suppress(ClusterError):
            await self._worker.send(Release(epoch=self.epoch))

    def fail(self, error: ClusterError) -> None:
        """This stage is over."""
        resolve(self.broken, error)

    def compare(self, number: int, state: StageState | None) -> Load | Link | None:
        """When ping ``number`` came it stood so, or was not there: what was asked for and lost, and is to be said again.

        A stage that is gone after it was loaded does not come back.
        """
        if self._asked is None or self.broken.done():
            return None
        arrived = state is not None and (isinstance(self._asked, Load) or state.linked)
        if not self._unheard.is_lost(number, self._worker.next_ping, arrived=arrived):
            return None
        if state is None and self.loaded.done():
            self.fail(StageError(f"{self.name}: its stage ended without a word", self.name, "ring"))
            return None
        if self._unheard.repeats > MAX_REPEATS:
            self.fail(StageError(f"{self.name}: it does not take part in the ring", self.name, "load"))
            return None
        logger.info("epoch %d: %s did not hear %s; saying it again", self.epoch, self.name, type(self._asked).__name__)
        return self._asked

    def hear(self, message: Progress | StageState | WorkerStatus) -> None:
        """What the worker says about this epoch."""
        match message:
            case Progress():
                self._on_progress(self.name, message)
            case StageState(loaded=loaded, linked=linked, broken=broken):
                if loaded is not None:
                    self.keeps, self.downloaded = loaded.keeps, loaded.downloaded
                    resolve(self.loaded, (loaded.port, loaded.key))
                if linked:
                    resolve(self.linked, None)
                if broken is not None:
                    fault = AGAIN if broken.again else SENT if broken.sender else broken.fault
                    self.fail(StageError(f"{self.name}: {broken.error}", self.name, fault))
            case WorkerStatus():
                self.status = message
                self._status_news.set()
