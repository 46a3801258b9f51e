"""Scopes: a link-local IPv6 address is unusable without the name or number of an interface after it.

A scope (``%4``, ``%eth0``) is meaningful on one machine only. So addresses are sent to other devices without it, and
the receiver of a link-local address adds its own scope: that of the interface where it met the address before, or else
of each of its interfaces, the likeliest first.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from ipaddress import IPv6Address, ip_address
from typing import Final

import msgspec

from primad.network.addresses import Interface, read_interfaces
from primad.network.contacts import Contact
from primad.network.sockets import endpoint

MAX_KNOWN: Final = 256
"""The number of link-local addresses whose interface is remembered."""
MAX_WAYS: Final = 8
_TCP: Final = "tcp://"


def bare(address: str) -> str:
    """Return ``address`` without a scope, for other machines."""
    return address.partition("%")[0]


def unmapped(address: str) -> str:
    """Return ``address``, converted to IPv4 if it is an IPv4 address in the form of IPv6."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return address if mapped is None else str(mapped)


def needs_scope(address: str) -> bool:
    """Whether ``address`` is unusable without a scope; it may have one already."""
    try:
        found = ip_address(bare(address))
    except ValueError:
        return False
    return isinstance(found, IPv6Address) and found.is_link_local


async def own_address(host: str, port: int) -> str:
    """Return the address of this device, without a scope, from which packets to ``host`` leave.

    Raises ``OSError`` if ``host`` is not routable.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except UnicodeError as exc:
        raise OSError(f"{host!r} is not the name of a device") from exc
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)  # the whole tuple: for IPv6 it includes the scope
                return bare(str(probe.getsockname()[0]))
        except OSError as exc:
            failure = exc
    raise failure


class Scopes:
    """Remembers the interfaces of link-local addresses. ``interfaces`` reads those of this machine."""

    def __init__(self, interfaces: Callable[[], Sequence[Interface]] = read_interfaces) -> None:
        self._interfaces = interfaces
        self._known: dict[str, str] = {}

    def saw(self, address: str) -> None:
        """Note that a device was met at ``address``, given with its scope if it needs one."""
        if "%" not in address or not needs_scope(address):
            return
        self._known.pop(bare(address), None)
        self._known[bare(address)] = address.partition("%")[2]
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def ways(self, address: str) -> list[str]:
        """Return the variants of ``address``, from another device, that may work from here, the likeliest first."""
        if not needs_scope(address):
            return [address]
        alone = bare(address)
        known = [self._known[alone]] if alone in self._known else []
        scopes = dict.fromkeys([*known, *self._own()])
        return [f"{alone}%{scope}" for scope in scopes][:MAX_WAYS] or [alone]

    def endpoints(self, received: str) -> list[str]:
        """Return the ZeroMQ endpoint ``received`` by another device, with every variant of its address."""
        host, _, port = received.removeprefix(_TCP).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not received.startswith(_TCP) or not needs_scope(host):
            return [received]
        return [endpoint(way, port) for way in self.ways(host)]

    def of_contacts(self, contacts: Sequence[Contact]) -> list[Contact]:
        """Return ``contacts`` with all variants of each address."""
        return [
            msgspec.structs.replace(
                contact, addresses=[way for received in contact.addresses for way in self.ways(received)]
            )
            for contact in contacts
        ]

    def _own(self) -> list[str]:
        """The interfaces that have a link-local address, the likeliest first."""
        usable = [
            found
            for found in self._interfaces()
            if found.up and any(address.version == 6 and address.ip.is_link_local for address in found.addresses)
        ]
        return [str(found.index or found.name) for found in sorted(usable, key=lambda found: found.rank)]
