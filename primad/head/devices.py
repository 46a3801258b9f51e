"""The devices that a head works with: find them, greet them, introduce them to each other, measure the links between them.

What happens to them is posted as the events of ``membership/types.py``; the membership core decides what to do about it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import AsyncExitStack, suppress
from typing import Final

from primad import __version__
from primad.daemon.pairing_service import PairingService
from primad.daemon.reporter import Reporter
from primad.daemon.station import Station
from primad.errors import ClusterError
from primad.head.blame import DeviceLostError
from primad.head.core import Core
from primad.head.link_book import LinkBook
from primad.head.worker_link import Caller, WorkerLink, greet_named, probe
from primad.head.worker_link import greet as say_hello
from primad.membership import types
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
MOST_TOLD: Final = 64
"""Devices that are not trusted are named until so many lines were said about devices."""


class Devices:
    """``workers`` are those that said welcome, by name; ``book`` has the links between them. ``caller`` is this head."""

    def __init__(
        self,
        station: Station,
        *,
        http_port: int,
        caller: Caller,
        pairing: PairingService,
        core: Core,
        reporter: Reporter,
    ) -> None:
        self._config, self._trust, self._timings = station.config, station.trust, station.timings
        self._http_port, self._caller, self._pairing = http_port, caller, pairing
        self._core, self._reporter = core, reporter
        self.workers: dict[str, WorkerLink] = {}
        self.book = LinkBook(caller.context, caller.identity, caller.device, timings=caller.timings)
        self._peers: dict[str, Peer] = {}
        self._named: dict[str, tuple[str, int, str]] = {}
        self._told: set[tuple[str, str]] = set()
        self._known_keys: set[str] = set()

    @property
    def session(self) -> int:
        """This start of the head, as they know it."""
        return self._caller.session

    @property
    def measuring(self) -> frozenset[str]:
        """The trusted devices in sight that measure themselves and take no head yet."""
        return frozenset(
            name for name, peer in self._peers.items() if peer.is_measuring and self._trust.trusts(peer.key)
        )

    @property
    def in_sight(self) -> list[Peer]:
        """Those that announce themselves, trusted or not."""
        return list(self._peers.values())

    def present(self, names: Collection[str]) -> list[WorkerLink]:
        """Those of ``names`` that are spoken to, by name."""
        return [self.workers[name] for name in sorted(names) if name in self.workers]

    async def farewell(self) -> None:
        """This head ends: whoever waits for its leave to go need not wait any more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                for name in list(self.workers):
                    await self.dismiss(name)

    def close(self) -> None:
        """Close every link."""
        for worker in self.workers.values():
            worker.close()

    async def discover(self, stack: AsyncExitStack) -> None:
        """Look for devices and be looked for, until ``stack`` is closed; without multicast those that were named do."""
        try:
            discovery = Discovery(self._config.host, self._config.interface, timings=self._timings.discovery)
        except ClusterError as exc:
            if not self._config.devices:
                self._reporter.say(str(exc))
            return
        stack.push_async_callback(discovery.close)
        try:
            await discovery.browse(self._on_peers)
            await discovery.announce(
                self._config.name,
                cluster=self._config.cluster,
                role="head",
                version=__version__,
                port=self._http_port,
                key=self._caller.identity.public,
            )
        except MulticastError as exc:
            self._reporter.say(str(exc))
            return
        self._pairing.use(discovery)
        is_first = all(each.how == LOCAL for each in self._trust.entries())
        if is_first and not is_loopback(self._config.host):  # later a code is open only when it is asked for
            code = await self._pairing.open()
            self._reporter.say(
                f"to add a device, run there: primad join --code {code.code} (good for {code.expires_s / 60:.0f} minutes; "
                "'primad pair' shows a new one)"
            )

    async def greet_named(self) -> list[str]:
        """Say hello to the devices that were named; returns the addresses of those that are not there, or not paired.

        Raises ``ClusterError`` for one that can never work for this head.
        """
        return [address for address in self._config.devices if not await self._greet_at(address)]

    async def await_named(self, addresses: Collection[str]) -> None:
        """Say hello at ``addresses`` again and again, until a device of each works for this head."""
        missing = list(addresses)
        while missing:
            await asyncio.sleep(self._timings.head.named_again_s)
            for address in list(missing):
                try:
                    is_here = await self._greet_at(address)
                except ClusterError as exc:
                    self._tell_once("", str(exc))
                    continue
                if is_here:
                    missing.remove(address)

    async def _greet_at(self, address: str) -> bool:
        try:
            await own_address(*split_address(address))
        except OSError as exc:  # a slip in its name, or no network yet
            why = exc.strerror or exc
            self._tell_once(
                "", f"--device {address}: {why}; it is asked again and again. Check that name, or give its IP address"
            )
            return False
        keys = [each.key for each in self._trust.entries()]
        if not keys:
            self._tell_once("", f"--device {address}: no device is paired yet; it is asked again and again. {_CURE}")
            return False
        try:
            worker = await greet_named(self._caller, address, keys, self._core.post)
        except ClusterError as exc:
            self._tell_once("", f"{exc}; it is asked again and again. {_CURE}")
            return False
        self._named[worker.name] = (*split_address(address), worker.key)
        await self._welcome(worker)
        return True

    async def greet(self, device: str) -> None:
        """Say hello to ``device``: ``Welcomed`` or ``Refused`` follows."""
        peer, named = self._peers.get(device), self._named.get(device)
        places = [named[:2]] if named is not None else []
        keys = {named[2]} if named is not None else set()
        if peer is not None:
            places += [(address, peer.port) for address in peer.addresses]
            keys.add(peer.key)
        keys = {key for key in keys if self._trust.trusts(key)}  # what is known of it may be from before it was revoked
        try:
            if not keys:
                raise ClusterError("it is not trusted any more")
            end, probed = await probe(self._caller, places, keys)
            if probed.device != device:
                end.close()
                raise ClusterError(f"{probed.device} answers in its place")
            worker = await say_hello(self._caller, end, self._core.post)
        except ClusterError as exc:
            self._tell_once(device, f"{device} is left out: {exc}")
            self._core.post(types.DeviceRefused(device, str(exc)))
            return
        except Exception as exc:  # our own mistake; the core waits for an outcome
            logger.exception("%s could not be greeted", device)
            self._core.post(types.DeviceRefused(device, mistake(exc)))
            return
        await self._welcome(worker)

    def drop(self, device: str) -> None:
        """Close the link to ``device``; it may come back elsewhere."""
        worker = self.workers.pop(device, None)
        if worker is not None:
            worker.close()
        self.book.forget(device)

    async def dismiss(self, device: str) -> None:
        """Tell ``device`` that it may go."""
        if device in self.workers:
            with suppress(ClusterError):
                await self.workers[device].dismiss()

    async def measure(self, devices: frozenset[str], *, again: bool) -> None:
        """Measure what is missing of the links between ``devices`` and here: ``Measured`` follows.

        ``again``: those that did not work too.
        """
        left = set(devices)
        unreached = self.book.unreached(devices)
        announced = {name: peer.addresses for name, peer in self._peers.items()}
        self._core.describe("measuring links")
        while workers := self.present(left):
            try:
                await self.book.measure(workers, announced, self._reporter, again=again)
                break
            except DeviceLostError as exc:
                self._core.post(types.Lost(exc.device, str(exc)))
                left.discard(exc.device)
            except Exception:  # our own mistake; the core waits for an outcome
                logger.exception("the links could not be measured")
                left.clear()
        still = self.book.unreached(left)
        reached = {name for pair in unreached - still for name in pair} & left
        self._core.post(types.Measured(frozenset(left), unreached=bool(still), reached=frozenset(reached)))

    async def watch_trust(self) -> None:
        """Notice what 'primad devices trust' and 'revoke', and pairing, change."""
        trusted: dict[str, bool] = {}
        entries: object = None
        while True:
            for worker in list(self.workers.values()):
                if not self._trust.trusts(worker.key):
                    # A daemon of this user is trusted as long as it runs; its link ends a moment later.
                    revoked = worker.key in self._trust.revoked()
                    reason = "it is not trusted any more" if revoked else "its primad ended"
                    self._core.post(types.Lost(worker.name, reason))
            for peer in list(self._peers.values()):  # after the loss: who is gone is greeted again, a stranger is not
                now = self._trust.trusts(peer.key)
                if trusted.get(peer.key, now) != now:
                    self._see(peer)
                trusted[peer.key] = now
            latest = [(each.device, each.key) for each in self._trust.entries()], self._trust.revoked()
            if entries is not None and latest != entries:
                for worker in list(self.workers.values()):
                    await self._introduce(worker)
            entries = latest
            await asyncio.sleep(self._timings.head.trust_look_every_s)

    def _on_peers(self, peers: dict[str, Peer]) -> None:
        seen = {peer.device: peer for peer in peers.values() if peer.is_worker_of(self._config.cluster)}
        before, self._peers = self._peers, seen
        for name in before.keys() - seen.keys() - self._named.keys():
            self._core.post(types.Vanished(name))
        for name, peer in seen.items():
            if before.get(name) != peer:
                self._see(peer)

    def _see(self, peer: Peer) -> None:
        trusted = self._trust.trusts(peer.key)
        if not trusted and any(each.device == peer.device for each in self._trust.entries()):
            # Anyone can announce any name; what we know of the device that we trust does not change by that.
            self._tell_of_stranger(
                peer.device, f"a device that is not trusted calls itself {peer.device}; it is not listened to"
            )
            return
        if trusted and peer.is_measuring:  # it announces itself anew when it is done
            self._tell_once(peer.device, f"{peer.device} is being measured")
            self._core.post(types.Tick())  # who waits for it is told
            return
        self._core.post(types.Seen(peer.device, trusted))
        if not trusted and peer.key not in self._known_keys:
            self._tell_of_stranger(
                peer.device,
                f"{peer.device} is in sight, but not paired; 'primad pair' here shows a code for 'primad join --code' there",
            )

    def _tell_of_stranger(self, device: str, line: str) -> None:
        """Anyone on the network can announce names without end; they fill neither the terminal nor the memory."""
        if len(self._told) < MOST_TOLD:
            self._tell_once(device, line)
        elif (device, line) not in self._told:
            self._tell_once("", "more devices that are not trusted are in sight; 'primad devices' lists them")

    def _tell_once(self, device: str, line: str) -> None:
        if (device, line) not in self._told:
            self._told.add((device, line))
            self._reporter.say(line)

    async def _welcome(self, worker: WorkerLink) -> None:
        """Take up a device that works for this head from now on."""
        name = worker.name
        if name == self._config.name:
            worker.close()
            reason = f"it has the head's name, {name}; give one of them another --name"
            self._core.post(types.DeviceRefused(name, reason))
            raise_named = any(named[2] == worker.key for named in self._named.values())
            if raise_named:
                raise ClusterError(f"--device {worker.end.address}: {reason}")
            return
        previous = self.workers.pop(name, None)
        if previous is not None:
            previous.close()
        self.workers[name] = worker
        self._known_keys.add(worker.key)
        self._told = {(device, line) for device, line in self._told if device != name}
        if worker.build != self._caller.build:
            self._reporter.say(build_gap(self._caller.build, worker.build, name))
        for other in list(self.workers.values()):
            await self._introduce(other)  # they trust each other before they are asked to measure or to give layers
        self._core.post(types.Welcomed(name))

    async def _introduce(self, worker: WorkerLink) -> None:
        entries = [(each.device, each.key) for each in self._trust.entries() if each.key != worker.key]
        with suppress(ClusterError):
            await worker.introduce(entries, self._trust.revoked() - {worker.key})
