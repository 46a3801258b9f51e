"""The order of announced addresses, and the order in which a peer's addresses are tried."""

from __future__ import annotations

import ipaddress
import socket
from types import SimpleNamespace

import pytest

from primad.errors import ClusterError
from primad.network import addresses as addresses_module
from primad.network.addresses import (
    MAX_ANNOUNCED,
    Interface,
    is_virtual,
    multicast_addresses,
    order_by_likelihood,
    read_interfaces,
    usable_addresses,
)
from primad.network.own_places import own_hosts


def interface(name: str, index: int, *addresses: str, up: bool = True) -> Interface:
    return Interface(
        name=name, index=index, up=up, addresses=tuple(ipaddress.ip_interface(address) for address in addresses)
    )


LO = interface("lo", 1, "127.0.0.1/8", "::1/128")
ETH = interface("eth0", 2, "192.168.1.20/24", "fd12::20/64", "2001:db8::20/64", "fe80::20/64")
WIFI = interface("wlan0", 3, "192.168.2.20/24", "fe80::21/64")
DOCKER = interface("docker0", 4, "172.17.0.1/16", "fe80::4/64")
VPN = interface("wg0", 5, "10.8.0.2/24")
DEAD = interface("eth1", 6, "192.168.9.20/24", up=False)
EMPTY = interface("ifb0", 7)
ALL = (LO, DOCKER, VPN, ETH, WIFI, DEAD, EMPTY)


def test_every_address_that_others_could_reach_is_usable_the_likeliest_first():
    assert usable_addresses(ALL, "::") == [
        *("192.168.1.20", "fd12::20", "2001:db8::20", "fe80::20"),
        *("192.168.2.20", "fe80::21"),
        "10.8.0.2",
        *("172.17.0.1", "fe80::4"),
    ]


def test_the_addresses_shown_to_people_are_reachable_from_another_machine():
    shown = ["192.168.1.20", "fd12::20", "2001:db8::20", "192.168.2.20", "10.8.0.2"]
    assert own_hosts("::", interfaces=lambda: ALL) == shown
    assert own_hosts("::", interfaces=lambda: (LO, DOCKER)) == ["172.17.0.1", "fe80::4"], "better than none"
    assert own_hosts("127.0.0.1", interfaces=lambda: ALL) == ["127.0.0.1"]


def test_a_listener_on_ipv4_has_no_other_addresses():
    assert usable_addresses(ALL, "0.0.0.0") == ["192.168.1.20", "192.168.2.20", "10.8.0.2", "172.17.0.1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "192.168.1.20", "fd12::20"])
def test_a_listener_on_one_address_has_only_that_one(host):
    assert usable_addresses(ALL, host) == [host]


def test_loopback_only_where_it_is_all_there_is():
    assert usable_addresses((LO, EMPTY, DEAD), "::") == ["127.0.0.1"]
    assert usable_addresses((), "0.0.0.0") == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("wlan0", ["192.168.2.20", "fe80::21"]),
        ("192.168.1.20", ["192.168.1.20"]),
        ("fe80::21%wlan0", ["fe80::21"]),
        ("lo", ["127.0.0.1", "::1"]),
        ("eth1", []),
        ("ifb0", []),
    ],
)
def test_an_interface_leaves_only_its_own(chosen, expected):
    assert usable_addresses(ALL, "::", chosen) == expected


@pytest.mark.parametrize("chosen", ["eth7", "10.9.9.9", "", "eth0 "])
def test_an_interface_that_is_not_there_is_named_with_those_that_are(chosen):
    with pytest.raises(
        ClusterError, match=r"^--interface .*: this machine has no such .*; it has lo, docker0, wg0, eth0"
    ):
        usable_addresses(ALL, "::", chosen)


def test_an_interface_and_another_ones_address_contradict_each_other():
    with pytest.raises(ClusterError, match=r"192\.168\.1\.20 is not an address of it"):
        usable_addresses(ALL, "192.168.1.20", "wlan0")


def test_a_machine_with_many_virtual_interfaces_announces_its_real_addresses():
    pads = [interface(f"br-{i}", 10 + i, f"172.{18 + i}.0.1/16") for i in range(40)]
    found = usable_addresses((*pads, ETH), "::")
    assert len(found) == MAX_ANNOUNCED
    assert found[:4] == ["192.168.1.20", "fd12::20", "2001:db8::20", "fe80::20"]


