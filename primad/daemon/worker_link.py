"""The head's conversation with one worker: greet it, have it load, link it, hear that it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq.asyncio

from halda import DeviceProfile, LinkProfile
from primad import __version__
from primad.cluster.control import HeadEnd
from primad.cluster.messages import (
    PING_INTERVAL_S,
    PROTOCOL,
    Broken,
    Echoed,
    Hello,
    Link,
    Linked,
    LinksMeasured,
    LinkTarget,
    Load,
    Loaded,
    MeasureLinks,
    Ping,
    Pong,
    Progress,
    Refused,
    Release,
    Welcome,
    WorkerStatus,
)
from primad.errors import ClusterError

HELLO_TIMEOUT_S = 3.0

OnProgress = Callable[[str, Progress], None]


class DeviceLostError(ClusterError):
    """``device`` does not answer any more, or works for another head."""

    def __init__(self, message: str, device: str) -> None:
        super().__init__(message)
        self.device = device


class Worker:
    """A worker that said welcome. From then on it is pinged, so that it holds its lease while the head still plans."""

    def __init__(self, end: HeadEnd, profile: DeviceProfile, build: str) -> None:
        self.end = end
        self.profile = profile
        self.build = build
        self._pinging = asyncio.create_task(self._ping())

    async def _ping(self) -> None:
        while True:
            with suppress(ClusterError):  # that it takes nothing shows where its answers are awaited
                await self.end.send(Ping(status=False))
            await asyncio.sleep(PING_INTERVAL_S)

    def close(self) -> None:
        """Stop pinging and close the link."""
        self._pinging.cancel()
        self.end.close()

    @property
    def name(self) -> str:
        """The device's name."""
        return self.profile.device

    async def measure_links(self, targets: Sequence[LinkTarget], timeout_s: float) -> list[LinkProfile]:
        """Have the worker measure its links to ``targets``; without targets it only says that it is there.

        Raises ``DeviceLostError`` when it goes silent or leaves.
        """
        asked = {target.device for target in targets}
        try:
            await self.end.send(MeasureLinks(targets=list(targets)))
            async with asyncio.timeout(timeout_s):
                while True:
                    match await self.end.receive():
                        case LinksMeasured(links=links):
                            return [link for link in links if self._is_of(link, asked)]
                        case Refused(reason=reason):
                            raise DeviceLostError(f"{self.name} left: {reason}", self.name)
                        case _:
                            continue
        except TimeoutError as exc:
            raise DeviceLostError(f"{self.name} did not measure its links within {timeout_s:g} s", self.name) from exc
        except DeviceLostError:
            raise
        except ClusterError as exc:
            raise DeviceLostError(f"{self.name} went away: {exc}", self.name) from exc

    def _is_of(self, link: LinkProfile, asked: set[str]) -> bool:
        return (link.source == self.name and link.target in asked) or (
            link.target == self.name and link.source in asked
        )


async def greet(context: zmq.asyncio.Context, host: str, port: int, head: str, session: int) -> Worker:
    """Say hello to the device at ``host:port``.

    Raises ``ClusterError`` when it does not answer, is busy or has another version.
    """
    end = HeadEnd(context, host, port)
    try:
        await end.send(Hello(protocol=PROTOCOL, version=__version__, device=head, session=session))
        while True:
            match await end.receive(HELLO_TIMEOUT_S):
                case Welcome(profile=profile, build=build):
                    return Worker(end, profile, build)
                case Refused(reason=reason):
                    raise ClusterError(reason)
                case _:
                    continue  # what it still had to say to this head's last session
    except BaseException:
        end.close()
        raise


class WorkerRing:
    """One worker's part in one epoch, as the head sees it. ``attend`` runs beside everything else."""

    def __init__(self, worker: Worker, load: Load, on_progress: OnProgress) -> None:
        self.worker = worker
        self._load = load
        self._on_progress = on_progress
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.linked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status: WorkerStatus | None = None
        self._status_news = asyncio.Event()

    async def attend(self) -> None:
        """Have the worker load, then listen to it until cancelled.

        Raises ``DeviceLostError`` when it goes silent, ``ClusterError`` when its part breaks.
        """
        await self.worker.end.send(self._load)
        while True:
            await self._hear()

    async def link(self, address: str) -> None:
        """Tell the worker where its steps go."""
        await self.worker.end.send(Link(epoch=self._load.epoch, address=address))

    async def wait_status(self) -> WorkerStatus | None:
        """What the worker's ring process did so far, asked for now."""
        self._status_news.clear()
        await self.worker.end.send(Ping(status=True))
        await self._status_news.wait()
        return self.status

    async def release(self) -> None:
        """Let the worker give its windows back."""
        await self.worker.end.send(Release(epoch=self._load.epoch))

    async def _hear(self) -> None:
        name, epoch = self.worker.name, self._load.epoch
        try:
            message = await self.worker.end.receive()
        except ClusterError as exc:
            raise DeviceLostError(f"{name} went away: {exc}", name) from exc
        match message:
            case Progress(epoch=at) if at == epoch:
                self._on_progress(name, message)
            case Loaded(epoch=at, port=port) if at == epoch and not self.port.done():
                self.port.set_result(port)
            case Linked(epoch=at) if at == epoch and not self.linked.done():
                self.linked.set_result(None)
            case Broken(epoch=at, error=error) if at == epoch:
                raise ClusterError(f"{name}: {error}")
            case WorkerStatus(epoch=at) if at == epoch:
                self.status = message
                self._status_news.set()
            case Refused(reason=reason):
                raise DeviceLostError(f"{name} left: {reason}", name)
            case (
                Pong()
                | Welcome()
                | Progress()
                | Loaded()
                | Linked()
                | Broken()
                | WorkerStatus()
                | LinksMeasured()
                | Echoed()
            ):
                pass  # a sign of life, or about an older epoch
