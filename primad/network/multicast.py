"""Checks whether this machine can send multicast through one of its addresses; used before mDNS and by ``primad
doctor``.

One interface without multicast (a VPN, a bridge without carrier) must not disable mDNS on the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from primad.network.addresses import Interface

PORT: Final = 5353
_GROUP: Final = "224.0.0.251"
_GROUP_V6: Final = "ff02::fb"
_HOPS: Final = 255
_TYPE_PTR: Final = 12
_CLASS_IN: Final = 1


def can_multicast(address: str, own: Sequence[Interface]) -> bool:
    """Whether the mDNS group can be joined through ``address``, one of this machine's; nothing is sent."""
    try:
        with _joined(address, own, port=0):
            return True
    except OSError:
        return False


async def wait_for_echo(address: str, own: Sequence[Interface], timeout_s: float) -> str:
    """Query a name that no device has, through ``address``, and wait until the query comes back to this machine.

    The query passes the firewall for incoming packets on its way. Returns "" if it came back, else the reason in a few
    words.
    """
    name = f"doctor-{secrets.token_hex(8)}"
    question = _question(name)
    loop = asyncio.get_running_loop()
    try:
        with _joined(address, own, port=PORT) as found:
            found.setblocking(False)
            target = (_GROUP, PORT) if found.family == socket.AF_INET else (_GROUP_V6, PORT, 0, _index(address, own))
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendto(found, question, target)
                while name.encode() not in (await loop.sock_recvfrom(found, 9000))[0]:
                    continue
    except TimeoutError:
        return f"what is sent does not come back within {timeout_s:g} s"
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


@contextlib.contextmanager
def _joined(address: str, own: Sequence[Interface], *, port: int) -> Iterator[socket.socket]:
    """Return a UDP socket that sends to and receives from the mDNS group through ``address``; with ``port`` 0 only as a
    test.

    Raises ``OSError``.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET:
            group = socket.inet_aton(_GROUP) + socket.inet_aton(address)
            found.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
            found.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
            found.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, struct.pack("B", 1))
            found.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, struct.pack("B", _HOPS))
        else:
            index = struct.pack("@I", _index(address, own))
            group = socket.inet_pton(socket.AF_INET6, _GROUP_V6) + index
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, _HOPS)
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if port:
            found.bind(("", port))
        elif family == socket.AF_INET:
            found.bind((address, 0))
        else:
            found.bind((address, 0, 0, _index(address, own) if address.startswith("fe80") else 0))
        yield found


def _question(name: str) -> bytes:
    """One mDNS question for the pointers of ``name``._primad._tcp.local."""
    labels = b"".join(bytes([len(part)]) + part.encode() for part in (name, "_primad", "_tcp", "local"))
    return struct.pack(">6H", 0, 0, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", _TYPE_PTR, _CLASS_IN)


def _index(address: str, own: Sequence[Interface]) -> int:
    """Return the index of the interface that has ``address``; 0, with which the system chooses, if it has none."""
    wanted = ipaddress.ip_address(address)
    return next((found.index for found in own if any(wanted == place.ip for place in found.addresses)), 0)
