"""Discovers, greets and introduces the devices that a head works with, and measures the links between them.

Their events are those of ``membership/types.py``; the membership core decides what to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Final

from primad import __version__
from primad.daemon.pairing_service import PairingService
from primad.errors import ClusterError
from primad.head.members.core import DeviceLostError, HeadContext
from primad.head.members.link_book import LinkBook
from primad.head.members.sight import Sight, Sighted
from primad.head.members.worker_link import Caller, WorkerLink, greet_named, notify_revoked, probe
from primad.head.members.worker_link import greet as greet_once
from primad.membership import types
from primad.network.addresses import resolved_host
from primad.network.discovery import Discovery, MulticastError
from primad.network.peer import Peer
from primad.network.scopes import own_address
from primad.network.versions import build_gap
from primad.settings.config import is_loopback, split_address
from primad.system.tasks import mistake
from primad.trust.trust import LOCAL

logger = logging.getLogger(__name__)

_CURE: Final = (
    "Start 'primad join' there; if it is not paired with this head, 'primad pair' here shows a code, and "
    "'primad pair --code CODE' there brings it"
)
FAREWELL_S: Final = 0.2
MAX_REPORTED: Final = 64
"""The number of lines about untrusted devices; later ones are not named."""


class Devices:
    """``workers`` are the welcomed devices, by label; ``book`` has the links between them."""

    def __init__(self, head: HeadContext, pairing: PairingService) -> None:
        node = head.node
        self._config, self._trust, self._timings = node.config, node.trust, node.timings
        self._options, self._core, self._reporter = head.options, head.core, head.reporter
        self._pairing = pairing
        self._caller = Caller.of(node.config, head.sockets, node.identity, node.workspace.build, node.timings.network)
        self.workers: dict[str, WorkerLink] = {}
        self.book = LinkBook(self._caller)
        self._sight = Sight(node.config.name, node.config.cluster)
        self._announced: Mapping[str, Peer] = {}
        self._met: dict[str, tuple[str, int]] = {}
        """The places where devices were last welcomed, by key."""
        self._tries: Counter[str] = Counter()
        """Number of greetings of each device since then, by key."""
        self._named: set[str] = set()
        """The keys of devices found through ``--device``."""
        self._reported: set[tuple[str, str]] = set()
        self._known_keys: set[str] = set()
        self._given: dict[str, str] = {}
        """The owner's names of devices that are trusted by a file, by key."""

    def api_of(self, name: str) -> str:
        """Return the URL at which the device relays requests; empty if it does not."""
        return self.workers[name].api if name in self.workers else ""

    def accept_relayed(self, port: int) -> None:
        """Let devices relay requests to ``port``."""
        self._caller = replace(self._caller, relay_port=port)

    @property
    def session(self) -> int:
        """The number of this start of the head, as workers know it."""
        return self._caller.session

    @property
    def measuring(self) -> frozenset[str]:
        """The trusted devices in sight that are measuring themselves and accept no head yet."""
        return frozenset(
            label for label, device in self._sight.devices.items() if device.is_measuring and device.trusted
        )

    @property
    def in_sight(self) -> list[Peer]:
        """Announced devices, trusted or not."""
        return [peer for peer in self._announced.values() if peer.is_worker_of(self._config.cluster)]

    @property
    def labels(self) -> dict[str, str]:
        """The names of trusted devices, by key."""
        return self._sight.labels

    def present(self, names: Collection[str]) -> list[WorkerLink]:
        """Return the links to those of ``names`` that are connected, by name."""
        return [self.workers[name] for name in sorted(names) if name in self.workers]

    async def farewell(self) -> None:
        """Dismiss all devices, as this head ends: those that asked to leave need not wait any more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                for name in list(self.workers):
                    await self.dismiss(name)

    def close(self) -> None:
        """Close every link."""
        for worker in self.workers.values():
            worker.close()

    async def discover(self, stack: AsyncExitStack) -> None:
        """Discover devices and be discovered, until ``stack`` is closed. Without multicast, named devices suffice."""
        try:
            discovery = Discovery(
                self._config.host,
                self._config.interface,
                timings=self._timings.discovery,
                trusts=self._trust.trusts,
            )
        except ClusterError as exc:
            if not self._config.devices:
                self._reporter.report_line(str(exc))
            return
        stack.push_async_callback(discovery.close)
        try:
            await discovery.browse(self._on_peers)
            await discovery.announce(
                self._config.name,
                cluster=self._config.cluster,
                role="head",
                version=__version__,
                port=self._options.http_port,
                key=self._caller.identity.public,
                http=resolved_host(self._options.http_host),
            )
        except MulticastError as exc:
            self._reporter.report_line(str(exc))
            return
        self._pairing.use(discovery)
        is_first = all(each.how == LOCAL for each in self._trust.entries())
        if is_first and not is_loopback(self._config.host):  # later a code is open only on request
            code = await self._pairing.open()
            self._reporter.report_line(
                f"to add a device, run there: primad join --code {code.code} (good for {code.expires_s / 60:.0f} "
                "minutes; 'primad pair' shows a new one)"
            )

    async def greet_named(self) -> list[str]:
        """Greet the named devices; return the addresses of those that are absent or not paired.

        Raises ``ClusterError`` for one that can never work for this head.
        """
        return [address for address in self._config.devices if not await self._greet_at(address)]

    async def await_named(self, addresses: Collection[str]) -> None:
        """Greet ``addresses`` repeatedly, until a device of each works for this head."""
        missing = list(addresses)
        while missing:
            await asyncio.sleep(self._timings.head.named_again_s)
            for address in list(missing):
                try:
                    is_here = await self._greet_at(address)
                except ClusterError as exc:
                    self._notify_once("", str(exc))
                    continue
                if is_here:
                    missing.remove(address)

    async def _greet_at(self, address: str) -> bool:
        try:
            await own_address(*split_address(address))
        except OSError as exc:  # a typing error in its name, or no network yet
            why = exc.strerror or exc
            self._notify_once("", f"--device {address}: {why}; retrying. Check that name, or give its IP address")
            return False
        self._look()
        if not self.labels:
            self._notify_once("", f"--device {address}: no device is paired yet; retrying. {_CURE}")
            return False
        try:
            worker = await greet_named(self._caller, address, self.labels, self._core.post)
        except ClusterError as exc:
            self._notify_once("", f"{exc}; retrying. {_CURE}")
            return False
        self._named.add(worker.key)
        self._met[worker.key] = split_address(address)
        await self._welcome(worker)
        return True

    async def greet(self, device: str) -> None:
        """Greet ``device``; ``Welcomed`` or ``DeviceRefused`` follows."""
        key = self._key_of(device)
        sighted = self._sight.devices.get(device)
        try:
            if key is None or not self._trust.trusts(key):
                raise ClusterError("it is no longer trusted")
            met = [self._met[key]] if key in self._met else []
            places = dict.fromkeys([*met, *(sighted.places(self._tries[key]) if sighted is not None else [])])
            self._tries[key] += 1
            end, _ = await probe(self._caller, places, [key])
            worker = await greet_once(self._caller, end, self._core.post, device)
        except ClusterError as exc:
            self._notify_once(device, f"{device} is left out: {exc}")
            self._core.post(types.DeviceRefused(device, str(exc)))
            return
        except Exception as exc:  # a bug; the core waits for an outcome
            logger.exception("%s could not be greeted", device)
            self._core.post(types.DeviceRefused(device, mistake(exc)))
            return
        await self._welcome(worker)

    def drop(self, device: str) -> None:
        """Close the link to ``device``; it may come back at another address."""
        worker = self.workers.pop(device, None)
        if worker is not None:
            worker.close()
        self.book.forget(device)

    async def dismiss(self, device: str) -> None:
        """Tell ``device`` that it may leave."""
        if device in self.workers:
            with suppress(ClusterError):
                await self.workers[device].dismiss()

    async def measure(self, devices: frozenset[str], *, again: bool) -> None:
        """Measure the missing links between ``devices`` and this one; ``Measured`` follows.

        ``again``: also links that did not work.
        """
        left = set(devices)
        unreached = self.book.unreached(devices)
        announced = {label: sighted.addresses for label, sighted in self._sight.devices.items() if sighted.trusted}
        self._core.describe("measuring links")
        while workers := self.present(left):
            try:
                await self.book.measure(workers, announced, self._reporter, again=again)
                break
            except DeviceLostError as exc:
                self._core.post(types.Lost(exc.device, str(exc)))
                left.discard(exc.device)
            except Exception:  # a bug; the core waits for an outcome
                logger.exception("the links could not be measured")
                left.clear()
        still = self.book.unreached(left)
        reached = {name for pair in unreached - still for name in pair} & left
        self._core.post(types.Measured(frozenset(left), unreached=bool(still), reached=frozenset(reached)))

    async def notify_revoked(self) -> None:
        """Notify each revoked device whenever it comes in sight; otherwise it would wait for this head."""
        notified: dict[str, int] = {}
        while True:
            revoked = self._trust.revoked()
            notified = {key: revision for key, revision in notified.items() if key in revoked}
            for key in sorted(revoked):
                peers = [peer for peer in self.in_sight if peer.key == key]
                met = [self._met[key]] if key in self._met else []
                places = dict.fromkeys([*met, *((at, peer.port) for peer in peers for at in peer.addresses)])
                revision = max((peer.revision for peer in peers), default=0)
                if places and notified.get(key) != revision:
                    notified[key] = revision
                    with suppress(ClusterError):  # it is absent, or does not trust this head either
                        await notify_revoked(self._caller, places, key)
            await asyncio.sleep(self._timings.head.trust_look_every_s)

    async def watch_trust(self) -> None:
        """Watch for changes by 'primad devices trust' and 'revoke', and by pairing."""
        entries: object = None
        while True:
            for worker in list(self.workers.values()):
                if not self._trust.trusts(worker.key):
                    # A daemon of this user is trusted while it runs; its link ends a moment later.
                    revoked = worker.key in self._trust.revoked()
                    reason = "it is no longer trusted" if revoked else "its primad ended"
                    self._core.post(types.Lost(worker.name, reason))
            latest = [(each.device, each.key) for each in self._trust.entries()], self._trust.revoked()
            if latest != entries:
                self._look()  # after the loss: a lost device is greeted again, a stranger is not
                if entries is not None:
                    for worker in list(self.workers.values()):
                        await self._introduce(worker)
            entries = latest
            await asyncio.sleep(self._timings.head.trust_look_every_s)

    def _on_peers(self, peers: dict[str, Peer]) -> None:
        self._announced = peers
        self._look()

    def _look(self) -> None:
        """Update what is in sight: announcements, or trust, may have changed."""
        before, entries = self._sight.devices, self._trust.entries()
        given = {each.key: each.device for each in entries if each.how != LOCAL}
        for key in given.keys() & self._given.keys():
            if given[key] != self._given[key]:
                self._sight.rename(key)
        self._given = given
        self._sight.look(self._announced, {each.key: each.device for each in entries})
        named = {label for key, label in self.labels.items() if key in self._named}
        for label in before.keys() - self._sight.devices.keys() - named:
            self._core.post(types.Vanished(label))
        for worker in list(self.workers.values()):
            if (label := self.labels.get(worker.key, worker.name)) != worker.name:
                self._core.post(types.Lost(worker.name, f"it is now named {label} here"))
                self._core.post(types.Vanished(worker.name))
                self._core.post(types.Seen(label, trusted=True))
        for label, sighted in self._sight.devices.items():
            if before.get(label) != sighted:
                self._see(label, sighted)
        for peer in self._sight.impostors:
            # Anyone can announce any name, so knowledge of a trusted device does not change by that.
            self._notify_of_stranger(
                peer.device, f"an untrusted device announces itself as {peer.device}; it is ignored"
            )

    def _key_of(self, label: str) -> str | None:
        return next((key for key, each in self.labels.items() if each == label), None)

    def _see(self, label: str, sighted: Sighted) -> None:
        if sighted.trusted and sighted.is_measuring and sighted.key not in self._met:  # it announces the end
            self._notify_once(label, f"{label} is being measured")
            self._core.post(types.Tick())  # so that the owner is told who is awaited
            return
        self._core.post(types.Seen(label, sighted.trusted))
        if not sighted.trusted and sighted.key not in self._known_keys:
            self._notify_of_stranger(
                label,
                f"{label} was discovered, but is not paired; 'primad pair' here shows a code for 'primad join --code' there",
            )

    def _notify_of_stranger(self, device: str, line: str) -> None:
        """Report an untrusted device. Anyone on the network can announce any number of names, so both output and memory
        are bounded."""
        if len(self._reported) < MAX_REPORTED:
            self._notify_once(device, line)
        elif (device, line) not in self._reported:
            self._notify_once("", "more untrusted devices were discovered; 'primad devices' lists them")

    def _notify_once(self, device: str, line: str) -> None:
        if (device, line) not in self._reported:
            self._reported.add((device, line))
            self._reporter.report_line(line)

    async def _welcome(self, worker: WorkerLink) -> None:
        """Add a device that works for this head from now on."""
        name = worker.name
        previous = self.workers.pop(name, None)
        if previous is not None:
            previous.close()
        self.workers[name] = worker
        self._known_keys.add(worker.key)
        self._met[worker.key] = (worker.end.host, worker.end.port)
        self._tries.pop(worker.key, None)
        self._reported = {(device, line) for device, line in self._reported if device != name}
        if worker.build != self._caller.build:
            self._reporter.report_line(build_gap(self._caller.build, worker.build, name))
        for other in list(self.workers.values()):
            await self._introduce(other)  # they must trust each other before they measure links or give layers
        self._core.post(types.Welcomed(name))

    async def _introduce(self, worker: WorkerLink) -> None:
        here = {each.key for each in self.workers.values()}
        trusted = sorted(self._trust.entries(), key=lambda each: each.key not in here)  # devices of its ring come first
        entries = [(each.device, each.key) for each in trusted if each.key != worker.key]
        with suppress(ClusterError):
            await worker.introduce(entries, self._trust.revoked() - {worker.key})
