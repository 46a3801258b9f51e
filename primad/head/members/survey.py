"""Collects devices for a plan that is not served yet: this one, named ones and those in sight. They are asked for their
profiles and released.

The links between them are measured as a head measures them. A device that works for a head is not disturbed: it refuses
and is left out.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import zmq.asyncio

from halda import DeviceProfile, LinkProfile
from primad.daemon.reporter import Reporter
from primad.daemon.run import profile, run
from primad.engine.build import build_id
from primad.errors import ClusterError
from primad.head.members.link_book import LinkBook
from primad.head.members.sight import Sight, Sighted
from primad.head.members.worker_link import Caller, WorkerLink, greet, greet_named, probe
from primad.head.model.learning import read_corrections
from primad.head.model.limits import DeviceLimits
from primad.membership import types
from primad.network.discovery import look
from primad.network.peer import Peer
from primad.settings.config import Config
from primad.settings.timings import NetworkTimings
from primad.trust.identity import load_identity
from primad.trust.trust import TrustStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The result; this device comes first."""

    devices: tuple[DeviceProfile, ...]
    links: tuple[LinkProfile, ...]


def survey(config: Config, seconds: float, reporter: Reporter) -> Survey:
    """Return the profiles of this device (measured if it never was) and of other free devices, and the links between
    them.

    They are as for a head of this home: corrected by its measurements, without paused devices, and with its memory
    limits.

    ``seconds`` is how long to look for devices that are not named in ``config.devices``; 0 does not look. Raises
    ``ClusterError`` for a named device that does not respond, ``ConfigError`` if the home folder cannot be used.
    """
    own = profile(config, reporter)
    devices, links = [own], list[LinkProfile]()

    async def main() -> None:
        context = zmq.asyncio.Context()
        visit = _Visit(config, reporter, context)
        try:
            with visit.trust.announce_locally(config.name):  # the daemons of this user on this machine admit this one
                await visit.find(seconds)
                devices.extend(worker.profile for worker in visit.workers)
                links.extend(await visit.measure_links())
        finally:
            visit.close()
            context.destroy(linger=0)

    if seconds > 0 or config.devices:
        run(main())
    known, device_limits = read_corrections(config.home), DeviceLimits(config.home)
    usable = device_limits.unpaused(device.device for device in devices) | {own.device}
    for name in sorted({device.device for device in devices} - usable):
        reporter.report_line(f"{name} is left out: this head does not use it while it is paused on the page")
    return Survey(
        devices=tuple(device_limits.apply(known.apply(device)) for device in devices if device.device in usable),
        links=tuple(known.apply_link(link) for link in links if {link.source, link.target} <= usable),
    )


class _Visit:
    """The welcomed workers, until they are released."""

    def __init__(self, config: Config, reporter: Reporter, context: zmq.asyncio.Context) -> None:
        self._config = config
        self._reporter = reporter
        self._identity = identity = load_identity(config.home)
        self.trust = TrustStore(config.home, identity)
        self._sight = Sight(config.name, config.cluster)
        self._caller = Caller.of(config, context, identity, build_id(), NetworkTimings())
        self._workers: dict[str, WorkerLink] = {}
        self._announced: dict[str, tuple[str, ...]] = {}

    @property
    def workers(self) -> list[WorkerLink]:
        """The workers, by name."""
        return [self._workers[name] for name in sorted(self._workers)]

    async def find(self, seconds: float) -> None:
        """Greet the named devices, then concurrently all devices that come in sight within ``seconds``."""
        others = {each.key: each.device for each in self.trust.entries()}
        self._sight.look({}, others)
        for address in self._config.devices:
            self._take(await greet_named(self._caller, address, self._sight.labels, _unheard))
        self._sight.look({str(at): peer for at, peer in enumerate(await self._in_sight(seconds))}, others)
        for peer in self._sight.impostors:
            self._leave_out(peer.device)
        async with asyncio.TaskGroup() as group:
            for name, sighted in self._sight.devices.items():
                if not sighted.trusted:
                    self._leave_out(name)
                    continue
                self._announced[name] = sighted.addresses
                if name not in self._workers:
                    group.create_task(self._greet(name, sighted))

    async def measure_links(self) -> list[LinkProfile]:
        """Return the links between this device and the workers; empty, for default links, if a worker goes silent."""
        book = LinkBook(self._caller)
        try:
            for worker in self.workers:
                others = [(other.name, other.key) for other in self.workers if other is not worker]
                await worker.introduce(others, self.trust.revoked())
            return await book.measure(self.workers, self._announced, self._reporter)
        except ClusterError as exc:
            self._reporter.report_line(f"links are not measured: {exc}")
            return []

    def close(self) -> None:
        """Release all workers."""
        for worker in self._workers.values():
            worker.close()

    def _take(self, worker: WorkerLink) -> None:
        if worker.name in self._workers:
            worker.close()  # the same device, named twice
        else:
            self._workers[worker.name] = worker

    def _leave_out(self, name: str) -> None:
        self._reporter.report_line(f"{name} is left out: it is not paired with this device ('primad join --code')")

    async def _greet(self, name: str, sighted: Sighted) -> None:
        try:
            end, _ = await probe(self._caller, sighted.places(), [sighted.key])
            self._take(await greet(self._caller, end, _unheard, name))
        except ClusterError as exc:
            self._reporter.report_line(f"{name} is left out: {exc}")

    async def _in_sight(self, seconds: float) -> list[Peer]:
        if seconds <= 0:
            return []
        try:
            peers = await look(self._config.host, seconds, self._config.interface)
        except ClusterError as exc:
            self._reporter.report_line(str(exc))
            return []
        return [peer for peer in peers if peer.key != self._identity.public]  # not a worker on this device


def _unheard(event: types.Event) -> None:
    """Ignore an event: a short visit counts no signs of life, and pending calls fail by themselves if a link is
    lost."""
    del event
