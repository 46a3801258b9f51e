"""Decides which of this machine's addresses others could reach, and which of theirs to try first. Pure, except
``read_interfaces`` and ``resolved_host``.

A home machine has many addresses: bridges of containers and virtual machines (the same 172.17.0.1 on every Docker
host), VPNs, dead interfaces, and IPv6 addresses that are meaningless without their interface. All addresses that could
work are announced and tried, the likeliest first.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from primad.errors import ClusterError
from primad.settings.config import LOOPBACK

MAX_ANNOUNCED: Final = 16
"""Limit of a device's announced addresses; an mDNS packet has little room."""
_BRIDGE: Final = re.compile(
    r"(docker|podman|br-|veth|virbr|vnet|lxcbr|lxdbr|cni|flannel|cali|vmnet|vboxnet|vEthernet)|bridge\d{3}$"
)
_VPN: Final = re.compile(r"(tun|tap|wg|utun|ppp|tailscale|zt|nordlynx|proton)")
_DOCKER: Final = ipaddress.ip_network("172.17.0.0/16")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Subnet = ipaddress.IPv4Interface | ipaddress.IPv6Interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface: its addresses with their prefixes (no scope); ``index`` is 0 if the system has none."""

    name: str
    index: int
    up: bool
    addresses: tuple[Subnet, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether the interface reaches only this machine."""
        return bool(self.addresses) and all(address.ip.is_loopback for address in self.addresses)

    @property
    def rank(self) -> int:
        """0 for an ordinary interface, 1 for a VPN, 2 for a bridge of containers or virtual machines."""
        if _BRIDGE.match(self.name):
            return 2
        return 1 if _VPN.match(self.name) else 0


def read_interfaces() -> tuple[Interface, ...]:
    """The current interfaces of this machine."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return tuple(
        Interface(
            name=name,
            index=_index(name),
            up=name in up,
            addresses=tuple(
                found
                for address in addresses
                if address.family in (socket.AF_INET, socket.AF_INET6)
                and (found := _subnet(address.address, address.netmask)) is not None
            ),
        )
        for name, addresses in psutil.net_if_addrs().items()
    )


def resolved_host(host: str) -> str:
    """Return ``host`` (a name or an address to listen on) as an address; IPv4 if it has both. Raises ``ClusterError``."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise ClusterError(f"--host {host}: this address cannot be announced; use another one") from exc
    return str(sorted(found, key=lambda entry: entry[0] == socket.AF_INET6)[0][4][0])


def usable_addresses(interfaces: Sequence[Interface], host: str, interface: str | None = None) -> list[str]:
    """Return the addresses to announce for a daemon that listens on ``host``, the likeliest first, without scopes.

    0.0.0.0 means every IPv4 address, :: every address of both kinds; loopback only if there is nothing else.
    ``interface`` (a name or an address of this machine) selects one interface. Empty if no address remains. Raises
    ``ClusterError`` for an ``interface`` that this machine does not have, or that does not have ``host``.
    """
    wanted = ipaddress.ip_address(host.partition("%")[0])
    chosen = chosen_interfaces(interfaces, interface)
    only = _bare(interface) if interface else None
    if not wanted.is_unspecified:
        if interface and not any(wanted == address.ip for found in chosen for address in found.addresses):
            raise ClusterError(f"--interface {interface}: {host} is not an address of it; leave out one of the two")
        return [str(wanted)]
    found = [
        address.ip
        for found in sorted((found for found in chosen if found.up), key=lambda found: found.rank)
        for address in sorted(found.addresses, key=lambda address: _kind(address.ip))
        if (wanted.version == 6 or address.version == 4) and only in (None, address.ip)
    ]
    outside = [str(address) for address in found if not address.is_loopback]
    inside = [str(address) for address in found if address.is_loopback]
    if interface is None and not outside:
        return [LOOPBACK]
    return list(dict.fromkeys(outside or inside))[:MAX_ANNOUNCED]


def chosen_interfaces(interfaces: Sequence[Interface], interface: str | None) -> list[Interface]:
    """Return the interfaces that ``interface`` selects by name or address; all without it. Raises ``ClusterError`` for
    none."""
    if interface is None:
        return list(interfaces)
    address = _bare(interface)
    chosen = [
        found
        for found in interfaces
        if found.name == interface or any(address is not None and address == own.ip for own in found.addresses)
    ]
    if not chosen:
        names = ", ".join(found.name for found in interfaces if found.addresses)
        raise ClusterError(f"--interface {interface}: this machine has no such interface or address; it has {names}")
    return chosen


