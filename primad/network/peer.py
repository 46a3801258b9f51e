"""Another device's mDNS announcement, checked; unverified until a connection proves it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from zeroconf.asyncio import AsyncServiceInfo

from primad.errors import printable
from primad.network.addresses import Interface, order_by_likelihood
from primad.settings.config import NAME, is_loopback, join_address, split_address
from primad.trust.identity import is_key

SERVICE: Final = "_primad._tcp.local."
MAX_ADDRESSES: Final = 32
"""Limit of the addresses that are kept of a peer."""
MAX_OF_ONE: Final = 8
"""Limit of announcements with one key whose addresses are tried at a time: anyone can announce any key."""
_NUMBER: Final = re.compile(r"[0-9]{1,9}")
_REVISION: Final = re.compile(r"[0-9]{1,15}")
_PAIR: Final = re.compile(r"([0-9]{1,4}):([0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A device that announces itself. ``role`` is worker or head; ``port`` is its control port (a head's HTTP port).

    ``addresses`` are in the order to try them, link-local IPv6 ones with this machine's scope. ``key`` is the public
    key it claims. ``pairing`` is the channel of the open code and its pairing port. A device that ``is_measuring``
    itself accepts no head yet. ``http`` is the address that a head's HTTP server listens on; empty if an older head
    does not announce it. A worker that relays requests to its head listens for them at ``api`` (``host:port``). Of two
    announcements of one device the one with the higher ``revision`` is newer.
    """

    device: str
    cluster: str
    role: str
    version: str
    protocol: int
    addresses: tuple[str, ...]
    port: int
    key: str
    pairing: tuple[int, int] | None
    is_measuring: bool = False
    http: str = ""
    api: str = ""
    revision: int = 0

    def is_worker_of(self, cluster: str) -> bool:
        """Whether the device works for heads of ``cluster``."""
        return self.cluster == cluster and self.role == "worker"

    @property
    def is_hidden(self) -> bool:
        """Whether the device is a head whose HTTP server listens only to its own machine."""
        return bool(self.http) and is_loopback(self.http)

    @property
    def listens_at(self) -> tuple[str, ...]:
        """Its addresses, as ``host:port``: a worker's for heads, a head's for HTTP. The most reachable one first."""
        return self._places(self.http, self.port)

    @property
    def relays_at(self) -> tuple[str, ...]:
        """The addresses, as ``host:port``, where it relays requests to its head."""
        return self._places(*split_address(self.api)) if self.api else ()

    def _places(self, listening: str, port: int) -> tuple[str, ...]:
        if listening in ("", "::"):
            hosts = self.addresses
        elif listening == "0.0.0.0":
            hosts = tuple(address for address in self.addresses if ":" not in address)
        else:
            hosts = (listening,)
        return tuple(join_address(host, port) for host in hosts)


def peer_of(info: AsyncServiceInfo, own: Sequence[Interface] = ()) -> Peer | None:
    """Return the parsed announcement of a peer, or None if it is not a primad device's.

    ``own`` are this machine's interfaces, which determine the order of the peer's addresses.
    """
    texts = info.decoded_properties
    device, cluster, role, key = (texts.get(name) or "" for name in ("device", "cluster", "role", "key"))
    protocol, pair = texts.get("protocol") or "", texts.get("pair")
    addresses = tuple(order_by_likelihood(info.parsed_scoped_addresses(), own))
    if not NAME.fullmatch(device) or not NAME.fullmatch(cluster) or role not in ("worker", "head"):
        return None
    if not _NUMBER.fullmatch(protocol) or not is_key(key):
        return None
    http, revision = (texts.get("http") or "") if role == "head" else "", texts.get("rev") or ""
    api = (texts.get("api") or "") if role == "worker" else ""
    pairing = _PAIR.fullmatch(pair) if pair else None
    if pair is not None and (pairing is None or not 0 < int(pairing[2]) < 65_536):
        return None
    if not addresses or info.port is None or not 0 < info.port < 65_536:
        return None
    return Peer(
        device=device,
        cluster=cluster,
        role=role,
        version=printable(texts.get("version") or "", 40),
        protocol=int(protocol),
        addresses=addresses[:MAX_ADDRESSES],
        port=info.port,
        key=key,
        pairing=None if pairing is None else (int(pairing[1]), int(pairing[2])),
        is_measuring="measuring" in texts,
        http=http if _is_host(http) else "",
        api=api if _is_place(api) else "",
        revision=int(revision) if _REVISION.fullmatch(revision) else 0,
    )


def _is_place(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return _is_host(host.removeprefix("[").removesuffix("]")) and bool(re.fullmatch(r"[0-9]{1,5}", port))


def _is_host(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
