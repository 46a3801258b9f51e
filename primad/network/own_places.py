"""This machine's names, and its addresses as users may type them on other machines."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from primad.network.addresses import Interface, read_interfaces, resolved_host, usable_addresses
from primad.network.scopes import needs_scope
from primad.settings.config import join_address


def own_names() -> tuple[str, ...]:
    """The names of this machine: its host name, full and without a domain, and its name in mDNS."""
    name = socket.gethostname()
    return tuple(dict.fromkeys((name, name.partition(".")[0], local_name())))


def local_name() -> str:
    """Return this machine's mDNS name, such as ``desk.local``; others find it only if the machine runs a service for
    it."""
    return f"{socket.gethostname().partition('.')[0]}.local"


def own_hosts(
    host: str,
    interface: str | None = None,
    interfaces: Callable[[], Sequence[Interface]] = read_interfaces,
) -> list[str]:
    """Return the addresses of a server here that listens on ``host``, the likeliest first.

    Addresses that are meaningless on another machine are omitted if there are others: link-local ones of IPv6, and
    those of bridges of containers and virtual machines. Raises ``ClusterError`` like ``usable_addresses``.
    """
    own = interfaces()
    usable = usable_addresses(own, resolved_host(host), interface)
    bridged = {str(address.ip) for found in own if found.rank > 1 for address in found.addresses}
    return [address for address in usable if not needs_scope(address) and address not in bridged] or usable


def url_for_clients(host: str, port: int) -> str:
    """The URL of the HTTP server that listens on ``host``: with that address, or the likeliest one for a wildcard."""
    return f"http://{join_address(own_hosts(host)[0] if host in ('0.0.0.0', '::') else host, port)}"