def test_mdns_is_spoken_on_every_interface_once_over_ipv6():
    assert multicast_addresses(ALL, "::") == [
        *("172.17.0.1", "fe80::4"),
        "10.8.0.2",
        *("192.168.1.20", "fe80::20"),
        *("192.168.2.20", "fe80::21"),
    ]
    assert multicast_addresses(ALL, "::", "wlan0") == ["192.168.2.20", "fe80::21"]
    assert multicast_addresses(ALL, "::", "192.168.2.20") == ["192.168.2.20"]
    assert multicast_addresses(ALL, "fd12::20") == ["192.168.1.20", "fe80::20"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.0.0.9"])
def test_a_listener_on_this_machine_only_uses_loopback_for_mdns(host):
    assert multicast_addresses(ALL, host) == ["127.0.0.1"]


def test_without_a_network_mdns_is_spoken_on_loopback():
    assert multicast_addresses((LO,), "::") == ["127.0.0.1"]
    assert multicast_addresses(ALL, "::", "lo") == ["127.0.0.1"]
    assert multicast_addresses(ALL, "::", "eth1") == []


def test_near_addresses_come_first_and_virtual_ones_last():
    peer = ["172.17.0.1", "10.8.0.9", "8.8.4.4", "fe80::99%2", "fd12::99", "192.168.1.99", "2600::1"]
    assert order_by_likelihood(peer, ALL) == [
        "192.168.1.99",
        "fd12::99",
        "fe80::99%2",
        "8.8.4.4",
        "2600::1",
        "10.8.0.9",
        "172.17.0.1",
    ]


def test_the_usual_docker_subnet_comes_last_also_on_a_machine_without_docker():
    assert order_by_likelihood(["172.17.0.1", "10.0.0.5"], [ETH]) == ["10.0.0.5", "172.17.0.1"]


def test_link_local_addresses_need_the_scope_that_they_have_here():
    assert order_by_likelihood(["fe80::1", "fe80::2%eth0", "fe80::3%3"], ALL) == ["fe80::2%eth0", "fe80::3%3"]
    assert order_by_likelihood(["fe80::2%4", "fe80::3%2"], ALL) == ["fe80::3%2", "fe80::2%4"]  # 4 is docker0


def test_a_subnet_of_a_dead_interface_is_not_near():
    assert order_by_likelihood(["192.168.9.1", "10.0.0.5"], (DEAD, ETH)) == ["10.0.0.5", "192.168.9.1"]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "224.0.0.251", "ff02::fb", "fe80::1", "x", "", "1.2.3.4.5"])
def test_an_address_that_no_device_can_have_is_left_out(address):
    assert order_by_likelihood([address, "192.168.1.5"], ALL) == ["192.168.1.5"]


def test_loopback_is_tried_where_there_is_nothing_else():
    assert order_by_likelihood(["127.0.0.1"], ALL) == ["127.0.0.1"]
    assert order_by_likelihood(["127.0.0.1", "192.168.1.5"], ALL) == ["192.168.1.5"]


def test_virtual_addresses_are_recognised_by_their_interface():
    assert [address for address in usable_addresses(ALL, "::") if is_virtual(address, ALL)] == [
        "10.8.0.2",
        "172.17.0.1",
        "fe80::4",
    ]


def test_addresses_are_read_as_each_system_gives_them(monkeypatch):
    def address(family: int, text: str, netmask: str | None) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text, netmask=netmask)

    found = {
        "Ethernet 2": [
            address(socket.AF_INET, "192.168.1.20", "255.255.254.0"),
            address(socket.AF_INET6, "fe80::1%Ethernet 2", "ffff:ffff:ffff:ffff::"),
            address(socket.AF_INET6, "fd00::1", None),
            address(-1, "02-fc-00-00-00-01", None),
            address(socket.AF_INET, "not one", None),
        ]
    }
    monkeypatch.setattr(addresses_module.psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(addresses_module.psutil, "net_if_stats", lambda: {"Ethernet 2": SimpleNamespace(isup=True)})
    expected = interface("Ethernet 2", 0, "192.168.1.20/23", "fe80::1/64", "fd00::1/128")
    assert read_interfaces() == (expected,)


def test_this_machine_has_a_loopback_interface():
    assert any(found.is_loopback for found in read_interfaces())
