"""The stages of a head's workers: requests to each, its state, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from primad.errors import ClusterError
from primad.head.members.core import AGAIN, SENT, DeviceLostError, RankLostError, StageError
from primad.network.messages import (
    DownloadedLayer,
    HeadMessage,
    Link,
    LinkGroup,
    Load,
    Loaded,
    Progress,
    Release,
    StageState,
    WorkerStatus,
)
from primad.ring.messages import GroupRank, RankAddress
from primad.system.tasks import resolve

OnProgress = Callable[[str, Progress], None]


class Participant(Protocol):
    """The participating device: it receives messages, and passes its own messages about an epoch to the attending
    stage."""

    @property
    def name(self) -> str:
        """The device's name."""

    async def send(self, message: HeadMessage) -> None:
        """Send it a message. Raises ``ClusterError`` if it accepts none."""

    async def ask_status(self) -> None:
        """Have it report its ring processes. Raises ``ClusterError`` like ``send``."""

    def attend(self, stage: Stage) -> None:
        """Pass messages about its epoch to ``stage`` from now on."""

    def forget(self, stage: Stage) -> None:
        """Stop passing messages to ``stage``, which has ended."""

    async def until_released(self, epoch: int) -> None:
        """Wait, within a time limit, until the device has released all of ``epoch`` or is gone."""


class Stage:
    """One worker's stage in one epoch, as the head sees it.

    ``loaded`` becomes the report of its loaded ring process; ``linked`` is set when it sends to the next device.
    ``broken`` gets the ``StageError`` or ``DeviceLostError`` that ends it.
    """

    def __init__(self, worker: Participant, load: Load, on_progress: OnProgress) -> None:
        self._worker = worker
        self.epoch = load.epoch
        self._load = load
        self._on_progress = on_progress
        loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Loaded] = loop.create_future()
        self.linked: asyncio.Future[None] = loop.create_future()
        self.broken: asyncio.Future[ClusterError] = loop.create_future()
        self.keeps = False
        """Whether its ring process saves KV cache, once it is loaded."""
        self.downloaded: list[DownloadedLayer] = []
        """The layers without known digests that it fetched, once it is loaded."""
        self.status: WorkerStatus | None = None
        self._status_news = asyncio.Event()
        worker.attend(self)

    @property
    def name(self) -> str:
        """The device's name."""
        return self._worker.name

    async def load(self) -> None:
        """Have the worker load its windows. Raises ``DeviceLostError`` if it accepts no messages."""
        await self._ask(self._load)

    async def connect(self, address: str, key: str, sender: str) -> None:
        """Tell the worker the target and the source of its steps. Raises ``DeviceLostError`` like ``load``."""
        await self._ask(Link(epoch=self.epoch, address=address, key=key, sender=sender))

    async def join(self, addresses: Sequence[RankAddress]) -> None:
        """Have the worker connect to the ranks of its group below its own. Raises ``DeviceLostError`` like ``load``."""
        await self._ask(LinkGroup(epoch=self.epoch, addresses=list(addresses)))

    async def _ask(self, message: Load | Link | LinkGroup) -> None:
        try:
            await self._worker.send(message)
        except ClusterError as exc:
            raise DeviceLostError(f"{self.name} is gone: {exc}", self.name) from exc

    async def wait_status(self) -> WorkerStatus | None:
        """Return the current counters of the worker's ring process."""
        self._status_news.clear()
        await self._worker.ask_status()
        await self._status_news.wait()
        return self.status

    async def release(self) -> None:
        """Have the worker release its windows; its messages are ignored from then on. A worker that is gone has done
        so."""
        self._worker.forget(self)
        with contextlib.suppress(ClusterError):
            await self._worker.send(Release(epoch=self.epoch))

    async def unload(self) -> None:
        """As ``release``, but the windows do not stay loaded there, and this method waits for that."""
        self._worker.forget(self)
        with contextlib.suppress(ClusterError):
            await self._worker.send(Release(epoch=self.epoch, unload=True))
            await self._worker.until_released(self.epoch)

    def fail(self, error: ClusterError) -> None:
        """End this stage with ``error``."""
        resolve(self.broken, error)

    def hear(self, message: Progress | StageState | WorkerStatus) -> None:
        """Handle the worker's message about this epoch."""
        match message:
            case Progress():
                self._on_progress(self.name, message)
            case StageState(loaded=loaded, linked=linked, broken=broken):
                if loaded is not None and not _listens_as(loaded, self._load.group):
                    self.fail(StageError(f"{self.name}: listens in another role than its own", self.name, "load"))
                elif loaded is not None:
                    self.keeps, self.downloaded = loaded.keeps, loaded.downloaded
                    resolve(self.loaded, loaded)
                if linked:
                    resolve(self.linked, None)
                if broken is not None:
                    fault = AGAIN if broken.again else SENT if broken.sender else broken.fault
                    error = StageError(f"{self.name}: {broken.error}", self.name, fault)
                    is_of_group = self._load.group is not None and broken.rank in self._load.group.devices
                    self.fail(RankLostError(error, broken.rank) if is_of_group else error)
            case WorkerStatus():
                self.status = message
                self._status_news.set()


def _listens_as(loaded: Loaded, group: GroupRank | None) -> bool:
    """Return whether it listens for steps exactly if it should, and likewise for the other ranks of its ``group``."""
    return bool(loaded.key) == (group is None or group.rank == 0) and bool(loaded.group_port) == (group is not None)
