"""Multicast on each interface, and the ports."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from primad.doctor.findings import Finding, finding, in_thread
from primad.errors import printable
from primad.network.addresses import Interface, is_virtual, multicast_addresses, read_interfaces
from primad.network.multicast import wait_for_echo
from primad.settings.config import is_loopback

ECHO_TIMEOUT_S: Final = 1.5
_STATIC: Final = "primad serve --model FILE.gguf --device HOST:7770"


@dataclass(frozen=True, slots=True, kw_only=True)
class MulticastAddress:
    """An address to use for mDNS; ``problem`` is "" if what was sent came back."""

    interface: str
    address: str
    virtual: bool
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A TCP port that primad uses for ``purpose``; ``flag`` chooses another.

    ``problem`` is why it is unavailable ("" if it is free), ``owner`` the program that has it, if known. ``wanted``:
    the owner of this device asked for exactly this one.
    """

    number: int
    purpose: str
    flag: str
    problem: str
    owner: str
    wanted: bool


async def gather_places(host: str, interface: str | None) -> list[MulticastAddress]:
    """Try every interface on which a daemon that listens on ``host`` uses mDNS. Raises ``ClusterError``."""
    own = await in_thread(read_interfaces)
    addresses = multicast_addresses(own, host, interface)
    problems = await asyncio.gather(*(wait_for_echo(address, own, ECHO_TIMEOUT_S) for address in addresses))
    return [
        MulticastAddress(
            interface=_name(address, own), address=address, virtual=is_virtual(address, own), problem=problem
        )
        for address, problem in zip(addresses, problems, strict=True)
    ]


def judge_places(places: Sequence[MulticastAddress]) -> list[Finding]:
    """Judge multicast: it must work on one ordinary interface; on VPNs and bridges it may fail."""
    if not places:
        text = "no interface has an address: this machine is not in a network"
        return [finding("multicast", "error", text, "primad doctor --host 127.0.0.1")]
    works = any(not place.problem for place in places)
    found = []
    for place in places:
        where = f"{place.interface} ({place.address})"
        if not place.problem:
            found.append(finding("multicast", "ok", f"{where}: mDNS goes out and comes back"))
        elif place.virtual:
            found.append(
                finding("multicast", "note", f"{where}: no mDNS, as on most VPNs and bridges: {place.problem}")
            )
        elif works:
            text = f"{where}: no mDNS: {place.problem}; devices there are not found"
            found.append(finding("multicast", "warning", text, _STATIC))
        else:
            text = f"{where}: no mDNS: {place.problem}; name devices by their address"
            found.append(finding("multicast", "error", text, _STATIC))
    return found


def gather_ports(host: str, control: int, control_wanted: bool, http: int) -> list[Port]:
    """Try the control port and the HTTP port on ``host`` (HTTP on loopback, the default)."""
    return [
        _port(host, control, "control", "primad join --port", control_wanted),
        _port("127.0.0.1", http, "HTTP", "primad serve --model FILE.gguf --port", False),
    ]


def judge_ports(ports: Sequence[Port]) -> list[Finding]:
    """Judge ports: a port that our own daemon has is as good as a free one."""
    found = []
    for port in ports:
        what = f"{port.purpose} port {port.number}"
        another = f"{port.flag} {port.number + 1 if port.number < 65_535 else 8081}"
        if not port.problem:
            found.append(finding("ports", "ok", f"{what} is free"))
        elif "primad" in port.owner:
            found.append(finding("ports", "ok", f"{what} is taken by primad itself ({port.owner})"))
        else:
            who = f"taken by {port.owner}" if port.owner else f"unavailable: {port.problem}"
            if port.purpose == "control" and not port.wanted:
                text = f"{what} is {who}; primad uses another one, which --device and firewall rules must name"
                found.append(finding("ports", "note", text, another))
            else:
                found.append(finding("ports", "warning", f"{what} is {who}", another))
    return found


def _port(host: str, number: int, purpose: str, flag: str, wanted: bool) -> Port:
    problem = _bind_problem(host, number)
    owner = _listener(number) if problem else ""
    return Port(number=number, purpose=purpose, flag=flag, problem=problem, owner=owner, wanted=wanted)


def _bind_problem(host: str, number: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as found:
            if os.name == "posix":  # elsewhere the option takes the port from any owner
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # like the daemons' sockets: :: is IPv4, too
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind((host, number))
            found.listen(1)
    except OSError as exc:
        return "in use" if exc.errno == errno.EADDRINUSE else exc.strerror or str(exc)
    return ""


def _listener(number: int) -> str:
    """Return the program that listens on port ``number``, with its process number; "" if the system does not say."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or connection.pid is None or not connection.laddr:
                continue
            if connection.laddr.port != number:
                continue
            process = psutil.Process(connection.pid)
            words = process.cmdline()
            ours = any("primad" in word.replace("\\", "/").rsplit("/", 1)[-1] for word in words[:3])
            return f"{'primad' if ours else printable(process.name(), 40)}, process {connection.pid}"
    except psutil.Error:
        return ""
    return ""


def _name(address: str, own: Sequence[Interface]) -> str:
    if is_loopback(address):
        return "loopback"
    return next((it.name for it in own if any(str(place.ip) == address for place in it.addresses)), "?")
