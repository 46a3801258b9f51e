"""Announce this device and see others by mDNS (``_primad._tcp.local.``), on loopback or on the LAN.

Nothing secret is announced: the device's name, its cluster, its role, the protocol and the version.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import psutil
from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, NonUniqueNameException, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from primad.cluster.messages import PROTOCOL
from primad.config import LOOPBACK, NAME, is_loopback
from primad.errors import ClusterError, printable

logger = logging.getLogger(__name__)

SERVICE: Final = "_primad._tcp.local."
RESOLVE_TIMEOUT_MS: Final = 2000
_PROTOCOL: Final = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A device that announces itself. ``role`` is worker or head; ``port`` is its control port (a head's HTTP port)."""

    device: str
    cluster: str
    role: str
    version: str
    protocol: int
    addresses: tuple[str, ...]
    port: int


def announced_addresses(host: str) -> list[str]:
    """The IPv4 addresses to announce for a daemon that listens on ``host``: every one that others could reach.

    Raises ``ClusterError`` when there is none.
    """
    try:
        address = "0.0.0.0" if host == "::" else socket.gethostbyname(host)
    except (OSError, UnicodeError) as exc:
        raise ClusterError(f"--host {host}: mDNS announces IPv4 addresses, and this has none; use another one") from exc
    if not ipaddress.ip_address(address).is_unspecified:
        return [address]
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
        for address in addresses
        if address.family == socket.AF_INET and not is_loopback(address.address)
    ] or [LOOPBACK]


class Discovery:
    """This device's place in mDNS. ``open`` it, ``announce`` and ``browse``, ``close`` it."""

    def __init__(self, host: str) -> None:
        self._addresses = announced_addresses(host)
        try:
            self._zeroconf = AsyncZeroconf(interfaces=self._addresses, ip_version=IPVersion.V4Only)
        except OSError as exc:
            raise ClusterError(
                f"mDNS cannot be used on {', '.join(self._addresses)}: {exc.strerror or exc}; name devices with --device"
            ) from exc
        self._browser: AsyncServiceBrowser | None = None
        self._info: AsyncServiceInfo | None = None
        self._peers: dict[str, Peer] = {}

    async def announce(self, peer_name: str, *, cluster: str, role: str, version: str, port: int) -> str:
        """Announce this device; its name, with a number behind it when another device had the name first."""
        for number in range(1, 100):
            device = peer_name if number == 1 else f"{peer_name[:59]}-{number}"
            info = AsyncServiceInfo(
                SERVICE,
                f"{device}.{SERVICE}",
                addresses=[socket.inet_aton(address) for address in self._addresses],
                port=port,
                properties={
                    "device": device,
                    "cluster": cluster,
                    "role": role,
                    "version": version,
                    "protocol": str(PROTOCOL),
                },
                server=f"primad-{blake2b(device.encode(), digest_size=8).hexdigest()}-{port}.local.",
            )
            try:
                await self._zeroconf.async_register_service(info)
            except NonUniqueNameException:
                continue
            self._info = info
            return device
        raise ClusterError(f"--name {peer_name}: a hundred devices have this name already; choose another")

    async def browse(self, changed: Callable[[dict[str, Peer]], None]) -> None:
        """Call ``changed`` with every device in sight whenever one comes or goes."""
        pending: set[str] = set()

        async def resolve(zeroconf: Zeroconf, name: str) -> None:
            info = AsyncServiceInfo(SERVICE, name)
            found = await info.async_request(zeroconf, RESOLVE_TIMEOUT_MS)
            peer = peer_of(info) if found else None
            if peer is not None and name in pending:
                self._peers[name] = peer
                changed(dict(self._peers))

        def on_change(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            if state_change is ServiceStateChange.Removed:
                pending.discard(name)
                if self._peers.pop(name, None) is not None:
                    changed(dict(self._peers))
                return
            pending.add(name)
            assert self._zeroconf.zeroconf.loop is not None
            task = self._zeroconf.zeroconf.loop.create_task(resolve(zeroconf, name))
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)

        _tasks: set[object] = set()
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[on_change])

    async def close(self) -> None:
        """Say goodbye and stop."""
        if self._browser is not None:
            await self._browser.async_cancel()
        try:
            if self._info is not None:
                await (await self._zeroconf.async_unregister_service(self._info))  # the second waits until it is said
        except ZeroconfError as exc:
            logger.debug("mDNS goodbye: %s", exc)
        await self._zeroconf.async_close()


def peer_of(info: AsyncServiceInfo) -> Peer | None:
    """What a peer announces, or None when it is not what a primad device announces."""
    texts = info.decoded_properties
    device, cluster, role = (texts.get(key) or "" for key in ("device", "cluster", "role"))
    protocol = texts.get("protocol") or ""
    addresses = tuple(info.parsed_addresses(IPVersion.V4Only))
    if not NAME.fullmatch(device) or not NAME.fullmatch(cluster) or role not in ("worker", "head"):
        return None
    if not _PROTOCOL.fullmatch(protocol) or not addresses or info.port is None or not 0 < info.port < 65_536:
        return None
    return Peer(
        device=device,
        cluster=cluster,
        role=role,
        version=printable(texts.get("version") or "", 40),
        protocol=int(protocol),
        addresses=addresses,
        port=info.port,
    )


async def look(host: str, seconds: float) -> list[Peer]:
    """The devices in sight within ``seconds`` of looking from an address like ``host``, by name."""
    discovery = Discovery(host)
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
