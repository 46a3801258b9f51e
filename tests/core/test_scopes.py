"""A link-local address is sent without its local scope and gets one where it is received."""

from __future__ import annotations

import ipaddress

import pytest

from primad.network.addresses import Interface
from primad.network.contacts import Contact
from primad.network.scopes import MAX_KNOWN, MAX_WAYS, Scopes, bare, needs_scope

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def interface(name: str, index: int, *addresses: str, up: bool = True) -> Interface:
    return Interface(
        name=name, index=index, up=up, addresses=tuple(ipaddress.ip_interface(address) for address in addresses)
    )


LO = interface("lo", 1, "127.0.0.1/8", "::1/128")
PADDING = interface("docker0", 2, "172.17.0.1/16", "fe80::4/64")
ETH = interface("eth0", 3, "192.168.1.20/24", "fe80::20/64")
WIFI = interface("wlan0", 4, "fe80::21/64")
DEAD = interface("eth1", 5, "fe80::22/64", up=False)
NAMED = interface("Ethernet 2", 0, "fe80::23/64")


def scopes(*interfaces: Interface) -> Scopes:
    return Scopes(lambda: interfaces)


@pytest.mark.parametrize(
    ("address", "needed"),
    [
        ("fe80::1", True),
        ("fe80::1%eth0", True),
        ("fe80::1%4", True),
        ("fd00::1", False),
        ("::1", False),
        ("192.168.1.20", False),
        ("169.254.1.1", False),
        ("desk.local", False),
        ("", False),
    ],
)
def test_only_link_local_addresses_of_ipv6_need_a_scope(address, needed):
    assert needs_scope(address) is needed


def test_an_address_is_sent_without_its_scope():
    assert [bare("fe80::1%eth0"), bare("fe80::1"), bare("10.0.0.1")] == ["fe80::1", "fe80::1", "10.0.0.1"]


def test_a_received_address_gets_the_scopes_of_own_interfaces_the_likeliest_first():
    assert scopes(LO, ETH, DEAD).ways("fe80::9") == ["fe80::9%3"]
    assert scopes(PADDING, LO, ETH, WIFI).ways("fe80::9") == ["fe80::9%3", "fe80::9%4", "fe80::9%2"]
    assert scopes(NAMED).ways("fe80::9") == ["fe80::9%Ethernet 2"]


def test_another_machines_scope_means_nothing():
    assert scopes(ETH).ways("fe80::9%7") == ["fe80::9%3"]


def test_a_machine_without_link_local_addresses_takes_the_address_as_it_is():
    assert scopes(LO).ways("fe80::9%7") == ["fe80::9"]


def test_other_addresses_stay_as_they_are():
    known = scopes(ETH, WIFI)
    for reported in ("192.168.1.7", "fd00::7", "desk.local"):
        assert known.ways(reported) == [reported]
    for reported in ("tcp://192.168.1.7:1", "tcp://[fd00::7]:1", "tcp://desk:1", "nonsense", "[fe80::9]:1", ""):
        assert known.endpoints(reported) == [reported]


def test_the_interface_where_a_device_was_met_comes_first():
    known = scopes(ETH, WIFI)
    known.saw("fe80::9%wlan0")
    assert known.ways("fe80::9") == ["fe80::9%wlan0", "fe80::9%3", "fe80::9%4"]
    known.saw("fe80::9%3")
    assert known.ways("fe80::9") == ["fe80::9%3", "fe80::9%4"]


@pytest.mark.parametrize("address", ["fe80::9", "192.168.1.7", "", "nobody%eth0"])
def test_an_address_without_a_scope_reveals_no_interface(address):
    known = scopes(ETH)
    known.saw(address)
    assert known.ways("fe80::9") == ["fe80::9%3"]


def test_no_more_is_remembered_or_tried_than_there_is_room_for():
    known = scopes(*(interface(f"eth{i}", i + 1, "fe80::1/64") for i in range(2 * MAX_WAYS)))
    for i in range(1, MAX_KNOWN + 2):
        known.saw(f"fe80::{i:x}%99")
    assert known.ways("fe80::1")[0] == "fe80::1%1", "the first is forgotten"
    assert known.ways("fe80::2")[0] == "fe80::2%99"
    assert len(known.ways("fe80::2")) == MAX_WAYS


def test_an_endpoint_gets_every_scope_for_its_address():
    assert scopes(ETH, WIFI).endpoints("tcp://[fe80::9]:4711") == ["tcp://[fe80::9%3]:4711", "tcp://[fe80::9%4]:4711"]


def test_a_contact_gets_every_scope():
    (contact,) = scopes(ETH).of_contacts([Contact(device="a", key=KEY, addresses=["10.0.0.1", "fe80::9"], port=1)])
    assert contact.addresses == ["10.0.0.1", "fe80::9%3"]
