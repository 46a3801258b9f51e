"""Devices for a plan that nobody serves yet: this one, those named and those in sight, asked for their profiles and let go.

The links between them are measured as a head does it. A device that works for a head now is not disturbed: it refuses and
is left out.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import zmq.asyncio

from halda import DeviceProfile, LinkProfile
from primad.cluster.discovery import Peer, look
from primad.config import Config
from primad.daemon.links import LinkBook
from primad.daemon.reporter import Reporter
from primad.daemon.run import profile, run
from primad.daemon.worker_link import Worker, greet
from primad.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found; this device is the first."""

    devices: tuple[DeviceProfile, ...]
    links: tuple[LinkProfile, ...]


def survey(config: Config, seconds: float, reporter: Reporter) -> Survey:
    """The profiles of this device (measured if it never was) and of the others that are free, and the links between them.

    ``seconds`` is how long to look for devices that are not named in ``config.devices``; 0 does not look. Raises
    ``ClusterError`` for a named device that does not answer, ``ConfigError`` when the home folder cannot be used.
    """
    own = profile(config, reporter)
    devices, links = [own], list[LinkProfile]()

    async def main() -> None:
        visit = _Visit(config, reporter)
        try:
            await visit.find(seconds)
            devices.extend(worker.profile for worker in visit.workers)
            links.extend(await visit.measure_links())
        finally:
            visit.close()

    if seconds > 0 or config.devices:
        run(main())
    return Survey(devices=tuple(devices), links=tuple(links))


class _Visit:
    """The workers that said welcome, until they are let go."""

    def __init__(self, config: Config, reporter: Reporter) -> None:
        self._config = config
        self._reporter = reporter
        self._context = zmq.asyncio.Context()
        self._session = random.getrandbits(62)
        self._workers: dict[str, Worker] = {}
        self._announced: dict[str, tuple[str, ...]] = {}

    @property
    def workers(self) -> list[Worker]:
        """By name."""
        return [self._workers[name] for name in sorted(self._workers)]

    async def find(self, seconds: float) -> None:
        """Greet the devices that were named, then at once all those that come in sight in ``seconds``."""
        for address in self._config.devices:
            host, port = address.rsplit(":", 1)
            try:
                await self._greet(host.strip("[]"), int(port))
            except ClusterError as exc:
                raise ClusterError(f"--device {address}: {exc}; is 'primad join' running there?") from exc
        async with asyncio.TaskGroup() as group:
            for peer in await self._in_sight(seconds):
                self._announced[peer.device] = peer.addresses
                if peer.device not in self._workers:
                    group.create_task(self._greet_peer(peer))

    async def measure_links(self) -> list[LinkProfile]:
        """The links between this device and the workers; none, and the default for them, when a worker goes silent."""
        book = LinkBook(self._context, self._config.name, self._session)
        try:
            return await book.measure(self.workers, self._announced, self._reporter)
        except ClusterError as exc:
            self._reporter.say(f"links are not measured: {exc}")
            return []

    def close(self) -> None:
        """Let all workers go."""
        for worker in self._workers.values():
            worker.close()
        self._context.destroy(linger=0)

    async def _greet(self, host: str, port: int) -> None:
        worker = await greet(self._context, host, port, self._config.name, self._session)
        if worker.name in self._workers or worker.name == self._config.name:
            worker.close()  # the same device, named and seen, or a worker on this very device
        else:
            self._workers[worker.name] = worker

    async def _greet_peer(self, peer: Peer) -> None:
        refusal = ""
        for address in peer.addresses:
            try:
                await self._greet(address, peer.port)
            except ClusterError as exc:
                refusal = str(exc)
            else:
                return
        self._reporter.say(f"{peer.device} is left out: {refusal}")

    async def _in_sight(self, seconds: float) -> list[Peer]:
        if seconds <= 0:
            return []
        try:
            peers = await look(self._config.host, seconds)
        except ClusterError as exc:
            self._reporter.say(str(exc))
            return []
        return [peer for peer in peers if peer.cluster == self._config.cluster and peer.role == "worker"]
