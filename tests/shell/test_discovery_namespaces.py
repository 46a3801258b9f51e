"""Devices in separate network namespaces find each other over a virtual wire: IPv4, IPv6, interfaces that come late or
go.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

PATIENCE_S = 180
_ANNOUNCE = """
import asyncio, sys
from primad.network import discovery
from primad.settings.timings import DiscoveryTimings
often = DiscoveryTimings(look_every_s=0.3)
async def main():
    here = discovery.Discovery(sys.argv[2], timings=often)
    await here.announce(sys.argv[1], cluster="lab", role="worker", version="1", port=7770, key="k" * 40)
    print("announced", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await here.close()
asyncio.run(main())
"""
_BROWSE = """
import asyncio, json, sys
from primad.network import discovery
from primad.settings.timings import DiscoveryTimings
often = DiscoveryTimings(look_every_s=0.3)
async def main():
    here = discovery.Discovery(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None, timings=often)
    def changed(peers):
        print(json.dumps({peer.device: peer.addresses for peer in peers.values()}), flush=True)
    await here.browse(changed)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await here.close()
asyncio.run(main())
"""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=PATIENCE_S)


def _namespaces_work() -> bool:
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"primad-{secrets.token_hex(3)}"
    try:
        _run("ip", "netns", "add", name)
    except (subprocess.SubprocessError, OSError):
        return False
    _run("ip", "netns", "del", name)
    return True


pytestmark = pytest.mark.skipif(not _namespaces_work(), reason="network namespaces need Linux, root and iproute2")


@dataclass(frozen=True)
class Space:
    """A network namespace; ``link`` is its end of the wire."""

    name: str
    link: str

    def ip(self, *words: str) -> None:
        _run("ip", "-n", self.name, *words)

    def addresses(self) -> str:
        """The addresses of the wire's end, as the system prints them."""
        command = ["ip", "-n", self.name, "addr", "show", self.link]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout

    @contextlib.contextmanager
    def python(self, code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Python in the namespace, killed after the block."""
        command = ["ip", "netns", "exec", self.name, sys.executable, "-c", code, *words]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with child:
            try:
                yield child
            finally:
                child.kill()


@pytest.fixture
def spaces() -> Iterator[tuple[Space, Space]]:
    """Two namespaces joined by a wire, whose ends are up with only link-local IPv6 addresses."""
    tag = secrets.token_hex(3)
    made = [Space(f"primad-{tag}-{i}", f"pd{tag}{i}") for i in range(2)]
    try:
        for space in made:
            _run("ip", "netns", "add", space.name)
        ends = [("link", "add", made[0].link, "netns", made[0].name), ("peer", made[1].link, "netns", made[1].name)]
        _run("ip", *ends[0], "type", "veth", "peer", "name", made[1].link, "netns", made[1].name)
        for space in made:
            _run("ip", "netns", "exec", space.name, "sysctl", "-qw", "net.ipv6.conf.all.accept_dad=0")
            _run("ip", "netns", "exec", space.name, "sysctl", "-qw", f"net.ipv6.conf.{space.link}.accept_dad=0")
            space.ip("link", "set", "lo", "up")
            space.ip("link", "set", space.link, "up")
        yield made[0], made[1]
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space.name], check=False, capture_output=True, timeout=PATIENCE_S)


def seen(child: subprocess.Popen[str], until) -> dict[str, list[str]]:
    """The browser's first output that fulfils ``until``; pytest's time limit ends a futile wait."""
    assert child.stdout is not None
    for line in child.stdout:
        peers = json.loads(line)
        if until(peers):
            return peers
    raise AssertionError("the browser ended")


def announced(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "announced\n"


@pytest.mark.timeout(PATIENCE_S)
def test_all_addresses_arrive_with_the_shared_network_first_and_virtual_ones_last(spaces):
    one, two = spaces
    for number, space in enumerate(spaces, 1):
        space.ip("addr", "add", f"10.77.0.{number}/24", "dev", space.link)
        space.ip("addr", "add", f"fd77::{number}/64", "dev", space.link, "nodad")
        space.ip("link", "add", "docker0", "type", "veth", "peer", "name", "veth-end")
        space.ip("addr", "add", "172.17.0.1/16", "dev", "docker0")
        space.ip("link", "set", "docker0", "up")
        space.ip("link", "set", "veth-end", "up")
    with one.python(_ANNOUNCE, "one", "::") as first, two.python(_BROWSE, "::") as second:
        announced(first)
        addresses = seen(second, lambda peers: "one" in peers and any("%" in it for it in peers["one"]))["one"]
    assert addresses[:2] == ["10.77.0.1", "fd77::1"]
    assert addresses[2].startswith("fe80::")
    assert "%" in addresses[2]
    assert "172.17.0.1" not in addresses[:3]


@pytest.mark.timeout(PATIENCE_S)
def test_devices_with_only_link_local_ipv6_find_each_other_and_can_connect(spaces):
    one, two = spaces
    connect = (
        "import socket, sys; host, scope = sys.argv[1].split('%'); "
        "found = socket.create_connection((sys.argv[1], 7770), 5); print('connected')"
    )
    listen = (
        "import socket; found = socket.create_server(('::', 7770), family=socket.AF_INET6); "
        "print('up', flush=True); input()"
    )
    with one.python(_ANNOUNCE, "one", "::") as first, two.python(_BROWSE, "::") as second, one.python(listen) as server:
        announced(first)
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        address = seen(second, lambda peers: "one" in peers)["one"][0]
        assert address.startswith("fe80::")
        with two.python(connect, address) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "connected\n"


@pytest.mark.timeout(PATIENCE_S)
def test_an_interface_that_appears_later_and_changes_its_address_is_followed(spaces):
    one, two = spaces
    two.ip("addr", "add", "10.77.0.2/24", "dev", two.link)
    one.ip("link", "set", one.link, "down")
    with one.python(_ANNOUNCE, "one", "0.0.0.0") as first, two.python(_BROWSE, "0.0.0.0") as second:
        announced(first)
        one.ip("link", "set", one.link, "up")
        one.ip("addr", "add", "10.77.0.1/24", "dev", one.link)
        assert seen(second, lambda peers: "one" in peers)["one"] == ["10.77.0.1"]
        one.ip("addr", "del", "10.77.0.1/24", "dev", one.link)
        one.ip("addr", "add", "10.77.0.3/24", "dev", one.link)
        seen(second, lambda peers: peers.get("one") == ["10.77.0.3"])


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("at_first", ["down", "tentative"])
def test_a_link_local_address_that_becomes_usable_later_is_announced(spaces, at_first):
    """A link-local address is tentative for its first second, so a device that starts with its network has none."""
    one, two = spaces
    one.ip("link", "set", one.link, "down")
    for name, value in (("accept_dad", 1), ("dad_transmits", 5)):
        _run("ip", "netns", "exec", one.name, "sysctl", "-qw", f"net.ipv6.conf.{one.link}.{name}={value}")
    if at_first == "tentative":
        one.ip("link", "set", one.link, "up")
        while "fe80" not in one.addresses():
            continue
    with one.python(_ANNOUNCE, "one", "::") as first, two.python(_BROWSE, "::") as second:
        announced(first)
        one.ip("link", "set", one.link, "up")
        addresses = seen(second, lambda peers: any("%" in it for it in peers.get("one", [])))["one"]
        assert addresses[0].startswith("fe80::")


@pytest.mark.timeout(PATIENCE_S)
def test_only_the_interface_that_the_owner_names_is_searched(spaces):
    one, two = spaces
    one.ip("addr", "add", "10.77.0.1/24", "dev", one.link)
    two.ip("addr", "add", "10.77.0.2/24", "dev", two.link)
    for space in spaces:
        space.ip("link", "add", "spare", "type", "veth", "peer", "name", "spare-end")
        space.ip("addr", "add", "10.99.0.1/24", "dev", "spare")
        space.ip("link", "set", "spare", "up")
        space.ip("link", "set", "spare-end", "up")
    with one.python(_ANNOUNCE, "one", "0.0.0.0") as first, two.python(_BROWSE, "0.0.0.0", two.link) as second:
        announced(first)
        addresses = seen(second, lambda peers: "10.99.0.1" in peers.get("one", []))["one"]
    assert addresses[0] == "10.77.0.1"
