"""Announces this device and discovers others by mDNS (``_primad._tcp.local.``), on loopback or the LAN, over IPv4 and
IPv6.

Nothing secret is announced: the device's name, its cluster, its role, the protocol, the version, its public key, and
while a pairing code is open, the pairing port. Announcements of others are unverified until a connection proves them.

No event that works on every system reports that an interface came or went, so the addresses are checked every
``look_every_s``: a laptop that comes back to its Wi-Fi is announced there within that time. Multicast packets get lost,
and a device announces itself only when it starts, so all devices are queried again every ``ask_every_s``.

Queries ask for multicast replies (QM), never for unicast (QU): several programs of a machine may use the mDNS port, and
a unicast reply reaches only one of them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Final

from zeroconf import (  # type: ignore[attr-defined]  # AddressResolver is not in its __all__
    AddressResolver,
    DNSQuestionType,
    NonUniqueNameException,
    ServiceStateChange,
    Zeroconf,
)
from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from primad.errors import ClusterError
from primad.network.addresses import (
    Interface,
    multicast_addresses,
    read_interfaces,
    resolved_host,
    usable_addresses,
)
from primad.network.messages import PROTOCOL
from primad.network.multicast import can_multicast
from primad.network.peer import MAX_OF_ONE, SERVICE, Peer, peer_of
from primad.network.scopes import needs_scope
from primad.settings.config import LOOPBACK
from primad.settings.timings import DiscoveryTimings

__all__ = ["SERVICE", "Discovery", "MulticastError", "Peer", "look", "peer_of"]

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 512
"""Limit of known devices; more are ignored, except trusted ones: announcing costs a stranger nothing, but us memory."""
TRIES: Final = 9
"""Limit of names that are queried by mDNS. A host that claims to have them all is not a device, and is no longer
queried."""

FAILURES: Final = (ZeroconfError, OSError, RuntimeError)
"""What zeroconf raises if it fails."""

Changed = Callable[[dict[str, Peer]], None]
"""Called with all devices in sight, by their mDNS names."""


class MulticastError(ClusterError):
    """mDNS does not work. A device can run without it."""


class Discovery:
    """This device's mDNS. Create one, ``announce`` and ``browse``, then ``close`` it.

    ``host`` is the address that the daemon listens on; ``interface`` (a name or an address) selects one interface.
    ``service`` is the announced type. Devices with a key that ``trusts`` accepts always have room. Needs a running
    event loop. Raises ``ClusterError`` if mDNS is impossible.
    """

    def __init__(
        self,
        host: str,
        interface: str | None = None,
        *,
        timings: DiscoveryTimings = DiscoveryTimings(),
        service: str = SERVICE,
        trusts: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._timings, self._trusts = timings, trusts
        self._service = service
        self._host = resolved_host(host)
        self._interface = interface
        self._own = read_interfaces()
        self._addresses = usable_addresses(self._own, self._host, interface)
        self._places = _places(self._own, self._host, interface)
        if not self._addresses or not self._places:
            raise ClusterError(
                f"mDNS cannot be used{_on(interface)}: no address there has multicast; name devices with --device"
            )
        _quiet()
        try:
            self._zeroconf = AsyncZeroconf(interfaces=self._places)
        except FAILURES as exc:
            raise ClusterError(
                f"mDNS cannot be used on {', '.join(self._places)}: {_why(exc)}; name devices with --device"
            ) from exc
        self._browser: AsyncServiceBrowser | None = None
        self._changed: Changed | None = None
        self._announced: dict[str, str] = {}
        self._port = 0
        self._info: AsyncServiceInfo | None = None
        self._announcing: asyncio.Future[None] | None = None
        """An announcement is repeated several times; repeats of an outdated one must not follow the next one."""
        self._peers: dict[str, Peer] = {}
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """The currently announced addresses."""
        return tuple(self._addresses)

    async def announce(
        self,
        peer_name: str,
        *,
        cluster: str,
        role: str,
        version: str,
        port: int,
        key: str,
        is_measuring: bool = False,
        http: str = "",
        api: str = "",
    ) -> str:
        """Announce this device; return its announced name, which gets a number if another device has the same name.

        ``port`` is where it listens, ``key`` its public key (40 characters). ``is_measuring`` is announced until
        ``end_measuring``. ``http`` is the address on which a head's HTTP server has that port; ``api`` is where a
        worker relays requests (``host:port``). Raises ``MulticastError`` when mDNS does not work.
        """
        await self._started()
        self._port = port
        for number in range(1, TRIES + 2):
            is_asked = number <= TRIES
            behind = str(number) if is_asked else secrets.token_hex(4)
            device = peer_name if number == 1 else f"{peer_name[: 60 - len(behind)]}-{behind}"
            self._announced |= {
                "device": device,
                "cluster": cluster,
                "role": role,
                "version": version,
                "protocol": str(PROTOCOL),
                "key": key,
            } | ({"measuring": "1"} if is_measuring else {})
            self._announced |= {"http": http} if http else {}
            self._announced |= {"api": api} if api else {}
            info = self._to_announce()
            try:
                register = self._zeroconf.async_register_service
                self._report_soon(await register(info, cooperating_responders=not is_asked))
            except NonUniqueNameException:
                continue
            except FAILURES as exc:
                raise MulticastError(f"mDNS cannot announce this device: {_why(exc)}") from exc
            self._info = info
            self._watch()
            return device
        raise AssertionError("the last name is free")

    async def end_measuring(self) -> None:
        """Announce that this device has been measured."""
        self._announced.pop("measuring", None)
        await self._announce_again()

    async def set_pairing(self, channel: int, port: int | None) -> None:
        """Announce that a code of ``channel`` is open at ``port``; None: that it is closed."""
        self._announced.pop("pair", None)
        if port is not None:
            self._announced["pair"] = f"{channel}:{port}"
        await self._announce_again()

    async def browse(self, changed: Changed) -> None:
        """Call ``changed`` with every device in sight whenever one comes, changes or goes.

        Raises ``MulticastError`` when mDNS does not work.
        """
        await self._started()
        self._changed = changed
        self._ask()
        self._watch()

    async def leads_here(self, name: str) -> bool:
        """Whether others find this machine by ``name`` (such as desk.local): only a service of the system answers for
        that name, not primad."""
        asked = AddressResolver(f"{name}.")
        try:
            await asked.async_request(self._zeroconf.zeroconf, 1000 * self._timings.own_name_s, DNSQuestionType.QM)
        except FAILURES as exc:
            logger.debug("mDNS cannot query %s: %s", name, _why(exc))
        found = set(asked.parsed_addresses())
        return bool(found) and found <= {str(address.ip) for each in self._own for address in each.addresses}

    async def refresh(self) -> None:
        """Check this machine's addresses; use new ones, and announce changes."""
        addresses, places = self._addresses, self._places
        self._own = read_interfaces()
        try:
            self._addresses = usable_addresses(self._own, self._host, self._interface)
            self._places = _places(self._own, self._host, self._interface)
        except ClusterError as exc:
            logger.debug("%s", exc)  # the requested interface is missing, like an unplugged adapter
            self._places = []
        if addresses != self._addresses and self._addresses:
            await self._announce_again()  # before new interfaces are added, which repeats the announcement on them
        try:
            await self._zeroconf.async_update_interfaces(self._places)
        except FAILURES as exc:
            logger.debug(
                "mDNS on %s: %s", self._places, _why(exc)
            )  # an interface went away while it was added: retried at the next check
        if set(self._places) - set(places):
            await self._ask_again()
        self._look_again_at_peers()

    async def close(self) -> None:
        """Say goodbye and stop."""
        tasks = [task for task in (self._watching, self._announcing, *self._resolving.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for farewell in (self._stop_asking, self._send_goodbye, self._zeroconf.async_close):
            try:
                await farewell()
            except FAILURES as exc:
                logger.debug("mDNS goodbye: %s", _why(exc))

    async def _started(self) -> None:
        """Wait until mDNS works. Raises ``MulticastError`` if it does not.

        zeroconf's own wait works only once: after its timeout, nothing counts as a start.
        """
        for _ in range(self._timings.looks_for_start):
            if self._zeroconf.zeroconf.started:
                return
            await asyncio.sleep(self._timings.look_for_start_s)
        raise MulticastError(f"mDNS did not start on {', '.join(self._places)}; name devices with --device")

    async def _stop_asking(self) -> None:
        if self._browser is not None:
            await self._browser.async_cancel()

    async def _send_goodbye(self) -> None:
        if self._info is not None:
            await (await self._zeroconf.async_unregister_service(self._info))  # the second one waits until it is sent

    def _report_soon(self, announcement: Awaitable[None]) -> asyncio.Future[None]:
        """Send an announcement in the background; a failure has the same effect as a lost packet."""
        sending = self._announcing = asyncio.ensure_future(announcement)
        sending.add_done_callback(_heard_out)
        return sending

    def _to_announce(self) -> AsyncServiceInfo:
        """Return the current records, with a new revision.

        Receivers keep earlier records for a while and see no change in a record that they already have. So every
        announcement differs from all earlier ones, and its addresses belong to a new host name.
        """
        device = self._announced["device"]
        revision = time.time_ns() // 1_000_000
        return AsyncServiceInfo(
            self._service,
            f"{device}.{self._service}",
            addresses=[_packed(address) for address in self._addresses],
            port=self._port,
            properties=self._announced | {"rev": str(revision)},
            server=f"primad-{blake2b(f'{device} {revision}'.encode(), digest_size=8).hexdigest()}-{self._port}.local.",
            host_ttl=self._timings.time_to_live_s,
            other_ttl=self._timings.time_to_live_s,
        )

    async def _announce_again(self) -> None:
        if self._info is None:
            return
        self._info = self._to_announce()
        if self._announcing is not None:
            self._announcing.cancel()
        try:
            await asyncio.wait([self._report_soon(await self._zeroconf.async_update_service(self._info))])
        except FAILURES as exc:
            logger.debug("mDNS announcement: %s", _why(exc))

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        asked_s = time.monotonic()
        while True:
            await asyncio.sleep(self._timings.look_every_s)
            try:
                await self.refresh()
                if time.monotonic() - asked_s >= self._timings.ask_every_s:
                    await self._ask_again()
                    asked_s = time.monotonic()
            except Exception:  # without browsing no device is found any more, whatever the reason
                logger.exception("looking for devices failed; retrying")

    async def _ask_again(self) -> None:
        """Query all devices: a new browser queries immediately, this one only when its records are old.

        Also reports all known devices, including those that did not reply with an address.
        """
        if self._browser is not None:
            await self._browser.async_cancel()
            self._ask()

    def _ask(self) -> None:
        try:
            self._browser = AsyncServiceBrowser(
                self._zeroconf.zeroconf, self._service, handlers=[self._on_change], question_type=DNSQuestionType.QM
            )
        except FAILURES as exc:
            raise MulticastError(f"mDNS cannot look for devices: {_why(exc)}") from exc

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        task = self._resolving.pop(name, None)
        if task is not None:
            task.cancel()
        if state_change is ServiceStateChange.Removed:
            self._forget(name)
        elif name in self._peers or len(self._peers) + len(self._resolving) < MAX_PEERS or self._make_room(name):
            self._resolve_soon(name)

    def _make_room(self, name: str) -> bool:
        """Make room for ``name`` if it is announced with a trusted key, and return whether there is room. Another
        device is forgotten for it, one with the same key if that key has many."""
        info = AsyncServiceInfo(self._service, name)
        peer = peer_of(info, self._own) if info.load_from_cache(self._zeroconf.zeroconf) else None
        if peer is None or not self._trusts(peer.key):
            return False
        counts = Counter(each.key for each in self._peers.values())
        is_crowded = counts[peer.key] >= MAX_OF_ONE
        for at, each in self._peers.items():
            if each.key == peer.key if is_crowded else counts[each.key] > MAX_OF_ONE or not self._trusts(each.key):
                del self._peers[at]
                break
        return True

    def _resolve_soon(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._resolve(name))
        self._resolving[name] = task
        task.add_done_callback(lambda task: self._resolving.pop(name) if self._resolving.get(name) is task else None)

    async def _resolve(self, name: str) -> None:
        """Query what ``name`` announces; a device that does not reply counts as gone."""
        timeout_ms, peer = 1000 * self._timings.resolve_timeout_s, None
        try:
            info = AsyncServiceInfo(self._service, name)
            if await info.async_request(self._zeroconf.zeroconf, timeout_ms, DNSQuestionType.QM):
                peer = peer_of(info, self._own)
        except FAILURES as exc:
            logger.debug("mDNS cannot query %s: %s", name, _why(exc))
        if peer is None:
            self._forget(name)
        elif self._peers.get(name) != peer:
            self._peers[name] = peer
            self._notify()

    def _look_again_at_peers(self) -> None:
        """Query devices again whose records expired or changed silently.

        A device that died said no goodbye and does not reply. The scope of a link-local address may become known late.
        The order of addresses depends on our own addresses.
        """
        for name, peer in self._peers.items():
            info = AsyncServiceInfo(self._service, name)
            fresh = info.load_from_cache(self._zeroconf.zeroconf)
            if (not fresh or peer_of(info, self._own) != peer) and name not in self._resolving:
                self._resolve_soon(name)

    def _forget(self, name: str) -> None:
        if self._peers.pop(name, None) is not None:
            self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed(dict(self._peers))


async def look(host: str, seconds: float, interface: str | None = None) -> list[Peer]:
    """Return the devices seen within ``seconds`` from an address like ``host``, by name.

    Raises ``ClusterError`` if discovery is impossible.
    """
    discovery = Discovery(host, interface)
    peers: dict[str, Peer] = {}

    def changed(current: dict[str, Peer]) -> None:
        peers.clear()
        peers.update(current)

    try:
        await discovery.browse(changed)
        await asyncio.sleep(seconds)
    finally:
        await discovery.close()
    return sorted(peers.values(), key=lambda peer: (peer.cluster, peer.device))


def _places(own: Sequence[Interface], host: str, interface: str | None) -> list[str]:
    """The addresses for mDNS. Raises ``ClusterError`` like ``multicast_addresses``.

    Link-local ones of IPv6 are unusable in their first second, during duplicate detection. If there are no others,
    loopback is used until the next check.
    """
    wanted = multicast_addresses(own, host, interface)
    usable = [place for place in wanted if can_multicast(place, own)]
    if not usable and wanted and all(needs_scope(place) for place in wanted):
        return [place for place in (LOOPBACK,) if can_multicast(place, own)]
    return usable


def _heard_out(sending: asyncio.Future[None]) -> None:
    error = None if sending.cancelled() else sending.exception()
    if error is not None:
        logger.debug("mDNS announcement: %s", _why(error))


def _why(error: BaseException) -> str:
    """Describe ``error``: many of zeroconf's errors have no text."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def _on(interface: str | None) -> str:
    return "" if interface is None else f" on --interface {interface}"


def _quiet() -> None:
    """Silence zeroconf's warnings with a traceback for each interface that comes and goes, which are no news to the
    owner."""
    noisy = logging.getLogger("zeroconf")
    if noisy.level == logging.NOTSET and not logger.isEnabledFor(logging.DEBUG):
        noisy.setLevel(logging.ERROR)