def multicast_addresses(interfaces: Sequence[Interface], host: str, interface: str | None = None) -> list[str]:
    """This machine's addresses for mDNS: every IPv4 address, and one IPv6 address per interface.

    A daemon on loopback uses 127.0.0.1 even if it announces ::1: the loopback interface of Linux has no IPv6 multicast.
    Raises ``ClusterError`` like ``usable_addresses``.
    """
    wanted = ipaddress.ip_address(host.partition("%")[0])
    if wanted.is_loopback:
        return [LOOPBACK]
    chosen = [found for found in chosen_interfaces(interfaces, interface) if found.up and not found.is_loopback]
    if not wanted.is_unspecified:
        chosen = [found for found in chosen if any(wanted == address.ip for address in found.addresses)]
    only = _bare(interface) if interface else None
    found: list[str] = []
    for place in chosen:
        own = [address.ip for address in place.addresses if only in (None, address.ip)]
        found += [str(address) for address in own if address.version == 4]
        found += [str(address) for address in sorted(own, key=_from_link) if address.version == 6][:1]
    return found or ([LOOPBACK] if interface is None or _leads_nowhere(interfaces, interface) else [])


def order_by_likelihood(addresses: Iterable[str], own: Sequence[Interface]) -> list[str]:
    """Sort a peer's ``addresses`` (IPv6 link-local ones with ``%scope``) in the order to try them, the likeliest first.

    Addresses in a subnet of an ordinary interface of ours come first, then those behind a router, then those in the
    subnet of a VPN, last those of a bridge of containers or virtual machines, since every machine may have such a
    bridge. Unreachable addresses are omitted: unspecified and multicast addresses, IPv6 link-local ones without a
    scope, and loopback ones unless there are no others.
    """
    ranked: dict[str, tuple[int, int]] = {}
    for text in addresses:
        address = _address(text)
        if address is None or address.is_unspecified or address.is_multicast:
            continue
        if address.version == 6 and address.is_link_local and "%" not in text:
            continue
        ranked[text] = (_rank(text, address, own), _kind(address))
    outside = {text for text in ranked if not ipaddress.ip_address(text).is_loopback}
    return sorted(outside or ranked, key=lambda text: (*ranked[text], text))


def is_virtual(address: str, own: Sequence[Interface]) -> bool:
    """Whether ``address`` is on a VPN or a bridge of containers or virtual machines of this machine."""
    found = _address(address)
    return any(place.rank > 0 and any(found == subnet.ip for subnet in place.addresses) for place in own)


def _rank(text: str, address: Address, own: Sequence[Interface]) -> int:
    """Return 0 for a near address, 1 behind a router, 2 through a VPN, 3 through a bridge."""
    scope = text.partition("%")[2]
    near = [
        place.rank
        for place in own
        if place.up
        and (not scope or scope in (place.name, str(place.index)))
        and any(
            subnet.version == address.version and _unscoped(address) in subnet.network for subnet in place.addresses
        )
    ]
    if near:
        return (0, 2, 3)[min(near)]
    return 3 if address in _DOCKER or address.is_link_local else 1


def _kind(address: Address) -> int:
    """Rank IPv4 first, since most home devices listen on it, and link-local IPv6 last."""
    return 0 if address.version == 4 else 2 if address.is_link_local else 1


def _from_link(address: Address) -> bool:
    """Sorts link-local addresses first: mDNS over IPv6 uses one."""
    return not address.is_link_local


def _leads_nowhere(interfaces: Sequence[Interface], interface: str) -> bool:
    return all(found.is_loopback for found in chosen_interfaces(interfaces, interface))


def _unscoped(address: Address) -> Address:
    return ipaddress.ip_address(str(address).partition("%")[0])


def _bare(text: str) -> Address | None:
    return _address(text.partition("%")[0])


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _subnet(address: str, netmask: str | None) -> Subnet | None:
    """Return the subnet of one address from the system: its scope removed, its mask (None on some systems) as a prefix."""
    bare = address.partition("%")[0]
    try:
        prefix = "" if not netmask else f"/{bin(int(ipaddress.ip_address(netmask))).count('1')}"
        return ipaddress.ip_interface(f"{bare}{prefix}")
    except ValueError:
        return None


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0
