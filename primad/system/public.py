"""Addresses that primad may fetch for any caller: none that lead to a private network or to this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

_NAT64: Final = ip_network("64:ff9b::/96")


def is_public(text: str, own: Sequence[IPv4Network | IPv6Network] = ()) -> bool:
    """Whether the address ``text`` leads to a public address outside this device's ``own`` networks."""
    return all(
        each.is_global
        and not (each.is_multicast or each.is_reserved or getattr(each, "is_site_local", False))
        and not any(each in network for network in own)
        for each in _meant(ip_address(text.partition("%")[0]))
    )


def _meant(address: IPv4Address | IPv6Address) -> Iterator[IPv4Address | IPv6Address]:
    """The addresses that ``address`` leads to: some IPv6 addresses contain an IPv4 one."""
    if isinstance(address, IPv4Address):
        yield address
    elif address in _NAT64:
        yield IPv4Address(int(address) & 0xFFFFFFFF)
    else:
        yield address
        yield from (each for each in (address.ipv4_mapped, address.sixtofour, *(address.teredo or ())) if each)
