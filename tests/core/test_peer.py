"""What a device announces by mDNS is a peer, or nothing."""

from __future__ import annotations

import socket

import pytest
from zeroconf.asyncio import AsyncServiceInfo

from primad.cluster.discovery import SERVICE, Peer, announced_addresses, peer_of
from primad.errors import ClusterError

GOOD = {"device": "desk", "cluster": "home", "role": "worker", "version": "0.1", "protocol": "1"}


def announced(*, port: int | None = 7770, addresses=("192.168.1.20",), **texts) -> Peer | None:
    properties = {key: value for key, value in (GOOD | texts).items() if value is not None}
    return peer_of(
        AsyncServiceInfo(
            SERVICE,
            f"x.{SERVICE}",
            addresses=[socket.inet_aton(address) for address in addresses],
            port=port,
            properties=properties,
        )
    )


def test_a_device_is_what_it_announces():
    assert announced() == Peer(
        device="desk",
        cluster="home",
        role="worker",
        version="0.1",
        protocol=1,
        addresses=("192.168.1.20",),
        port=7770,
    )


@pytest.mark.parametrize(
    "changes",
    [
        *({key: None} for key in ("device", "cluster", "role", "protocol")),
        *({"device": name} for name in ("", "a b", "\x1b[2J", "x" * 63, "[red]x", b"\xff")),
        *({"cluster": name} for name in ("", "a/b", "home\n")),
        *({"role": role} for role in ("", "boss", "Worker")),
        *({"protocol": number} for number in ("", "x", "-1", "1.0", "²", "9" * 200)),
        {"addresses": ()},
        {"port": None},
        {"port": 0},
    ],
)
def test_anything_else_is_no_peer(changes):
    assert announced(**changes) is None


def test_the_version_of_a_peer_can_be_shown():
    peer = announced(version="\x1b[2J" + "9" * 100)
    assert peer is not None
    assert peer.version.isprintable()
    assert len(peer.version) < 50


def test_loopback_announces_itself():
    assert announced_addresses("127.0.0.1") == ["127.0.0.1"]
    assert announced_addresses("localhost") == ["127.0.0.1"]
    assert announced_addresses("127.0.0.9") == ["127.0.0.9"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_everywhere_announces_addresses_that_others_can_reach(host):
    addresses = announced_addresses(host)
    assert addresses
    assert len(addresses) == 1 or not any(address.startswith("127.") for address in addresses)


@pytest.mark.parametrize("host", ["::1", "fe80::1", "a..b", "x" * 70])
def test_a_host_without_an_ipv4_address_cannot_be_announced(host):
    with pytest.raises(ClusterError, match=r"^--host .*: mDNS announces IPv4 addresses, and this has none"):
        announced_addresses(host)
