"""An mDNS announcement of a device is a valid peer or ignored."""

from __future__ import annotations

import socket

import pytest
from zeroconf.asyncio import AsyncServiceInfo

from primad.network.peer import MAX_ADDRESSES, SERVICE, Peer, peer_of

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
GOOD = {"device": "desk", "cluster": "home", "role": "worker", "version": "0.1", "protocol": "2", "key": KEY}


def announced(*, port: int | None = 7770, addresses=("192.168.1.20",), **texts) -> Peer | None:
    properties = {key: value for key, value in (GOOD | texts).items() if value is not None}
    return peer_of(
        AsyncServiceInfo(
            SERVICE,
            f"x.{SERVICE}",
            addresses=[socket.inet_pton(socket.AF_INET6 if ":" in it else socket.AF_INET, it) for it in addresses],
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
        protocol=2,
        addresses=("192.168.1.20",),
        port=7770,
        key=KEY,
        pairing=None,
    )


def test_a_key_comes_back_as_it_was_whatever_its_characters():
    for key in (KEY, "a=b:c" * 8, "0:+=^0!/*?0&<>(0)[]{0}@%$0#.-a" + "a" * 10):
        peer = announced(key=key)
        assert peer is not None
        assert peer.key == key


def test_a_device_without_a_key_is_none():
    assert announced(key=None) is None


def test_an_open_code_is_where_to_bring_it():
    peer = announced(pair="7:49152")
    assert peer is not None
    assert peer.pairing == (7, 49152)


def test_a_head_announces_its_http_address_and_the_revision_of_the_announcement():
    peer = announced(role="head", port=8080, http="127.0.0.1", rev="1700000000000", addresses=("10.0.0.2", "fd00::2"))
    assert peer is not None
    assert peer.is_hidden
    assert (peer.listens_at, peer.revision) == (("127.0.0.1:8080",), 1_700_000_000_000)
    for text in ("evil.example", "\x1b[2J", "1.2.3"):
        odd = announced(role="head", http=text, rev="-1")
        assert odd is not None
        assert (odd.http, odd.revision) == ("", 0)
    everywhere = announced(role="head", http="::", addresses=("10.0.0.2", "fd00::2"))
    assert everywhere is not None
    assert everywhere.listens_at == ("10.0.0.2:7770", "[fd00::2]:7770")


def test_a_worker_announces_where_it_relays_requests():
    for api, places in (
        ("127.0.0.1:8080", ("127.0.0.1:8080",)),
        ("0.0.0.0:81", ("10.0.0.2:81",)),
        ("[::]:81", ("10.0.0.2:81", "[fd00::2]:81")),
        ("evil.example:80", ()),
        ("[2J:80", ()),
        ("10.0.0.9", ()),
    ):
        peer = announced(api=api, addresses=("10.0.0.2", "fd00::2"))
        assert peer is not None
        assert (peer.relays_at, peer.listens_at[0]) == (places, "10.0.0.2:7770")


def test_both_kinds_of_addresses_are_kept_with_ipv4_first():
    peer = announced(addresses=("fd00::20", "192.168.1.20", "fe80::1", "0.0.0.0", "224.0.0.1", "127.0.0.1"))
    assert peer is not None
    assert peer.addresses == ("192.168.1.20", "fd00::20")  # a link-local address without a scope is of no use


def test_nobody_makes_us_try_addresses_without_end():
    peer = announced(addresses=[f"10.0.{i // 250}.{i % 250 + 1}" for i in range(500)])
    assert peer is not None
    assert len(peer.addresses) == MAX_ADDRESSES


@pytest.mark.parametrize(
    "changes",
    [
        *({key: None} for key in ("device", "cluster", "role", "protocol")),
        *({"device": name} for name in ("", "a b", "\x1b[2J", "x" * 63, "[red]x", b"\xff")),
        *({"cluster": name} for name in ("", "a/b", "home\n")),
        *({"role": role} for role in ("", "boss", "Worker")),
        *({"protocol": number} for number in ("", "x", "-1", "1.0", "²", "9" * 200)),
        *({"key": key} for key in ("short", "x" * 41, KEY[:39] + "~", KEY[:39] + "\n", b"\xff" * 40)),
        *({"pair": pair} for pair in ("", "7", "7:", ":49152", "7:0", "7:65536", "-7:1", "7:1\n", "12345:1")),
        {"addresses": ()},
        {"addresses": ("fe80::1",)},
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
